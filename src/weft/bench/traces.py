"""Traces for the simulator: who asks for which adapter, when, how much. Pure, with given seeds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from weft.bench.workload import Arrival, Lengths, rng_of, zipf
from weft.core.errors import ConfigError

NUM_TENANTS = 8
CROWD = 100
"""Tenants in the trace `crowd`."""
CROWD_RATE = 10.0
"""How many times as fast as in other traces requests come there."""
BURST = 16
"""Requests that come at once in the trace `bursts`."""
FLOOD_SHARE, FLOOD_AT = 0.5, 0.25
"""In the trace `flood` the first tenant sends this share of the requests at once, at this share of
the time in which the others send theirs."""
PROMPT, OUTPUT = Lengths(16, 1024, 5.2, 0.8), Lengths(8, 256, 3.6, 0.7)
"""Lengths of prompts and answers in tokens, with means of 230 and 47."""


@dataclass(frozen=True, slots=True)
class Ask:
    """One request."""

    arrival_s: float
    adapter: int
    tenant: int
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Trace:
    name: str
    ranks: tuple[int, ...]
    """The rank of each adapter."""
    asks: tuple[Ask, ...]
    """The requests in the order of their arrival."""


@dataclass(frozen=True, slots=True)
class TraceKind:
    """How requests choose adapters and times.

    `zipf:EXPONENT` asks for adapter k in proportion to (k+1)^-EXPONENT. `uniform` asks for all
    alike. In `bursts` 16 requests come at once, and half of them ask for one adapter that is new
    each time. In `flood` the first of 8 tenants sends half of all requests at once. In `crowd`
    100 tenants send ten times as many as are served; half of them have answers a quarter as
    long, the others prompts. Adapter k belongs to tenant k % 8, in `crowd` to tenant k % 100.
    """

    name: str
    kind: Literal["zipf", "bursts", "flood", "crowd"]
    exponent: float

    @classmethod
    def parse(cls, text: str) -> TraceKind:
        """Parse what the command line says. Raises ConfigError."""
        kind, _, number = text.strip().partition(":")
        match kind, number:
            case "zipf", _ if _is_exponent(number):
                return cls(text.strip(), "zipf", float(number))
            case "uniform", "":
                return cls("uniform", "zipf", 0.0)
            case (("bursts" | "flood"), ""):
                return cls(kind, "bursts" if kind == "bursts" else "flood", 1.0)
            case "crowd", "":
                return cls(kind, "crowd", 0.0)
        wanted = "a list of zipf:EXPONENT, uniform, bursts, flood, crowd"
        raise ConfigError(f"--trace takes {wanted}; got {text!r}", "trace")

    def draw(
        self, num_adapters: int, ranks: tuple[int, ...], count: int, rate: float, seed: int
    ) -> Trace:
        """Draw `count` requests, `rate` of them per second, for adapters whose ranks are drawn from
        `ranks`."""
        adapters = zipf(count, num_adapters, self.exponent, rng_of(seed, 0))
        times = Arrival("poisson", rate).times_s(count, rng_of(seed, 1))
        if self.kind == "bursts":
            times = Arrival("bursty", rate, BURST).times_s(count, rng_of(seed, 1))
            _make_hot(adapters, num_adapters, rng_of(seed, 2))
        elif self.kind == "flood":
            _flood(adapters, times, num_adapters, rng_of(seed, 2))
        prompts = PROMPT.draw(count, rng_of(seed, 3))
        outputs = OUTPUT.draw(count, rng_of(seed, 4))
        num_tenants = NUM_TENANTS
        if self.kind == "crowd":
            num_tenants = CROWD
            times = [t / CROWD_RATE for t in times]
            prompts = [n // 4 + 1 if k % 2 else n for k, n in zip(adapters, prompts, strict=True)]
            outputs = [n if k % 2 else n // 4 + 1 for k, n in zip(adapters, outputs, strict=True)]
        asks = [
            Ask(t, k, k % num_tenants, prompt, output)
            for t, k, prompt, output in zip(times, adapters, prompts, outputs, strict=True)
        ]
        of_adapter = rng_of(seed, 5).choice(np.array(ranks), num_adapters)
        return Trace(
            self.name,
            tuple(int(r) for r in of_adapter),
            tuple(sorted(asks, key=lambda ask: ask.arrival_s)),
        )


def _is_exponent(text: str) -> bool:
    try:
        return 0.0 <= float(text) < float("inf")
    except ValueError:
        return False


def _make_hot(adapters: list[int], num_adapters: int, rng: np.random.Generator) -> None:
    """Let every second request of a burst ask for the burst's own adapter."""
    for start in range(0, len(adapters), BURST):
        hot = int(rng.integers(num_adapters))
        for index in range(start, min(start + BURST, len(adapters)), 2):
            adapters[index] = hot


def _flood(
    adapters: list[int], times: list[float], num_adapters: int, rng: np.random.Generator
) -> None:
    """Give a random share of the requests to the first tenant, all at one time."""
    taken = rng.permutation(len(adapters))[: int(FLOOD_SHARE * len(adapters))]
    own = -(-num_adapters // NUM_TENANTS)
    flood_s = FLOOD_AT * times[-1]
    for index in taken:
        adapters[index] = adapters[index] % own * NUM_TENANTS
        times[index] = flood_s

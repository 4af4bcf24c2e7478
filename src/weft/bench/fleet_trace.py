"""Who asks a simulated fleet for what, and when. Pure: seeds are arguments.

Each adapter has a prompt of its own, with which all its requests begin. Half of the requests
continue an earlier one: their prompt begins with that one's prompt and answer.
"""

from __future__ import annotations

import math
from bisect import bisect
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from weft.bench.workload import rng_of
from weft.core.errors import ConfigError

OWN_PROMPT = 512
"""Tokens of an adapter's own prompt."""
NEW_TOKENS = 160.0
"""The median length of what a user adds; log-normal with a sigma of 0.7."""
LONGEST_PROMPT = 6000
LONGEST_ANSWER = 2000
PAUSE_S, LEAVES_S = 5.0, 30.0
"""A user continues a session PAUSE_S after the last request at the earliest, and LEAVES_S after it
at the latest."""
BURST_EACH_S, BURST_S, BURST_TIMES = 10.0, 1.0, 3.0
"""In `bursts`, the rate is BURST_TIMES the mean for BURST_S in the middle of every BURST_EACH_S,
and lower in between."""


@dataclass(frozen=True, slots=True)
class FleetAsk:
    """One request. Its prompt is OWN_PROMPT tokens of its adapter, and then the session's."""

    arrival_s: float
    adapter: int
    prompt_tokens: int
    output_tokens: int
    session: int


@dataclass(frozen=True, slots=True)
class FleetTrace:
    """How popular adapters are, and how the rate changes.

    `zipf:EXPONENT` and `uniform` say how popular adapters are; the rate is constant. In `bursts`
    (Zipf 1.0) three times as many requests come for a second of every 10. In `day` (Zipf 1.0) the
    rate goes from a fifth of its peak up to it and down again, as a cosine; in `ramp` (Zipf 1.5)
    it rises from nothing to its peak and falls again, evenly.
    """

    name: str
    exponent: float
    shape: str

    @classmethod
    def parse(cls, text: str) -> FleetTrace:
        """Parse what the command line says. Raises ConfigError."""
        kind, _, number = text.strip().partition(":")
        try:
            exponent = float(number or 0)
        except ValueError:
            exponent = -1.0
        if kind == "zipf" and number and 0 <= exponent < math.inf:
            return cls(text.strip(), exponent, "constant")
        shapes = {"uniform": (0.0, "constant"), "bursts": (1.0, "bursts")}
        shapes |= {"day": (1.0, "day"), "ramp": (1.5, "ramp")}
        if number or kind not in shapes:
            wanted = "a list of zipf:EXPONENT, uniform, bursts, day, ramp"
            raise ConfigError(f"--trace takes {wanted}; got {text!r}", "trace")
        return cls(kind, *shapes[kind])

    def rate(self, peak: float, seconds: float) -> Callable[[float], float]:
        """Requests per second by time."""
        if self.shape == "bursts":
            between = (BURST_EACH_S - BURST_S * BURST_TIMES) / (BURST_EACH_S - BURST_S)
            calm = peak * between
            began_s = BURST_EACH_S / 2
            return lambda t: (
                peak * BURST_TIMES if 0 <= t % BURST_EACH_S - began_s < BURST_S else calm
            )
        if self.shape == "day":
            return lambda t: peak * (0.6 - 0.4 * math.cos(2 * math.pi * t / seconds))
        if self.shape == "ramp":
            return lambda t: peak * (1 - abs(2 * t / seconds - 1))
        return lambda t: peak

    def draw(
        self, num_adapters: int, peak: float, seconds: float, answer: float, seed: int
    ) -> list[FleetAsk]:
        """Draw the requests of so many seconds, in the order of their arrival. `peak`: requests
        per second at most, but for bursts. `answer`: mean tokens of an answer."""
        rng = rng_of(seed, 0)
        rate = self.rate(peak, seconds)
        most = peak * (BURST_TIMES if self.shape == "bursts" else 1.0)
        popularity = np.arange(1, num_adapters + 1, dtype=np.float64) ** -self.exponent
        rng.shuffle(popularity)
        count = rng.poisson(most * seconds)
        times = np.sort(rng.uniform(0, seconds, count))
        kept = rng.uniform(0, most, count) < np.array([rate(float(t)) for t in times])
        times = times[kept]
        count = len(times)
        adapters = rng.choice(num_adapters, count, p=popularity / popularity.sum())
        new = rng.lognormal(math.log(NEW_TOKENS), 0.7, count).clip(8, 2000).astype(int)
        outputs = rng.geometric(1 / answer, count).clip(1, LONGEST_ANSWER)
        goes_on, chosen = rng.uniform(size=count) < 0.5, rng.uniform(size=count)
        asks: list[FleetAsk] = []
        earlier: dict[int, deque[FleetAsk]] = {}
        for k in range(count):
            adapter, arrival_s = int(adapters[k]), float(times[k])
            asked = earlier.setdefault(adapter, deque())
            while asked and asked[0].arrival_s < arrival_s - LEAVES_S:
                asked.popleft()
            session, prompt = len(asks), OWN_PROMPT + int(new[k])
            ready = bisect(asked, arrival_s - PAUSE_S, key=lambda each: each.arrival_s)
            if goes_on[k] and ready:
                last = asked[which := int(chosen[k] * ready)]
                del asked[which]
                longer = last.prompt_tokens + last.output_tokens + int(new[k])
                if longer <= LONGEST_PROMPT:
                    session, prompt = last.session, longer
            asks.append(FleetAsk(arrival_s, adapter, prompt, int(outputs[k]), session))
            asked.append(asks[-1])
        return asks

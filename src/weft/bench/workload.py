"""What benchmarks ask for: who uses which adapter, how long, and when. Pure, with given seeds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar, cast, get_args

import numpy as np

from weft.core.errors import ConfigError

Pattern = Literal["none", "identical", "uniform", "skewed", "distinct"]
PATTERNS: tuple[Pattern, ...] = get_args(Pattern)
SKEW = 1.5
"""The Zipf exponent of the pattern `skewed`."""

MAX_COUNT = 10_000_000
"""How many there may be of anything. More would fill the memory before anything is measured."""

T = TypeVar("T", bound=str)


def rng_of(seed: int, *stream: int) -> np.random.Generator:
    """A random generator for one purpose. Draws of different `stream`s do not shift each other."""
    return np.random.default_rng([seed, *stream])


# -- adapters --------------------------------------------------------------------------------------


def adapters_in_batch(pattern: Pattern, batch: int) -> int:
    """How many adapters a batch draws from: none 0, identical 1, uniform ceil(sqrt(batch)), skewed
    and distinct as many as there are requests."""
    sizes = {"none": 0, "identical": 1, "uniform": math.ceil(math.sqrt(batch))}
    return sizes.get(pattern, batch)


def most_adapters(patterns: Sequence[Pattern], batches: Sequence[int]) -> int:
    """The most adapters that any of the batches draws from."""
    return max(adapters_in_batch(pattern, batch) for pattern in patterns for batch in batches)


def assign(
    pattern: Pattern, count: int, num_adapters: int, rng: np.random.Generator
) -> list[int | None]:
    """The adapter of each of `count` requests by number, in random order. None is the base.

    The pattern none gives the base, and identical gives adapter 0. Uniform and distinct take all
    adapters equally often. Skewed draws adapter k with a probability proportional to (k+1)^-SKEW.
    """
    if pattern == "none":
        return [None] * count
    if pattern == "identical":
        return [0] * count
    if pattern == "skewed":
        return list(zipf(count, num_adapters, SKEW, rng))
    return [int(k) for k in rng.permutation(np.arange(count) % num_adapters)]


def zipf(count: int, size: int, exponent: float, rng: np.random.Generator) -> list[int]:
    """Draw `count` numbers below `size`, k with a probability proportional to (k+1)^-exponent."""
    weights = np.arange(1, size + 1, dtype=np.float64) ** -exponent
    return [int(k) for k in rng.choice(size, count, p=weights / weights.sum())]


@dataclass(frozen=True, slots=True)
class Choice:
    """How requests choose among models: `zipf:EXPONENT`, `uniform` or `round-robin`."""

    kind: Literal["zipf", "uniform", "round-robin"]
    exponent: float = 0.0

    @classmethod
    def parse(cls, text: str) -> Choice:
        """Parse what the command line says. Raises ConfigError."""
        kind, numbers = _split(text, "choice")
        if kind == "zipf" and len(numbers) == 1 and numbers[0] >= 0:
            return cls("zipf", numbers[0])
        if kind in ("uniform", "round-robin") and not numbers:
            return cls(cast(Literal["uniform", "round-robin"], kind))
        raise _refused("choice", text, "zipf:EXPONENT, uniform or round-robin")

    def draw(self, count: int, size: int, rng: np.random.Generator) -> list[int]:
        if self.kind == "round-robin":
            return [i % size for i in range(count)]
        return zipf(count, size, self.exponent, rng)


# -- lengths ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Lengths:
    """A distribution of lengths in tokens: `N`, `uniform:LOW,HIGH` or
    `lognormal:MU,SIGMA,LOW,HIGH` (mu and sigma of the natural logarithm, clipped)."""

    low: int
    high: int
    """Both bounds are included."""
    mu: float | None = None
    """None means a uniform distribution."""
    sigma: float = 0.0

    @classmethod
    def parse(cls, text: str, param: str) -> Lengths:
        """Parse what the command line says. Raises ConfigError naming `param`."""
        kind, numbers = _split(text if ":" in text else f"fixed:{text}", param)
        match kind, numbers:
            case "fixed", [value]:
                found = cls(_whole(value), _whole(value))
            case "uniform", [low, high]:
                found = cls(_whole(low), _whole(high))
            case "lognormal", [mu, sigma, low, high]:
                found = cls(_whole(low), _whole(high), mu, sigma)
            case _:
                found = cls(0, 0)
        if not 1 <= found.low <= found.high or found.sigma < 0:
            wanted = "N, uniform:LOW,HIGH or lognormal:MU,SIGMA,LOW,HIGH with 1 <= LOW <= HIGH"
            raise _refused(param, text, wanted)
        return found

    def draw(self, count: int, rng: np.random.Generator) -> list[int]:
        if self.mu is None:
            return [int(n) for n in rng.integers(self.low, self.high + 1, count)]
        drawn = np.rint(rng.lognormal(self.mu, self.sigma, count))
        return [int(n) for n in np.clip(drawn, self.low, self.high)]


def check_lengths(input_len: Lengths, output_len: Lengths, max_model_len: int) -> None:
    """Raises ConfigError if the longest request can't fit into the model's context."""
    longest = input_len.high + output_len.high
    if longest > max_model_len:
        raise ConfigError(
            f"requests may take {longest} tokens, more than the context of {max_model_len};"
            " choose a shorter --input-len or --output-len",
            "input_len",
        )


def random_prompts(
    lengths: Sequence[int], low: int, high: int, rng: np.random.Generator
) -> list[list[int]]:
    """Random prompts with token ids in [low, high)."""
    return [[int(i) for i in rng.integers(low, high, n)] for n in lengths]


# -- arrivals --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Arrival:
    """When requests are sent.

    `poisson:RATE` a second; `bursty:RATE,BURST`: bursts of BURST at once, RATE requests a second
    all in all; `all` at once; `closed:CONCURRENCY`: each of so many users asks again when answered.
    """

    kind: Literal["poisson", "bursty", "all", "closed"]
    rate: float = 0.0
    burst: int = 1
    concurrency: int = 0

    @classmethod
    def parse(cls, text: str) -> Arrival:
        """Parse what the command line says. Raises ConfigError."""
        match _split(text, "arrival"):
            case "poisson", [rate] if rate > 0:
                return cls("poisson", rate)
            case "bursty", [rate, burst] if rate > 0 and _whole(burst) >= 1:
                return cls("bursty", rate, _whole(burst))
            case "all", []:
                return cls("all")
            case "closed", [concurrency] if _whole(concurrency) >= 1:
                return cls("closed", concurrency=_whole(concurrency))
        raise _refused(
            "arrival", text, "poisson:RATE, bursty:RATE,BURST, all or closed:CONCURRENCY"
        )

    def times_s(self, count: int, rng: np.random.Generator) -> list[float]:
        """When each request is to be sent, in rising seconds from the start. A closed loop has no
        such times."""
        assert self.kind != "closed"
        if self.kind == "all":
            return [0.0] * count
        num_bursts = -(-count // self.burst)
        starts = np.cumsum(rng.exponential(self.burst / self.rate, num_bursts))
        return [float(t) for t in np.repeat(starts, self.burst)[:count]]


# -- lists on the command line ---------------------------------------------------------------------


def parse_counts(text: str, param: str) -> tuple[int, ...]:
    """Parse counts such as `1,8,32`, from 1 to MAX_COUNT, in rising order. Raises ConfigError."""
    try:
        counts = sorted({int(part) for part in text.split(",")})
    except ValueError:
        counts = [0]
    if counts[0] < 1 or counts[-1] > MAX_COUNT:
        raise _refused(param, text, f"numbers from 1 to {MAX_COUNT:,}, such as 1,8,32")
    return tuple(counts)


def parse_names(text: str, known: Sequence[T], param: str) -> tuple[T, ...]:
    """Parse names out of `known`, and return them in its order. Raises ConfigError."""
    names = {part.strip() for part in text.split(",")}
    if not names <= set(known):
        raise _refused(param, text, f"a list of {', '.join(known)}")
    return tuple(name for name in known if name in names)


def _split(text: str, param: str) -> tuple[str, list[float]]:
    kind, _, rest = text.partition(":")
    try:
        numbers = [float(part) for part in rest.split(",")] if rest else []
    except ValueError:
        numbers = [math.nan]
    if not all(map(math.isfinite, numbers)):
        raise ConfigError(f"--{_flag(param)} {text!r}: {rest!r} is not made of numbers", param)
    return kind, numbers


def _whole(number: float) -> int:
    """The number as an integer, or -1, which nothing takes, if it is not whole."""
    return int(number) if number.is_integer() else -1


def _refused(param: str, text: str, wanted: str) -> ConfigError:
    return ConfigError(f"--{_flag(param)} takes {wanted}; got {text!r}", param)


def _flag(param: str) -> str:
    return param.replace("_", "-")

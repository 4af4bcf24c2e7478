"""Runs an engine in this thread: submits requests at given times, and notes when answers come."""

from __future__ import annotations

import contextlib
import gc
import itertools
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from queue import Empty, SimpleQueue

from weft.checkpoint.pack import AdapterImage
from weft.core.adapters import AdapterRef, AdapterSource
from weft.core.config import engine_args
from weft.core.errors import from_wire
from weft.core.messages import Hold, Reply, Report, Tokens
from weft.core.requests import EngineRequest, TokenEvent
from weft.core.sampling import SamplingParams
from weft.engine.build import build_engine
from weft.engine.engine import Engine
from weft.engine.serve import WAIT_S, settle_process

BENCH = "bench"
"""Who holds the adapters of a run."""


@dataclass(frozen=True, slots=True)
class Job:
    """A greedy request with an output of exactly this many tokens."""

    prompt_ids: list[int]
    num_tokens: int
    adapter: AdapterRef | None = None
    due_s: float = 0.0
    """When it is submitted, in seconds from the run's start."""


@dataclass(slots=True)
class Timed:
    """How a job went. Times in seconds from the run's start."""

    due_s: float
    resident: bool = True
    """Whether its adapter was on the device when it was submitted."""
    num_cached: int = 0
    """Prompt tokens that came from the prefix cache."""
    token_ids: list[int] = field(default_factory=list)
    token_s: list[float] = field(default_factory=list)

    @property
    def first_s(self) -> float:
        """Seconds from when it was due to its first token."""
        return self.token_s[0] - self.due_s

    @property
    def gaps_s(self) -> list[float]:
        """Seconds between its tokens."""
        return [b - a for a, b in pairwise(self.token_s)]

    @property
    def per_token_s(self) -> float | None:
        """Mean time per token after the first; None if there is none."""
        later = len(self.token_s) - 1
        return (self.token_s[-1] - self.token_s[0]) / later if later else None


class Driver:
    """Runs jobs on an engine; see `driving`."""

    def __init__(self, engine: Engine, wakeups: SimpleQueue[None]) -> None:
        self.engine = engine
        self._wakeups = wakeups
        self._ids = itertools.count()

    def run(
        self,
        jobs: Sequence[Job],
        on_finished: Callable[[], None] = lambda: None,
        on_step: Callable[[float], None] = lambda _: None,
    ) -> list[Timed]:
        """Until all jobs have ended; theirs in that order. `due_s` must not fall.

        `on_step` is called before each step with the time. Raises WeftError if a job fails.
        """
        timed = [Timed(job.due_s) for job in jobs]
        open_jobs: dict[str, Timed] = {}
        coming = iter(zip(jobs, timed, strict=True))
        following = next(coming, None)
        started = time.perf_counter()
        while following or open_jobs:
            now = time.perf_counter() - started
            on_step(now)
            if following and following[0].due_s <= now:
                resident = set(self.engine.stats().resident_adapters)
                while following and following[0].due_s <= now:
                    open_jobs |= self._submit(*following, resident)
                    following = next(coming, None)
            wake_s = following[0].due_s - now if following else WAIT_S
            for event in self._events(wake_s):
                self._take(event, open_jobs, time.perf_counter() - started, on_finished)
        return timed

    def publish(self, image: AdapterImage) -> AdapterRef:
        info = self.engine.hold_image(image, BENCH)
        return AdapterRef(info.digest, 1, info.digest)

    def register(self, path: str) -> AdapterRef:
        """Register the adapter in a folder. Raises AdapterError."""
        call_id = next(self._ids)
        self.engine.apply(Hold(call_id, AdapterSource(path), BENCH))
        while True:
            for report in self._step(WAIT_S):
                if isinstance(report, Reply) and report.call_id == call_id:
                    if report.error is not None:
                        raise from_wire(report.error)
                    assert report.info is not None
                    return AdapterRef(path, 1, report.info.digest)

    def _submit(self, job: Job, timed: Timed, resident: set[str]) -> dict[str, Timed]:
        request_id = str(next(self._ids))
        timed.resident = job.adapter is None or job.adapter.digest in resident
        params = SamplingParams(max_tokens=job.num_tokens, temperature=0.0, ignore_eos=True)
        refused = self.engine.submit(
            EngineRequest(request_id, job.prompt_ids, params, job.adapter, seed=0)
        )
        if refused is not None and refused.error is not None:
            raise from_wire(refused.error)
        return {request_id: timed}

    def _events(self, wake_s: float) -> Iterator[TokenEvent]:
        for report in self._step(wake_s):
            if isinstance(report, Tokens):
                yield from report

    def _step(self, wake_s: float) -> list[Report]:
        reports = self.engine.step()
        if not self.engine.working and not reports:
            with contextlib.suppress(Empty):
                self._wakeups.get(timeout=min(max(wake_s, 1e-4), WAIT_S))
        return reports

    def _take(
        self,
        event: TokenEvent,
        open_jobs: dict[str, Timed],
        now: float,
        on_finished: Callable[[], None],
    ) -> None:
        timed = open_jobs[event.request_id]
        timed.num_cached = max(timed.num_cached, event.num_cached_tokens)
        timed.token_ids += event.token_ids
        timed.token_s += [now] * len(event.token_ids)
        if event.error is not None:
            raise from_wire(event.error)
        if event.finish_reason is not None:
            del open_jobs[event.request_id]
            on_finished()


@contextmanager
def driving(model: str, **options: object) -> Iterator[Driver]:
    """An engine that is closed at the end, as if the process were its own. Raises ConfigError."""
    wakeups: SimpleQueue[None] = SimpleQueue()
    engine = build_engine(engine_args(model, **options), wake=lambda: wakeups.put(None))
    interval = sys.getswitchinterval()
    settle_process()
    try:
        yield Driver(engine, wakeups)
    finally:
        engine.close()
        gc.unfreeze()
        sys.setswitchinterval(interval)

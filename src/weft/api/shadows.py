"""Repeats requests on a shadow version of their adapter, to compare it, and discards the answers.

A shadow starts when the answer is complete, if few requests are open. When more come, all end.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import replace
from itertools import takewhile

from weft.api.admission import Admission
from weft.core.adapters import AdapterRef
from weft.core.duty import end_tasks
from weft.core.errors import WeftError
from weft.core.messages import EngineClient
from weft.core.requests import EngineRequest
from weft.metrics.shadows import ShadowCounters
from weft.registry import Access, AdapterRegistry, Caller
from weft.serving import Intake, Language
from weft.serving.follower import Follower, version_name

MAX_SHADOWS = 16
"""Shadows that run at a time."""


class Shadows:
    """Runs shadows, and counts how they compare. For one event loop."""

    def __init__(
        self,
        engine: EngineClient,
        registry: AdapterRegistry,
        follower: Follower,
        intake: Intake,
        admission: Admission,
        counters: ShadowCounters,
        max_open: int,
    ) -> None:
        """While more than `max_open` requests are open, no shadow runs."""
        self._engine = engine
        self._registry = registry
        self._follower = follower
        self._intake = intake
        self._admission = admission
        self._counters = counters
        self._max_open = max_open
        self._running: dict[asyncio.Task[None], str] = {}
        """The name of each shadow's adapter."""

    def number_of(self, ref: AdapterRef | None) -> int | None:
        """The number of the shadow of the version that answers a request, if there is one."""
        entry = self._follower.names.entry(ref.bare) if ref is not None else None
        if ref is None or entry is None or entry.route.shadow is None:
            return None
        routed = any(ref.version == share.number for share in entry.route.shares)
        return entry.route.shadow if routed else None

    def make_room(self) -> None:
        """End all shadows if there are too many other requests."""
        if self._running and self._admission.num_open > self._max_open:
            for task in self._running:
                task.cancel()

    def begin(
        self,
        number: int,
        request: EngineRequest,
        language: Language,
        token_ids: Sequence[int],
        took_s: float,
    ) -> None:
        """Run a request once more, on the version of this number. Its answer had `token_ids`, and
        took so many seconds."""
        assert request.adapter is not None
        name = request.adapter.bare
        if len(self._running) >= MAX_SHADOWS or self._admission.num_open > self._max_open:
            self._counters.ended(name, "dropped")
            return
        work = self._run(name, number, request, language, list(token_ids), took_s)
        task = asyncio.create_task(work)
        self._running[task] = name
        task.add_done_callback(self._ended)

    async def close(self) -> None:
        await end_tasks(self._running)

    def _ended(self, task: asyncio.Task[None]) -> None:
        name = self._running.pop(task)
        failed = not task.cancelled() and task.exception() is not None
        outcome = "dropped" if task.cancelled() else "failed" if failed else "done"
        self._counters.ended(name, outcome)

    async def _run(
        self,
        name: str,
        number: int,
        request: EngineRequest,
        language: Language,
        routed_ids: list[int],
        routed_s: float,
    ) -> None:
        await self._follower.load(name, number)
        access = Access(self._registry, Caller(), self._follower.names)
        with self._intake.pin(access, version_name(name, number)) as pinned:
            if pinned.language.tokenizer is not language.tokenizer:
                raise WeftError("the shadow has another tokenizer, so its tokens can't be compared")
            shadow = replace(
                request,
                request_id=f"{request.request_id}-shadow",
                adapter=pinned.lease.ref,
                params=replace(request.params, logprobs=None, prompt_logprobs=None),
                eos_token_ids=pinned.language.eos_ids,
            )
            ids: list[int] = []
            start_s = time.monotonic()
            async with aclosing(self._engine.generate(shadow)) as events:
                async for event in events:
                    ids += event.token_ids
                    if event.error is not None:
                        raise WeftError(event.error[1])
                    if len(ids) >= len(routed_ids) and request.params.stop:
                        break  # the routed one may have ended at a text, which only its reader sees
        took_s = time.monotonic() - start_s
        self._counters.compared(name, (len(routed_ids), len(ids)), (routed_s, took_s))
        if request.params.temperature == 0:
            pairs = zip(ids, routed_ids, strict=False)
            same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
            self._counters.agreed(name, same, len(ids) - same)

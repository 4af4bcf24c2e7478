"""Very many requests while adapters come, go, change under their names and are evicted.

Every answer must be that of the very version which its request had pinned. Room is scarce in all
tiers, prompts share their beginnings, and many names point to the same content, so that a token
from a wrong version, slot or prefix would show.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import shutil
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import engine_thread
import pytest
import tiny
from tiny import ADAPTERS, BASE, HYBRID_ADAPTERS, HYBRID_BASE

from weft.core.adapters import AdapterRef
from weft.core.config import engine_args
from weft.core.errors import ModelNotFound
from weft.core.messages import Started, Wake
from weft.core.requests import EngineRequest
from weft.core.sampling import SamplingParams
from weft.core.stats import EngineStats
from weft.engine.build import build_engine
from weft.engine.engine import Engine
from weft.engine.serve import Progress, serve
from weft.fleet.client import LinkClient
from weft.registry import AdapterRegistry, AdapterRoots, Sources
from weft.serving import LoopExecutor, Publisher
from weft.text import AdapterTokenizers, load_tokenizer

NUM_TENANTS = 24
REQUESTS_PER_CHANGE = 20
STEPS_PER_CHECK = 50
MAX_TOKENS = 4
PARAMS = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)

ROOM = {
    "adapter_memory": 2 << 20,  # all eleven take 4.7 MB, the largest 1.5 MB
    "max_loras": 6,
    "adapter_host_memory": 1 << 20,
    "max_adapter_wait": 0.05,
    "block_size": 2,
    "num_blocks": 1280,  # 256 requests take up to 1536
    "max_num_seqs": 256,
}
HYBRID_ROOM = {
    "adapter_memory": 1 << 20,  # all ten take 3.2 MB, the largest 0.9 MB
    "max_loras": 3,
    "adapter_host_memory": 1 << 20,
    "max_adapter_wait": 0.05,
    "block_size": 4,
    "num_blocks": 150,
    "max_num_seqs": 24,
    "max_num_batched_tokens": 96,
    "snapshot_memory": 1 << 19,
}


@dataclass(frozen=True)
class Subjects:
    """A base, its adapters by task, and what they answer to prompts when they are alone."""

    base: Path
    adapters: Mapping[str, Path]
    prompts: Mapping[str, list[int]]
    answers: Mapping[tuple[str | None, str], str]
    """By task (None: the base) and prompt."""
    text: Callable[[list[int]], str]
    """Of an answer's tokens."""
    room: Mapping[str, object]
    num_open: int
    """Requests open at a time, more than may run."""


def tiny_subjects() -> Subjects:
    """The example's base and tasks, with words whose shortened answers tell all of them apart."""
    found = [w for w in tiny.tasks.words(seed=3, n=400) if len(w) == tiny.tasks.MIN_LENGTH]
    return _subjects(BASE, ADAPTERS, found, ROOM, 288)


def hybrid_subjects() -> Subjects:
    """The same tasks on a base with linear attention. Words begin alike, so that states are taken
    up from snapshots; "repeat" is left out, which begins as the base does."""
    adapters = {name: path for name, path in HYBRID_ADAPTERS.items() if name != "repeat"}
    found = [f"planet{a}{b}" for a, b in itertools.product("aeiou", "dklmnrst")]
    return _subjects(HYBRID_BASE, adapters, found, HYBRID_ROOM, 40)


def _subjects(
    base: Path,
    adapters: Mapping[str, Path],
    found: list[str],
    room: Mapping[str, object],
    num_open: int,
) -> Subjects:
    names = [None, *adapters]
    answers = {(n, w): tiny.answer(n, w)[:MAX_TOKENS] for n in names for w in found}
    words = [w for w in found if len({answers[n, w] for n in names}) == len(names)]
    assert len(words) > 6
    tokenizer = load_tokenizer(str(base))
    prompts = {word: tokenizer.chat(tiny.ask(word)) for word in words}
    text = partial(tokenizer.decode, skip_special_tokens=True)
    return Subjects(base, adapters, prompts, answers, text, room, num_open)


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> list[Engine]:
    """Engines in threads, whose invariants are checked as they run."""
    started: list[Engine] = []

    def run_engine(args: Any, inbox: SimpleQueue[Any], emit: Any) -> None:
        engine = build_engine(args, wake=lambda: inbox.put(Wake()))
        started.append(engine)
        step, count = engine.step, itertools.count()

        def checked_step() -> Any:
            reports = step()
            if next(count) % STEPS_PER_CHECK == 0:
                engine.check()
            return reports

        monkeypatch.setattr(engine, "step", checked_step)
        emit(Started(engine.info))
        serve(engine, inbox, emit, Progress())

    monkeypatch.setattr(engine_thread, "run_engine", run_engine)
    return started


@dataclass
class Churn:
    """The driver: clients that ask, and an operator who changes adapters."""

    engine: LinkClient
    registry: AdapterRegistry
    publisher: Publisher
    subjects: Subjects
    root: Path
    random: random.Random
    num_requests: int
    task_of: dict[str, str] = field(default_factory=dict)
    """The task whose content has this digest."""
    serves: dict[str, set[str | None]] = field(default_factory=dict)
    """Tasks that a name may serve now: two while it changes; None: the name may be unknown."""
    changing: set[str] = field(default_factory=set)
    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.adapters, self.prompts = self.subjects.adapters, self.subjects.prompts
        self.words = list(self.prompts)
        self.changes: list[asyncio.Task[None]] = []
        self.ids = itertools.count()

    # -- clients -------------------------------------------------------------------------------

    async def run(self) -> None:
        for name, folder in self.adapters.items():
            ref = await self.publisher.load(name, str(folder))
            self.task_of[ref.digest] = name
            self.serves[name] = {name}
        for i in range(NUM_TENANTS):
            task = list(self.adapters)[i % len(self.adapters)]
            await self.publisher.load(f"tenant-{i}", str(self.adapters[task]))
            self.serves[f"tenant-{i}"] = {task}
        requests = iter(range(self.num_requests))
        await asyncio.gather(*(self._client(requests) for _ in range(self.subjects.num_open)))
        await asyncio.gather(*self.changes)

    async def _client(self, requests: Any) -> None:
        for i in requests:
            if i % REQUESTS_PER_CHANGE == 0:
                self._change_something()
            name = self.random.choice([None, *self.serves])
            await self._ask(name, self.random.choice(self.words), self.random.random() < 0.05)

    async def _ask(self, name: str | None, word: str, leave: bool) -> None:
        """One request, given up after its first token if the client is to `leave`."""
        may_serve = {None} if name is None else set(self.serves[name])
        try:
            lease = self.registry.resolve(name or "base")
        except ModelNotFound:
            self._expect(None in may_serve, f"{name} is unknown, and should serve {may_serve}")
            self.counts["unknown"] += 1
            return
        with lease:
            task = self.task_of[lease.ref.digest] if lease.ref else None
            self._expect(task in may_serve, f"{name} serves {task}, not {may_serve}")
            await self._generate(lease.ref, task, word, leave)

    async def _generate(
        self, ref: AdapterRef | None, task: str | None, word: str, leave: bool
    ) -> None:
        request = EngineRequest(str(next(self.ids)), self.prompts[word], PARAMS, ref, seed=0)
        token_ids: list[int] = []
        finish_reason, cached = None, False
        async with aclosing(self.engine.generate(request)) as events:
            async for event in events:
                token_ids += event.token_ids
                finish_reason = event.finish_reason
                if event.error is not None:
                    self.wrong.append(f"{ref}: {event.error}")
                cached = cached or event.num_cached_tokens > 0
                if leave:
                    break
        text, expected = self.subjects.text(token_ids), self.subjects.answers[task, word]
        whole = "length" if len(expected) == MAX_TOKENS else "stop"
        self.counts["left" if finish_reason is None else finish_reason] += 1
        self._expect(
            expected.startswith(text) if finish_reason is None
            else (text, finish_reason) == (expected, whole),
            f"{ref} was to answer {word!r} with {expected!r}: {text!r}, {finish_reason}",
        )  # fmt: skip
        self.counts["cached"] += cached
        outlived = ref is not None and ref not in self.registry.adapters()
        self.counts["outlived"] += outlived

    def _expect(self, holds: bool, what: str) -> None:
        if not holds:
            self.wrong.append(what)

    # -- the operator --------------------------------------------------------------------------

    def _change_something(self) -> None:
        """Begin a change of a name that is not being changed."""
        settled = [n for n in self.serves if n not in self.adapters and n not in self.changing]
        gone = [name for name in settled if self.serves[name] == {None}]
        name = self.random.choice(gone or settled)
        [now] = self.serves[name]
        if now is not None and self.random.random() < 0.5:
            self.serves[name] = {now, None}
            change = self._unload(name)
        else:
            task = self.random.choice(list(self.adapters))
            self.serves[name] = {now, task}
            change = self._load(name, task)
        self.changing.add(name)
        self.changes.append(asyncio.create_task(change))

    async def _load(self, name: str, task: str) -> None:
        ref = await self.publisher.load(name, self._path(name, task), replace=True)
        self.serves[name] = {task}
        self.changing.remove(name)
        self._expect(self.task_of[ref.digest] == task, f"{name} was loaded with another {task}")
        self.counts["loads"] += 1

    async def _unload(self, name: str) -> None:
        self.serves[name] = {None}  # from now on, whatever still runs
        self.changing.remove(name)
        await self.publisher.unload(name)
        self.counts["unloads"] += 1

    def _path(self, name: str, task: str) -> str:
        """The task's own folder, or the name's, whose content is replaced."""
        if self.random.random() < 0.5:
            return str(self.adapters[task])
        return str(shutil.copytree(self.adapters[task], self.root / name, dirs_exist_ok=True))


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("num_requests", "size", "hybrid"),
    [
        (1001, 1, False),
        pytest.param(10_000, 1, False, marks=pytest.mark.exhaustive),
        pytest.param(2500, 2, False, marks=pytest.mark.exhaustive),
        pytest.param(3000, 1, True, marks=pytest.mark.exhaustive),
    ],
)
def test_no_token_comes_from_a_wrong_version(
    engines: list[Engine], tmp_path: Path, num_requests: int, size: int, hybrid: bool
) -> None:
    """With one rank, and with two that have a share of both halves of each adapter; and over a base
    with recurrent states."""
    subjects = hybrid_subjects() if hybrid else tiny_subjects()

    async def run() -> Churn:
        ranks = {"tensor_parallel_size": size, "fully_sharded_loras": size > 1}
        room = {**subjects.room, "adapter_memory": subjects.room["adapter_memory"] // size}
        args = engine_args(str(subjects.base), dtype="float32", num_threads=1, **room, **ranks)
        client = await engine_thread.start_in_process(args)
        registry = AdapterRegistry(["base"], str(subjects.base))
        sources = Sources(AdapterRoots([subjects.base.parent, tmp_path]))
        executor = LoopExecutor()
        publisher = Publisher(client, registry, AdapterTokenizers(None), sources, executor)
        seed = random.Random(0)
        churn = Churn(client, registry, publisher, subjects, tmp_path, seed, num_requests)
        try:
            await churn.run()
            stats = await client.stats()
            assert stats.adapter_evictions > num_requests / 100
            assert stats.adapter_loads > stats.adapter_evictions
            assert stats.preemptions and stats.cached_tokens
            await _unload_all(registry, publisher)
            _check_empty(await client.stats())
        finally:
            await executor.close()
            await client.close()
        return churn

    churn = asyncio.run(run())
    assert not churn.wrong, f"{len(churn.wrong)} wrong, first {churn.wrong[:5]}"
    counts = churn.counts
    ended = ("stop", "length", "left", "unknown")
    assert sum(counts[how] for how in ended) == num_requests
    assert counts["unknown"] < num_requests / 10
    seen = (*ended, "cached", "outlived", "loads", "unloads")
    fewest = 10 if num_requests > 1000 else 0
    assert min(counts[what] for what in seen) > fewest
    engines[0].check()


async def _unload_all(registry: AdapterRegistry, publisher: Publisher) -> None:
    registry.check()
    await asyncio.gather(*(publisher.unload(ref.name) for ref in registry.adapters()))
    registry.check()
    assert not registry.adapters()


def _check_empty(stats: EngineStats) -> None:
    """Nothing is left of requests and adapters, in any tier."""
    assert (stats.num_running, stats.num_waiting, stats.kv_usage) == (0, 0, 0.0)
    assert stats.running_adapters == stats.waiting_adapters == ()
    assert stats.resident_adapters == stats.host_adapters == stats.pinned_adapters == ()
    assert (stats.adapters, stats.adapter_bytes) == ({}, 0)

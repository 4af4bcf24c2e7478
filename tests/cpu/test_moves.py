"""Adapter memory compacts while requests run: in the pool, in the worker, and end to end."""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections.abc import Sequence
from typing import Any

import pytest
import tiny
import torch
import typer
from hypothesis import given, settings
from hypothesis import strategies as st
from load_image import load_image
from patience import PATIENCE_S
from tables import build_table
from tiny import ADAPTERS, BASE

from weft.core.adapters import AdapterRef, AdapterSource
from weft.core.config import LoraArgs, engine_args
from weft.core.errors import ConfigError
from weft.core.messages import Hold, Reply, Tokens
from weft.core.requests import EngineRequest, TokenEvent
from weft.core.sampling import SamplingParams
from weft.core.stages import Stages
from weft.core.targets import TargetTable, layout_of
from weft.engine.build import build_engine
from weft.engine.engine import Engine
from weft.kernels.lora import AdapterPool, base, make_backend
from weft.schedule.extents import Move
from weft.schedule.slots import AdapterSlots
from weft.terminal.options import parse_memory
from weft.text import load_tokenizer
from weft.worker.build import build_worker
from weft.worker.worker import DeviceWorker

TABLE: TargetTable = build_table(
    [
        ("linear", 8, [("q", 6), ("k", 4)]),
        ("linear", 6, [("down", 8)]),
    ]
)
MAX_TOKENS = 12


# -- the pool ----------------------------------------------------------------------------------


def pool_of(num_elements: int, num_slots: int = 4) -> AdapterPool:
    return AdapterPool(TABLE, num_elements, num_slots, torch.float32, torch.device("cpu"))


@given(
    size=st.integers(1, 40),
    source=st.integers(0, 60),
    dest=st.integers(0, 60),
    scratch=st.integers(1, 12),
)
@settings(max_examples=80, deadline=None)
def test_a_copy_whose_places_overlap(size: int, source: int, dest: int, scratch: int) -> None:
    """Either way, through a scratch buffer of any size; what is beside it stays."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(base, "SCRATCH_BYTES", 4 * scratch)
        pool = pool_of(100)
    before = pool.arena.copy_(torch.arange(100.0)).clone()
    pool.move([Move(0, source, dest, size)])
    expected = before.clone()
    expected[dest : dest + size] = before[source : source + size]
    assert torch.equal(pool.arena, expected)


def outputs(pool: AdapterPool, slots: Sequence[int]) -> list[torch.Tensor]:
    """Of all groups, for one row of each slot."""
    backend = make_backend("torch", pool)
    segments = tuple(base.Segment(slot, i, i + 1) for i, slot in enumerate(slots))
    slot_T = torch.tensor(slots, dtype=torch.int32)
    found: list[torch.Tensor] = []
    for _ in range(2):  # stacks are made when a set is met again
        step = backend.begin(base.LoraBatch(slot_T, segments, slot_T, segments))
        for group in TABLE.groups:
            x_TI = torch.arange(len(slots) * group.in_features, dtype=torch.float32)
            y_TO = torch.zeros(len(slots), group.out_features)
            step.linear(y_TO, x_TI.view(len(slots), -1), group.index)
            found.append(y_TO)
    return found


def test_slots_follow_their_images() -> None:
    """Tables and views lead to the new places; what was derived before stays good."""
    pool = pool_of(4000)
    pool.arena.fill_(torch.nan)
    generator = torch.Generator().manual_seed(0)
    places: dict[int, tuple[int, int]] = {}
    for slot, (start, ranks) in enumerate([(200, (3, 0, 2)), (1200, (1, 2, 0)), (2500, (4, 4, 4))]):
        layout = layout_of(TABLE, ranks)
        pool.write(start, torch.randn(layout.num_elements, generator=generator))
        pool.install(slot, start, layout)
        places[slot] = (start, layout.num_elements)
    before, generation = outputs(pool, [0, 1, 2]), list(pool.generation)
    stale = make_backend("torch", pool)
    moves: list[Move] = []
    edge = 8
    for slot, (start, size) in places.items():
        moves.append(Move(slot, start, edge, size))
        edge += size
    pool.move(moves)
    pool.arena[edge:].fill_(torch.nan)
    for made, expected in zip(outputs(pool, [0, 1, 2]), before, strict=True):
        assert torch.equal(made, expected)
    assert pool.generation == generation and stale is not None
    for slot, (_, size) in places.items():
        starts = pool.a_offset_SG[slot][pool.a_offset_SG[slot] >= 0]
        assert int(starts.min()) == moves[slot].dest and pool.num_elements(slot) == size
    assert pool.b_offset_SL[0].tolist()[1] == pool.b_offset_SL[1].tolist()[2] == -1


def test_a_slot_that_was_cleared_meanwhile_stays_empty() -> None:
    """It was evicted before its move came to be carried out."""
    pool = pool_of(1000)
    layout = layout_of(TABLE, (1, 1, 1))
    pool.install(0, 500, layout)
    pool.clear(0)
    pool.move([Move(0, 500, 0, layout.num_elements)])
    assert pool.num_elements(0) == 0 and pool.a_offset_SG[0].tolist() == [-1, -1]
    with pytest.raises(LookupError):
        pool.view(0, 0)


# -- the worker --------------------------------------------------------------------------------


class Slow:
    """Stands in for a step that is in flight."""

    def __init__(self) -> None:
        self.gate = threading.Event()

    def __call__(self, _: object) -> None:
        assert self.gate.wait(PATIENCE_S)


def test_moves_wait_for_steps_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    """And a load waits for all moves that were ordered before it, another's too."""
    options = {"adapter_memory": 1 << 20, "num_blocks": 8, "num_threads": 1}
    worker = build_worker(engine_args(str(BASE), **options), Stages())
    try:
        slow = Slow()
        monkeypatch.setattr(worker, "_run_cpu", slow)
        assert worker.wait_moved() is None
        worker.pool.arena[10:15] = torch.arange(5.0)
        worker.step(None)  # type: ignore[arg-type]
        worker.move([Move(0, 10, 8, 5)])
        later = worker.wait_moved
        ended = threading.Event()
        waiting = threading.Thread(target=lambda: (later(), ended.set()))
        waiting.start()
        assert not ended.wait(0.05) and worker.pool.arena[10:12].tolist() == [0.0, 1.0]
        slow.gate.set()
        waiting.join(PATIENCE_S)
        assert ended.is_set()
        assert worker.pool.arena[8:13].tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]
    finally:
        worker.close()


def test_slots_change_behind_steps_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank may be at the end of a step whose tokens are known already, of which the adapter is
    evicted then."""
    options = {"adapter_memory": 1 << 20, "num_blocks": 8, "num_threads": 1}
    worker = build_worker(engine_args(str(BASE), **options), Stages())
    try:
        slow = Slow()
        monkeypatch.setattr(worker, "_run_cpu", slow)
        pool, slot = worker.pool, 3
        layout = layout_of(worker.model.table, (1,) * len(worker.model.table.targets))
        worker.place(slot, 0, layout)
        worker.move([])
        worker.wait_moved()
        step = worker.step(None)  # type: ignore[arg-type]
        worker.clear([slot])
        assert pool.view(slot, 0)
        worker.place(slot, 0, layout)
        worker.clear([slot])
        slow.gate.set()
        step.result()
    finally:
        worker.close()
    with pytest.raises(LookupError):
        pool.view(slot, 0)


# -- end to end --------------------------------------------------------------------------------


class Traffic:
    """Requests of all adapters on an engine in this thread."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.tokenizer = load_tokenizer(str(BASE))
        self.events: dict[str, list[TokenEvent]] = {}
        self.infos: dict[int, Any] = {}

    def step(self) -> None:
        for report in self.engine.step():
            if isinstance(report, Tokens):
                for event in report:
                    self.events[event.request_id].append(event)
            elif isinstance(report, Reply):
                assert report.error is None
                self.infos[report.call_id] = report.info
        self.engine.check()
        if not self.engine.working:
            time.sleep(0.0005)

    def register(self, paths: Sequence[str]) -> list[AdapterRef]:
        for call_id, path in enumerate(paths):
            self.engine.apply(Hold(call_id, AdapterSource(path), path))
        while len(self.infos) < len(paths):
            self.step()
        digests = [self.infos[i].digest for i in range(len(paths))]
        return [AdapterRef(f"a{i}", 1, digest) for i, digest in enumerate(digests)]

    def submit(self, name: str, ref: AdapterRef, word: str) -> None:
        prompt = self.tokenizer.chat(tiny.ask(word))
        params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
        self.events[name] = []
        assert self.engine.submit(EngineRequest(name, prompt, params, ref, seed=0)) is None

    def text(self, name: str) -> str:
        tokens = [t for event in self.events[name] for t in event.token_ids]
        return self.tokenizer.decode(tokens, skip_special_tokens=True)


@pytest.mark.parametrize(
    "overlap", [pytest.param(False, marks=pytest.mark.exhaustive), True], ids=["plain", "overlap"]
)
def test_requests_answer_right_while_their_adapters_move(
    overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved_in_use: list[int] = []
    move = DeviceWorker.move

    def watched(worker: DeviceWorker, moves: Sequence[Move]) -> Any:
        slots: AdapterSlots = engine._residency.slots
        leased = {e.slot for e in slots._line if e.leases}
        moved_in_use.extend(m.slot for m in moves if m.slot in leased)
        return move(worker, moves)

    monkeypatch.setattr(DeviceWorker, "move", watched)
    options = {"adapter_memory": 2 << 20, "num_threads": 1, "overlap": overlap}
    engine = build_engine(
        engine_args(str(BASE), num_blocks=512, block_size=4, max_num_seqs=6, **options)
    )
    try:
        traffic = Traffic(engine)
        names = list(ADAPTERS)
        refs = traffic.register([str(ADAPTERS[name]) for name in names])
        rng = random.Random(0)
        words = [w for w in tiny.tasks.words(seed=3, n=400) if len(w) == tiny.tasks.MIN_LENGTH]
        asked: dict[str, tuple[str, str]] = {}
        for i in itertools.count():
            if len(asked) < 60 and i % 2 == 0:
                which, word = rng.randrange(len(names)), rng.choice(words)
                asked[str(i)] = (names[which], word)
                traffic.submit(str(i), refs[which], word)
            traffic.step()
            if len(asked) == 60 and not engine.scheduler.busy:
                break
        for request, (task, word) in asked.items():
            assert traffic.text(request) == tiny.answer(task, word)[:MAX_TOKENS], task
        assert moved_in_use, "nothing that ran was moved"
        assert engine.stats().adapter_evictions > 5
    finally:
        engine.close()


@pytest.mark.parametrize("max_loras", [1, 512])
def test_the_bound_on_a_batch_sizes_no_buffer(max_loras: int) -> None:
    """Memory is what --adapter-memory says, and holds adapters beyond the batch's bound."""
    args = engine_args(
        str(BASE), adapter_memory=3 << 20, max_loras=max_loras, num_blocks=32, num_threads=1
    )
    engine = build_engine(args)
    try:
        pool = engine._worker.pool
        assert pool.arena.numel() * pool.element_bytes == 3 << 20
        assert len(pool.a_offset_SG) == len(pool.rank_SL) > 1000
        traffic = Traffic(engine)
        names = sorted(ADAPTERS, key=lambda n: _num_bytes(engine, n))[:4]
        refs = traffic.register([str(ADAPTERS[name]) for name in names])
        for i, ref in enumerate(refs):
            traffic.submit(str(i), ref, "abcd")
        while engine.scheduler.busy:
            traffic.step()
            assert len(engine.scheduler.running_adapters()) <= max_loras
        assert len(engine.stats().resident_adapters) == 4
        for i, name in enumerate(names):
            assert traffic.text(str(i)) == tiny.answer(name, "abcd")[:MAX_TOKENS]
    finally:
        engine.close()


def _num_bytes(engine: Engine, name: str) -> int:
    model = engine._worker.model
    return load_image(ADAPTERS[name], model.table, model.dtype, 256, None).num_bytes


# -- --adapter-memory --------------------------------------------------------------------------


def test_adapter_memory_in_bytes_or_as_a_fraction() -> None:
    for text, value in (
        ("12GiB", 12 << 30),
        ("500MB", 500 << 20),
        ("4096", 4096),
        ("0.25", 0.25),
        (" .5 ", 0.5),
    ):
        assert parse_memory(text) == value
        assert engine_args("base", adapter_memory=text).lora.adapter_memory == value
    for bad in ("1.5", "0.0", "nan", "-1", "much", ""):
        with pytest.raises(typer.BadParameter):
            parse_memory(bad)


@pytest.mark.parametrize("bad", [0, -5, 0.0, 1.0, 7.5, float("nan")])
def test_adapter_memory_that_is_neither(bad: float) -> None:
    with pytest.raises(ConfigError, match="--adapter-memory must be a number of bytes") as caught:
        LoraArgs(adapter_memory=bad)
    assert caught.value.param == "adapter_memory"


def test_a_fraction_is_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft.worker.memory.total_bytes", lambda device: 8 << 20)
    worker = build_worker(
        engine_args(str(BASE), adapter_memory=0.25, num_blocks=8, num_threads=1), Stages()
    )
    try:
        assert worker.pool.arena.numel() * worker.pool.element_bytes == 2 << 20
    finally:
        worker.close()

"""Every LoRA backend against a dense oracle in float64 that shares no code with them.

Bounds. float32: the backends differ from the oracle by rounding of sums of at most some hundred
terms, far below 1e-5 of the result's magnitude. bfloat16 has 8 bits: a delta is rounded once
after A, once after B and once when added to y, and each slice adds to y once, so the error is
bounded by some units of 2^-8 of the largest magnitude on the way; 2^-5 leaves room for all of
them and is far below what a wrong row, slice or rank gives.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from importlib import metadata

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lora_pools import batch_of
from tables import build_table
from torch import Tensor

import weft.kernels.lora as lora
from weft.core.config import backend_names
from weft.core.errors import ConfigError
from weft.core.targets import TargetTable, layout_of
from weft.kernels.linear import DenseWeight
from weft.kernels.lora import AdapterPool, make_backend

VOCAB, HIDDEN, INNER = 23, 12, 20
TABLE: TargetTable = build_table(
    [
        ("embedding", VOCAB, [("embed", HIDDEN)]),
        ("linear", HIDDEN, [("q", 16), ("k", 8), ("v", 8)]),
        ("linear", HIDDEN, [("gate", INNER), ("up", INNER)]),
        ("linear", INNER, [("down", HIDDEN)]),
        ("head", HIDDEN, [("head", VOCAB)]),
    ]
)
NUM_SLOTS = 6
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2**-5}
BACKENDS = pytest.mark.parametrize("backend", ["reference", "torch"])
DTYPES = pytest.mark.parametrize("dtype", list(TOLERANCE), ids=["fp32", "bf16"])


@dataclass
class Adapter:
    """Matrices as trained, per target: A (r, in), B (out, r), a scale; absent targets missing."""

    a: dict[str, Tensor] = field(default_factory=dict)
    b: dict[str, Tensor] = field(default_factory=dict)
    scale: float = 1.0

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(len(self.a[t.name]) if t.name in self.a else 0 for t in TABLE.targets)


def random_adapter(generator: torch.Generator, ranks: Iterable[int]) -> Adapter:
    made = Adapter(scale=float(torch.rand((), generator=generator)) + 0.5)
    for target, rank in zip(TABLE.targets, ranks, strict=True):
        if rank:
            made.a[target.name] = _exact((rank, target.in_features), generator)
            made.b[target.name] = _exact((target.out_features, rank), generator)
    return made


def _exact(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Random values that bfloat16 holds exactly, as float64."""
    return torch.randn(shape, generator=generator).bfloat16().double()


class World:
    """A pool with adapters in slots, and what they should compute."""

    def __init__(self, dtype: torch.dtype, seed: int = 0) -> None:
        self.dtype = dtype
        self.generator = torch.Generator().manual_seed(seed)
        self.adapters: dict[int, Adapter] = {}
        self.pool = AdapterPool(TABLE, 40_000, NUM_SLOTS, dtype, torch.device("cpu"))
        self.pool.arena.fill_(torch.nan)  # what was never written must not be read
        self._end = 0

    def install(self, slot: int, ranks: Iterable[int]) -> None:
        """A new random adapter, at a new place in the arena."""
        adapter = random_adapter(self.generator, ranks)
        layout = layout_of(TABLE, adapter.ranks)
        self.pool.write(self._end, _image(adapter, self.dtype))
        self.pool.install(slot, self._end, layout)
        self._end += layout.num_elements
        self.adapters[slot] = adapter

    def check(self, backend: lora.LoraBackend, slot_T: list[int], sampled: list[int]) -> None:
        """One step over all groups. `sampled` are the rows that go to the head."""
        step = backend.begin(batch_of(slot_T, [slot_T[t] for t in sampled]))
        for group in TABLE.groups:
            slots = [slot_T[t] for t in sampled] if group.kind == "head" else slot_T
            call = {"linear": step.linear, "head": step.head, "embedding": step.embedding}
            self._check_group(call[group.kind], group.index, slots)
            if group.kind == "linear":
                self._check_product(step, group.index, slot_T)

    def _check_product(self, step: lora.LoraStep, index: int, slots: list[int]) -> None:
        """The whole of a linear layer, where the step computes it."""
        group = TABLE.groups[index]
        x = _exact((len(slots), group.in_features), self.generator)
        weight = _exact((group.out_features, group.in_features), self.generator)
        bias = _exact((group.out_features,), self.generator)
        for added in (None, bias):
            given = (each if each is None else each.to(self.dtype) for each in (x, weight, added))
            x_TI, weight_OI, bias_O = given
            found = step.product(x_TI, DenseWeight(weight_OI), bias_O, index)
            if found is None:
                return
            base = x @ weight.t() + (0 if added is None else added)
            for t, slot in enumerate(slots):
                want = dense_row(self.adapters[slot], index, base[t], x[t])
                bound = TOLERANCE[self.dtype] * (
                    1 + float(torch.stack((want, base[t])).abs().max())
                )
                assert float((found.whole()[t].double() - want).abs().max()) <= bound, (group, t)

    def _check_group(
        self, call: Callable[[Tensor, Tensor, int], None], index: int, slots: list[int]
    ) -> None:
        group = TABLE.groups[index]
        y = _exact((len(slots), group.out_features), self.generator).to(self.dtype)
        if group.kind == "embedding":
            x = torch.randint(0, VOCAB, (len(slots),), generator=self.generator)
            dense = torch.nn.functional.one_hot(x, VOCAB).double()
        else:
            dense = _exact((len(slots), group.in_features), self.generator)
            x = dense.to(self.dtype)
        before = y.clone()
        call(y, x, index)
        for t, slot in enumerate(slots):
            if slot < 0:
                assert torch.equal(y[t], before[t]), "a base row was touched"
                continue
            want = dense_row(self.adapters[slot], index, before[t].double(), dense[t])
            bound = TOLERANCE[self.dtype] * (1 + float(want.abs().max()))
            assert float((y[t].double() - want).abs().max()) <= bound, (group, t, slot)
            for s in group.slices:
                if s.name not in self.adapters[slot].a:
                    part = slice(s.offset, s.offset + s.out_features)
                    assert torch.equal(y[t, part], before[t, part]), "an absent slice was touched"


def dense_row(adapter: Adapter, group: int, y_O: Tensor, x_I: Tensor) -> Tensor:
    """y + scale * B A x, by slices, float64."""
    y_O = y_O.clone()
    start = 0
    for target in TABLE.groups[group].slices:
        stop = start + target.out_features
        if target.name in adapter.a:
            delta_OI = adapter.scale * adapter.b[target.name] @ adapter.a[target.name]
            y_O[start:stop] += delta_OI @ x_I
        start = stop
    return y_O


def _image(adapter: Adapter, dtype: torch.dtype) -> Tensor:
    """The flat image: A of a group stacked, B by slices with the scale folded in, aligned."""
    layout = layout_of(TABLE, adapter.ranks)
    image = torch.full((layout.num_elements,), torch.nan, dtype=dtype)

    def put(start: int, matrix: Tensor) -> None:
        image[start : start + matrix.numel()] = matrix.flatten().to(dtype)

    for group in TABLE.groups:
        present = [t for t in group.slices if t.name in adapter.a]
        if present:
            a = torch.cat([adapter.a[t.name] for t in present])
            put(layout.a_offset[group.index], a.t() if group.kind == "embedding" else a)
        for t in present:
            put(layout.b_offset[t.slice], adapter.scale * adapter.b[t.name])
    return image


RANKS = st.tuples(*[st.sampled_from([0, 0, 1, 3, 4, 8])] * len(TABLE.targets)).filter(any)
ROWS = st.lists(st.integers(-1, NUM_SLOTS - 1), min_size=1, max_size=40).filter(
    lambda slots: max(slots) >= 0
)


@BACKENDS
@DTYPES
@given(
    ranks=st.lists(RANKS, min_size=NUM_SLOTS, max_size=NUM_SLOTS),
    rows=ROWS,
    seed=st.integers(0, 2**20),
    data=st.data(),
)
@settings(max_examples=20 if "EXHAUSTIVE" in os.environ else 10, deadline=None)
def test_random_batches(
    backend: str,
    dtype: torch.dtype,
    ranks: list[tuple[int, ...]],
    rows: list[int],
    seed: int,
    data: st.DataObject,
) -> None:
    """Any adapters, any rows; thrice the same set, as stacks are made on the second meeting."""
    world = World(dtype, seed)
    for slot, each in enumerate(ranks):
        world.install(slot, each)
    made = make_backend(backend, world.pool)
    slot_T = sorted(rows)
    for _ in range(3):
        sampled = data.draw(st.lists(st.sampled_from(range(len(slot_T))), unique=True))
        world.check(made, slot_T, sorted(sampled))


@BACKENDS
@DTYPES
def test_decode_steps(backend: str, dtype: torch.dtype) -> None:
    """One row each, all slots, many steps: what serving does most."""
    world = World(dtype)
    for slot in range(NUM_SLOTS):
        world.install(slot, [slot + 1 + i if (slot + i) % 3 else 0 for i in range(8)])
    made = make_backend(backend, world.pool)
    for step in range(5):
        slot_T = sorted([-1, -1, *range(NUM_SLOTS), step % NUM_SLOTS])
        world.check(made, slot_T, list(range(len(slot_T))))


@BACKENDS
@pytest.mark.parametrize("clear", [False, True])
def test_a_slot_with_new_content(backend: str, clear: bool) -> None:
    """Nothing that was derived from a slot's earlier content is used again."""
    world = World(torch.float32)
    made = make_backend(backend, world.pool)
    world.install(0, [4] * 8)
    world.install(1, [2] * 8)
    slot_T, sampled = [-1, 0, 1], [0, 1, 2]
    for ranks in ([8] * 8, [8] * 8, [1, 0, 5, 0, 0, 0, 3, 0]):
        for _ in range(4):
            world.check(made, slot_T, sampled)
        if clear:
            world.pool.clear(1)
        world.install(1, ranks)
    world.check(made, slot_T, sampled)


@BACKENDS
def test_many_sets_of_adapters(backend: str) -> None:
    """More sets than any cache of them holds, each met several times."""
    world = World(torch.float32)
    for slot in range(NUM_SLOTS):
        world.install(slot, [2] * 8)
    made = make_backend(backend, world.pool)
    sets = [[s for s in range(NUM_SLOTS) if bits >> s & 1] for bits in range(1, 2**NUM_SLOTS)]
    for _ in range(2):
        for slots in sets[:30]:
            for _ in range(2):
                world.check(made, slots, list(range(len(slots))))


@BACKENDS
def test_no_sampled_rows(backend: str) -> None:
    """The middle of a prompt: rows of adapters, none for the head; or only base rows for it."""
    world = World(torch.float32)
    world.install(0, [4] * 8)
    world.install(1, [4] * 8)
    made = make_backend(backend, world.pool)
    for sampled in ([], [0], [0, 3]) * 2:
        world.check(made, [-1, 0, 0, 1], sampled)


@BACKENDS
@pytest.mark.parametrize("others", [[], [0]])
def test_an_empty_slot_is_an_error(backend: str, others: list[int]) -> None:
    """A row must never run with an adapter that is not there."""
    world = World(torch.float32)
    world.install(0, [4] * 8)
    world.install(1, [4] * 8)
    world.pool.clear(1)
    made = make_backend(backend, world.pool)
    for _ in range(3):
        with pytest.raises(LookupError, match="slot 1 holds no adapter"):
            world.check(made, [*others, 1], [])


def test_names() -> None:
    assert {"torch", "reference"} <= set(backend_names())
    pool = World(torch.float32).pool
    assert type(make_backend("auto", pool)) is type(make_backend("torch", pool))


def test_an_unknown_backend_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"nonesuch: .*reference, torch") as caught:
        make_backend("nonesuch", World(torch.float32).pool)
    assert caught.value.param == "lora_backend"


def test_a_third_party_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """Found by its entry point, made over the pool; other names load nothing."""
    made: list[AdapterPool] = []

    class Entry:
        name = "theirs"

        def load(self) -> Callable[[AdapterPool], str]:
            return lambda pool: made.append(pool) or "their backend"

    def entry_points(*, group: str) -> list[Entry]:
        return [Entry()] if group == "weft.lora_backends" else []

    monkeypatch.setattr(metadata, "entry_points", entry_points)
    pool = World(torch.float32).pool
    assert backend_names() == ["reference", "torch", "triton", "theirs"]
    assert make_backend("theirs", pool) == "their backend"
    assert made == [pool]
    make_backend("torch", pool)
    with pytest.raises(ConfigError, match="theirs"):
        make_backend("nonesuch", pool)
    assert made == [pool]

"""What adapters hold beside A and B, over every LoRA backend, against its definition in float64."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from lora_pools import batch_of
from tables import build_table
from torch import Tensor

from weft.core.targets import Extras, ImageLayout, TargetTable, layout_of
from weft.kernels.lora import AdapterPool, LoraStep, make_backend
from weft.kernels.lora.extras import has_extras, norms_of, with_extras

VOCAB, HIDDEN, INNER = 23, 16, 24
TABLE: TargetTable = build_table(
    [
        ("embedding", VOCAB, [("embed", HIDDEN)]),
        ("linear", HIDDEN, [("q", 16), ("k", 8), ("v", 8)]),
        ("linear", INNER, [("down", HIDDEN)]),
        ("head", HIDDEN, [("head", VOCAB)]),
    ],
    norms=[("first", HIDDEN), ("q_norm", 4)],
)
EMBEDDING, QKV, DOWN, HEAD = range(4)
BACKENDS = pytest.mark.parametrize("backend", ["reference", "torch", "triton"])
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2**-5}
DTYPES = pytest.mark.parametrize("dtype", list(TOLERANCE), ids=["fp32", "bf16"])
RANKS = (2, 4, 0, 1, 3, 2)


@dataclass
class Adapter:
    """An image by its parts; those of extras by slice or norm."""

    layout: ImageLayout
    a: dict[int, Tensor] = field(default_factory=dict)
    b: dict[int, Tensor] = field(default_factory=dict)
    scale: dict[int, Tensor] = field(default_factory=dict)
    shift: dict[int, Tensor] = field(default_factory=dict)
    norms: dict[int, Tensor] = field(default_factory=dict)
    ids: dict[str, list[int]] = field(default_factory=dict)
    rows: dict[str, Tensor] = field(default_factory=dict)


class World:
    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.generator = torch.Generator().manual_seed(0)
        self.pool = AdapterPool(TABLE, 40_000, 5, dtype, torch.device("cpu"))
        self.pool.arena.fill_(torch.nan)
        self.adapters: dict[int, Adapter] = {}
        self._end = 0

    def exact(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator).bfloat16().double()

    def install(self, slot: int, extras: Extras | None, ranks: tuple[int, ...] = RANKS) -> None:
        layout = layout_of(TABLE, ranks, extras, self.dtype.itemsize)
        made = self.adapters[slot] = Adapter(layout)
        image = torch.zeros(layout.num_elements, dtype=self.dtype)
        for group in TABLE.groups:
            matrices = []
            for s in group.slices:
                if ranks[s.slice]:
                    made.a[s.slice] = self.exact(ranks[s.slice], s.in_features)
                    made.b[s.slice] = self.exact(s.out_features, ranks[s.slice])
                    matrices.append(made.a[s.slice])
                    _put(image, layout.b_offset[s.slice], made.b[s.slice].to(self.dtype))
            if matrices:
                a = torch.cat(matrices)
                a = a.t() if group.kind == "embedding" else a
                _put(image, layout.a_offset[group.index], a.to(self.dtype))
        self._put_extras(made, image)
        self.pool.write(self._end, image)
        self.pool.install(slot, self._end, layout)
        self._end += layout.num_elements

    def _put_extras(self, made: Adapter, image: Tensor) -> None:
        layout = made.layout
        for offsets, vectors in (
            (layout.scale_offset, made.scale),
            (layout.shift_offset, made.shift),
        ):
            for index, at in enumerate(offsets):
                if at >= 0:
                    # float32 that no narrow dtype holds
                    vectors[index] = self.exact(TABLE.targets[index].out_features).float() + 1e-4
                    _put(image, at, vectors[index])
        for index, at in enumerate(layout.norm_offset):
            if at >= 0:
                made.norms[index] = self.exact(TABLE.norms[index].size).to(self.dtype)
                _put(image, at, made.norms[index])
        for name, place in (("embed", layout.embedding_rows), ("head", layout.head_rows)):
            if place:
                start, ids, num = place
                made.ids[name] = sorted(
                    torch.randperm(VOCAB, generator=self.generator)[:num].tolist()
                )
                made.rows[name] = self.exact(num, HIDDEN)
                _put(image, start, made.rows[name].to(self.dtype))
                if ids >= 0:
                    _put(image, ids, torch.tensor(made.ids[name], dtype=torch.int32))

    def step(self, backend: str, slots: list[int], sampled: list[int]) -> LoraStep:
        batch = batch_of(slots, [slots[t] for t in sampled])
        return with_extras(make_backend(backend, self.pool).begin(batch), self.pool, batch)

    def want(self, slot: int, group: int, y_O: Tensor, x: Tensor) -> Tensor:
        """The definition, for one row."""
        adapter, y_O = self.adapters[slot], y_O.clone()
        if group == EMBEDDING and int(x) in adapter.ids.get("embed", ()):
            y_O = adapter.rows["embed"][adapter.ids["embed"].index(int(x))].clone()
        if group == HEAD and "head" in adapter.ids:
            y_O[adapter.ids["head"]] = adapter.rows["head"] @ x
        for s in TABLE.groups[group].slices:
            part = slice(s.offset, s.offset + s.out_features)
            if s.slice in adapter.a:
                a = adapter.a[s.slice]
                y_O[part] += adapter.b[s.slice] @ (a[:, int(x)] if group == EMBEDDING else a @ x)
            if s.slice in adapter.scale:
                y_O[part] *= adapter.scale[s.slice].double()
            if s.slice in adapter.shift:
                y_O[part] += adapter.shift[s.slice].double()
        return y_O

    def check(self, backend: str, slots: list[int], sampled: list[int]) -> None:
        step = self.step(backend, slots, sampled)
        for group in TABLE.groups:
            of_rows = [slots[t] for t in sampled] if group.kind == "head" else slots
            y = self.exact(len(of_rows), group.out_features).to(self.dtype)
            if group.kind == "embedding":
                x: Tensor = torch.randint(VOCAB, (len(of_rows),), generator=self.generator)
            else:
                x = self.exact(len(of_rows), group.in_features)
            before = y.clone()
            if group.kind == "embedding":
                step.embedding(y, x, group.index)
            elif group.kind == "head":
                step.head(y, x.to(self.dtype), group.index)
            else:
                step.start(x.to(self.dtype), group.index)
                step.linear(y, x.to(self.dtype), group.index)
            for t, slot in enumerate(of_rows):
                if slot < 0:
                    assert torch.equal(y[t], before[t]), "a base row was touched"
                    continue
                want = self.want(slot, group.index, before[t].double(), x[t])
                bound = TOLERANCE[self.dtype] * (1 + float(want.abs().max()))
                assert float((y[t].double() - want).abs().max()) <= bound, (group.kind, t, slot)


def _put(image: Tensor, start: int, values: Tensor) -> None:
    size = values.numel() * values.element_size() // image.element_size()
    image[start : start + size].view(values.dtype).copy_(values.flatten())


ALL = frozenset(range(len(TABLE.targets)))
ROWS = Extras(embedding_rows=5, head_rows=3)


def _world(dtype: torch.dtype) -> World:
    world = World(dtype)
    world.install(0, None)
    world.install(1, Extras(scaled=ALL, shifted=ALL, norms=frozenset({0})))
    world.install(2, ROWS)
    world.install(
        3, Extras(shifted=frozenset({3}), embedding_rows=VOCAB, head_rows=VOCAB), (0,) * 6
    )
    return world


@BACKENDS
@DTYPES
def test_any_mix(backend: str, dtype: torch.dtype) -> None:
    world = _world(dtype)
    mixes = ([-1, 0, 1, 1, 2, 2, 2, 3, 3], [-1, -1, 1], [2, 3], [0, 1, 2, 3])
    for slots in mixes[:1] if backend == "triton" else mixes:  # 5 s each in the interpreter
        sampled = list(range(len(slots)))
        for some in [sampled] if backend == "triton" else [sampled, [0], []]:
            world.check(backend, slots, some)


def test_other_steps_are_the_backend_s_own() -> None:
    """Steps without such adapters run as if there were none."""
    world = _world(torch.float32)
    backend = make_backend("torch", world.pool)
    batch = batch_of([-1, 0], [-1, 0])
    step = backend.begin(batch)
    assert with_extras(step, world.pool, batch) is step
    assert not has_extras(world.pool, [0]) and has_extras(world.pool, [0, 2])
    assert norms_of(step) is None and norms_of(None) is None
    assert norms_of(world.step("torch", [0, 2, 3], [])) is None


def test_norms_by_rows() -> None:
    world = _world(torch.float32)
    norms = norms_of(world.step("torch", [-1, 0, 1, 1, 2], []))
    assert norms is not None and norms.of(1) == []
    ((start, stop, weight),) = norms.of(0)
    assert (start, stop) == (2, 4) and torch.equal(weight, world.adapters[1].norms[0])


def test_a_slot_that_is_used_again() -> None:
    world = _world(torch.float32)
    world.pool.clear(1)
    assert not has_extras(world.pool, [1])
    world.install(1, Extras(scaled=frozenset({5})))
    world.check("torch", [0, 1, 2], [0, 1, 2])

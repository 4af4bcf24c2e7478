"""The Triton LoRA kernels in Triton's interpreter, against dense products in float64.

Bounds. All sums are in fp32 and have some hundred terms: 2^-18 of a row's largest magnitude. In
16 bits, one rounding of y is all that comes on top: relative 2^-11 in float16; in bfloat16 2^-7,
as the interpreter cuts bits off where a GPU rounds to nearest.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from lora_pools import batch_of, random_pool
from tables import build_table

import weft.kernels.lora.triton as kernels
from weft.core.errors import ConfigError
from weft.core.targets import TargetTable
from weft.kernels.lora import (
    AdapterPool,
    LoraBatch,
    Segment,
    make_backend,
    triton_beside,
    triton_rows,
)
from weft.kernels.tuned import Blocks

pytestmark = pytest.mark.skipif(not kernels.INTERPRETED, reason="compiled kernels are for a GPU")

VOCAB, HIDDEN, INNER = 19, 37, 50
TABLE: TargetTable = build_table(
    [
        ("embedding", VOCAB, [("embed", HIDDEN)]),
        ("linear", HIDDEN, [("q", 40), ("k", 9), ("v", 9)]),
        ("linear", HIDDEN, [("gate", INNER), ("up", INNER)]),
        ("linear", INNER, [("down", 48)]),
        ("head", HIDDEN, [("head", VOCAB)]),
    ]
)
RANKS = (
    (1, 3, 0, 5, 2, 7, 17, 9),
    (16, 16, 16, 16, 16, 16, 16, 16),
    (0, 0, 4, 0, 33, 0, 0, 0),
    (0, 24, 2, 40, 0, 1, 8, 0),
)
UNITS = {torch.float32: 0.0, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-11}
BLOCKS = Blocks(columns=32, shrink_programs=9, expand_programs=6)
TUNING = kernels.Tuning(part=16, max_parts=64, row_floats=128, blocks=BLOCKS)


def make_inputs(pool: AdapterPool, num_rows: int) -> dict[int, tuple[Tensor, Tensor]]:
    """(x or ids, y) by group."""
    generator = torch.Generator().manual_seed(num_rows)
    made = {}
    for group in pool.table.groups:
        y = torch.randn((num_rows, group.out_features), generator=generator)
        if group.kind == "embedding":
            x = torch.randint(0, group.in_features, (num_rows,), generator=generator)
        else:
            x = torch.randn((num_rows, group.in_features), generator=generator)
            x = x.to(pool.arena.dtype)
        made[group.index] = x, y.to(pool.arena.dtype)
    return made


def run(
    backend: kernels.TritonBackend,
    slots: Sequence[int],
    inputs: dict[int, tuple[Tensor, Tensor]],
    rows: slice = slice(None),
) -> dict[int, Tensor]:
    """What y becomes, by group, in a step of these rows."""
    step = backend.begin(batch_of(slots))
    out = {}
    for group in backend.pool.table.groups:
        x, y = inputs[group.index]
        y = y[rows].clone()
        calls = {"linear": step.linear, "head": step.head, "embedding": step.embedding}
        calls[group.kind](y, x[rows], group.index)
        out[group.index] = y
    return out


def check(
    pool: AdapterPool,
    slots: Sequence[int],
    inputs: dict[int, tuple[Tensor, Tensor]],
    out: dict[int, Tensor],
) -> None:
    unit = UNITS[pool.arena.dtype]
    for index, y in out.items():
        x, before = inputs[index]
        gather = pool.table.groups[index].kind == "embedding"
        for t, slot in enumerate(slots):
            view = pool.view(slot, index) if slot >= 0 else None
            want = before[t].double()
            touched = torch.zeros(len(want), dtype=torch.bool)
            if view is not None:
                a = view.a_RI.double()
                v = a[x[t]] if gather else a @ x[t].double()
                for s in view.slices:
                    part = slice(s.out_start, s.out_stop)
                    touched[part] = True
                    want[part] += s.b_OR.double() @ v[s.r_start : s.r_stop]
            assert torch.equal(y[t, ~touched], before[t, ~touched]), "touched without an adapter"
            error = (y[t].double() - want).abs()
            bound = 1.01 * unit * want.abs() + 2.0**-18 * want.abs().max()
            assert bool((error <= bound).all()), (index, t, slot)


def same(a: dict[int, Tensor], b: dict[int, Tensor], rows: slice = slice(None)) -> bool:
    """Whether `a` is these rows of `b`, to the bit."""
    return all(torch.equal(a[i], b[i][rows]) for i in a)


@pytest.mark.parametrize("dtype", list(UNITS), ids=["fp32", "bf16", "fp16"])
def test_mixed_ranks_and_odd_widths(dtype: torch.dtype) -> None:
    """In 16 bits only the rounding differs: fewer rows show it."""
    pool = random_pool(TABLE, RANKS, dtype)
    slots = [-1, -1, 0, 1, 1, 2, 3] if dtype is torch.float32 else [-1, 0, 2]
    inputs = make_inputs(pool, len(slots))
    check(pool, slots, inputs, run(kernels.TritonBackend(pool, TUNING), slots, inputs))


def test_a_row_does_not_see_the_others() -> None:
    """Alone, among others, in a segment of several tiles: the same bits."""
    pool = random_pool(TABLE, RANKS)
    slots = [-1, *[0] * 17, 1, 3]
    inputs = make_inputs(pool, len(slots))
    backend = kernels.TritonBackend(pool, TUNING)
    together = run(backend, slots, inputs)
    check(pool, slots, inputs, together)
    for t in (17, 19):
        rows = slice(t, t + 1)
        assert same(run(backend, slots[rows], inputs, rows), together, rows), t
    assert same(run(backend, slots, inputs), together)


def test_sizes_of_blocks_change_nothing() -> None:
    pool = random_pool(TABLE, RANKS)
    slots = [0, 0, 2, 3]
    inputs = make_inputs(pool, len(slots))
    other = Blocks(columns=64, shrink_programs=1, expand_programs=1)
    tuning = kernels.Tuning(part=16, max_parts=64, row_floats=128, blocks=other)
    a, b = (run(kernels.TritonBackend(pool, t), slots, inputs) for t in (TUNING, tuning))
    assert same(a, b)


def test_tiles_of_an_adapter_that_are_computed_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """A segment of more tiles than are taken together, which begins behind others, and some that
    are shorter."""
    pool = random_pool(TABLE, RANKS)
    slots = [-1, *[0] * 3, *[1] * 83, *[2] * 36, *[3] * 17]
    inputs = make_inputs(pool, len(slots))
    backend = kernels.TritonBackend(pool, TUNING)
    together = run(backend, slots, inputs)
    check(pool, slots, inputs, together)
    monkeypatch.setattr(kernels, "TOGETHER", 1)
    assert same(run(backend, slots, inputs), together)


def test_ranks_up_to_the_largest() -> None:
    table = build_table([("linear", 70, [("q", 16), ("k", 5), ("v", 3)])])
    ranks = [(256, 256, 256), (255, 0, 1), (64, 128, 200)]
    pool = random_pool(table, ranks)
    slots = [-1, 0, 1, 2, 2]
    inputs = make_inputs(pool, len(slots))
    blocks = Blocks(columns=16, shrink_programs=2)
    tuning = kernels.Tuning(part=32, blocks=blocks)
    check(pool, slots, inputs, run(kernels.TritonBackend(pool, tuning), slots, inputs))


def test_tables_are_read_at_each_step() -> None:
    """A step made before a slot got other content, or before `begin` laid out another mix."""
    pool = random_pool(TABLE, RANKS)
    backend = kernels.TritonBackend(pool, TUNING)
    step = backend.begin(batch_of([-1, -1, 0]))
    inputs = make_inputs(pool, 3)
    slots = [1, 3, 3]
    backend.begin(batch_of(slots))
    x, y = inputs[1]
    y = y.clone()
    step.linear(y, x, 1)  # as a graph does: the launches of the earlier step
    check(pool, slots, inputs, {1: y})


def test_more_rows_than_reserved() -> None:
    pool = random_pool(TABLE, RANKS)
    backend = kernels.TritonBackend(pool, TUNING)
    slots = [-1, *[0] * (kernels.MOST_ROWS // 2), 2, *[3] * kernels.MOST_ROWS]
    inputs = make_inputs(pool, len(slots))
    check(pool, slots, inputs, run(backend, slots, inputs))


def test_no_sampled_rows_of_adapters() -> None:
    pool = random_pool(TABLE, RANKS)
    backend = kernels.TritonBackend(pool, TUNING)
    for sampled in ([], [-1, -1]):
        y = torch.randn(len(sampled), VOCAB)
        before = y.clone()
        backend.begin(batch_of([-1, 0], sampled)).head(y, torch.randn(len(sampled), HIDDEN), 4)
        assert torch.equal(y, before)


def test_an_empty_slot_is_an_error() -> None:
    pool = random_pool(TABLE, RANKS)
    pool.clear(2)
    backend = kernels.TritonBackend(pool, TUNING)
    with pytest.raises(LookupError, match="slot 2 holds no adapter"):
        backend.begin(batch_of([0, 2]))


def test_compiled_kernels_need_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = random_pool(TABLE, RANKS)
    assert isinstance(make_backend("triton", pool), kernels.TritonBackend)
    monkeypatch.setattr(kernels, "INTERPRETED", False)
    with pytest.raises(ConfigError, match="needs a GPU") as caught:
        make_backend("triton", pool)
    assert caught.value.param == "lora_backend"


@pytest.mark.parametrize(
    ("num_programs", "shared", "registers", "room", "left"),
    [
        (96, 128 << 10, 96, 128, 96 * 2 + 36 * 4),
        (224, 96 << 10, 96, 128, 92 * 1 + 40 * 3),
        (448, 96 << 10, 96, 128, 132 * 1),  # in two waves, of which the first fills the device
        (224, 144 << 10, 96, 128, 132 * 2),
        (132, 16 << 10, 384, 128, 132 * 1),  # registers are short, not memory
        (528, 4 << 10, 104, 128, 0),
        (528, 4 << 10, 104, 96, 132 * 1),  # programs for adapters that need fewer
        (264, 110 << 10, 96, 128, 0),
    ],
)
def test_places_beside_a_product(
    num_programs: int, shared: int, registers: int, room: int, left: int
) -> None:
    """On 132 processors of 228 KB, for programs of 33 KB."""
    size, own = (shared, 128 * registers), (33 << 10, 128 * room)
    assert triton_beside.places_left(132, 228 << 10, num_programs, size, own) == left


def test_tiles_are_laid_out_once_for_equal_steps() -> None:
    tiles = triton_rows.TileList(torch.device("cpu"))
    slot_T = torch.tensor([-1, 3, 3, 5], dtype=torch.int32)

    def filled(*slots: int) -> list[int]:
        segments = tuple(Segment(slot, 1 + i, 2 + i) for i, slot in enumerate(slots))
        rows, sampled = tiles.fill(LoraBatch(slot_T, segments, slot_T, segments))
        assert rows.tiles is sampled.tiles or torch.equal(rows.tiles, sampled.tiles)
        return rows.tiles[:, 0].tolist()

    tiles.reserve(8)
    staging = tiles._staging
    sent: list[int] = []
    send = staging.send
    staging.send = lambda num: (sent.append(num), send(num))[1]  # type: ignore[method-assign]
    assert filled(3, 5) == filled(3, 5) == [3, 5, 0, 0] and len(sent) == 1
    assert filled(5, 3) == [5, 3, 0, 0] and filled(3, 5) == [3, 5, 0, 0] and len(sent) == 3
    tiles.reserve(64)  # the device's side may have moved
    assert filled(3, 5) == [3, 5, 0, 0] and len(sent) == 4

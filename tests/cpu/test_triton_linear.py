"""Products for few rows with the adapters' part beside them, in Triton's interpreter, against
dense products in float64; and what the ops do with what is pending.

Bounds. All sums are in fp32 and have some hundred terms: 2^-18 of the largest magnitude; in
float16 one rounding of y comes on top, 2^-11.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from lora_pools import batch_of, random_pool
from tables import build_table

import weft.kernels.triton_linear as kernels
from weft.kernels.attention import KVCache, make_batch
from weft.kernels.linear import DenseWeight
from weft.kernels.lora.triton import TritonBackend, Tuning
from weft.kernels.ops import Ops, Pending, Product, Rope
from weft.kernels.triton_ops import TritonOps
from weft.kernels.tuned import Cut

pytestmark = pytest.mark.skipif(not kernels.INTERPRETED, reason="compiled kernels are for a GPU")

TABLE = build_table(
    [
        ("linear", 128, [("q", 131), ("k", 61)]),
        ("linear", 256, [("down", 128)]),
    ]
)
RANKS = ((16, 16, 16), (3, 0, 40), (0, 0, 8), (33, 1, 0))
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])
UNIT = {torch.float32: 0.0, torch.float16: 2.0**-11}
CPU = torch.device("cpu")


def make_backend(dtype: torch.dtype) -> TritonBackend:
    return TritonBackend(random_pool(TABLE, RANKS, dtype), Tuning(part=32, row_floats=128))


def make_inputs(group: int, num_rows: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """x, weight, bias"""
    of = TABLE.groups[group]
    generator = torch.Generator().manual_seed(num_rows)
    shapes = ((num_rows, of.in_features), (of.out_features, of.in_features), (of.out_features,))
    x, weight, bias = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    return x, weight, bias


def check_product(y: Tensor, x: Tensor, weight: Tensor) -> None:
    """It is x @ weight.T, whatever the order in which fp32 sums are made up on this machine."""
    want = x.double() @ weight.double().t()
    torch.testing.assert_close(y.double(), want, atol=1e-4, rtol=1e-5)


def product(
    backend: TritonBackend, slots: Sequence[int], group: int, rows: slice | None = None
) -> tuple[Tensor, Pending]:
    x, weight, bias = make_inputs(group, len(slots), backend.pool.arena.dtype)
    rows = rows or slice(None)
    made = backend.begin(batch_of(slots[rows])).product(x[rows], DenseWeight(weight), bias, group)
    assert made is not None
    y, pending = made
    assert pending is not None
    return y, Pending(pending.add_TO.clone(), pending.slot_T.clone())


@DTYPES
@pytest.mark.parametrize("slots", [[2], [-1, 0, 1, 1, 3], [*[-1] * 2, *[0] * 18, 1, 2, 3]])
def test_product_and_delta(slots: list[int], dtype: torch.dtype) -> None:
    backend = make_backend(dtype)
    for group in TABLE.groups:
        x, weight, bias = (t.double() for t in make_inputs(group.index, len(slots), dtype))
        y, pending = product(backend, slots, group.index)
        want = x @ weight.t() + bias
        bound = 1.01 * UNIT[dtype] * want.abs() + 2.0**-18 * want.abs().max()
        assert bool(((y.double() - want).abs() <= bound).all())
        assert pending.slot_T.tolist() == slots
        whole = pending.added_to(y)
        for t, slot in enumerate(slots):
            view = backend.pool.view(slot, group.index) if slot >= 0 else None
            delta = torch.zeros(group.out_features, dtype=torch.float64)
            if view is not None:
                v = view.a_RI.double() @ x[t]
                for s in view.slices:
                    delta[s.out_start : s.out_stop] = s.b_OR.double() @ v[s.r_start : s.r_stop]
            untouched = delta == 0
            assert torch.equal(whole[t, untouched], y[t, untouched])
            if slot >= 0:
                bound = 1.01 * UNIT[dtype] * delta.abs() + 2.0**-18 * (1 + delta.abs().max())
                error = (pending.add_TO[t].double() - delta).abs()
                assert bool((error <= bound).all()), (group.index, t)


def test_a_row_does_not_see_the_others() -> None:
    """Alone, among others and in a segment of several tiles: the same bits."""
    backend = make_backend(torch.float32)
    slots = [-1, *[0] * 18, 1, 1, 3]
    for group in TABLE.groups:
        _, together = product(backend, slots, group.index)
        for t in (5, 18, 20, 21):
            _, alone = product(backend, slots, group.index, slice(t, t + 1))
            assert torch.equal(alone.add_TO[0], together.add_TO[t]), (group.index, t)


@pytest.mark.parametrize("slots", [[-1, -1], [0, 1, 1]], ids=["base", "adapters"])
def test_flags_are_ready_for_the_next(slots: list[int]) -> None:
    """Nobody's flag or counter is left behind."""
    backend = make_backend(torch.float32)
    product(backend, slots, 0)
    assert not backend.flags.any()


def test_delta_is_that_of_the_kernels_for_many_rows() -> None:
    """To the bit, added to zeros."""
    backend = make_backend(torch.float32)
    slots = [0, 1, 1, 2, 3]
    for group in TABLE.groups:
        x, _, _ = make_inputs(group.index, len(slots), torch.float32)
        y = torch.zeros(len(slots), group.out_features)
        step = backend.begin(batch_of(slots))
        step.linear(y, x, group.index)
        _, pending = product(backend, slots, group.index)
        assert torch.equal(pending.added_to(torch.zeros_like(y)), y)


@pytest.mark.parametrize("cut", [Cut(32, 1, 2), Cut(16, 4, 2, columns=32)])
def test_parts_of_a_product(cut: Cut) -> None:
    x, weight, _ = make_inputs(1, 5, torch.float32)
    y = kernels.launch(x, weight, None, cut, None).y_TO
    check_product(y, x, weight)


@pytest.mark.parametrize("outputs", [32, 64])
def test_any_number_of_blocks_of_64_inputs(outputs: int) -> None:
    x, weight = torch.randn(5, 5 * 64), torch.randn(outputs, 5 * 64)
    cut = kernels.cut_of(x, weight)
    assert cut is not None and cut.fits(len(x), *weight.shape)
    check_product(kernels.linear(x, weight, None), x, weight)
    alike = [kernels.linear(x[:n], weight, None, deterministic=True)[0] for n in (1, 5)]
    assert torch.equal(*alike)


@pytest.mark.parametrize("split", [1, 2])
@pytest.mark.parametrize("num_outputs", [1, 33, 80])
def test_few_outputs_may_be_odd(num_outputs: int, split: int) -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(n, 512, generator=generator) for n in (5, num_outputs))
    bias = torch.randn(num_outputs, generator=generator)
    assert kernels.cut_of(x, weight) is not None
    found = kernels.launch(x, weight, bias, Cut(128, split, 3, columns=32), None).y_TO
    check_product(found - bias, x, weight)


def test_what_it_is_not_for() -> None:
    """More rows than a few, widths that don't fit: the caller takes another way."""
    weight = torch.randn(128, 128)
    for x in (torch.randn(kernels.MOST_ROWS + 1, 128), torch.randn(0, 128)):
        assert kernels.cut_of(x, weight) is None
        check_product(kernels.linear(x, weight, None), x, weight)
    assert kernels.cut_of(torch.randn(3, 96), torch.randn(128, 96)) is None
    assert kernels.cut_of(torch.randn(3, 128), torch.randn(1040, 128)) is None


@DTYPES
def test_ops_add_what_is_pending(dtype: torch.dtype) -> None:
    """As if it had been added before; base rows as without."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    def pending(width: int) -> Pending:
        add = torch.randn(3, width, generator=generator)
        add[1] = torch.nan
        return Pending(add, torch.tensor([2, -1, 0], dtype=torch.int32))

    close = {"atol": 4 * 2.0**-11, "rtol": 4 * 2.0**-11, "equal_nan": True}
    triton, plain = TritonOps(CPU), Ops()
    x, delta, weight, more = random(3, 40), random(3, 40), random(40), pending(40)
    x_plain = x.clone()
    want = plain.rms_norm(x_plain, weight, 1e-6, Product(more.added_to(delta)))
    torch.testing.assert_close(
        triton.rms_norm(x, weight, 1e-6, Product(delta, more)), want, **close
    )
    assert torch.equal(x, x_plain)
    y, more = random(3, 80), pending(80)
    want = plain.activate_and_mul(Product(more.added_to(y)))
    torch.testing.assert_close(triton.activate_and_mul(Product(y, more)), want, **close)
    assert torch.equal(plain.activate_and_mul(Product(y, more)), want)

    batch = make_batch([1, 1, 1], [1, 1, 1], [[0], [1], [2]], 4)
    caches = [KVCache(torch.zeros(3, 4, 2, 8).to(dtype), torch.zeros(3, 4, 2, 8).to(dtype))]
    caches.append(KVCache(caches[0].k.clone(), caches[0].v.clone()))
    angle = torch.rand(3, 4, generator=generator)
    cos, sin = torch.cat((angle.cos(),) * 2, -1), torch.cat((-angle.sin(), angle.sin()), -1)
    table = torch.stack((cos, sin), 1).to(dtype)
    rope = Rope(table[:, :1], table[:, 1:])
    qkv, more = random(3, 64), pending(64)
    got = triton.rope_and_write(Product(qkv.clone(), more), rope, None, 1e-6, caches[0], batch)
    want = plain.rope_and_write(Product(qkv.clone(), more), rope, None, 1e-6, caches[1], batch)
    torch.testing.assert_close(got, want, **close)
    torch.testing.assert_close(caches[0].k, caches[1].k, **close)
    assert torch.equal(caches[0].v, caches[1].v)

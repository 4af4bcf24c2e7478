"""Products for few rows at the shapes of an 8B model, on a GPU, against dense products in fp32.

Bounds. The base product sums in fp32 and rounds once: 2^-8 of y in bf16 and 2^-11 in fp16, and
2^-16 of the largest y for the order of up to 14,336 terms. delta is fp32; v enters its product as
the sum of two numbers of 16 bits, which together hold 16 bits and more: 2^-14 of the largest delta.
"""

from __future__ import annotations

import pytest
import torch
from fp8_cases import as_fp8
from torch import Tensor

pytest.importorskip("triton")

from lora_pools import batch_of, random_pool
from tables import build_table

from weft.kernels import triton_choice, triton_experts
from weft.kernels.activations import Activation, ClampedSwiglu, activate_and_mul
from weft.kernels.experts import Chosen, ExpertChoice, ExpertWeights, choose_experts
from weft.kernels.linear import DenseWeight
from weft.kernels.lora import triton as lora_kernels
from weft.kernels.lora import triton_many
from weft.kernels.lora.triton import TritonBackend
from weft.kernels.ops import Pending, Product
from weft.kernels.quant import e4m3, fp8, triton_fp8
from weft.kernels.triton_ops import TritonOps

TABLE = build_table(
    [
        ("linear", 4096, [("q", 4096), ("k", 1024), ("v", 1024)]),
        ("linear", 4096, [("o", 4096)]),
        ("linear", 4096, [("gate", 14336), ("up", 14336)]),
        ("linear", 14336, [("down", 4096)]),
    ]
)
RANKS = (
    (16,) * 7,
    (64, 0, 8, 128, 32, 32, 256),
    (3, 1, 40, 5, 0, 7, 33),
    (0, 0, 0, 16, 0, 0, 0),
)
ROUNDING = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
SLOTS = {
    "lone": [1],
    "few": [-1, 0, 0, 2, 2, 3, 1, -1],
    "one for all": [0] * 33,
    "many": [-1, *[0] * 20, *[1] * 17, *[2] * 16, *[3] * 10],
    "more": [*[-1] * 9, *[0] * 50, *[1] * 40, *[3] * 29],
}
ROWS = pytest.mark.parametrize("slots", list(SLOTS.values()), ids=list(SLOTS))


@pytest.fixture(scope="module", params=list(ROUNDING), ids=str)
def backend(request: pytest.FixtureRequest) -> TritonBackend:
    return TritonBackend(random_pool(TABLE, RANKS, request.param, "cuda", std=0.05))


def _inputs(group: int, num_rows: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    of = TABLE.groups[group]
    generator = torch.Generator("cuda").manual_seed(group)
    shapes = (num_rows, of.in_features), (of.out_features, of.in_features)
    x, weight = (torch.randn(s, generator=generator, device="cuda").to(dtype) for s in shapes)
    return x, weight


def _product(
    backend: TritonBackend, slots: list[int], group: int, rows: slice
) -> tuple[Tensor, Pending]:
    """Of some rows of the batch, in which the rows of a slot lie together."""
    x, weight = _inputs(group, len(slots), backend.pool.arena.dtype)
    step = backend.begin(batch_of(slots[rows], device="cuda"))
    made = step.product(x[rows], DenseWeight(weight), None, group)
    assert made is not None
    y, pending = made
    assert pending is not None
    return y, Pending(pending.add_TO.clone(), pending.slot_T.clone())


@ROWS
def test_product_and_delta(backend: TritonBackend, slots: list[int]) -> None:
    rounding = ROUNDING[backend.pool.arena.dtype]
    for group in TABLE.groups:
        x, weight = (t.double() for t in _inputs(group.index, len(slots), backend.pool.arena.dtype))
        y, pending = _product(backend, slots, group.index, slice(None))
        want = x @ weight.t()
        bound = 1.01 * rounding * want.abs() + 2.0**-16 * want.abs().max()
        assert bool(((y.double() - want).abs() <= bound).all())
        whole = pending.added_to(y)
        for t, slot in enumerate(slots):
            view = backend.pool.view(slot, group.index) if slot >= 0 else None
            delta = torch.zeros(group.out_features, dtype=torch.float64, device="cuda")
            if view is not None:
                v = view.a_RI.double() @ x[t]
                for s in view.slices:
                    delta[s.out_start : s.out_stop] = s.b_OR.double() @ v[s.r_start : s.r_stop]
            untouched = delta == 0
            assert torch.equal(whole[t, untouched], y[t, untouched])
            if view is not None:
                bound = 1.01 * rounding * delta.abs() + 2.0**-14 * delta.abs().max()
                error = (pending.add_TO[t].double() - delta).abs()
                assert bool((error <= bound).all()), (group.index, t)


def test_a_row_does_not_see_the_others(backend: TritonBackend) -> None:
    """Alone, among others and in a segment of several tiles: the same bits."""
    slots = SLOTS["many"]
    for group in TABLE.groups:
        _, together = _product(backend, slots, group.index, slice(None))
        for t in (1, 20, 30, 40, 63):
            _, alone = _product(backend, slots, group.index, slice(t, t + 1))
            assert torch.equal(alone.add_TO[0], together.add_TO[t]), (group.index, t)


@pytest.mark.parametrize("num_rows", [1, 8, 64])
@pytest.mark.parametrize(
    "shape", [(32, 4, 2880, 2880), (32, 4, 2880, 1440), (64, 8, 2048, 768)], ids=str
)
def test_experts(shape: tuple[int, int, int, int], num_rows: int) -> None:
    """Each token gets the sum of its experts, and no bit of it depends on the other tokens. What is
    between the two products, and y, are rounded to bf16."""
    num_experts, top_k, hidden, width = shape
    generator = torch.Generator("cuda").manual_seed(0)

    def random(*sizes: int) -> Tensor:
        made = torch.randn(sizes, generator=generator, device="cuda") / sizes[-1] ** 0.5
        return made.bfloat16()

    gate_up_EOI = random(num_experts, 2 * width, hidden)
    down_EIF = random(num_experts, hidden, width)
    bias_EO, bias_EI = random(num_experts, 2 * width), random(num_experts, hidden)
    weights = ExpertWeights(gate_up_EOI, down_EIF, bias_EO, bias_EI)
    x_TI, logits_TE = random(num_rows, hidden) * hidden**0.5, random(num_rows, num_experts)
    choice, activation = ExpertChoice(top_k, True, False, False), ClampedSwiglu(1.702, 7.0)
    chosen = triton_choice.choose_experts(Product(logits_TE), choice, weights)
    y_TI = triton_experts.mixture(x_TI, chosen, weights, activation)
    assert y_TI is not None
    weight_TK, expert_TK = choose_experts(logits_TE, choice)
    for t in range(0, num_rows, 9):
        wanted_I = torch.zeros(hidden, dtype=torch.float64, device="cuda")
        for weight, e in zip(weight_TK[t], expert_TK[t].tolist(), strict=True):
            inner = gate_up_EOI[e].double() @ x_TI[t].double() + bias_EO[e]
            inner = activate_and_mul(inner, activation)
            wanted_I += weight * (down_EIF[e].double() @ inner + bias_EI[e])
        error = (y_TI[t] - wanted_I).norm() / wanted_I.norm()
        assert error < 2.0**-7
        alone = slice(t, t + 1)
        of_one = Chosen(chosen.weight_TK[alone], chosen.expert_TK[alone])
        alone_1I = triton_experts.mixture(x_TI[alone], of_one, weights, activation)
        assert alone_1I is not None
        assert torch.equal(alone_1I[0], y_TI[t])


def test_tiles_that_are_computed_together(
    backend: TritonBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """v of several tiles of an adapter, taken at once, is that of each tile alone, to the bit."""
    slots = [*[-1] * 5, *[0] * 90, *[1] * 17, *[2] * 150, *[3] * 64]
    for group in TABLE.groups:
        x, _ = _inputs(group.index, len(slots), backend.pool.arena.dtype)
        made = []
        for together in (triton_many.TOGETHER, 1):
            monkeypatch.setattr(lora_kernels, "TOGETHER", together)
            step = backend.begin(batch_of(slots, device="cuda"))
            y = torch.zeros(len(slots), group.out_features, dtype=x.dtype, device="cuda")
            step.linear(y, x, group.index)
            made.append(y)
        assert torch.equal(*made) and made[0].any()


def test_products_in_fp8() -> None:
    """Against float32 on the same rounded operands; y is rounded once, to bf16."""
    torch.manual_seed(0)
    w = torch.randn(6144, 4096, device="cuda", dtype=torch.bfloat16) * 0.02
    b = torch.randn(6144, device="cuda", dtype=torch.bfloat16)
    weight = fp8.quantize_dynamic(w)
    for rows in (1, 7, 64, 100):
        x = torch.randn(rows, 4096, device="cuda", dtype=torch.bfloat16)
        q, scale = triton_fp8.quantize_rows(x)
        expected = e4m3.quantize_rows(x)
        assert torch.equal(q.view(torch.uint8), expected[0].view(torch.uint8))
        assert torch.equal(scale, expected[1])
        wanted = as_fp8(x.float()) @ weight.dequantized(torch.float32).t() + b.float()
        torch.testing.assert_close(weight.apply(x, b).float(), wanted, rtol=2e-2, atol=4e-2)


MANY = [*[-1] * 37, *[0] * 50, *[1] * 17, *[2] * 16, *[3] * 10]


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("slots", [MANY, MANY[37:], [0] * 300], ids=["mixed", "no base", "one"])
def test_a_gated_mlp_of_many_rows(
    backend: TritonBackend, slots: list[int], activation: Activation
) -> None:
    """Gate, up and the activation come of one kernel, and what it leaves of down."""
    dtype = backend.pool.arena.dtype
    x, weight = _inputs(2, len(slots), dtype)
    dense = DenseWeight(weight / 64)
    step = backend.begin(batch_of(slots, device="cuda"))
    inner = step.gated(x, dense, None, 2, 3, activation)
    assert inner is not None
    down = torch.zeros(len(slots), 4096, dtype=dtype, device="cuda")
    step.start(inner, 3)
    step.linear(down, inner, 3)
    y = dense.apply(x, None)
    without = TritonOps(y.device).activate_and_mul(Product(y), activation)
    for t, slot in enumerate(slots):
        delta, want_down = y.new_zeros(y.shape[1], dtype=torch.float64), torch.zeros_like(down[t])
        view = backend.pool.view(slot, 2) if slot >= 0 else None
        if view is not None:
            v = view.a_RI.double() @ x[t].double()
            for s in view.slices:
                delta[s.out_start : s.out_stop] = s.b_OR.double() @ v[s.r_start : s.r_stop]
        whole = (y[t].double() + delta).to(dtype)
        want = activate_and_mul(whole[None].float(), activation)[0]
        error = (inner[t].float() - want).abs()
        assert error.max() <= 4 * ROUNDING[dtype] * want.abs().max(), (t, slot)
        if slot < 0:
            assert torch.equal(inner[t], without[t])
            assert not down[t].any()
            continue
        view = backend.pool.view(slot, 3)
        if view is not None:
            v = view.a_RI.double() @ inner[t].double()
            want_down = view.slices[0].b_OR.double() @ v
        error = (down[t].double() - want_down.double()).abs().max()
        assert error <= 1.1 * ROUNDING[dtype] * want_down.double().abs().max(), (t, slot)

"""Mixtures of experts for few rows, in Triton's interpreter, against every expert in float64.

Bounds. Sums in fp32 have some hundred terms: 2^-18 of the largest magnitude.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import weft.kernels.triton_choice as of_choice
import weft.kernels.triton_experts as kernels
from weft.core.units import EXPERT_UNIT
from weft.kernels.activations import Activation, ClampedSwiglu, reference_activate_and_mul
from weft.kernels.experts import Chosen, ExpertAdapters, ExpertChoice, ExpertWeights
from weft.kernels.experts import choose_experts as torch_choose
from weft.kernels.ops import Ops, Pending, Product, Shared

pytestmark = pytest.mark.skipif(not kernels.INTERPRETED, reason="compiled kernels are for a GPU")

HIDDEN, WIDTH = 128, 96
CLAMPED = ClampedSwiglu(1.702, 0.5)


def make_weights(
    num_experts: int, biased: bool, generator: torch.Generator, parts: int = 2
) -> ExpertWeights:
    """`parts`: of the first matrix, 2 for gate and up."""

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator) / shape[-1] ** 0.5

    width = WIDTH if parts == 2 else 128
    biases = (random(num_experts, parts * width), random(num_experts, HIDDEN)) if biased else ()
    weights = random(num_experts, parts * width, HIDDEN), random(num_experts, HIDDEN, width)
    return ExpertWeights(*weights, *biases)


def choose(
    logits: Product,
    choice: ExpertChoice,
    scale_E: Tensor | None = None,
    correction_E: Tensor | None = None,
) -> Chosen:
    """What the kernel chooses of experts whose matrices don't matter."""
    nothing = logits.y_TO
    experts = ExpertWeights(nothing, nothing, scale_E=scale_E, correction_E=correction_E)
    return of_choice.choose_experts(logits, choice, experts)


def expected(
    x_TI: Tensor,
    weight_TK: Tensor,
    expert_TK: Tensor,
    weights: ExpertWeights,
    activation: Activation,
) -> Tensor:
    """The sum of each token's experts, one by one, in float64 but for the activation."""
    out_TI = torch.zeros(x_TI.shape, dtype=torch.float64)
    for t, k in torch.cartesian_prod(*map(torch.arange, expert_TK.shape)).tolist():
        expert = int(expert_TK[t, k])
        inner = weights.gate_up_EOI[expert].double() @ x_TI[t].double()
        if weights.gate_up_bias_EO is not None:
            inner += weights.gate_up_bias_EO[expert]
        inner = reference_activate_and_mul(inner.float(), activation).double()
        y_I = weights.down_EIF[expert].double() @ inner
        if weights.down_bias_EI is not None:
            y_I += weights.down_bias_EI[expert]
        out_TI[t] += weight_TK[t, k] * y_I
    return out_TI


@pytest.mark.parametrize(
    ("num_rows", "num_experts", "top_k", "activation"),
    [
        pytest.param(1, 8, 4, CLAMPED, id="one token"),
        pytest.param(5, 16, 3, "silu", id="fewer pairs than experts"),
        pytest.param(33, 4, 2, CLAMPED, id="more tokens of an expert than a program takes at once"),
        pytest.param(64, 5, 1, "gelu_tanh", id="one expert each"),
        pytest.param(9, 6, 2, "relu2", id="without gates"),
    ],
)
def test_each_token_gets_the_sum_of_its_experts(
    num_rows: int, num_experts: int, top_k: int, activation: Activation
) -> None:
    generator = torch.Generator().manual_seed(num_rows)
    parts = 1 if activation == "relu2" else 2
    weights = make_weights(num_experts, activation is CLAMPED, generator, parts)
    x_TI = torch.randn(num_rows, HIDDEN, generator=generator)
    logits_TE = torch.randn(num_rows, num_experts, generator=generator)
    weight_TK, expert_TK, _ = choose(Product(logits_TE), ExpertChoice(top_k, False, True, False))
    found_TI = kernels.mixture(x_TI, Chosen(weight_TK, expert_TK), weights, activation)
    assert found_TI is not None
    wanted_TI = expected(x_TI, weight_TK, expert_TK, weights, activation)
    error = (found_TI - wanted_TI).abs().max() / wanted_TI.abs().max()
    assert error < 2.0**-18
    last = Chosen(weight_TK[-1:], expert_TK[-1:])
    alone_1I = kernels.mixture(x_TI[-1:], last, weights, activation)
    assert alone_1I is not None and torch.equal(alone_1I[0], found_TI[-1])


@pytest.mark.parametrize("weighed", [False, True])
@pytest.mark.parametrize("num_rows", [1, 20])
def test_the_shared_expert_s_part_is_added(num_rows: int, weighed: bool) -> None:
    """What adapters add to it counts for the rows that have one, and is undefined for others."""
    generator = torch.Generator().manual_seed(num_rows)
    weights = make_weights(4, False, generator)
    x_TI, y_TI, add_TI = torch.randn(3, num_rows, HIDDEN, generator=generator)
    slot_T = torch.arange(num_rows, dtype=torch.int32) % 3 - 1
    add_TI[slot_T < 0] = torch.nan
    weight_T1 = torch.rand(num_rows, 1, generator=generator) if weighed else None
    shared = Shared(Product(y_TI, Pending(add_TI, slot_T)), weight_T1)
    logits = Product(torch.randn(num_rows, 4, generator=generator))
    chosen = choose(logits, ExpertChoice(2, False, True, False))
    alone_TI = kernels.mixture(x_TI, chosen, weights, "silu")
    found_TI = kernels.mixture(x_TI, chosen, weights, "silu", shared)
    assert alone_TI is not None and found_TI is not None
    torch.testing.assert_close(found_TI, alone_TI + shared.whole())


@pytest.mark.parametrize("num_rows", [1, 20])
@pytest.mark.parametrize("activation", ["silu", CLAMPED, "relu2"], ids=str)
def test_adapters_add_to_both_products(activation: Activation, num_rows: int) -> None:
    """Here the same matrix to those of all experts, so that it could be a part of them."""
    generator = torch.Generator().manual_seed(num_rows)
    parts = 1 if activation == "relu2" else 2
    weights = make_weights(4, activation is CLAMPED, generator, parts)
    shapes = [weights.gate_up_EOI.shape[1:]] * 2 + [weights.down_EIF.shape[1:]]
    deltas = [torch.randn(shape, generator=generator) / shape[-1] ** 0.5 for shape in shapes]

    def add(y_PO: Tensor, x_PI: Tensor, group: int) -> None:
        y_PO += x_PI @ deltas[group].t()

    x_TI = torch.randn(num_rows, HIDDEN, generator=generator)
    logits = Product(torch.randn(num_rows, 4, generator=generator))
    chosen = choose(logits, ExpertChoice(2, False, True, False))
    adapters = ExpertAdapters(add, (0, 1), (2,))
    found_TI = kernels.mixture(x_TI, chosen, weights, activation, adapters=adapters)
    adapted = replace(
        weights,
        gate_up_EOI=weights.gate_up_EOI + deltas[0] + deltas[1],
        down_EIF=weights.down_EIF + deltas[2],
    )
    assert found_TI is not None
    wanted_TI = expected(x_TI, chosen.weight_TK, chosen.expert_TK, adapted, activation)
    error = (found_TI - wanted_TI).abs().max() / wanted_TI.abs().max()
    assert error < 2.0**-18


@pytest.mark.parametrize(("num_rows", "num_inputs"), [(1, 128), (9, 100), (64, 5000)])
def test_routers_in_float32(num_rows: int, num_inputs: int) -> None:
    generator = torch.Generator().manual_seed(num_rows)
    x_TI = torch.randn(num_rows, 2 * num_inputs, generator=generator).bfloat16()[:, :num_inputs]
    weight_OI = torch.randn(7, num_inputs, generator=generator)
    found_TO = of_choice.exact_linear(x_TI, weight_OI)
    assert found_TO is not None
    wanted_TO = x_TI.double() @ weight_OI.double().t()
    assert (found_TO - wanted_TO).abs().max() < 2.0**-18 * wanted_TO.abs().max()
    alone_1O = of_choice.exact_linear(x_TI[-1:], weight_OI)
    assert alone_1O is not None and torch.equal(alone_1O[0], found_TO[-1])


@pytest.mark.parametrize("shape", [(0, 8), (65, 8), (1, 8193)])
def test_other_routers_are_left_to_torch(shape: tuple[int, int]) -> None:
    assert of_choice.exact_linear(torch.zeros(shape), torch.zeros(2, shape[1])) is None


@pytest.mark.usefixtures("unwritten_is_nan")
@pytest.mark.parametrize("num_rows", [1, 7])
def test_ranks_with_some_experts_each_add_up_to_all(num_rows: int) -> None:
    """Some of the tokens have no expert of a rank."""
    generator = torch.Generator().manual_seed(num_rows)
    every = make_weights(6, True, generator)
    every = replace(every, scale_E=torch.rand(6, generator=generator))
    x_TI = torch.randn(num_rows, HIDDEN, generator=generator)
    logits = Product(torch.randn(num_rows, 6, generator=generator))
    choice = ExpertChoice(2, False, True, False)
    chosen = of_choice.choose_experts(logits, choice, every)
    wanted_TI = kernels.mixture(x_TI, chosen, every, CLAMPED)
    assert wanted_TI is not None
    left_TI = wanted_TI.clone()
    for first in (0, 2, 4):
        here = slice(first, first + 2)
        names = "gate_up_EOI", "down_EIF", "gate_up_bias_EO", "down_bias_EI"
        own = replace(every, first=first, **{name: getattr(every, name)[here] for name in names})
        chosen = of_choice.choose_experts(logits, choice, own)
        found_TI = kernels.mixture(x_TI, chosen, own, CLAMPED)
        assert found_TI is not None
        left_TI -= found_TI
    assert left_TI.abs().max() < 2.0**-18 * wanted_TI.abs().max()


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize(
    "choice",
    [
        ExpertChoice(5, of_chosen=True, normalize=False, rounded=False),
        ExpertChoice(5, of_chosen=False, normalize=True, rounded=True),
        ExpertChoice(5, of_chosen=False, normalize=False, rounded=False),
    ],
    ids=["of chosen", "normalized", "of all"],
)
def test_the_likeliest_experts_are_chosen(choice: ExpertChoice, scaled: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    logits_TE, add_TE = torch.randn(2, 7, 37, generator=generator)
    slot_T = torch.tensor([-1, 0, 3, -1, 1, 0, -1], dtype=torch.int32)
    logits = Product(logits_TE, Pending(add_TE, slot_T))
    scale_E = torch.rand(37, generator=generator) if scaled else None
    weight_TK, expert_TK, _ = choose(logits, choice, scale_E)
    wanted_TK, order_TK = torch_choose(logits.whole(), choice, scale_E)
    assert torch.equal(expert_TK, order_TK)
    torch.testing.assert_close(weight_TK, wanted_TK)


@pytest.mark.parametrize("num_rows", [0, 3])
@pytest.mark.parametrize("first", [None, 4])
def test_the_last_logit_weighs_the_shared_expert(num_rows: int, first: int | None) -> None:
    generator = torch.Generator().manual_seed(0)
    logits_TO, add_TO = torch.randn(2, num_rows, 9, generator=generator)
    slot_T = torch.tensor([-1, 2, 0], dtype=torch.int32)[:num_rows]
    logits = Product(logits_TO, Pending(add_TO, slot_T))
    choice = ExpertChoice(2, False, True, False, weighs_shared=True)
    experts = ExpertWeights(logits_TO, logits_TO, first=first)
    found = of_choice.choose_experts(logits, choice, experts)
    torch.testing.assert_close(found, Ops().choose_experts(logits, choice, experts))
    assert found.shared_T1 is not None and found.shared_T1.shape == (num_rows, 1)


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("sigmoid", [False, True])
@pytest.mark.parametrize("groups", [(1, 1), (4, 2), (9, 3), (3, 3)])
def test_experts_are_chosen_by_corrected_weights(
    groups: tuple[int, int], sigmoid: bool, normalize: bool
) -> None:
    """Of the best groups, whose best experts may not be among the best of all."""
    generator = torch.Generator().manual_seed(0)
    logits = Product(3 * torch.randn(20, 36, generator=generator))
    correction_E = torch.randn(36, generator=generator) / 8
    choice = ExpertChoice(6, False, normalize, False, sigmoid, *groups, least_sum=0.25)
    weight_TK, expert_TK, _ = choose(logits, choice, correction_E=correction_E)
    wanted_TK, order_TK = torch_choose(logits.whole(), choice, correction_E=correction_E)
    assert torch.equal(expert_TK, order_TK)
    torch.testing.assert_close(weight_TK, wanted_TK)
    others_TK = torch_choose(logits.whole(), replace(choice, groups=1, top_groups=1))[1]
    assert not torch.equal(expert_TK, others_TK), "neither groups nor corrections matter"


@pytest.mark.parametrize("best_of_group", [1, 2])
def test_groups_without_corrections_are_rated_by_their_best_experts(best_of_group: int) -> None:
    logits = Product(3 * torch.randn(20, 36, generator=torch.Generator().manual_seed(0)))
    choice = ExpertChoice(6, False, False, False, False, 9, 3, best_of_group)
    weight_TK, expert_TK, _ = choose(logits, choice)
    wanted_TK, order_TK = torch_choose(logits.whole(), choice)
    assert torch.equal(expert_TK, order_TK)
    torch.testing.assert_close(weight_TK, wanted_TK)
    other = replace(choice, best_of_group=3 - best_of_group)
    assert not torch.equal(expert_TK, torch_choose(logits.whole(), other)[1])


def test_logits_that_are_no_numbers_choose_experts_that_are_there() -> None:
    logits_TE = torch.full((2, 3), torch.nan)
    logits_TE[1] = torch.tensor([-torch.inf, 1.0, -torch.inf])
    _, expert_TK, _ = choose(Product(logits_TE), ExpertChoice(3, False, True, False))
    assert expert_TK.sort().values.tolist() == [[0, 1, 2]] * 2


def test_what_these_kernels_are_not_for_is_left_to_others() -> None:
    generator = torch.Generator().manual_seed(0)
    weights = make_weights(2, False, generator)
    for x_TI in (torch.randn(65, HIDDEN), torch.randn(0, HIDDEN)):
        assert kernels.mixture(x_TI, first_of_all(len(x_TI)), weights, "silu") is None
    narrow = ExpertWeights(weights.gate_up_EOI[:, :-2], weights.down_EIF[..., :-1])
    assert kernels.mixture(torch.randn(1, HIDDEN), first_of_all(1), narrow, "silu") is None


@pytest.mark.parametrize("width", [3 * EXPERT_UNIT, EXPERT_UNIT // 2])
def test_widths_are_taken_in_the_units_by_which_experts_are_cut(width: int) -> None:
    weights = ExpertWeights(torch.zeros(2, 2 * width, HIDDEN), torch.zeros(2, HIDDEN, width))
    found = kernels.mixture(torch.zeros(1, HIDDEN), first_of_all(1), weights, "silu")
    assert (found is None) == (width % EXPERT_UNIT > 0)


def first_of_all(num_rows: int) -> Chosen:
    """All tokens choose the first expert."""
    return Chosen(torch.ones(num_rows, 1), torch.zeros(num_rows, 1, dtype=torch.int64))

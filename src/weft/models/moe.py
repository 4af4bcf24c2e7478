"""The MLP of a layer: dense, or a mixture of experts.

Shapes: T token rows, E experts, K experts per token, P = T * K pairs of a token and an expert,
I hidden size, F width of an expert.

Pairs are ordered by expert, and within an expert as the tokens are. So the rows of one expert are
consecutive, and among them the rows of one adapter.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.core.errors import ConfigError
from weft.kernels.activations import Activation
from weft.kernels.collective.base import Ranks
from weft.kernels.experts import Chosen, ExpertAdapters, ExpertChoice, ExpertWeights
from weft.kernels.lora.base import ExpertStep, LoraStep
from weft.kernels.ops import Ops, Product, Shared
from weft.models.family import MoeConfig
from weft.models.layers import Linear, StepContext


class Routing(NamedTuple):
    """The pairs of a step, in the order in which experts compute them."""

    order_P: Tensor
    """The pair at each place, int64, as token * K + rank."""
    place_P: Tensor
    """The place of each pair, int64; the inverse of `order_P`."""
    expert_P: Tensor
    """The expert at each place, int64, ascending; -1 at the last places, if those experts are on
    other ranks."""
    ends_E: Tensor
    """The first place beyond each expert's, int32."""


def route(expert_TK: Tensor, num_experts: int, some: bool = False) -> Routing:
    """Order the pairs by expert, without waiting for the device. `some`: whether there are other
    experts on other ranks, whose numbers are negative or `num_experts` at least."""
    if some:
        expert_TK = expert_TK.where((expert_TK >= 0) & (expert_TK < num_experts), num_experts)
    expert_P, order_P = expert_TK.flatten().sort(stable=True)
    place_P = torch.empty_like(order_P)
    place_P[order_P] = torch.arange(len(order_P), device=order_P.device)
    experts_E = torch.arange(num_experts, device=expert_P.device)
    ends_E = torch.searchsorted(expert_P, experts_E, right=True, out_int32=True)
    if some:
        expert_P = expert_P.where(expert_P < num_experts, -1)
    return Routing(order_P, place_P, expert_P, ends_E)


def grouped_linear(x_PI: Tensor, weight_EOI: Tensor, ends_E: Tensor) -> Tensor:
    """Each expert's matrix times its rows, (P, O); `ends_E`: the end of each expert's rows. Rows
    behind those of the last expert may get any values.

    On a GPU see `is_capturable`. On a CPU only the matrices of experts with rows are read.
    """
    if x_PI.is_cuda:
        return F.grouped_mm(x_PI, weight_EOI.transpose(1, 2), offs=ends_E)
    y_PO = x_PI.new_empty((len(x_PI), weight_EOI.shape[1]))
    begin = 0
    for expert, end in enumerate(ends_E.tolist()):
        if end > begin:
            torch.mm(x_PI[begin:end], weight_EOI[expert].t(), out=y_PO[begin:end])
        begin = end
    return y_PO


def check_width(weight_EOI: Tensor) -> None:
    """Raises ConfigError for experts whose rows are no multiples of 16 bytes, which torch's grouped
    product on a GPU can't read."""
    width, unit = weight_EOI.shape[2], 16 // weight_EOI.itemsize
    if weight_EOI.is_cuda and width % unit:
        raise ConfigError(
            f"experts with {width} inputs can't be computed on a GPU in"
            f" {str(weight_EOI.dtype).removeprefix('torch.')}: {width} is not a multiple of {unit}",
            "moe_intermediate_size",
        )


def is_capturable(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether `grouped_linear` on a GPU works without the host. If torch has no kernel for it, the
    host reads where each expert ends, and launches one product after another."""
    has_kernel = torch.cuda.get_device_capability(device)[0] in (9, 10)
    return has_kernel and dtype == torch.bfloat16


@dataclass(frozen=True, slots=True)
class DenseMlp:
    gate_up: Linear
    down: Linear
    ops: Ops
    activation: Activation

    def __call__(self, x_TI: Tensor, step: StepContext) -> Product:
        gate_up, lora = self.gate_up, step.lora
        made, inner_TF = gate_up.beside(x_TI, step), None
        if made is None and lora is not None:
            groups = gate_up.group, self.down.group
            inner_TF = lora.gated(x_TI, gate_up.weight, gate_up.bias_O, *groups, self.activation)
        if inner_TF is None:
            product = made or Product(gate_up.whole(x_TI, step))
            inner_TF = self.ops.activate_and_mul(product, self.activation)
        return self.down(inner_TF, step)


@dataclass(frozen=True, slots=True)
class Latents:
    """The projections around experts that read and give latents, which are narrower than tokens."""

    into: Linear
    out: Linear
    ranks: Ranks

    def after(self, y_TL: Tensor, step: StepContext) -> Tensor:
        """The rank's part of the layer's output, (T, I), from its part of what the experts give. As
        adapters may add a constant to the output, one rank has all of it, and others have zeros."""
        y_TI = self.out.whole(self.ranks.sum(y_TL), step)
        return torch.zeros_like(y_TI) if self.ranks.rank else y_TI


@dataclass(frozen=True, slots=True)
class Experts:
    """A linear layer with one matrix for each expert."""

    weight_EOI: Tensor
    groups: tuple[int, ...]
    """The groups of the model's TargetTable that adapt it; each adds its part."""
    bias_EO: Tensor | None

    def __call__(self, x_PI: Tensor, routing: Routing, lora: ExpertStep | None) -> Tensor:
        y_PO = grouped_linear(x_PI, self.weight_EOI, routing.ends_E)
        if self.bias_EO is not None:
            # Rows of experts elsewhere, -1, hold anything, and get some bias too: nobody uses them.
            y_PO += self.bias_EO[routing.expert_P]
        if lora is not None:
            for group in self.groups:
                lora.linear(y_PO, x_PI, group)
        return y_PO


@dataclass(frozen=True, slots=True)
class SparseMlp:
    """Router and experts of one layer."""

    router: Linear
    gate_up: Experts
    down: Experts
    moe: MoeConfig
    ops: Ops
    activation: Activation
    shared: DenseMlp | None = None
    """An expert that all tokens go through."""
    scale_E: Tensor | None = None
    """Factors of the experts' weights; None: 1."""
    first: int | None = None
    """The number of the first expert on this rank; None: all experts are."""
    correction_E: Tensor | None = None
    """What is added to the experts' weights for the choice alone; None: nothing."""
    latents: Latents | None = None

    def __call__(self, x_TI: Tensor, step: StepContext, routed_TI: Tensor | None = None) -> Product:
        """`routed_TI`: what the router reads; None: x itself."""
        logits = self._logits(x_TI if routed_TI is None else routed_TI, step)
        weight_T1 = None
        if self.moe.weighs_input:
            logits = Product(logits.whole())
            weight_T1 = logits.y_TO.amax(1, keepdim=True).float().sigmoid().to(x_TI.dtype)
        # Before the next linear layer, as what adapters add to the logits may be pending.
        chosen = self.ops.choose_experts(logits, self.choice, self.experts)
        shared = None
        if self.shared is not None:
            shared = Shared(self.shared(x_TI, step), chosen.shared_T1)
        if weight_T1 is not None:
            x_TI = x_TI * weight_T1
        if self.latents is None:
            return Product(self._mixture(x_TI, chosen, shared, step))
        shared_TI = None if shared is None else shared.whole()
        y_TL = self._mixture(self.latents.into.whole(x_TI, step), chosen, None, step)
        y_TI = self.latents.after(y_TL, step)
        return Product(y_TI if shared_TI is None else y_TI + shared_TI)

    def _logits(self, x_TI: Tensor, step: StepContext) -> Product:
        router = self.router
        if not self.moe.exact_router or x_TI.dtype == torch.float32:
            return router(x_TI, step)
        lora = step.lora if step.changes_experts else None
        if lora is not None:
            lora.start(x_TI, router.group)
        y_TE = self.ops.exact_linear(x_TI, router.weight.dequantized(torch.float32))
        if lora is not None:
            add_TE = torch.zeros_like(y_TE, dtype=x_TI.dtype)
            lora.linear(add_TE, x_TI, router.group)
            y_TE += add_TE
        return Product(y_TE)

    def _mixture(
        self, x_TI: Tensor, chosen: Chosen, shared: Shared | None, step: StepContext
    ) -> Tensor:
        """The sum over each token's experts on this rank, with the shared one's part, (T, I)."""
        lora = step.lora if step.changes_experts else None
        pairs = None if lora is None else lora.pairs(chosen.expert_TK, self.moe.num_here)
        if lora is None or pairs is not None:
            adapters = None
            if pairs is not None:
                adapters = ExpertAdapters(pairs.linear, self.gate_up.groups, self.down.groups)
            experts, activation = self.experts, self.activation
            y_TI = self.ops.mixture(x_TI, chosen, experts, activation, shared, adapters)
            if y_TI is not None:
                return y_TI
        shared_TI = None if shared is None else shared.whole()
        y_TI = self._sorted(x_TI, chosen, lora)
        return y_TI if shared_TI is None else y_TI.add_(shared_TI)

    @property
    def choice(self) -> ExpertChoice:
        moe = self.moe
        weights = moe.weights_of_chosen, moe.normalize, moe.round_weights, moe.sigmoid
        groups = *moe.groups, moe.best_of_group
        return ExpertChoice(moe.top_k, *weights, *groups, moe.least_sum, moe.weighs_shared)

    @property
    def experts(self) -> ExpertWeights:
        into, out = self.gate_up, self.down
        return ExpertWeights(
            *(into.weight_EOI, out.weight_EOI, into.bias_EO, out.bias_EO),
            *(self.scale_E, self.correction_E, self.first),
        )

    def _sorted(self, x_TI: Tensor, chosen: Chosen, lora_step: LoraStep | None) -> Tensor:
        """The sum over each token's experts on this rank, (T, I), by products of rows that are
        ordered by expert."""
        weight_TK, expert_TK, _ = chosen
        routing = route(expert_TK, self.moe.num_here, some=self.first is not None)
        token_P = routing.order_P // self.moe.top_k
        x_PI = x_TI[token_P]
        lora = None
        if lora_step is not None:
            # Ahead of the product: what it makes is read by kernels that start early, before what
            # the one right ahead of them wrote can be seen.
            lora = lora_step.experts(token_P, routing.expert_P)
        gate_up = Product(self.gate_up(x_PI, routing, lora))
        inner_PF = self.ops.activate_and_mul(gate_up, self.activation)
        y_PI = self.down(inner_PF, routing, lora)
        if self.first is not None:
            y_PI.masked_fill_((routing.expert_P < 0)[:, None], 0)
        y_TKI = y_PI[routing.place_P].view(*weight_TK.shape, -1)
        return (y_TKI * weight_TK[:, :, None]).sum(1).to(x_TI.dtype)

"""The activations of MLPs, in plain torch for any device; `weft.kernels.triton_base` has those that
are fused with products.

Shapes: T token rows, F intermediate width.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class ClampedSwiglu(NamedTuple):
    """`(up + 1) * gate * sigmoid(alpha * gate)` of a gate of `limit` at most and an up between
    -limit and limit. Gate and up lie interleaved: one column of each after the other."""

    alpha: float
    limit: float


class Xielu(NamedTuple):
    """The activation xIELU (arXiv 2411.13010): `alpha_p x^2 + beta x` where up x is positive, and
    `alpha_n (expm1(min(x, eps)) - x) + beta x` elsewhere."""

    alpha_p: float
    alpha_n: float
    beta: float
    eps: float


Activation = Literal["silu", "gelu_tanh", "relu2"] | ClampedSwiglu | Xielu
"""The activation before the last product of an MLP. relu2, the square of ReLU, and `Xielu` have no
gate."""


def is_gated(activation: Activation) -> bool:
    """Whether an activation takes both gate and up; otherwise it takes up alone."""
    return activation != "relu2" and not isinstance(activation, Xielu)


def activate_and_mul(gate_up_TF: Tensor, activation: Activation = "silu") -> Tensor:
    """`activation(gate) * up` for gate and up packed along the last dimension: (T, 2 F) -> (T, F).
    gelu_tanh approximates GELU by a tanh. An activation without a gate gets up alone, (T, F)."""
    if isinstance(activation, Xielu):
        return xielu(gate_up_TF.float(), activation).to(gate_up_TF.dtype)
    if activation == "relu2":
        return gate_up_TF.relu().square()
    if isinstance(activation, ClampedSwiglu):
        alpha, limit = activation
        gate = gate_up_TF[..., ::2].clamp(max=limit)
        up = gate_up_TF[..., 1::2].clamp(-limit, limit)
        return (up + 1) * (gate * (gate * alpha).sigmoid())
    gate, up = gate_up_TF.chunk(2, -1)
    active = F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")
    return active.mul_(up)


def xielu(up_TF: Tensor, activation: Xielu) -> Tensor:
    """What `Xielu` says, of fp32."""
    alpha_p, alpha_n, beta, eps = activation
    negative = alpha_n * (up_TF.clamp(max=eps).expm1() - up_TF)
    return torch.where(up_TF > 0, alpha_p * up_TF.square(), negative) + beta * up_TF


def reference_activate_and_mul(gate_up_TF: Tensor, activation: Activation = "silu") -> Tensor:
    """The oracle of `activate_and_mul`, in fp32."""
    if isinstance(activation, Xielu):
        up = gate_up_TF.float()
        curve = activation.alpha_n * (up.clip(max=activation.eps).exp() - 1 - up)
        curve[up > 0] = activation.alpha_p * up[up > 0] ** 2
        return (curve + activation.beta * up).to(gate_up_TF.dtype)
    if activation == "relu2":
        up = gate_up_TF.float()
        return torch.where(up > 0, up * up, 0.0).to(gate_up_TF.dtype)
    if isinstance(activation, ClampedSwiglu):
        alpha, limit = activation
        gate, up = gate_up_TF.float()[..., ::2], gate_up_TF.float()[..., 1::2]
        gate, up = gate.minimum(torch.tensor(limit)), up.clip(-limit, limit) + 1
        return (gate / (1 + (-alpha * gate).exp()) * up).to(gate_up_TF.dtype)
    gate, up = gate_up_TF.float().chunk(2, -1)
    if activation == "silu":
        active = gate / (1 + (-gate).exp())
    else:
        active = gate / 2 * (1 + ((2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3)).tanh())
    return (active * up).to(gate_up_TF.dtype)

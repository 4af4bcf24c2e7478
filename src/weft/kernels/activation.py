"""Activations. Shapes: T token rows, I the intermediate width."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def silu_and_mul(gate_up_TI: Tensor) -> Tensor:
    """`silu(gate) * up` for gate and up packed along the last dimension: (T, 2 I) -> (T, I)."""
    gate, up = gate_up_TI.chunk(2, -1)
    return F.silu(gate).mul_(up)


def reference_silu_and_mul(gate_up_TI: Tensor) -> Tensor:
    """The oracle of `silu_and_mul`, in fp32."""
    gate, up = gate_up_TI.float().chunk(2, -1)
    return (gate / (1 + (-gate).exp()) * up).to(gate_up_TI.dtype)

"""Attention by a recurrent state in place of a KV cache: the gated delta rule.

Shapes: T token rows, I hidden size, G key heads, H value heads, D size of a key, E size of a value,
C channels of the convolution: of all queries, keys and values.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.kernels.delta import Plan, StateCache, causal_conv, gated_delta
from weft.kernels.ops import Product, rms_norm
from weft.models.family import LinearConfig
from weft.models.layers import Linear, StepContext


@dataclass(frozen=True, slots=True)
class LinearAttention:
    """One such layer: projection, convolution, delta rule, gated norm, projection."""

    into: Linear
    """To queries, keys and values, the gate z, and for each value head b and a."""
    out: Linear
    conv_CW: Tensor
    log_a_H: Tensor
    """fp32. With `dt_bias_H`, what a head's decay is made of."""
    dt_bias_H: Tensor
    """fp32."""
    norm_E: Tensor
    eps: float
    shape: LinearConfig

    def __call__(self, x_TI: Tensor, step: StepContext, cache: StateCache) -> Product:
        shape, batch = self.shape, step.attention
        assert step.states is not None
        rows = step.states
        plan = batch.once("states", lambda: Plan.of(rows, x_TI.device))
        y_TO = self.into(x_TI, step).whole()
        qkv_TC, z_TO, b_TH, a_TH = y_TO.split_with_sizes(shape.widths, 1)
        qkv_TC = causal_conv(qkv_TC, self.conv_CW, cache, plan)
        q_TO, k_TO, v_TO = qkv_TC.split_with_sizes((shape.keys, shape.keys, shape.values), 1)
        g_TH = -self.log_a_H.exp() * F.softplus(a_TH.float() + self.dt_bias_H)
        out_THE = gated_delta(
            self._for_value_heads(q_TO),
            self._for_value_heads(k_TO),
            self._by_head(v_TO),
            g_TH,
            b_TH.sigmoid(),
            cache,
            plan,
        )
        gate_THE = self._by_head(z_TO).float()
        normed_THE = rms_norm(out_THE, self.norm_E, self.eps)
        out_THE = (normed_THE.float() * F.silu(gate_THE)).to(x_TI.dtype)
        return self.out(out_THE.flatten(1), step)

    def _by_head(self, x_TO: Tensor) -> Tensor:
        """(T, H E) as (T, H, E)."""
        return x_TO.reshape(-1, self.shape.num_values, self.shape.value_dim)

    def _for_value_heads(self, x_TO: Tensor) -> Tensor:
        """Queries or keys, (T, G D), as (T, H, D): several value heads have the same ones."""
        shape = self.shape
        x_TGD = x_TO.reshape(-1, shape.num_keys, shape.key_dim)
        return x_TGD.repeat_interleave(shape.num_values // shape.num_keys, 1)


def gate_of(q_TO: Tensor, num_heads: int, head_dim: int) -> tuple[Tensor, Tensor]:
    """The queries and the gates of a projection that has both for each head, one after the other:
    each (T, heads * head_dim)."""
    q_TH2D = q_TO.reshape(-1, num_heads, 2 * head_dim)
    q_THD, gate_THD = q_TH2D.split_with_sizes((head_dim, head_dim), 2)
    return q_THD.flatten(1), gate_THD.flatten(1)


def state_bytes(shape: LinearConfig, dtype: torch.dtype) -> int:
    """How many bytes one state takes over all layers."""
    delta = shape.num_values * shape.key_dim * shape.value_dim * torch.float32.itemsize
    conv = shape.channels * (shape.conv_width - 1) * dtype.itemsize
    return sum(shape.layers) * (delta + conv)


def allocate_states(
    shape: LinearConfig, num_states: int, dtype: torch.dtype, device: torch.device | str
) -> StateCache:
    """The states of one layer, zeroed."""
    conv = torch.zeros(
        (num_states, shape.channels, shape.conv_width - 1), dtype=dtype, device=device
    )
    size = (num_states, shape.num_values, shape.key_dim, shape.value_dim)
    return StateCache(conv, torch.zeros(size, dtype=torch.float32, device=device))

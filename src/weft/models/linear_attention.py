"""Layers with a recurrent state in place of a KV cache: the gated delta rule, Mamba 2, or a gated
short convolution.

Shapes: T token rows, I hidden size, O outputs of all heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from weft.core.errors import ConfigError
from weft.core.numbers import next_power_of_2
from weft.core.units import MAX_GUESSES
from weft.kernels.collective.base import Ranks
from weft.kernels.delta import Columns, DeltaLayer, StateCache
from weft.kernels.ops import Ops, Product, rms_norm
from weft.kernels.short_conv import ShortConvLayer
from weft.models.layers import Linear, StepContext
from weft.models.state_config import LinearConfig, ShortConvConfig

MAX_HEAD = 256
"""The most columns of a key or a value of which kernels can have a chunk at once."""


@dataclass(frozen=True, slots=True)
class GroupNorm:
    """The RMS norm of what the heads of each group give."""

    weight_O: Tensor
    eps: float
    num_groups: int
    """Of this rank's heads."""
    ops: Ops
    ranks: Ranks
    """Those that have heads of the same group, if several do."""

    def __call__(self, x_TO: Tensor) -> Tensor:
        if self.ranks.size > 1:
            part_T1 = self.ops.square_parts(x_TO, x_TO.shape[1] * self.ranks.size)
            mean_T1 = self.ranks.sum(part_T1)
            return self.ops.norm_parts(x_TO, mean_T1, self.weight_O, self.eps)
        if self.num_groups == 1:
            return self.ops.rms_norm(x_TO, self.weight_O, self.eps)
        x_TGD = x_TO.view(len(x_TO), self.num_groups, -1)
        return rms_norm(x_TGD, None, self.eps).flatten(1) * self.weight_O


@dataclass(frozen=True, slots=True)
class LinearAttention:
    """A layer of linear attention: projection, convolution, the state's rule, gated norm,
    projection."""

    into: Linear
    """The projection to queries, keys, values, the gate z, and for each value head b and a."""
    out: Linear
    layer: DeltaLayer
    ops: Ops
    norm: GroupNorm | None = None
    """The norm that follows the gates in Mamba 2; None: heads have been normed before."""
    least_H: Tensor | None = None
    """The least value that the projection may give for each head's time step, fp32; lower ones are
    raised to it. None: there is no limit."""

    def __call__(self, x_TI: Tensor, step: StepContext, cache: StateCache) -> Product:
        assert step.states is not None
        y = self.into(x_TI, step)
        if self.least_H is not None:
            y_TO = y.whole()
            steps_TH = y_TO[:, -len(self.least_H) :]
            steps_TH.copy_(steps_TH.float().maximum(self.least_H))
            y = Product(y_TO)
        rows, positions_T = step.states, step.positions_T
        out_TO = self.ops.gated_delta(y, self.layer, cache, rows, positions_T)
        return self.out(out_TO if self.norm is None else self.norm(out_TO), step)


@dataclass(frozen=True, slots=True)
class ShortConv:
    """A layer with a gated short convolution between two projections; see
    `weft.kernels.short_conv`."""

    into: Linear
    """The projection to the gates b and c, and to x."""
    out: Linear
    layer: ShortConvLayer
    ops: Ops

    def __call__(self, x_TI: Tensor, step: StepContext, cache: StateCache) -> Product:
        assert step.states is not None
        y = self.into(x_TI, step)
        out_TC = self.ops.short_conv(y, self.layer, cache, step.states, step.positions_T)
        return self.out(out_TC, step)


def check_heads(shape: LinearConfig | ShortConvConfig, device: torch.device) -> None:
    """Raises ConfigError for heads that are too large for the kernels on a GPU, where one program
    holds a head's state in shared memory, in fp32."""
    if device.type != "cuda" or isinstance(shape, ShortConvConfig):
        return
    sizes = dict(zip(shape.fields[2:], (shape.key_dim, shape.value_dim), strict=True))
    blocks = [next_power_of_2(size) for size in sizes.values()]
    gpu: Any = torch.cuda.get_device_properties(device)  # torch's stubs lack some of them
    most = max(sizes, key=lambda name: sizes[name])
    if max(blocks) > MAX_HEAD or 4 * prod(blocks) > gpu.shared_memory_per_block_optin:
        stated = " and ".join(f"{name} {size}" for name, size in sizes.items())
        raise ConfigError(f"{stated}: heads are too large for kernels on this GPU", most)


def columns_of(shape: LinearConfig) -> Columns:
    """Where the columns of the layer's packed projection are."""
    keys, values, heads = shape.key_dim, shape.values // shape.num_keys, shape.heads_per_key
    if shape.by_key_head:
        group = 2 * (keys + values)
        end = shape.num_keys * group
        return Columns(
            (0, group),
            (keys, group),
            (2 * keys, group),
            (2 * keys + values, group),
            (end, 2 * heads),
            (end + heads, 2 * heads),
        )
    if shape.mamba:
        k, b = 2 * shape.values, 2 * (shape.values + shape.keys)
        q, v, steps = k + shape.keys, shape.values, (b, heads)
        return Columns((q, keys), (k, keys), (v, values), (0, values), steps, steps)
    z, b = shape.channels, shape.channels + shape.values
    return Columns(
        (0, keys),
        (shape.keys, keys),
        (2 * shape.keys, values),
        (z, values),
        (b, heads),
        (b + shape.num_values, heads),
    )


def allocate_states(
    shape: LinearConfig | ShortConvConfig,
    num_states: int,
    dtype: torch.dtype,
    device: torch.device | str,
) -> StateCache:
    """The states of one layer, zeroed."""
    kept = num_states, shape.conv_width - 1 + MAX_GUESSES, shape.kept_width
    inputs = torch.zeros(kept, dtype=dtype, device=device)
    size = (num_states, *shape.state_shape)
    return StateCache(inputs, torch.zeros(size, dtype=torch.float32, device=device))

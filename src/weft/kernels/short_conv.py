"""A gated short convolution in plain torch, for any device. `weft.kernels.triton_short_conv` has
kernels for GPUs.

Shapes: T token rows, C channels, W tokens that the convolution reads.

Each channel of a token's row has three numbers: two gates b and c, and x. The result is
`c * conv(b * x)`, where the convolution runs over the last W tokens of the sequence. The cache of
states and the tables of a step are those of `weft.kernels.delta`. A state is nothing but the last
inputs of the convolution. It has those of guessed tokens too, so nothing is missing after guesses
that were right.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from weft.kernels.delta import StateCache, StateRows, causal_conv


@dataclass(frozen=True, slots=True)
class ShortConvLayer:
    """The weights of one layer, between its two projections."""

    conv_WC: Tensor
    """The convolution's weights. The newest token's are last."""
    bias_C: Tensor | None
    """The convolution's bias; None: it has none."""


def short_conv(
    y_TO: Tensor, layer: ShortConvLayer, cache: StateCache, rows: StateRows, positions_T: Tensor
) -> Tensor:
    """Compute what lies between a layer's two projections, (T, C), and keep in `cache` the inputs
    that later tokens need. `y_TO`: the rows' b, c and x, (T, 3 C). `positions_T`: the position of
    each row in its sequence."""
    b_TC, c_TC, x_TC = y_TO.chunk(3, 1)
    x_TC = b_TC * x_TC
    conv = layer.conv_WC, layer.bias_C
    out_TC = c_TC * causal_conv(x_TC, *conv, cache, rows.tokens, positions_T)
    rows.tokens.keep(x_TC, positions_T, cache, len(layer.conv_WC))
    return out_TC

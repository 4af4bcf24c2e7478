"""A gated short convolution, whose state is its last inputs. Here in plain torch, for any device;
`weft.kernels.triton_short_conv` has kernels.

Shapes: T token rows, C channels, W tokens that the convolution reads.

Each channel of a token's row has three numbers: two gates b and c, and x. What comes out is
`c * conv(b * x)`, where the convolution runs over the last W tokens of the sequence. The cache of
states and the tables of a step are those of `weft.kernels.delta`. As a state is nothing but kept
inputs, it lacks no tokens when guesses were right: theirs have been kept.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from weft.kernels.delta import StateCache, StateRows, causal_conv


@dataclass(frozen=True, slots=True)
class ShortConvLayer:
    """The weights of one layer, between its two projections."""

    conv_WC: Tensor
    """Those of the newest token are last."""
    bias_C: Tensor | None
    """None: the convolution has no bias."""


def short_conv(
    y_TO: Tensor, layer: ShortConvLayer, cache: StateCache, rows: StateRows, positions_T: Tensor
) -> Tensor:
    """All of a layer between its projections, (T, C). `y_TO`: the rows' b, c and x, (T, 3 C). Keeps
    the inputs of the convolution that later tokens need."""
    b_TC, c_TC, x_TC = y_TO.chunk(3, 1)
    x_TC = b_TC * x_TC
    conv = layer.conv_WC, layer.bias_C
    out_TC = c_TC * causal_conv(x_TC, *conv, cache, rows.tokens, positions_T)
    rows.tokens.keep(x_TC, positions_T, cache, len(layer.conv_WC))
    return out_TC

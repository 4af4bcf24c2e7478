"""Reads the configurations of LFM2, most of whose layers are gated short convolutions."""

from __future__ import annotations

from typing import Any

from weft.core.errors import ConfigError
from weft.core.numbers import cdiv
from weft.models.family import Family, PartNames
from weft.models.layer_types import layer_types, linear_layers
from weft.models.mixtures import check_stated
from weft.models.state_config import ShortConvConfig


def _windows(hf: Any) -> tuple[int | None, ...]:
    check_stated(hf, {"theta": hf.rope_parameters["rope_theta"]})  # what older files call it
    return (None,) * len(layer_types(hf, "conv", "full_attention"))


def _short_conv(hf: Any) -> ShortConvConfig | None:
    layers = linear_layers(hf, "conv")
    if layers is None:
        return None
    return ShortConvConfig(layers, hf.hidden_size, hf.conv_L_cache, bool(hf.conv_bias))


def lfm2_mlp_width(hf: Any) -> int:
    """The inner width of the MLPs of dense models, as transformers computes it. Raises ConfigError
    if that gives no possible width."""
    stated, factor, unit = hf.intermediate_size, hf.block_ffn_dim_multiplier, hf.block_multiple_of
    if not hf.block_auto_adjust_ff_dim:
        return int(stated)
    if not 0 < factor < 1e6:
        message = f"block_ffn_dim_multiplier must be above 0 and below 1e6, got {factor}"
        raise ConfigError(message, "block_ffn_dim_multiplier")
    width: int = cdiv(int(factor * int(2 * stated / 3)), unit) * unit
    if not 1 <= width < 1 << 31:
        message = f"intermediate_size {stated} gives MLPs the width {width}, not 1 to 2**31 - 1"
        raise ConfigError(message, "intermediate_size")
    return width


LFM2 = Family(
    "lfm2_moe",
    _windows,
    qk_norm="head",
    names=PartNames("out_proj", ("q_layernorm", "k_layernorm"), "model.embedding_norm"),
    norm_names=lambda hf: ("operator_norm", "ffn_norm"),
    norm_eps="norm_eps",
    mlp_names=("feed_forward.w1", "feed_forward.w3", "feed_forward.w2"),
    linear=_short_conv,
)
"""What dense models and mixtures have in common, with the `model_type` of mixtures."""

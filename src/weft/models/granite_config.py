"""The families of IBM's Granite, and HyperCLOVA X, which has their scales."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from weft.core.errors import ConfigError
from weft.models import mixtures
from weft.models.family import RopeParameters, Scales, biased
from weft.models.layer_types import (
    linear_layers,
    no_windows,
    one_window_by_type,
    windows_but_linear,
)
from weft.models.state_config import LinearConfig


def _scales(hf: Any) -> Scales:
    if not hf.logits_scaling:
        raise ConfigError(f"logits_scaling must not be {hf.logits_scaling}", "logits_scaling")
    return Scales(
        embedding=float(hf.embedding_multiplier),
        residual=float(hf.residual_multiplier),
        attention=float(hf.attention_multiplier),
        logits=float(hf.logits_scaling),
    )


def _swa_ropes(hf: Any) -> tuple[RopeParameters | None, ...]:
    thetas, num = hf.layer_rope_theta, hf.num_hidden_layers
    if len(thetas) != num:
        message = f"layer_rope_theta must be {num} numbers, one for each layer, got {len(thetas)}"
        raise ConfigError(message, "layer_rope_theta")
    ropes = ({**hf.rope_parameters, "rope_theta": theta} if theta else None for theta in thetas)
    return tuple(ropes)


def _mamba(hf: Any) -> LinearConfig | None:
    layers = linear_layers(hf)
    if layers is None:
        return None
    return LinearConfig.of_fields(
        *(hf, layers, ("mamba_n_groups", "mamba_n_heads", "mamba_d_state", "mamba_d_head")),
        conv_width=hf.mamba_d_conv,
        mamba=True,
        conv_bias=bool(hf.mamba_conv_bias),
        projection_bias=bool(hf.mamba_proj_bias),
        name="mamba",
    )


def _ropes(hf: Any) -> tuple[RopeParameters | None, ...]:
    rope = hf.rope_parameters if hf.position_embedding_type == "rope" else None
    return (rope,) * int(hf.num_hidden_layers)


def _shared_width(hf: Any) -> int:
    width: int = hf.shared_intermediate_size
    if width < 1:
        message = f"shared_intermediate_size must be at least 1, got {width}"
        raise ConfigError(message, "shared_intermediate_size")
    return width


def _shared_width_or_none(hf: Any) -> int:
    """The inner width of MLPs beside experts; 0: there are none."""
    mixtures.check_counts(hf, 0, "shared_intermediate_size")
    width: int = hf.shared_intermediate_size
    return width


def _hyperclovax_scales(hf: Any) -> Scales:
    scales = _scales(hf)
    return replace(scales, logits=1 / scales.logits)


_SHARED_MLP = "shared_mlp.input_linear", "shared_mlp.output_linear"
GRANITE = biased("granite", no_windows, mlp_bias="mlp_bias", scales=_scales)
GRANITE_SWA = replace(
    GRANITE, model_type="granite_swa", windows=one_window_by_type, ropes=_swa_ropes, sinks=True
)
GRANITE_MOE = biased("granitemoe", no_windows, scales=_scales, moe=mixtures.granite_moe)
GRANITE_MOE_SHARED = replace(
    GRANITE_MOE,
    model_type="granitemoeshared",
    mlp_names=_SHARED_MLP,
    mlp_width=_shared_width_or_none,
    moe=mixtures.granite_moe_shared,
)
GRANITE_MOE_SWA = replace(
    GRANITE_MOE_SHARED,
    model_type="granitemoe_swa",
    windows=one_window_by_type,
    ropes=_swa_ropes,
    moe=mixtures.granite_moe_swa,
    sinks=True,
)
GRANITE4 = biased(
    "granitemoehybrid",
    windows_but_linear,
    mlp_names=_SHARED_MLP,
    mlp_width=_shared_width,
    ropes=_ropes,
    linear=_mamba,
    moe=mixtures.granite4_moe,
    scales=_scales,
)
HYPERCLOVAX = replace(
    GRANITE,
    model_type="hyperclovax",
    blocks="both",
    norm_names=lambda hf: (
        *("input_layernorm", "post_norm1"),
        *("post_attention_layernorm", "post_norm2"),
    ),
    scales=_hyperclovax_scales,
)

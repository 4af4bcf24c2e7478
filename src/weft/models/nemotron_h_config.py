"""Reads the configuration of Nemotron-H. Each of its layers is a single mixer: Mamba 2, attention,
an MLP, or a mixture of experts."""

from __future__ import annotations

from typing import Any

from weft.core.errors import ConfigError
from weft.models.family import Family, Mixer, MoeConfig, PartNames
from weft.models.layer_types import layer_types
from weft.models.mixtures import check_counts, check_stated
from weft.models.state_config import LinearConfig

_MIXERS: dict[str, Mixer] = {
    "linear_attention": "linear",
    "full_attention": "attention",
    "mlp": "mlp",
    "moe": "experts",
}


def _mixers(hf: Any) -> tuple[Mixer, ...]:
    check_stated(hf, {"attention_head_dim": hf.head_dim})  # what older files call it
    mixers = tuple(_MIXERS[kind] for kind in layer_types(hf, *_MIXERS))
    if "attention" not in mixers:
        message = "layers_block_type names no full_attention, which is needed"
        raise ConfigError(message, "layers_block_type")
    return mixers


def _none_per_layer(hf: Any) -> tuple[None, ...]:
    """No layer has a window, and no layer has rope."""
    return (None,) * len(_mixers(hf))


def _linear(hf: Any) -> LinearConfig | None:
    layers = tuple(mixer == "linear" for mixer in _mixers(hf))
    if not any(layers):
        return None
    return LinearConfig.of_fields(
        *(hf, layers, ("n_groups", "mamba_num_heads", "ssm_state_size", "mamba_head_dim")),
        conv_width=hf.conv_kernel,
        mamba=True,
        conv_bias=bool(hf.use_conv_bias),
        projection_bias=bool(hf.use_bias),
        name="mixer",
        least_step=float(hf.time_step_min),
    )


def _experts(hf: Any) -> MoeConfig | None:
    layers = tuple(mixer == "experts" for mixer in _mixers(hf))
    if not any(layers):
        return None
    if hf.mlp_bias:
        raise ConfigError("mlp_bias true is not served for a model with experts", "mlp_bias")
    check_counts(hf, 1, "n_routed_experts", "num_experts_per_tok", "n_group", "topk_group")
    return MoeConfig(
        num_experts=hf.n_routed_experts,
        top_k=hf.num_experts_per_tok,
        intermediate_size=hf.moe_intermediate_size,
        normalize=bool(hf.norm_topk_prob),
        round_weights=False,
        layers=layers,
        names=("mixer", "gate_proj", "up_proj", "down_proj"),
        shared_size=hf.moe_shared_expert_intermediate_size,
        shared_gated=False,
        latent_size=hf.moe_latent_size or 0,
        exact_router=True,
        sigmoid=True,
        groups=(hf.n_group, hf.topk_group),
        correction="gate.e_score_correction_bias",
        least_sum=1e-20,
        scale=float(hf.routed_scaling_factor),
        place="mixer.",
        gated=False,
    )


NEMOTRON_H = Family(
    "nemotron_h",
    _none_per_layer,
    mlp_bias="mlp_bias",
    mlp_names=("mixer.up_proj", "mixer.down_proj"),
    blocks="single",
    names=PartNames(
        attention="mixer",
        prefixes=(("model.embed_tokens.", "model.embeddings."), ("model.norm.", "model.norm_f.")),
    ),
    mixers=_mixers,
    ropes=_none_per_layer,
    moe=_experts,
    linear=_linear,
    activation_field="mlp_hidden_act",
    activation="relu2",
    norm_eps="layer_norm_epsilon",
)

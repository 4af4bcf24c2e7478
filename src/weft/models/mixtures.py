"""Reads the mixtures of experts of families from their configurations. The functions that families
name return None for a model without experts, and raise ConfigError for one that is not served."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from weft.core.errors import ConfigError
from weft.models.family import MoeConfig


def _mixture(hf: Any, num_experts: int, width: int, normalize: object, **more: Any) -> MoeConfig:
    """A mixture, of which `more` are further fields. By default all layers have experts, and
    weights are rounded."""
    every: dict[str, Any] = {"layers": (True,) * int(hf.num_hidden_layers), "round_weights": True}
    top_k = hf.num_experts_per_tok
    return MoeConfig(num_experts, top_k, width, bool(normalize), **every | more)


def check_counts(hf: Any, least: int, *names: str) -> None:
    """Raises ConfigError for a field that is not a whole number of at least `least`."""
    for name in names:
        found = getattr(hf, name)
        if type(found) is not int or found < least:
            message = f"{name} must be a whole number of at least {least}, got {found!r}"
            raise ConfigError(message, name)


def qwen3_moe(hf: Any) -> MoeConfig | None:
    check_counts(hf, 1, "decoder_sparse_step")
    check_counts(hf, 0, "num_experts")
    step = hf.decoder_sparse_step
    layers = tuple(
        i not in hf.mlp_only_layers and hf.num_experts > 0 and (i + 1) % step == 0
        for i in range(hf.num_hidden_layers)
    )
    if not any(layers):
        return None
    normalize = getattr(hf, "norm_topk_prob", True)
    return _mixture(hf, hf.num_experts, hf.moe_intermediate_size, normalize, layers=layers)


def qwen3_vl_moe(hf: Any) -> MoeConfig | None:
    moe = qwen3_moe(hf)
    return moe and replace(moe, normalize=True)


def qwen3_next_moe(hf: Any) -> MoeConfig | None:
    moe = qwen3_moe(hf)
    return moe and replace(moe, shared_size=hf.shared_expert_intermediate_size)


def qwen3_5_moe(hf: Any) -> MoeConfig:
    shared = hf.shared_expert_intermediate_size
    return _mixture(hf, hf.num_experts, hf.moe_intermediate_size, True, shared_size=shared)


def glm4_moe(hf: Any) -> MoeConfig | None:
    return routed(hf, hf.first_k_dense_replace)


def routed(
    hf: Any,
    num_dense: int = 0,
    experts: str = "n_routed_experts",
    shared: str = "n_shared_experts",
) -> MoeConfig | None:
    """Experts in all layers but the first `num_dense`, chosen by corrected sigmoids. `experts` and
    `shared`: the fields with their numbers."""
    layers = tuple(i >= num_dense for i in range(hf.num_hidden_layers))
    if not any(layers):
        return None
    check_counts(hf, 1, experts, "num_experts_per_tok", shared, "n_group", "topk_group")
    return _mixture(
        *(hf, getattr(hf, experts), hf.moe_intermediate_size, hf.norm_topk_prob),
        round_weights=False,
        layers=layers,
        shared_size=hf.moe_intermediate_size * getattr(hf, shared),
        shared_gated=False,
        exact_router=True,
        sigmoid=True,
        groups=(hf.n_group, hf.topk_group),
        correction="gate.e_score_correction_bias",
        least_sum=1e-20,
        scale=float(hf.routed_scaling_factor),
    )


_CORRECTED = {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1}
"""The only values served of these fields, in mixtures that choose by corrected sigmoids."""


def deepseek_v3_moe(hf: Any) -> MoeConfig | None:
    check_stated(hf, _CORRECTED)
    check_counts(hf, 0, "first_k_dense_replace")
    return glm4_moe(hf)


def mistral4_moe(hf: Any) -> MoeConfig | None:
    check_counts(hf, 0, "first_k_dense_replace")
    moe = glm4_moe(hf)
    if moe is None:
        return None
    return replace(moe, sigmoid=False, correction="", exact_router=False, round_weights=True)


def deepseek_v2_moe(hf: Any) -> MoeConfig | None:
    only = {"scoring_func": "softmax", "moe_layer_freq": 1, "mlp_bias": False}
    check_stated(hf, only | {"norm_topk_prob": False})
    check_counts(hf, 0, "first_k_dense_replace")
    if hf.topk_method not in ("greedy", "group_limited_greedy"):
        raise ConfigError(f"topk_method {hf.topk_method!r} is not served", "topk_method")
    in_groups = hf.topk_method == "group_limited_greedy"
    if in_groups:
        check_counts(hf, 1, "n_group", "topk_group")
    layers = tuple(i >= hf.first_k_dense_replace for i in range(hf.num_hidden_layers))
    if not any(layers):
        return None
    check_counts(hf, 1, "n_routed_experts", "num_experts_per_tok", "n_shared_experts")
    return _mixture(
        *(hf, hf.n_routed_experts, hf.moe_intermediate_size, False),
        round_weights=False,
        layers=layers,
        shared_size=hf.moe_intermediate_size * hf.n_shared_experts,
        shared_gated=False,
        exact_router=True,
        groups=(hf.n_group, hf.topk_group) if in_groups else (1, 1),
        best_of_group=1,
        scale=float(hf.routed_scaling_factor),
    )


def glm4_moe_lite(hf: Any) -> MoeConfig | None:
    moe = _in_sparse_layers(hf, routed(hf))
    if moe is not None:
        check_stated(hf, {"first_k_dense_replace": moe.layers.index(True)})
    return moe


def exaone_moe(hf: Any) -> MoeConfig | None:
    every = routed(hf, 0, "num_experts", "num_shared_experts")
    moe = _in_sparse_layers(hf, every)
    return moe and replace(moe, correction="e_score_correction_bias")


def _in_sparse_layers(hf: Any, every: MoeConfig | None) -> MoeConfig | None:
    """The mixture in the layers that `mlp_layer_types` names, whose experts are chosen by corrected
    sigmoids."""
    check_stated(hf, _CORRECTED)
    types, num = hf.mlp_layer_types, hf.num_hidden_layers
    if len(types) != num or not set(types) <= {"dense", "sparse"}:
        message = f"mlp_layer_types must name dense or sparse for each of the {num} layers"
        raise ConfigError(f"{message}, got {types!r:.200}", "mlp_layer_types")
    layers = tuple(kind == "sparse" for kind in types)
    return replace(every, layers=layers) if every and any(layers) else None


def check_stated(hf: Any, only: Mapping[str, object]) -> None:
    """Raises ConfigError if a field is set to another value than the one in `only`."""
    for name, wanted in only.items():
        found = getattr(hf, name, wanted)
        if found != wanted:
            message = f"{name} {found!r:.80} is not served for {hf.model_type}, only {wanted!r}"
            raise ConfigError(message, name)


def ernie4_5_moe(hf: Any) -> MoeConfig | None:
    if hf.use_bias:
        raise ConfigError(f"use_bias true is not served for {hf.model_type}", "use_bias")
    check_counts(hf, 1, "moe_num_experts", "moe_k", "moe_layer_interval")
    check_counts(hf, 0, "moe_num_shared_experts", "moe_layer_start_index", "moe_layer_end_index")
    first, last, step = hf.moe_layer_start_index, hf.moe_layer_end_index, hf.moe_layer_interval
    layers = tuple(first <= i <= last and (i + 1) % step == 0 for i in range(hf.num_hidden_layers))
    if not any(layers):
        return None
    return _mixture(
        *(hf, hf.moe_num_experts, hf.moe_intermediate_size, True),
        round_weights=False,
        layers=layers,
        shared_size=hf.moe_intermediate_size * hf.moe_num_shared_experts,
        shared_gated=False,
        exact_router=True,
        correction="moe_statics.e_score_correction_bias",
        correction_dims=2,
        least_sum=1e-12,
    )


def olmoe(hf: Any) -> MoeConfig:
    return _mixture(hf, hf.num_experts, hf.intermediate_size, hf.norm_topk_prob)


def mixtral(hf: Any) -> MoeConfig:
    names = "block_sparse_moe", "w1", "w3", "w2"
    width = hf.intermediate_size
    return _mixture(hf, hf.num_local_experts, width, True, round_weights=False, names=names)


def minimax_m2(hf: Any) -> MoeConfig:
    return replace(mixtral(hf), sigmoid=True, correction="e_score_correction_bias")


def granite_moe(hf: Any) -> MoeConfig:
    check_counts(hf, 1, "num_local_experts", "num_experts_per_tok")
    return _mixture(
        *(hf, hf.num_local_experts, hf.intermediate_size, False),
        router="router",
        weights_of_chosen=True,
        place="block_sparse_moe.",
        stacked=True,
        stored_names=(
            ("router", "router.layer"),
            ("experts.gate_up_proj", "input_linear.weight"),
            ("experts.down_proj", "output_linear.weight"),
        ),
    )


def granite_moe_shared(hf: Any) -> MoeConfig:
    return replace(granite_moe(hf), beside_mlp=hf.shared_intermediate_size > 0)


def granite_moe_swa(hf: Any) -> MoeConfig:
    return replace(granite_moe_shared(hf), stored_names=())


def granite4_moe(hf: Any) -> MoeConfig | None:
    if hf.num_local_experts == 0:
        return None
    return replace(granite_moe(hf), beside_mlp=True)


def llama4_moe(hf: Any) -> MoeConfig | None:
    check_stated(hf, {"num_experts_per_tok": 1})
    check_counts(hf, 1, "num_local_experts")
    layers = tuple(i in hf.moe_layers for i in range(hf.num_hidden_layers))
    if not any(layers):
        return None
    return _mixture(
        *(hf, hf.num_local_experts, hf.intermediate_size, False),
        layers=layers,
        weights_of_chosen=True,
        weighs_input=True,
        names=("feed_forward", "gate_proj", "up_proj", "down_proj"),
        router="router",
        place="feed_forward.",
        stacked=True,
        transposed=True,
        shared_size=hf.intermediate_size,
        shared_gated=False,
        shared_name="shared_expert",
    )


def lfm2_moe(hf: Any) -> MoeConfig | None:
    check_counts(hf, 1, "num_experts", "num_experts_per_tok")
    check_counts(hf, 0, "num_dense_layers")
    layers = tuple(i >= hf.num_dense_layers for i in range(hf.num_hidden_layers))
    if not any(layers):
        return None
    return _mixture(
        *(hf, hf.num_experts, hf.moe_intermediate_size, hf.norm_topk_prob),
        layers=layers,
        names=("feed_forward", "w1", "w3", "w2"),
        place="feed_forward.",
        sigmoid=True,
        correction="expert_bias" if hf.use_expert_bias else "",
        least_sum=1e-6,
        scale=float(hf.routed_scaling_factor),
    )


def gpt_oss(hf: Any) -> MoeConfig:
    # alpha and limit of the activation, which are no fields in older releases of transformers
    swiglu = getattr(hf, "swiglu_alpha", 1.702), getattr(hf, "swiglu_limit", 7.0)
    return _mixture(
        *(hf, hf.num_local_experts, hf.intermediate_size, False),
        router="router",
        weights_of_chosen=True,
        biased=True,
        clamped_swiglu=(float(swiglu[0]), float(swiglu[1])),
    )

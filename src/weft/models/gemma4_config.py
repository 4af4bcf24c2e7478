"""Reads the configuration of Gemma 4's text part."""

from __future__ import annotations

from typing import Any

from weft.core.errors import ConfigError
from weft.models.family import Family, LayerShape, MoeConfig, Scales, TokenInputsConfig
from weft.models.layer_types import attention_types, one_window_by_type, rope_by_type


def _windows(hf: Any) -> tuple[int | None, ...]:
    if hf.use_bidirectional_attention == "all":
        raise ConfigError(
            "use_bidirectional_attention 'all' is not served, only 'vision', which does nothing"
            " to text, or None",
            "use_bidirectional_attention",
        )
    return one_window_by_type(hf)


def _layers(hf: Any) -> tuple[LayerShape, ...]:
    types = attention_types(hf)
    first_shared = len(types) - hf.num_kv_shared_layers
    own = {kind: i for i, kind in enumerate(types[: max(first_shared, 0)])}
    if not set(own) >= set(types):
        message = f"num_kv_shared_layers {hf.num_kv_shared_layers} leaves no layer of each type"
        raise ConfigError(message, "num_kv_shared_layers")
    shapes: list[LayerShape] = []
    for i, kind in enumerate(types):
        num_kv_heads, head_dim = _heads(hf, i, kind)
        shares = i >= first_shared
        wide = 2 if hf.use_double_wide_mlp and shares else 1
        shapes.append(
            LayerShape(
                num_kv_heads=num_kv_heads,
                head_dim=head_dim,
                intermediate_size=wide * hf.intermediate_size,
                cache=own[kind] if shares else i,
                keys_are_values=hf.attention_k_eq_v and kind == "full_attention" and not shares,
            )
        )
    _check_overrides(hf, shapes)
    return tuple(shapes)


def _heads(hf: Any, layer: int, kind: str) -> tuple[int, int]:
    """The number of key and value heads of a layer, and their dimension. Older releases of
    transformers state them by the kind of layer."""
    if hf.to_dict().get("per_layer_config"):
        own = hf.per_layer_config[layer]
        return own.num_key_value_heads, own.head_dim
    num, of_global = hf.num_key_value_heads, getattr(hf, "num_global_key_value_heads", None)
    if kind == "sliding_attention":
        return num, hf.head_dim
    head_dim = getattr(hf, "global_head_dim", hf.head_dim)
    return (of_global or num) if hf.attention_k_eq_v else num, head_dim


_OVERRIDDEN = {"head_dim", "num_key_value_heads"}


def _check_overrides(hf: Any, shapes: list[LayerShape]) -> None:
    """Raises ConfigError for shapes that may not differ between layers, or between a layer that
    reads another layer's cache and that layer."""
    stated = hf.to_dict().get("per_layer_config") or {}
    others = {name for layer in stated.values() for name in layer} - _OVERRIDDEN
    if others:
        raise ConfigError(f"{', '.join(sorted(others))} can't differ by layer", "per_layer_config")
    for shape in shapes:
        owner = shapes[shape.cache]
        if (shape.num_kv_heads, shape.head_dim) != (owner.num_kv_heads, owner.head_dim):
            message = f"a layer of another shape can't read the cache of layer {shape.cache}"
            raise ConfigError(message, "per_layer_config")


def _moe(hf: Any) -> MoeConfig | None:
    if not hf.enable_moe_block:
        return None
    for name in ("num_experts", "top_k_experts", "moe_intermediate_size"):
        if getattr(hf, name) is None:
            raise ConfigError(f"enable_moe_block needs {name}", name)
    return MoeConfig(
        num_experts=hf.num_experts,
        top_k=hf.top_k_experts,
        intermediate_size=hf.moe_intermediate_size,
        normalize=True,
        round_weights=False,
        layers=(True,) * int(hf.num_hidden_layers),
        names=("experts", "gate_proj", "up_proj", "down_proj"),
        router="router.proj",
        place="",
        stacked=True,
        beside_mlp=True,
    )


def _norm_names(hf: Any) -> tuple[str, ...]:
    of_experts = (
        "post_feedforward_layernorm_1",
        "pre_feedforward_layernorm_2",
        "post_feedforward_layernorm_2",
    )
    return (
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        *(of_experts if hf.enable_moe_block else ()),
        "post_feedforward_layernorm",
        *(("post_per_layer_input_norm",) if hf.hidden_size_per_layer_input else ()),
    )


def _token_inputs(hf: Any) -> TokenInputsConfig | None:
    if not hf.hidden_size_per_layer_input:
        return None
    if hf.vocab_size_per_layer_input < hf.vocab_size:
        message = f"vocab_size_per_layer_input must be at least vocab_size {hf.vocab_size}"
        raise ConfigError(message, "vocab_size_per_layer_input")
    return TokenInputsConfig(hf.vocab_size_per_layer_input, hf.hidden_size_per_layer_input)


def gemma_scales(hf: Any, attention: float | None = 1.0) -> Scales:
    """The scales of all Gemmas, with this factor of the scores of attention."""
    cap = getattr(hf, "final_logit_softcapping", None)
    return Scales(
        embedding=float(hf.hidden_size) ** 0.5,
        rounds_embedding=True,
        attention=attention,
        logit_cap=None if cap is None else float(cap),
    )


GEMMA4 = Family(
    "gemma4_text",
    _windows,
    attention_bias="attention_bias",
    attention_out_bias="attention_bias",
    qk_norm="head",
    blocks="gemma4",
    norm_names=_norm_names,
    layers=_layers,
    value_norm=True,
    token_inputs=_token_inputs,
    ropes=rope_by_type,
    moe=_moe,
    scales=gemma_scales,
    activation_field="hidden_activation",
    activation="gelu_tanh",
)

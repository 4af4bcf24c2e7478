"""The families of models that are served. A row of `FAMILIES` says how the configuration of a
family's checkpoints is read. What Weft would compute wrongly is refused here, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from weft.core.errors import ConfigError
from weft.models import granite_config, mixtures
from weft.models.family import (
    FUSED_MLP_NAMES,
    UNGATED_MLP_NAMES,
    Family,
    PartNames,
    RopeParameters,
    Scales,
    biased,
)
from weft.models.gemma4_config import GEMMA4, gemma_scales
from weft.models.latent_config import (
    DEEPSEEK_V2,
    DEEPSEEK_V3,
    GLM4_MOE_LITE,
    MISTRAL4,
    SARVAM_MLA,
    YOUTU,
)
from weft.models.layer_types import (
    attention_types,
    check_lengths_kept,
    linear_layers,
    no_windows,
    one_window_by_type,
    rope_by_type,
    rope_or_none,
    windows_but_linear,
)
from weft.models.lfm2_config import LFM2, lfm2_mlp_width
from weft.models.llama4_config import LLAMA4
from weft.models.nemotron_h_config import NEMOTRON_H
from weft.models.rope_config import stated_growth
from weft.models.state_config import LinearConfig


def _one_window(hf: Any) -> tuple[int | None, ...]:
    kind = "full_attention" if hf.sliding_window is None else "sliding_attention"
    types = getattr(hf, "layer_types", None) or [kind]
    if set(types) != {kind}:
        raise ConfigError(
            f"layer_types {sorted(set(types))} are not served for {hf.model_type} "
            f"with sliding_window {hf.sliding_window}",
            "layer_types",
        )
    return (hf.sliding_window,) * int(hf.num_hidden_layers)


def _qwen3_5(hf: Any) -> LinearConfig | None:
    layers = linear_layers(hf)
    if layers is None:
        return None
    return LinearConfig.of_fields(hf, layers, conv_width=hf.linear_conv_kernel_dim)


def _qwen3_next(hf: Any) -> LinearConfig | None:
    linear = _qwen3_5(hf)
    return linear and replace(linear, by_key_head=True)


def _olmo_hybrid(hf: Any) -> LinearConfig | None:
    heads = hf.linear_num_key_heads
    mixtures.check_stated(hf, {"linear_num_value_heads": heads})
    linear, doubled = _qwen3_5(hf), bool(hf.linear_allow_neg_eigval)
    return linear and replace(linear, apart=True, doubled=doubled, norm_eps=1e-5)


def _stated_rope(hf: Any) -> tuple[RopeParameters | None, ...]:
    """The rope of all layers; None where the configuration states none."""
    rope = hf.rope_parameters
    is_stated = rope is not None and rope.get("rope_theta") is not None
    return (rope if is_stated else None,) * int(hf.num_hidden_layers)


def _gemma3_scales(hf: Any) -> Scales:
    scalar = hf.query_pre_attn_scalar
    if scalar <= 0:
        message = f"query_pre_attn_scalar must be positive, got {scalar}"
        raise ConfigError(message, "query_pre_attn_scalar")
    return gemma_scales(hf, attention=float(scalar) ** -0.5)


def _gemma2_scales(hf: Any) -> Scales:
    cap = hf.attn_logit_softcapping
    if cap is not None and not cap > 0:
        message = f"attn_logit_softcapping must be positive, got {cap}"
        raise ConfigError(message, "attn_logit_softcapping")
    return replace(_gemma3_scales(hf), score_cap=cap)


def _gemma_windows(
    hf: Any, windows: Callable[[Any], tuple[int | None, ...]] = one_window_by_type
) -> tuple[int | None, ...]:
    name = "use_bidirectional_attention"
    if getattr(hf, name):
        raise ConfigError(f"{name} {getattr(hf, name)} is not served", name)
    return windows(hf)


def _gemma3_windows(hf: Any) -> tuple[int | None, ...]:
    name = "attn_logit_softcapping"
    if getattr(hf, name):  # which transformers does not compute
        raise ConfigError(f"{name} {getattr(hf, name)} is not served", name)
    return _gemma_windows(hf)


def _layer_windows(hf: Any) -> tuple[int | None, ...]:
    of_type = {"full_attention": None}
    if hf.sliding_window is not None:
        of_type["sliding_attention"] = hf.sliding_window
    types = list(hf.layer_types)
    if len(types) != hf.num_hidden_layers or not set(types) <= set(of_type):
        raise ConfigError(
            f"layer_types must name one of {', '.join(of_type)} for each of the "
            f"{hf.num_hidden_layers} layers (use_sliding_window {hf.use_sliding_window}), "
            f"got {types}",
            "layer_types",
        )
    return tuple(of_type[t] for t in types)


def _rope_in_windows(hf: Any) -> tuple[RopeParameters | None, ...]:
    """The rope of each layer; None for layers that see all positions, which don't rotate them."""
    windows = (kind == "sliding_attention" for kind in attention_types(hf))
    return tuple(hf.rope_parameters if window else None for window in windows)


def _exaone4_ropes(hf: Any) -> tuple[RopeParameters | None, ...]:
    if hf.sliding_window is None:
        return (hf.rope_parameters,) * int(hf.num_hidden_layers)
    return _rope_in_windows(hf)


def _hunyuan_ropes(hf: Any) -> tuple[RopeParameters | None, ...]:
    rope, size = hf.rope_parameters, hf.head_dim or hf.hidden_size // hf.num_attention_heads
    kind, theta, alpha = (rope.get(name) for name in ("rope_type", "rope_theta", "alpha"))
    known = all(type(n) in (int, float) and 0 < n < 1e12 for n in (theta, alpha))
    if kind == "dynamic" and known and size > 2:  # with alpha, it is the same in all contexts
        stretched = theta * alpha ** (size / (size - 2))
        rope = {"rope_type": "default", "rope_theta": stretched}
    else:
        check_lengths_kept(hf)
    return (rope,) * int(hf.num_hidden_layers)


def _cohere_scales(hf: Any) -> Scales:
    if not hf.logit_scale:
        raise ConfigError(f"logit_scale must not be {hf.logit_scale}", "logit_scale")
    return Scales(logits=1 / hf.logit_scale)


_LLAMA = biased("llama", no_windows, mlp_bias="mlp_bias")
_INTERNLM3 = replace(_LLAMA, model_type="internlm3")
_IQUEST_CODER = replace(_LLAMA, model_type="iquestcoder")
_MISTRAL = Family("mistral", _one_window)
_MINISTRAL3 = Family("ministral3", _one_window, growths=stated_growth)
_QWEN2 = Family("qwen2", _layer_windows, attention_bias=True)
_QWEN3_VL = biased("qwen3_vl_text", no_windows, qk_norm="head", text_of="qwen3_vl")
_EXAONE_MOE = Family(
    "exaone_moe",
    one_window_by_type,
    qk_norm="head",
    ropes=_rope_in_windows,
    moe=mixtures.exaone_moe,
)
_NEMOTRON = biased(
    "nemotron",
    no_windows,
    mlp_bias="mlp_bias",
    mlp_names=UNGATED_MLP_NAMES,
    activation="relu2",
    partial_rotary=True,
    centered_norms=True,
    norm_bias=True,
    norm_offset=1.0,
    norm_eps="norm_eps",
)
_GLM4_MOE = Family(
    "glm4_moe",
    no_windows,
    attention_bias="attention_bias",
    qk_norm="head",
    qk_norm_if="use_qk_norm",
    partial_rotary=True,
    moe=mixtures.glm4_moe,
)
_SARVAM_MOE = replace(
    _GLM4_MOE, model_type="sarvam_moe", names=PartNames(stored_qkv="query_key_value")
)
_GEMMA = biased(
    "gemma",
    partial(_gemma_windows, windows=no_windows),
    scales=partial(gemma_scales, attention=None),
    activation="gelu_tanh",
    norm_offset=1.0,
)
_GEMMA2 = replace(
    _GEMMA,
    model_type="gemma2",
    windows=_gemma_windows,
    blocks="both",
    scales=_gemma2_scales,
    activation_field="hidden_activation",
)
_GEMMA3 = replace(
    _GEMMA2,
    model_type="gemma3_text",
    windows=_gemma3_windows,
    qk_norm="head",
    ropes=rope_by_type,
    scales=_gemma3_scales,
)

_QWEN3_5 = biased(
    "qwen3_5_text",
    windows_but_linear,
    qk_norm="head",
    partial_rotary=True,
    linear=_qwen3_5,
    output_gate=True,
    norm_offset=1.0,
    mtp_head=True,
)
_QWEN3_5_MOE = replace(_QWEN3_5, model_type="qwen3_5_moe_text", moe=mixtures.qwen3_5_moe)
_QWEN3_NEXT = replace(
    _QWEN3_5, model_type="qwen3_next", moe=mixtures.qwen3_next_moe, linear=_qwen3_next
)

FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": _LLAMA,
    "Llama4ForCausalLM": LLAMA4,
    "Llama4ForConditionalGeneration": replace(LLAMA4, text_of="llama4", tied_by_text=True),
    "InternLM3ForCausalLM": _INTERNLM3,
    "IQuestCoderForCausalLM": _IQUEST_CODER,
    "ArceeForCausalLM": biased(
        "arcee", no_windows, mlp_bias="mlp_bias", mlp_names=UNGATED_MLP_NAMES, activation="relu2"
    ),
    "NemotronForCausalLM": _NEMOTRON,
    "Jais2ForCausalLM": replace(
        _NEMOTRON,
        model_type="jais2",
        partial_rotary=False,
        norm_offset=0.0,
        norm_eps="layer_norm_eps",
    ),
    "ApertusForCausalLM": biased(
        "apertus",
        no_windows,
        qk_norm="head",
        mlp_names=UNGATED_MLP_NAMES,
        norm_names=lambda hf: ("attention_layernorm", "feedforward_layernorm"),
        activation="xielu",
    ),
    "SeedOssForCausalLM": Family(
        "seed_oss",
        no_windows,
        attention_bias="attention_bias",
        attention_out_bias="attention_out_bias",
        mlp_bias="mlp_bias",
    ),
    "MistralForCausalLM": _MISTRAL,
    "MinistralForCausalLM": Family("ministral", one_window_by_type),
    "Ministral3ForCausalLM": _MINISTRAL3,
    "Qwen2ForCausalLM": _QWEN2,
    "Qwen2VLForConditionalGeneration": replace(
        _QWEN2, model_type="qwen2_vl_text", text_of="qwen2_vl"
    ),
    "Qwen2_5_VLForConditionalGeneration": replace(
        _QWEN2, model_type="qwen2_5_vl_text", text_of="qwen2_5_vl"
    ),
    "Qwen2MoeForCausalLM": Family(
        "qwen2_moe", _layer_windows, attention_bias="qkv_bias", moe=mixtures.qwen3_next_moe
    ),
    "Qwen3ForCausalLM": biased("qwen3", _layer_windows, qk_norm="head"),
    "Qwen3MoeForCausalLM": biased("qwen3_moe", _one_window, qk_norm="head", moe=mixtures.qwen3_moe),
    "Qwen3VLForConditionalGeneration": _QWEN3_VL,
    "Qwen3VLMoeForConditionalGeneration": replace(
        _QWEN3_VL, model_type="qwen3_vl_moe_text", text_of="qwen3_vl_moe", moe=mixtures.qwen3_vl_moe
    ),
    "MixtralForCausalLM": Family("mixtral", _one_window, moe=mixtures.mixtral),
    "MiniMaxM2ForCausalLM": Family(
        "minimax_m2", no_windows, qk_norm="width", partial_rotary=True, moe=mixtures.minimax_m2
    ),
    "Phi3ForCausalLM": Family(
        "phi3", _one_window, fused_qkv=True, mlp_names=FUSED_MLP_NAMES, partial_rotary=True
    ),
    "Olmo2ForCausalLM": biased("olmo2", no_windows, qk_norm="width", blocks="post"),
    "Olmo3ForCausalLM": biased(
        "olmo3", one_window_by_type, qk_norm="width", blocks="post", ropes=rope_by_type
    ),
    "OlmoHybridForCausalLM": biased(
        "olmo_hybrid",
        windows_but_linear,
        qk_norm="width",
        blocks="mixed",
        ropes=_stated_rope,
        linear=_olmo_hybrid,
    ),
    "HunYuanDenseV1ForCausalLM": biased(
        "hunyuan_v1_dense",
        no_windows,
        qk_norm="rotated",
        names=PartNames(qk_norms=("query_layernorm", "key_layernorm")),
        ropes=_hunyuan_ropes,
    ),
    "Ernie4_5ForCausalLM": Family(
        "ernie4_5",
        no_windows,
        attention_bias="use_bias",
        attention_out_bias="use_bias",
        mlp_bias="use_bias",
        interleaved_rope=True,
    ),
    "HeliumForCausalLM": Family(
        "helium",
        no_windows,
        attention_bias="attention_bias",
        mlp_bias="mlp_bias",
        interleaved_rope=True,
    ),
    "CwmForCausalLM": Family("cwm", one_window_by_type, mlp_bias="mlp_bias"),
    "Exaone4ForCausalLM": Family(
        "exaone4", one_window_by_type, qk_norm="head", blocks="post", ropes=_exaone4_ropes
    ),
    "ExaoneMoeForCausalLM": _EXAONE_MOE,
    "ExaoneMoEForCausalLM": _EXAONE_MOE,
    "OlmoeForCausalLM": biased("olmoe", no_windows, qk_norm="width", moe=mixtures.olmoe),
    "SmolLM3ForCausalLM": biased(
        "smollm3", one_window_by_type, mlp_bias="mlp_bias", ropes=rope_or_none
    ),
    "GraniteForCausalLM": granite_config.GRANITE,
    "GraniteSWAForCausalLM": granite_config.GRANITE_SWA,
    "GraniteMoeForCausalLM": granite_config.GRANITE_MOE,
    "GraniteMoeSharedForCausalLM": granite_config.GRANITE_MOE_SHARED,
    "GraniteMoeSWAForCausalLM": granite_config.GRANITE_MOE_SWA,
    "GraniteMoeHybridForCausalLM": granite_config.GRANITE4,
    "HyperCLOVAXForCausalLM": granite_config.HYPERCLOVAX,
    "Lfm2ForCausalLM": replace(LFM2, model_type="lfm2", mlp_width=lfm2_mlp_width),
    "Lfm2MoeForCausalLM": replace(LFM2, moe=mixtures.lfm2_moe),
    "NemotronHForCausalLM": NEMOTRON_H,
    "GlmForCausalLM": Family(
        "glm",
        no_windows,
        attention_bias="attention_bias",
        mlp_names=FUSED_MLP_NAMES,
        partial_rotary=True,
        interleaved_rope=True,
    ),
    "Glm4ForCausalLM": Family(
        "glm4",
        no_windows,
        attention_bias="attention_bias",
        mlp_names=FUSED_MLP_NAMES,
        blocks="both",
        norm_names=lambda hf: (
            "input_layernorm",
            "post_self_attn_layernorm",
            "post_attention_layernorm",
            "post_mlp_layernorm",
        ),
        partial_rotary=True,
        interleaved_rope=True,
    ),
    "Glm4MoeForCausalLM": _GLM4_MOE,
    "SarvamMoEForCausalLM": _SARVAM_MOE,
    "DeepseekV2ForCausalLM": DEEPSEEK_V2,
    "DeepseekV3ForCausalLM": DEEPSEEK_V3,
    "Glm4MoeLiteForCausalLM": GLM4_MOE_LITE,
    "Mistral4ForCausalLM": MISTRAL4,
    "YoutuForCausalLM": YOUTU,
    "SarvamMLAForCausalLM": SARVAM_MLA,
    "Dots1ForCausalLM": biased("dots1", one_window_by_type, qk_norm="head", moe=mixtures.glm4_moe),
    "SolarOpenForCausalLM": Family(
        "solar_open", no_windows, attention_bias="attention_bias", moe=mixtures.routed
    ),
    "Ernie4_5_MoeForCausalLM": Family(
        "ernie4_5_moe", no_windows, interleaved_rope=True, moe=mixtures.ernie4_5_moe
    ),
    "Cohere2ForCausalLM": biased(
        "cohere2",
        one_window_by_type,
        blocks="parallel",
        ropes=_rope_in_windows,
        interleaved_rope=True,
        scales=_cohere_scales,
        centered_norms=True,
        norm_eps="layer_norm_eps",
    ),
    "GptOssForCausalLM": biased(
        "gpt_oss", one_window_by_type, moe=mixtures.gpt_oss, sinks=True, mxfp4=True
    ),
    "Qwen3_5ForCausalLM": _QWEN3_5,
    "Qwen3_5ForConditionalGeneration": replace(_QWEN3_5, text_of="qwen3_5"),
    "Qwen3_5MoeForCausalLM": _QWEN3_5_MOE,
    "Qwen3_5MoeForConditionalGeneration": replace(_QWEN3_5_MOE, text_of="qwen3_5_moe"),
    "Qwen3NextForCausalLM": _QWEN3_NEXT,
    "GemmaForCausalLM": _GEMMA,
    "Gemma2ForCausalLM": _GEMMA2,
    "VaultGemmaForCausalLM": replace(
        _GEMMA2,
        model_type="vaultgemma",
        windows=one_window_by_type,
        blocks="pre",
        norm_names=lambda hf: ("input_layernorm", "pre_feedforward_layernorm"),
    ),
    "Gemma3ForCausalLM": _GEMMA3,
    "Gemma3ForConditionalGeneration": replace(_GEMMA3, text_of="gemma3"),
    "Gemma4ForCausalLM": GEMMA4,
    "Gemma4ForConditionalGeneration": replace(GEMMA4, text_of="gemma4"),
    "Mistral3ForConditionalGeneration": replace(_MISTRAL, text_of="mistral3", tied_by_text=True),
}
"""By architecture; see `family_of` for architectures of several families."""

OTHERS = {
    "LlamaForCausalLM": (_INTERNLM3, _IQUEST_CODER),
    "DeepseekV3ForCausalLM": (SARVAM_MLA,),
    "Glm4MoeForCausalLM": (_SARVAM_MOE,),
    "Mistral3ForConditionalGeneration": tuple(
        replace(family, text_of="mistral3", tied_by_text=True) for family in (_MINISTRAL3, MISTRAL4)
    ),
}
"""Further families of an architecture. The `model_type` of a configuration, or of its text part,
tells which family it is."""


def family_of(architecture: str, raw: Mapping[str, Any]) -> Family:
    """The family of a served architecture and the configuration in its checkpoint's file."""
    for family in OTHERS.get(architecture, ()):
        own = raw.get("text_config") if family.text_of else raw
        if isinstance(own, Mapping) and own.get("model_type") == family.model_type:
            return family
    return FAMILIES[architecture]

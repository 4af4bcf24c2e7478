"""The families of models that are served, each as a row of `FAMILIES`: how the configuration of its
checkpoints is read. Whatever Weft would compute wrongly is refused here, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from weft.core.errors import ConfigError

if TYPE_CHECKING:
    from weft.kernels.ops import Activation

QkNorm = Literal["head", "width"]
"""head: each head on its own. width: all heads of a token at once."""
Blocks = Literal["pre", "post", "both"]
"""Where attention and MLP have their norms. pre: `x += f(norm(x))`. post: `x += norm(f(x))`. both:
`x += norm(f(norm(x)))`."""
RopeParameters = Mapping[str, Any]
"""A configuration's `rope_parameters`, for one kind of layer."""


@dataclass(frozen=True, slots=True)
class MoeConfig:
    """Layers whose MLP is a mixture of experts, each token going through `top_k` of them."""

    num_experts: int
    top_k: int
    intermediate_size: int
    """The inner width of one expert."""
    normalize: bool
    """Whether a token's weights are scaled to a sum of 1."""
    round_weights: bool
    """Whether the weights are rounded to the model's dtype before they multiply the experts'
    outputs; else they stay float32."""
    layers: tuple[bool, ...]
    """Per layer: whether it has experts; others have a dense MLP."""
    names: tuple[str, str, str, str]
    """What checkpoints with a tensor per expert call the MLP, and an expert's gate, up and down."""

    def __post_init__(self) -> None:
        if not 1 <= self.top_k <= self.num_experts:
            message = f"num_experts_per_tok must be in [1, {self.num_experts}], got {self.top_k}"
            raise ConfigError(message, "num_experts_per_tok")


@dataclass(frozen=True, slots=True)
class LinearConfig:
    """Layers whose attention is a recurrent state by the gated delta rule."""

    layers: tuple[bool, ...]
    """Per layer: whether it is one; others have attention over a KV cache."""
    num_keys: int
    """Heads of queries and keys."""
    num_values: int
    key_dim: int
    value_dim: int
    conv_width: int

    def __post_init__(self) -> None:
        if self.num_values % self.num_keys:
            raise ConfigError(
                f"linear_num_key_heads {self.num_keys} does not divide "
                f"linear_num_value_heads {self.num_values}",
                "linear_num_key_heads",
            )

    @property
    def keys(self) -> int:
        """The width of all queries, and of all keys."""
        return self.num_keys * self.key_dim

    @property
    def values(self) -> int:
        return self.num_values * self.value_dim

    @property
    def channels(self) -> int:
        """What goes through the convolution: queries, keys and values."""
        return 2 * self.keys + self.values

    @property
    def widths(self) -> tuple[int, int, int, int]:
        """The outputs of the layer's four projections: qkv, z, b and a."""
        return self.channels, self.values, self.num_values, self.num_values


@dataclass(frozen=True, slots=True, kw_only=True)
class Scales:
    """Constant factors that some families have; 1 changes nothing."""

    embedding: float = 1.0
    """Multiplies the embedded tokens."""
    rounds_embedding: bool = False
    """Whether that factor is rounded to the model's dtype first."""
    residual: float = 1.0
    """Multiplies what attention and MLP add to the residual stream."""
    attention: float | None = None
    """Multiplies the scores of attention; None: 1 / sqrt(head_dim)."""
    logits: float = 1.0
    """Divides the logits."""
    logit_cap: float | None = None
    """The magnitude c that logits z can't exceed, as they become `c * tanh(z / c)`."""


UNSCALED = Scales()


def _no_scales(hf: Any) -> Scales:
    return UNSCALED


def _one_rope(hf: Any) -> tuple[RopeParameters | None, ...]:
    return (hf.rope_parameters,) * int(hf.num_hidden_layers)


@dataclass(frozen=True, slots=True)
class Family:
    """How one architecture's configuration is read. A string names the field that decides."""

    model_type: str
    windows: Callable[[Any], tuple[int | None, ...]]
    attention_bias: bool | str = False
    attention_out_bias: bool | str = False
    mlp_bias: bool | str = False
    qk_norm: QkNorm | None = None
    fused: bool = False
    blocks: Blocks = "pre"
    partial_rotary: bool = False
    """Whether rope may be for a part of each head's dimensions."""
    ropes: Callable[[Any], tuple[RopeParameters | None, ...]] = _one_rope
    """For each layer; None: its positions are not rotated."""
    moe: Callable[[Any], MoeConfig | None] = lambda hf: None
    linear: Callable[[Any], LinearConfig | None] = lambda hf: None
    output_gate: bool = False
    """Whether q_proj has a gate for each head behind its queries, which multiplies what attention
    gives."""
    scales: Callable[[Any], Scales] = _no_scales
    activation_field: str = "hidden_act"
    activation: Activation = "silu"
    """The only one that is served."""
    norm_offset: float = 0.0
    """What is added to the weights of norms."""
    text_of: str = ""
    """The `model_type` of checkpoints that hold more than text, of which this is the text model.
    Its configuration is then their `text_config`."""


def _no_windows(hf: Any) -> tuple[int | None, ...]:
    return (None,) * int(hf.num_hidden_layers)


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


def _one_window_by_type(hf: Any) -> tuple[int | None, ...]:
    """As `_layer_windows`, for families whose layers have windows unless they say otherwise."""
    return tuple(
        hf.sliding_window if kind == "sliding_attention" else None for kind in _attention_types(hf)
    )


def _layer_types(hf: Any, *known: str) -> list[str]:
    """The kind of each layer. Raises ConfigError unless each is one of the `known` ones."""
    types = list(hf.layer_types)
    if len(types) != hf.num_hidden_layers or not set(types) <= set(known):
        raise ConfigError(
            f"layer_types must name one of {', '.join(sorted(known))} for each of the "
            f"{hf.num_hidden_layers} layers, got {types}",
            "layer_types",
        )
    return types


def _attention_types(hf: Any) -> list[str]:
    return _layer_types(hf, "full_attention", "sliding_attention")


def _rope_by_type(hf: Any) -> tuple[RopeParameters | None, ...]:
    return tuple(hf.rope_parameters[kind] for kind in _attention_types(hf))


def _rope_or_none(hf: Any) -> tuple[RopeParameters | None, ...]:
    rotates = hf.no_rope_layers[: hf.num_hidden_layers]
    if len(rotates) < hf.num_hidden_layers:
        message = f"no_rope_layers must say 0 or 1 for each of the {hf.num_hidden_layers} layers"
        raise ConfigError(message, "no_rope_layers")
    return tuple(hf.rope_parameters if rotated else None for rotated in rotates)


def _qwen3_5(hf: Any) -> LinearConfig | None:
    layers = tuple(kind == "linear_attention" for kind in hf.layer_types)
    if not any(layers):
        return None
    return LinearConfig(
        layers=layers,
        num_keys=hf.linear_num_key_heads,
        num_values=hf.linear_num_value_heads,
        key_dim=hf.linear_key_head_dim,
        value_dim=hf.linear_value_head_dim,
        conv_width=hf.linear_conv_kernel_dim,
    )


def _windows_but_linear(hf: Any) -> tuple[int | None, ...]:
    return (None,) * len(_layer_types(hf, "full_attention", "linear_attention"))


def _granite_scales(hf: Any) -> Scales:
    return Scales(
        embedding=float(hf.embedding_multiplier),
        residual=float(hf.residual_multiplier),
        attention=float(hf.attention_multiplier),
        logits=float(hf.logits_scaling),
    )


def _gemma3_scales(hf: Any) -> Scales:
    cap = hf.final_logit_softcapping
    return Scales(
        embedding=float(hf.hidden_size) ** 0.5,
        rounds_embedding=True,
        attention=float(hf.query_pre_attn_scalar) ** -0.5,
        logit_cap=None if cap is None else float(cap),
    )


def _gemma3_windows(hf: Any) -> tuple[int | None, ...]:
    for name in ("attn_logit_softcapping", "use_bidirectional_attention"):
        if getattr(hf, name):
            raise ConfigError(f"{name} {getattr(hf, name)} is not served", name)
    return _one_window_by_type(hf)


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


def _qwen3_moe(hf: Any) -> MoeConfig | None:
    step = hf.decoder_sparse_step
    if step < 1:
        message = f"decoder_sparse_step must be positive, got {step}"
        raise ConfigError(message, "decoder_sparse_step")
    layers = tuple(
        i not in hf.mlp_only_layers and hf.num_experts > 0 and (i + 1) % step == 0
        for i in range(hf.num_hidden_layers)
    )
    if not any(layers):
        return None
    return MoeConfig(
        num_experts=hf.num_experts,
        top_k=hf.num_experts_per_tok,
        intermediate_size=hf.moe_intermediate_size,
        normalize=bool(hf.norm_topk_prob),
        round_weights=True,
        layers=layers,
        names=("mlp", "gate_proj", "up_proj", "down_proj"),
    )


def _mixtral(hf: Any) -> MoeConfig:
    return MoeConfig(
        num_experts=hf.num_local_experts,
        top_k=hf.num_experts_per_tok,
        intermediate_size=hf.intermediate_size,
        normalize=True,
        round_weights=False,
        layers=(True,) * int(hf.num_hidden_layers),
        names=("block_sparse_moe", "w1", "w3", "w2"),
    )


_MISTRAL = Family("mistral", _one_window)
_GEMMA3 = Family(
    "gemma3_text",
    _gemma3_windows,
    attention_bias="attention_bias",
    attention_out_bias="attention_bias",
    qk_norm="head",
    blocks="both",
    ropes=_rope_by_type,
    scales=_gemma3_scales,
    activation_field="hidden_activation",
    activation="gelu_tanh",
    norm_offset=1.0,
)

_QWEN3_5 = Family(
    "qwen3_5_text",
    _windows_but_linear,
    attention_bias="attention_bias",
    attention_out_bias="attention_bias",
    qk_norm="head",
    partial_rotary=True,
    linear=_qwen3_5,
    output_gate=True,
    norm_offset=1.0,
)

FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family(
        "llama",
        _no_windows,
        attention_bias="attention_bias",
        attention_out_bias="attention_bias",
        mlp_bias="mlp_bias",
    ),
    "MistralForCausalLM": _MISTRAL,
    "Qwen2ForCausalLM": Family("qwen2", _layer_windows, attention_bias=True),
    "Qwen3ForCausalLM": Family(
        "qwen3",
        _layer_windows,
        attention_bias="attention_bias",
        attention_out_bias="attention_bias",
        qk_norm="head",
    ),
    "Qwen3MoeForCausalLM": Family(
        "qwen3_moe",
        _one_window,
        attention_bias="attention_bias",
        attention_out_bias="attention_bias",
        qk_norm="head",
        moe=_qwen3_moe,
    ),
    "MixtralForCausalLM": Family("mixtral", _one_window, moe=_mixtral),
    "Phi3ForCausalLM": Family("phi3", _one_window, fused=True, partial_rotary=True),
    "Olmo2ForCausalLM": Family(
        "olmo2",
        _no_windows,
        attention_bias="attention_bias",
        attention_out_bias="attention_bias",
        qk_norm="width",
        blocks="post",
    ),
    "Olmo3ForCausalLM": Family(
        "olmo3",
        _one_window_by_type,
        attention_bias="attention_bias",
        attention_out_bias="attention_bias",
        qk_norm="width",
        blocks="post",
        ropes=_rope_by_type,
    ),
    "SmolLM3ForCausalLM": Family(
        "smollm3",
        _one_window_by_type,
        attention_bias="attention_bias",
        attention_out_bias="attention_bias",
        mlp_bias="mlp_bias",
        ropes=_rope_or_none,
    ),
    "GraniteForCausalLM": Family(
        "granite",
        _no_windows,
        attention_bias="attention_bias",
        attention_out_bias="attention_bias",
        mlp_bias="mlp_bias",
        scales=_granite_scales,
    ),
    "Qwen3_5ForCausalLM": _QWEN3_5,
    "Qwen3_5ForConditionalGeneration": replace(_QWEN3_5, text_of="qwen3_5"),
    "Gemma3ForCausalLM": _GEMMA3,
    "Gemma3ForConditionalGeneration": replace(_GEMMA3, text_of="gemma3"),
    "Mistral3ForConditionalGeneration": replace(_MISTRAL, text_of="mistral3"),
}

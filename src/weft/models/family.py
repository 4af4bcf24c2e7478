"""What a family of models may be made of, and how one is described: see `weft.models.families`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from weft.core.errors import ConfigError

if TYPE_CHECKING:
    from weft.kernels.ops import Activation

QkNorm = Literal["head", "width"]
"""head: each head on its own. width: all heads of a token at once."""
Blocks = Literal["pre", "post", "both", "parallel", "gemma4"]
"""Where attention and MLP have their norms. pre: `x += f(norm(x))`. post: `x += norm(f(x))`. both:
`x += norm(f(norm(x)))`. parallel: attention and MLP have one norm together,
`n = norm(x); x += attend(n) + mlp(n)`. gemma4: see `weft.models.gemma4`."""
NORM_NAMES: dict[Blocks, tuple[str, ...]] = {
    "pre": ("input_layernorm", "post_attention_layernorm"),
    "post": ("post_attention_layernorm", "post_feedforward_layernorm"),
    "both": (
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    ),
    "parallel": ("input_layernorm",),
    "gemma4": (),
}
"""What most families call these norms within a layer, in the order of their use."""
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
    router: str = "gate"
    """What the router is called."""
    weights_of_chosen: bool = False
    """Whether a token's weights are the softmax over the experts chosen for it alone; else they are
    of that over all."""
    biased: bool = False
    """Whether router and experts have biases."""
    clamped_swiglu: tuple[float, float] | None = None
    """alpha and limit of that activation. Gate and up are then one projection of interleaved
    columns, which checkpoints have for all experts in one tensor, (experts, in, out)."""
    shared_size: int = 0
    """The inner width of an expert that all tokens go through, each with a weight of its own
    between 0 and 1; 0: there is none."""
    place: str = "mlp."
    """How the names of router and experts begin within a layer."""
    stacked: bool = False
    """Whether checkpoints have all experts in one tensor, (experts, out, in)."""
    beside_mlp: bool = False
    """Whether these layers have a dense MLP too, beside which the experts are."""
    expert_ranks: int = 1
    """Over how many ranks the experts are divided, each of them whole; 1: all are here, or a part
    of the width of each."""

    @property
    def num_here(self) -> int:
        """How many experts a rank has, or has a part of."""
        return self.num_experts // self.expert_ranks

    def __post_init__(self) -> None:
        if not 1 <= self.top_k <= self.num_experts:
            message = f"num_experts_per_tok must be in [1, {self.num_experts}], got {self.top_k}"
            raise ConfigError(message, "num_experts_per_tok")


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What a layer may have otherwise than other layers of its model."""

    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    """The inner width of its dense MLP."""
    cache: int
    """The layer whose KV cache it reads: its own number; or that of a layer ahead of it, and then
    it computes queries only."""
    keys_are_values: bool = False
    """Whether the projection to keys gives the values, too, and there is none to values."""


class TokenInputsConfig(NamedTuple):
    """A second embedding of tokens, of which each layer has a part."""

    vocab_size: int
    width: int
    """Of one layer's part."""


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
    by_key_head: bool = False
    """Whether the layer has two projections, whose outputs lie by key head: queries, keys, values
    and z of one after the other, and b and a. Else there are four: queries, keys and values, z, b
    and a."""

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
    def heads_per_key(self) -> int:
        """How many value heads have the same key head."""
        return self.num_values // self.num_keys

    @property
    def projections(self) -> dict[str, tuple[int, ...]]:
        """The layer's projections of its input, and the parts of their outputs, each of which lies
        by key head."""
        if self.by_key_head:
            return {
                "in_proj_qkvz": (self.channels + self.values,),
                "in_proj_ba": (2 * self.num_values,),
            }
        return {
            "in_proj_qkv": (self.keys, self.keys, self.values),
            "in_proj_z": (self.values,),
            "in_proj_b": (self.num_values,),
            "in_proj_a": (self.num_values,),
        }


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
    fused_qkv: bool = False
    fused_mlp: bool = False
    """Whether gate and up are one projection."""
    blocks: Blocks = "pre"
    norm_names: Callable[[Any], tuple[str, ...]] | None = None
    """What a layer calls its norms, in the order of their use, where that differs from
    NORM_NAMES."""
    layers: Callable[[Any], tuple[LayerShape, ...]] = lambda hf: ()
    """The layers of a family in which they differ; of others there are none."""
    value_norm: bool = False
    """Whether each head's values have an RMS norm without weights."""
    token_inputs: Callable[[Any], TokenInputsConfig | None] = lambda hf: None
    interleaved_rope: bool = False
    query_growth: bool = False
    """Whether queries grow with their position (see `RopeConfig.query_growth`)."""
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
    centered_norms: bool = False
    """Whether norms are LayerNorms without a bias."""
    mtp_head: bool = False
    """Whether checkpoints may have a head that drafts several tokens: see `weft.models.mtp`."""
    sinks: bool = False
    """Whether each head of attention has a score that no value belongs to."""
    mxfp4: bool = False
    """Whether checkpoints may hold the experts' weights in mxfp4."""
    norm_eps: str = "rms_norm_eps"
    """The field that has it."""
    text_of: str = ""
    """The `model_type` of checkpoints that hold more than text, of which this is the text model.
    Its configuration is then their `text_config`."""

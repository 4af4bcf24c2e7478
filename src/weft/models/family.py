"""The parts by which a family of models is described; see `weft.models.families`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from weft.core.errors import ConfigError

if TYPE_CHECKING:
    from weft.kernels.ops import Activation

QkNorm = Literal["head", "width", "rotated"]
"""What the norm of q and k runs over. head: each head. width: all heads of a token. rotated: each
head after rope, where the others are before it."""
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
QK_NORM_NAMES: dict[QkNorm, tuple[str, str]] = {
    "head": ("q_norm", "k_norm"),
    "width": ("q_norm", "k_norm"),
    "rotated": ("query_layernorm", "key_layernorm"),
}
"""What the norms of q and k are called within attention."""
MLP_NAMES = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
FUSED_MLP_NAMES = ("mlp.gate_up_proj", "mlp.down_proj")
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
    names: tuple[str, str, str, str] = ("mlp", "gate_proj", "up_proj", "down_proj")
    """In checkpoints with a tensor per expert: names of the MLP, and an expert's gate, up, down."""
    router: str = "gate"
    """The router's name."""
    weights_of_chosen: bool = False
    """Whether a token's weights are a softmax over its chosen experts only; else they come from a
    softmax over all experts."""
    biased: bool = False
    """Whether router and experts have biases."""
    clamped_swiglu: tuple[float, float] | None = None
    """alpha and limit, if the activation is `ClampedSwiglu`. Gate and up are then one projection of
    interleaved columns, with one tensor for all experts in checkpoints, (experts, in, out)."""
    shared_size: int = 0
    """The inner width of an expert that all tokens go through; 0: there is none."""
    shared_gated: bool = True
    """Whether each token has a weight of its own for the shared expert, between 0 and 1; else it is
    1, and checkpoints call the expert `shared_experts`."""
    exact_router: bool = False
    """Whether the router's weight and its logits are float32; else they have the model's dtype."""
    sigmoid: bool = False
    """Whether an expert's weight is the sigmoid of its logit; else weights are a softmax."""
    groups: tuple[int, int] = (1, 1)
    """Into how many groups of neighbours experts are divided, and how many of these groups a token
    chooses from: the best ones."""
    best_of_group: int = 2
    """A group is as good as its best experts together; here is how many of them count."""
    correction: str = ""
    """What the MLP calls a float32 tensor that is added to the experts' weights for the choice
    alone; "": there is none."""
    correction_dims: int = 1
    """How many dimensions that tensor has, of which all but the last are 1."""
    least_sum: float = 0.0
    """What is added to the sum that weights are divided by for a sum of 1."""
    scale: float = 1.0
    """What the weights are multiplied by in the end."""
    place: str = "mlp."
    """The prefix of the names of router and experts within a layer."""
    stacked: bool = False
    """Whether checkpoints have all experts in one tensor, (experts, out, in)."""
    stored_names: tuple[tuple[str, str], ...] = ()
    """What checkpoints call router and experts, where that differs: ends of names, and what is
    there instead."""
    beside_mlp: bool = False
    """Whether these layers also have a dense MLP, beside the experts."""
    expert_ranks: int = 1
    """Over how many ranks whole experts are divided; 1: every rank has all of them, or a part of
    the width of each."""

    @property
    def num_here(self) -> int:
        """How many experts a rank has, or has a part of."""
        return self.num_experts // self.expert_ranks

    def __post_init__(self) -> None:
        if not 1 <= self.top_k <= self.num_experts:
            message = f"num_experts_per_tok must be in [1, {self.num_experts}], got {self.top_k}"
            raise ConfigError(message, "num_experts_per_tok")
        groups, top_groups = self.groups
        if (
            groups < 1
            or self.num_experts % groups
            or (groups > 1 and self.num_experts < 2 * groups)
        ):
            message = f"n_group must divide {self.num_experts} experts by two or more, got {groups}"
            raise ConfigError(message, "n_group")
        least = -(-self.top_k * groups // self.num_experts)
        if not least <= top_groups <= groups:
            message = f"topk_group must be in [{least}, {groups}], got {top_groups}"
            raise ConfigError(message, "topk_group")

    def correction_of(self, layer: int) -> str:
        """The name of a layer's tensor of corrections."""
        return f"model.layers.{layer}.{self.names[0]}.{self.correction}"


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What may differ between the layers of one model."""

    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    """The inner width of its dense MLP."""
    cache: int
    """The layer whose KV cache it reads: its own number, or that of an earlier layer; then it only
    computes queries."""
    keys_are_values: bool = False
    """Whether the projection to keys also gives the values, without a projection to values."""


class LatentConfig(NamedTuple):
    """Attention whose keys and values are projections of one latent vector of each token, and whose
    cache holds the latents: see `weft.models.latent_attention`."""

    query_rank: int | None
    """The width of the latent that queries are projected from; None: the layer's input is."""
    rank: int
    """The width of the latent of keys and values."""
    key_dim: int
    """The part of each head's query and key that has no position. That of a key is a projection of
    the latent."""
    rope_dim: int
    """The part of each head's query and key that is rotated. All heads have the same such key,
    which is behind the latent in the cache."""
    value_dim: int

    @property
    def width(self) -> int:
        """How many numbers of a token the cache of a layer holds."""
        return self.rank + self.rope_dim


class TokenInputsConfig(NamedTuple):
    """A second embedding of tokens, of which each layer has a part."""

    vocab_size: int
    width: int
    """The width of one layer's part."""


@dataclass(frozen=True, slots=True)
class LinearConfig:
    """Layers whose attention is a recurrent state: by the gated delta rule, or Mamba 2."""

    layers: tuple[bool, ...]
    """Per layer: whether it is one; others have attention over a KV cache."""
    num_keys: int
    """Heads of queries and keys."""
    num_values: int
    key_dim: int
    value_dim: int
    conv_width: int
    by_key_head: bool = False
    """Whether the layer has two projections, whose outputs are ordered by key head: one to queries,
    keys, values and z, the other to b and a. Else it has four: one to queries, keys and values, and
    one each to z, b and a."""
    mamba: bool = False
    """Whether these are layers of Mamba 2, which have one projection to z, values, keys, queries
    and b, in this order. In their terms, values are x, keys B, queries C, b the time steps, and
    `num_keys` is the number of groups."""
    conv_bias: bool = False
    """Whether the convolution has a bias."""
    projection_bias: bool = False
    """Whether the layer's two projections have biases."""
    spans_ranks: bool = False
    """Whether this is a rank's share, and other ranks have heads of the same group."""

    def __post_init__(self) -> None:
        if self.num_values % self.num_keys:
            keys, values = "linear_num_key_heads", "linear_num_value_heads"
            if self.mamba:
                keys, values = "mamba_n_groups", "mamba_n_heads"
            message = f"{keys} {self.num_keys} does not divide {values} {self.num_values}"
            raise ConfigError(message, keys)

    @property
    def divided(self) -> dict[str, int]:
        """The numbers that ranks divide, by the configuration's field."""
        if not self.mamba:
            return {"linear_num_key_heads": self.num_keys}
        groups = {"mamba_n_groups": self.num_keys} if self.num_keys > 1 else {}
        return {"mamba_n_heads": self.num_values, **groups}

    def share_of(self, size: int) -> LinearConfig:
        """One of `size` ranks' share. The queries and keys of an only group are on all ranks."""
        keys, values = max(self.num_keys // size, 1), self.num_values // size
        return replace(self, num_keys=keys, num_values=values, spans_ranks=self.num_keys < size)

    @property
    def name(self) -> str:
        """What a decoder layer calls such a layer."""
        return "mamba" if self.mamba else "linear_attn"

    @property
    def keys(self) -> int:
        """The width of all queries, and of all keys."""
        return self.num_keys * self.key_dim

    @property
    def values(self) -> int:
        return self.num_values * self.value_dim

    @property
    def channels(self) -> int:
        """The width of the convolution: all queries, keys and values."""
        return 2 * self.keys + self.values

    @property
    def channel_parts(self) -> tuple[int, ...]:
        """The widths of queries, keys and values in the order in which checkpoints have them as
        channels of the convolution."""
        parts = self.keys, self.keys, self.values
        return parts[::-1] if self.mamba else parts

    @property
    def heads_per_key(self) -> int:
        """How many value heads have the same key head."""
        return self.num_values // self.num_keys

    @property
    def projections(self) -> dict[str, tuple[int, ...]]:
        """The layer's projections of its input, and the parts of their outputs, each of which lies
        by key head."""
        if self.mamba:
            parts = self.values, self.values, self.keys, self.keys, self.num_values
            return {"in_proj": parts}
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
    score_cap: float | None = None
    """The magnitude c that scores of attention z can't exceed, as they become
    `c * tanh(z / c)`."""
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
    """What configurations state, and transformers knows."""
    windows: Callable[[Any], tuple[int | None, ...]]
    attention_bias: bool | str = False
    attention_out_bias: bool | str = False
    mlp_bias: bool | str = False
    qk_norm: QkNorm | None = None
    qk_norm_if: bool | str = True
    fused_qkv: bool = False
    mlp_names: tuple[str, ...] = MLP_NAMES
    """What a layer calls gate, up and down, or only two names if gate and up are one projection."""
    mlp_width: str = "intermediate_size"
    """The field that has the inner width of dense MLPs."""
    blocks: Blocks = "pre"
    norm_names: Callable[[Any], tuple[str, ...]] | None = None
    """What a layer calls its norms, in the order of their use, where that differs from
    NORM_NAMES."""
    layers: Callable[[Any], tuple[LayerShape, ...]] = lambda hf: ()
    """The shape of each layer, for families whose layers differ; else ()."""
    value_norm: bool = False
    """Whether each head's values have an RMS norm without weights."""
    token_inputs: Callable[[Any], TokenInputsConfig | None] = lambda hf: None
    interleaved_rope: bool | str = False
    query_growth: bool = False
    """Whether queries grow with their position (see `RopeConfig.query_growth`)."""
    partial_rotary: bool = False
    """Whether rope may be for a part of each head's dimensions."""
    ropes: Callable[[Any], tuple[RopeParameters | None, ...]] = _one_rope
    """For each layer; None: its positions are not rotated."""
    moe: Callable[[Any], MoeConfig | None] = lambda hf: None
    linear: Callable[[Any], LinearConfig | None] = lambda hf: None
    latent: Callable[[Any], LatentConfig | None] = lambda hf: None
    output_gate: bool = False
    """Whether q_proj's output has a gate behind each head's query, for the output of attention."""
    scales: Callable[[Any], Scales] = _no_scales
    activation_field: str = "hidden_act"
    activation: Activation = "silu"
    """The only activation that is served for this family."""
    norm_offset: float = 0.0
    """What is added to the weights of norms."""
    centered_norms: bool = False
    """Whether norms are LayerNorms without a bias."""
    mtp_head: bool = False
    """Whether checkpoints may have a multi-token prediction head: see `weft.models.mtp`."""
    sinks: bool = False
    """Whether attention has sinks: a score for each head, without a value, in its softmax."""
    mxfp4: bool = False
    """Whether checkpoints may hold the experts' weights in mxfp4."""
    norm_eps: str = "rms_norm_eps"
    """The name of the configuration's field with the norms' epsilon."""
    other_types: tuple[str, ...] = ()
    """What configurations with the same fields may state as well, which transformers does not
    know."""
    text_of: str = ""
    """If this is the text part of a larger model: that model's `model_type`. The configuration is
    then its `text_config`."""
    tied_by_text: bool = False
    """Whether the text part says if embedding and head are tied; else the larger model does."""

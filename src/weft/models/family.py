"""The parts by which a family of models is described; see `weft.models.families`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

from weft.core.errors import ConfigError
from weft.models.rope_config import QueryGrowth
from weft.models.state_config import LatentConfig, LinearConfig, ShortConvConfig

QkNorm = Literal["head", "width", "rotated", "unit"]
"""What the norm of q and k runs over. head: each head. width: all heads of a token. rotated: each
head after rope, where the others are before it. unit: each head of the layers that have rope, by
norms without weights, before or after it."""
Blocks = Literal["pre", "post", "both", "parallel", "single", "mixed", "gemma4"]
"""Where attention and MLP have their norms. pre: `x += f(norm(x))`. post: `x += norm(f(x))`. both:
`x += norm(f(norm(x)))`. parallel: attention and MLP have one norm together,
`n = norm(x); x += attend(n) + mlp(n)`. single: a layer has only one of the two, its mixer,
`x += mix(norm(x))`. mixed: layers with a recurrent state are like pre, and others like post.
gemma4: see `weft.models.gemma4`."""
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
    "single": ("norm",),
    "mixed": ("input_layernorm", "post_attention_layernorm"),
    "gemma4": (),
}
"""What most families call these norms within a layer, in the order of their use."""
Mixer = Literal["attention", "linear", "mlp", "experts"]
"""What a layer consists of, if layers are a single mixer."""
ActivationName = Literal["silu", "gelu_tanh", "relu2", "xielu"]
"""The activations of dense MLPs. relu2, the square of ReLU, and xielu, which has parameters in each
layer, have no gate."""


class PartNames(NamedTuple):
    """What checkpoints and adapters call some parts of a model. The defaults are the names in most
    families."""

    attention_out: str = "o_proj"
    """The last projection of attention, within it."""
    qk_norms: tuple[str, str] = ("q_norm", "k_norm")
    """The norms of q and k, within attention."""
    last_norm: str = "model.norm"
    """The norm behind the last layer."""
    stored_qkv: str = ""
    """What checkpoints call one projection for q, k and v, within attention, where adapters have
    three; "": they have three, too."""
    attention: str = "self_attn"
    """A layer's attention."""
    prefixes: tuple[tuple[str, str], ...] = ()
    """See `weft.core.targets.TargetTable.naming`."""


USUAL_NAMES = PartNames()
MLP_NAMES = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
FUSED_MLP_NAMES = ("mlp.gate_up_proj", "mlp.down_proj")
UNGATED_MLP_NAMES = ("mlp.up_proj", "mlp.down_proj")
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
    """Whether each token has a weight of its own for the shared expert, between 0 and 1, and
    checkpoints call the expert `shared_expert`; else the weight is 1."""
    shared_name: str = "shared_experts"
    """What checkpoints call a shared expert whose weight is 1."""
    latent_size: int = 0
    """The width of what experts read and give, if a projection of the layer's input comes before
    them, and one to the layer's output after them; 0: they read the input and give the output."""
    exact_router: bool = False
    """Whether the router's weight and its logits are float32; else they have the model's dtype."""
    sigmoid: bool = False
    """Whether an expert's weight is the sigmoid of its logit; else weights are a softmax."""
    groups: tuple[int, int] = (1, 1)
    """Into how many groups of neighbours experts are divided, and from how many of these groups,
    the best ones, a token chooses."""
    best_of_group: int = 2
    """How many of a group's best experts are summed to rate the group."""
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
    transposed: bool = False
    """Whether these tensors are (experts, in, out). PEFT then takes inputs for outputs: see
    `Packed.transposed`."""
    weighs_input: bool = False
    """Whether the input of a token's only expert is multiplied by the sigmoid of its logit, and the
    output by nothing."""
    stored_names: tuple[tuple[str, str], ...] = ()
    """What checkpoints call router and experts, where that differs: ends of names, and what is
    there instead."""
    beside_mlp: bool = False
    """Whether these layers also have a dense MLP, beside the experts."""
    gated: bool = True
    """Whether experts have a gate beside up."""
    expert_ranks: int = 1
    """Over how many ranks whole experts are divided; 1: every rank has all of them, or a part of
    the width of each."""

    @property
    def weighs_shared(self) -> bool:
        """Whether each token has a weight of its own for the shared expert. The projection to its
        logit is packed behind the router."""
        return bool(self.shared_size) and self.shared_gated

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


class TokenInputsConfig(NamedTuple):
    """A second embedding of tokens, of which each layer has a part."""

    vocab_size: int
    width: int
    """The width of one layer's part."""


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
    """The `model_type` that transformers knows."""
    windows: Callable[[Any], tuple[int | None, ...]]
    chunked: bool = False
    """Whether windows begin at multiples of their size."""
    attention_bias: bool | str = False
    attention_out_bias: bool | str = False
    mlp_bias: bool | str = False
    qk_norm: QkNorm | None = None
    qk_norm_if: bool | str = True
    fused_qkv: bool = False
    mlp_names: tuple[str, ...] = MLP_NAMES
    """What a layer calls gate, up and down, or only two names if gate and up are one projection or
    there is no gate."""
    mlp_width: Callable[[Any], int] = lambda hf: getattr(hf, "intermediate_size", 0)
    """Computes the inner width of dense MLPs. Call it only after the configuration's sizes and
    numbers have been checked."""
    names: PartNames = USUAL_NAMES
    blocks: Blocks = "pre"
    norm_names: Callable[[Any], tuple[str, ...]] | None = None
    """What a layer calls its norms, in the order of their use, where that differs from
    NORM_NAMES."""
    mixers: Callable[[Any], tuple[Mixer, ...]] = lambda hf: ()
    """What each layer consists of, if layers are a single mixer; else ()."""
    layers: Callable[[Any], tuple[LayerShape, ...]] = lambda hf: ()
    """The shape of each layer, for families whose layers differ; else ()."""
    value_norm: bool = False
    """Whether each head's values have an RMS norm without weights."""
    token_inputs: Callable[[Any], TokenInputsConfig | None] = lambda hf: None
    interleaved_rope: bool | str = False
    growths: Callable[[Any], tuple[QueryGrowth | None, ...]] = lambda hf: ()
    """How queries grow with their position in each layer; (): in no layer."""
    partial_rotary: bool = False
    """Whether rope may be for a part of each head's dimensions."""
    ropes: Callable[[Any], tuple[RopeParameters | None, ...]] = _one_rope
    """For each layer; None: its positions are not rotated."""
    moe: Callable[[Any], MoeConfig | None] = lambda hf: None
    linear: Callable[[Any], LinearConfig | ShortConvConfig | None] = lambda hf: None
    latent: Callable[[Any], LatentConfig | None] = lambda hf: None
    output_gate: bool = False
    """Whether q_proj's output has a gate behind each head's query, for the output of attention."""
    scales: Callable[[Any], Scales] = _no_scales
    activation_field: str = "hidden_act"
    activation: ActivationName = "silu"
    """The only activation that is served for this family."""
    norm_offset: float = 0.0
    """What is added to the weights of norms."""
    centered_norms: bool = False
    """Whether norms are LayerNorms."""
    norm_bias: bool = False
    """Whether norms have biases, which no adapter changes."""
    mtp_head: bool = False
    """Whether checkpoints may have a multi-token prediction head: see `weft.models.mtp`."""
    sinks: bool = False
    """Whether attention has sinks: a score for each head, without a value, in its softmax."""
    mxfp4: bool = False
    """Whether checkpoints may hold the experts' weights in mxfp4."""
    norm_eps: str = "rms_norm_eps"
    """The name of the configuration's field with the norms' epsilon."""
    other_types: tuple[str, ...] = ()
    """Other values of `model_type`, which transformers does not know, for configurations with the
    same fields."""
    text_of: str = ""
    """If this is the text part of a larger model: that model's `model_type`. The configuration is
    then its `text_config`."""
    tied_by_text: bool = False
    """Whether the text part says if embedding and head are tied; else the larger model does."""


biased = partial(Family, attention_bias="attention_bias", attention_out_bias="attention_bias")
"""Makes a family with one field that says whether q, k, v and o have biases."""

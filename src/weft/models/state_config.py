"""Shapes of layers that do not keep the keys and values of each token, as parts of a model's
configuration."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from weft.core.errors import ConfigError


class LatentConfig(NamedTuple):
    """Attention whose keys and values are projections of one latent vector of each token, and whose
    cache holds the latents: see `weft.models.latent_attention`."""

    query_rank: int | None
    """The width of the latent that queries are projected from. None: they are projected from the
    layer's input."""
    rank: int
    """The width of the latent of keys and values."""
    key_dim: int
    """The size of the part of a head's query and key that has no position. A key's part is a
    projection of the latent."""
    rope_dim: int
    """The size of the part of a head's query and key that is rotated. All heads share this part of
    the key. The cache holds it behind the latent."""
    value_dim: int
    """The size of a head's value."""

    @property
    def width(self) -> int:
        """How many numbers of a token the cache of a layer holds."""
        return self.rank + self.rope_dim


_FIELDS = (
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_key_head_dim",
    "linear_value_head_dim",
)


@dataclass(frozen=True, slots=True)
class LinearConfig:
    """Layers that keep a recurrent state in place of a KV cache: by the gated delta rule, or Mamba
    2."""

    layers: tuple[bool, ...]
    """Whether each layer is one."""
    num_keys: int
    """How many heads of queries and keys there are."""
    num_values: int
    """How many heads of values there are, a multiple of `num_keys`."""
    key_dim: int
    value_dim: int
    conv_width: int
    """How many tokens the convolution reads, the newest one included."""
    by_key_head: bool = False
    """Whether the layer has two projections, whose outputs are ordered by key head: one to queries,
    keys, values and z, the other to b and a. Else it has four: one to queries, keys and values, and
    one each to z, b and a."""
    mamba: bool = False
    """Whether these are layers of Mamba 2, which have one projection to z, values, keys, queries
    and b, in this order. In their terms, values are x, keys B, queries C, b the time steps, and
    `num_keys` is the number of groups."""
    apart: bool = False
    """Whether the layer has one projection each to queries, keys, values, z, b and a, and names of
    its own for some parts, as in OLMo Hybrid."""
    doubled: bool = False
    """Whether strengths are between 0 and 2: see `weft.kernels.delta.DeltaLayer.doubled`."""
    norm_eps: float | None = None
    """The epsilon of the norm of heads; None: that of the model's other norms."""
    conv_bias: bool = False
    """Whether the convolution has a bias."""
    projection_bias: bool = False
    """Whether the layer's two projections have biases."""
    name: str = "linear_attn"
    """What a decoder layer calls such a layer."""
    fields: tuple[str, str, str, str] = _FIELDS
    """The configuration's fields for `num_keys`, `num_values`, `key_dim` and `value_dim`."""
    least_step: float = 0.0
    """The least time step of Mamba 2, in prompts and in decodes; 0: there is no limit. transformers
    applies it in prompts only, so that its decodes with a cache differ from what it computes in one
    go."""
    spans_ranks: bool = False
    """Whether this is one rank's share, and other ranks have heads of the same group."""

    @classmethod
    def of_fields(
        cls,
        hf: Any,
        layers: tuple[bool, ...],
        fields: tuple[str, str, str, str] = _FIELDS,
        **more: Any,
    ) -> LinearConfig:
        """Make one whose four sizes are in these fields of a configuration `hf`. `layers` and
        `more` are attributes of the result. Raises ConfigError."""
        keys, values, key_dim, value_dim = (getattr(hf, name) for name in fields)
        return cls(layers, keys, values, key_dim, value_dim, fields=fields, **more)

    def __post_init__(self) -> None:
        if self.num_values % self.num_keys:
            keys, values, *_ = self.fields
            message = f"{keys} {self.num_keys} does not divide {values} {self.num_values}"
            raise ConfigError(message, keys)

    @property
    def divided(self) -> dict[str, int]:
        """The numbers that ranks divide, by the configuration's field."""
        keys, values, *_ = self.fields
        if not self.mamba:
            return {keys: self.num_keys}
        groups = {keys: self.num_keys} if self.num_keys > 1 else {}
        return {values: self.num_values, **groups}

    def share_of(self, size: int) -> LinearConfig:
        """One of `size` ranks' share. The queries and keys of an only group are on all ranks."""
        keys, values = max(self.num_keys // size, 1), self.num_values // size
        return replace(self, num_keys=keys, num_values=values, spans_ranks=self.num_keys < size)

    @property
    def kept_width(self) -> int:
        """How many numbers of each token a state keeps: the inputs to the convolution, and to each
        head's strength and decay."""
        return self.channels + 2 * self.num_values

    @property
    def state_shape(self) -> tuple[int, ...]:
        """The shape of the rest of a state: a matrix for each head."""
        return self.num_values, self.key_dim, self.value_dim

    @property
    def vectors(self) -> dict[str, tuple[tuple[int, ...], tuple[int, ...]]]:
        """The layer's tensors besides projections, by name. Each has the sizes of all dimensions
        after the first one, and the parts of the first dimension. Ranks divide each part."""
        of_heads: tuple[int, ...] = (self.num_values,)
        found: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
            "conv1d.weight": ((1, self.conv_width), self.channel_parts),
            "A_log": ((), of_heads),
            "dt_bias": ((), of_heads),
            self.norm: ((), (self.values if self.mamba else self.value_dim,)),
        }
        if self.mamba:
            found["D"] = (), of_heads
        if self.conv_bias:
            found["conv1d.bias"] = (), self.channel_parts
        return found

    @property
    def norm(self) -> str:
        """What the layer calls the weight of its norm."""
        return "o_norm.weight" if self.apart else "norm.weight"

    @property
    def out(self) -> str:
        """What the layer calls its last projection."""
        return "o_proj" if self.apart else "out_proj"

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
        """The layer's projections of its input, by name, and the widths of the parts of their
        outputs. Each part is ordered by key head."""
        if self.mamba:
            parts = self.values, self.values, self.keys, self.keys, self.num_values
            return {"in_proj": parts}
        if self.by_key_head:
            return {
                "in_proj_qkvz": (self.channels + self.values,),
                "in_proj_ba": (2 * self.num_values,),
            }
        if self.apart:
            return {
                **dict.fromkeys(("q_proj", "k_proj"), (self.keys,)),
                **dict.fromkeys(("v_proj", "g_proj"), (self.values,)),
                **dict.fromkeys(("b_proj", "a_proj"), (self.num_values,)),
            }
        return {
            "in_proj_qkv": (self.keys, self.keys, self.values),
            "in_proj_z": (self.values,),
            "in_proj_b": (self.num_values,),
            "in_proj_a": (self.num_values,),
        }


@dataclass(frozen=True, slots=True)
class ShortConvConfig:
    """Layers with a gated short convolution in place of attention: `out(c * conv(b * x))`, where b,
    c and x are the parts of a projection of the layer's input. Their state is the last inputs of
    the convolution."""

    layers: tuple[bool, ...]
    """Whether each layer is one; the others have attention over a KV cache."""
    channels: int
    """The width of the convolution, and of b, c and x."""
    conv_width: int
    """How many tokens the convolution reads, the newest one included."""
    projection_bias: bool = False
    """Whether the convolution and the layer's two projections have biases."""
    name = "conv"
    """What a decoder layer calls such a layer."""
    out = "out_proj"
    """What the layer calls its last projection."""
    state_shape = (0,)
    """A state holds only what it keeps of tokens: see `kept_width`."""

    @property
    def divided(self) -> dict[str, int]:
        """The numbers that ranks divide, by the configuration's field."""
        return {"hidden_size": self.channels}

    def share_of(self, size: int) -> ShortConvConfig:
        """One of `size` ranks' share, some of the channels."""
        return replace(self, channels=self.channels // size)

    @property
    def values(self) -> int:
        """The width of what the last projection reads."""
        return self.channels

    @property
    def kept_width(self) -> int:
        """How many numbers of each token a state keeps: the inputs to the convolution."""
        return self.channels

    @property
    def projections(self) -> dict[str, tuple[int, ...]]:
        """The layer's projection of its input, and the parts of its output: b, c and x."""
        return {"in_proj": (self.channels,) * 3}

    @property
    def vectors(self) -> dict[str, tuple[tuple[int, ...], tuple[int, ...]]]:
        """The layer's tensors besides projections, by name; see `LinearConfig.vectors`."""
        found: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
            "conv.weight": ((1, self.conv_width), (self.channels,))
        }
        if self.projection_bias:
            found["conv.bias"] = (), (self.channels,)
        return found

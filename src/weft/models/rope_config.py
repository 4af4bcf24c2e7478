"""Reads and checks a configuration's rotary position embedding."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

from weft.core.errors import ConfigError

logger = logging.getLogger(__name__)

RopeType = Literal["default", "linear", "llama3", "yarn", "longrope", "proportional", "dynamic"]
_ORIGINAL, _MSCALES = "original_max_position_embeddings", ("mscale", "mscale_all_dim")


class QueryGrowth(NamedTuple):
    """How queries grow: at position p, they are multiplied by
    `1 + factor * log(1 + floor((p + ahead) / length))`."""

    factor: float
    length: int
    ahead: int = 0
    rounded: bool = True
    """Whether what multiplies queries is rounded to the model's dtype; else it is float32."""


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding: base frequency and how it is stretched for longer contexts."""

    theta: float
    type: RopeType = "default"
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    """llama3, yarn and longrope: the context length before stretching."""
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    attention_factor: float | None = None
    """yarn and longrope: what cos and sin are multiplied by; None: derived from `factor`, and for
    yarn from the mscales."""
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    short_factor: tuple[float, ...] = ()
    """longrope: what the wavelength of each frequency is multiplied by in contexts of up to
    `original_max_position_embeddings` tokens."""
    partial_rotary_factor: float = 1.0
    """The share of a head's dimensions, the first ones, that are rotated. proportional: the share
    of its pairs of dimensions; the other pairs are rotated by 0."""
    interleaved: bool = False
    """Whether neighbouring dimensions form a pair; else i and i + R/2 do, of R dimensions."""

    def rotated(self, head_dim: int) -> int:
        """How many dimensions of a head are rotated."""
        if self.type == "proportional":
            return head_dim
        return int(head_dim * self.partial_rotary_factor)

    def check(self, head_dim: int) -> None:
        """Raise ConfigError if this does not fit heads of `head_dim` dimensions."""
        rotated = self.rotated(head_dim)
        if rotated % 2 or not 0 < rotated <= head_dim:
            raise ConfigError(
                f"partial_rotary_factor {self.partial_rotary_factor} of head_dim {head_dim} "
                "is no even number of dimensions",
                "rope_parameters",
            )
        if self.type == "longrope" and len(self.short_factor) != rotated // 2:
            raise ConfigError(
                f"short_factor must hold {rotated // 2} numbers, one for each pair of rotated "
                f"dimensions, got {len(self.short_factor)}",
                "rope_parameters",
            )


def context_limit(parameters: Mapping[str, Any] | None, hf: Any) -> int:
    """How many tokens a context may have with these `rope_parameters`.

    With longrope, a context beyond the original length would change the frequencies of all its
    positions, and so make its cached keys wrong; such contexts are not served.
    """
    p, limit = parameters or {}, int(hf.max_position_embeddings)
    if p.get("rope_type") != "longrope" or p["short_factor"] == p["long_factor"]:
        return limit
    original = int(p["original_max_position_embeddings"])
    if original < limit:
        logger.warning(
            "rope type longrope: contexts of up to %d tokens are served, not of %d, as beyond "
            "the former the frequencies of all positions change",
            original,
            limit,
        )
    return min(original, limit)


def read_rope(
    parameters: Mapping[str, Any] | None, hf: Any, partial: bool, interleaved: bool = False
) -> RopeConfig:
    """Read `rope_parameters`, into which transformers also converts rope_theta and rope_scaling.

    `partial`: whether the family can rotate a part of each head. `interleaved`: whether it rotates
    neighbouring dimensions together. Raises ConfigError.
    """
    p = dict(parameters or {})
    kind: RopeType | None = p.get("rope_type")
    if kind is None or kind not in get_args(RopeType):
        raise ConfigError(
            f"rope type {kind!r} is not served; these are: {', '.join(get_args(RopeType))}",
            "rope_parameters",
        )
    for name in _NUMBERS & p.keys():
        for value in p[name] if name in _FACTORS and isinstance(p[name], list) else [p[name]]:
            if value is not None and not _is_number(value, positive=name in _POSITIVE):
                raise ConfigError(f"{name} can't be {value!r:.80}", "rope_parameters")
    share = float(p.get("partial_rotary_factor", 1.0))
    if share != 1.0 and not partial and kind != "proportional":
        raise ConfigError("partial_rotary_factor other than 1 is not served", "rope_parameters")
    needed, optional = _FIELDS[kind]
    missing = [k for k in ("rope_theta", *needed) if p.get(k) is None]
    if missing:
        raise ConfigError(f"rope type {kind} needs {', '.join(missing)}", "rope_parameters")
    original = p.get(_ORIGINAL)
    if original is not None and original < 2:
        raise ConfigError(f"{_ORIGINAL} must be at least 2, got {original}", "rope_parameters")
    read = {k: p[k] for k in (*needed, *optional) if p.get(k) is not None}
    if kind in ("yarn", "longrope"):
        read.setdefault("factor", hf.max_position_embeddings / p[_ORIGINAL])
    if kind == "longrope":
        read["short_factor"] = tuple(map(float, read["short_factor"]))
        del read["long_factor"]  # for contexts that are not served
    if kind == "yarn":
        # transformers takes 0 for the default of these fields.
        read = {k: v for k, v in read.items() if v or not k.startswith("beta_")}
    if kind == "dynamic":  # it differs only beyond the model's own limit, which is refused
        kind, read = "default", {}
    theta = float(p["rope_theta"])
    return RopeConfig(theta, kind, partial_rotary_factor=share, interleaved=interleaved, **read)


def _is_number(value: object, positive: bool) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return (value > 0 if positive else value >= 0) and value <= sys.float_info.max


def stated_growth(hf: Any) -> tuple[QueryGrowth | None, ...]:
    """The growth of queries that `rope_parameters` state for all layers. Raises ConfigError where
    they state none."""
    names = "llama_4_scaling_beta", _ORIGINAL
    growth, original = (hf.rope_parameters.get(name) for name in names)
    if growth is None or original is None:
        message = f"llama_4_scaling_beta and {_ORIGINAL} must be stated for this model"
        raise ConfigError(message, "rope_parameters")
    return (QueryGrowth(float(growth), original),) * int(hf.num_hidden_layers)


_FIELDS: dict[RopeType, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "default": ((), ()),
    "proportional": ((), ("factor",)),
    "linear": (("factor",), ()),
    "dynamic": (("factor",), ()),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor", _ORIGINAL), ()),
    "yarn": (
        (_ORIGINAL,),
        ("factor", "attention_factor", "beta_fast", "beta_slow", *_MSCALES, "truncate"),
    ),
    "longrope": ((_ORIGINAL, "short_factor", "long_factor"), ("factor", "attention_factor")),
}
"""By type: the required fields besides rope_theta, and the optional ones."""
_FACTORS = frozenset({"short_factor", "long_factor"})
_POSITIVE = _FACTORS | {"rope_theta", "factor", "low_freq_factor", "high_freq_factor"}
_NUMBERS = _POSITIVE | {"attention_factor", "beta_fast", "beta_slow", *_MSCALES, _ORIGINAL}
_NUMBERS |= {"llama_4_scaling_beta", "partial_rotary_factor"}

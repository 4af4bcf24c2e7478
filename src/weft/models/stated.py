"""config.json read as transformers reads it, without importing transformers, which takes seconds.

This covers all published checkpoints of the families. If a file leaves out something that matters,
or has something that these rules do not foresee, `read_stated` returns None, and transformers has
to read the file.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import NoneType, SimpleNamespace
from typing import Any

from weft.models.fields import COMPUTED, READ, WITHOUT_EFFECT

_OFF = dict.fromkeys(
    ("attention_bias", "mlp_bias", "tie_word_embeddings", "use_sliding_window"), False
)
"""Defaults of switches that a file may leave out."""
_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
)
_WINDOW: dict[str, tuple[type, ...]] = {"sliding_window": (int, NoneType)}
_NEEDED: dict[str, dict[str, tuple[type, ...]]] = {
    "llama": {},
    "mistral": _WINDOW,
    "qwen2": _WINDOW,
    "qwen3": {**_WINDOW, "head_dim": (int,)},
    "qwen3_moe": {
        **_WINDOW,
        **dict.fromkeys(
            ("decoder_sparse_step", "moe_intermediate_size", "num_experts", "num_experts_per_tok"),
            (int,),
        ),
        "norm_topk_prob": (bool,),
        "mlp_only_layers": (list,),
    },
    "mixtral": {**_WINDOW, "num_local_experts": (int,), "num_experts_per_tok": (int,)},
    "phi3": {
        **_WINDOW,
        "original_max_position_embeddings": (int,),
        "partial_rotary_factor": (int, float),
    },
    "olmo2": {},
}
"""By `model_type`: the required fields besides `_COMMON`, and their possible types."""
_COMMON: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(_SIZES, (int,)),
    **dict.fromkeys(_OFF, (bool,)),
    "rms_norm_eps": (float,),
    "hidden_act": (str,),
}
_UNFORESEEN = frozenset(
    {"original_max_position_embeddings", "partial_rotary_factor", "per_layer_config"}
)
"""Fields that change how transformers reads other fields; foreseen only if a family needs them."""
_FACTORS = ("short_factor", "long_factor")
_KNOWN = (READ | WITHOUT_EFFECT) - COMPUTED.keys() | {
    *("compression_config", "partial_rotary_factor", "rope_scaling", "rope_theta", "torch_dtype")
}
"""Fields that need no look at what transformers knows; of others, `check_fields` warns."""
_LAYER_TYPES = ("full_attention", "sliding_attention")


def read_stated(raw: Mapping[str, Any]) -> SimpleNamespace | None:
    """The fields of transformers' configuration for this file, as far as the families need them;
    None if they can't be told from the file alone."""
    needed = _NEEDED.get(raw.get("model_type", ""))
    if needed is None:
        return None
    others = raw.keys() - needed.keys()
    if not others <= _KNOWN or not _UNFORESEEN.isdisjoint(others):
        return None
    fields = _OFF | _with_experts(raw)
    if raw.get("model_type") == "phi3":
        fields.setdefault("partial_rotary_factor", 1.0)
    if any(type(fields.get(name, ...)) not in types for name, types in (_COMMON | needed).items()):
        return None
    rope = _rope(fields) if _set_sizes(fields) and _set_windows(fields) else None
    if rope is None:
        return None
    if any(type(layer) is not int for layer in fields.get("mlp_only_layers", [])):
        return None
    return SimpleNamespace(**fields | {"rope_parameters": rope})


def _with_experts(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Both spellings of the number of experts; none if the file has both."""
    fields, names = dict(raw), ("num_experts", "num_local_experts")
    found = [fields.pop(name) for name in names if name in fields]
    return fields | dict.fromkeys(names, found[0]) if len(found) == 1 else fields


def _set_sizes(fields: dict[str, Any]) -> bool:
    """Fill in `head_dim`. Returns whether all sizes are as foreseen."""
    hidden, heads = fields["hidden_size"], fields["num_attention_heads"]
    if min(fields[name] for name in _SIZES) < 1 or hidden % heads:
        return False
    if fields.get("head_dim") is None:
        fields["head_dim"] = hidden // heads
    head_dim = fields["head_dim"]
    return type(head_dim) is int and head_dim > 0 and head_dim % 2 == 0


def _set_windows(fields: dict[str, Any]) -> bool:
    """Fill in `sliding_window` and `layer_types`. Returns whether they are as foreseen."""
    model_type, num_layers = fields["model_type"], fields["num_hidden_layers"]
    if model_type.startswith("qwen") and not fields["use_sliding_window"]:
        fields["sliding_window"] = None
    types = fields.get("layer_types")
    if types is None and model_type in ("qwen2", "qwen3"):
        windows = fields["sliding_window"] is not None
        first = fields.get("max_window_layers", None if windows else 0)
        if type(first) is not int:
            return False
        of_layer = (windows and i >= first for i in range(num_layers))
        fields["layer_types"] = [_LAYER_TYPES[is_window] for is_window in of_layer]
    if types is None:
        return True
    known = isinstance(types, list) and all(name in _LAYER_TYPES for name in types)
    return known and len(types) == num_layers


def _rope(fields: Mapping[str, Any]) -> dict[str, Any] | None:
    """`rope_parameters`, also from the older `rope_theta` and `rope_scaling`."""
    stated = fields.get("rope_scaling") or fields.get("rope_parameters") or {}
    if not isinstance(stated, dict):
        return None
    rope = {"rope_theta": fields.get("rope_theta"), **stated}
    rope.setdefault("rope_type", rope.get("type", "default"))
    if fields["model_type"] == "phi3" and not _phi3_rope(rope, fields):
        return None
    if rope["rope_type"] in ("llama3", "yarn", "longrope"):
        rope.setdefault("original_max_position_embeddings", fields["max_position_embeddings"])
    numbers = [v for name, v in rope.items() if name not in ("rope_type", "type", *_FACTORS)]
    for factors in (rope[name] for name in _FACTORS if name in rope):
        if not isinstance(factors, list):
            return None
        numbers += factors
    if any(type(value) not in (int, float, bool) for value in numbers):
        return None
    return rope if isinstance(rope["rope_type"], str) else None


def _phi3_rope(rope: dict[str, Any], fields: Mapping[str, Any]) -> bool:
    """Fill in what Phi-3 states besides its rope. Returns whether that is as foreseen."""
    rope.setdefault("partial_rotary_factor", fields["partial_rotary_factor"])
    if rope["rope_type"] == "longrope":
        rope["original_max_position_embeddings"] = fields["original_max_position_embeddings"]
    share = rope["partial_rotary_factor"]
    if type(share) not in (int, float) or not abs(share) <= sys.float_info.max:
        return False
    rotated = fields["hidden_size"] // fields["num_attention_heads"] * share
    lengths = {len(rope[name]) for name in _FACTORS if isinstance(rope.get(name), list)}
    return rope["rope_type"] in ("default", "longrope") and lengths <= {int(rotated) // 2}

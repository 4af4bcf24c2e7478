"""The text models of Llama 4: attention in chunks, layers without rope, and mixtures of which each
token has one expert."""

from __future__ import annotations

from typing import Any

from weft.core.errors import ConfigError
from weft.models import mixtures
from weft.models.family import RopeParameters, biased
from weft.models.layer_types import check_lengths_kept, layer_types, rope_or_none
from weft.models.rope_config import QueryGrowth


def _chunks(hf: Any) -> tuple[int | None, ...]:
    types = layer_types(hf, "full_attention", "chunked_attention")
    if hf.attention_chunk_size is None and "chunked_attention" in types:
        message = "layer_types name chunked_attention without attention_chunk_size"
        raise ConfigError(message, "attention_chunk_size")
    return tuple(hf.attention_chunk_size if t == "chunked_attention" else None for t in types)


def _ropes(hf: Any) -> tuple[RopeParameters | None, ...]:
    if hf.use_qk_norm:
        check_lengths_kept(hf)
    return rope_or_none(hf)


def _growths(hf: Any) -> tuple[QueryGrowth | None, ...]:
    if not hf.attn_temperature_tuning:
        return ()
    growth = QueryGrowth(hf.attn_scale, hf.floor_scale, ahead=1, rounded=False)
    return tuple(growth if rope is None else None for rope in rope_or_none(hf))


LLAMA4 = biased(
    "llama4_text",
    _chunks,
    chunked=True,
    qk_norm="unit",
    qk_norm_if="use_qk_norm",
    mlp_names=("feed_forward.gate_proj", "feed_forward.up_proj", "feed_forward.down_proj"),
    mlp_width=lambda hf: hf.intermediate_size_mlp,
    interleaved_rope=True,
    ropes=_ropes,
    growths=_growths,
    moe=mixtures.llama4_moe,
)

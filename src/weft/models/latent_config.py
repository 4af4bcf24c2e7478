"""The families with attention to latents; see `weft.models.latent_attention`."""

from __future__ import annotations

from dataclasses import replace
from math import log
from typing import Any

from weft.core.errors import ConfigError
from weft.models import mixtures
from weft.models.family import RopeParameters, Scales, biased
from weft.models.layer_types import no_windows
from weft.models.rope_config import stated_growth
from weft.models.state_config import LatentConfig


def _latent(hf: Any) -> LatentConfig:
    for name in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"):
        if type(getattr(hf, name)) is not int:
            message = f"{name} must be a whole number, got {getattr(hf, name)!r:.80}"
            raise ConfigError(message, name)
    if hf.qk_rope_head_dim % 2:
        message = f"qk_rope_head_dim must be even, got {hf.qk_rope_head_dim}"
        raise ConfigError(message, "qk_rope_head_dim")
    heads, keys = hf.num_attention_heads, hf.num_key_value_heads
    if keys != heads:
        message = f"num_key_value_heads must be {heads}, like num_attention_heads, got {keys}"
        raise ConfigError(message, "num_key_value_heads")
    parts = hf.qk_nope_head_dim, hf.qk_rope_head_dim, hf.v_head_dim
    return LatentConfig(hf.q_lora_rank, hf.kv_lora_rank, *parts)


def _latent_scales(hf: Any) -> Scales:
    """The scale of attention scores. It contains the square of yarn's factor (`mscale_all_dim`),
    because rope's cos and sin would not bring that factor to the part without positions."""
    scale, rope = (hf.qk_nope_head_dim + hf.qk_rope_head_dim) ** -0.5, hf.rope_parameters
    of_all, factor = rope.get("mscale_all_dim"), rope.get("factor")
    if of_all and rope.get("rope_type") != "default":
        numbers = (
            type(number) in (int, float) and 0 <= number < 1e9 for number in (of_all, factor)
        )
        if not all(numbers):
            message = f"mscale_all_dim {of_all!r:.80} needs a factor, got {factor!r:.80}"
            raise ConfigError(message, "rope_parameters")
        scale *= (0.1 * of_all * log(factor) + 1) ** 2 if factor > 1 else 1.0
    return Scales(attention=scale)


def _ropes_of_rotated_part(hf: Any) -> tuple[RopeParameters | None, ...]:
    """The rope parameters of each layer. `partial_rotary_factor` states the share of a head that is
    rotated. It becomes 1, as rope is applied to that part of a head alone. Raises ConfigError."""
    stated, size = hf.rope_parameters, hf.qk_nope_head_dim + hf.qk_rope_head_dim
    share, kind = stated.get("partial_rotary_factor"), stated.get("rope_type")
    known = type(share) in (int, float) and 0 < share <= 1
    if not known or int(size * share) != hf.qk_rope_head_dim:
        message = f"partial_rotary_factor must be {hf.qk_rope_head_dim} / {size}, got {share!r}"
        raise ConfigError(message, "rope_parameters")
    if kind in ("default", "proportional"):  # as transformers then rotates all of a head
        message = f"rope type {kind} is not served for {hf.model_type}"
        raise ConfigError(message, "rope_parameters")
    return ({**stated, "partial_rotary_factor": 1.0},) * int(hf.num_hidden_layers)


_LATENT = biased(
    "deepseek_v3",
    no_windows,
    interleaved_rope="rope_interleave",
    latent=_latent,
    scales=_latent_scales,
    moe=mixtures.deepseek_v3_moe,
)
DEEPSEEK_V3 = replace(_LATENT, other_types=("kimi_k2",))
DEEPSEEK_V2 = replace(
    _LATENT,
    model_type="deepseek_v2",
    interleaved_rope=True,
    moe=mixtures.deepseek_v2_moe,
)
GLM4_MOE_LITE = replace(_LATENT, model_type="glm4_moe_lite", moe=mixtures.glm4_moe_lite)
MISTRAL4 = replace(
    _LATENT,
    model_type="mistral4",
    ropes=_ropes_of_rotated_part,
    growths=stated_growth,
    moe=mixtures.mistral4_moe,
)
YOUTU = replace(_LATENT, model_type="youtu", moe=lambda hf: None)
SARVAM_MLA = replace(_LATENT, model_type="sarvam_mla")

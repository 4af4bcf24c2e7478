"""The kinds of PEFT adapters that are served, and the fields of their configs.

As a table: what a kind's rank and alpha are called, and which of its fields are harmless, read or
refused. A field in none of the three is refused as soon as it holds something.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

_ANY_HARMLESS = frozenset(
    {"auto_mapping", "base_model_name_or_path", "inference_mode", "peft_version", "revision"}
)
_ANY_READ = frozenset({"bias", "peft_type", "target_modules", "task_type"})
_LAYERS = frozenset({"layers_pattern", "layers_to_transform"})
_WHOLE = {
    "modules_to_save": "whole modules are served beside plain LoRA only; train a LoRA with them"
}
_TRANSPOSED = {"fan_in_fan_out": "no base here stores its weights transposed; set it to false"}


@dataclass(frozen=True)
class Kind:
    """One `peft_type`."""

    says: str
    """What people call it."""
    harmless: frozenset[str]
    read: frozenset[str]
    refused: Mapping[str, str]
    """By field: why."""
    rank: tuple[str, int] = ("r", 8)
    """The field, and PEFT's default."""
    alpha: tuple[str, float] = ("alpha", 8)
    rank_is_images: bool = False
    """Whether the field's rank is the image's too, so that --max-lora-rank bounds it."""


# A linear layer has no kernel, so `use_effective_conv2d` says nothing of it.
_LYCORIS_HARMLESS = {"init_weights", "module_dropout", "rank_dropout", "use_effective_conv2d"}
_LYCORIS_READ = {"alpha", "alpha_pattern", "exclude_modules", "r", "rank_pattern"}

KINDS: dict[str, Kind] = {
    "ADALORA": Kind(
        "AdaLoRA",
        # How it was trained, and fields of plain LoRA that this kind has without reading them.
        _ANY_HARMLESS
        | {
            *("beta1", "beta2", "deltaT", "orth_reg_weight", "target_r"),
            *("tfinal", "tinit", "total_step"),
            *("alpha_pattern", "corda_config", "eva_config", "init_lora_weights", "loftq_config"),
            *("lora_dropout", "lora_ga_config", "megatron_config", "megatron_core"),
            *("qalora_group_size", "r", "runtime_config", "use_rslora"),
        },
        _ANY_READ | _LAYERS | {"exclude_modules", "init_r", "lora_alpha", "rank_pattern"},
        _WHOLE | _TRANSPOSED,
        rank=("init_r", 12),
        alpha=("lora_alpha", 8),
    ),
    "VERA": Kind(
        "VeRA",
        _ANY_HARMLESS | {"d_initial", "init_weights", "vera_dropout"},
        _ANY_READ | _LAYERS | {"projection_prng_key", "r", "save_projection"},
        _WHOLE | _TRANSPOSED,
        rank=("r", 256),
        rank_is_images=True,
    ),
    "LOHA": Kind(
        "LoHa", _ANY_HARMLESS | _LYCORIS_HARMLESS, _ANY_READ | _LAYERS | _LYCORIS_READ, _WHOLE
    ),
    "LOKR": Kind(
        "LoKr",
        _ANY_HARMLESS | _LYCORIS_HARMLESS | {"rank_dropout_scale"},
        _ANY_READ | _LAYERS | _LYCORIS_READ | {"decompose_both", "decompose_factor"},
        _WHOLE,
    ),
    "IA3": Kind(
        "(IA)^3",
        _ANY_HARMLESS | {"init_ia3_weights"},
        _ANY_READ | {"exclude_modules", "feedforward_modules"},
        _WHOLE | _TRANSPOSED,
    ),
}

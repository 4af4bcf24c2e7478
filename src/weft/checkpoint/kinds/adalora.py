"""AdaLoRA: B diag(E) A, where training leaves each module its own rank."""

from __future__ import annotations

import numpy as np

from weft.checkpoint.config import PeftConfig
from weft.checkpoint.kinds.base import LAYERS, Kind, LinearModule, PeftAdapter
from weft.checkpoint.kinds.lora import OF_TRAINING
from weft.checkpoint.parts import AdapterParts, TargetParts
from weft.checkpoint.read import Stored
from weft.checkpoint.refuse import refuse, show


def _sort(adapter: PeftAdapter) -> AdapterParts:
    config, ranks = adapter.config, _allocated(adapter.config)
    parts = AdapterParts()
    for module in adapter.modules():
        target = module.target
        rank = ranks.get(target.name, config.r)
        if rank > adapter.max_rank:
            field = "rank_pattern" if target.name in ranks else "init_r"
            limit = f"--max-lora-rank {adapter.max_rank}"
            refuse(field, f"{target.name} has rank {rank}, above {limit}")
        a = module.get("lora_A", rank, target.in_features)
        b = module.get("lora_B", target.out_features, rank)
        e = module.get("lora_E", rank, 1)
        # PEFT divides by the rank that training began with, also where less is left of it.
        scale = (config.alpha if config.alpha > 0 else rank) / (config.r + 1e-5)
        if rank:
            parts.targets.append(_scaled_pair(module, a, e, b, np.float32(scale)))
    return parts


def _scaled_pair(
    module: LinearModule, a: Stored, e: Stored, b: Stored, scale: np.float32
) -> TargetParts:
    return module.lora(
        e.shape[0],
        lambda: a.values() * e.values(),
        lambda: b.values() * scale,
        bound_b=lambda: b.largest() * abs(scale),
    )


def _allocated(config: PeftConfig) -> dict[str, int]:
    """The rank by module that training left, from a config's masks over the first rank."""
    pattern = config.options.get("rank_pattern")
    if pattern is None:
        return {}
    if not isinstance(pattern, dict):
        refuse("rank_pattern", f"must be an object, got {show(pattern)}")
    ranks = {}
    for name, mask in pattern.items():
        if not isinstance(mask, list) or any(not isinstance(kept, bool) for kept in mask):
            refuse("rank_pattern", f"must hold lists of booleans, got {show(mask)}")
        if len(mask) != config.r:
            refuse("rank_pattern", f"{show(name)} has {len(mask)} entries; init_r is {config.r}")
        ranks[name.removesuffix(".default").removesuffix(".lora_E")] = sum(mask)
    return ranks


KIND = Kind(
    peft_type="ADALORA",
    title="AdaLoRA",
    sort=_sort,
    tensors=("lora_A", "lora_B", "lora_E"),
    read=LAYERS | {"exclude_modules", "init_r", "lora_alpha", "rank_pattern"},
    # How it was trained, and fields of plain LoRA that this kind has without reading them.
    harmless=OF_TRAINING
    | {"beta1", "beta2", "deltaT", "orth_reg_weight", "target_r", "tfinal", "tinit", "total_step"}
    | {"alpha_pattern", "init_lora_weights", "r", "use_rslora"},
    rank=("init_r", 12),
    alpha=("lora_alpha", 8),
)

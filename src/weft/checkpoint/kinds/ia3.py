"""(IA)^3: a factor for each output of a projection, or for each of its inputs."""

from __future__ import annotations

import numpy as np

from weft.checkpoint.config import PeftConfig
from weft.checkpoint.fields import Work, pattern
from weft.checkpoint.kinds.base import Kind, LinearModule, PeftAdapter
from weft.checkpoint.parts import AdapterParts, Array, Deferred, TargetParts, find_target
from weft.checkpoint.refuse import refuse, show
from weft.core.targets import Target, TargetTable


def _sort(adapter: PeftAdapter) -> AdapterParts:
    found: dict[int, tuple[Target, str, Array]] = {}
    for module in adapter.modules():
        target, scale = _scaled(adapter.config, module, adapter.table)
        if target.slice in found:
            scale = scale * found[target.slice][2]
        found[target.slice] = target, module.first, scale
    return AdapterParts([_parts(*each) for each in found.values()])


def _parts(target: Target, name: str, scale: Array) -> TargetParts:
    return TargetParts(target, gain=Deferred(name, scale.shape, lambda: scale))


def _scaled(config: PeftConfig, module: LinearModule, table: TargetTable) -> tuple[Target, Array]:
    """The target whose output is scaled, and its factors, (out,)."""
    target = module.target
    feeds_forward = _feeds_forward(config, target.name)
    if feeds_forward is None:
        feeds_forward = module.tensors["ia3_l"].shape == (1, target.in_features)
    if not feeds_forward:
        return target, module.get("ia3_l", target.out_features, 1).values().reshape(-1)
    if target.suffix != "down_proj":
        refuse(
            "feedforward_modules",
            f"{target.name}: the input of this projection can't be scaled, only that of down_proj",
        )
    # down_proj's input is silu(gate) * up: to scale it is to scale up_proj's output, or the second
    # half of the output of both in one.
    scale = module.get("ia3_l", 1, target.in_features).values().reshape(-1)
    mlp = target.name.removesuffix("down_proj")
    if mlp + "up_proj" not in table.by_name and mlp + "gate_up_proj" in table.by_name:
        gate_up = np.concatenate((np.ones_like(scale), scale))
        return table.by_name[mlp + "gate_up_proj"], gate_up
    return find_target(module.first, mlp + "up_proj", table), scale


def _feeds_forward(config: PeftConfig, module: str) -> bool | None:
    """Whether `feedforward_modules` selects a module; None: the config has no such field."""
    value = config.options.get("feedforward_modules")
    if value is None:
        return None
    if isinstance(value, str):
        return pattern(value, Work("feedforward_modules")).fullmatch(module)
    if not isinstance(value, list) or any(not isinstance(entry, str) for entry in value):
        refuse("feedforward_modules", f"must be a string or a list of strings, got {show(value)}")
    return any(module.endswith(entry) for entry in value)


KIND = Kind(
    peft_type="IA3",
    title="(IA)^3",
    sort=_sort,
    tensors=("ia3_l",),
    read=frozenset({"exclude_modules", "feedforward_modules"}),
    harmless=frozenset({"init_ia3_weights"}),
)

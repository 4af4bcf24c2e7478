"""(IA)^3: a factor for each output of a projection, or for each of its inputs."""

from __future__ import annotations

import numpy as np

from weft.checkpoint.config import PeftConfig
from weft.checkpoint.fields import Work, pattern
from weft.checkpoint.kinds.base import Kind, LinearModule, PeftAdapter
from weft.checkpoint.parts import AdapterParts, Array, Deferred, TargetParts, find_target
from weft.checkpoint.refuse import refuse, show
from weft.core.targets import Target, TargetTable

_UP = {
    "down_proj": ("up_proj", "gate_up_proj"),
    "output_linear": ("input_linear",),
    "w2": ("w3",),
}
"""By the last projection of an MLP: what up, or gate and up in one, may be called there."""


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
    if target.suffix not in _UP:
        refuse(
            "feedforward_modules",
            f"{target.name}: only the input of an MLP's last projection can be scaled",
        )
    # Its input is silu(gate) * up: to scale it is to scale the output of up, or the second half of
    # the output of both in one. An MLP with a squared ReLU has no gate: up takes the factor's root.
    scale = module.get("ia3_l", 1, target.in_features).values().reshape(-1)
    mlp = target.name.removesuffix(target.suffix)
    names = [mlp + up for up in _UP[target.suffix]]
    name = next((name for name in names if name in table.by_name), names[0])
    up = find_target(module.first, name, table)
    degree = table.groups[up.group].packed.degree
    if degree == 0:
        why = "its input can't be scaled, as the activation of no other input is a multiple of it"
        refuse("feedforward_modules", f"{target.name}: {why}")
    if degree == 2:
        if (scale < 0).any():
            why = "has a factor below 0, which can't be applied ahead of the MLP's squared ReLU"
            refuse(module.first, why)
        scale = np.sqrt(scale)
    if up.out_features == 2 * len(scale):
        scale = np.concatenate((np.ones_like(scale), scale))
    return up, scale


def _feeds_forward(config: PeftConfig, module: str) -> bool | None:
    """Whether `feedforward_modules` selects a module; None: the config has no such field."""
    value = config.options.get("feedforward_modules")
    if value is None:
        return None
    if isinstance(value, str):
        return pattern(value, Work("feedforward_modules")).fullmatch(module)
    if not isinstance(value, list) or any(not isinstance(entry, str) for entry in value):
        refuse("feedforward_modules", f"must be a string or a list of strings, got {show(value)}")
    targets = config.options.get("target_modules")
    if isinstance(targets, list) and (others := sorted(set(value) - set(targets))):
        refuse("feedforward_modules", f"PEFT refuses {show(others)}, as target_modules lacks them")
    return any(module.endswith(entry) for entry in value)


KIND = Kind(
    peft_type="IA3",
    title="(IA)^3",
    sort=_sort,
    tensors=("ia3_l",),
    read=frozenset({"exclude_modules", "feedforward_modules"}),
    harmless=frozenset({"init_ia3_weights"}),
)

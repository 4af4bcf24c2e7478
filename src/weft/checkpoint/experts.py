"""Adapters of experts and routers: from the forms that files have to one A and B per projection.

An expert's matrices lie by themselves,

    mlp.experts.3.up_proj.lora_A.weight (r, in), .lora_B.weight (out, r)

or those of all E experts of a layer in one tensor, as PEFT's `target_parameters` have them:

    mlp.experts.lora_A.weight (E * r, in)    expert by expert
                .lora_B.weight (out, r * E)  rank by rank: column k * E + e is column k of expert e

where `mlp.experts` is down_proj, and `mlp.experts.base_layer` is gate_up_proj, which it is wrapped
around; when only one of them is adapted, that one is `mlp.experts`. Mixtral's first form calls the
MLP `block_sparse_moe`, and gate, up and down `w1`, `w3` and `w2`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import reduce
from typing import TYPE_CHECKING

from weft.checkpoint.config import PeftConfig
from weft.checkpoint.refuse import refuse
from weft.core.targets import Target, TargetTable

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_NAME = re.compile(
    r"base_model\.model\."
    r"(?P<module>(?P<layer>.+)\.(?P<mlp>mlp|block_sparse_moe)"
    r"\.(?:gate|(?P<whole>experts(?:\.base_layer)?)"
    r"|experts\.(?P<expert>[0-9]{1,6})\.(?P<projection>\w+)))"
    r"\.(?P<part>lora_[AB])\.weight"
)
_PROJECTIONS = {
    **{name: name for name in ("gate_proj", "up_proj", "down_proj")},
    "w1": "gate_proj",
    "w3": "up_proj",
    "w2": "down_proj",
}
_WRAPPERS = ("experts.base_layer", "experts")
_MAX_FILLED = 64
"""How much larger the matrices of all experts may be than those that a file holds."""
_PARAMETERS = ("gate_up_proj", "down_proj")
"""What PEFT puts into these, as far as it is adapted: the last one always into the last."""


@dataclass(slots=True)
class Gathered:
    """The tensors of an adapter, each A and B under the name of its target; those of experts are
    (E, r, in) and (E, out, r)."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    modules: dict[str, list[str]] = field(default_factory=dict)
    """By target: what config and file call it, where that is not its name."""
    scaling: dict[str, float] = field(default_factory=dict)
    """Of experts, by target."""

    def modules_of(self, target: str) -> list[str]:
        return self.modules.get(target, [target])

    def put(self, target: str, part: str, tensor: Tensor, source: str) -> None:
        name = f"base_model.model.{target}.{part}.weight"
        if name in self.tensors:
            refuse(source, f"the file holds {part} of {target} in another form too")
        self.tensors[name] = tensor


class _Module:
    """The A and B that a file holds for one module."""

    def __init__(self, match: re.Match[str]) -> None:
        self.name: str = match["module"]
        self.layer: str = match["layer"]
        self.mlp = f"{self.layer}.{match['mlp']}"
        self.wrapper: str | None = match["whole"]
        self.expert = int(match["expert"]) if match["expert"] else -1
        self.projection: str = match["projection"]
        self.matrices: dict[str, Tensor] = {}

    def tensor_name(self, part: str) -> str:
        return f"base_model.model.{self.name}.{part}.weight"

    def matrix(self, part: str, shape: tuple[int, int]) -> Tensor:
        """Raises AdapterInvalid when it is missing or of another shape."""
        found = self.matrices.get(part)
        if found is None:
            (other,) = self.matrices
            refuse(self.tensor_name(other), f"its counterpart, the {part[-1]} matrix, is missing")
        if tuple(found.shape) != shape:
            refuse(
                self.tensor_name(part),
                f"has the shape {tuple(found.shape)}; the base model and the ranks in the config"
                f" make it {shape}",
            )
        return found


def gather_experts(tensors: dict[str, Tensor], table: TargetTable, config: PeftConfig) -> Gathered:
    """Bring what is for experts and routers to one form; the rest is passed on as it is.

    Raises AdapterInvalid, naming the tensor or the field.
    """
    gathered = Gathered()
    if not any(group.kind == "experts" for group in table.groups):
        gathered.tensors |= tensors
        return gathered
    modules: dict[str, _Module] = {}
    for name, tensor in tensors.items():
        match = _NAME.fullmatch(name)
        if match is not None:
            module = modules.setdefault(match["module"], _Module(match))
            module.matrices[match["part"]] = tensor
        elif ".experts." in name:
            refuse(name, "of experts, only lora_A and lora_B matrices are served")
        else:
            gathered.tensors[name] = tensor
    _put_routers(gathered, modules.values())
    _put_parameters(gathered, modules.values(), table, config)
    _put_single(gathered, modules.values(), table, config)
    return gathered


def _put_routers(gathered: Gathered, modules: Iterable[_Module]) -> None:
    for module in modules:
        if module.wrapper is None and module.expert < 0:
            target = f"{module.layer}.mlp.gate"
            gathered.modules[target] = [module.name]
            for part, tensor in module.matrices.items():
                gathered.put(target, part, tensor, module.tensor_name(part))


# -- all experts in one tensor ---------------------------------------------------------------------


def _put_parameters(
    gathered: Gathered, modules: Iterable[_Module], table: TargetTable, config: PeftConfig
) -> None:
    by_mlp: dict[str, dict[str, _Module]] = {}
    for module in modules:
        if module.wrapper is not None:
            by_mlp.setdefault(module.mlp, {})[module.wrapper] = module
    for mlp, wrappers in by_mlp.items():
        names = (f"{mlp}.experts.{parameter}" for parameter in _PARAMETERS)
        wanted = [name for name in names if config.selects_parameter(name)]
        parameters = dict(zip(reversed(_WRAPPERS), reversed(wanted), strict=False))
        for wrapper, module in wrappers.items():
            if wrapper not in parameters:
                part = next(iter(module.matrices))
                refuse(
                    module.tensor_name(part),
                    "PEFT would ignore it, as target_parameters names"
                    f" {' and '.join(wanted) or 'no parameter'} there",
                )
        for wrapper, parameter in parameters.items():
            if wrapper not in wrappers:
                refuse("target_parameters", f"the file holds no tensors for {parameter}")
            _put_parameter(gathered, wrappers[wrapper], parameter, table, config)


def _put_parameter(
    gathered: Gathered, module: _Module, parameter: str, table: TargetTable, config: PeftConfig
) -> None:
    target = _target(module, parameter.rpartition(".")[2], table)
    num_experts, rank = table.num_experts, config.rank_of(parameter)
    a = module.matrix("lora_A", (num_experts * rank, target.in_features))
    b = module.matrix("lora_B", (target.out_features, rank * num_experts))
    a = a.reshape(num_experts, rank, target.in_features)
    b = b.reshape(target.out_features, rank, num_experts).permute(2, 0, 1)
    gathered.modules[target.name] = [parameter]
    gathered.scaling[target.name] = config.scale_of(parameter, rank)
    gathered.put(target.name, "lora_A", a, module.tensor_name("lora_A"))
    gathered.put(target.name, "lora_B", b, module.tensor_name("lora_B"))


def _target(module: _Module, projection: str, table: TargetTable) -> Target:
    target = table.by_name.get(f"{module.layer}.mlp.experts.{projection}")
    if target is None:
        part = next(iter(module.matrices))
        refuse(module.tensor_name(part), "the base model has no such projection of experts there")
    return target


# -- a tensor per expert ---------------------------------------------------------------------------


def _put_single(
    gathered: Gathered, modules: Iterable[_Module], table: TargetTable, config: PeftConfig
) -> None:
    by_target: dict[str, dict[int, _Module]] = {}
    for module in modules:
        if module.expert < 0:
            continue
        target = _target(module, _PROJECTIONS.get(module.projection, module.projection), table)
        same = by_target.setdefault(target.name, {})
        name = module.tensor_name(next(iter(module.matrices)))
        if module.expert >= table.num_experts:
            refuse(name, f"the base model has {table.num_experts} experts in a layer")
        if module.projection not in _PROJECTIONS or module.expert in same:
            refuse(name, "is no name of an expert's matrix, or a second one")
        same[module.expert] = module
    for name, same in by_target.items():
        _put_stacked(gathered, table.by_name[name], same, table.num_experts, config)


def _put_stacked(
    gathered: Gathered,
    target: Target,
    modules: dict[int, _Module],
    num_experts: int,
    config: PeftConfig,
) -> None:
    """Experts that are not adapted, or with a lower rank, are filled up with zeros."""
    import torch

    pairs: dict[int, tuple[Tensor, Tensor]] = {}
    for expert, module in modules.items():
        r = config.rank_of(module.name)
        a_part = module.matrix("lora_A", (r, target.in_features))
        pairs[expert] = a_part, module.matrix("lora_B", (target.out_features, r))
    first = next(iter(modules.values()))
    ranks = [len(a_part) for a_part, _ in pairs.values()]
    rank = max(ranks)
    if num_experts * rank > _MAX_FILLED * sum(ranks):
        refuse(
            first.tensor_name("lora_A"),
            f"{len(ranks)} of {num_experts} experts are adapted, with ranks up to {rank}: as all"
            f" take the room of the highest, more than {_MAX_FILLED} times what the file holds;"
            " train more of the experts, or with ranks that are alike",
        )
    dtype = reduce(torch.promote_types, _dtypes(modules.values()))
    a = torch.zeros(num_experts, rank, target.in_features, dtype=dtype)
    b = torch.zeros(num_experts, target.out_features, rank)
    for expert, (a_part, b_part) in pairs.items():
        r = len(a_part)
        a[expert, :r] = a_part
        b[expert, :, :r] = b_part.float() * config.scale_of(modules[expert].name, r)
    gathered.modules[target.name] = [module.name for module in modules.values()]
    gathered.scaling[target.name] = 1.0
    gathered.put(target.name, "lora_A", a, first.tensor_name("lora_A"))
    gathered.put(target.name, "lora_B", b, first.tensor_name("lora_B"))


def _dtypes(modules: Iterable[_Module]) -> set[torch.dtype]:
    return {tensor.dtype for module in modules for tensor in module.matrices.values()}

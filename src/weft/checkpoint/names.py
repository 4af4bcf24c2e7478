"""The tensors of a plain LoRA's file by the names of their modules.

A tensor's name says what it is, once the config has said how PEFT reads it: PEFT loads what lies on
a module that it has wrapped into that wrapper, and any other name that the base model knows into
the base model itself. An expert's matrices lie by themselves,

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
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import reduce
from typing import TYPE_CHECKING

import numpy as np

from weft.checkpoint.config import PeftConfig
from weft.checkpoint.parts import PREFIX, TargetParts, check_shape, find_target
from weft.checkpoint.read import Stored
from weft.checkpoint.refuse import refuse
from weft.core.targets import Target, TargetTable

if TYPE_CHECKING:
    from torch import Tensor

_SUFFIXES = {
    ".lora_A.weight": "a",
    ".lora_B.weight": "b",
    ".lora_embedding_A": "a",
    ".lora_embedding_B": "b",
    ".lora_B.bias": "lora_bias",
    ".lora_magnitude_vector": "magnitude",
    ".lora_magnitude_vector.weight": "magnitude",
    ".base_layer.bias": "inner_bias",
    ".token_adapter.base_layer.weight": "token_whole",
    ".base_layer.weight": "inner_whole",
    ".token_adapter.trainable_tokens_delta": "some",
    ".bias": "bias",
    ".weight": "whole",
}
"""What a tensor is, by the end of its name, the longest first. An `inner` one lies in what PEFT
wraps."""

WHOLE_SUFFIXES = tuple(suffix for suffix, part in _SUFFIXES.items() if "whole" in part)
_EMBEDDING_SUFFIXES = frozenset({".lora_embedding_A", ".lora_embedding_B"})
_LINEAR_SUFFIXES = frozenset({".lora_A.weight", ".lora_B.weight", ".lora_B.bias"})
_OF_ROWS = frozenset({"some", "whole", "inner_whole", "token_whole"})
"""Parts that replace rows of a weight."""
_NOT_SERVED = (
    "no part of an adapter that is served; only lora_A and lora_B matrices, biases, magnitudes,"
    " token rows, and whole weights of embedding, head and norms are"
)


class NamedTensors:
    """The tensors of a file, by module and part."""

    def __init__(self, table: TargetTable, gathered: Gathered) -> None:
        """Raises AdapterInvalid for a tensor that is no part of a module of the base."""
        self.table = table
        self.gathered = gathered
        self._parts: dict[str, dict[str, Stored]] = {}
        for name, tensor in gathered.tensors.items():
            self._add(name, tensor)

    def of(self, module: str, *parts: str) -> Stored | None:
        """The first of these parts that is there."""
        has = self._parts.get(module, {})
        return next((has[part] for part in parts if part in has), None)

    def is_wrapped(self, module: str) -> bool:
        """Whether PEFT wraps the module for LoRA."""
        return self.of(module, "a", "b") is not None or module in self.gathered.experts

    def targets(self) -> list[Target]:
        """The targets that there is more for than rows in place of theirs."""
        parts, experts = self._parts, self.gathered.experts
        table = self.table.targets
        return [t for t in table if t.name in experts or set(parts.get(t.name, ())) - _OF_ROWS]

    def saved(self) -> list[str]:
        """Modules whose weight is there under the base model's own name."""
        return [module for module, parts in self._parts.items() if "whole" in parts]

    def _add(self, name: str, tensor: Stored) -> None:
        if not name.startswith(PREFIX):
            refuse(name, f"not a tensor of a PEFT LoRA, whose names start with {PREFIX}")
        path = name.removeprefix(PREFIX)
        suffix = next((suffix for suffix in _SUFFIXES if path.endswith(suffix)), None)
        if suffix is None:
            refuse(name, _NOT_SERVED)
        module, part = path.removesuffix(suffix), _SUFFIXES[suffix]
        self._check(name, module, suffix, part)
        parts = self._parts.setdefault(module, {})
        if part in parts:
            refuse(name, f"is the same as {parts[part].name}")
        parts[part] = tensor

    def _check(self, name: str, module: str, suffix: str, part: str) -> None:
        """Whether the base model has such a module, of which this can be a part."""
        if module in self.table.norms_by_name:
            if part != "whole":
                refuse(name, "only the weight of a norm can be replaced")
            return
        known = self.table.by_name
        if module not in known and any(module.startswith(target + ".") for target in known):
            refuse(name, _NOT_SERVED)
        target = find_target(name, module, self.table)
        other = _LINEAR_SUFFIXES if target.kind == "embedding" else _EMBEDDING_SUFFIXES
        if suffix in other:
            refuse(name, f"{target.name} is a {target.kind} in the base model")
        if part in _OF_ROWS and target.kind in ("linear", "experts"):
            refuse(name, "only whole weights of embedding, head and norms are served")


# -- experts and routers: one A and B per projection ----------------------------------------------

_EXPERT_NAME = re.compile(
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
_EXPERT_WRAPPERS = ("experts.base_layer", "experts")
_MAX_FILLED = 64
"""How much larger the matrices of all experts may be than those that a file holds."""
_EXPERT_PARAMETERS = ("gate_up_proj", "down_proj")
"""What PEFT puts into these, as far as it is adapted: the last one always into the last."""


@dataclass(frozen=True, slots=True)
class _Stacked:
    """The A or B of all experts, (E, r, in) or (E, out, r), as one tensor."""

    name: str
    shape: tuple[int, ...]
    parts: Collection[tuple[Stored, float]]
    """What it is stacked from, each times its number."""
    stack: Callable[[], Tensor]

    @property
    def tensor(self) -> Tensor:
        return self.stack()

    def largest(self) -> np.float32:
        with np.errstate(all="ignore"):
            found = [part.largest() * np.float32(abs(scale)) for part, scale in self.parts]
        return np.float32(np.max(found))


@dataclass(slots=True)
class Gathered:
    """The tensors of an adapter, of which those for experts are in order."""

    tensors: dict[str, Stored] = field(default_factory=dict)
    """What is not for experts; a router's under the name of its target."""
    experts: dict[str, TargetParts] = field(default_factory=dict)
    """A and B by target."""
    modules: dict[str, list[str]] = field(default_factory=dict)
    """By target: what config and file call it, where that is not its name."""

    def modules_of(self, target: str) -> list[str]:
        return self.modules.get(target, [target])

    def put(self, target: Target, a: _Stacked, b: _Stacked, scaling: float) -> None:
        if target.name in self.experts:
            refuse(a.name, f"the file holds lora_A of {target.name} in another form too")
        self.experts[target.name] = TargetParts(target, a, b, scaling)


class _ExpertModule:
    """The A and B that a file holds for one module: a router, one expert's projection, or one
    projection of all experts."""

    def __init__(self, match: re.Match[str]) -> None:
        self.name: str = match["module"]
        self.layer: str = match["layer"]
        self.mlp = f"{self.layer}.{match['mlp']}"
        self.wrapper: str | None = match["whole"]
        self.expert = int(match["expert"]) if match["expert"] else -1
        self.projection: str = match["projection"]
        self.matrices: dict[str, Stored] = {}

    @property
    def first(self) -> str:
        """The name of a tensor of it."""
        return next(iter(self.matrices.values())).name

    def matrix(self, part: str, *shape: int) -> Stored:
        """Raises AdapterInvalid when it is missing or of another shape."""
        found = self.matrices.get(part)
        if found is None:
            refuse(self.first, f"its counterpart, the {part[-1]} matrix, is missing")
        return check_shape(found, shape, "the base model and the ranks in the config make")


def gather_experts(
    tensors: Mapping[str, Stored], table: TargetTable, config: PeftConfig
) -> Gathered:
    """Bring what is for experts and routers to one form; the rest is passed on as it is.

    Raises AdapterInvalid, naming the tensor or the field.
    """
    gathered = Gathered()
    if not any(group.kind == "experts" for group in table.groups):
        gathered.tensors |= tensors
        return gathered
    modules: dict[str, _ExpertModule] = {}
    for name, tensor in tensors.items():
        match = _EXPERT_NAME.fullmatch(name)
        if match is not None:
            module = modules.setdefault(match["module"], _ExpertModule(match))
            module.matrices[match["part"]] = tensor
        elif ".experts." in name:
            refuse(name, "of experts, only lora_A and lora_B matrices are served")
        else:
            gathered.tensors[name] = tensor
    _put_routers(gathered, modules.values())
    _put_parameters(gathered, modules.values(), table, config)
    _put_single(gathered, modules.values(), table, config)
    return gathered


def _put_routers(gathered: Gathered, modules: Iterable[_ExpertModule]) -> None:
    for module in modules:
        if module.wrapper is None and module.expert < 0:
            target = f"{module.layer}.mlp.gate"
            gathered.modules[target] = [module.name]
            for part, tensor in module.matrices.items():
                name = f"{PREFIX}{target}.{part}.weight"
                if name in gathered.tensors:
                    refuse(tensor.name, f"the file holds {part} of {target} in another form too")
                gathered.tensors[name] = tensor


# -- all experts in one tensor ---------------------------------------------------------------------


def _put_parameters(
    gathered: Gathered, modules: Iterable[_ExpertModule], table: TargetTable, config: PeftConfig
) -> None:
    by_mlp: dict[str, dict[str, _ExpertModule]] = {}
    for module in modules:
        if module.wrapper is not None:
            by_mlp.setdefault(module.mlp, {})[module.wrapper] = module
    for mlp, wrappers in by_mlp.items():
        names = (f"{mlp}.experts.{parameter}" for parameter in _EXPERT_PARAMETERS)
        wanted = [name for name in names if config.selects_parameter(name)]
        parameters = dict(zip(reversed(_EXPERT_WRAPPERS), reversed(wanted), strict=False))
        for wrapper, module in wrappers.items():
            if wrapper not in parameters:
                refuse(
                    module.first,
                    "PEFT would ignore it, as target_parameters names"
                    f" {' and '.join(wanted) or 'no parameter'} there",
                )
        for wrapper, parameter in parameters.items():
            if wrapper not in wrappers:
                refuse("target_parameters", f"the file holds no tensors for {parameter}")
            _put_parameter(gathered, wrappers[wrapper], parameter, table, config)


def _put_parameter(
    gathered: Gathered,
    module: _ExpertModule,
    parameter: str,
    table: TargetTable,
    config: PeftConfig,
) -> None:
    target = _target(module, parameter.rpartition(".")[2], table)
    num, rank = table.num_experts, config.rank_of(parameter)
    a_shape, b_shape = (num, rank, target.in_features), (num, target.out_features, rank)
    a = module.matrix("lora_A", num * rank, target.in_features)
    b = module.matrix("lora_B", target.out_features, rank * num)
    gathered.modules[target.name] = [parameter]
    gathered.put(
        target,
        _Stacked(a.name, a_shape, [(a, 1.0)], lambda: a.tensor.reshape(a_shape)),
        _Stacked(
            b.name,
            b_shape,
            [(b, 1.0)],
            lambda: b.tensor.reshape(-1, rank, num).permute(2, 0, 1),
        ),
        config.scale_of(parameter, rank),
    )


def _target(module: _ExpertModule, projection: str, table: TargetTable) -> Target:
    target = table.by_name.get(f"{module.layer}.mlp.experts.{projection}")
    if target is None:
        refuse(module.first, "the base model has no such projection of experts there")
    return target


# -- a tensor per expert ---------------------------------------------------------------------------


def _put_single(
    gathered: Gathered, modules: Iterable[_ExpertModule], table: TargetTable, config: PeftConfig
) -> None:
    by_target: dict[str, dict[int, _ExpertModule]] = {}
    for module in modules:
        if module.expert < 0:
            continue
        target = _target(module, _PROJECTIONS.get(module.projection, module.projection), table)
        same = by_target.setdefault(target.name, {})
        if module.expert >= table.num_experts:
            refuse(module.first, f"the base model has {table.num_experts} experts in a layer")
        if module.projection not in _PROJECTIONS or module.expert in same:
            refuse(module.first, "is no name of an expert's matrix, or a second one")
        same[module.expert] = module
    for name, same in by_target.items():
        _put_stacked(gathered, table.by_name[name], same, table.num_experts, config)


def _put_stacked(
    gathered: Gathered,
    target: Target,
    modules: dict[int, _ExpertModule],
    num_experts: int,
    config: PeftConfig,
) -> None:
    """Stack what single experts have. Experts that are not adapted, or with a lower rank, are
    filled up with zeros."""
    a_parts: dict[int, tuple[Stored, float]] = {}
    b_parts: dict[int, tuple[Stored, float]] = {}
    for expert, module in modules.items():
        r = config.rank_of(module.name)
        a_parts[expert] = module.matrix("lora_A", r, target.in_features), 1.0
        b = module.matrix("lora_B", target.out_features, r)
        b_parts[expert] = b, config.scale_of(module.name, r)
    ranks = [a.shape[0] for a, _ in a_parts.values()]
    rank = max(ranks)
    if num_experts * rank > _MAX_FILLED * sum(ranks):
        refuse(
            _first_name(a_parts),
            f"{len(ranks)} of {num_experts} experts are adapted, with ranks up to {rank}: as all"
            f" take the room of the highest, more than {_MAX_FILLED} times what the file holds;"
            " train more of the experts, or with ranks that are alike",
        )
    gathered.modules[target.name] = [module.name for module in modules.values()]
    a_shape = num_experts, rank, target.in_features
    b_shape = num_experts, target.out_features, rank
    gathered.put(target, _stacked(a_parts, a_shape), _stacked(b_parts, b_shape), 1.0)


def _first_name(parts: Mapping[int, tuple[Stored, float]]) -> str:
    return next(part.name for part, _ in parts.values())


def _stacked(parts: Mapping[int, tuple[Stored, float]], shape: tuple[int, ...]) -> _Stacked:
    """The matrices by expert, each times its scale."""

    def stack() -> Tensor:
        import torch

        plain = all(scale == 1.0 for _, scale in parts.values())
        dtypes = (part.tensor.dtype for part, _ in parts.values())
        stacked = torch.zeros(
            shape, dtype=reduce(torch.promote_types, dtypes) if plain else torch.float32
        )
        for expert, (part, scale) in parts.items():
            rows, columns = part.shape
            tensor = part.tensor if plain else part.tensor.float() * scale
            stacked[expert, :rows, :columns] = tensor
        return stacked

    return _Stacked(_first_name(parts), shape, parts.values(), stack)

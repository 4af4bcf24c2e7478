"""Finds the tensors of a plain LoRA's file by module and part.

What a tensor's name means depends on the config: PEFT loads tensors of a module that it has wrapped
into the wrapper, and others that have a name of the base model's into that. An expert's matrices
are separate tensors,

    mlp.experts.3.up_proj.lora_A.weight (r, in), .lora_B.weight (out, r)

or those of all E experts of a layer in one tensor, as PEFT's `target_parameters` have them:

    mlp.experts.lora_A.weight (E * r, in)    expert by expert
                .lora_B.weight (out, r * E)  rank by rank: column k * E + e is column k of expert e

where `mlp.experts` is down_proj, and `mlp.experts.base_layer` is gate_up_proj, which it is wrapped
around; when only one of them is adapted, that one is `mlp.experts`. In and out are exchanged there
where PEFT takes a matrix that is stored as (E, in, out) for one of (E, out, in). Mixtral's first
form calls the MLP `block_sparse_moe`, and gate, up and down `w1`, `w3` and `w2`, as LFM2 does
in `feed_forward`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import numpy as np

from weft.checkpoint.config import PeftConfig
from weft.checkpoint.parts import PREFIX, TargetParts, check_shape, find_target
from weft.checkpoint.read import Raw, Stored
from weft.checkpoint.refuse import refuse
from weft.core.targets import Target, TargetTable

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
"""The part that a tensor is, by its name's end, the longest first. inner: of a wrapped module."""

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
        """The first of these parts that the module has; None if it has none."""
        has = self._parts.get(module, {})
        for part in parts:
            if part in has:
                return has[part]
        return None

    def is_wrapped(self, module: str) -> bool:
        """Whether PEFT wraps the module for LoRA."""
        return self.of(module, "a", "b") is not None or module in self.gathered.experts

    def targets(self) -> list[Target]:
        """The targets for which the file has more than replaced rows."""
        parts, experts = self._parts, self.gathered.experts
        table = self.table.targets
        return [t for t in table if t.name in experts or set(parts.get(t.name, ())) - _OF_ROWS]

    def saved(self) -> list[str]:
        """The modules whose weight is in the file under the base model's own name."""
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
        if part == "magnitude" and part in parts and tensor.equals(parts[part]):
            return  # PEFT saves the magnitudes of some embeddings twice, under two names
        if part in parts:
            refuse(name, f"is for the same weights as {parts[part].name}")
        parts[part] = tensor

    def _check(self, name: str, module: str, suffix: str, part: str) -> None:
        """Raise AdapterInvalid unless the base model has such a module, with such a part."""
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
    r"(?P<module>(?P<mlp>(?P<layer>.+?)(?:\.(?:mlp|mixer|block_sparse_moe|feed_forward))?)"
    r"\.(?:gate|(?P<whole>experts(?:\.base_layer)?)"
    r"|experts\.(?P<expert>[0-9]{1,6})\.(?P<projection>\w+)))"
    r"\.(?P<part>lora_[AB])\.weight"
)
PROJECTIONS = {
    **{name: name for name in ("gate_proj", "up_proj", "down_proj")},
    "w1": "gate_proj",
    "w3": "up_proj",
    "w2": "down_proj",
}
"""What an expert's projections are called, by their names in files."""
_EXPERT_WRAPPERS = ("experts.base_layer", "experts")
"""Where PEFT puts the tensors of gate and up (or of up alone) and of down, in this order. If only
one of the two is adapted, it is in the last."""
_MAX_FILLED = 64
"""How many times as large the matrices of all experts may be as those in the file."""


@dataclass(frozen=True, slots=True)
class _Stacked:
    """The A or B of all experts, (E, r, in) or (E, out, r), as one tensor."""

    name: str
    shape: tuple[int, ...]
    parts: Collection[tuple[Stored, float]]
    """(tensor, factor) of the matrices that are stacked."""
    stack: Callable[[], Raw]

    @property
    def array(self) -> Raw:
        return self.stack()

    def turned(self) -> _Stacked:
        """The transposed matrices."""
        num, rows, columns = self.shape
        shape, stack = (num, columns, rows), self.stack
        return _Stacked(self.name, shape, self.parts, lambda: stack().transpose(0, 2, 1))

    def largest(self) -> np.float32:
        with np.errstate(all="ignore"):
            found = [part.largest() * np.float32(abs(scale)) for part, scale in self.parts]
        return np.float32(np.max(found))


class _ExpertModule:
    """The A and B that a file holds for one module: a router, one expert's projection, or one
    projection of all experts."""

    def __init__(self, match: re.Match[str]) -> None:
        self.name: str = match["module"]
        self.layer: str = match["layer"]
        self.mlp: str = match["mlp"]
        self.wrapper: str | None = match["whole"]
        self.expert = int(match["expert"]) if match["expert"] else -1
        self.projection: str = match["projection"]
        self.matrices: dict[str, Stored] = {}

    @property
    def first(self) -> str:
        """The name of a tensor of it."""
        return next(iter(self.matrices.values())).name

    def matrix(self, part: str, *shape: int) -> Stored:
        """The matrix of a part. Raises AdapterInvalid if it is missing or has another shape."""
        found = self.matrices.get(part)
        if found is None:
            refuse(self.first, f"its counterpart, the {part[-1]} matrix, is missing")
        return check_shape(found, shape, "the base model and the ranks in the config make")


class Gathered:
    """The tensors of an adapter, with those of experts and routers brought into one form."""

    def __init__(
        self, tensors: Mapping[str, Stored], table: TargetTable, config: PeftConfig
    ) -> None:
        """Raises AdapterInvalid, naming the tensor or the field."""
        self.tensors: dict[str, Stored] = {}
        """The tensors that are not for experts; those of routers are under their target's name."""
        self.experts: dict[str, TargetParts] = {}
        """A and B by target."""
        self._modules: dict[str, list[str]] = {}
        self._table = table
        self._config = config
        modules: dict[str, _ExpertModule] = {}
        for name, tensor in tensors.items():
            match = _EXPERT_NAME.fullmatch(name) if table.has_experts else None
            if match is not None:
                module = modules.setdefault(match["module"], _ExpertModule(match))
                module.matrices[match["part"]] = tensor
            elif table.has_experts and ".experts." in name:
                refuse(name, "only lora_A and lora_B matrices of experts are served")
            else:
                self.tensors[name] = tensor
        by_mlp: dict[str, dict[str, _ExpertModule]] = {}
        by_target: dict[str, dict[int, _ExpertModule]] = {}
        for module in modules.values():
            if module.wrapper is not None:
                by_mlp.setdefault(module.mlp, {})[module.wrapper] = module
            elif module.expert < 0:
                self._put_router(module)
            else:
                self._add_single(module, by_target)
        for mlp, wrappers in by_mlp.items():
            self._put_parameters(mlp, wrappers)
        for target, experts in by_target.items():
            self._put_single(table.by_name[target], experts)

    def modules_of(self, target: str) -> list[str]:
        """The names of a target in the config and the file."""
        return self._modules.get(target, [target])

    def _put(
        self, target: Target, modules: list[str], a: _Stacked, b: _Stacked, scaling: float = 1.0
    ) -> None:
        if target.name in self.experts:
            refuse(a.name, f"the file holds lora_A of {target.name} in another form too")
        self._modules[target.name] = modules
        self.experts[target.name] = TargetParts(target, a, b, scaling)

    def _put_router(self, module: _ExpertModule) -> None:
        is_known = module.name in self._table.by_name
        target = module.name if is_known else f"{module.layer}.mlp.gate"
        self._modules[target] = [module.name]
        for part, tensor in module.matrices.items():
            name = f"{PREFIX}{target}.{part}.weight"
            if name in self.tensors:
                refuse(tensor.name, f"the file holds {part} of {target} in another form too")
            self.tensors[name] = tensor

    def _target(self, module: _ExpertModule, projection: str) -> Target:
        known = self._table.by_name
        target = None
        for place in (f"{module.layer}.mlp", module.layer, module.mlp):
            target = target or known.get(f"{place}.experts.{projection}")
        if target is None:
            refuse(module.first, "the base model has no such projection of experts there")
        return target

    def _put_parameters(self, mlp: str, wrappers: Mapping[str, _ExpertModule]) -> None:
        """Put the tensors that hold all experts."""
        known, config = self._table.by_name, self._config
        gate, up, down = (f"{mlp}.experts.{name}" for name in ("gate_proj", "up_proj", "down_proj"))
        if up in known and gate not in known:
            names = up, down
        else:
            names = f"{mlp}.experts.gate_up_proj", down
        wanted = [name for name in names if config.selects_parameter(config.trained(name))]
        parameters = dict(zip(reversed(_EXPERT_WRAPPERS), reversed(wanted), strict=False))
        for wrapper, module in wrappers.items():
            if wrapper not in parameters:
                names_there = " and ".join(wanted) or "no parameter"
                why = f"PEFT would ignore it, as target_parameters names {names_there} there"
                refuse(module.first, why)
        for wrapper, parameter in parameters.items():
            if wrapper not in wrappers:
                refuse("target_parameters", f"the file holds no tensors for {parameter}")
            self._put_parameter(wrappers[wrapper], parameter)

    def _put_parameter(self, module: _ExpertModule, parameter: str) -> None:
        target = self._target(module, parameter.rpartition(".")[2])
        num, rank = self._table.num_experts, self._config.rank_of(parameter)
        is_turned = self._table.groups[target.group].packed.transposed
        size_a, size_b = target.in_features, target.out_features
        if is_turned:
            size_a, size_b = size_b, size_a
        a = module.matrix("lora_A", num * rank, size_a)
        b = module.matrix("lora_B", size_b, rank * num)

        shape_a, shape_b = (num, rank, size_a), (num, size_b, rank)
        stacked_a = _Stacked(a.name, shape_a, [(a, 1.0)], lambda: a.array.reshape(shape_a))
        stacked_b = _Stacked(
            b.name, shape_b, [(b, 1.0)], lambda: b.array.reshape(-1, rank, num).transpose(2, 0, 1)
        )
        if is_turned:
            stacked_a, stacked_b = stacked_b.turned(), stacked_a.turned()
        scaling = self._config.scale_of(parameter, rank)
        self._put(target, [parameter], stacked_a, stacked_b, scaling)

    def _add_single(
        self, module: _ExpertModule, by_target: dict[str, dict[int, _ExpertModule]]
    ) -> None:
        projection = PROJECTIONS.get(module.projection, module.projection)
        same = by_target.setdefault(self._target(module, projection).name, {})
        if module.expert >= self._table.num_experts:
            refuse(module.first, f"the base model has {self._table.num_experts} experts in a layer")
        if module.projection not in PROJECTIONS or module.expert in same:
            refuse(module.first, "is not the name of an expert's matrix, or one that occurs twice")
        same[module.expert] = module

    def _put_single(self, target: Target, modules: Mapping[int, _ExpertModule]) -> None:
        """Stack the matrices of single experts, filled up with zeros to the highest rank."""
        num, a_parts, b_parts = self._table.num_experts, {}, {}
        for expert, module in modules.items():
            r = self._config.rank_of(module.name)
            a_parts[expert] = module.matrix("lora_A", r, target.in_features), 1.0
            b = module.matrix("lora_B", target.out_features, r)
            b_parts[expert] = b, self._config.scale_of(module.name, r)
        ranks = [a.shape[0] for a, _ in a_parts.values()]
        rank = max(ranks)
        a = _stacked(a_parts, (num, rank, target.in_features))
        if num * rank > _MAX_FILLED * sum(ranks):
            refuse(
                a.name,
                f"{len(ranks)} of {num} experts are adapted, with ranks up to {rank}. Each expert"
                f" takes the room of the highest rank, in all more than {_MAX_FILLED} times what"
                " the file holds. Train more of the experts, or give them similar ranks",
            )
        names = [module.name for module in modules.values()]
        self._put(target, names, a, _stacked(b_parts, (num, target.out_features, rank)))


def _stacked(parts: Mapping[int, tuple[Stored, float]], shape: tuple[int, ...]) -> _Stacked:
    """The matrices by expert, each times its number: in float32, unless that is 1 for all."""

    def stack() -> Raw:
        dtypes = {part.array.dtype for part, _ in parts.values()}
        plain = len(dtypes) == 1 and all(scale == 1.0 for _, scale in parts.values())
        stacked = np.zeros(shape, dtypes.pop() if plain else np.float32)
        for expert, (part, scale) in parts.items():
            rows, columns = part.shape
            with np.errstate(all="ignore"):  # what is too large shows as infinite in the image
                values = part.array if plain else part.values() * np.float32(scale)
            stacked[expert, :rows, :columns] = values
        return stacked

    return _Stacked(next(iter(parts.values()))[0].name, shape, parts.values(), stack)

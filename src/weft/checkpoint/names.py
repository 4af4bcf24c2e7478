"""The tensors of a plain LoRA's file by the names of their modules.

A tensor's name says what it is, once the config has said how PEFT reads it: PEFT loads what lies on
a module that it has wrapped into that wrapper, and any other name that the base model knows into
the base model itself.
"""

from __future__ import annotations

from weft.checkpoint.experts import Gathered
from weft.checkpoint.parts import PREFIX, find_target
from weft.checkpoint.read import Stored
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

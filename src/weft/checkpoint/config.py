"""Reads an adapter's configuration: ranks and scales by module, and the modules it adapts."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import lru_cache

from weft.checkpoint.fields import Fields, Modules, Pattern, T
from weft.checkpoint.refuse import refuse, show

BARE_TOKENS = "embed_tokens"
"""The module of trained token ids for which a configuration names none. It stands for the input
embedding, whatever the model calls that."""


@dataclass(frozen=True)
class PeftConfig:
    """The fields that say what an adapter computes. Methods take modules by the base's names, such
    as `model.layers.0.mlp.up_proj`."""

    peft_type: str
    options: Fields
    """All fields of adapter_config.json, for kinds that have fields of their own."""
    r: int
    alpha: float
    rank_pattern: tuple[tuple[Pattern, int], ...]
    alpha_pattern: tuple[tuple[Pattern, float], ...]
    target_modules: Modules
    exclude_modules: Modules
    layers_to_transform: frozenset[int] | None

    # What only plain LoRA has.
    use_rslora: bool = False
    target_parameters: tuple[str, ...] = ()
    """Names or name endings of parameters: those of experts, and weights of linear layers."""
    use_dora: bool = False
    lora_bias: bool = False
    bias: str = "none"
    """Which biases of the base model were trained: "none", "lora_only" or "all"."""
    modules_to_save: tuple[str, ...] = ()
    """Endings of the names of modules that were trained as a whole."""
    unadapted: tuple[Pattern, ...] = ()
    """Expressions for the names of modules that have no LoRA. PEFT makes them of the entries of
    `modules_to_save`."""
    token_indices: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Trained token ids by the ending of a module's name."""
    ensure_weight_tying: bool = False
    invocation: tuple[int, ...] = ()
    """Token ids from whose last occurrence in the prompt on the adapter is active; (): always."""
    residual_init: str = ""
    """`init_lora_weights`, if it changed the base model: see `check_residual`."""
    naming: Mapping[str, str] = field(default_factory=dict)
    """Prefixes of the base's module names, mapped to those in the model that was trained, if it has
    other names; see `weft.checkpoint.text_part`."""

    def rank_of(self, module: str) -> int:
        return self._first_match(self.rank_pattern, module, self.r)

    def scale_of(self, module: str, rank: int) -> float:
        alpha = self._first_match(self.alpha_pattern, module, self.alpha)
        return alpha / math.sqrt(rank) if self.use_rslora else alpha / rank

    def _first_match(self, patterns: tuple[tuple[Pattern, T], ...], module: str, default: T) -> T:
        key = self._key_of(module) if patterns else ""
        return next((value for pattern, value in patterns if pattern.matches_module(key)), default)

    def selects_parameter(self, name: str) -> bool:
        """Whether `target_parameters` names it. `name`: in the model that was trained."""
        listed = self.target_parameters
        return bool(listed) and any(_ends_with(name, entry) for entry in listed)

    def trained(self, module: str) -> str:
        """The name of a base's module or parameter in the model that was trained."""
        dotted = module + "."
        for own, theirs in self.naming.items():
            if dotted.startswith(own):
                return (theirs + dotted.removeprefix(own)).removesuffix(".")
        return module

    def _key_of(self, module: str) -> str:
        """The name to match patterns with: the module's, or its weight's if that is selected."""
        module = self.trained(module)
        weight = module + ".weight"
        return weight if self.selects_parameter(weight) else module

    def saves(self, module: str) -> bool:
        """Whether the whole module was trained."""
        return self.trained(module).endswith(self.modules_to_save)

    def token_ids(self, module: str) -> tuple[int, ...] | None:
        """The tokens whose rows of the module were trained."""
        name = self.trained(module)
        found = [
            ids
            for ending, ids in self.token_indices.items()
            if name.endswith(ending) or (ending == BARE_TOKENS and module.endswith(ending))
        ]
        if len(found) > 1:
            refuse("trainable_token_indices", f"names {module} more than once")
        return found[0] if found else None

    def check_saved(self, saved: list[str], known: list[str], others: list[str]) -> None:
        """Raises AdapterInvalid unless `saved` holds all that `modules_to_save` asks for and
        `trainable_token_indices` names modules among those of the base, `known`. `others`: tensors
        of the base that no adapter changes. PEFT ignores what names no module of the base."""
        named = {module: self.trained(module) for module in (*known, *others)}
        around = {name[:at] for name in named.values() for at in _dots(name)}
        for ending in self.modules_to_save:
            modules = [module for module in known if named[module].endswith(ending)]
            if any(module.endswith(ending) for module in around):
                refuse("modules_to_save", f"{show(ending)} is not served as a whole")
            for module in modules:
                if module not in saved:
                    refuse("modules_to_save", f"the file holds no weight of {module}")
        for ending in self.token_indices:
            embeddings = map(self.trained, ("model.embed_tokens", "lm_head"))
            is_known = any(name.endswith(ending) for name in embeddings)
            if not is_known and ending != BARE_TOKENS:
                refuse("trainable_token_indices", f"{show(ending)} is no embedding of the base")

    def check_modules(self, modules: list[str], known: Collection[str]) -> None:
        """Raises AdapterInvalid unless, of all modules that the base model has (`known`), the
        config selects exactly the kinds of `modules`, which may include parameters."""
        keys = {module: self._key_of(module) for module in modules}
        for entry in self.target_parameters:
            if not any(_ends_with(key, entry) for key in keys.values()):
                refuse("target_parameters", f"no tensor of the file is for {show(entry)}")
        modules = [
            self.trained(module) for module, key in keys.items() if not self.selects_parameter(key)
        ]
        known = [self.trained(module) for module in known]
        for module in modules:
            if not _selects(self.target_modules, module, default=True):
                refuse("target_modules", f"does not select {module}, which the file adapts")
            if leaves_out := self._leaves_out(module):
                refuse(*leaves_out)
        if isinstance(self.target_modules, tuple):
            # PEFT ignores entries that name no module of the base: such lists are for many models.
            meant = {end for name in known if not self._leaves_out(name) for end in _endings(name)}
            adapted = {end for name in modules for end in _endings(name)}
            for entry in self.target_modules:
                if entry in meant and entry not in adapted:
                    refuse("target_modules", f"no tensor of the file is for {show(entry)}")

    def _leaves_out(self, module: str) -> tuple[str, str] | None:
        """(field, reason) by which the config leaves out a module in spite of `target_modules`."""
        if _selects(self.exclude_modules, module, default=False):
            return "exclude_modules", f"excludes {module}, which the file adapts"
        if any(pattern.fullmatch(module) for pattern in self.unadapted):
            return "modules_to_save", f"says that {module} is whole, but the file adapts it"
        if self.layers_to_transform is None:
            return None
        in_full = isinstance(self.target_modules, tuple) and module in self.target_modules
        if in_full or layer_of(module) in self.layers_to_transform:
            return None
        return "layers_to_transform", f"leaves out {module}, which the file adapts"


def layer_of(module: str) -> int | None:
    """The first number that is a part of the name: 3 for `model.layers.3.mlp.up_proj`."""
    parts = (part for part in module.split(".") if part.isdecimal() and len(part) < 10)
    return next(map(int, parts), None)


def _dots(name: str) -> list[int]:
    """Where the dots of a name are: before each of them is the name of a module that holds it."""
    return [at for at, letter in enumerate(name) if letter == "."]


def _ends_with(module: str, entry: str) -> bool:
    return module == entry or module.endswith("." + entry)


@lru_cache(1 << 12)
def _endings(module: str) -> frozenset[str]:
    """The names by which lists may select a module: its name from any '.' on."""
    parts = module.split(".")
    return frozenset(".".join(parts[i:]) for i in range(len(parts)))


def _selects(modules: Modules, module: str, default: bool) -> bool:
    if modules is None:
        return default
    if isinstance(modules, Pattern):
        return modules.fullmatch(module)
    return not _endings(module).isdisjoint(modules)

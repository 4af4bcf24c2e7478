"""adapter_config.json: what it means for inference, or why it is refused.

An adapter is served exactly as PEFT would run it, or refused with the name of the field that
asks for more. So every field of the config is in one of three tables below (harmless, read,
refused), and a field in none of them is refused as soon as it holds something.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import TypedDict, TypeVar

from weft.checkpoint.kinds import KINDS, Kind
from weft.checkpoint.pattern import Pattern, PatternError, Work, compile_pattern
from weft.checkpoint.refuse import refuse, show, shown_name

CONFIG_FILE = "adapter_config.json"
MAX_FIELD_RANK = 1 << 20
"""What a rank may say that stands for no image's rank."""
MAX_ENTRIES = 2048
"""Of `rank_pattern`, `alpha_pattern`, `target_modules` and `exclude_modules`, each."""

MAX_INVOCATION = 256
"""Token ids of `alora_invocation_tokens`."""

T = TypeVar("T")

_HARMLESS = frozenset(
    {
        "auto_mapping",
        "base_model_name_or_path",
        "corda_config",
        "eva_config",
        "fan_in_fan_out",
        "inference_mode",
        "loftq_config",
        "lora_dropout",
        "lora_ga_config",
        "megatron_config",
        "megatron_core",
        "peft_version",
        "qalora_group_size",
        "revision",
        "runtime_config",
    }
)
"""Without effect on inference, or (the init configs) decided by `init_lora_weights`. PEFT itself
unsets `fan_in_fan_out` for linear layers, and embeddings are not read by it."""

_READ = frozenset(
    {
        "alora_invocation_tokens",
        "alpha_pattern",
        "bias",
        "ensure_weight_tying",
        "exclude_modules",
        "init_lora_weights",
        "layers_pattern",
        "layers_to_transform",
        "lora_alpha",
        "lora_bias",
        "modules_to_save",
        "peft_type",
        "r",
        "rank_pattern",
        "target_modules",
        "target_parameters",
        "task_type",
        "trainable_token_indices",
        "use_dora",
        "use_rslora",
    }
)

_MERGE = "merge the adapter into the base with PEFT's merge_and_unload, and serve that as a base"
_REFUSED = {
    "arrow_config": "Arrow routing is not served; the adapters that it routes between are, by name"
    " or as a sum",
    "kasa_config": f"KaSA changes the base model's weights; {_MERGE}",
    "layer_replication": "the base model's layers can't be replicated for one adapter; serve a base"
    " that has them replicated",
    "monteclora_config": f"MonteCLoRA is not served; {_MERGE}",
    "use_bdlora": f"block-diagonal LoRA is not served; {_MERGE}",
    "use_qalora": f"QALoRA is not served; {_MERGE}",
    "velora_config": f"VeLoRA is not served; {_MERGE}",
}

_LORA = Kind("LoRA", _HARMLESS, _READ, _REFUSED, rank=("r", 8), alpha=("lora_alpha", 8))

_PLAIN_INITS = frozenset({"gaussian", "eva", "orthogonal", "mica"})
_RESIDUAL_INITS = ("pissa", "olora", "corda")
"""They change the base model so that `weft.checkpoint.residual` can tell."""
_BASE_CHANGING_INITS = {
    "loftq": "quantizes the base model, and is right on that one alone; merge the adapter into it"
    " with PEFT's merge_and_unload, and serve that as a base",
    "lora_ga": "changes the base model; save the adapter with PEFT's"
    " path_initial_model_for_weight_conversion, which makes it a plain LoRA for the original base",
}


@dataclass(frozen=True)
class PeftConfig:
    """What is needed of a LoRA config. Module names are PEFT's: `model.layers.0.mlp.up_proj`."""

    r: int
    alpha: float
    use_rslora: bool
    rank_pattern: tuple[tuple[Pattern, int], ...]
    alpha_pattern: tuple[tuple[Pattern, float], ...]
    target_modules: tuple[str, ...] | Pattern | None
    """Names or name endings; one expression; None: no statement (absent, or "all-linear")."""
    exclude_modules: tuple[str, ...] | Pattern | None
    layers_to_transform: frozenset[int] | None
    target_parameters: tuple[str, ...] = ()
    """Names or name endings of parameters: those of experts, and weights of linear layers."""
    use_dora: bool = False
    lora_bias: bool = False
    bias: str = "none"
    """Of the base model, what was trained: "none", "lora_only" or "all"."""
    modules_to_save: tuple[str, ...] = ()
    """Endings of names."""
    token_indices: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Trained token ids by the ending of a module's name."""
    ensure_weight_tying: bool = False
    invocation: tuple[int, ...] = ()
    """Token ids from whose last occurrence in the prompt on the adapter is active; (): always."""
    residual_init: str = ""
    """`init_lora_weights`, if it needs the base model that it left: see `residual`."""
    kind: str = "LORA"
    """The peft_type: LORA, or a key of `KINDS`."""
    options: Mapping[str, object] = field(default_factory=dict)
    """Of a kind other than LORA: the config's fields, for `weft.checkpoint.convert`."""

    def rank_of(self, module: str) -> int:
        return _first_match(self.rank_pattern, self._key_of(module), self.r)

    def scale_of(self, module: str, rank: int) -> float:
        alpha = _first_match(self.alpha_pattern, self._key_of(module), self.alpha)
        return alpha / math.sqrt(rank) if self.use_rslora else alpha / rank

    def selects_parameter(self, name: str) -> bool:
        return any(_ends_with(name, entry) for entry in self.target_parameters)

    def _key_of(self, module: str) -> str:
        """What patterns are matched with: the parameter, where that is what was asked for."""
        weight = module + ".weight"
        return weight if self.selects_parameter(weight) else module

    def saves(self, module: str) -> bool:
        """Whether the whole module was trained."""
        return module.endswith(self.modules_to_save)

    def token_ids(self, module: str) -> tuple[int, ...] | None:
        """The tokens whose rows of the module were trained."""
        found = [ids for ending, ids in self.token_indices.items() if module.endswith(ending)]
        if len(found) > 1:
            refuse("trainable_token_indices", f"names {module} more than once")
        return found[0] if found else None

    def check_saved(self, saved: list[str], known: list[str]) -> None:
        """Raises AdapterInvalid unless `saved` holds all that `modules_to_save` asks for and
        `trainable_token_indices` names modules among those of the base, `known`."""
        for ending in self.modules_to_save:
            modules = [module for module in known if module.endswith(ending)]
            if not modules:
                refuse("modules_to_save", f"the base model has no module {show(ending)}")
            for module in modules:
                if module not in saved:
                    refuse("modules_to_save", f"the file holds no weight of {module}")
        for ending in self.token_indices:
            if not any(module.endswith(ending) for module in ("model.embed_tokens", "lm_head")):
                refuse("trainable_token_indices", f"{show(ending)} is no embedding of the base")

    def check_modules(self, modules: list[str], known: Collection[str]) -> None:
        """Raises AdapterInvalid unless the config selects exactly the kinds of `modules`, among
        which parameters may be; `known`: what the base model has."""
        keys = {module: self._key_of(module) for module in modules}
        for entry in self.target_parameters:
            if not any(_ends_with(key, entry) for key in keys.values()):
                refuse("target_parameters", f"no tensor of the file is for {show(entry)}")
        modules = [module for module, key in keys.items() if not self.selects_parameter(key)]
        for module in modules:
            if not _selects(self.target_modules, module, default=True):
                refuse("target_modules", f"does not select {module}, which the file adapts")
            if leaves_out := self._leaves_out(module):
                refuse(*leaves_out)
        if isinstance(self.target_modules, tuple):
            for entry in self.target_modules:
                meant = [module for module in known if _ends_with(module, entry)]
                if any(_ends_with(module, entry) for module in modules):
                    continue
                if not meant or not all(map(self._leaves_out, meant)):
                    refuse("target_modules", f"no tensor of the file is for {show(entry)}")

    def _leaves_out(self, module: str) -> tuple[str, str] | None:
        """The field by which the config leaves out what `target_modules` selects, and a reason."""
        if _selects(self.exclude_modules, module, default=False):
            return "exclude_modules", f"excludes {module}, which the file adapts"
        if self.layers_to_transform is None:
            return None
        in_full = isinstance(self.target_modules, tuple) and module in self.target_modules
        if in_full or _layer_of(module) in self.layers_to_transform:
            return None
        return "layers_to_transform", f"leaves out {module}, which the file adapts"


def parse_config(text: bytes, max_rank: int) -> PeftConfig:
    """The config in the bytes of adapter_config.json. Raises AdapterInvalid, naming the field."""
    fields = _load_object(text)
    kind = _check_kind(fields)
    _check_refused(fields, kind)
    if fields["peft_type"] != "LORA":
        return _other_kind(fields, kind, max_rank)
    residual_init = _residual_init(fields.get("init_lora_weights"))

    def rank(value: object, param: str) -> int:
        return _rank(value, param, max_rank)

    return PeftConfig(
        r=rank(fields.get("r", 8), "r"),
        alpha=_number(fields.get("lora_alpha", 8), "lora_alpha"),
        use_rslora=_flag(fields, "use_rslora"),
        rank_pattern=_patterns(fields, "rank_pattern", rank),
        alpha_pattern=_patterns(fields, "alpha_pattern", _number),
        target_modules=_modules(fields, "target_modules"),
        exclude_modules=_modules(fields, "exclude_modules"),
        layers_to_transform=_layers(fields),
        residual_init=residual_init,
        target_parameters=_names(fields.get("target_parameters"), "target_parameters"),
        invocation=_invocation(fields),
        **_beside(fields),
    )


def _invocation(fields: dict[str, object]) -> tuple[int, ...]:
    param = "alora_invocation_tokens"
    value = fields.get(param)
    if _is_off(value):
        return ()
    if not isinstance(value, list) or any(type(i) is not int or i < 0 for i in value):
        refuse(param, f"must be token ids, got {show(value)}")
    if len(value) > MAX_INVOCATION:
        refuse(param, f"more than {MAX_INVOCATION} token ids")
    # Before the invocation keys and values must be the base's, so all of the adapter must be off
    # there. PEFT has these on at all positions, or can't join them with it.
    for other in ("use_dora", "modules_to_save", "trainable_token_indices", "target_parameters"):
        if not _is_off(fields.get(other)):
            refuse(other, f"can't be joined with {param}")
    if fields.get("bias") not in (None, "", "none"):
        refuse("bias", f"trained biases can't be joined with {param}")
    return tuple(value)


class _Beside(TypedDict):
    """Fields of `PeftConfig` for what an adapter holds beside A and B."""

    use_dora: bool
    lora_bias: bool
    bias: str
    modules_to_save: tuple[str, ...]
    token_indices: dict[str, tuple[int, ...]]
    ensure_weight_tying: bool


def _beside(fields: dict[str, object]) -> _Beside:
    bias = fields.get("bias") or "none"
    if not isinstance(bias, str) or bias not in ("none", "lora_only", "all"):
        refuse("bias", f"must be none, lora_only or all, got {show(bias)}")
    beside = _Beside(
        use_dora=_flag(fields, "use_dora"),
        lora_bias=_flag(fields, "lora_bias"),
        bias=bias,
        modules_to_save=_names(fields.get("modules_to_save"), "modules_to_save"),
        token_indices=_token_indices(fields.get("trainable_token_indices")),
        ensure_weight_tying=_flag(fields, "ensure_weight_tying"),
    )
    if beside["use_dora"] and beside["lora_bias"]:
        refuse("lora_bias", "PEFT can't join it with use_dora")
    return beside


def _names(value: object, param: str) -> tuple[str, ...]:
    if _is_off(value):
        return ()
    if not isinstance(value, list) or not all(isinstance(name, str) and name for name in value):
        refuse(param, f"must be a list of names, got {show(value)}")
    if len(value) > MAX_ENTRIES:
        refuse(param, f"more than {MAX_ENTRIES} entries")
    return tuple(value)


def _token_indices(value: object) -> dict[str, tuple[int, ...]]:
    """By the ending of a module's name; a list is for the embedding."""
    param = "trainable_token_indices"
    by_module = value if isinstance(value, dict) else {"embed_tokens": value}
    if len(by_module) > MAX_ENTRIES:
        refuse(param, f"more than {MAX_ENTRIES} keys")
    found: dict[str, tuple[int, ...]] = {}
    for ending, ids in by_module.items():
        if _is_off(ids):
            continue
        if not isinstance(ids, list) or any(type(i) is not int or i < 0 for i in ids):
            refuse(param, f"must be token ids, got {show(ids)}")
        if len(set(ids)) < len(ids):
            refuse(param, "names a token twice")
        found[ending] = tuple(ids)
    return found


def _other_kind(fields: dict[str, object], kind: Kind, max_rank: int) -> PeftConfig:
    if fields.get("bias") not in (None, "none"):
        refuse("bias", f"trained biases are served for plain LoRA only, got {show(fields['bias'])}")
    patterns = "alpha_pattern" in kind.read

    def rank(value: object, param: str) -> int:
        # LoKr's may be huge to ask for full matrices; what counts is the rank of the result.
        return _rank(value, param, max_rank if kind.rank_is_images else MAX_FIELD_RANK)

    return PeftConfig(
        r=rank(fields.get(*kind.rank), kind.rank[0]),
        alpha=_number(fields.get(*kind.alpha), kind.alpha[0]),
        use_rslora=False,
        rank_pattern=_patterns(fields, "rank_pattern", rank) if patterns else (),
        alpha_pattern=_patterns(fields, "alpha_pattern", _number) if patterns else (),
        target_modules=_modules(fields, "target_modules"),
        exclude_modules=_modules(fields, "exclude_modules"),
        layers_to_transform=_layers(fields),
        kind=str(fields["peft_type"]),
        options=fields,
    )


def _load_object(text: bytes) -> dict[str, object]:
    try:
        fields = json.loads(text)
    except RecursionError:
        refuse(CONFIG_FILE, "nested too deeply")
    except ValueError as error:
        refuse(CONFIG_FILE, f"not JSON ({shown_name(str(error))})")
    if not isinstance(fields, dict):
        refuse(CONFIG_FILE, "does not hold an object")
    return fields


def _is_off(value: object) -> bool:
    return value is None or value is False or (value in ("", [], {}))


def _check_kind(fields: dict[str, object]) -> Kind:
    name = fields.get("peft_type")
    kind = ({"LORA": _LORA} | KINDS).get(name) if isinstance(name, str) else None
    if kind is None:
        refuse("peft_type", f"only LORA, {', '.join(KINDS)} are served, got {show(name)}")
    if fields.get("task_type") not in (None, "CAUSAL_LM"):
        refuse("task_type", f"only CAUSAL_LM is served, got {show(fields['task_type'])}")
    return kind


def _check_refused(fields: dict[str, object], kind: Kind) -> None:
    for name, value in fields.items():
        if _is_off(value) or name in kind.harmless:
            continue
        if name in kind.refused:
            refuse(name, kind.refused[name])
        if name not in kind.read:
            refuse(name, f"an unknown field with the value {show(value)}")


def _residual_init(value: object) -> str:
    """The initialisation, if it is one whose adapters need the base that it left."""
    if value is None or isinstance(value, bool):
        return ""
    if not isinstance(value, str):
        refuse("init_lora_weights", f"expected a name or a boolean, got {show(value)}")
    init = value.lower()
    if init in _BASE_CHANGING_INITS:
        refuse("init_lora_weights", f"{show(value)} {_BASE_CHANGING_INITS[init]}")
    if init in _RESIDUAL_INITS or init.startswith("pissa_niter_"):
        return init
    if init not in _PLAIN_INITS:
        refuse("init_lora_weights", f"unknown initialisation {show(value)}")
    return ""


def _rank(value: object, param: str, max_rank: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        refuse(param, f"a rank must be an integer, got {show(value)}")
    if not 1 <= value <= max_rank:
        refuse(param, f"a rank must be in [1, {max_rank}] (--max-lora-rank), got {show(value)}")
    return value


def _number(value: object, param: str) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool):
        refuse(param, f"must be a number, got {show(value)}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        refuse(param, "must be a finite number")
    return number


def _flag(fields: dict[str, object], param: str) -> bool:
    value = fields.get(param)
    if _is_off(value):
        return False
    if not isinstance(value, bool):
        refuse(param, f"must be true or false, got {show(value)}")
    return value


def _pattern(source: str, work: Work) -> Pattern:
    try:
        return compile_pattern(source, work)
    except PatternError as error:
        refuse(work.field, shown_name(str(error)))


def _patterns(
    fields: dict[str, object], param: str, convert: Callable[[object, str], T]
) -> tuple[tuple[Pattern, T], ...]:
    value = fields.get(param)
    if value is None:
        return ()
    if not isinstance(value, dict):
        refuse(param, f"must be an object, got {show(value)}")
    if len(value) > MAX_ENTRIES:
        refuse(param, f"more than {MAX_ENTRIES} keys")
    work = Work(param)
    return tuple((_pattern(key, work), convert(item, param)) for key, item in value.items())


def _first_match(patterns: tuple[tuple[Pattern, T], ...], module: str, default: T) -> T:
    for pattern, value in patterns:
        if pattern.matches_module(module):
            return value
    return default


def _modules(fields: dict[str, object], param: str) -> tuple[str, ...] | Pattern | None:
    value = fields.get(param)
    if isinstance(value, str):
        return None if value in ("", "all-linear") else _checkable(value, param)
    if value is None:
        return None
    if not isinstance(value, list) or not all(isinstance(entry, str) for entry in value):
        refuse(param, f"must be a string or a list of strings, got {show(value)}")
    if len(value) > MAX_ENTRIES:
        refuse(param, f"more than {MAX_ENTRIES} entries")
    return tuple(value)


def _checkable(source: str, param: str) -> Pattern | None:
    """None for an expression beyond `Pattern`: the tensors say what is adapted anyway."""
    try:
        return compile_pattern(source, Work(param))
    except PatternError:
        return None


def _layers(fields: dict[str, object]) -> frozenset[int] | None:
    names = fields.get("layers_pattern")
    for name in names if isinstance(names, list) else [names]:
        if name not in (None, "", "layers", "model.layers"):
            refuse("layers_pattern", f"the layers are `model.layers` here, got {show(name)}")
    value = fields.get("layers_to_transform")
    indices = value if isinstance(value, list) else [value]
    if value is None or not indices:
        return None
    if any(not isinstance(index, int) or isinstance(index, bool) for index in indices):
        refuse("layers_to_transform", f"must be layer indices, got {show(value)}")
    return frozenset(indices)


def _ends_with(module: str, entry: str) -> bool:
    return module == entry or module.endswith("." + entry)


def _selects(modules: tuple[str, ...] | Pattern | None, module: str, default: bool) -> bool:
    if modules is None:
        return default
    if isinstance(modules, Pattern):
        return modules.fullmatch(module)
    return any(_ends_with(module, entry) for entry in modules)


def _layer_of(module: str) -> int | None:
    """The first number that is a part of the name: 3 for `model.layers.3.mlp.up_proj`."""
    return next((int(part) for part in module.split(".") if part.isdecimal()), None)

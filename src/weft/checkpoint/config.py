"""adapter_config.json: what it means for inference, or why it is refused.

An adapter is served exactly as PEFT would run it, or refused with the name of the field that
asks for more. So every field of the config is in one of three tables below (harmless, read,
refused), and a field in none of them is refused as soon as it holds something.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from weft.checkpoint.pattern import Pattern, PatternError, Work, compile_pattern
from weft.checkpoint.refuse import refuse, show, shown_name

CONFIG_FILE = "adapter_config.json"
MAX_ENTRIES = 2048
"""Of `rank_pattern`, `alpha_pattern`, `target_modules` and `exclude_modules`, each."""

T = TypeVar("T")

_HARMLESS = frozenset(
    {
        "auto_mapping",
        "base_model_name_or_path",
        "corda_config",
        "eva_config",
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
"""Without effect on inference, or (the init configs) decided by `init_lora_weights`."""

_READ = frozenset(
    {
        "alpha_pattern",
        "bias",
        "exclude_modules",
        "init_lora_weights",
        "layers_pattern",
        "layers_to_transform",
        "lora_alpha",
        "peft_type",
        "r",
        "rank_pattern",
        "target_modules",
        "task_type",
        "use_rslora",
    }
)

_REFUSED = {
    "alora_invocation_tokens": "activated LoRA is not served",
    "arrow_config": "Arrow routing is not served",
    "ensure_weight_tying": "tied adapters of embedding and head are not served",
    "fan_in_fan_out": "no base model here stores its weights transposed",
    "kasa_config": "KaSA's diagonal is not served",
    "layer_replication": "the base model's layers can't be replicated for one adapter",
    "lora_bias": "biases are not served",
    "modules_to_save": "whole modules beside LoRA are not served",
    "monteclora_config": "MonteCLoRA is not served",
    "target_parameters": "LoRA on parameters (experts) is not served",
    "trainable_token_indices": "trained token rows are not served",
    "use_bdlora": "block-diagonal LoRA is not served",
    "use_dora": "DoRA is not served",
    "use_qalora": "QALoRA is not served",
    "velora_config": "VeLoRA is not served",
}

_PLAIN_INITS = frozenset({"gaussian", "eva", "orthogonal", "mica"})
_BASE_CHANGING_INITS = ("pissa", "olora", "corda", "loftq", "lora_ga")


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

    def rank_of(self, module: str) -> int:
        return _first_match(self.rank_pattern, module, self.r)

    def scale_of(self, module: str, rank: int) -> float:
        alpha = _first_match(self.alpha_pattern, module, self.alpha)
        return alpha / math.sqrt(rank) if self.use_rslora else alpha / rank

    def check_modules(self, modules: list[str]) -> None:
        """Raises AdapterInvalid unless the config selects exactly the kinds of `modules`."""
        for module in modules:
            self._check_module(module)
        if isinstance(self.target_modules, tuple):
            for entry in self.target_modules:
                if not any(_ends_with(module, entry) for module in modules):
                    refuse("target_modules", f"no tensor of the file is for {show(entry)}")

    def _check_module(self, module: str) -> None:
        if not _selects(self.target_modules, module, default=True):
            refuse("target_modules", f"does not select {module}, which the file adapts")
        if _selects(self.exclude_modules, module, default=False):
            refuse("exclude_modules", f"excludes {module}, which the file adapts")
        if self.layers_to_transform is None:
            return
        in_full = isinstance(self.target_modules, tuple) and module in self.target_modules
        if not in_full and _layer_of(module) not in self.layers_to_transform:
            refuse("layers_to_transform", f"leaves out {module}, which the file adapts")


def parse_config(text: bytes, max_rank: int) -> PeftConfig:
    """The config in the bytes of adapter_config.json. Raises AdapterInvalid, naming the field."""
    fields = _load_object(text)
    _check_kind(fields)
    _check_refused(fields)
    _check_init(fields.get("init_lora_weights"))

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


def _check_kind(fields: dict[str, object]) -> None:
    if fields.get("peft_type") != "LORA":
        refuse("peft_type", f"only LORA is served, got {show(fields.get('peft_type'))}")
    if fields.get("task_type") not in (None, "CAUSAL_LM"):
        refuse("task_type", f"only CAUSAL_LM is served, got {show(fields['task_type'])}")
    if fields.get("bias") not in (None, "none"):
        refuse("bias", f"trained biases are not served, got {show(fields['bias'])}")


def _check_refused(fields: dict[str, object]) -> None:
    for field, value in fields.items():
        if _is_off(value) or field in _HARMLESS:
            continue
        if field in _REFUSED:
            refuse(field, _REFUSED[field])
        if field not in _READ:
            refuse(field, f"an unknown field with the value {show(value)}")


def _check_init(value: object) -> None:
    if value is None or isinstance(value, bool):
        return
    if not isinstance(value, str):
        refuse("init_lora_weights", f"expected a name or a boolean, got {show(value)}")
    if value.lower().startswith(_BASE_CHANGING_INITS):
        refuse(
            "init_lora_weights",
            f"{show(value)} changes the base model; save the adapter with PEFT's"
            " path_initial_model_for_weight_conversion, which makes it a plain LoRA",
        )
    if value.lower() not in _PLAIN_INITS:
        refuse("init_lora_weights", f"unknown initialisation {show(value)}")


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
    if not (value is None or isinstance(value, bool)):
        refuse(param, f"must be true or false, got {show(value)}")
    return bool(value)


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

"""Checks single fields of adapter_config.json, and refuses bad values by the field's name.

All of them raise AdapterInvalid, whose `param` is the field.
"""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import regex

from weft.checkpoint.refuse import refuse, refuse_pointer, show, shown_name
from weft.core.files import CONFIG_FILE

# -- patterns --------------------------------------------------------------------------------------
#
# The keys of `rank_pattern` come from whoever wrote the adapter, and a short one can keep a
# backtracking engine busy for years. PEFT matches with `re`, so `re` decides which expressions are
# valid. They are matched by `regex`, which has a time-out and does not hold up other threads. What
# the two engines read differently is refused. All patterns of one field share one budget of time.

_MAX_LENGTH = 1024
"""Characters of one expression."""
_NOT_THE_SAME = re.compile(r"\[\[|\[\^?:|--|&&|~~|\|\||(?<!\\)\{(?!\d*(,\d*)?\})")
"""Set operations, POSIX classes and fuzzy counts, which `regex` reads differently from `re`."""


_MODULE = re.compile(r"\w+(\.\w+)*", re.ASCII)


class Work:
    """The seconds that are left to compile and match the patterns of one field."""

    def __init__(self, field: str, budget_s: float = 2.0) -> None:
        self.field = field
        self.budget_s = budget_s
        self._compiled: dict[str, regex.Pattern[str]] = {}

    def check(self, source: str) -> None:
        """Raise `re.error` or `regex.error` unless the expression is one for both."""
        begin = time.thread_time()
        re.compile(source)
        self.budget_s -= time.thread_time() - begin
        self._compile(source)

    def fullmatch(self, source: str, name: str) -> bool:
        compiled = self._compiled.get(source) or self._compile(source)
        start = time.monotonic()
        try:
            found = compiled.fullmatch(name, timeout=max(self.budget_s, 1e-3), concurrent=True)
        except TimeoutError:
            refuse(self.field, "its patterns take too long to match")
        self.budget_s -= time.monotonic() - start
        return found is not None

    def _compile(self, source: str) -> regex.Pattern[str]:
        begin = time.thread_time()
        compiled = self._compiled[source] = regex.compile(source)
        self.budget_s -= time.thread_time() - begin
        if self.budget_s < 0:
            refuse(self.field, "its patterns take too long to compile")
        return compiled


def is_plain(source: str) -> bool:
    """Whether an expression is a module's name, or the end of one."""
    return _MODULE.fullmatch(source) is not None


class PatternError(ValueError):
    """The expression is malformed, too long, or means different things to different engines."""


@dataclass(frozen=True, slots=True)
class Pattern:
    """One expression. If its field's budget is exceeded, a match raises AdapterInvalid."""

    source: str
    work: Work
    literals: tuple[tuple[int, str], ...] = ()
    """(offset, text) of the texts between the '.' of an expression without other metacharacters,
    as most are: it is matched without an engine. Empty for other expressions."""

    def fullmatch(self, name: str) -> bool:
        """Whether the expression matches the whole name, as `re.fullmatch` does."""
        if self.literals:
            return len(name) == len(self.source) and self._is_at(0, name)
        return self.work.fullmatch(self.source, name)

    def matches_module(self, name: str) -> bool:
        """PEFT's rule for the keys of patterns: the expression matches from a '.' on."""
        if self.literals:
            start = len(name) - len(self.source)
            return (start == 0 or (start > 0 and name[start - 1] == ".")) and self._is_at(
                start, name
            )
        return self.work.fullmatch(_in_module(self.source), name)

    def _is_at(self, start: int, name: str) -> bool:
        return all(name.startswith(text, start + at) for at, text in self.literals)


def compile_pattern(source: str, work: Work) -> Pattern:
    """Raises PatternError."""
    if len(source) > _MAX_LENGTH:
        raise PatternError(f"is longer than {_MAX_LENGTH} characters")
    if is_plain(source):
        parts = re.finditer(r"[^.]+", source)
        return Pattern(source, work, tuple((part.start(), part[0]) for part in parts))
    if _NOT_THE_SAME.search(source):
        raise PatternError("holds a set operation, a '[:' or a '{' that is no count")
    try:
        work.check(source)
        work.check(_in_module(source))
    except (re.error, regex.error, OverflowError, RecursionError, ValueError) as error:
        raise PatternError(str(error)) from None
    return Pattern(source, work)


def _in_module(source: str) -> str:
    return rf"(.*\.)?({source})$"


# -- fields ----------------------------------------------------------------------------------------

MAX_DEPTH = 32
"""How deep lists and objects may be nested."""
MAX_ENTRIES = 2048
"""The largest number of entries in any list or object of the config."""

Fields = Mapping[str, object]
Modules = tuple[str, ...] | Pattern | None
"""Names or endings of names; one expression; None: no statement (absent, or "all-linear")."""
T = TypeVar("T")
Entries = TypeVar("Entries", bound=Collection[object])


def load_object(text: bytes) -> dict[str, object]:
    """The fields of a config."""
    refuse_pointer(CONFIG_FILE, text)
    try:
        fields = json.loads(text)
    except RecursionError:
        refuse(CONFIG_FILE, "nested too deeply")
    except ValueError as error:
        refuse(CONFIG_FILE, f"not JSON ({shown_name(str(error))})")
    if not isinstance(fields, dict):
        refuse(CONFIG_FILE, "does not hold an object")
    if _is_deep(fields):
        refuse(CONFIG_FILE, "nested too deeply")
    return fields


def _is_deep(value: object) -> bool:
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH):
        inner = [each.values() if isinstance(each, dict) else each for each in level]
        level = [each for some in inner for each in some if isinstance(each, dict | list)]
        if not level:
            return False
    return True


def is_off(value: object) -> bool:
    """Whether a field with this value asks for nothing."""
    return value is None or value is False or (value in ("", [], {}))


def flag(fields: Fields, param: str, default: bool = False) -> bool:
    value = fields.get(param, default)
    if is_off(value):
        return False
    if not isinstance(value, bool):
        refuse(param, f"must be true or false, got {show(value)}")
    return value


def integer(fields: Fields, param: str, default: int) -> int:
    value = fields.get(param, default)
    if type(value) is not int:
        refuse(param, f"must be an integer, got {show(value)}")
    return value


def number(value: object, param: str) -> float:
    """A finite number."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        refuse(param, f"must be a number, got {show(value)}")
    try:
        found = float(value)
    except OverflowError:
        found = math.inf
    if not math.isfinite(found):
        refuse(param, "must be a finite number")
    return found


def rank(value: object, param: str, max_rank: int) -> int:
    if type(value) is not int:
        refuse(param, f"a rank must be an integer, got {show(value)}")
    if not 1 <= value <= max_rank:
        refuse(param, f"a rank must be in [1, {max_rank}] (--max-lora-rank), got {show(value)}")
    return value


def names(fields: Fields, param: str) -> tuple[str, ...]:
    value = fields.get(param)
    if is_off(value):
        return ()
    if not isinstance(value, list) or not all(isinstance(name, str) and name for name in value):
        refuse(param, f"must be a list of names, got {show(value)}")
    return tuple(bounded(value, param))


def token_ids(value: object, param: str) -> tuple[int, ...]:
    if not isinstance(value, list) or any(type(i) is not int or i < 0 for i in value):
        refuse(param, f"must be token ids, got {show(value)}")
    return tuple(value)


def by_pattern(
    fields: Fields, param: str, convert: Callable[[object, str], T]
) -> tuple[tuple[Pattern, T], ...]:
    """The values of an object whose keys are expressions for modules' names, in its order."""
    value = fields.get(param)
    if value is None:
        return ()
    if not isinstance(value, dict):
        refuse(param, f"must be an object, got {show(value)}")
    work = Work(param)
    return tuple(
        (pattern(key, work), convert(item, param))
        for key, item in bounded(value, param, "keys").items()
    )


def pattern(source: str, work: Work) -> Pattern:
    try:
        return compile_pattern(source, work)
    except PatternError as error:
        refuse(work.field, shown_name(str(error)))


def modules(fields: Fields, param: str) -> Modules:
    value = fields.get(param)
    if isinstance(value, str):
        return None if value.lower() in ("", "all-linear") else _checkable(value, param)
    if value is None:
        return None
    if not isinstance(value, list) or not all(isinstance(entry, str) for entry in value):
        refuse(param, f"must be a string or a list of strings, got {show(value)}")
    return tuple(bounded(value, param))


def layers(fields: Fields) -> frozenset[int] | None:
    """The layers that are adapted; None: all."""
    named = fields.get("layers_pattern")
    for name in named if isinstance(named, list) else [named]:
        if name not in (None, "", "layers", "model.layers"):
            refuse("layers_pattern", f"the layers are `model.layers` here, got {show(name)}")
    value = fields.get("layers_to_transform")
    indices = value if isinstance(value, list) else [value]
    if value is None or not indices:
        return None
    if any(type(index) is not int for index in indices):
        refuse("layers_to_transform", f"must be layer indices, got {show(value)}")
    return frozenset(indices)


def bounded(entries: Entries, param: str, called: str = "entries") -> Entries:
    if len(entries) > MAX_ENTRIES:
        refuse(param, f"more than {MAX_ENTRIES} {called}")
    return entries


def _checkable(source: str, param: str) -> Pattern | None:
    """The expression as a Pattern; None if it can't be one, as the tensors say what is adapted."""
    try:
        return compile_pattern(source, Work(param))
    except PatternError:
        return None

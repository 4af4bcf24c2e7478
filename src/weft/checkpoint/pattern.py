"""Regular expressions from an adapter's config, matched in bounded time.

The keys of `rank_pattern` come from whoever wrote the adapter, and a short one can keep a
backtracking engine busy for years. So `re` says what is valid, and `regex`, which means the same
for that, matches with a time-out and without holding up other threads. All patterns of one field
share one budget.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass

import regex

from weft.checkpoint.refuse import refuse

MAX_LENGTH = 1024
"""Characters of one expression."""

_NOT_THE_SAME = re.compile(r"\[\[|\[\^?:|--|&&|~~|\|\||(?<!\\)\{(?!\d*(,\d*)?\})")
"""Set operations, POSIX classes and fuzzy counts: `regex` reads them otherwise than `re`."""


class Work:
    """Seconds that the patterns of one field may still take."""

    def __init__(self, field: str, budget_s: float = 2.0) -> None:
        self.field = field
        self.budget_s = budget_s


class PatternError(ValueError):
    """The expression is malformed, too long, or means different things to different engines."""


@dataclass(frozen=True, slots=True)
class Pattern:
    """One compiled expression. A match that exceeds the budget raises AdapterInvalid."""

    whole: regex.Pattern[str]
    in_module: regex.Pattern[str]
    work: Work

    def fullmatch(self, name: str) -> bool:
        """Whether the expression matches the whole name, as `re.fullmatch` does."""
        return self._matches(self.whole, name)

    def matches_module(self, name: str) -> bool:
        """PEFT's rule for the keys of patterns: the expression matches from a '.' on."""
        return self._matches(self.in_module, name)

    def _matches(self, compiled: regex.Pattern[str], name: str) -> bool:
        start = time.monotonic()
        try:
            found = compiled.fullmatch(name, timeout=max(self.work.budget_s, 1e-3), concurrent=True)
        except TimeoutError:
            refuse(self.work.field, "its patterns take too long to match")
        self.work.budget_s -= time.monotonic() - start
        return found is not None


def compile_pattern(source: str, work: Work) -> Pattern:
    """Raises PatternError."""
    if len(source) > MAX_LENGTH:
        raise PatternError(f"is longer than {MAX_LENGTH} characters")
    if _NOT_THE_SAME.search(source):
        raise PatternError("holds a set operation, a '[:' or a '{' that is no count")
    in_module = rf"(.*\.)?({source})$"
    try:
        re.compile(source)
        re.compile(in_module)
        return Pattern(regex.compile(source), regex.compile(in_module), work)
    except (re.error, regex.error, OverflowError, RecursionError, ValueError) as error:
        raise PatternError(str(error)) from None

"""Regular expressions from an adapter's config, matched in bounded time.

The keys of `rank_pattern` come from whoever wrote the adapter, and the usual backtracking engine
can be kept busy for years by a short one. A `Pattern` walks the text once with the *set* of all
positions that the expression can have reached, so that a match takes polynomial time whatever
the expression, and all patterns of one field share a budget of `Work`. What it accepts means the
same as in Python's `re`; what has no such meaning here (look-around, back-references, flags,
possessive quantifiers) is refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from weft.checkpoint.refuse import refuse

MAX_LENGTH = 1024
"""Characters of one expression."""
MAX_DEPTH = 4
"""Groups within groups."""

Positions = frozenset[int]
Step = Callable[[str, Positions], Positions]
"""From the positions before an expression to the positions after it."""

_NAME = re.compile(r"[\w.]*")
_COUNTS = {"*": (0, None), "+": (1, None), "?": (0, 1)}
_BRACES = re.compile(r"\{(?:(\d{1,4})(?:(,)(\d{0,4}))?|,(\d{1,4}))\}")


class Work:
    """What the patterns of one field may still spend, in units of some 0.3 us."""

    def __init__(self, field: str, budget: int = 2_000_000) -> None:
        self.field = field
        self.budget = budget

    def spend(self, units: int) -> None:
        """Raises AdapterInvalid once the budget is used up."""
        self.budget -= units
        if self.budget < 0:
            refuse(self.field, "its patterns take too long to match")


class PatternError(ValueError):
    """The expression is malformed, too long, or uses what is not supported."""


@dataclass(frozen=True)
class Pattern:
    """One compiled expression."""

    source: str
    step: Step
    work: Work
    plain: re.Pattern[str] | None
    """PEFT's whole expression, for a name or part of one, which `re` can't be slow with."""

    def fullmatch(self, name: str) -> bool:
        """Whether the whole of `name` matches, as with `re.fullmatch`."""
        return len(name) in self.step(name, frozenset({0}))

    def matches_module(self, name: str) -> bool:
        """PEFT's rule for a module: `re.match(rf"(.*\\.)?({source})$", name)`."""
        if self.plain is not None:
            self.work.spend(1)
            return self.plain.match(name) is not None
        starts = [i + 1 for i, char in enumerate(name) if char == "."]
        return len(name) in self.step(name, frozenset([0, *starts]))


def compile_pattern(source: str, work: Work) -> Pattern:
    """Raises PatternError. Matching spends `work`, which raises AdapterInvalid when used up."""
    if len(source) > MAX_LENGTH:
        raise PatternError(f"a pattern is longer than {MAX_LENGTH} characters")
    parser = _Parser(source, work)
    step = parser.alternatives(0)
    if parser.at < len(source):
        raise PatternError(f"unbalanced parenthesis at position {parser.at} of {source!r}")
    plain = re.compile(rf"(.*\.)?({source})$") if _NAME.fullmatch(source) else None
    return Pattern(source, step, work, plain)


class _Parser:
    """Recursive descent over one expression; `at` is the next character's index."""

    def __init__(self, source: str, work: Work) -> None:
        self.source = source
        self.work = work
        self.at = 0

    def error(self, what: str) -> PatternError:
        return PatternError(f"{what} at position {self.at} of {self.source!r}")

    def peek(self) -> str:
        return self.source[self.at : self.at + 1]

    def take(self) -> str:
        char = self.peek()
        self.at += 1
        return char

    def alternatives(self, depth: int) -> Step:
        branches = [self.sequence(depth)]
        while self.peek() == "|":
            self.at += 1
            branches.append(self.sequence(depth))
        return branches[0] if len(branches) == 1 else _any_of(branches, self.work)

    def sequence(self, depth: int) -> Step:
        steps: list[Step] = []
        run: list[str] = []

        def end_run() -> None:
            if run:
                steps.append(self.run(run))
                run.clear()

        while self.peek() not in ("", "|", ")"):
            single = self.single()
            if single is not None and not self.counts_follow():
                run.append(single)
                continue
            end_run()
            steps.append(self.quantified(self.run([single]) if single else self.atom(depth)))
        end_run()
        return _in_turn(steps, self.work)

    def single(self) -> str | None:
        """The next atom if it matches exactly one character, taken; else None, nothing taken."""
        char, escaped = self.peek(), self.source[self.at + 1 : self.at + 2]
        if char == "[":
            return self.char_class()
        if char == "\\" and escaped and (escaped in "dDsSwW" or not escaped.isalnum()):
            self.at += 2
            return char + escaped
        if char in set("(^$*+?{\\"):
            return None
        return self.take() if char == "." else re.escape(self.take())

    def run(self, singles: list[str]) -> Step:
        """As many characters as there are `singles`: safe to leave to `re`."""
        try:
            match = re.compile("".join(singles)).match
        except re.error as error:
            raise self.error(str(error)) from None
        width, work = len(singles), self.work

        def step(text: str, at: Positions) -> Positions:
            work.spend(3 + len(at))
            return frozenset(p + width for p in at if match(text, p))

        return step

    def atom(self, depth: int) -> Step:
        char = self.take()
        if char == "(":
            return self.group(depth)
        if char == "\\" and self.take() == "b":
            return self.unrepeated(_at_boundary)
        if char in "^$":
            return self.unrepeated(_at_start if char == "^" else _at_end)
        raise self.error("nothing to repeat, or an escape that is not supported,")

    def group(self, depth: int) -> Step:
        if depth >= MAX_DEPTH:
            raise self.error(f"groups nested deeper than {MAX_DEPTH}")
        if self.peek() == "?":
            if self.source[self.at : self.at + 2] != "?:":
                raise self.error("(?...) other than (?:...) is not supported")
            self.at += 2
        step = self.alternatives(depth + 1)
        if self.take() != ")":
            raise self.error("missing )")
        return step

    def char_class(self) -> str:
        start = self.at
        self.at += 1
        self.at += self.peek() == "^"
        self.at += self.peek() == "]"
        while (char := self.take()) != "]":
            if char in ("", "["):
                raise self.error("malformed set")
            self.at += char == "\\"
        text = self.source[start : self.at]
        if any(pair in text for pair in ("--", "&&", "~~", "||")):
            raise self.error("set operations are not supported")
        return text

    def unrepeated(self, step: Step) -> Step:
        if self.counts_follow():
            raise self.error("nothing to repeat")
        return step

    def counts_follow(self) -> bool:
        return self.peek() in {"*", "+", "?", "{"}

    def quantified(self, step: Step) -> Step:
        if not self.counts_follow():
            return step
        low, high = self.counts()
        if self.peek() == "?":  # lazy: another preference among the same matches
            self.at += 1
        if self.counts_follow():
            raise self.error("multiple repeat")
        return _repeated(step, low, high, self.work)

    def counts(self) -> tuple[int, int | None]:
        if self.peek() != "{":
            return _COUNTS[self.take()]
        found = _BRACES.match(self.source, self.at)
        if found is None:
            raise self.error("malformed {m,n}")
        self.at = found.end()
        low, comma, high, only_high = found.groups()
        if only_high is not None:
            return 0, int(only_high)
        if comma is None:
            return int(low), int(low)
        if high and int(high) < int(low):
            raise self.error("{m,n} with n below m")
        return int(low), int(high) if high else None


def _at_start(text: str, at: Positions) -> Positions:
    return at & {0}


def _at_end(text: str, at: Positions) -> Positions:
    return at & {len(text)}


def _at_boundary(text: str, at: Positions) -> Positions:
    def is_word(index: int) -> bool:
        return 0 <= index < len(text) and (text[index].isalnum() or text[index] == "_")

    return frozenset(p for p in at if is_word(p - 1) != is_word(p))


def _in_turn(steps: list[Step], work: Work) -> Step:
    def run(text: str, at: Positions) -> Positions:
        for step in steps:
            if not at:
                break
            work.spend(1)
            at = step(text, at)
        return at

    return steps[0] if len(steps) == 1 else run


def _any_of(branches: list[Step], work: Work) -> Step:
    def run(text: str, at: Positions) -> Positions:
        work.spend(len(branches))
        return frozenset().union(*(branch(text, at) for branch in branches))

    return run


def _repeated(step: Step, low: int, high: int | None, work: Work) -> Step:
    """`step` at least `low` times and at most `high`; both loops end once nothing moves."""

    def run(text: str, at: Positions) -> Positions:
        for _ in range(low):
            work.spend(1)
            after = step(text, at)
            if after == at:
                break
            at = after
        reached = frontier = at
        optional = None if high is None else high - low
        while frontier and optional != 0:
            work.spend(1)
            frontier = step(text, frontier) - reached
            reached |= frontier
            optional = None if optional is None else optional - 1
        return reached

    return run

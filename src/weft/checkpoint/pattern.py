"""Regular expressions from an adapter's config, matched in bounded time.

The keys of `rank_pattern` come from whoever wrote the adapter, and the usual backtracking engine
can be kept busy for years by a short one. A `Pattern` walks the text once with the *set* of all
positions that the expression can have reached, so that a match takes polynomial time whatever
the expression. What it accepts means the same as in Python's `re`; what has no such meaning
here (look-around, back-references, flags, possessive quantifiers) is refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import reduce

MAX_LENGTH = 1024
"""Characters of one expression."""
MAX_DEPTH = 4
"""Groups within groups."""

Positions = frozenset[int]
Step = Callable[[str, Positions], Positions]
"""From the positions before an expression to the positions after it."""

_COUNTS = {"*": (0, None), "+": (1, None), "?": (0, 1)}
_BRACES = re.compile(r"\{(?:(\d{1,4})(?:(,)(\d{0,4}))?|,(\d{1,4}))\}")


class PatternError(ValueError):
    """The expression is malformed, too long, or uses what is not supported."""


@dataclass(frozen=True)
class Pattern:
    """One compiled expression."""

    source: str
    step: Step

    def fullmatch(self, name: str) -> bool:
        """Whether the whole of `name` matches, as with `re.fullmatch`."""
        return len(name) in self.step(name, frozenset({0}))

    def matches_module(self, name: str) -> bool:
        """PEFT's rule for a module: `re.match(rf"(.*\\.)?({source})$", name)`."""
        starts = [i + 1 for i, char in enumerate(name) if char == "."]
        return len(name) in self.step(name, frozenset([0, *starts]))


def compile_pattern(source: str) -> Pattern:
    """Raises PatternError."""
    if len(source) > MAX_LENGTH:
        raise PatternError(f"a pattern is longer than {MAX_LENGTH} characters")
    parser = _Parser(source)
    step = parser.alternatives(0)
    if parser.at < len(source):
        raise PatternError(f"unbalanced parenthesis at position {parser.at} of {source!r}")
    return Pattern(source, step)


class _Parser:
    """Recursive descent over one expression; `at` is the next character's index."""

    def __init__(self, source: str) -> None:
        self.source = source
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
        return branches[0] if len(branches) == 1 else _any_of(branches)

    def sequence(self, depth: int) -> Step:
        steps: list[Step] = []
        literal = ""
        while self.peek() not in ("", "|", ")"):
            char = self.literal()
            if char is None:
                step = self.quantified(self.atom(depth))
            elif self.counts_follow():
                step = self.quantified(_literal(char))
            else:
                literal += char
                continue
            if literal:
                steps.append(_literal(literal))
                literal = ""
            steps.append(step)
        if literal:
            steps.append(_literal(literal))
        return _in_turn(steps)

    def literal(self) -> str | None:
        """The next atom if it is one plain character, taken; else None, nothing taken."""
        char = self.peek()
        if char == "\\":
            escaped = self.source[self.at + 1 : self.at + 2]
            if escaped.isalnum() or escaped == "":
                return None
            self.at += 2
            return escaped
        if char in set("([.^$*+?{"):
            return None
        return self.take()

    def atom(self, depth: int) -> Step:
        char = self.take()
        match char:
            case "(":
                return self.group(depth)
            case "[":
                return self.char_class()
            case ".":
                return _char(lambda c: c != "\n")
            case "\\":
                return self.escape()
            case "^" | "$":
                step = _at_start if char == "^" else _at_end
                return self.unrepeated(step)
        self.at -= 1
        raise self.error("nothing to repeat")

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

    def char_class(self) -> Step:
        start = self.at - 1
        self.at += self.peek() == "^"
        self.at += self.peek() == "]"
        while (char := self.take()) != "]":
            if char in ("", "["):
                raise self.error("malformed set")
            self.at += char == "\\"
        text = self.source[start : self.at]
        if any(pair in text for pair in ("--", "&&", "~~", "||")):
            raise self.error("set operations are not supported")
        return _char(self.compiled(text))

    def escape(self) -> Step:
        char = self.take()
        if char == "b":
            return self.unrepeated(_at_boundary)
        if char and char in "dDsSwW":
            return _char(self.compiled("\\" + char))
        raise self.error(f"the escape \\{char} is not supported")

    def compiled(self, one_char: str) -> Callable[[str], bool]:
        try:
            test = re.compile(one_char).match
        except re.error as error:
            raise self.error(str(error)) from None
        return lambda char: test(char) is not None

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
        return _repeated(step, low, high)

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


def _literal(run: str) -> Step:
    return lambda text, at: frozenset(p + len(run) for p in at if text.startswith(run, p))


def _char(test: Callable[[str], bool]) -> Step:
    return lambda text, at: frozenset(p + 1 for p in at if p < len(text) and test(text[p]))


def _at_start(text: str, at: Positions) -> Positions:
    return at & {0}


def _at_end(text: str, at: Positions) -> Positions:
    return at & {len(text)}


def _at_boundary(text: str, at: Positions) -> Positions:
    def is_word(index: int) -> bool:
        return 0 <= index < len(text) and (text[index].isalnum() or text[index] == "_")

    return frozenset(p for p in at if is_word(p - 1) != is_word(p))


def _in_turn(steps: list[Step]) -> Step:
    if len(steps) == 1:
        return steps[0]
    return lambda text, at: reduce(lambda now, step: step(text, now) if now else now, steps, at)


def _any_of(branches: Iterable[Step]) -> Step:
    return lambda text, at: frozenset().union(*(branch(text, at) for branch in branches))


def _repeated(step: Step, low: int, high: int | None) -> Step:
    """`step` at least `low` times and at most `high`; both loops end once nothing moves."""

    def run(text: str, at: Positions) -> Positions:
        for _ in range(low):
            after = step(text, at)
            if after == at:
                break
            at = after
        reached = frontier = at
        optional = None if high is None else high - low
        while frontier and optional != 0:
            frontier = step(text, frontier) - reached
            reached |= frontier
            optional = None if optional is None else optional - 1
        return reached

    return run

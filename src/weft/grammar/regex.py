"""Rewrites regular expressions so that xgrammar reads them with their usual meaning."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise

from weft.core.errors import InvalidRequest

FIELD = "structured_outputs"
AROUND = "structured_outputs.around"
"""What a refusal names if the form itself is not to blame."""

MAX_REPEATS = 1000
"""How many repetitions a regular expression may have: the time that they take to be compiled, and
to be followed, grows with the square of their number."""
_REPEAT = re.compile(r"\\.|[*+?]|\{[0-9,]+\}", re.DOTALL)
MAX_COUNT = 2**31 - 1
"""The largest number of repetitions that xgrammar reads: it takes `a{4294967298}` for `a{2}`."""
_BOUNDS = re.compile(r"\{([0-9]+)(?:,([0-9]*))?\}")
_ATOM = re.compile(
    r"\\(?:u[0-9a-fA-F]{4}|x[0-9a-fA-F]{2}|c[A-Za-z]|0[0-9]+|.)|\[\^?|\(\?P(?=<)|.", re.DOTALL
)
_CLASS_WITHOUT = r"[^\ud800-\udfff"
"""How a class begins that allows all characters but those that it names. Surrogates, which are no
text, are never allowed."""
_CLASS_IN_JSON_WITHOUT = r'[^\x00-\x1f"\\\ud800-\udfff'
"""The same in a JSON string, where characters that must be escaped are not allowed either."""
_GAP_OF_SURROGATES = {"\ud800": "\ud7ff\ue000"}
_GAPS = {'"': "!#", "\\": r"\[\]"} | _GAP_OF_SURROGATES
"""What a range in a class of a JSON string leaves out, and the characters around that."""
_CLASSES = {
    r"\S": "\\x00-\x08\x0e-\x1f!-\x9f\xa1-\ud7ff\ue000-\U0010ffff",
    r"\D": "\\x00-/:-\ud7ff\ue000-\U0010ffff",
    r"\W": "\\x00-/:-@\\[-\\^`{-\ud7ff\ue000-\U0010ffff",
}
"""The members that these classes have in others: xgrammar's own have surrogates too."""
_CLASSES_IN_JSON = {
    r"\s": " ",
    r"\S": "!#-\\[\\]-\x9f\xa1-\ud7ff\ue000-\U0010ffff",
    r"\D": " !#-/:-\\[\\]-\ud7ff\ue000-\U0010ffff",
    r"\W": " !#-/:-@\\[\\]^`{-\ud7ff\ue000-\U0010ffff",
}
"""The members that these classes have in JSON strings."""
_BY_GRAMMAR = "\xe9{0}"
"""Adds nothing to a pattern. But xgrammar makes patterns of ASCII characters alone into automata,
some of which allow too much: that of `5(x[0-9]+)?` allows 59. It makes others into rules, which are
right, and take ten times as long to follow."""
_CODE = re.compile(r"\\[ux]([0-9a-fA-F]+)")
_CONTROLS = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v", "0": "\0"}
"""The control characters that have a letter."""
_SET = re.compile(r"\\[dDwWsS]")
_UNKNOWN_ESCAPE = re.compile(r"\\(?:(?![dDwWsSnrtfv])[a-zA-Z1-9]|0[0-9]+)")
_UNKNOWN_GROUP = re.compile(r"\(\?(?!:|P?<\w)P?<?.?", re.DOTALL)
_BEFORE_REPEATS: dict[str, list[list[str]]] = {
    "?": [[], ["|"]],
    **{sign: [[], ["|"], ["("]] for sign in "*+{"},
}
"""What can't stand before a sign of repetition."""
_NEEDLESS_ESCAPE = re.compile(r"\\[ !\"#%&',:;<=>@_`~]")


def refusal(reason: str) -> InvalidRequest:
    return InvalidRequest(f"{FIELD}: {reason}", FIELD)


@contextmanager
def naming_around() -> Iterator[None]:
    """Inside this context, refusals are of what is around a form."""
    try:
        yield
    except InvalidRequest as error:
        raise InvalidRequest(AROUND + error.message.removeprefix(FIELD), AROUND) from error


def check_repeats(pattern: str) -> None:
    """Raise InvalidRequest for a regular expression with too many repetitions."""
    repeats = sum(not match[0].startswith("\\") for match in _REPEAT.finditer(pattern))
    if repeats > MAX_REPEATS:
        raise refusal(f"more than {MAX_REPEATS} repetitions in a regular expression")


def enforceable_regex(pattern: str, in_json: bool = False) -> str:
    """The expression in xgrammar's dialect, with its usual meaning. Classes in a pattern of a JSON
    string have no characters that JSON must escape.

    Raises InvalidRequest for anchors inside, for escapes that xgrammar would read as letters, for
    groups that it does not know or would ignore, for surrogates, and, for a pattern of a JSON
    string, for characters by themselves that JSON must escape.
    """
    check_repeats(pattern)
    without = _CLASS_IN_JSON_WITHOUT if in_json else _CLASS_WITHOUT
    atoms: list[str] = []
    in_class = ""
    members: list[str] = []
    for match in _ATOM.finditer(pattern):
        atom = _without_code(match[0])
        if atom == "\\":
            raise refusal("a regular expression can't end with a backslash")
        if _UNKNOWN_ESCAPE.fullmatch(atom):
            raise refusal(f"{atom} in a regular expression is not supported")
        if in_json and in_class != "[^" and _needs_escape(atom):
            raise refusal(f"a pattern with {atom!r}, which JSON escapes, is not supported")
        if in_class != "[^" and "\ud800" <= _char(atom) <= "\udfff":
            raise refusal(f"{atom} in a regular expression is a surrogate, which is no text")
        if in_class and atom != "]":
            members.append(atom)
            continue
        if in_class == "[^":
            atom = f"{without}{''.join(_members(members))}]"
            in_class = ""
        elif in_class:
            atom = _class_of(_members(members, in_json))
            in_class = ""
        elif atom.startswith("["):
            in_class, members = atom, []
            continue
        elif (group := _UNKNOWN_GROUP.match(pattern, match.start())) is not None:
            raise refusal(f"{group[0]} in a regular expression is not supported")
        elif atoms[-1:] in _BEFORE_REPEATS.get(atom, []):
            raise refusal(f"{atom} in a regular expression has nothing to repeat")
        elif bounds := _BOUNDS.match(pattern, match.start()):
            _check_bounds(bounds)
        elif atom == ".":
            atom = rf"{without}\n\r]"
        elif atom in (r"\D", r"\W", r"\S"):
            atom = rf"{without}{atom.lower()}]"
        elif atom == r"\s" and in_json:
            atom = " "
        elif (atom == "^" and match.start() > 0) or (atom == "$" and match.end() < len(pattern)):
            raise refusal(f"{atom} inside a regular expression is not supported")
        elif atom == "(?P":
            atom = "(?"  # xgrammar reads the name that follows only without P
        elif atom in "^$":
            continue  # the whole text has to match in any case
        atoms.append(atom)
    if in_class:
        raise refusal("a class in a regular expression has no end")
    return "".join(atoms) + (_BY_GRAMMAR if in_json and not _has_right_automaton(atoms) else "")


def _check_bounds(bounds: re.Match[str]) -> None:
    """Raise InvalidRequest for a number of repetitions that xgrammar can't count to, and for a
    range of numbers that is reversed."""
    numbers = [digits.lstrip("0") for digits in bounds.groups() if digits]
    if any(len(digits) > len(str(MAX_COUNT)) or int(digits or 0) > MAX_COUNT for digits in numbers):
        raise refusal(f"a regular expression repeats something more than {MAX_COUNT} times")
    if len(numbers) == 2 and int(numbers[0] or 0) > int(numbers[1] or 0):
        raise refusal(f"{bounds[0]} in a regular expression has its bounds reversed")


def _has_right_automaton(atoms: list[str]) -> bool:
    """Whether xgrammar's automaton for a pattern allows what the pattern does. Tens of thousands of
    random patterns have shown where it may not: where there is `|`, or where a pattern with groups
    has a group with `?` or anything with a number of repetitions. Groups with names have not been
    tried."""
    if any(atom.startswith(("|", "[^", "(?")) for atom in atoms):
        return False
    return "(" not in atoms or ("{" not in atoms and (")", "?") not in pairwise(atoms))


def _without_code(atom: str) -> str:
    """The same atom. A character that is written as its code becomes the character itself, where
    xgrammar takes that: it would read the letters and digits that follow as more of the code. A
    backslash that does nothing is left out: xgrammar would log a warning of it."""
    if _NEEDLESS_ESCAPE.fullmatch(atom):
        return atom[1]
    if _CODE.fullmatch(atom) is None:
        return atom
    char = _char(atom)
    if char == "\0" or "\ud800" <= char <= "\udfff":
        return atom
    if char in "\t\n\r":
        return repr(char)[1:-1]
    return f"\\{char}" if char in r"\^$.|?*+()[]{}-" else char


def _class_of(members: list[str]) -> str:
    """A class with these members. A caret at its beginning is moved to the end: xgrammar takes even
    an escaped one for the sign that negates the class."""
    if members == [r"\^"]:
        return r"\^"
    if members[:1] == [r"\^"]:
        is_range = members[1].startswith("-")
        members = [*(["_"] if is_range else []), *members[1:], r"\^"]
    return f"[{''.join(members)}]"


def _members(atoms: list[str], in_json: bool = False) -> list[str]:
    """The members of a class, in a JSON string without those that JSON must escape. A hyphen that
    makes no range, such as one beside `\\w`, stands for itself and is escaped."""
    members: list[str] = []
    n = 0
    while n < len(atoms):
        ends = atoms[n : n + 3 : 2]
        if atoms[n + 1 : n + 2] == ["-"] and len(ends) == 2 and not any(map(_SET.fullmatch, ends)):
            low, high = map(_char, ends)
            if low > high:
                message = f"the range from {low!r} to {high!r} in a regular expression is reversed"
                raise refusal(message)
            gaps = _GAPS if in_json else _GAP_OF_SURROGATES
            around = [gap for char, gap in gaps.items() if low < char < high]
            members += [ends[0], "-".join(["", *around, ""]), ends[1]]
            n += 3
        else:
            atom = r"\-" if atoms[n] == "-" else atoms[n]
            members.append((_CLASSES_IN_JSON if in_json else _CLASSES).get(atom, atom))
            n += 1
    return members


def _needs_escape(atom: str) -> bool:
    """Whether an atom of a regular expression is a character that JSON strings must escape."""
    char = _char(atom)
    return char < " " or char in '"\\'


def _char(atom: str) -> str:
    """The character that an atom of a regular expression stands for."""
    code = _CODE.fullmatch(atom)
    if code is not None:
        return chr(int(code[1], 16))
    if atom[0] == "\\":
        return chr(ord(atom[2]) % 32) if atom[1] == "c" else _CONTROLS.get(atom[1], atom[1])
    return atom

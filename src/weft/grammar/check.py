"""The limits of a form. They are checked before anything else is done with it, in time that is
linear in its length."""

from __future__ import annotations

import json
import re
from typing import Any

from weft.core.sampling import StructuredOutputs
from weft.grammar.regex import check_repeats, naming_around, refusal

MAX_BYTES = 64 * 1024
"""The most bytes that the texts of one form may have together."""
MAX_DEPTH = 128
"""How deep brackets in JSON may be nested; xgrammar bounds other forms itself."""
MAX_CHOICES = 4096
_JSON_STRING = re.compile(r'"(?:[^"\\]|\\.)*"?', re.DOTALL)
_BRACKET = re.compile(r"[\[\]{}]")


def check_form(form: StructuredOutputs) -> None:
    """Raise InvalidRequest for a form that is too large, or has invalid JSON."""
    if len(form.choice) > MAX_CHOICES:
        raise refusal(f"more than {MAX_CHOICES} choices")
    texts = [form.json, form.regex, form.grammar, form.structural_tag, *form.choice]
    _check_size(texts)
    if form.regex is not None:
        check_repeats(form.regex)
    for text in (form.json, form.structural_tag):
        if text is not None:
            parse(text)
    if form.around is not None:
        with naming_around():
            _check_size([*texts, form.around])
            parse(form.around)


def _check_size(texts: list[str | None]) -> None:
    try:
        num_bytes = sum(len(text.encode()) for text in texts if text)
    except UnicodeEncodeError as error:
        raise refusal(f"no text: {error}") from None
    if num_bytes > MAX_BYTES:
        raise refusal(f"more than {MAX_BYTES} bytes")


def parse(text: str) -> Any:
    """JSON of bounded depth. Raises InvalidRequest."""
    depth = deepest = 0
    for bracket in _BRACKET.findall(_JSON_STRING.sub("", text)):
        depth += 1 if bracket in "[{" else -1
        deepest = max(deepest, depth)
    if deepest > MAX_DEPTH:
        raise refusal(f"nested deeper than {MAX_DEPTH} levels")
    try:
        return json.loads(text, parse_constant=_no_constant)
    except ValueError as error:
        raise refusal(f"invalid JSON: {error}") from error


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no number")

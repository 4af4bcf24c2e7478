"""Compiles forms with xgrammar."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from weft.core.errors import WeftError
from weft.core.sampling import StructuredOutputs
from weft.grammar.check import parse
from weft.grammar.matcher import GrammarMatcher
from weft.grammar.regex import enforceable_regex, naming_around, refusal
from weft.grammar.schema import enforceable
from weft.grammar.vocabulary import Vocabulary

_LOG_PREFIX = re.compile(r"^\[[\d:]+\] \S+:\d+: |Check failed: .*? is false: ")
_BOUNDED = r"[^\"\\\r\n]"
"""xgrammar's class for the characters of a string with minLength or maxLength. It allows control
characters, which JSON does not, and no escapes, which texts need."""
_UNBOUNDED = r"[^\0-\u001f\"\\\r\n]"
"""The same for other strings. It allows surrogates, which are no text."""
_CHARACTER = (
    r'character ::= ([^\0-\x1f\"\\\uD800-\uDFFF] | "\\" [\"\\/bfnrt] | "\\u00" [01] [0-9a-f])'
)
_BYTE = re.compile(r"(\\\\)|\\x([0-9a-f]{2})")
"""A character that xgrammar writes by two digits, or an escaped backslash. It reads more digits
where more follow: \\xdfe as one character, and not as "ße"."""

_INSTEAD = "give a tool_choice that is not 'auto'"


def refusal_of(error: Exception) -> WeftError:
    """The error to refuse a form with, from what xgrammar raised for it."""
    if isinstance(error, WeftError):
        return error
    reason = " ".join(_LOG_PREFIX.sub("", str(error)).split())
    if isinstance(error, MemoryError) or "bad_alloc" in reason:
        reason = "compiling it takes more memory than it may have"
    return refusal(reason[:300])


class Limits(NamedTuple):
    """Limits of the process that compiles one form."""

    cpu_s: float = 10.0
    """Its CPU time in seconds."""
    wall_s: float = 60.0
    """Its time by the clock, which is longer on a busy machine."""
    memory_bytes: int = 1 << 30
    """The bytes that it may allocate beyond what it was forked with."""


class Compiler:
    """Compiles forms for one vocabulary. Safe to use from several threads."""

    def __init__(self, vocabulary: Vocabulary, num_threads: int) -> None:
        """Raises InvalidRequest if xgrammar is not installed."""
        try:
            import xgrammar
        except ImportError as error:
            raise refusal("this server lacks a package for it: pip install xgrammar") from error
        self._xgrammar = xgrammar
        self.vocabulary = vocabulary
        info = xgrammar.TokenizerInfo(
            list(vocabulary.spelled),
            xgrammar.VocabType.RAW,
            vocab_size=vocabulary.size,
            stop_token_ids=list(vocabulary.eos_ids),
        )
        self._info = info
        self._compiler = xgrammar.GrammarCompiler(
            info, max_threads=num_threads, cache_enabled=False
        )

    def compile(self, form: StructuredOutputs) -> Any:
        """Compile a form, regardless of where in an output it begins. Raises InvalidRequest, which
        says in one line what is wrong."""
        compiled = self._compile_whole(replace(form, around=None))
        if form.around is None:
            return compiled
        if form.structural_tag is not None:
            raise refusal(f"a structural tag can't be told apart from calls of tools; {_INSTEAD}")
        for text in form.never_first:
            if self._may_begin(compiled, text):
                message = f"a text of this form may begin with {text!r}, as a call of a tool does"
                raise refusal(f"{message}; {_INSTEAD}")
        with naming_around():
            return self._compile_whole(form)

    def revive(self, text: str) -> Any:
        """Read a compiled form that another process has written as text."""
        return self._xgrammar.CompiledGrammar.deserialize_json(text, self._info)

    def matcher(
        self,
        compiled: Any,
        spec: StructuredOutputs | None = None,
        on_costly: Callable[[WeftError], None] | None = None,
    ) -> GrammarMatcher:
        """A new matcher; see `GrammarMatcher`. `spec` says where in the output the form begins
        (None: at once). Raises InvalidRequest."""
        marks = (None, None) if spec is None else (spec.reasoning_token, spec.begin_after_token)
        for mark in marks:
            if mark is not None and not self._can_come_before(mark):
                raise refusal(f"token {mark} can't come before the form")
        state = self._xgrammar.GrammarMatcher(compiled)
        return GrammarMatcher(state, *marks, self.vocabulary, on_costly)

    def _can_come_before(self, token_id: int) -> bool:
        return 0 <= token_id < self.vocabulary.size and bool(self.vocabulary.spelled[token_id])

    def _allows_anything(self, compiled: Any) -> bool:
        words = np.zeros_like(self.vocabulary.eos)
        self._xgrammar.GrammarMatcher(compiled).fill_next_token_bitmask(words)
        return bool(words.any())

    def _may_begin(self, compiled: Any, text: str) -> bool:
        """Whether an output may begin with a text, or with the special token of that name."""
        token_id = self.vocabulary.id_of_special.get(text)
        matcher = self._xgrammar.GrammarMatcher(compiled)
        if token_id is not None and matcher.accept_token(token_id):
            return True
        return bool(self._xgrammar.GrammarMatcher(compiled).accept_string(text))

    def _compile_whole(self, spec: StructuredOutputs) -> Any:
        try:
            compiled = self._compile(spec)
        except Exception as error:  # of the many kinds that xgrammar raises
            raise refusal_of(error) from error
        if not self._allows_anything(compiled):
            raise refusal("no output has this form")
        return compiled

    def _compile(self, spec: StructuredOutputs) -> Any:
        if spec.around is not None:
            tag = self._tag(parse(spec.around), _as_part(spec))
            return self._compiler.compile_structural_tag(json.dumps(tag))
        if spec.json is not None:
            return self._compiler.compile_grammar(self._json_grammar(parse(spec.json)))
        if spec.json_object:
            return self._compiler.compile_grammar(self._json_grammar({"type": "object"}))
        if spec.regex is not None:
            return self._compiler.compile_regex(enforceable_regex(spec.regex))
        if spec.grammar is not None:
            return self._compiler.compile_grammar(spec.grammar)
        if spec.structural_tag is not None:
            tag = _in_newer_form(parse(spec.structural_tag))
        else:
            tag = {"type": "structural_tag", "format": _as_part(spec)}
        return self._compiler.compile_structural_tag(json.dumps(self._tag(tag)))

    def _json_grammar(self, schema: object) -> str:
        """JSON without white space between its parts: else weak models may write little but
        that."""
        text = json.dumps(enforceable(schema), ensure_ascii=False)
        grammar = self._xgrammar.Grammar.from_json_schema(
            text, any_whitespace=False, separators=(",", ":")
        )
        rules = _BYTE.sub(lambda found: found[1] or rf"\u00{found[2]}", str(grammar))
        rules = rules.replace(_UNBOUNDED, r"[^\0-\x1f\"\\\uD800-\uDFFF]")
        return f"{rules.replace(_BOUNDED, 'character')}\n{_CHARACTER}"

    def _tag(self, tag: Any, form: Any = None) -> Any:
        """A structural tag, or a part of one, with its schemas made enforceable, and with `form` in
        its place."""
        if isinstance(tag, list):
            return [self._tag(part, form) for part in tag]
        if not isinstance(tag, dict):
            return tag
        kind = tag.get("type")
        if kind is None and isinstance(tag.get("mark"), str):
            return self._mark(tag["mark"])
        if kind == "form" and form is not None:
            return self._tag(form)
        if kind == "json_schema":
            for key in sorted(tag.keys() - {"type", "json_schema"}):
                if (key, tag[key]) != ("style", "json"):
                    raise refusal(f"{key!r} of a json_schema in a structural tag is not supported")
            return {"type": "grammar", "grammar": self._json_grammar(tag.get("json_schema"))}
        if kind == "regex" and isinstance(tag.get("pattern"), str):
            return {**tag, "pattern": enforceable_regex(tag["pattern"])}
        if kind == "token" and isinstance(tag.get("token"), str):
            return {**tag, "token": self._token_id(tag["token"])}
        if kind == "qwen_xml_parameter":
            raise refusal("'qwen_xml_parameter' in a structural tag is not supported")
        made = {key: self._tag(value, form) for key, value in tag.items()}
        if kind == "tag":  # its ends are texts or tokens
            for key in ("begin", "end"):
                end = made.get(key)
                made[key] = end.get("value", end) if isinstance(end, dict) else end
        return made

    def _mark(self, mark: str) -> dict[str, Any]:
        """A mark of calls, which is a special token of some tokenizers and text for others."""
        token_id = self.vocabulary.id_of_special.get(mark)
        if token_id is None:
            return {"type": "const_string", "value": mark}
        return {"type": "token", "token": token_id}

    def _token_id(self, name: str) -> int:
        token_id = self.vocabulary.id_of_special.get(name)
        if token_id is None:
            raise refusal(f"the tokenizer has no special token {name[:80]!r}")
        return token_id


def _in_newer_form(tag: Any) -> Any:
    """A structural tag whose older form, with `structures` and `triggers`, xgrammar no longer
    reads."""
    if not isinstance(tag, dict) or not isinstance(tag.get("structures"), list):
        return tag
    tags = [
        {
            "type": "tag",
            "begin": each.get("begin"),
            "content": {"type": "json_schema", "json_schema": each.get("schema", True)},
            "end": each.get("end"),
        }
        for each in tag["structures"]
        if isinstance(each, dict)
    ]
    return {
        "type": "structural_tag",
        "format": {"type": "triggered_tags", "triggers": tag.get("triggers"), "tags": tags},
    }


def _as_part(spec: StructuredOutputs) -> dict[str, Any]:
    """A form as a part of a structural tag."""
    if spec.json is not None:
        return {"type": "json_schema", "json_schema": parse(spec.json)}
    if spec.json_object:
        return {"type": "json_schema", "json_schema": {"type": "object"}}
    if spec.regex is not None:
        return {"type": "regex", "pattern": spec.regex}
    if spec.grammar is not None:
        return {"type": "grammar", "grammar": spec.grammar}
    choices = [{"type": "const_string", "value": choice} for choice in spec.choice]
    return {"type": "or", "elements": choices}

"""Structured outputs: whatever a model prefers, its output has the form that was asked for.

The model is a random walk over the tokens that the mask allows.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
import signal
import threading
from collections.abc import Iterator
from typing import Any

import jsonschema
import numpy as np
import pytest
from dealing import deal
from patience import PATIENCE_S, wait_until
from tiny import BASE
from tokenizers import AddedToken
from toy_tokenizers import byte_level, sentencepiece
from transformers import AutoTokenizer

from weft.core.errors import InvalidRequest, Overloaded, WeftError
from weft.core.sampling import StructuredOutputs
from weft.core.tenants import Caps, Tenant
from weft.grammar import grammars as grammar
from weft.grammar import matcher as matcher_module
from weft.grammar.compiler import Limits
from weft.grammar.fork_server import FormAnswer
from weft.grammar.grammars import Grammars
from weft.grammar.matcher import GrammarMatcher
from weft.grammar.processes import CompilerProcesses
from weft.grammar.vocabulary import Vocabulary
from weft.text import Tokenizer, load_tokenizer
from weft.text.calls.forms import schemas_of, tools_schema
from weft.text.calls_or_text import EitherParser, begins_of_calls, calls_or
from weft.text.chat_parser import ChatParser
from weft.text.harmony import HarmonyParser
from weft.text.tools import TOOL_FORMATS

PADDING = 50
"""Rows that the model has beyond the tokenizer's vocabulary."""


class Bench:
    """Grammars over one tokenizer, and a model that writes at random."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self.tokenizer = tokenizer
        self._woken = threading.Event()
        self.vocab_size = (tokenizer.vocab_size if tokenizer else 10) + PADDING
        self.eos = tokenizer.eos_ids[0] if tokenizer else 0
        self.grammars = Grammars(
            lambda: tokenizer, self.vocab_size, [self.eos, 10**9], self._woken.set
        )

    def compile(self, spec: StructuredOutputs) -> GrammarMatcher:
        self.grammars.start("r", spec)
        [(request_id, outcome)] = self.wait()
        assert request_id == "r"
        if isinstance(outcome, WeftError):
            raise outcome
        return outcome

    def wait(self, num_outcomes: int = 1) -> list[tuple[str, GrammarMatcher | WeftError]]:
        outcomes: list[tuple[str, GrammarMatcher | WeftError]] = []
        while len(outcomes) < num_outcomes:
            assert self._woken.wait(PATIENCE_S)
            self._woken.clear()
            outcomes += self.grammars.poll()
        return outcomes

    def allowed(self, matcher: GrammarMatcher) -> list[int]:
        words = np.full(-(-self.vocab_size // 32), -1, dtype=np.int32)
        matcher.fill(words)
        bits = np.unpackbits(words.view(np.uint8), bitorder="little")
        return [int(i) for i in np.flatnonzero(bits)]

    def write(
        self, matcher: GrammarMatcher, rng: random.Random, num_tokens: int = 400
    ) -> list[int]:
        """The tokens of a random walk up to EOS, or `num_tokens` of one that doesn't end."""
        ids: list[int] = []
        while len(ids) < num_tokens:
            allowed = self.allowed(matcher)
            ends = self.eos in allowed and rng.random() < 0.5
            ids.append(self.eos if ends else rng.choice(allowed))
            matcher.accept(ids[-1])
            if ids[-1] == self.eos:
                break
        return ids

    def texts(self, spec: StructuredOutputs, num: int) -> Iterator[str]:
        """Outputs that ended."""
        assert self.tokenizer is not None
        for seed in range(num):
            ids = self.write(self.compile(spec), random.Random(seed))
            if ids[-1] == self.eos:
                yield self.tokenizer.decode(ids[:-1])


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    made = Bench(load_tokenizer(str(BASE)))
    yield made
    made.grammars.close()


def json_form(schema: Any, **fields: Any) -> StructuredOutputs:
    return StructuredOutputs(json=json.dumps(schema), **fields)


def refusal(bench: Bench, spec: StructuredOutputs) -> str:
    with pytest.raises(InvalidRequest) as caught:
        bench.compile(spec)
    assert caught.value.param == "structured_outputs"
    assert "\n" not in caught.value.message and "/project/" not in caught.value.message
    return caught.value.message


SCHEMAS: list[Any] = [
    {"type": "integer"},
    {"type": "integer", "minimum": -7, "maximum": 1200},
    {"type": "integer", "exclusiveMinimum": 5},
    {"type": "integer", "multipleOf": 7},
    {"type": "number", "minimum": 1.5, "maximum": 2.25},
    {"type": "number", "exclusiveMaximum": -3},
    {"minimum": 5},
    {"type": "string", "minLength": 2, "maxLength": 4},
    {"type": "string", "pattern": r"^[a-c]+-\d{2}.$"},
    {"type": "string", "pattern": r'x[^"a]{0,3}\S\D'},
    *({"type": "string", "pattern": p} for p in ("^5(x[0-9]+)?Z$", "^(5|(5){0,2})$")),
    {"type": "string", "pattern": r"^é[\s\S][\D!-~][ -\uffff].[^aé]\s$"},
    {"type": "object", "patternProperties": {"^(ab+)?[ -~]$": {"const": 1}}},
    *({"type": "string", "format": f} for f in ("json-pointer", "relative-json-pointer")),
    *({"type": "string", "format": f} for f in ("date", "ipv4", "ipv6", "uuid", "email")),
    *({"type": "string", "format": f} for f in ("time", "date-time", "duration", "hostname")),
    {"const": {"a": [1, 'é\n"', None]}},
    {"enum": ["Straße", "éa", "\x7fa", "\u2028a", "😀a", "\\xe9", "\\éa"]},
    {"type": ["string", "null"], "enum": ["a", 1, None, 'q"']},
    {"type": "array", "minItems": 1, "maxItems": 3, "items": {"enum": ["x", 2.5]}},
    {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "boolean"}], "minItems": 2},
    {"type": "array", "maxItems": 2, "uniqueItems": False},
    {"type": "array", "unevaluatedItems": False, "prefixItems": [{"enum": [1, 2, 3]}]},
    {"anyOf": [{"type": "array", "unevaluatedItems": False}, {"enum": [1, 2, 3]}]},
    {"anyOf": [{"type": "object", "unevaluatedProperties": False}, {"enum": [1, 2, 3]}]},
    {"type": "object"},
    {"type": "object", "maxProperties": 2, "minProperties": 1},
    {
        "type": "object",
        "title": "annotations don't matter",
        "properties": {
            "a": {"type": "string", "maxLength": 3, "description": "x", "default": ""},
            'k"\n\\éa': {"type": "integer"},
            "c": {"type": ["boolean", "null"]},
        },
        "required": ['k"\n\\éa'],
        "additionalProperties": False,
    },
    {
        "properties": {"a": {"type": "null"}, "b": {}, "c": {"type": "null"}},
        "minProperties": 1,
        "maxProperties": 2,
    },
    {"type": "object", "properties": {"a": {}}, "additionalProperties": {"type": "integer"}},
    {"type": "object", "patternProperties": {"^x[0-9]$": {"type": "integer"}}},
    {"oneOf": [{"type": "string", "maxLength": 3}, {"type": "integer"}]},
    {
        "oneOf": [{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog"}],
        "discriminator": {"propertyName": "kind"},
        "$defs": {
            name: {
                "type": "object",
                "properties": {"kind": {"const": name}, "n": {"type": "integer"}},
                "required": ["kind"],
            }
            for name in ("cat", "dog")
        },
    },
    {
        "anyOf": [{"$ref": "#/definitions/node"}, {"type": "null"}],
        "definitions": {
            "node": {
                "type": "object",
                "properties": {"next": {"anyOf": [{"$ref": "#"}, {"type": "integer"}]}},
            }
        },
    },
    {"allOf": [{"type": "boolean"}]},
    True,
]


@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda s: json.dumps(s)[:60])
def test_json_satisfies_its_schema(bench: Bench, schema: Any) -> None:
    checker = jsonschema.Draft202012Validator(
        schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER
    )
    texts = list(bench.texts(json_form(schema), 12))
    assert len(texts) >= 4
    for text in texts:
        checker.validate(json.loads(text))


@pytest.mark.parametrize(("least", "most", "num"), [(30, 40, 10), (0, 1, 200), (1, 1, 200)])
def test_a_string_of_bounded_length_may_hold_escapes(
    bench: Bench, least: int, most: int, num: int
) -> None:
    schema = {"type": "string", "minLength": least, "maxLength": most}
    texts = list(bench.texts(json_form(schema), num))
    assert any("\\" in text for text in texts)
    assert all(least <= len(json.loads(text)) <= most for text in texts)


UNENFORCED: list[tuple[str, Any]] = [
    ("pattern", {"type": "string", "format": "date", "pattern": "a"}),
    ("minLength", {"type": "string", "pattern": "a", "minLength": 3}),
    ("maxLength", {"type": "string", "format": "email", "maxLength": 3}),
    ("iri", {"type": "string", "format": "iri"}),
    ("JSON escapes", {"type": "string", "pattern": '^"$'}),
    ("JSON escapes", {"type": "string", "pattern": r"a\x0a"}),
    ("backslash", {"type": "string", "pattern": "a\\"}),
    ("no end", {"type": "string", "pattern": "a[b"}),
    ("multipleOf", {"type": "number", "multipleOf": 0.5}),
    ("multipleOf", {"type": "integer", "multipleOf": 4096}),
    ("minimum", {"type": "integer", "multipleOf": 3, "minimum": 4}),
    ("uniqueItems", {"type": "array", "uniqueItems": True}),
    ("contains", {"type": "array", "contains": {"const": 5}}),
    ("contains", {"contains": {"const": 5}}),
    ("contains", {"type": "array", "contains": False}),
    ("propertyNames", {"type": "object", "propertyNames": False}),
    ("schema must be", {"type": "array", "items": [{"type": "integer"}]}),
    ("propertyNames", {"type": "object", "propertyNames": {"pattern": "a"}}),
    ("dependentRequired", {"type": "object", "dependentRequired": {"a": ["b"]}}),
    ("patternProperties", {"patternProperties": {"^a": {}, "^b": {}}}),
    ("minProperties", {"type": "object", "minProperties": 2}),
    ("'b'", {"type": "object", "properties": {"a": {}}, "required": ["b"]}),
    ("if", {"if": {"type": "string"}, "then": {"minLength": 3}}),
    ("not", {"not": {"type": "string"}}),
    ("allOf", {"allOf": [{"type": "integer"}, {"minimum": 3}]}),
    ("minimum", {"anyOf": [{"type": "integer"}], "minimum": 3}),
    ("required", {"$ref": "#/$defs/a", "$defs": {"a": {"type": "object"}}, "required": ["x"]}),
    ("oneOf", {"oneOf": [{"type": "integer"}, {"type": "number"}]}),
    ("oneOf", {"oneOf": [{"$ref": "#/$defs/a"}, {"type": "null"}], "$defs": {"a": {}}}),
    ("$ref", {"$ref": "https://example.com/schema"}),
    ("$ref", {"$ref": "#/properties/a", "properties": {"a": {"not": {}}}}),
    ("common", {"type": "string", "const": 1}),
    ("2**53", {"const": 2**60}),
    ("foo", {"type": "foo"}),
    ("not", {"type": "object", "properties": {"a": {"items": {"not": {}}}}}),
    ("not", {"$ref": "#/$defs/a", "$defs": {"a": {"not": {}}}}),
    ("maxItems", {"type": "array", "maxItems": "3"}),
    ("maximum", {"type": "integer", "maximum": True}),
    ("properties", {"type": "object", "properties": 5}),
    ("anyOf", {"anyOf": []}),
    ("false", {"type": "object", "properties": {"a": False}}),
    ("schema", 5),
]


@pytest.mark.parametrize(("name", "schema"), UNENFORCED, ids=lambda s: json.dumps(s)[:60])
def test_what_would_not_be_enforced_is_refused_by_name(
    bench: Bench, name: str, schema: Any
) -> None:
    assert name.lower() in refusal(bench, json_form(schema)).lower()


PATTERNS = [r"a.{3}b", r"[a-z]{2,4}\d+", "", "a|bc|", r"(\w+ )*[^a]", r"^x\.y$", r"[.^$]\["]
PATTERNS += [r"\u00e9+?", r"[\^ab]{3}", r"[\^][\^-a]", r"[\xe9ab]{3}", r"\xe9a\x1fb[^\x1fa]"]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_regex(bench: Bench, pattern: str) -> None:
    for text in bench.texts(StructuredOutputs(regex=pattern), 20):
        assert re.fullmatch(pattern, text, re.ASCII), text


@pytest.mark.parametrize("pattern", ["[^a]", r"\D", r"[\s\S]", r"[\W\d]{2}", "[ -~]", r"[\^1]"])
def test_a_pattern_leaves_what_it_names(bench: Bench, pattern: str) -> None:
    assert bench.tokenizer is not None
    quote, *rest = bench.tokenizer.encode('"1^~', add_special_tokens=False)
    matcher = bench.compile(json_form({"type": "string", "pattern": pattern}))
    matcher.accept(quote)
    named = [i for i in rest if re.match(pattern, bench.tokenizer.decode([i] * 2))]
    assert named and set(named) <= set(bench.allowed(matcher))


@pytest.mark.parametrize("pattern", [r"([\w-\.]+@)?x", r"[\w-\.]", r"[\s-_]{2}"])
def test_a_hyphen_beside_a_class_is_one(bench: Bench, pattern: str) -> None:
    meant = re.sub(r"-(.\]|\\.\])", r"\-\1", pattern)
    for text in bench.texts(StructuredOutputs(regex=pattern), 10):
        assert re.fullmatch(meant, text), text
    for text in bench.texts(json_form({"type": "string", "pattern": pattern}), 10):
        assert re.fullmatch(meant, json.loads(text)), text


def test_a_group_may_have_a_name(bench: Bench) -> None:
    pattern = "(?P<a>b|c)d"
    assert {*bench.texts(StructuredOutputs(regex=pattern), 20)} == {"bd", "cd"}
    assert {*bench.texts(json_form({"pattern": pattern}), 20)} == {'"bd"', '"cd"'}


def test_choice(bench: Bench) -> None:
    choices = ("yes", "no", 'q"\\\n\té', "yesterday", "")
    assert {*bench.texts(StructuredOutputs(choice=choices), 60)} == {*choices}


def test_json_object(bench: Bench) -> None:
    for text in bench.texts(StructuredOutputs(json_object=True), 20):
        assert isinstance(json.loads(text), dict)


def test_grammar(bench: Bench) -> None:
    spec = StructuredOutputs(grammar='root ::= "(" root ")" | "x" root | "."')
    for text in bench.texts(spec, 20):
        assert re.fullmatch(r"[(x]*\.\)*", text) and text.count("(") == text.count(")")


def tag(format_: dict[str, Any]) -> StructuredOutputs:
    return StructuredOutputs(
        structural_tag=json.dumps({"type": "structural_tag", "format": format_})
    )


def test_structural_tag(bench: Bench) -> None:
    schema = {"type": "string", "minLength": 1, "maxLength": 2}
    elements: list[dict[str, Any]] = [
        {"type": "token", "token": "<|user|>"},
        {"type": "json_schema", "json_schema": schema},
        {"type": "regex", "pattern": "-.-"},
    ]
    texts = list(bench.texts(tag({"type": "sequence", "elements": elements}), 10))
    assert texts
    for text in texts:
        found = re.fullmatch(r'<\|user\|>(".*")-.-', text)
        assert found and 1 <= len(json.loads(found[1])) <= 2


def test_a_structural_tag_in_its_older_form(bench: Bench) -> None:
    part = {"begin": "<f>", "schema": {"enum": ["a", "b"]}, "end": "</f>"}
    old = {"type": "structural_tag", "structures": [part], "triggers": ["<f"]}
    assert bench.tokenizer is not None
    matcher = bench.compile(StructuredOutputs(structural_tag=json.dumps(old)))
    for token_id in bench.tokenizer.encode('x<f>"'):
        matcher.accept(token_id)
    assert [bench.tokenizer.decode([i]) for i in bench.allowed(matcher)] == ["a", "b"]


@pytest.mark.parametrize(
    ("problem", "spec"),
    [
        ("invalid JSON", StructuredOutputs(json="{")),
        ("NaN", StructuredOutputs(json='{"const": NaN}')),
        ("bytes", StructuredOutputs(json=f'{{"title": "{"é" * 40_000}"}}')),
        ("bytes", StructuredOutputs(choice=("x" * 40_000, "y" * 40_000))),
        ("choices", StructuredOutputs(choice=tuple(map(str, range(5000))))),
        ("repetitions", StructuredOutputs(regex="a?" * 9000 + "a" * 9000)),
        ("repetitions", json_form({"pattern": "a?" * 9000})),
        ("deeper", StructuredOutputs(json='{"items":' * 5000 + "true" + "}" * 5000)),
        ("deeper", tag({"x": json.loads("[" * 200 + "]" * 200)})),
        ("parenthesis", StructuredOutputs(regex="(a")),
        ("(?=", StructuredOutputs(regex="(?=a)b")),
        ("(?<!", json_form({"pattern": "(?<!a)b"})),
        ("(?!", json_form({"pattern": "(?!a)b"})),
        ("(?i", StructuredOutputs(regex="(?i)a")),
        ("repeat", StructuredOutputs(regex="a|*")),
        ("{3,2}", StructuredOutputs(regex="a{3,2}")),
        ("{10,9}", json_form({"pattern": "a{10,9}?"})),
        ("2147483647 times", StructuredOutputs(regex="a{4294967298}")),
        ("2147483647 times", json_form({"pattern": f"a{{2,{'9' * 5000}}}"})),
        ("from 'z' to 'a'", StructuredOutputs(regex="[z-a]")),
        (r"from '\r' to '\n'", StructuredOutputs(regex=r"[^\r-\n]")),
        ("from 'B' to 'A'", json_form({"pattern": r"[\x42-\x41]"})),
        ("null", StructuredOutputs(regex="a\0")),
        (r"\012", StructuredOutputs(regex=r"\012")),
        ("surrogate", StructuredOutputs(regex=r"\ud800")),
        ("surrogate", json_form({"pattern": r"[\ud800-\udfff]"})),
        ("Nest", StructuredOutputs(regex="(" * 5000 + "a" + ")" * 5000)),
        (r"\b", StructuredOutputs(regex=r"\ba\b")),
        (r"\Z", StructuredOutputs(regex=r"a\Z")),
        ("$ inside", StructuredOutputs(regex="a$b")),
        ("root", StructuredOutputs(grammar='a ::= "x"')),
        ("not defined", StructuredOutputs(grammar="root ::= foo")),
        ("no output", StructuredOutputs(grammar="root ::= root")),
        ("no output", json_form({"$ref": "#"})),
        ("format", StructuredOutputs(structural_tag="{}")),
        ("<none>", tag({"type": "token", "token": "<none>"})),
        ("not", tag({"type": "json_schema", "json_schema": {"not": {}}})),
        ("any_order", tag({"type": "json_schema", "json_schema": {}, "any_order": True})),
        ("token", StructuredOutputs(json_object=True, begin_after_token=10**6)),
        ("token", StructuredOutputs(json_object=True, begin_after_token=1, reasoning_token=-1)),
    ],
)
def test_invalid_forms_are_refused_in_one_line(
    bench: Bench, problem: str, spec: StructuredOutputs
) -> None:
    assert problem in refusal(bench, spec)


def test_the_form_binds_after_a_token(bench: Bench) -> None:
    assert bench.tokenizer is not None
    [end] = bench.tokenizer.encode("|", add_special_tokens=False)
    matcher = bench.compile(StructuredOutputs(choice=("ab",), begin_after_token=end))
    for text in ("some reasoning", ""):
        for token in bench.tokenizer.encode(text, add_special_tokens=False):
            matcher.accept(token)
        before = bench.allowed(matcher)
        assert before == [i for i in range(bench.tokenizer.vocab_size) if i != bench.eos]
    matcher.accept(end)
    ids = bench.write(matcher, random.Random(0))
    assert bench.tokenizer.decode(ids[:-1]) == "ab"


def test_an_output_without_reasoning_has_the_form_from_its_beginning(bench: Bench) -> None:
    assert bench.tokenizer is not None
    begin, end, other = bench.tokenizer.encode("<|x", add_special_tokens=False)
    form = StructuredOutputs(choice=("ab",), begin_after_token=end, reasoning_token=begin)
    at_once = bench.allowed(bench.compile(StructuredOutputs(choice=("ab",))))
    matcher = bench.compile(form)
    assert bench.allowed(matcher) == sorted({begin, *at_once})
    for token in (begin, other, begin):
        matcher.accept(token)
        assert len(bench.allowed(matcher)) == bench.tokenizer.vocab_size - 1, "all but EOS"
    matcher.accept(end)
    assert bench.allowed(matcher) == at_once
    matcher = bench.compile(form)
    matcher.accept(at_once[0])
    assert not {begin, end, other, bench.eos}.intersection(bench.allowed(matcher))


def test_after_its_end_only_eos_is_allowed(bench: Bench) -> None:
    matcher = bench.compile(StructuredOutputs(choice=("a",)))
    bench.write(matcher, random.Random(0))
    assert bench.allowed(matcher) == [bench.eos]
    matcher.accept(bench.eos)
    assert bench.allowed(matcher) == [bench.eos]


def test_special_tokens_are_no_text(bench: Bench) -> None:
    assert bench.tokenizer is not None
    matcher = bench.compile(StructuredOutputs(regex="(.|\n)*"))
    assert not bench.tokenizer.special_ids.intersection(bench.allowed(matcher)) - {bench.eos}


def test_a_grammar_without_a_way_on_ends_its_request(bench: Bench) -> None:
    matcher = bench.compile(StructuredOutputs(grammar='root ::= "a" b\nb ::= b "c"'))
    with pytest.raises(InvalidRequest, match="nothing"):
        bench.write(matcher, random.Random(0))


def test_a_grammar_that_costs_too_much_ends_its_request(bench: Bench) -> None:
    matcher = bench.compile(StructuredOutputs(regex="(((a{1,1000}){1,1000}){1,1000})b"))
    with pytest.raises(InvalidRequest, match="ambiguous"):
        for _ in range(1000):
            bench.allowed(matcher)
            matcher.accept(bench.tokenizer.encode("a", False)[0])  # type: ignore[union-attr]


@pytest.mark.parametrize("make", [byte_level, sentencepiece])
def test_other_tokenizers(make: Any) -> None:
    made = Bench(make())
    spec = json_form({"type": "object", "properties": {"the 日": {"enum": ["hello", "é😀"]}}})
    texts = [json.loads(text) for text in made.texts(spec, 20)]
    made.grammars.close()
    assert {json.dumps(t) for t in texts} >= {"{}", json.dumps({"the 日": "é😀"})}


ANY_CHARACTER = [r"[\s\S]*", r"[\W\d]*", r"[\D1]*", r"[\u0100-\uffff]*", "[^a]*", r"\S*"]


def test_no_form_has_surrogates() -> None:
    """Which a model could write byte by byte, and which are no UTF-8."""
    bench = Bench(byte_level())
    tokens = {byte_level().token_bytes(i): i for i in range(byte_level().vocab_size)}
    strings = [{}, {"minLength": 1}, *({"pattern": pattern} for pattern in ANY_CHARACTER)]
    forms = [StructuredOutputs(regex=pattern) for pattern in ANY_CHARACTER]
    forms += [json_form({"type": "string", **more}) for more in strings]
    for form in forms:
        matcher = bench.compile(form)
        for byte in (b'"', b"\xed") if form.json else (b"\xed",):
            assert tokens[byte] in bench.allowed(matcher)
            matcher.accept(tokens[byte])
        allowed = bench.allowed(matcher)
        assert tokens[b"\x9f"] in allowed and tokens[b"\xa0"] not in allowed, form
    bench.grammars.close()


def test_what_a_server_lacks_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Bench(None)
    assert "needs a tokenizer" in refusal(made, StructuredOutputs(json_object=True))
    made.grammars.close()
    made = Bench(byte_level())
    monkeypatch.setitem(__import__("sys").modules, "xgrammar", None)
    assert "pip install xgrammar" in refusal(made, StructuredOutputs(json_object=True))
    made.grammars.close()
    grammars = Grammars(byte_level, 300, [], lambda: None)
    grammars.start("r", StructuredOutputs(json_object=True))
    while not (outcomes := grammars.poll()):
        pass
    assert "EOS" in str(outcomes[0][1])
    grammars.close()


def endless(number: int) -> StructuredOutputs:
    """A form whose compilation does not end in a test's time."""
    return StructuredOutputs(grammar="root ::= " + '"a"? ' * (6000 + number))


def test_compilations_that_do_not_end_harm_nobody(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar, "LIMITS", Limits(cpu_s=0.3))
    made = Bench(bench.tokenizer)
    names = [f"endless {n}" for n in range(5)]
    for n, name in enumerate(names):
        made.grammars.start(name, endless(n), "attacker")
    made.grammars.start("good", StructuredOutputs(regex="a"), "victim")
    outcomes = dict(made.wait(6))
    assert list(outcomes).index("good") < 5
    assert isinstance(outcomes.pop("good"), GrammarMatcher)
    assert all("more than 0.3 s" in str(error) for error in outcomes.values())
    made.compile(StructuredOutputs(regex="b"))
    made.grammars.close()
    wait_until(lambda: not any(thread.is_alive() for thread in made.grammars._threads))


def test_a_compilation_has_its_memory(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar, "LIMITS", Limits(memory_bytes=8 << 20))
    made = Bench(bench.tokenizer)
    assert "takes more memory" in refusal(made, endless(0))
    made.compile(StructuredOutputs(regex="a"))
    made.grammars.close()


def test_compilers_that_were_killed_are_replaced(bench: Bench) -> None:
    bench.compile(StructuredOutputs(regex="before"))
    assert bench.grammars._compilers is not None
    server = bench.grammars._compilers[1]._server._process
    server.kill()
    server.wait()
    bench.compile(StructuredOutputs(regex="after"))


def test_compilers_that_hang_are_seen(bench: Bench) -> None:
    bench.compile(StructuredOutputs(regex="before"))
    assert bench.grammars._compilers is not None
    server = bench.grammars._compilers[1]._server._process
    assert bench.grammars.stuck_s() == 0
    server.send_signal(signal.SIGSTOP)
    try:
        bench.grammars.start("stopped", StructuredOutputs(regex="during"))
        wait_until(lambda: bench.grammars.stuck_s() > 0.1)
    finally:
        server.send_signal(signal.SIGCONT)
    assert isinstance(dict(bench.wait(1))["stopped"], GrammarMatcher)
    wait_until(lambda: bench.grammars.stuck_s() == 0)


def test_a_form_is_compiled_once_for_all_who_ask(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[StructuredOutputs] = []
    compile_ = CompilerProcesses.compile

    def count(self: CompilerProcesses, form: StructuredOutputs) -> FormAnswer:
        compiled.append(form)
        return compile_(self, form)

    monkeypatch.setattr(CompilerProcesses, "compile", count)
    for n in range(128):
        tenant, form = str(n % 3), json_form({"title": "same", "type": "integer"})
        bench.grammars.start(str(n), form, tenant)
    matchers = dict(bench.wait(128)).values()
    assert len({id(matcher) for matcher in matchers}) == 128
    assert all(isinstance(matcher, GrammarMatcher) for matcher in matchers)
    bench.compile(json_form({"title": "same", "type": "integer"}))
    assert len(compiled) == 1


def test_masks_that_cost_too_much_are_refused_beforehand(bench: Bench) -> None:
    assert "ambiguous" in refusal(bench, StructuredOutputs(regex="(a|b)*?" * 400))


class SuddenlySlow:
    """In place of xgrammar's matcher: after the first token a mask takes until all is over."""

    def __init__(self) -> None:
        self.num_tokens = 0
        self.is_over = threading.Event()
        self.has_ended = False

    def fill_next_token_bitmask(self, words: np.ndarray) -> None:
        words[:] = -1
        if self.num_tokens:
            while not self.is_over.is_set():
                hashlib.pbkdf2_hmac("sha256", b"", b"", 4_000)
            self.has_ended = True

    def accept_token(self, token_id: int) -> bool:
        self.num_tokens += 1
        hashlib.pbkdf2_hmac("sha256", b"", b"", 4_000)
        return True

    def is_terminated(self) -> bool:
        return False


def test_a_mask_that_takes_long_holds_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matcher_module, "MASK_S", 0.05)
    vocabulary = Vocabulary([b"a", b"b", b""], [2])
    slow, costly = SuddenlySlow(), list[WeftError]()
    matcher = GrammarMatcher(slow, None, None, vocabulary, costly.append)
    words = np.full(1, -1, dtype=np.int32)
    matcher.fill(words)
    matcher.accept(0)
    matcher.fill(words)
    assert not slow.has_ended
    with pytest.raises(InvalidRequest, match="ambiguous"):
        matcher.accept(0)
    assert len(costly) == 1
    slow.is_over.set()


def test_a_tenant_has_so_many_forms_at_a_time(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    compile_, all_asked = CompilerProcesses.compile, threading.Event()

    def compile_late(self: CompilerProcesses, form: StructuredOutputs) -> FormAnswer:
        assert all_asked.wait(PATIENCE_S)
        return compile_(self, form)

    monkeypatch.setattr(CompilerProcesses, "compile", compile_late)
    bench.grammars.set_tenants([Tenant("small", caps=Caps(max_forms=2))])
    for n in range(4):
        bench.grammars.start(f"small {n}", StructuredOutputs(regex=f"small {n}"), "small")
        bench.grammars.start(f"other {n}", StructuredOutputs(regex=f"other {n}"), "other")
    all_asked.set()
    outcomes = dict(bench.wait(8))
    bench.grammars.set_tenants([])
    refused = [n for n in range(4) if isinstance(outcomes[f"small {n}"], Overloaded)]
    assert refused == [2, 3]
    assert all(isinstance(outcomes[f"other {n}"], GrammarMatcher) for n in range(4))


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {
                    "x": {"type": "integer"},
                    "s": {"type": "string", "maxLength": 9},
                    "e": {"type": "string", "enum": ["a", "b"]},
                },
                "required": ["x"],
            },
        },
    }
    for name in ("f", "g")
] + [{"type": "function", "function": {"name": "nothing"}}]


@pytest.fixture(scope="module")
def calling() -> Iterator[Bench]:
    """Over a tokenizer that has the marks of all formats of calls."""
    hf = AutoTokenizer.from_pretrained(BASE)
    marks = [mark for style in TOOL_FORMATS.values() for mark in style.marks]
    as_tokens = [mark for mark in marks if mark[:2] in ("<|", "[T")]
    for style in TOOL_FORMATS.values():
        as_tokens += style.marks if style.syntax == "gemma" else ()
    as_tokens += ["<|START_RESPONSE|>", "<|content|>", "<|eos|>"]
    special = [AddedToken(mark, special=True) for mark in dict.fromkeys(as_tokens)]
    hf.add_tokens(special, special_tokens=True)
    hf.eos_token = "<|eos|>"  # harmony ends thoughts with this model's own
    made = Bench(Tokenizer(hf))
    yield made
    made.grammars.close()


@pytest.mark.parametrize(("tool_format", "name"), deal(TOOL_FORMATS, [None, "g"]))
def test_a_required_call_is_made(calling: Bench, tool_format: str, name: str | None) -> None:
    texts = list(calling.texts(tools_schema(TOOLS, tool_format, name), 10))
    assert texts
    called = set()
    for text in texts:
        parser: ChatParser | HarmonyParser = HarmonyParser(reads_calls=True)
        if tool_format != "harmony":
            parser = ChatParser(tool_format, None, schemas=schemas_of(TOOLS))
        piece = parser.feed(text)
        assert (piece.content, parser.flush().content) == ("", "")
        calls: dict[int, list[str]] = {}
        for call in piece.tool_calls:
            calls.setdefault(call.index, [call.name or ""]).append(call.arguments)
        for name_called, *parts in calls.values():
            called.add(name_called)
            arguments = json.loads("".join(parts))
            assert arguments == {} if name_called == "nothing" else isinstance(arguments["x"], int)
            assert arguments.get("e", "a") in ("a", "b")
    assert called == ({"f", "g", "nothing"} if name is None else {"g"})


WITH_PLACE = {"$defs": {"place": {"type": "object", "properties": {"x": {"type": "integer"}}}}}
VALUES: list[dict[str, Any]] = [
    {"type": ["integer", "null"]},
    {"type": ["string", "null"], "maxLength": 3},
    {"anyOf": [{"type": "integer"}, {"type": "null"}]},
    {"type": "array", "items": {"type": ["boolean", "null"]}},
    {"$ref": "#/$defs/place"},
    {"enum": [1, "a", None]},
    {"type": "string", "const": "abc"},
    {"type": "string", "maxLength": 3},
]


@pytest.mark.parametrize(
    ("value", "tool_format"),
    deal(VALUES, ["qwen3_coder", "gemma4", "olmo3", "glm47", "minimax_m2"]),
)
def test_arguments_satisfy_their_schema_where_they_are_not_json(
    calling: Bench, tool_format: str, value: dict[str, Any]
) -> None:
    schema = {"type": "object", "properties": {"p": value}, "required": ["p"], **WITH_PLACE}
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    texts = list(calling.texts(tools_schema(tools, tool_format, "f"), 6))
    assert texts
    for text in texts:
        parser = ChatParser(tool_format, None, schemas=schemas_of(tools))
        calls = parser.flush(parser.feed(text)).tool_calls
        jsonschema.validate(json.loads("".join(c.arguments for c in calls if not c.index)), schema)


CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 9}, "x": {"type": "integer"}},
    "required": ["city", "x"],
}
FORMS = [
    (json_form(CITY), '{"city":"Ghent","x":3}'),
    (StructuredOutputs(regex="[0-9]{3}|<[a-z]+>"), "<tool>"),
    (StructuredOutputs(choice=("yes", "<tool>", "commentary")), "commentary"),
    (StructuredOutputs(grammar='root ::= "x" y\ny ::= "y" | "[" y "]"'), "x[[y]]"),
]
HEADS = {
    "cohere": "<|START_RESPONSE|>",
    "harmony": "<|channel|>final<|message|>",
    "solar_open": "<|content|>",
}


def allows(bench: Bench, spec: StructuredOutputs, ids: list[int]) -> bool:
    """Whether the output may be these tokens and nothing else."""
    matcher = bench.compile(spec)
    for token_id in [*ids, bench.eos]:
        if token_id not in bench.allowed(matcher):
            return False
        matcher.accept(token_id)
    return True


def said(tool_format: str, text: str) -> tuple[str, list[str]]:
    """The content of an answer that is either calls or text, and its calls' arguments."""
    parser: ChatParser | HarmonyParser = HarmonyParser(reads_calls=True, either=True)
    if tool_format != "harmony":
        begins = begins_of_calls(TOOLS, tool_format)
        parser = EitherParser(tool_format, None, False, schemas_of(TOOLS), begins)
    if tool_format != "harmony":
        text = text.removeprefix(HEADS.get(tool_format, ""))  # it does not show
    piece = parser.flush(parser.feed(text))
    calls: dict[int, str] = {}
    for call in piece.tool_calls:
        calls[call.index] = calls.get(call.index, "") + call.arguments
    return piece.content, list(calls.values())


@pytest.mark.parametrize(("tool_format", "form", "text"), deal(TOOL_FORMATS, FORMS))
def test_an_answer_is_either_calls_or_a_text_of_the_form(
    calling: Bench, tool_format: str, form: StructuredOutputs, text: str
) -> None:
    tokenizer = calling.tokenizer
    assert tokenizer is not None
    either = calls_or(form, TOOLS, tool_format)
    answer = tokenizer.encode(HEADS.get(tool_format, "") + text, False)
    assert allows(calling, either, answer)
    assert said(tool_format, tokenizer.decode(answer)) == (text, [])
    calls = [
        ids[:-1]
        for seed in range(2)
        if (ids := _call(calling, tool_format, seed))[-1] == calling.eos
    ]
    assert calls
    for ids in calls:
        assert allows(calling, either, ids)
        assert not allows(calling, either, [*ids, *answer])
        assert not allows(calling, either, [*answer, *ids])
        assert not allows(calling, either, ids[:-1])
    for other in ("", "Hello.", text + "Z", '{"name": "h", "parameters": {}}'):
        assert not allows(calling, either, tokenizer.encode(other, False))


def _call(bench: Bench, tool_format: str, seed: int) -> list[int]:
    matcher = bench.compile(tools_schema(TOOLS, tool_format, None))
    return bench.write(matcher, random.Random(seed))


@pytest.mark.parametrize("tool_format", list(TOOL_FORMATS))
def test_whatever_is_written_is_read_as_calls_or_as_the_form(
    calling: Bench, tool_format: str
) -> None:
    texts = list(calling.texts(calls_or(json_form(CITY), TOOLS, tool_format), 6))
    assert texts
    for text in texts:
        content, calls = said(tool_format, text)
        assert bool(content) != bool(calls)
        for arguments in calls:
            assert json.loads(arguments).get("e", "a") in ("a", "b")
        if content:
            jsonschema.validate(json.loads(content), CITY)


@pytest.mark.parametrize(
    ("tool_format", "form"),
    [
        ("hermes", StructuredOutputs(regex=".*")),
        ("hermes", StructuredOutputs(choice=("a", "<tool_call> is a mark"))),
        ("mistral", StructuredOutputs(grammar='root ::= "[" [^a]* "]"')),
        ("llama3_json", StructuredOutputs(json_object=True)),
        ("llama3_json", json_form({"type": "object", "properties": {"name": {"type": "string"}}})),
        ("glm4", StructuredOutputs(regex=r"[a-z\n]+")),
        ("pythonic", StructuredOutputs(regex=r"\[.+")),
        ("hermes", tag({"type": "const_string", "value": "a"})),
    ],
)
def test_a_form_that_may_look_like_a_call_is_refused(
    calling: Bench, tool_format: str, form: StructuredOutputs
) -> None:
    assert "tool_choice" in refusal(calling, calls_or(form, TOOLS, tool_format))


def test_a_fault_of_a_tool_beside_a_form_is_told_apart(calling: Bench) -> None:
    bad = {"type": "object", "not": {}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": bad}}]
    for spec, field in (
        (calls_or(json_form(CITY), tools, "hermes"), "structured_outputs.around"),
        (calls_or(json_form(bad), TOOLS, "hermes"), "structured_outputs"),
    ):
        with pytest.raises(InvalidRequest) as error:
            calling.compile(spec)
        assert error.value.param == field and error.value.message.startswith(f"{field}: 'not'")


def test_what_a_harmony_model_thinks_comes_before_either(calling: Bench) -> None:
    tokenizer = calling.tokenizer
    assert tokenizer is not None
    either = calls_or(json_form(CITY), TOOLS, "harmony")
    thoughts = "<|channel|>analysis<|message|>1 < 2<|end|><|start|>assistant"
    calls = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>"
    answer = '<|channel|>final<|message|>{"city":"Ghent","x":3}'
    for text in (calls + '{"x":1}', answer):
        for before in ("", thoughts):
            assert allows(calling, either, tokenizer.encode(before + text, False)), text
    marked = answer.replace("Ghent", "<|end|>" + calls)
    assert said("harmony", thoughts + marked) == (marked.removeprefix(HEADS["harmony"]), [])


@pytest.mark.parametrize("tool_format", list(TOOL_FORMATS))
def test_calls_that_may_not_be_parallel_are_one(calling: Bench, tool_format: str) -> None:
    either = calls_or(json_form(CITY), TOOLS, tool_format, one_call=True)
    numbers = set()
    for spec in (either, tools_schema(TOOLS, tool_format, None, one_call=True)):
        numbers |= {len(said(tool_format, text)[1]) for text in calling.texts(spec, 4)}
    assert numbers <= {0, 1} and 1 in numbers

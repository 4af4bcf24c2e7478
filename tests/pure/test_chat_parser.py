"""Reasoning, content and tool calls out of text, whole and in pieces."""

from __future__ import annotations

import itertools
import json
import re
import time
from dataclasses import dataclass, field

import pytest
from dealing import deal
from hypothesis import example, given, settings
from hypothesis import strategies as st

from weft.core.errors import InvalidRequest
from weft.text.calls.forms import tools_schema
from weft.text.chat_parser import ChatParser
from weft.text.harmony import HarmonyParser
from weft.text.json_stream import JsonObject, WholePairs
from weft.text.reasoning import REASONING, detect_reasoning, opens_reasoning
from weft.text.tools import TOOL_FORMATS, detect_tool_format

ARGUMENTS = '{"a": "}\\"<tool_call>", "b": [1, 2]}'
HERMES = f'<tool_call>\n{{"name": "f", "arguments": {ARGUMENTS}}}\n</tool_call>'
SCHEMAS = {"f": {"n": {"type": "integer"}, "o": {"type": ["object", "null"]}, "s": {}}}
XML = """<tool_call>
<function=f>
<parameter=city>
Paris "1"
</parameter>
<parameter=n>
3
</parameter>
<parameter=o>
{"a": [true]}
</parameter>
</function>
</tool_call>"""
HARMONY = (
    "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary "
    'to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>'
)


PHI = (
    '<|tool_call|>[{"name": "g", "arguments": {"x": 1}}, {"name": "h", "arguments": {}}]'
    "<|/tool_call|>"
)
GEMMA = (
    '<|tool_call>call:f{a:<|"|>{"b"}, c<|"|>,n:-3.5,t:true,l:[1,<|"|>x<|"|>],o:{k:null},e:[]}'
    "<tool_call|><|tool_call>call:g{}<tool_call|>"
)
GEMMA_ARGUMENTS = (
    '{"a": "{\\"b\\"}, c", "n": -3.5, "t": true, "l": [1, "x"], "o": {"k": null}, "e": []}'
)


GEMMA_BY_TEMPLATE = (
    '<|tool_call>call:get-weather{days:3,exact:false,extra:{deep:[1e-05,[],{}],unit:<|"|>°C<|"|>},'
    'note:None,place:<|"|>Paris, "FR": {x}\n[y]<|"|>}<tool_call|>'
)
"""As the template of Gemma 4 writes a call back: with sorted keys, and with Python's None."""
GLM_BY_TEMPLATE = '\nf\n{"place": "北京", "days": 3}<|assistant|>f\n{}'
"""As the template of GLM-4-0414 writes two calls back, up to the token that ends an answer."""


@dataclass
class Parsed:
    content: str = ""
    reasoning: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)


def parse(
    pieces: list[str],
    tool_format: str | None,
    reasoning: bool | str = False,
    opened: bool = False,
) -> Parsed:
    parser: ChatParser | HarmonyParser = HarmonyParser(reads_calls=True)
    if tool_format != "harmony":
        style = "think" if reasoning is True else reasoning or None
        parser = ChatParser(tool_format, style, opened, SCHEMAS)
    parsed = Parsed()
    for piece in [*map(parser.feed, pieces), parser.flush()]:
        parsed.content += piece.content
        parsed.reasoning += piece.reasoning
        for delta in piece.tool_calls:
            if delta.name is None:
                assert delta.id is None and delta.index == len(parsed.calls) - 1
                name, arguments = parsed.calls[-1]
                parsed.calls[-1] = (name, arguments + delta.arguments)
            else:
                assert re.fullmatch("call_[0-9a-f]{24}", delta.id or "")
                assert delta.index == len(parsed.calls)
                parsed.calls.append((delta.name, delta.arguments))
    assert parser.num_tool_calls == len(parsed.calls)
    return parsed


def test_text_without_a_format_is_content() -> None:
    text = f" <think>\nx</think> {HERMES}\n"
    assert parse([text], None) == Parsed(text)


# Reasoning, as Qwen 3 writes it.


@pytest.mark.parametrize(
    ("text", "opened", "reasoning", "content"),
    [
        ("<think>\nhm\n\nso\n</think>\n\nyes\n", False, "hm\n\nso", "yes\n"),
        ("<think>\n\n</think>\n\nyes", False, "", "yes"),
        ("\n<think>a</think>b", False, "a", "b"),
        ("<think>never ends\n", False, "never ends\n", ""),
        ("no mark </think> at all", False, "", "no mark </think> at all"),
        ("hm\n</think>\n\n\nyes", True, "hm", "\nyes"),
        ("<think>\nhm\n</think>\n\nyes", True, "hm", "yes"),
        ("  <thin", False, "", "  <thin"),
        ("", True, "", ""),
    ],
)
def test_reasoning(text: str, opened: bool, reasoning: str, content: str) -> None:
    for pieces in ([text], list(text)):
        assert parse(pieces, None, True, opened) == Parsed(content, reasoning)


@pytest.mark.parametrize("style", list(REASONING))
def test_reasoning_of_each_style(style: str) -> None:
    begin, end = REASONING[style][:2]
    text = f"{begin}\nhm <think\n{end}yes"
    for pieces in ([text], list(text)):
        assert parse(pieces, None, style) == Parsed("yes", "hm <think")
    assert opens_reasoning(f"model\n{begin}\n", style)


def test_reasoning_streams_but_for_what_may_be_its_end() -> None:
    parser = ChatParser(None, "think")
    assert parser.feed("<think>\nab").reasoning == "ab"
    assert parser.feed("c\n</thi").reasoning == "c"
    assert parser.feed("s").reasoning == "\n</this"


# Calls.


@pytest.mark.parametrize(
    ("tool_format", "text", "content", "calls"),
    [
        ("hermes", HERMES, "", [("f", ARGUMENTS)]),
        ("hermes", f"Let me see.\n\n{HERMES}\n{HERMES}\n", "Let me see.", ["f", "f"]),
        ("hermes", f"{HERMES}\nDone. ", "\nDone. ", ["f"]),
        ("hermes", '<tool_call>{"arguments": {}, "name": "g"}', "", [("g", "{}")]),
        ("hermes", '<tool_call>{"name": "g", "id": [1.5e3, null], "arguments": {} }', "", ["g"]),
        ("hermes", '<tool_call>{"name": "g", "arguments": {"x": 1', "", [("g", '{"x": 1')]),
        ("hermes", f'<tool_call>{{"name": 1}} {HERMES}', '<tool_call>{"name": 1}', ["f"]),
        ("hermes", '<tool_call>{"name": "g"}</tool_call>', None, []),
        ("hermes", '<tool_call>{"name": "g", "arguments": "{}"}</tool_call>', None, []),
        ("hermes", '<tool_call>{"name": "g", "argum', None, []),
        ("hermes", "a <tool_call> b", None, []),
        ("hermes", "a\n<tool_ca", None, []),
        ("hermes", "a \n\n", None, []),
        ("hermes", '<tool_call>{"name": "g", "arguments": {"x": tru}}', "}}", [("g", '{"x": tru')]),
        ("llama3_json", ' {"name": "g", "parameters": {"x": 1}}', "", [("g", '{"x": 1}')]),
        ("llama3_json", '{"type": "function", "name": "g", "parameters": {}}', "", ["g"]),
        ("llama3_json", '<|python_tag|>{"name": "g", "arguments": {}}', "", [("g", "{}")]),
        ("llama3_json", '<|python_start|>{"name": "g", "parameters": {}}', "", [("g", "{}")]),
        (
            "llama3_json",
            '{"name": "g", "parameters": {}}; {"name": "h", "parameters": {"a": ";"}}',
            "",
            [("g", "{}"), ("h", '{"a": ";"}')],
        ),
        ("llama3_json", '{"name": "g", "parameters": {}}; and', "; and", ["g"]),
        ("llama3_json", '{"name": "Bob", "age": 3}', None, []),
        ("llama3_json", 'See {"name": "g", "parameters": {}}', None, []),
        ("llama3_json", "<|python_tag|>print(1)", None, []),
        ("mistral", '[TOOL_CALLS] [{"name": "g", "arguments": {}}]', "", [("g", "{}")]),
        (
            "mistral",
            'Hm.[TOOL_CALLS][{"name": "g", "arguments": {}, "id": "x"}, '
            '{"name": "h", "arguments": {"a": [1]}}]\n',
            "Hm.",
            [("g", "{}"), ("h", '{"a": [1]}')],
        ),
        (
            "mistral",
            '[TOOL_CALLS]g[ARGS]{"x": 1}[TOOL_CALLS]h[CALL_ID]a1[ARGS]{}',
            "",
            [("g", '{"x": 1}'), ("h", "{}")],
        ),
        ("mistral", "[TOOL_CALLS] []", None, []),
        ("mistral", "[TOOL_CALLS] are a mark {}", None, []),
        ("mistral", '[TOOL_CALLS][{"name": "g", "arguments": {}}, 5]', ", 5]", ["g"]),
        (
            "qwen3_coder",
            f"Well.\n{XML}\n{XML}",
            "Well.",
            [("f", '{"city": "Paris \\"1\\"", "n": 3, "o": {"a": [true]}}')] * 2,
        ),
        (
            "qwen3_coder",
            "<tool_call><function=f><parameter=n>x</parameter><parameter=o>None</parameter>"
            "<parameter=s>True</parameter></function></tool_call>",
            "",
            [("f", '{"n": "x", "o": null, "s": true}')],
        ),
        ("qwen3_coder", "<tool_call>\n<function=g>\n</function>\n</tool_call>", "", [("g", "{}")]),
        ("qwen3_coder", "<tool_call><function=g><parameter=n>4", "", [("g", '{"n": "4')]),
        ("qwen3_coder", "<tool_call><function></tool_call>", None, []),
        ("qwen3_coder", "a <tool_call> b", None, []),
        (
            "seed_oss",
            "<seed:tool_call>\n<function=f>\n<parameter=n>4</parameter>\n</function>\n"
            "</seed:tool_call>",
            "",
            [("f", '{"n": 4}')],
        ),
        ("granite", '<|tool_call|>[{"name": "g", "arguments": {"x": 1}}]', "", [("g", '{"x": 1}')]),
        (
            "cohere",
            '<|START_ACTION|>[\n{"tool_call_id": "0", "tool_name": "g", "parameters": {}}]',
            "",
            [("g", "{}")],
        ),
        ("phi4_mini_json", PHI, "", [("g", '{"x": 1}'), ("h", "{}")]),
        ("phi4_mini_json", f"{PHI}\nDone", "\nDone", ["g", "h"]),
        ("gemma4", GEMMA, "", [("f", GEMMA_ARGUMENTS), ("g", "{}")]),
        ("gemma4", f"So:\n{GEMMA}", "So:", ["f", "g"]),
        ("gemma4", '<|tool_call>call:g{k:<|"|>a<|', "", [("g", '{"k": "a')]),
        (
            "gemma4",
            "<|tool_call>call:g{k:[1,],l:{,},}<tool_call|>",
            "",
            [("g", '{"k": [1], "l": {}}')],
        ),
        ("gemma4", "<|tool_call>call:g{k:,l:}<tool_call|>", "", [("g", '{"k": "", "l": ""}')]),
        ("gemma4", "<|tool_call>print(1)<tool_call|>", None, []),
        ("gemma4", "<|tool_call>call:g{k:1]", "]", [("g", '{"k": 1')]),
        (
            "functiongemma",
            "<start_function_call>call:g{k:<escape>a b<escape>}<end_function_call>",
            "",
            [("g", '{"k": "a b"}')],
        ),
        (
            "olmo3",
            'Hm. <function_calls>g(a="x, )", b=[1, {"c": \'d\'}], e=True)\nh()</function_calls>',
            "Hm.",
            [("g", '{"a": "x, )", "b": [1, {"c": "d"}], "e": true}'), ("h", "{}")],
        ),
        ("olmo3", "<function_calls>g(a='\\ud83d\\ude00\\ud83d')", "", [("g", '{"a": "😀\ufffd"}')]),
        ("olmo3", "<function_calls>g(a=null, b=plain)", "", [("g", '{"a": null, "b": "plain"}')]),
        ("olmo3", "<function_calls>g(a='x\\'y", "", [("g", '{"a": "x\'y')]),
        ("olmo3", "<function_calls>none here</function_calls>", None, []),
        ("glm4", 'f\n{"a": 1}', "", [("f", '{"a": 1}')]),
        ("glm4", 'f\n{"a": 1}<|assistant|>f\n{}', "", [("f", '{"a": 1}'), ("f", "{}")]),
        ("glm4", GLM_BY_TEMPLATE, "", [("f", '{"place": "北京", "days": 3}'), ("f", "{}")]),
        ("glm4", "\nfar away", None, []),
        ("glm4", "f\nand so on", None, []),
        ("glm4", "f", None, []),
        ("harmony", HARMONY, "", [("f", '{"a": 1}')]),
        ("harmony", "<|channel|>final<|message|>It rains.\n<|return|>", "It rains.\n", []),
        ("harmony", " to=functions.g<|channel|>commentary<|message|>{}", "", [("g", "{}")]),
        ("harmony", "<|channel|>commentary<|message|>I will.<|end|>" + HARMONY, "I will.", ["f"]),
        ("harmony", "no header", None, []),
        ("harmony", HARMONY + "<|end|>So it is.", "So it is.", [("f", '{"a": 1}')]),
        ("harmony", "Yes.<|end|> Or no.<|start|>assistant<|chan", "Yes. Or no.", []),
        ("harmony", "Yes.<|end|>\n", "Yes.", []),
        ("harmony", "<|channel|>final", "", []),
    ],
)
def test_calls(
    tool_format: str, text: str, content: str | None, calls: list[str | tuple[str, str]]
) -> None:
    for pieces in ([text], list(text)):
        parsed = parse(pieces, tool_format)
        assert parsed.content == (text if content is None else content)
        assert len(parsed.calls) == len(calls)
        for (name, arguments), expected in zip(parsed.calls, calls, strict=True):
            assert (
                (name, arguments) == expected if isinstance(expected, tuple) else name == expected
            )


def test_gemma_s_reasoning_and_a_call_as_its_template_writes_them() -> None:
    text = f"<|channel>thought\nIs it cold?\n<channel|>{GEMMA_BY_TEMPLATE}"
    for pieces in ([text], list(text)):
        found = parse(pieces, "gemma4", "gemma4")
        assert (found.content, found.reasoning) == ("", "Is it cold?")
        [(name, arguments)] = found.calls
        assert name == "get-weather"
        assert json.loads(arguments) == {
            "days": 3,
            "exact": False,
            "extra": {"deep": [1e-05, [], {}], "unit": "°C"},
            "note": None,
            "place": 'Paris, "FR": {x}\n[y]',
        }


def test_messages_of_harmony() -> None:
    text = f"{HARMONY}<|start|>assistant<|channel|>final<|message|>Done<|return|>"
    for pieces in ([text], list(text)):
        assert parse(pieces, "harmony") == Parsed("Done", "hm", [("f", '{"a": 1}')])
    parser = HarmonyParser(reads_calls=False)
    piece = parser.flush(parser.feed(text))
    assert (piece.content, piece.reasoning, piece.tool_calls) == ('{"a": 1}Done', "hm", [])


def test_a_call_after_reasoning() -> None:
    text = f"<think>\n<tool_call>?\n</think>\n\n{HERMES}"
    parsed = parse(list(text), "hermes", True)
    assert (parsed.reasoning, parsed.content) == ("<tool_call>?", "")
    assert [name for name, _ in parsed.calls] == ["f"]


def test_arguments_stream_as_they_come() -> None:
    parser = ChatParser("hermes", None)
    assert parser.feed("Now: <tool_").content == "Now:"
    assert parser.feed('call>{"name": "f", "arguments": ').tool_calls == []
    [first] = parser.feed('{"a').tool_calls
    assert (first.name, first.arguments) == ("f", '{"a')
    [more] = parser.feed('": 1').tool_calls
    assert (more.index, more.id, more.name, more.arguments) == (0, None, None, '": 1')


def test_only_what_may_be_a_mark_is_held_back() -> None:
    parser = ChatParser("hermes", "think")
    assert parser.feed("a").content == "a"
    assert parser.feed("b <").content == "b"
    assert parser.feed("c").content == " <c"
    assert parser.feed("\n").content == ""
    assert parser.flush().content == "\n"


FRAGMENTS = st.sampled_from(
    [
        *("<think>", "</think>", "<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]"),
        *("[ARGS]", "[", "]", "{", "}", ";", ",", '"', "\\", "\n", " ", "x", "<", "é", "tr", "1."),
        *('{"name": "f", ', '"arguments": {', '"parameters": {"a": ', '{"name": "g", "arguments":'),
        *('{"name": "f", "arguments": {}}', HERMES, XML, HARMONY, "<function=f>", "</function>"),
        *("<parameter=n>", "</parameter>", "<|channel|>", "final", "<|message|>", "<|start|>"),
        *(" to=functions.f", "<|end|>", "<|call|>", "<|tool_call|>", "<|START_ACTION|>"),
        *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "f\n", "<invoke name=", "f("),
        *(
            "<tool_calls>",
            "<|tool_calls|>",
            "<|tool_call:begin|>",
            "<|tool_call_start|>",
            "```json",
        ),
    ]
)


@settings(max_examples=40)
@given(
    st.lists(FRAGMENTS, max_size=14).map("".join) | st.text(max_size=30),
    st.sampled_from([*TOOL_FORMATS, None]),
    st.booleans(),
    st.booleans(),
    st.lists(st.integers(0, 100), max_size=12),
)
def test_nothing_is_lost_and_pieces_do_not_matter(
    text: str, tool_format: str | None, reasoning: bool, opened: bool, cuts: list[int]
) -> None:
    whole = parse([text], tool_format, reasoning, opened)
    ends = sorted({min(cut, len(text)) for cut in cuts})
    pieces = [text[a:b] for a, b in zip([0, *ends], [*ends, len(text)], strict=True)]
    assert parse(pieces, tool_format, reasoning, opened) == whole
    assert parse(list(text), tool_format, reasoning, opened) == whole
    for part in (whole.reasoning, whole.content):
        assert is_within(part, text)
    if tool_format is None or TOOL_FORMATS[tool_format].syntax in ("json", "named"):
        assert all(is_within(arguments, text) for _, arguments in whole.calls)
    if (
        tool_format != "harmony"
        and not whole.calls
        and not whole.reasoning
        and "<think>" not in text
    ):
        assert whole.content == text or opened  # then a line break may be gone


def is_within(part: str, text: str) -> bool:
    """Whether `part` is `text` with something left out."""
    characters = iter(text)
    return all(char in characters for char in part)


@settings(max_examples=40)
@given(
    st.lists(
        st.text('ab {}[]<":,;\\n', max_size=5)
        | st.sampled_from(
            [
                "<tool_call>",
                "</tool_call>",
                '{"name": "f", "arguments": {"k": [1, "x"]}}',
                '{"arguments": {}, "name": "é"}',
                '{"name": "f"}',
                HERMES,
            ]
        ),
        max_size=10,
    ).map("".join)
)
@example(f"<tool_call> {HERMES}")
def test_hermes_equals_a_reading_of_the_whole(text: str) -> None:
    assert parse([text], "hermes") == read_hermes(text)


JSON_TEXTS = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=8,
).map(json.dumps)


@settings(max_examples=40)
@given(
    JSON_TEXTS.map(lambda value: f'{{"k": {value}, "l":[ ] }}') | st.text('{}[]",:\\u0e1.- \nn'),
    st.lists(st.tuples(st.integers(0, 60), st.sampled_from('{}[]",:\\u0a1.-e \n\t')), max_size=2),
)
@example('{"k": "a\tb"}', [])
@example('{"k": "\\u00g0"}', [])
@example('{"k": -01}', [])
@example('{"k": [1,]}', [])
def test_json_is_what_python_takes_for_json(text: str, edits: list[tuple[int, str]]) -> None:
    for position, char in edits:
        text = text[:position] + char + text[position + 1 :]
    document = JsonObject()
    num_read = 0
    while num_read < len(text) and not document.done and document.feed(text[num_read]):
        num_read += 1
    try:
        value = json.loads(text) if not text[:1].isspace() else None
    except ValueError:
        value = None
    is_object = isinstance(value, dict) and not text[-1:].isspace()
    assert (document.done and num_read == len(text)) == is_object


@pytest.mark.parametrize(
    ("text", "given"),
    [
        (r'{"a": "\u{1F600}", "b": 1}', r'{"a": "\u{1F600}", "b": 1}'),
        (r'{"a": "\ud83d\udc"}', r'{"a": "\ufffd\udc"}'),
        (r'{"a": "\u12"}', r'{"a": "\u12"}'),
        (r'{"a": "\ud83d\ude00"}', r'{"a": "\ud83d\ude00"}'),
    ],
)
def test_escapes_that_are_none_hold_nothing_back(text: str, given: str) -> None:
    for pieces in ([text], list(text)):
        pairs = WholePairs()
        assert "".join(map(pairs.feed, pieces)) == given
        assert pairs.flush() == ""


def read_hermes(text: str) -> Parsed:
    """The oracle, for texts in which JSON that begins a call's arguments is valid to its end."""
    parsed = Parsed()
    position, decoder = 0, json.JSONDecoder()
    content, end_of_mark = "", ""
    after_call = False
    for mark in re.finditer(r"<tool_call>\s*", text):
        if mark.start() < position:
            continue
        try:
            call, end = decoder.raw_decode(text, mark.end())
            name, arguments = call["name"], json.dumps(call["arguments"], ensure_ascii=False)
        except (ValueError, KeyError, TypeError):
            continue
        if not isinstance(call["arguments"], dict):
            continue
        content += text[position : mark.start()].rstrip()
        parsed.calls.append((name, arguments))
        closed = re.compile(r"\s*</tool_call>").match(text, end)
        position = closed.end() if closed else end
        after_call = True
        end_of_mark = "" if closed else "</tool_call>"
    rest = text[position:]
    if after_call and end_of_mark.startswith(rest.strip()):
        rest = ""  # the output was cut inside the mark
    parsed.content = content + (rest if rest.strip() or not after_call else "")
    return parsed


@pytest.mark.parametrize(
    ("template", "tool_format", "reasoning"),
    [
        ("{{ '<tool_call>' }}{{ '<think>\\n\\n</think>' }}", "hermes", "think"),
        ("{% if tools %}<tool_call>{% endif %}", "hermes", None),
        ("[AVAILABLE_TOOLS]{{ tools }}[/AVAILABLE_TOOLS][TOOL_CALLS]", "mistral", None),
        ("[TOOL_CALLS]{{ '[THINK]' + thought + '[/THINK]' }}", "mistral", "mistral"),
        ("{% if builtin_tools %}<|python_tag|>{% endif %}", "llama3_json", None),
        (
            "<tool_call>\\n<function=f>\\n<parameter=a>{{ '</think>' }}",
            "qwen3_coder",
            "think",
        ),
        ("<|start|>assistant<|channel|>final<|message|>", "harmony", None),
        ("{{ tools }}<|START_ACTION|>", "cohere", None),
        ("<|START_THINKING|><|END_THINKING|><|START_ACTION|>", "cohere", "cohere"),
        ("{{ '<|tool_call>call:' }}{{ '<|channel>thought\\n<channel|>' }}", "gemma4", "gemma4"),
        ("<start_function_call>call:", "functiongemma", None),
        ("<functions></functions><function_calls>", "olmo3", None),
        ("'<|tool|>' + message['tools'] + '<|/tool|>'", "phi4_mini_json", None),
        ("[gMASK]<sop><|observation|>", "glm4", None),
        ("[gMASK]<sop>{{ item['tools'] }}<|observation|>", None, None),
        (
            "{{ '</think>' }}<tool_call>{f}<arg_key>{{ '\\n<tool_call>' + name }}<|observation|>",
            "glm45",
            "think",
        ),
        (
            "<tool_call>{name}<arg_key>{k}{{- '<tool_call>' + tc.name -}}<|observation|>",
            "glm47",
            None,
        ),
        ("<minimax:tool_call>{{ '<response>' }}{{ '</think>' }}", "minimax_m2", "think"),
        ("<tool_calls><tool_call>f</tool_call>{{ '<answer>' }}</think>", "hunyuan", "think_answer"),
        ("<tool_calls><tool_call>f<tool_sep><arg_key>", None, None),
        ("<tool_call>{{ '<response>' }}</think>", "hermes", "think_response"),
        ("[TOOL_CALLS]{{ name }}[ARGS]", "mistral_v11", None),
        ("<|think|>{{ thought }}<|end|><|content|><|tool_call:begin|>", "solar_open", "solar_open"),
        ("<|user|>{{ content }}<|end|>", None, None),
        (
            "{{ tools }}<|start_of_role|>tools<|end_of_role|>Here is my response:",
            "granite",
            "granite",
        ),
        ("'<｜tool▁calls▁begin｜>' + type + '<｜tool▁sep｜>' + '```json'", "deepseek_v3", None),
        ("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{{ '</think>' }}", "deepseek_v31", "think"),
        ("'<|im_system|>tool_declare<|im_middle|>' {{ tools }}", "kimi_k2", None),
        ("{% if tools %}<AVAILABLE_TOOLS><TOOLCALL>[", "nemotron_json", None),
        ("List of tools: <|tool_list_start|>[", "lfm2", None),
        ("format: [func_name1(param1=value1, param2=value2), func_name2(...)]", "pythonic", None),
        ("respond only with <|tool_call|> followed by a list", "granite", None),
        ("<seed:tool_call>\n<function=f>, </seed:think>", "seed_oss", "seed_oss"),
        ("{{ messages[0].content }}", None, None),
    ],
)
def test_detection(template: str, tool_format: str | None, reasoning: str | None) -> None:
    assert detect_tool_format(template) == tool_format
    assert detect_reasoning(template) == reasoning


def test_a_template_may_show_nothing_that_the_vocabulary_does() -> None:
    def has_token(mark: str) -> bool:
        return mark == "<|tool_call_start|>"

    assert detect_tool_format("List of tools: {{ tools | tojson }}", has_token) == "lfm2"
    assert detect_tool_format("{{ messages }}", has_token) is None


def test_a_prompt_may_open_the_reasoning() -> None:
    assert opens_reasoning("<|im_start|>assistant\n<think>\n", "think")
    assert not opens_reasoning("<|im_start|>assistant\n<think>\n\n</think>\n\n", "think")
    assert opens_reasoning("assistant\n<seed:think><seed:cot_budget_reflect>", "seed_oss")


def test_marks_are_those_that_must_show() -> None:
    assert ChatParser("hermes", "think").marks == (
        "<think>",
        "</think>",
        "<tool_call>",
        "</tool_call>",
    )
    assert "[TOOL_CALLS]" in ChatParser("mistral", None).marks
    assert ChatParser(None, None).marks == ()


def test_a_choice_among_no_such_tools_is_refused() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    for chosen, among in (("g", tools), (None, [{"type": "function"}])):
        with pytest.raises(InvalidRequest) as caught:
            tools_schema(among, "hermes", chosen)
        assert caught.value.param == "tools"


def nested(depth: int) -> dict[str, object]:
    """A schema of objects in objects, each with another property, and none that must be there."""
    schema: dict[str, object] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": {"type": "string"}, "b": schema}}
    return schema


ODD_KEYS = [
    *(("qwen3_coder", key) for key in ("a>b", "a\nb", "")),
    *(("glm45", key) for key in ("a<b", "a\nb", "")),
    *(("minimax_m2", key) for key in ('a"b', "a\nb", "")),
    *(("gemma4", key) for key in ("a:b", "a,b", "a}", "a]", " a", '<|"|>a', "")),
    *(("olmo3", key) for key in ("a=b", ")a", "a\n", "")),
]
"""Names that a parser would not read back."""


@pytest.mark.parametrize(
    ("tool_format", "parameters", "reason"),
    [
        ("gemma4", nested(12), "the schemas are too large to be enforced"),
        ("gemma4", nested(90), "nesting deeper than"),
        ("olmo3", {"properties": {f"p{n}": {} for n in range(99)}}, "are too large to be enforced"),
        ("gemma4", {"properties": {"p": {"enum": 5}}}, "'enum'"),
        ("gemma4", {"properties": {"p": {"type": "string", "pattern": "a"}}}, "'pattern'"),
        ("gemma4", {"properties": {"p": {"type": "string", "format": "date"}}}, "'format'"),
        ("gemma4", {"properties": {"p": {"type": "string", "maxLength": "9"}}}, "a length"),
        ("gemma4", {"properties": {"p": {"$ref": "#/$defs/none"}}}, "'$ref' to '#/$defs/none'"),
        ("gemma4", {"properties": {"p": {"$ref": "#"}}}, "nesting deeper than"),
        ("qwen3_coder", {"properties": {"p": {"$ref": "#"}}}, "'$ref' to '#'"),
        ("qwen3_coder", {"anyOf": [{"required": ["p"]}]}, "'anyOf'"),
        ("qwen3_coder", {"properties": {}, "required": ["p"]}, "'required' names 'p'"),
        ("olmo3", {"properties": {}, "required": [[]]}, "'required' names"),
        (
            "qwen3_coder",
            {"properties": {"p": {"type": "string", "enum": ["</parameter>"]}}},
            "text",
        ),
        (
            "glm47",
            {"properties": {"p": {"type": "string", "enum": ["</arg_value>"]}}},
            "a text with '</arg_value>'",
        ),
        ("gemma4", {"properties": {"p": {"enum": ['a<|"|>']}}}, "a text with"),
        *(
            (form, {"properties": {key: {}}}, f"a property called {key!r}")
            for form, key in ODD_KEYS
        ),
    ],
)
def test_what_a_call_can_not_be_held_to_is_refused(
    tool_format: str, parameters: dict[str, object], reason: str
) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    with pytest.raises(InvalidRequest, match=re.escape(reason)) as caught:
        tools_schema(tools, tool_format, None)
    assert caught.value.param == "tools"


@pytest.mark.parametrize(
    ("tool_format", "mark"),
    [("qwen3_coder", "</parameter>"), ("glm45", "</arg_value>"), ("gemma4", '<|"|>')],
)
def test_text_of_a_call_can_not_hold_the_mark_at_its_end(tool_format: str, mark: str) -> None:
    parameters = {"properties": {"p": {"type": "string"}}, "required": ["p"]}
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    tag = str(tools_schema(tools, tool_format, "f").structural_tag)
    pattern = re.compile(json.loads(re.findall(r'"pattern": (".*?(?<!\\)")', tag)[0]))
    for text in ("a", "a < b", "<< b", "<a>", "<<\n"):
        assert pattern.fullmatch(text)
    for before in ("", "a", "<", "<<", "<<<"):
        assert not pattern.fullmatch(f"{before}{mark}a")


TEXT_OR_NULL = {"anyOf": [{"type": "string"}, {"type": "null"}]}


@pytest.mark.parametrize(
    ("schema", "written", "value"),
    [
        (TEXT_OR_NULL, "75001", "75001"),
        (TEXT_OR_NULL, "true", "true"),
        (TEXT_OR_NULL, "None", None),
        (TEXT_OR_NULL, '"Paris"', "Paris"),
        ({"type": ["string", "null"]}, '"Paris"', "Paris"),
        ({"type": ["string", "null"]}, "Paris", "Paris"),
        ({"type": ["string", "integer"]}, "3", 3),
        ({"enum": ["1", "2"]}, "1", "1"),
        ({"type": "string", "pattern": "[0-9]+"}, "12", "12"),
        ({"type": "string"}, '"Paris"', '"Paris"'),
        ({"anyOf": [{"type": "string"}, {"type": "array"}]}, "[1]", [1]),
        ({"anyOf": [{"type": "string"}, {"type": "number"}]}, "1", 1),
        ({"anyOf": [{"$ref": "#/$defs/x"}, {"type": "null"}]}, '{"y": 1}', {"y": 1}),
    ],
)
def test_values_that_may_be_text_or_not(schema: object, written: str, value: object) -> None:
    parser = ChatParser("qwen3_coder", None, schemas={"f": {"p": schema}})
    text = f"<tool_call><function=f><parameter=p>{written}</parameter></function></tool_call>"
    calls = parser.flush(parser.feed(text)).tool_calls
    assert json.loads("".join(call.arguments for call in calls)) == {"p": value}


@pytest.mark.parametrize(
    ("tool_format", "text"),
    [
        ("olmo3", "<function_calls>two words"),
        ("gemma4", "<|tool_call>call:two words"),
        ("mistral", "[TOOL_CALLS]two words"),
        ("mistral", "[TOOL_CALLS]a[TOOLS"),
    ],
)
def test_a_name_that_is_none_is_content_at_once(tool_format: str, text: str) -> None:
    assert ChatParser(tool_format, None).feed(text).content == text


@pytest.mark.parametrize(
    ("tool_format", "text"),
    [
        ("olmo3", "<function_calls>"),
        ("gemma4", "<|tool_call>call:"),
        ("mistral", "[TOOL_CALLS]a"),
        ("harmony", "<|message|><|end|>"),
        ("glm4", "<|assistant|>"),
        ("glm45", "<tool_call>f\n<"),
        ("glm45", "<tool_call>f\n<arg_key>a</arg_key><arg_value>" + "<" * 20_000),
        ("kimi_k2", "<|tool_calls_section_begin|><|tool_call_begin|>functions."),
        ("mistral_v11", "[TOOL_CALLS]" + "a" * 250 + "[CALL_ID]"),
        ("deepseek_v3", "<｜tool▁calls▁begin｜>" + " " * 20_000),
        ("lfm2", "<|tool_call_start|>[f(a='" + "' " * 20_000),
        ("olmo3", "<function_calls>f(" + " " * 20_000),
        ("olmo3", "<function_calls>f(a" + " " * 20_000),
        ("pythonic", "[f(a='" + "', b=" * 20_000),
        ("gemma4", "<|tool_call>call:f{" + " " * 20_000),
        ("gemma4", "<|tool_call>call:f{" + "a:1," * 20_000),
    ],
)
def test_marks_and_white_space_take_little_time(tool_format: str, text: str) -> None:
    """The event loop reads whole answers. Their length must not count twice."""

    def took_s(num_chars: int) -> float:
        parser = HarmonyParser(True) if tool_format == "harmony" else ChatParser(tool_format, None)
        begin_s = time.process_time()
        parser.feed((text * (num_chars // len(text) + 1))[:num_chars])
        parser.flush()
        return time.process_time() - begin_s

    assert took_s(80_000) < 9 * took_s(20_000) + 0.1, "each character costs the same"


LONG = "x" * 150_000


@pytest.mark.parametrize(
    "text",
    [
        f'{{"arguments": {{"a": "{LONG}"}}, "name": "f"}}',
        f'{{"arguments": {{"a": "{LONG}',
        f'{{"name": "{LONG}", "arguments": {{}}}}',
        f'{{"{LONG}": 1, "name": "f", "arguments": {{}}}}',
    ],
    ids=["arguments first", "cut off", "a long name", "a long key"],
)
def test_a_call_whose_name_comes_late_takes_as_long_as_another(text: str) -> None:
    def took_s(text: str) -> float:
        parser = ChatParser("hermes", None)
        begin_s = time.process_time()
        parser.feed(f"<tool_call>\n{text}")
        parser.flush()
        return time.process_time() - begin_s

    other = f'{{"name": "f", "arguments": {{"a": "{LONG}"}}}}'
    assert took_s(text) < 4 * took_s(other), "each character costs the same"


@pytest.mark.parametrize(
    ("tool_format", "reasoning", "text"),
    [
        (None, "think", ""),
        ("hermes", None, "a"),
        ("hermes", None, HERMES),
        ("llama3_json", None, ""),
        ("glm4", None, ""),
        ("pythonic", None, ""),
        ("mistral", None, '[TOOL_CALLS][{"name": "f", "arguments": {}}'),
    ],
)
def test_white_space_that_comes_in_pieces_takes_little_time(
    tool_format: str | None, reasoning: str | None, text: str
) -> None:
    """A model that has lost its way writes white space up to its last token."""
    parser = ChatParser(tool_format, reasoning, schemas=SCHEMAS)
    parser.feed(text)
    begin_s = time.process_time()
    for _ in range(60_000):
        parser.feed(" \n")
    parser.flush()
    assert time.process_time() - begin_s < 1


@pytest.mark.parametrize(
    ("tool_format", "reasoning"),
    deal([None, *sorted(TOOL_FORMATS.keys() - {"harmony"})], [None, *sorted(REASONING)]),
)
def test_long_white_space_in_pieces_is_read_as_in_one(
    tool_format: str | None, reasoning: str | None
) -> None:
    ends = ("", "x", "<", "</think>a", HERMES)
    for begin, end in itertools.product(("", "a", "<think>", HERMES), ends):
        whole = ChatParser(tool_format, reasoning, schemas=SCHEMAS)
        pieces = ChatParser(tool_format, reasoning, schemas=SCHEMAS)
        text = f"{begin}{' ' * 200}{end}"
        one = whole.flush(whole.feed(text))
        many = [pieces.feed(char) for char in text] + [pieces.flush()]
        assert "".join(piece.content for piece in many) == one.content
        assert "".join(piece.reasoning for piece in many) == one.reasoning
        calls = [call for piece in many for call in piece.tool_calls]
        assert [c.name for c in calls if c.name] == [c.name for c in one.tool_calls if c.name]

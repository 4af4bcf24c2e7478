"""Calls as the families' chat templates write them, whole and cut anywhere."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.text.calls.forms import schemas_of
from weft.text.chat_parser import ChatParser
from weft.text.tools import TOOL_FORMATS

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string"},
                    "days": {"type": "integer"},
                    "parts": {"type": ["array", "null"]},
                },
            },
        },
    },
    {"type": "function", "function": {"name": "now"}},
]
SCHEMAS = schemas_of(TOOLS)
WEATHER = {"city": 'Paris, "FR" <b>\n2', "days": 3, "parts": ["a", None]}
AS_JSON = json.dumps(WEATHER)

DEEPSEEK = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
DEEPSEEK_CALL = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
KIMI = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"


def glm(name: str, gap: str, **values: str) -> str:
    pairs = "".join(
        f"<arg_key>{key}</arg_key>{gap}<arg_value>{value}</arg_value>{gap}"
        for key, value in values.items()
    )
    return f"<tool_call>{name}{gap}{pairs}</tool_call>"


def deepseek_v3(name: str, arguments: str) -> str:
    begin, sep, end = DEEPSEEK_CALL
    return f"{begin}function{sep}{name}\n```json\n{arguments}\n```{end}"


def deepseek_v31(name: str, arguments: str) -> str:
    begin, sep, end = DEEPSEEK_CALL
    return f"{begin}{name}{sep}{arguments}{end}"


def kimi(name: str, n: int, arguments: str) -> str:
    head = f"<|tool_call_begin|>functions.{name}:{n}<|tool_call_argument_begin|>"
    return f"{head}{arguments}<|tool_call_end|>"


def solar(name: str, arguments: str) -> str:
    head = f"<|tool_call:begin|>a1b2c3d4e5<|tool_call:name|>{name}<|tool_call:args|>"
    return f"{head}{arguments}<|tool_call:end|>"


XML_VALUES = {"city": WEATHER["city"], "days": "3", "parts": '["a", null]'}
BOTH: list[tuple[str, str]] = [
    (
        "glm45",
        f"{glm('get_weather', chr(10), **XML_VALUES)}\n{glm('now', chr(10))}",
    ),
    ("glm47", glm("get_weather", "", **XML_VALUES) + glm("now", "")),
    (
        "minimax_m2",
        '<minimax:tool_call>\n<invoke name="get_weather">\n'
        + "".join(f'<parameter name="{k}">{v}</parameter>\n' for k, v in XML_VALUES.items())
        + '</invoke>\n<invoke name="now">\n</invoke>\n</minimax:tool_call>',
    ),
    (
        "seed_oss",
        "<seed:tool_call>\n<function=get_weather>\n"
        f"<parameter=city>{WEATHER['city']}</parameter>\n<parameter=days>3</parameter>\n"
        "<parameter=parts>['a', None]</parameter>\n</function>\n</seed:tool_call>\n"
        "<seed:tool_call>\n<function=now>\n</function>\n</seed:tool_call>",
    ),
    (
        "qwen3_coder",
        "<tool_call>\n<function=get_weather>\n"
        + "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in XML_VALUES.items())
        + "</function>\n</tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>",
    ),
    (
        "hermes",
        f'<tool_call>\n{{"name": "get_weather", "arguments": {AS_JSON}}}\n</tool_call>\n'
        '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
    ),
    (
        "llama3_json",
        f'{{"name": "get_weather", "parameters": {AS_JSON}}}; '
        '{"name": "now", "parameters": {}}',
    ),
    (
        "mistral",
        f'[TOOL_CALLS] [{{"name": "get_weather", "arguments": {AS_JSON}, "id": "123456789"}}, '
        '{"name": "now", "arguments": {}, "id": "abcdefghi"}]',
    ),
    ("mistral_v11", f"[TOOL_CALLS]get_weather[ARGS]{AS_JSON}[TOOL_CALLS]now[ARGS]{{}}"),
    (
        "mistral_v11",
        f"[TOOL_CALLS]get_weather[CALL_ID]123456789[ARGS]{AS_JSON}"
        "[TOOL_CALLS]now[CALL_ID]abcdefghi[ARGS]{}",
    ),
    ("mistral_v11", f"[TOOL_CALLS]get_weather{AS_JSON}[TOOL_CALLS]now{{}}"),
    *(
        (
            name,
            f'{begin}[{{"name": "get_weather", "arguments": {AS_JSON}}}, '
            f'{{"name": "now", "arguments": {{}}}}]{end}',
        )
        for name, begin, end in (
            ("granite", "<|tool_call|>", ""),
            ("granite", "<tool_call>", ""),
            ("phi4_mini_json", "<|tool_call|>", "<|/tool_call|>"),
            ("phi4_mini_json", "functools", ""),
            ("nemotron_json", "<TOOLCALL>", "</TOOLCALL>"),
            ("hunyuan", "<tool_calls>", "</tool_calls>"),
            ("lfm2", "<|tool_call_start|>", "<|tool_call_end|>"),
        )
    ),
    (
        "cohere",
        f'<|START_ACTION|>[\n    {{"tool_call_id": "0", "tool_name": "get_weather", "parameters": '
        f'{AS_JSON}}},\n    {{"tool_call_id": "1", "tool_name": "now", "parameters": {{}}}}\n]'
        "<|END_ACTION|>",
    ),
    (
        "olmo3",
        f"<function_calls>get_weather(city={json.dumps(WEATHER['city'])}, days=3, "
        'parts=["a", null])\nnow()</function_calls>',
    ),
    (
        "lfm2",
        f"<|tool_call_start|>[get_weather(city='{WEATHER['city']}', days=3, parts=['a', None]), "
        "now()]<|tool_call_end|>",
    ),
    *(
        (
            "pythonic",
            f"{begin}[get_weather(city='{WEATHER['city']}', days=3, parts=['a', null]), "
            f"now()]{end}",
        )
        for begin, end in (("", ""), ("<|python_start|>", "<|python_end|>"), ("<|python_tag|>", ""))
    ),
    (
        "deepseek_v3",
        f"{DEEPSEEK[0]}{deepseek_v3('get_weather', AS_JSON)}\n{deepseek_v3('now', '{}')}"
        f"{DEEPSEEK[1]}",
    ),
    (
        "deepseek_v31",
        f"{DEEPSEEK[0]}{deepseek_v31('get_weather', AS_JSON)}{deepseek_v31('now', '{}')}"
        f"{DEEPSEEK[1]}",
    ),
    ("kimi_k2", f"{KIMI[0]}{kimi('get_weather', 0, AS_JSON)}{kimi('now', 1, '{}')}{KIMI[1]}"),
    (
        "solar_open",
        f"<|tool_calls|>{solar('get_weather', AS_JSON)}{solar('now', '{}')}",
    ),
    (
        "hunyuan",
        f"<tool_calls><tool_call>get_weather\n```json\n{AS_JSON}\n```</tool_call>\n"
        "<tool_call>now\n```json\n{}\n```</tool_call></tool_calls>",
    ),
    ("glm4", f"get_weather\n{AS_JSON}<|assistant|>now\n{{}}"),
    (
        "gemma4",
        f'<|tool_call>call:get_weather{{city:<|"|>{WEATHER["city"]}<|"|>,days:3,'
        'parts:[<|"|>a<|"|>,null]}<tool_call|><|tool_call>call:now{}<tool_call|>',
    ),
]
"""A call of each tool."""


@dataclass
class Read:
    content: str = ""
    reasoning: str = ""
    calls: list[list[str]] = field(default_factory=list)


def read(pieces: list[str], tool_format: str, reasoning: str | None = None) -> Read:
    parser, found = ChatParser(tool_format, reasoning, schemas=SCHEMAS), Read()
    for piece in [*map(parser.feed, pieces), parser.flush()]:
        found.content += piece.content
        found.reasoning += piece.reasoning
        for delta in piece.tool_calls:
            if delta.name is not None:
                found.calls.append([delta.name, ""])
            assert delta.index == len(found.calls) - 1
            found.calls[-1][1] += delta.arguments
    return found


def cut(text: str, num_chars: int) -> list[str]:
    return [text[start : start + num_chars] for start in range(0, len(text), num_chars)]


@pytest.mark.parametrize(("tool_format", "text"), BOTH)
def test_calls_are_read_as_templates_write_them(tool_format: str, text: str) -> None:
    may_begin = not TOOL_FORMATS[tool_format].bare
    for before, after in (("", ""), ("So:" * may_begin, "\nDone." * may_begin)):
        whole = read([before + text + after], tool_format)
        assert whole.content == before + after
        assert [(name, json.loads(arguments)) for name, arguments in whole.calls] == [
            ("get_weather", WEATHER),
            ("now", {}),
        ]
        for num_chars in (1, 2, 7):
            assert read(cut(before + text + after, num_chars), tool_format) == whole


def test_every_format_is_shown_here() -> None:
    assert {name for name, _ in BOTH} == TOOL_FORMATS.keys() - {"functiongemma", "harmony"}


@pytest.mark.parametrize(("tool_format", "text"), BOTH)
def test_an_output_may_break_off_anywhere(tool_format: str, text: str) -> None:
    """What is read is a beginning of what the whole text says, however it is cut."""
    [weather, now] = read([text], tool_format).calls
    for end in range(len(text)):
        found = read([text[:end]], tool_format)
        assert found == read(cut(text[:end], 3), tool_format)
        for (name, arguments), (whole_name, whole) in zip(
            found.calls, (weather, now), strict=False
        ):
            assert name == whole_name
            is_xml = TOOL_FORMATS[tool_format].syntax == "xml"  # a value may not be JSON yet
            assert whole.startswith(arguments) or is_xml
        if not found.calls:
            assert found.content == text[:end]


@settings(max_examples=60)
@given(st.sampled_from(BOTH), st.data())
def test_damaged_calls_are_no_harm(case: tuple[str, str], data: Any) -> None:
    tool_format, text = case
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(text)))
        length = data.draw(st.integers(0, 12))
        text = text[:at] + data.draw(st.text('<>|/`{}[]()",:a\n', max_size=6)) + text[at + length :]
    whole = read([text], tool_format)
    assert read(list(text), tool_format) == whole
    sizes = data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=8))
    pieces, rest = list[str](), text
    while rest:
        size = sizes[len(pieces) % len(sizes)]
        pieces, rest = [*pieces, rest[:size]], rest[size:]
    assert read(pieces, tool_format) == whole
    if not whole.calls:
        assert whole.content == text


@pytest.mark.parametrize(
    ("tool_format", "text", "content", "calls"),
    [
        ("glm45", "a <tool_call> b, c </tool_call>", "a <tool_call> b, c </tool_call>", []),
        ("glm45", "<tool_call>two words</tool_call>", "<tool_call>two words</tool_call>", []),
        ("glm45", "<tool_call>now", "<tool_call>now", []),
        ("glm45", "<tool_call>now\n</tool_call>", "", [["now", "{}"]]),
        ("glm45", "<tool_call>f<arg_key>x</arg_key>\n<arg_value>1", "", [["f", '{"x": "1']]),
        (
            "glm45",
            "<tool_call>get_weather\n<arg_key>days</arg_key>\n<arg_value>1",
            "",
            [["get_weather", '{"days": 1']],
        ),
        (
            "glm45",
            "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n<arg_key>b\n"
            "<arg_value>2</arg_value>\n</tool_call>",
            "<arg_key>b\n<arg_value>2</arg_value>\n</tool_call>",
            [["f", '{"a": "1"']],
        ),
        ("minimax_m2", "<minimax:tool_call>\nno", "<minimax:tool_call>\nno", []),
        (
            "minimax_m2",
            '<minimax:tool_call><invoke name="now"></invoke>that </minimax:tool_call>',
            "that </minimax:tool_call>",
            [["now", "{}"]],
        ),
        ("deepseek_v31", f"{DEEPSEEK[0]}now", f"{DEEPSEEK[0]}now", []),
        (
            "deepseek_v31",
            f"{DEEPSEEK[0]}{deepseek_v31('now', '[1]')}",
            f"{DEEPSEEK[0]}{deepseek_v31('now', '[1]')}",
            [],
        ),
        (
            "deepseek_v3",
            f"{DEEPSEEK[0]}{deepseek_v3('now', '{}').replace('```json', '')}",
            f"{DEEPSEEK[0]}{deepseek_v3('now', '{}').replace('```json', '')}",
            [],
        ),
        (
            "kimi_k2",
            f"{KIMI[0]}{kimi('now', 0, '{}').replace('functions.', '').replace(':0', '')}{KIMI[1]}",
            "",
            [["now", "{}"]],
        ),
        ("nemotron_json", "<TOOLCALL>[]</TOOLCALL>", "<TOOLCALL>[]</TOOLCALL>", []),
        ("lfm2", "<|tool_call_start|>[]<|tool_call_end|>", None, []),
        (
            "lfm2",
            "<|tool_call_start|>[f(a='sed -n '1,5p' x.py', b='1\n2')]<|tool_call_end|>",
            "",
            [["f", '{"a": "sed -n \'1,5p\' x.py", "b": "1\\n2"}']],
        ),
        (
            "lfm2",
            "<|tool_call_start|>[f(a={'y', 'x'}, b='\\d', c=0700)]<|tool_call_end|>",
            "",
            [["f", '{"a": ["x", "y"], "b": "\\\\d", "c": 700}']],
        ),
        (
            "pythonic",
            '\n[f(a={"k": [1, -2.5, {"x": (true, None)}], \'s\': "]) [g(b=1)"}, '
            "b='it\\'s \"x\"\\n'),"
            " f.g( ) ]\n",
            "",
            [
                [
                    "f",
                    '{"a": {"k": [1, -2.5, {"x": [true, null]}], "s": "]) [g(b=1)"}, '
                    '"b": "it\'s \\"x\\"\\n"}',
                ],
                ["f.g", "{}"],
            ],
        ),
        (
            "pythonic",
            f"[f(a='{12_000 * chr(92)}\\'')]",
            "",
            [["f", f'{{"a": "{12_000 * chr(92)}\'"}}']],
        ),
        ("pythonic", "See [f(a=1)] <|python_start|>[g(b=2)]", "See [f(a=1)]", [["g", '{"b": 2}']]),
        ("pythonic", "<|python_start|>g(b=2)<|python_end|>", "", [["g", '{"b": 2}']]),
        ("pythonic", "[f(a=1), see below]", ", see below]", [["f", '{"a": 1}']]),
        *(
            ("pythonic", text, None, list[list[str]]())
            for text in (
                "[f(x)] is a list, [g(b=1)] too",
                "[f(x)=1]",
                "[f('x')]",
                "[f(a=b)]",
                "[f(a=g(1))]",
                "[f(a=1 b=2)]",
                "[f(a=[1, 2)]",
                "[f(a=open('x').read())]",
                "[f(**{'a': 1})]",
                "[f(a=1",
                "[f(a='x, b=1)]",
                "[1](https://example.org/a(b=1))",
                "[f]",
                "[]",
                "f(a=1)",
                "<|python_start|>print(1)<|python_end|>",
            )
        ),
        (
            "solar_open",
            f"Let me see.\n<|begin|>assistant<|tool_calls|>{solar('now', '{}')}",
            "Let me see.",
            [["now", "{}"]],
        ),
    ],
)
def test_what_is_a_call_and_what_is_not(
    tool_format: str, text: str, content: str | None, calls: list[list[str]]
) -> None:
    for pieces in ([text], list(text)):
        found = read(pieces, tool_format)
        assert (found.content, found.calls) == (text if content is None else content, calls)


@pytest.mark.parametrize(("tool_format", "text"), BOTH)
def test_the_mark_before_calls_may_be_missing(tool_format: str, text: str) -> None:
    style = TOOL_FORMATS[tool_format]
    if not style.lead or style.lead not in text:
        return
    text = f"So:\n{text.replace(style.begin, '').lstrip()}\nDone."
    whole = read([text], tool_format)
    assert [name for name, _ in whole.calls] == ["get_weather", "now"]
    assert read(list(text), tool_format) == whole
    lead = f"Write {style.lead} so."
    assert read([lead], tool_format) == read(list(lead), tool_format) == Read(lead)


def test_text_of_a_parameter_streams() -> None:
    parser = ChatParser("glm45", None, schemas=SCHEMAS)
    assert parser.feed("<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Pa").tool_calls
    [more] = parser.feed('ris "x').tool_calls
    assert more.arguments == 'ris \\"x'
    assert parser.feed("</arg_val").tool_calls == []
    [more] = parser.feed("ue>").tool_calls
    assert more.arguments == '"'


@pytest.mark.parametrize(
    ("reasoning", "text", "thought", "content"),
    [
        ("think_answer", "<think>\nhm\n</think>\n<answer>\nyes\n</answer>", "hm", "yes"),
        ("think_answer", "<answer>\nyes\n</answer>\n", "", "yes"),
        ("think_answer", "<think>\n\n</think>\n<answer>\nyes </ans", "", "yes </ans"),
        ("think_answer", "<think>hm</think><answer>a </answer> b", "hm", "a </answer> b"),
        ("think_answer", "<think>hm</think>\n\nyes</answer>", "hm", "yes</answer>"),
        ("think_answer", "yes <answer>", "", "yes <answer>"),
        ("think_response", "<think>hm\n</think>\n\n\n<response>\nyes\n</response>\n", "hm", "yes"),
        ("granite", "Here is my thought process: hm\nHere is my response: yes", " hm", " yes"),
        ("solar_open", "<|think|>hm<|end|><|begin|>assistant<|content|>yes<|end|>", "hm", "yes"),
        ("solar_open", "<|content|>yes", "", "yes"),
        ("seed_oss", "<seed:think>a<seed:cot_budget_reflect>1", "a<seed:cot_budget_reflect>1", ""),
    ],
)
def test_marks_around_thoughts_and_answers(
    reasoning: str, text: str, thought: str, content: str
) -> None:
    for num_chars in (len(text), 1, 5):
        parser = ChatParser(None, reasoning)
        pieces = [*map(parser.feed, cut(text, num_chars)), parser.flush()]
        assert "".join(p.reasoning for p in pieces) == thought
        assert "".join(p.content for p in pieces) == content


@pytest.mark.parametrize(
    ("tool_format", "reasoning", "text"),
    [
        (
            "hunyuan",
            "think_answer",
            "<think>\nhm\n</think>\n<answer>\nSo:\n<tool_calls><tool_call>now\n```json\n{}\n```"
            "</tool_call></tool_calls>\n</answer>",
        ),
        (
            "solar_open",
            "solar_open",
            f"<|think|>hm<|end|><|begin|>assistant<|content|>So:<|end|><|begin|>assistant"
            f"<|tool_calls|>{solar('now', '{}')}",
        ),
        ("kimi_k2", "think", f"<think>hm</think>So: {KIMI[0]}{kimi('now', 3, '{}')}{KIMI[1]}"),
    ],
)
def test_calls_after_thoughts(tool_format: str, reasoning: str, text: str) -> None:
    for num_chars in (len(text), 1, 5):
        found = read(cut(text, num_chars), tool_format, reasoning)
        assert found == Read("So:", "hm", [["now", "{}"]])


def test_calls_of_kimi_end_its_thoughts() -> None:
    for num_chars in (200, 1, 5):
        found = read(
            cut(f"<think>hm{KIMI[0]}{kimi('now', 0, '{}')}", num_chars), "kimi_k2", "think"
        )
        assert found == Read("", "hm", [["now", "{}"]])

"""Conversations for templates that read tools from fields of messages."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from jinja2 import Environment
from jinja2.utils import Namespace

from weft.text.chat_parser import ChatParser
from weft.text.tool_messages import reads_fields, with_fields

PHI = "{% if 'tools' in message %}{{ '<|tool|>' + message['tools'] + '<|/tool|>' }}{% endif %}"
OLMO = "{% if message.get('functions', none) %}{{ message['function_calls'] }}{% endif %}"
FUNCTION = {"name": "f", "parameters": {"type": "object", "properties": {}}}
TOOLS = [{"type": "function", "function": FUNCTION}]
CALL = {"function": {"name": "f", "arguments": {"a": 'é "y"', "n": [1, None]}}}
ASKED: list[dict[str, Any]] = [
    {"role": "user", "content": "ask"},
    {"role": "assistant", "content": None, "tool_calls": [CALL, CALL]},
    {"role": "tool", "content": "7"},
]


@pytest.mark.parametrize(("template", "field"), [(PHI, "tools"), (OLMO, "functions")])
def test_tools_are_in_the_system_message(template: str, field: str) -> None:
    assert reads_fields(template)
    first, *rest = with_fields(ASKED, template, TOOLS)
    assert first["role"] == "system" and first["content"]
    assert json.loads(first[field]) == [FUNCTION]
    assert [m["role"] for m in rest][:2] == ["user", "assistant"]
    own = [{"role": "system", "content": "Be brief."}, *ASKED]
    assert with_fields(own, template, TOOLS)[0] == {**own[0], field: first[field]}
    assert with_fields(ASKED[:1], template, None) == ASKED[:1]


@pytest.mark.parametrize(
    ("template", "format", "role"),
    [(PHI, "phi4_mini_json", "tool"), (OLMO, "olmo3", "environment")],
)
def test_earlier_calls_are_what_the_format_reads(template: str, format: str, role: str) -> None:
    _, _, called, result = with_fields(ASKED, template, TOOLS)
    assert result == {"role": role, "content": "7"}
    text = called["content"]
    if format == "olmo3":
        text += f"<function_calls>{called['function_calls']}</function_calls>"
    assert "é" in text
    parser = ChatParser(format, None)
    piece = parser.flush(parser.feed(text))
    assert piece.content == ""
    given = ["".join(d.arguments for d in piece.tool_calls if d.index == i) for i in (0, 1)]
    assert [json.loads(arguments) for arguments in given] == [CALL["function"]["arguments"]] * 2


HARMONY = """{% for message in messages %}{% if 'tool_calls' in message %}\
{% set call = message.tool_calls[0].function %}{% set last.name = call.name %}\
{{ message.thinking or message.content }}<|start|>{{ call.name }} {{ call.arguments }}<|call|>\
{% elif message.role == 'tool' %}<|start|>{{ last.name }}: {{ message.content }}<|end|>\
{% else %}{{ message.role }}: {{ message.content }}<|end|>{% endif %}{% endfor %}"""
"""As gpt-oss's: only the first call of a message shows, and a result is that of the last call."""


@pytest.mark.parametrize(
    ("results", "shown"),
    [
        ([("2", "B"), ("1", "A")], "f 1<|call|>f: A<|end|>g 2<|call|>g: B<|end|>h 3<|call|>"),
        ([(None, "A"), (None, "B")], "f 1<|call|>f: A<|end|>g 2<|call|>g: B<|end|>h 3<|call|>"),
        ([("3", "C")], "f 1<|call|>g 2<|call|>h 3<|call|>h: C<|end|>"),
        (
            [("1", "A"), ("1", "a"), ("4", "?"), ("3", "C")],
            "f 1<|call|>f: A<|end|>f: a<|end|>g 2<|call|>h 3<|call|>h: ?<|end|>h: C<|end|>",
        ),
    ],
)
def test_a_template_that_shows_one_call_of_a_message_is_given_one(
    results: list[tuple[str | None, str]], shown: str
) -> None:
    calls = [
        {"id": str(n), "function": {"name": name, "arguments": n}}
        for n, name in enumerate("fgh", start=1)
    ]
    asked = [
        {"role": "user", "content": "ask"},
        {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": calls},
        *({"role": "tool", "content": text, "tool_call_id": id} for id, text in results),
        {"role": "assistant", "content": "Done."},
    ]
    given = with_fields(asked, HARMONY, TOOLS)
    text = Environment().from_string(HARMONY).render(messages=given, last=Namespace())
    text = text.replace("<|start|>", "")
    assert text == f"user: ask<|end|>hm{shown}assistant: Done.<|end|>"
    alike = [m if m.get("role") != "tool" else {**m, "tool_call_id": "x"} for m in asked]
    alike[1] = {**alike[1], "tool_calls": [{**call, "id": "x"} for call in calls]}
    roles = " ".join(m["role"] for m in with_fields(alike, HARMONY, TOOLS)[1:-1])
    assert roles.startswith(" ".join(["assistant tool"] * min(len(results), 3)))
    every = HARMONY + "{% for call in message.tool_calls %}{% endfor %}"
    assert with_fields(asked, every, TOOLS)[1]["tool_calls"] == calls


def test_calls_of_lfm_are_content_where_the_template_knows_none() -> None:
    lfm = "<|tool_list_start|>{{ tools }}{{ message.content }}"
    asked, called, result = with_fields(ASKED, lfm, TOOLS)
    assert (asked, result) == (ASKED[0], ASKED[2])
    parser = ChatParser("lfm2", None)
    piece = parser.flush(parser.feed(called["content"]))
    given = ["".join(d.arguments for d in piece.tool_calls if d.index == i) for i in (0, 1)]
    assert [json.loads(arguments) for arguments in given] == [CALL["function"]["arguments"]] * 2
    assert piece.content == ""
    assert with_fields(ASKED, lfm + "{{ message.tool_calls }}", TOOLS) == ASKED


def test_calls_of_glm_are_messages_with_the_name_as_metadata() -> None:
    glm = "{{ tools }}<|observation|><|assistant|>{{ m.metadata }}"
    asked, *called, result = with_fields(ASKED, glm, TOOLS)
    assert (asked, result) == (ASKED[0], {"role": "observation", "content": "7"})
    assert [(m["role"], m["metadata"]) for m in called] == [("assistant", "f")] * 2
    assert json.loads(called[0]["content"]) == CALL["function"]["arguments"]
    assert "é" in called[0]["content"]


def test_other_templates_get_the_messages_as_they_are() -> None:
    for template in ("{{ tools }}{{ messages }}", OLMO + "{% if tools %}{% endif %}"):
        assert not reads_fields(template)
        assert with_fields(ASKED, template, TOOLS) == ASKED


def test_calls_of_kimi_have_numbers() -> None:
    asked: list[dict[str, Any]] = [
        {"role": "assistant", "tool_calls": [{"id": "a", **CALL}, {"id": "b", **CALL}]},
        {"role": "tool", "tool_call_id": "b", "content": "7"},
        {"role": "tool", "tool_call_id": "other", "content": "8"},
        {"role": "assistant", "tool_calls": [{"id": "a", **CALL}]},
        {"role": "tool", "tool_call_id": "a", "content": "9"},
    ]
    first, *results = with_fields(asked, "{{ tools }}## Return of {{ m.tool_call_id }}", TOOLS)
    assert [call["id"] for call in first["tool_calls"]] == ["functions.f:0", "functions.f:1"]
    assert [m.get("tool_call_id") for m in results] == [
        "functions.f:1",
        "other",
        None,
        "functions.f:2",
    ]


def test_calls_of_mistral_have_nine_characters() -> None:
    mistral = "{{ tools }}{%- if tool_call.id is not string or tool_call.id|length != 9 %}"
    asked: list[dict[str, Any]] = [
        {
            "role": "assistant",
            "tool_calls": [{"id": "call_1", **CALL}, {"id": "abcDEF123", **CALL}],
        },
        {"role": "tool", "tool_call_id": "abcDEF123", "content": "7"},
        {"role": "tool", "tool_call_id": "call_1", "content": "8"},
    ]
    called, second, first = with_fields(asked, mistral, TOOLS)
    new, kept = (call["id"] for call in called["tool_calls"])
    assert re.fullmatch("[0-9a-f]{9}", new) and kept == "abcDEF123"
    assert (first["tool_call_id"], second["tool_call_id"]) == (new, kept)


def test_thoughts_have_the_name_that_the_template_knows() -> None:
    gpt_oss = (
        "{{ tools }}{{ message.thinking }}{{ raise('Cannot pass both content and thinking') }}"
    )
    thought = {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": [CALL]}
    both = {**thought, "content": "I will."}
    assert with_fields([thought, both], gpt_oss, TOOLS) == [{**thought, "thinking": "hm"}, both]
    lfm = "{{ tools }}{{ message['thinking'] }}"
    assert with_fields([both], lfm, TOOLS) == [{**both, "thinking": "hm"}]


def test_arguments_are_text_where_a_template_adds_them_to_text() -> None:
    deepseek = "{{ tools }}{{ '<｜tool▁sep｜>' + tool['function']['arguments'] + '\\n' }}"
    _, called, _ = with_fields(ASKED, deepseek, TOOLS)
    for call in called["tool_calls"]:
        assert json.loads(call["function"]["arguments"]) == CALL["function"]["arguments"]
        assert "é" in call["function"]["arguments"]
    as_it_is = "{{ tools }}{{ tool['function']['arguments'] | tojson }}"
    assert with_fields(ASKED, as_it_is, TOOLS) == ASKED

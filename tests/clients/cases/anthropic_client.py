"""Anthropic's client."""

from __future__ import annotations

from typing import Any

from anthropic import Anthropic
from shared import MODEL, REVERSED, URL, WORD, Paint, run

client = Anthropic(base_url=URL, api_key="none", max_retries=0)
ASK: Any = [{"role": "user", "content": WORD}]
GREEDY: Any = {"model": MODEL, "max_tokens": 400, "extra_body": {"temperature": 0}}
PAINT: Any = {"name": "Paint", "input_schema": Paint.model_json_schema()}


def text_of(message: Any) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


def one() -> None:
    assert text_of(client.messages.create(messages=ASK, **GREEDY)) == REVERSED
    assert client.messages.count_tokens(model=MODEL, messages=ASK).input_tokens > 0


def turns() -> None:
    messages = list(ASK)
    for _ in range(3):
        said = client.messages.create(messages=messages, **GREEDY)
        messages += [{"role": "assistant", "content": said.content}, *ASK]


def stream() -> None:
    with client.messages.stream(messages=ASK, **GREEDY) as events:
        assert "".join(events.text_stream) == REVERSED


def tools() -> None:
    asked = {"tools": [PAINT], "tool_choice": {"type": "any"}, **GREEDY}
    answer = client.messages.create(messages=ASK, **asked)
    (call,) = (block for block in answer.content if block.type == "tool_use")
    Paint.model_validate(call.input)
    back: Any = {"type": "tool_result", "tool_use_id": call.id, "content": "done"}
    messages: Any = [
        *ASK,
        {"role": "assistant", "content": answer.content},
        {"role": "user", "content": [back]},
    ]
    client.messages.create(messages=messages, tools=[PAINT], **GREEDY)


def forms() -> None:
    schema = Paint.model_json_schema() | {"additionalProperties": False}
    form = {"output_config": {"format": {"type": "json_schema", "schema": schema}}}
    asked = GREEDY | {"extra_body": {"temperature": 0, **form}}
    Paint.model_validate_json(text_of(client.messages.create(messages=ASK, **asked)))


run(one=one, turns=turns, stream=stream, tools=tools, forms=forms)

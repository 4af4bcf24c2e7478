"""OpenAI's client."""

from __future__ import annotations

from typing import Any

import openai
from shared import MODEL, REVERSED, URL, WORD, Paint, run

client = openai.OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)
ASK: Any = [{"role": "user", "content": WORD}]
GREEDY: Any = {"model": MODEL, "temperature": 0, "max_tokens": 400}


def one() -> None:
    answer = client.chat.completions.create(messages=ASK, **GREEDY)
    assert answer.choices[0].message.content == REVERSED
    vector = client.embeddings.create(model=MODEL, input=WORD).data[0].embedding
    assert abs(sum(value * value for value in vector) - 1) < 1e-4


def turns() -> None:
    messages = list(ASK)
    for _ in range(3):
        said = client.chat.completions.create(messages=messages, **GREEDY).choices[0].message
        messages += [said.model_dump(), *ASK]
    stored = client.responses.create(model=MODEL, input=WORD, temperature=0)
    assert stored.output_text == REVERSED
    client.responses.create(model=MODEL, input=WORD, previous_response_id=stored.id)


def stream() -> None:
    chunks = client.chat.completions.create(messages=ASK, stream=True, **GREEDY)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == REVERSED


def tools() -> None:
    tool: Any = openai.pydantic_function_tool(Paint)
    answer = client.chat.completions.create(
        messages=ASK, tools=[tool], tool_choice="required", **GREEDY
    )
    (call,) = answer.choices[0].message.tool_calls or ()
    Paint.model_validate_json(call.function.arguments)
    back: Any = {"role": "tool", "tool_call_id": call.id, "content": "done"}
    messages = [*ASK, answer.choices[0].message.model_dump(), back]
    client.chat.completions.create(messages=messages, tools=[tool], **GREEDY)


def forms() -> None:
    parsed = client.chat.completions.parse(messages=ASK, response_format=Paint, **GREEDY)
    assert isinstance(parsed.choices[0].message.parsed, Paint)


run(one=one, turns=turns, stream=stream, tools=tools, forms=forms)

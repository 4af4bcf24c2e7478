"""instructor, which always asks for an object."""

from __future__ import annotations

from typing import Any

import instructor
import openai
from shared import MODEL, URL, WORD, Paint, run

client = openai.OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)
ASK: Any = {
    "model": MODEL,
    "messages": [{"role": "user", "content": WORD}],
    "response_model": Paint,
    "temperature": 0,
    "max_tokens": 400,
    "max_retries": 0,
}


def made(mode: instructor.Mode) -> Any:
    return instructor.from_openai(client, mode=mode)


def tools() -> None:
    assert isinstance(made(instructor.Mode.TOOLS).create(**ASK), Paint)


def forms() -> None:
    assert isinstance(made(instructor.Mode.JSON_SCHEMA).create(**ASK), Paint)


def stream() -> None:
    (*_, last) = made(instructor.Mode.TOOLS).create_partial(**ASK)
    Paint.model_validate(last.model_dump())


run(stream=stream, tools=tools, forms=forms)

"""Pydantic AI."""

from __future__ import annotations

import asyncio

from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
from shared import MODEL, REVERSED, URL, WORD, Paint, run

model = OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=f"{URL}/v1", api_key="none"))
GREEDY = {"temperature": 0.0, "max_tokens": 400, "extra_body": {"min_tokens": 2}}
"""The library takes an answer without text for a failure, and the tiny model has not always more to
say."""
agent = Agent(model, model_settings=GREEDY)


def one() -> None:
    assert agent.run_sync(WORD).output == REVERSED


def turns() -> None:
    result = agent.run_sync(WORD)
    for _ in range(3):
        result = agent.run_sync(WORD, message_history=result.all_messages())


def stream() -> None:
    async def streamed() -> str:
        async with agent.run_stream(WORD) as result:
            return "".join([part async for part in result.stream_text(delta=True)])

    assert asyncio.run(streamed()) == REVERSED


def tools() -> None:
    caller = Agent(model, output_type=ToolOutput(Paint), model_settings=GREEDY)
    result = caller.run_sync(WORD)
    assert isinstance(result.output, Paint)
    caller.run_sync(WORD, message_history=result.all_messages())


def forms() -> None:
    filler = Agent(model, output_type=NativeOutput(Paint), model_settings=GREEDY)
    assert isinstance(filler.run_sync(WORD).output, Paint)


run(one=one, turns=turns, stream=stream, tools=tools, forms=forms)

"""OpenAI's agents, by chats and by responses."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from shared import MODEL, REVERSED, URL, WORD, Paint, run

set_tracing_disabled(True)


def agent(model: Any, settings: Any = None, **options: Any) -> Agent:
    greedy = ModelSettings(temperature=0, max_tokens=400, **(settings or {}))
    return Agent(name="tiny", model=model, model_settings=greedy, **options)


def each(work: Any) -> None:
    async def all_of_them() -> None:
        async with AsyncOpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0) as client:
            for kind in (OpenAIChatCompletionsModel, OpenAIResponsesModel):
                await work(kind(MODEL, client))

    asyncio.run(all_of_them())


def one() -> None:
    async def work(model: Any) -> None:
        assert (await Runner.run(agent(model), WORD)).final_output == REVERSED

    each(work)


def turns() -> None:
    async def work(model: Any) -> None:
        result = await Runner.run(agent(model), WORD)
        for _ in range(3):
            again = [*result.to_input_list(), {"role": "user", "content": WORD}]
            result = await Runner.run(agent(model), again)

    each(work)


def stream() -> None:
    async def work(model: Any) -> None:
        result = Runner.run_streamed(agent(model), WORD)
        parts = [
            event.data.delta
            async for event in result.stream_events()
            if event.type == "raw_response_event"
            and event.data.type == "response.output_text.delta"
        ]
        assert "".join(parts) == REVERSED

    each(work)


@function_tool
def paint(color: Literal["red", "green"], coats: Literal[1, 2]) -> str:
    """Paint a wall."""
    return "done"


def tools() -> None:
    async def work(model: Any) -> None:
        forced = agent(model, {"tool_choice": "required"}, tools=[paint])
        assert (await Runner.run(forced, WORD)).new_items[0].type == "tool_call_item"

    each(work)


def forms() -> None:
    async def work(model: Any) -> None:
        for tools in ([], [paint]):
            painter = agent(model, output_type=Paint, tools=tools)
            assert isinstance((await Runner.run(painter, WORD)).final_output, Paint)

    each(work)


run(one=one, turns=turns, stream=stream, tools=tools, forms=forms)

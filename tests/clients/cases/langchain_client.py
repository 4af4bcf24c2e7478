"""LangChain's client of OpenAI's API."""

from __future__ import annotations

from typing import Any

from langchain_core.exceptions import ContextOverflowError
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from shared import MODEL, REVERSED, URL, WORD, Paint, run

OPTIONS: Any = {"model": MODEL, "base_url": f"{URL}/v1", "api_key": "none"}
llm = ChatOpenAI(**OPTIONS, temperature=0, max_tokens=400, max_retries=0)


def one() -> None:
    assert llm.invoke(WORD).content == REVERSED
    embeddings = OpenAIEmbeddings(**OPTIONS, check_embedding_ctx_length=False)
    assert len(embeddings.embed_documents([WORD, "garden"])) == 2
    try:
        llm.invoke(WORD * 1000)
    except ContextOverflowError:  # middleware would shorten the conversation
        return
    raise AssertionError


def turns() -> None:
    messages: list[Any] = [HumanMessage(WORD)]
    for _ in range(3):
        messages += [llm.invoke(messages), HumanMessage(WORD)]


def stream() -> None:
    assert "".join(str(chunk.content) for chunk in llm.stream(WORD)) == REVERSED


def tools() -> None:
    answer = llm.bind_tools([Paint], tool_choice="any").invoke(WORD)
    (call,) = answer.tool_calls
    Paint.model_validate(call["args"])
    back = ToolMessage("done", tool_call_id=call["id"])
    llm.bind_tools([Paint]).invoke([HumanMessage(WORD), answer, back])


def forms() -> None:
    for method in ("json_schema", "function_calling"):
        assert isinstance(llm.with_structured_output(Paint, method=method).invoke(WORD), Paint)


run(one=one, turns=turns, stream=stream, tools=tools, forms=forms)

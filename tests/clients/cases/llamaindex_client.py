"""LlamaIndex."""

from __future__ import annotations

from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from shared import MODEL, REVERSED, URL, WORD, Paint, run

llm = OpenAILike(
    model=MODEL,
    api_base=f"{URL}/v1",
    api_key="none",
    is_chat_model=True,
    is_function_calling_model=True,
    should_use_structured_outputs=True,
    temperature=0,
    max_tokens=400,
    max_retries=0,
)
ASK = ChatMessage(role="user", content=WORD)


def one() -> None:
    assert llm.chat([ASK]).message.content == REVERSED


def turns() -> None:
    messages = [ASK]
    for _ in range(3):
        messages += [llm.chat(messages).message, ASK]


def stream() -> None:
    assert "".join(part.delta or "" for part in llm.stream_chat([ASK])) == REVERSED


def paint(color: str, coats: int) -> str:
    """Paint a wall."""
    return f"{coats} coats of {color}"


def tools() -> None:
    tool = FunctionTool.from_defaults(paint, fn_schema=Paint)
    answer = llm.chat_with_tools([tool], chat_history=[ASK], tool_required=True)
    (call,) = llm.get_tool_calls_from_response(answer)
    Paint.model_validate(call.tool_kwargs)
    back = ChatMessage(
        role="tool", content="done", additional_kwargs={"tool_call_id": call.tool_id}
    )
    llm.chat([ASK, answer.message, back])


def forms() -> None:
    assert isinstance(llm.as_structured_llm(Paint).chat([ASK]).raw, Paint)


run(one=one, turns=turns, stream=stream, tools=tools, forms=forms)

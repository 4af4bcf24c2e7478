"""`/tokenize` and `/detokenize`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from http_api import HI, Web, World
from toy_tokenizers import byte_level, thinking


async def test_a_text_there_and_back(web: Web) -> None:
    for model in ({}, {"model": "alias"}):
        answer = await web.post("/tokenize", {"prompt": "aé日b", **model})
        whole = answer.json()
        ids = thinking().encode("aé日b")
        assert whole == {
            "count": len(ids),
            "max_model_len": 4096,
            "tokens": ids,
            "token_strs": None,
        }
        answer = await web.post("/detokenize", {"tokens": ids, **model})
        assert answer.json() == {"prompt": "aé日b"}
    answer = await web.post("/tokenize", {"prompt": "a<think>", "return_token_strs": True})
    assert answer.json()["token_strs"] == ["a", "<think>"]
    assert (await web.post("/tokenize", {"prompt": ""})).json()["count"] == 0
    assert (await web.post("/detokenize", {"tokens": []})).json() == {"prompt": ""}
    long = (await web.post("/tokenize", {"prompt": "x" * 20_000})).json()
    assert long["count"] == 20_000, "it may be longer than the context"


async def test_special_tokens_are_added_unless_told_otherwise(tmp_path: Path) -> None:
    tokenizer = byte_level.__wrapped__()
    asked: list[bool] = []

    def encode(text: str, add_special_tokens: bool = True) -> list[int]:
        asked.append(add_special_tokens)
        return [1]

    tokenizer.encode = encode
    web = Web(World(tmp_path, tokenizer))
    for given in ({}, {"add_special_tokens": True}, {"add_special_tokens": False}):
        await web.post("/tokenize", {"prompt": "x", **given})
        await web.complete(prompt="x", **given)
    assert asked == [True] * 4 + [False] * 2


async def test_a_conversation(web: Web) -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    for body, text in (
        ({"messages": HI}, "<s>user: hi<s>assistant:"),
        ({"messages": HI, "add_generation_prompt": False}, "<s>user: hi"),
        (
            {"messages": HI, "chat_template_kwargs": {"enable_thinking": False}},
            "<s>user: hi<s>assistant:<think>\n\n</think>\n\n",
        ),
        (
            {"messages": [*HI, {"role": "assistant", "content": "so"}]}
            | {"continue_final_message": True},
            "<s>user: hi<s>assistant: so",
        ),
        (
            {"messages": HI, "tools": [tool]},
            '<s>tool: f {"type": "object", "properties": {}}<s>user: hi<s>assistant:',
        ),
    ):
        answer = await web.post("/tokenize", body)
        assert answer.status_code == 200, answer.text
        assert thinking().decode(answer.json()["tokens"]) == text


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/tokenize", {}, 400, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": HI}, 400, "prompt"),
        ("/tokenize", {"prompt": ["x"]}, 400, "prompt"),
        ("/tokenize", {"prompt": "x", "tools": [{"type": "x"}]}, 400, "tools[0].type"),
        ("/tokenize", {"prompt": "x", "continue_final_message": True}, 400, None),
        ("/tokenize", {"messages": []}, 400, "messages"),
        ("/tokenize", {"messages": HI, "continue_final_message": True}, 400, None),
        ("/tokenize", {"messages": HI, "add_special_tokens": True}, 400, "add_special_tokens"),
        ("/tokenize", {"prompt": "x", "model": "nobody"}, 404, "model"),
        ("/tokenize", {"prompt": "x", "nonsense": 1}, 400, "nonsense"),
        ("/detokenize", {}, 400, "tokens"),
        ("/detokenize", {"tokens": [-1]}, 400, "tokens"),
        ("/detokenize", {"tokens": [10**30]}, 400, "tokens"),
        ("/detokenize", {"tokens": ["x"]}, 400, "tokens[0]"),
        ("/detokenize", {"tokens": ["x"] * 2000}, 400, "tokens[0]"),
        ("/tokenize", {"messages": ["x"] * 2000}, 400, "messages[0]"),
        ("/tokenize", {"messages": HI * 3000}, 400, "messages"),
        ("/detokenize", {"tokens": [1], "model": "nobody"}, 404, "model"),
    ],
)
async def test_bad_requests_name_the_field(
    shared: World, path: str, body: dict[str, Any], status: int, param: str | None
) -> None:
    web = Web(shared)
    answer = await web.post(path, body)
    assert answer.status_code == status, answer.text
    assert answer.json()["error"]["param"] == (param or "continue_final_message")


async def test_without_a_tokenizer(tmp_path: Path) -> None:
    web = Web(World(tmp_path, None))
    for path, body in (
        ("/tokenize", {"prompt": "x"}),
        ("/tokenize", {"messages": HI}),
        ("/detokenize", {"tokens": [1]}),
    ):
        answer = await web.post(path, body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, next(iter(body)))

"""The HTTP side over a deterministic engine: shapes, errors, streams, adapters, disconnects."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import openai
import pytest
from http_api import (
    CHAT,
    COMPLETE,
    EOS,
    HI,
    Web,
    World,
    digest_of,
    served,
)
from patience import PATIENCE_S, until, wait_until
from prometheus_client.parser import text_string_to_metric_families
from toy_tokenizers import byte_level

from weft.core.errors import EngineDead
from weft.fleet.fleet_client import FleetClient


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path, byte_level())
    yield made
    made.check()


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """For requests that are refused, and so leave nothing behind."""
    made = World(tmp_path_factory.mktemp("world"), byte_level(), max_prompts=8, max_choices=4)
    yield made
    assert not made.engine.requests
    made.check()


# Answers.


async def test_completion(web: Web) -> None:
    answer = await web.complete()
    assert answer["object"] == "text_completion" and answer["model"] == "base"
    assert answer["id"].startswith("cmpl-") and answer["system_fingerprint"] is None
    assert answer["choices"] == [
        {
            "index": 0,
            "text": "cba",
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": None,
        }
    ]
    assert answer["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 4,
        "total_tokens": 7,
        "prompt_tokens_details": {"cached_tokens": 1},
    }


async def test_prompts_in_all_their_forms(web: Web) -> None:
    a, b = byte_level().encode("ab", add_special_tokens=False)
    for prompt, texts in (
        ("ab", ["ba"]),
        (["ab", "xyz"], ["ba", "zyx"]),
        ([a, b], ["ba"]),
        ([[a, b], [b, b, a]], ["ba", "abb"]),
    ):
        answer = await web.complete(prompt=prompt)
        assert [c["text"] for c in answer["choices"]] == texts
        assert [c["index"] for c in answer["choices"]] == list(range(len(texts)))


async def test_batches_stream_each_choice(web: Web) -> None:
    body = {"prompt": ["ab", "xyz"], "stream_options": {"include_usage": True}}
    *chunks, last, done = await web.chunks("/v1/completions", body)
    texts = ["", ""]
    for chunk in chunks:
        assert chunk["usage"] is None
        for choice in chunk["choices"]:
            texts[choice["index"]] += choice["text"]
    assert texts == ["ba", "zyx"]
    assert last["choices"] == [] and last["usage"]["total_tokens"] == 5 + 7
    assert done == "[DONE]"


async def test_chat_and_its_stream(web: Web) -> None:
    answer = await web.chat()
    text = ":tnatsissa>s<ih :resu>s<".replace(">s<", "")
    assert answer["choices"][0]["message"] == {
        "role": "assistant",
        "content": text,
        "refusal": None,
    }
    body = {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
        "stream_options": {"include_usage": True},
    }
    *chunks, last, done = await web.chunks("/v1/chat/completions", body)
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    parts = [c["choices"][0]["delta"].get("content", "") for c in chunks]
    assert "".join(parts) == text
    ends = [c["choices"][0]["finish_reason"] for c in chunks]
    assert ends == [None] * (len(ends) - 1) + ["stop"]
    assert last["usage"] == answer["usage"] and done == "[DONE]"


async def test_chat_template_options(web: Web, world: World) -> None:
    await web.chat(add_generation_prompt=False)
    await web.chat(chat_template_kwargs={"mood": "!"})
    prompts = [byte_level().decode(r.prompt_ids) for r in world.engine.requests]
    assert prompts == ["<s>user: hi", "<s>user: hi<s>assistant:!"]


async def test_default_and_given_max_tokens(web: Web, world: World) -> None:
    await web.complete()
    await web.complete(prompt="x" * 60)
    await web.complete(max_tokens=2)
    await web.chat(max_tokens=3)
    await web.chat(max_completion_tokens=4)
    await web.chat()
    requests = world.engine.requests
    limits = [r.params.max_tokens for r in requests]
    assert limits == [16, 4, 2, 3, 4, 64 - len(requests[-1].prompt_ids)]


async def test_sampling_fields_reach_the_engine(web: Web, world: World) -> None:
    fields: dict[str, Any] = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "seed": 3,
        "stop": ["x", "y"],
        "stop_token_ids": [5],
        "ignore_eos": True,
        "skip_special_tokens": False,
        "include_stop_str_in_output": True,
    }
    await web.complete(**fields)
    await web.complete(stop="z", temperature=1)
    first, second = (r.params for r in world.engine.requests)
    for name, value in fields.items():
        assert getattr(first, name) == (tuple(value) if isinstance(value, list) else value)
    assert second.stop == ("z",)


@pytest.mark.parametrize("stream", [False, True])
async def test_stop_strings_end_the_request_in_the_engine(
    web: Web, world: World, stream: bool
) -> None:
    world.engine.close_s = 0.05
    body = {"prompt": "abcdef", "stop": ["x", "dcb"]}
    if stream:
        chunks = (await web.chunks(COMPLETE, body))[:-1]
        text = "".join(c["choices"][0]["text"] for c in chunks)
        choice = chunks[-1]["choices"][0]
    else:
        choice = (await web.complete(**body))["choices"][0]
        text = choice["text"]
    assert text == "fe"
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "dcb")
    assert len(world.engine.aborted) == 1 and world.engine.num_open == 0


async def test_tokens_are_wanted_one_by_one_where_somebody_waits_for_them(
    web: Web, world: World
) -> None:
    await web.complete()
    await web.complete(stop="z")
    await web.chunks(COMPLETE, {"prompt": "abc"})
    await web.chat()
    assert [r.in_groups for r in world.engine.requests] == [True, False, False, True]


async def test_return_token_ids(web: Web) -> None:
    a, b = byte_level().encode("ab", add_special_tokens=False)
    choice = (await web.complete(prompt="ab", return_token_ids=True))["choices"][0]
    assert choice["prompt_token_ids"] == [a, b] and choice["token_ids"] == [b, a, EOS]
    body = {"prompt": "ab", "return_token_ids": True}
    chunks = (await web.chunks("/v1/completions", body))[:-1]
    assert chunks[0]["choices"][0]["prompt_token_ids"] == [a, b]
    assert [x for c in chunks for x in c["choices"][0]["token_ids"]] == [b, a, EOS]
    answer = await web.chat(return_token_ids=True)
    prompt_ids = answer["prompt_token_ids"]
    assert answer["choices"][0]["token_ids"] == [*prompt_ids[::-1], EOS]
    body = {"messages": [{"role": "user", "content": "hi"}], "return_token_ids": True}
    chunks = (await web.chunks("/v1/chat/completions", body))[:-1]
    assert chunks[0]["prompt_token_ids"] == prompt_ids
    ids = [x for c in chunks for x in c["choices"][0].get("token_ids", [])]
    assert ids == [*prompt_ids[::-1], EOS]


@pytest.mark.parametrize("tokens_per_event", [1, 3])
async def test_completion_logprobs(web: Web, world: World, tokens_per_event: int) -> None:
    world.engine.tokens_per_event = tokens_per_event
    ids = byte_level().encode("aé日b", add_special_tokens=False)[::-1]
    answer = await web.complete(prompt=ids, logprobs=1, max_tokens=20)
    shape = answer["choices"][0]["logprobs"]
    assert answer["choices"][0]["text"] == "aé日b"
    assert shape["tokens"][0] == "a" and shape["tokens"][-1] == "</s>"
    assert any(t.startswith("bytes:\\x") for t in shape["tokens"])
    assert set(shape["token_logprobs"]) == {-0.25}
    assert shape["top_logprobs"][0] == {"a": -0.25}
    assert shape["text_offset"][0] == 0 and shape["text_offset"][-2:] == [3, 4]
    chunks = await web.chunks("/v1/completions", {"prompt": ids, "logprobs": 1, "max_tokens": 20})
    pieces = [c["choices"][0]["logprobs"] for c in chunks[:-1]]
    for key in shape:
        assert [x for p in pieces for x in p[key]] == shape[key]


async def test_chat_logprobs(web: Web) -> None:
    answer = await web.chat(logprobs=True, top_logprobs=2)
    content = answer["choices"][0]["logprobs"]["content"]
    assert content[0]["token"] == ":" and content[0]["bytes"] == [58]
    assert content[0]["logprob"] == -0.25
    assert [t["logprob"] for t in content[0]["top_logprobs"]] == [-0.25, -1.5]
    assert len(content) == answer["usage"]["completion_tokens"]
    answer = await web.chat(logprobs=True)
    assert answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []


async def test_without_a_tokenizer(tmp_path: Path) -> None:
    world = World(tmp_path, None)
    web = Web(world)
    choice = (await web.complete(prompt=[5, 6], logprobs=0))["choices"][0]
    assert choice["text"] == "" and choice["token_ids"] == [6, 5, EOS]
    assert choice["logprobs"]["tokens"] == ["token_id:6", "token_id:5", f"token_id:{EOS}"]
    for path, body, param in (
        ("completions", {"prompt": "text"}, "prompt"),
        ("completions", {"prompt": [1], "stop": "x"}, "stop"),
        ("chat/completions", {"messages": [{"role": "user", "content": "x"}]}, "messages"),
    ):
        answer = await web.post(f"/v1/{path}", {"model": "base", **body})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    world.check()


async def test_long_texts_are_tokenized_elsewhere(tmp_path: Path) -> None:
    world = World(tmp_path, byte_level(), long_text_chars=5)
    web = Web(world)
    assert (await web.complete(prompt="abcdefgh"))["choices"][0]["text"] == "hgfedcba"
    many = await web.complete(prompt=["abc", "def"])
    assert [c["text"] for c in many["choices"]] == ["cba", "fed"]
    assert (await web.chat())["choices"][0]["message"]["content"].startswith(":tnat")
    world.check()


# Errors.


def called(arguments: str) -> dict[str, Any]:
    function = {"name": "f", "arguments": arguments}
    return {"id": "c", "type": "function", "function": function}


def function(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (COMPLETE, {"prompt": "x", "temperature": -1}, "temperature"),
        (COMPLETE, {"prompt": "x", "temperature": "hot"}, "temperature"),
        (COMPLETE, {"prompt": "x", "top_p": 0}, "top_p"),
        (COMPLETE, {"prompt": "x", "top_k": -2}, "top_k"),
        (COMPLETE, {"prompt": "x", "max_tokens": 0}, "max_tokens"),
        (COMPLETE, {"prompt": "x", "max_tokens": 1.5}, "max_tokens"),
        (COMPLETE, {"prompt": "x", "max_tokens": 64}, "max_tokens"),
        (COMPLETE, {"prompt": "x", "logprobs": 21}, "logprobs"),
        (COMPLETE, {"prompt": "x", "stop": [""]}, "stop"),
        (COMPLETE, {"prompt": "x", "stop_token_ids": [-1]}, "stop_token_ids"),
        (COMPLETE, {"prompt": "x", "stop_token_ids": [10**6]}, "stop_token_ids"),
        (COMPLETE, {"prompt": "x" * 64}, "prompt"),
        (COMPLETE, {"prompt": "x" * 100_000}, "prompt"),
        (COMPLETE, {"prompt": ""}, "prompt"),
        (COMPLETE, {"prompt": []}, "prompt"),
        (COMPLETE, {"prompt": [[]]}, "prompt"),
        (COMPLETE, {"prompt": [1, 10**6]}, "prompt"),
        (COMPLETE, {"prompt": [[1], [-1]]}, "prompt[1]"),
        (COMPLETE, {"prompt": [1, "x"]}, "prompt[1]"),
        (COMPLETE, {"prompt": [[1]] * 9}, "prompt"),
        (COMPLETE, {"prompt": [True]}, "prompt[0]"),
        (COMPLETE, {}, "prompt"),
        (COMPLETE, {"prompt": "x", "model": None}, "model"),
        (COMPLETE, {"prompt": "x", "suffix": "y"}, "suffix"),
        (COMPLETE, {"prompt": "x", "best_of": 2}, "best_of"),
        (COMPLETE, {"prompt": "x", "best_of": True}, "best_of"),
        (COMPLETE, {"prompt": "x", "n": 0}, "n"),
        (COMPLETE, {"prompt": "x", "n": 5}, "n"),
        (COMPLETE, {"prompt": ["x", "y", "z"], "n": 3}, "prompt"),
        (COMPLETE, {"prompt": "x", "presence_penalty": 2.1}, "presence_penalty"),
        (COMPLETE, {"prompt": "x", "frequency_penalty": -2.1}, "frequency_penalty"),
        (COMPLETE, {"prompt": "x", "repetition_penalty": 0}, "repetition_penalty"),
        (COMPLETE, {"prompt": "x", "min_p": 2}, "min_p"),
        (COMPLETE, {"prompt": "x", "min_tokens": 17}, "min_tokens"),
        (COMPLETE, {"prompt": "x", "logit_bias": {"x": 1}}, "logit_bias"),
        (COMPLETE, {"prompt": "x", "logit_bias": {"-1": 1}}, "logit_bias"),
        (COMPLETE, {"prompt": "x", "logit_bias": {"1000000": 1}}, "logit_bias"),
        (COMPLETE, {"prompt": "x", "logit_bias": {"1": 101}}, "logit_bias[1]"),
        (COMPLETE, {"prompt": "x", "logit_bias": {"7": 0, "1": "high"}}, "logit_bias[1]"),
        (COMPLETE, {"prompt": "x", "allowed_token_ids": [10**6]}, "allowed_token_ids"),
        (COMPLETE, {"prompt": "x", "allowed_token_ids": []}, "allowed_token_ids"),
        (COMPLETE, {"prompt": "x", "bad_words": [""]}, "bad_words"),
        (COMPLETE, {"prompt": "x", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        (COMPLETE, {"prompt": "x", "truncate_prompt_tokens": 65}, "truncate_prompt_tokens"),
        (COMPLETE, {"prompt": "x", "tools": [{}]}, "tools"),
        (COMPLETE, {"prompt": "x", "cache_salt": ""}, "cache_salt"),
        (COMPLETE, {"prompt": "x", "guided_choice": []}, "guided_choice"),
        (COMPLETE, {"prompt": "x", "guided_regex": "a", "guided_json": {}}, "guided_regex"),
        (COMPLETE, {"prompt": "x", "structured_outputs": {}}, "structured_outputs"),
        (COMPLETE, {"prompt": "x", "guided_regex": "a?" * 9000}, "guided_regex"),
        (COMPLETE, {"prompt": "x", "guided_grammar": "#" * 70_000}, "guided_grammar"),
        (COMPLETE, {"prompt": "x", "guided_choice": ["a"] * 5000}, "guided_choice"),
        (COMPLETE, {"prompt": "x", "structured_outputs": {"yaml": ""}}, "structured_outputs.yaml"),
        (
            COMPLETE,
            {"prompt": "x", "structured_outputs": {"regex": "a", "choice": ["b"]}},
            "structured_outputs",
        ),
        (COMPLETE, {"prompt": "x", "stream_options": {}}, "stream_options"),
        (CHAT, {"messages": []}, "messages"),
        (CHAT, {"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        (CHAT, {"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        (CHAT, {"messages": [{"role": "user"}]}, "messages[0].content"),
        (CHAT, {"messages": [{"role": "system", "content": None}, *HI]}, "messages[0].content"),
        (
            CHAT,
            {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
            "messages[0].content[0].text",
        ),
        (
            CHAT,
            {"messages": [{"role": "user", "content": [{"type": 5}]}]},
            "messages[0].content[0].type",
        ),
        (
            CHAT,
            {"messages": [{"role": "user", "content": "x", "tool_call_id": "c"}]},
            "messages[0].tool_call_id",
        ),
        (
            CHAT,
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content[0].type",
        ),
        (
            CHAT,
            {"messages": [*HI, {"role": "assistant", "tool_calls": [{}]}]},
            "messages[1].tool_calls[0].id",
        ),
        (
            CHAT,
            {"messages": [*HI, {"role": "assistant", "tool_calls": [called("{")]}]},
            "messages[1].tool_calls[0].function.arguments",
        ),
        (
            CHAT,
            {"messages": [*HI, {"role": "assistant", "tool_calls": [called("[1]")]}]},
            "messages[1].tool_calls[0].function.arguments",
        ),
        (CHAT, {"messages": HI, "tools": [{"type": "function"}]}, "tools[0].function"),
        (CHAT, {"messages": HI, "tools": [function("f")]}, "tools"),
        (CHAT, {"messages": HI, "tools": [function("f"), function("f")]}, "tools"),
        (CHAT, {"messages": HI, "tools": [function("f g")]}, "tools[0].function.name"),
        (
            CHAT,
            {"messages": HI, "tool_choice": {"type": "function", "name": "f"}},
            "tool_choice.function",
        ),
        (CHAT, {"messages": HI, "tool_choice": {"type": "allowed_tools"}}, "tool_choice.type"),
        (CHAT, {"messages": HI, "tool_choice": "required"}, "tool_choice"),
        (CHAT, {"messages": HI, "tool_choice": "maybe"}, "tool_choice"),
        (
            CHAT,
            {
                "messages": HI,
                "tools": [function("f")],
                "tool_choice": {"type": "function", "function": {"name": "g"}},
            },
            "tool_choice",
        ),
        (CHAT, {"messages": HI, "functions": [{}]}, "functions"),
        (CHAT, {"messages": HI, "function_call": {"name": "f"}}, "function_call"),
        (CHAT, {"messages": HI, "response_format": {"type": "yaml"}}, "response_format.type"),
        (
            CHAT,
            {"messages": HI, "response_format": {"type": "json_schema"}},
            "response_format.json_schema",
        ),
        (
            CHAT,
            {
                "messages": HI,
                "response_format": {"type": "json_object"},
                "structured_outputs": {"regex": "a"},
            },
            "structured_outputs",
        ),
        (CHAT, {"messages": HI, "continue_final_message": True}, "continue_final_message"),
        (CHAT, {"messages": HI, "add_special_tokens": True}, "add_special_tokens"),
        (CHAT, {"messages": HI, "echo": True}, "echo"),
        (CHAT, {"messages": HI, "audio": {}}, "audio"),
        (CHAT, {"messages": HI, "top_logprobs": 2}, "top_logprobs"),
        (CHAT, {"messages": HI, "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        (CHAT, {"messages": HI, "max_tokens": 1, "max_completion_tokens": 2}, "max_tokens"),
        (CHAT, {"messages": HI, "max_completion_tokens": 0}, "max_completion_tokens"),
        (CHAT, {"messages": HI, "max_completion_tokens": 60}, "max_completion_tokens"),
        (CHAT, {"messages": [{"role": "user", "content": "x" * 64}]}, "messages"),
        (CHAT, {"messages": HI, "chat_template_kwargs": {"tools": []}}, "chat_template_kwargs"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_bad_requests_name_the_field(
    shared: World, path: str, body: dict[str, Any], param: str, stream: bool
) -> None:
    stream = stream and "stream_options" not in body
    web = Web(shared)
    answer = await web.post(path, {"model": "base", "stream": stream, **body})
    error = answer.json()["error"]
    assert answer.status_code == 400, answer.text
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert error["message"]
    assert not shared.engine.requests


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"structured_outputs": {"yaml": ""}}, "structured_outputs.yaml is not a known field"),
        ({"adapters": [{"name": "a", "scale": 101}]}, "adapters[0].scale must be at most 100"),
        ({"adapters": [{"name": "a", "scale": -101}]}, "adapters[0].scale must be at least -100"),
        ({"cache_salt": "x" * 257}, "cache_salt must have at most 256 characters"),
    ],
)
async def test_bad_requests_say_what_is_wrong(
    shared: World, body: dict[str, Any], message: str
) -> None:
    web = Web(shared)
    answer = await web.post(COMPLETE, {"model": "base", "prompt": "x", **body})
    assert answer.json()["error"]["message"] == message


async def test_fields_that_ask_for_nothing_are_accepted(web: Web) -> None:
    await web.complete(
        n=1, best_of=1, echo=False, suffix=None, logit_bias={}, user="u", presence_penalty=0
    )
    await web.chat(
        tools=[],
        tool_choice="none",
        parallel_tool_calls=True,
        response_format={"type": "text"},
        metadata={"a": "b"},
        store=False,
        service_tier="auto",
        logprobs=None,
        stop=None,
        stream=None,
    )


async def test_too_long_tells_the_numbers(web: Web) -> None:
    """Gateways and agents know the case by these words, and then ask another model or send less."""
    for body, numbers in (
        ({"prompt": "x" * 70}, ("prompt is too long", "70")),
        ({"prompt": "x" * 10, "max_tokens": 60}, ("70", "10", "60")),
    ):
        answer = await web.post(COMPLETE, {"model": "base", **body})
        error = answer.json()["error"]
        assert error["code"] == "context_length_exceeded"
        assert all(n in error["message"] for n in numbers), error
        assert "this model's maximum context length is 64 tokens" in error["message"]


@pytest.mark.parametrize("stream", [False, True])
async def test_an_unknown_model_is_404_and_never_the_base(
    web: Web, world: World, stream: bool
) -> None:
    for path, body in ((COMPLETE, {"prompt": "x"}), (CHAT, {"messages": HI})):
        answer = await web.post(path, {"model": "nobody", "stream": stream, **body})
        assert answer.status_code == 404
        assert answer.json()["error"] == {
            "message": "The model 'nobody' does not exist; models that do: 'base', 'alias'",
            "type": "invalid_request_error",
            "param": "model",
            "code": "model_not_found",
        }
    assert not world.engine.requests
    answer = await web.get("/v1/models/nobody")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")


async def test_malformed_bodies_routes_and_methods(tmp_path: Path) -> None:
    web = Web(World(tmp_path, byte_level(), max_body_bytes=1000))

    async def endless() -> AsyncIterator[bytes]:
        for _ in range(100):
            yield b" " * 100

    for content, status in (
        (b"{", 400),
        (b"", 400),
        (b"[]", 400),
        (b"\xff", 400),
        (b'{"model": "\\ud800"}', 400),
        (b" " * 1001, 413),
        (endless(), 413),
    ):
        answer = await web.http.post(COMPLETE, content=content)
        assert answer.status_code == status, answer.text
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        (COMPLETE, {"prompt": "x", "top_p": 0}, "top_p must be above 0 and at most 1, got 0.0"),
        (COMPLETE, {"prompt": "x", "top_p": 2}, "top_p must be above 0 and at most 1, got 2.0"),
        (
            CHAT,
            {"messages": HI, "response_format": {"type": "json_schema"}},
            "response_format.json_schema is required with type 'json_schema'",
        ),
        (
            CHAT,
            {
                "messages": HI,
                "response_format": {"type": "text", "json_schema": {"name": "x", "schema": {}}},
            },
            "response_format.json_schema is not allowed with type 'text'",
        ),
        ("/v1/load_lora_adapter", {"lora_name": ""}, "lora_name must not be empty"),
        (
            "/v1/load_lora_adapter",
            {"lora_name": "a", "lora_path": "./adapters/a"},
            "no such folder below --lora-root, where relative paths begin",
        ),
        (
            "/v1/load_lora_adapter",
            {"lora_name": "a", "lora_path": "adapters/a"},
            "begin; 'adapters/a' is fetched from the Hugging Face hub only with --allow-sources",
        ),
    ],
)
async def test_what_an_error_says(
    shared: World, path: str, body: dict[str, Any], message: str
) -> None:
    web = Web(shared)
    answer = await web.post(path, {"model": "base", **body})
    assert message in answer.json()["error"]["message"]


async def test_a_wrong_route_is_told_which_one_was_meant(web: Web) -> None:
    for method, path, status, told in (
        ("GET", "/nowhere", 404, "there is no GET /nowhere"),
        ("POST", f"/v1{COMPLETE}", 404, f"no POST /v1{COMPLETE}; did you mean {COMPLETE}?"),
        ("POST", "/completions", 404, f"no POST /completions; did you mean {COMPLETE}?"),
        ("GET", "/v1/health", 404, "no GET /v1/health; did you mean /health?"),
        ("POST", f"{COMPLETE}/", 404, f"no POST {COMPLETE}/; did you mean {COMPLETE}?"),
        ("POST", "/generate_stream", 404, f"servers have; use {COMPLETE}"),
        ("GET", "/ping", 404, "servers have; use /health"),
        ("GET", COMPLETE, 405, f"there is no GET {COMPLETE}, only POST"),
    ):
        answer = await web.http.request(method, path)
        assert answer.status_code == status
        assert answer.json()["error"]["message"].endswith(told)
        assert answer.json()["error"]["type"] == "invalid_request_error"
    assert (await web.get(COMPLETE)).headers["allow"] == "POST"


async def test_probes_may_ask_for_heads(web: Web) -> None:
    for path in ("/health", "/ready"):
        answer = await web.http.head(path)
        assert answer.status_code == 200 and not answer.content


@pytest.mark.parametrize("stream", [False, True])
async def test_an_unexpected_error_tells_nothing(
    web: Web, world: World, stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    world.engine.fail_after = (0, RuntimeError("secret"))
    answer = await web.post(COMPLETE, {"model": "base", "prompt": "x", "stream": stream})
    assert answer.status_code == 500 and "secret" not in answer.text
    assert answer.json()["error"]["type"] == "server_error"
    assert "secret" in caplog.text


@pytest.mark.parametrize("prompt", ["abc", ["abc", "def"]])
@pytest.mark.parametrize("error", [EngineDead("it died"), RuntimeError("secret")])
async def test_an_error_in_the_middle_of_a_stream(
    web: Web, world: World, error: Exception, prompt: Any
) -> None:
    world.engine.fail_after = (2, error)
    chunks = await web.chunks(COMPLETE, {"prompt": prompt})
    assert chunks[0]["choices"][0]["text"]
    assert "[DONE]" not in chunks and chunks[-1]["error"]["type"] == "server_error"
    assert "secret" not in str(chunks[-1])


async def test_errors_of_the_engine_keep_their_status(web: Web, world: World) -> None:
    await web.load("a", world.adapter("a", "A"))
    world.engine.adapters.clear()
    for stream in (False, True):
        answer = await web.post(COMPLETE, {"model": "a", "prompt": "x", "stream": stream})
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "adapter_unavailable"


async def test_a_dead_engine(web: Web, world: World) -> None:
    assert (await web.get("/health")).status_code == 200
    world.engine.alive = False
    answer = await web.get("/health")
    assert answer.status_code == 503 and answer.json()["error"]["code"] == "engine_dead"
    answer = await web.post(COMPLETE, {"model": "base", "prompt": "x"})
    assert answer.status_code == 503
    assert answer.json()["error"]["message"] == "the engine is not running"
    world.engine.troubles = FleetClient(None).troubles
    for answer in (
        await web.post(COMPLETE, {"model": "base", "prompt": "x"}),
        await web.get("/health"),
    ):
        assert "was started with --no-engine" in answer.json()["error"]["message"]
    world.engine.troubles = []
    assert "weft:engine_up 0.0" in (await web.get("/metrics")).text


# Adapters.


async def test_load_use_list_unload(web: Web, world: World) -> None:
    path = world.adapter("a", "A")
    answer = await web.load("acme/bot", path, base_model_name="tolerated")
    assert answer.status_code == 200
    assert answer.text == "Success: LoRA adapter 'acme/bot' added successfully."
    answer = await web.complete(model="acme/bot")
    assert answer["choices"][0]["text"] == "cbaA" and answer["model"] == "acme/bot"
    assert answer["system_fingerprint"].startswith("fp_")
    assert (await web.complete())["choices"][0]["text"] == "cba"
    cards = (await web.get("/v1/models")).json()["data"]
    assert [(c["id"], c["root"], c["parent"]) for c in cards] == [
        ("base", "/models/tiny", None),
        ("alias", "/models/tiny", None),
        ("acme/bot", path, "base"),
    ]
    assert cards[0]["max_model_len"] == 64 and cards[0]["owned_by"] == "weft"
    assert (await web.get("/v1/models/acme/bot")).json() == cards[2]
    answer = await web.unload("acme/bot")
    assert answer.status_code == 200
    assert answer.text == "Success: LoRA adapter 'acme/bot' removed successfully."
    assert not world.engine.adapters and len(world.engine.released) == 1
    answer = await web.post(COMPLETE, {"model": "acme/bot", "prompt": "x"})
    assert answer.status_code == 404
    assert (await web.unload("acme/bot")).status_code == 404


async def test_refused_loads_change_nothing(web: Web, world: World) -> None:
    good = world.adapter("good", "G")
    assert (await web.load("good", good)).status_code == 200
    bad = world.adapter("bad", "bad")
    other = world.adapter("other", "O")
    empty = world.folder / "empty"
    empty.mkdir()
    for name, path, status, param in (
        ("new", bad, 400, "use_dora"),
        ("good", bad, 400, "use_dora"),
        ("good", other, 400, "lora_name"),
        ("base", good, 400, "lora_name"),
        ("a,b", good, 400, "lora_name"),
        ("new", str(world.folder / "nowhere"), 404, "lora_path"),
        ("new", str(empty), 404, "lora_path"),
        ("new", "/etc", 400, "lora_path"),
        ("new", f"{good}/../good", 400, "lora_path"),
    ):
        answer = await web.load(name, path)
        assert answer.status_code == status, (name, path, answer.text)
        assert answer.json()["error"]["param"] == param
    answer = await web.load("new", good, is_3d_lora_weight=True)
    assert answer.json()["error"]["param"] == "is_3d_lora_weight"
    answer = await web.post("/v1/load_lora_adapter", {"lora_name": "x"})
    assert answer.json()["error"]["param"] == "lora_path"
    ids = [c["id"] for c in (await web.get("/v1/models")).json()["data"]]
    assert ids == ["base", "alias", "good"]
    assert (await web.complete(model="good"))["choices"][0]["text"] == "cbaG"
    assert len(world.engine.adapters) == 1, "refused content stays in the engine"


async def test_a_repeat_of_the_same_content_is_fine(web: Web, world: World) -> None:
    path = world.adapter("a", "A")
    answers = await asyncio.gather(*(web.load("a", path) for _ in range(3)))
    assert [a.status_code for a in answers] == [200] * 3
    assert (await web.load("b", path)).status_code == 200
    assert (await web.unload("a")).status_code == 200
    assert (await web.complete(model="b"))["choices"][0]["text"] == "cbaA"
    assert world.engine.holders == {digest_of("A"): {"b": False}}
    assert (await web.unload("b")).status_code == 200
    assert world.engine.released == [(digest_of("A"), "a"), (digest_of("A"), "b")]


async def test_in_place_load_leaves_running_requests_on_the_old_version(
    web: Web, world: World
) -> None:
    engine = world.engine
    assert (await web.load("a", world.adapter("a", "old"))).status_code == 200
    engine.gate = asyncio.Event()
    running = asyncio.create_task(web.complete(model="a"))
    await until(lambda: engine.num_open == 1)
    assert (await web.load("a", world.adapter("a", "new"))).status_code == 400
    answer = await web.load("a", world.adapter("a", "new"), load_inplace=True)
    assert answer.status_code == 200
    later = asyncio.create_task(web.complete(model="a"))
    await until(lambda: engine.num_open == 2)
    assert len(engine.adapters) == 2
    engine.gate.set()
    assert (await running)["choices"][0]["text"] == "cbaold"
    assert (await later)["choices"][0]["text"] == "cbanew"
    assert (await running)["system_fingerprint"] != (await later)["system_fingerprint"]
    await until(lambda: len(engine.adapters) == 1)
    assert engine.released == [(digest_of("new"), "a"), (digest_of("old"), "a")]


async def test_unload_waits_for_running_streams(web: Web, world: World) -> None:
    engine = world.engine
    await web.load("a", world.adapter("a", "A"))
    engine.gate = asyncio.Event()
    running = asyncio.create_task(web.chunks(COMPLETE, {"model": "a", "prompt": "abc"}))
    await until(lambda: engine.num_open == 1)
    unload = asyncio.create_task(web.unload("a"))
    await asyncio.sleep(0.05)
    assert not unload.done() and not engine.released
    answer = await web.post(COMPLETE, {"model": "a", "prompt": "x"})
    assert answer.status_code == 404
    engine.gate.set()
    chunks = await running
    assert "".join(c["choices"][0]["text"] for c in chunks[:-1]) == "cbaA"
    assert (await unload).status_code == 200 and len(engine.released) == 1


async def test_an_unload_whose_client_leaves_still_drops(web: Web, world: World) -> None:
    engine = world.engine
    await web.load("a", world.adapter("a", "A"))
    engine.gate = asyncio.Event()
    running = asyncio.create_task(web.complete(model="a"))
    await until(lambda: engine.num_open == 1)
    unload = asyncio.create_task(web.unload("a"))
    await until(lambda: not world.registry.has("a"))
    unload.cancel()
    await asyncio.gather(unload, return_exceptions=True)
    engine.gate.set()
    await running
    await until(lambda: not engine.adapters)


async def test_an_unload_during_a_load_of_the_same_content(web: Web, world: World) -> None:
    engine = world.engine
    path = world.adapter("a", "A")
    await web.load("a", path)
    reached, go = asyncio.Event(), asyncio.Event()

    async def pause() -> None:
        reached.set()
        await go.wait()

    engine.on_hold = pause
    load = asyncio.create_task(web.load("b", path))
    await reached.wait()
    assert (await web.unload("a")).status_code == 200
    assert engine.holders == {digest_of("A"): {"b": False}}
    go.set()
    assert (await load).status_code == 200
    assert (await web.complete(model="b"))["choices"][0]["text"] == "cbaA"


# Operations.


async def test_metrics(web: Web, world: World) -> None:
    await web.load("b", world.adapter("b", "B"))
    await web.load("a", world.adapter("a", "A"))
    await web.complete()
    await web.get("/nowhere")
    answer = await web.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    samples = {
        (s.name, *sorted(s.labels.items())): s.value
        for family in text_string_to_metric_families(answer.text)
        for s in family.samples
    }
    values = {key[0]: value for key, value in samples.items()}
    assert values["vllm:kv_cache_usage_perc"] == 0.5
    assert values["weft:generated_tokens_total"] == 7
    assert values["vllm:time_to_first_token_seconds_count"] == 1
    config = (
        "vllm:cache_config_info",
        ("block_size", "16"),
        ("engine", "0"),
        ("model_name", "base"),
        ("num_gpu_blocks", "10"),
    )
    assert samples[config] == 1
    assert samples[("weft:requests_finished_total", ("finish_reason", "stop"))] == 2
    (info,) = (key for key in samples if key[0] == "vllm:lora_requests_info")
    assert dict(info[1:]) == {
        "max_lora": "4",
        "running_lora_adapters": "a,b",
        "waiting_lora_adapters": "b",
    }
    assert abs(samples[info] - time.time()) < 60
    loaded = [dict(k[1:]) for k in samples if k[0] == "vllm:lora_adapter_loaded"]
    on_gpu = {"adapter_name": "a", "level": "gpu", "pinned": "false"}
    assert on_gpu in loaded and len(loaded) == 4
    routes = {dict(k[1:])["route"]: v for k, v in samples.items() if "http_requests_total" in k[0]}
    assert routes[COMPLETE] == 1 and routes["unmatched"] == 1


async def test_version(web: Web) -> None:
    assert (await web.get("/version")).json()["version"].count(".") == 2


async def test_work_that_is_cancelled_before_it_began_returns_its_lease(
    web: Web, world: World
) -> None:
    await web.load("a", world.adapter("a", "A"))
    body = json.dumps({"model": "a", "prompt": "x", "stream": True}).encode()
    messages = [
        {"type": "http.request", "body": body, "more_body": False},
        {"type": "http.disconnect"},
    ]
    sent: list[Any] = []

    async def receive() -> Any:
        return messages.pop(0)

    async def send(message: Any) -> None:
        sent.append(message)

    world.engine.gate, world.engine.gate_from = asyncio.Event(), 0
    scope = {"type": "http", "method": "POST", "path": COMPLETE, "headers": []}
    scope |= {"query_string": b"", "http_version": "1.1", "raw_path": COMPLETE.encode()}
    await world.app(scope, receive, send)
    assert sent == []
    await asyncio.wait_for(web.unload("a"), PATIENCE_S)


# A real server: sockets, the openai client, clients that leave.


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[World, str]]:
    world = World(tmp_path_factory.mktemp("live"), byte_level())
    with served(world) as url:
        yield world, url
    world.check()


@pytest.fixture
def client(live: tuple[World, str]) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{live[1]}/v1", api_key="none", max_retries=0) as made:
        yield made


def test_openai_client(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(
        model="base", messages=[{"role": "user", "content": "hi"}], logprobs=True, top_logprobs=1
    )
    assert whole.choices[0].finish_reason == "stop" and whole.usage is not None
    assert whole.choices[0].logprobs is not None
    stream = client.chat.completions.create(
        model="base",
        messages=[{"role": "user", "content": "hi"}],
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage == whole.usage
    assert [m.id for m in client.models.list()] == ["base", "alias"]
    assert client.models.retrieve("alias").id == "alias"


def test_openai_client_completions(client: openai.OpenAI) -> None:
    batch = client.completions.create(model="base", prompt=["ab", "cd"], logprobs=1)
    assert [c.text for c in batch.choices] == ["ba", "dc"]
    stream = client.completions.create(model="base", prompt=[5, 6], stream=True)
    assert "".join(c.choices[0].text for c in stream) == byte_level().decode([6, 5])


def test_openai_client_errors(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.completions.create(model="nobody", prompt="x")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model="base", prompt="x", best_of=2)
    assert refused.value.param == "best_of"
    with pytest.raises(openai.BadRequestError) as early:
        client.completions.create(model="base", prompt="x" * 100, stream=True)
    assert early.value.code == "context_length_exceeded"


def ask_and_leave(url: str, body: dict[str, Any], begun: Callable[[], bool]) -> None:
    """Send a request, and close the connection once it has begun."""
    content = json.dumps(body).encode()
    head = f"POST {COMPLETE} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(content)}\r\n\r\n"
    place = urlsplit(url)
    with socket.create_connection((place.hostname, place.port), PATIENCE_S) as client:
        client.sendall(head.encode() + content)
        wait_until(begun)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_before_the_first_token(live: tuple[World, str], stream: bool) -> None:
    world, url = live
    engine = world.engine
    engine.gate, engine.gate_from = asyncio.Event(), 0
    engine.aborted.clear()
    try:
        body = {"model": "base", "prompt": "x", "stream": stream}
        ask_and_leave(url, body, lambda: engine.num_open == 1)
        wait_until(lambda: len(engine.aborted) == 1)
        assert engine.num_open == 0
    finally:
        engine.gate, engine.gate_from = None, 1
    count = 'route="/v1/completions",status="499"'
    wait_until(lambda: count in httpx.get(f"{url}/metrics", timeout=PATIENCE_S).text)


@pytest.mark.parametrize("prompt", ["abc", ["abc", "def"]])
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_aborts(live: tuple[World, str], stream: bool, prompt: Any) -> None:
    world, url = live
    engine = world.engine
    engine.gate = asyncio.Event()
    engine.aborted.clear()
    num_requests = 1 if isinstance(prompt, str) else 2
    body = {"model": "base", "prompt": prompt, "stream": stream}
    try:
        if stream:
            with httpx.stream("POST", url + COMPLETE, json=body, timeout=PATIENCE_S) as answer:
                assert next(answer.iter_lines()).startswith("data: ")
        else:
            ask_and_leave(url, body, lambda: engine.num_open == num_requests)
        wait_until(lambda: len(engine.aborted) == num_requests)
        assert engine.num_open == 0
    finally:
        engine.gate = None


def test_a_client_that_leaves_returns_its_lease(tmp_path: Path) -> None:
    world = World(tmp_path, byte_level())
    with served(world) as url:
        body = {"lora_name": "a", "lora_path": world.adapter("a", "A")}
        loaded = httpx.post(f"{url}/v1/load_lora_adapter", json=body, timeout=PATIENCE_S)
        assert loaded.status_code == 200
        world.engine.gate, world.engine.close_s = asyncio.Event(), 0.2
        ask = {"model": "a", "prompt": "abc", "stream": True}
        with httpx.stream("POST", url + COMPLETE, json=ask, timeout=PATIENCE_S) as answer:
            next(answer.iter_lines())
        name = {"lora_name": "a"}
        answer = httpx.post(f"{url}/v1/unload_lora_adapter", json=name, timeout=PATIENCE_S)
        assert answer.status_code == 200 and len(world.engine.released) == 1
    world.check()

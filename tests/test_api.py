"""The HTTP side over a deterministic engine: shapes, errors, streams, adapters, disconnects."""

from __future__ import annotations

import asyncio
import hashlib
import json
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import uvicorn
from prometheus_client.parser import text_string_to_metric_families
from toy_tokenizers import byte_level

from weft.api import ApiSettings, create_app
from weft.core.errors import AdapterInvalid, AdapterNotFound, EngineDead
from weft.core.types import (
    AdapterInfo,
    AdapterRef,
    EngineInfo,
    EngineRequest,
    EngineStats,
    TokenEvent,
    TokenLogprob,
)
from weft.registry import AdapterRegistry, AdapterRoots
from weft.text import Tokenizer

EOS = byte_level().eos_ids[0]
INFO = EngineInfo(
    model="tiny",
    architecture="LlamaForCausalLM",
    dtype="float32",
    device="cpu",
    max_model_len=64,
    vocab_size=byte_level().vocab_size,
    num_blocks=10,
    block_size=16,
    max_loras=4,
    max_lora_rank=16,
    adapter_memory_bytes=1 << 20,
    num_parameters=1,
)


class EchoEngine:
    """Answers the prompt reversed, then what the adapter's file says, then EOS."""

    def __init__(self) -> None:
        self.info = INFO
        self.alive = True
        self.adapters: dict[str, list[int]] = {}
        self.requests: list[EngineRequest] = []
        self.aborted: list[str] = []
        self.num_open = 0
        self.dropped: list[AdapterRef] = []
        self.registrations: Counter[str] = Counter()
        self.gate: asyncio.Event | None = None
        """Events from `gate_from` on wait for it."""
        self.gate_from = 1
        self.on_register: Callable[[], Awaitable[None]] | None = None
        self.fail_after: tuple[int, Exception] | None = None
        self.tokens_per_event = 1
        self.close_s = 0.0
        """How long an abort takes."""
        self.in_use: list[AdapterRef | None] = []

    async def generate(self, request: EngineRequest) -> AsyncIterator[TokenEvent]:
        self.requests.append(request)
        self.num_open += 1
        self.in_use.append(request.adapter)
        ended = False
        try:
            for n, event in enumerate(self._events(request)):
                if self.fail_after is not None and n == self.fail_after[0]:
                    ended = True
                    raise self.fail_after[1]
                if n >= self.gate_from and self.gate is not None:
                    await self.gate.wait()
                ended = event.finish_reason is not None
                yield event
        finally:
            await asyncio.sleep(self.close_s)
            self.num_open -= 1
            self.in_use.remove(request.adapter)
            if not ended:
                self.aborted.append(request.request_id)

    def _events(self, request: EngineRequest) -> Iterator[TokenEvent]:
        params = request.params
        ids = request.prompt_ids[::-1]
        if request.adapter is not None:
            if request.adapter.digest not in self.adapters:
                wire = ("adapter_unavailable", "it is not here", None)
                yield TokenEvent(request.request_id, [], finish_reason="error", error=wire)
                return
            ids = ids + self.adapters[request.adapter.digest]
        assert params.max_tokens is not None
        finish, reason = "stop", None
        for n, token in enumerate(ids):
            if token in params.stop_token_ids:
                ids, reason = ids[: n + 1], token
                break
        else:
            ids = [*ids, EOS] if not params.ignore_eos else ids * 64
        if len(ids) > params.max_tokens:
            ids, finish, reason = ids[: params.max_tokens], "length", None
        for start in range(0, len(ids), self.tokens_per_event):
            part = ids[start : start + self.tokens_per_event]
            last = start + len(part) == len(ids)
            yield TokenEvent(
                request.request_id,
                part,
                None if params.logprobs is None else [self._logprob(t, params) for t in part],
                finish if last else None,  # type: ignore[arg-type]
                reason if last else None,
                num_cached_tokens=1,
            )

    def _logprob(self, token: int, params: Any) -> TokenLogprob:
        top = [(token, -0.25), (0, -1.5), (1, -2.5)]
        return TokenLogprob(-0.25, 1, top[: params.logprobs])

    async def register_adapter(self, path: str) -> AdapterInfo:
        file = Path(path) / "adapter_model.safetensors"
        if not file.exists():
            raise AdapterNotFound(f"{path} has no adapter_model.safetensors", "lora_path")
        content = file.read_text()
        if content == "bad":
            raise AdapterInvalid("use_dora is not served", "use_dora")
        digest = hashlib.sha256(content.encode()).hexdigest()
        self.registrations[digest] += 1
        self.adapters[digest] = byte_level().encode(content, add_special_tokens=False)
        if self.on_register is not None:
            await self.on_register()
        return AdapterInfo(digest, path, 4, 100, ("q_proj",))

    async def drop_adapter(self, ref: AdapterRef) -> None:
        assert ref not in self.in_use, "dropped while a request still uses it"
        self.registrations[ref.digest] -= 1
        assert self.registrations[ref.digest] >= 0, "dropped more often than registered"
        if not self.registrations[ref.digest]:
            self.dropped.append(ref)
            del self.adapters[ref.digest]

    async def stats(self) -> EngineStats:
        if not self.alive:
            raise EngineDead("the engine is gone")
        digests = tuple(self.adapters)
        return EngineStats(
            num_running=self.num_open,
            kv_usage=0.5,
            resident_adapters=digests,
            waiting_adapters=digests[:1],
            host_adapters=digests,
            generated_tokens=7,
            finished={"stop": 2},
        )

    async def close(self) -> None:
        self.alive = False


class World:
    """One application and all that is behind it."""

    def __init__(self, folder: Path, tokenizer: Tokenizer | None, **settings: Any) -> None:
        self.folder = folder
        self.engine = EchoEngine()
        self.registry = AdapterRegistry(["base", "alias"], "/models/tiny")
        settings = {"served_model_names": ["base", "alias"], **settings}
        self.app = create_app(
            self.engine,
            self.registry,
            tokenizer,
            AdapterRoots([folder]),
            ApiSettings(**settings),
        )

    def adapter(self, name: str, content: str) -> str:
        """An adapter's folder whose answers end in `content`."""
        folder = self.folder / name
        folder.mkdir(exist_ok=True)
        (folder / "adapter_model.safetensors").write_text(content)
        return str(folder)

    def check(self) -> None:
        """Nothing is leaked: no open request, no lease."""
        assert self.engine.num_open == 0
        self.registry.check()
        for ref in list(self.registry.adapters()):
            assert self.registry.retire(ref.name).drained, f"a lease of {ref.name} is left"


class Web:
    """A client of one world's application, without sockets."""

    def __init__(self, world: World) -> None:
        transport = httpx.ASGITransport(app=world.app)
        self.http = httpx.AsyncClient(transport=transport, base_url="http://weft")
        self.world = world

    async def post(self, path: str, body: Any = None, **more: Any) -> httpx.Response:
        return await self.http.post(path, json=body, **more)

    async def get(self, path: str) -> httpx.Response:
        return await self.http.get(path)

    async def complete(self, **body: Any) -> Any:
        answer = await self.post("/v1/completions", {"model": "base", "prompt": "abc", **body})
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def chat(self, **body: Any) -> Any:
        whole = {"model": "base", "messages": [{"role": "user", "content": "hi"}], **body}
        answer = await self.post("/v1/chat/completions", whole)
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def chunks(self, path: str, body: Any) -> list[Any]:
        answer = await self.post(path, {"model": "base", "stream": True, **body})
        assert answer.status_code == 200, answer.text
        assert answer.headers["content-type"].startswith("text/event-stream")
        events = answer.text.split("\n\n")
        assert events.pop() == "" and all(e.startswith("data: ") for e in events)
        data = [e.removeprefix("data: ") for e in events]
        return [d if d == "[DONE]" else json.loads(d) for d in data]

    async def load(self, name: str, path: str, **more: Any) -> httpx.Response:
        body = {"lora_name": name, "lora_path": path, **more}
        return await self.post("/v1/load_lora_adapter", body)

    async def unload(self, name: str) -> httpx.Response:
        return await self.post("/v1/unload_lora_adapter", {"lora_name": name})


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path, byte_level())
    yield made
    made.check()


def run(world: World, scenario: Callable[[Web], Awaitable[None]]) -> None:
    async def main() -> None:
        web = Web(world)
        async with web.http:
            await asyncio.wait_for(scenario(web), 20)

    asyncio.run(main())


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.002)


# Answers.


def test_completion(world: World) -> None:
    async def scenario(web: Web) -> None:
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

    run(world, scenario)


def test_prompts_in_all_their_forms(world: World) -> None:
    a, b = byte_level().encode("ab", add_special_tokens=False)

    async def scenario(web: Web) -> None:
        for prompt, texts in (
            ("ab", ["ba"]),
            (["ab", "xyz"], ["ba", "zyx"]),
            ([a, b], ["ba"]),
            ([[a, b], [b, b, a]], ["ba", "abb"]),
        ):
            answer = await web.complete(prompt=prompt)
            assert [c["text"] for c in answer["choices"]] == texts
            assert [c["index"] for c in answer["choices"]] == list(range(len(texts)))

    run(world, scenario)


def test_batches_stream_each_choice(world: World) -> None:
    async def scenario(web: Web) -> None:
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

    run(world, scenario)


def test_chat_and_its_stream(world: World) -> None:
    async def scenario(web: Web) -> None:
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

    run(world, scenario)


def test_chat_template_options(world: World) -> None:
    async def scenario(web: Web) -> None:
        await web.chat(add_generation_prompt=False)
        await web.chat(chat_template_kwargs={"mood": "!"})
        prompts = [byte_level().decode(r.prompt_ids) for r in world.engine.requests]
        assert prompts == ["<s>user: hi", "<s>user: hi<s>assistant:!"]

    run(world, scenario)


def test_default_and_given_max_tokens(world: World) -> None:
    async def scenario(web: Web) -> None:
        await web.complete()
        await web.complete(prompt="x" * 60)
        await web.complete(max_tokens=2)
        await web.chat(max_tokens=3)
        await web.chat(max_completion_tokens=4)
        await web.chat()
        requests = world.engine.requests
        limits = [r.params.max_tokens for r in requests]
        assert limits == [16, 4, 2, 3, 4, 64 - len(requests[-1].prompt_ids)]

    run(world, scenario)


def test_sampling_fields_reach_the_engine(world: World) -> None:
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

    async def scenario(web: Web) -> None:
        await web.complete(**fields)
        await web.complete(stop="z", temperature=1)
        first, second = (r.params for r in world.engine.requests)
        for name, value in fields.items():
            assert getattr(first, name) == (tuple(value) if isinstance(value, list) else value)
        assert second.stop == ("z",)

    run(world, scenario)


@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings_end_the_request_in_the_engine(world: World, stream: bool) -> None:
    world.engine.close_s = 0.05

    async def scenario(web: Web) -> None:
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

    run(world, scenario)


def test_return_token_ids(world: World) -> None:
    a, b = byte_level().encode("ab", add_special_tokens=False)

    async def scenario(web: Web) -> None:
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

    run(world, scenario)


@pytest.mark.parametrize("tokens_per_event", [1, 3])
def test_completion_logprobs(world: World, tokens_per_event: int) -> None:
    world.engine.tokens_per_event = tokens_per_event
    ids = byte_level().encode("aé日b", add_special_tokens=False)[::-1]

    async def scenario(web: Web) -> None:
        answer = await web.complete(prompt=ids, logprobs=1, max_tokens=20)
        shape = answer["choices"][0]["logprobs"]
        assert answer["choices"][0]["text"] == "aé日b"
        assert shape["tokens"][0] == "a" and shape["tokens"][-1] == "</s>"
        assert any(t.startswith("bytes:\\x") for t in shape["tokens"])
        assert set(shape["token_logprobs"]) == {-0.25}
        assert shape["top_logprobs"][0] == {"a": -0.25}
        assert shape["text_offset"][0] == 0 and shape["text_offset"][-2:] == [3, 4]
        chunks = await web.chunks(
            "/v1/completions", {"prompt": ids, "logprobs": 1, "max_tokens": 20}
        )
        pieces = [c["choices"][0]["logprobs"] for c in chunks[:-1]]
        for key in shape:
            assert [x for p in pieces for x in p[key]] == shape[key]

    run(world, scenario)


def test_chat_logprobs(world: World) -> None:
    async def scenario(web: Web) -> None:
        answer = await web.chat(logprobs=True, top_logprobs=2)
        content = answer["choices"][0]["logprobs"]["content"]
        assert content[0]["token"] == ":" and content[0]["bytes"] == [58]
        assert content[0]["logprob"] == -0.25
        assert [t["logprob"] for t in content[0]["top_logprobs"]] == [-0.25, -1.5]
        assert len(content) == answer["usage"]["completion_tokens"]
        answer = await web.chat(logprobs=True)
        assert answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []

    run(world, scenario)


def test_without_a_tokenizer(tmp_path: Path) -> None:
    world = World(tmp_path, None)

    async def scenario(web: Web) -> None:
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

    run(world, scenario)
    world.check()


def test_long_texts_are_tokenized_on_a_thread(tmp_path: Path) -> None:
    world = World(tmp_path, byte_level(), long_text_chars=5)

    async def scenario(web: Web) -> None:
        assert (await web.complete(prompt="abcdefgh"))["choices"][0]["text"] == "hgfedcba"
        many = await web.complete(prompt=["abc", "def"])
        assert [c["text"] for c in many["choices"]] == ["cba", "fed"]
        assert (await web.chat())["choices"][0]["message"]["content"].startswith(":tnat")

    run(world, scenario)
    world.check()


# Errors.

CHAT = "/v1/chat/completions"
COMPLETE = "/v1/completions"
HI = [{"role": "user", "content": "hi"}]


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
        (COMPLETE, {"prompt": [[1], [-1]]}, "prompt"),
        (COMPLETE, {"prompt": [1, "x"]}, "prompt"),
        (COMPLETE, {"prompt": [[1]] * 9}, "prompt"),
        (COMPLETE, {"prompt": [True]}, "prompt"),
        (COMPLETE, {}, "prompt"),
        (COMPLETE, {"prompt": "x", "model": None}, "model"),
        (COMPLETE, {"prompt": "x", "echo": True}, "echo"),
        (COMPLETE, {"prompt": "x", "suffix": "y"}, "suffix"),
        (COMPLETE, {"prompt": "x", "best_of": 2}, "best_of"),
        (COMPLETE, {"prompt": "x", "n": 2}, "n"),
        (COMPLETE, {"prompt": "x", "presence_penalty": 0.1}, "presence_penalty"),
        (COMPLETE, {"prompt": "x", "frequency_penalty": 0.1}, "frequency_penalty"),
        (COMPLETE, {"prompt": "x", "logit_bias": {"5": 1}}, "logit_bias"),
        (COMPLETE, {"prompt": "x", "tempreture": 1}, "tempreture"),
        (COMPLETE, {"prompt": "x", "stream_options": {}}, "stream_options"),
        (
            COMPLETE,
            {"prompt": "x", "stream": True, "stream_options": {"foo": 1}},
            "stream_options.foo",
        ),
        (CHAT, {"messages": []}, "messages"),
        (CHAT, {"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        (CHAT, {"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        (
            CHAT,
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content[0].type",
        ),
        (
            CHAT,
            {"messages": [*HI, {"role": "assistant", "tool_calls": [{}]}]},
            "messages[1].tool_calls",
        ),
        (CHAT, {"messages": HI, "tools": [{"type": "function"}]}, "tools"),
        (CHAT, {"messages": HI, "functions": [{}]}, "functions"),
        (CHAT, {"messages": HI, "response_format": {"type": "json_object"}}, "response_format"),
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
def test_bad_requests_name_the_field(
    tmp_path: Path, path: str, body: dict[str, Any], param: str, stream: bool
) -> None:
    world = World(tmp_path, byte_level(), max_prompts=8)
    stream = stream and "stream_options" not in body

    async def scenario(web: Web) -> None:
        answer = await web.post(path, {"model": "base", "stream": stream, **body})
        error = answer.json()["error"]
        assert answer.status_code == 400, answer.text
        assert set(error) == {"message", "type", "param", "code"}
        assert (error["type"], error["param"]) == ("invalid_request_error", param)
        assert error["message"]
        assert not world.engine.requests

    run(world, scenario)
    world.check()


def test_fields_that_ask_for_nothing_are_accepted(world: World) -> None:
    async def scenario(web: Web) -> None:
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

    run(world, scenario)


def test_too_long_tells_the_numbers(world: World) -> None:
    async def scenario(web: Web) -> None:
        for body, numbers in (
            ({"prompt": "x" * 70}, ("64", "70")),
            ({"prompt": "x" * 10, "max_tokens": 60}, ("64", "70", "10", "60")),
        ):
            answer = await web.post(COMPLETE, {"model": "base", **body})
            error = answer.json()["error"]
            assert error["code"] == "context_length_exceeded"
            assert all(n in error["message"] for n in numbers), error

    run(world, scenario)


@pytest.mark.parametrize("stream", [False, True])
def test_an_unknown_model_is_404_and_never_the_base(world: World, stream: bool) -> None:
    async def scenario(web: Web) -> None:
        for path, body in ((COMPLETE, {"prompt": "x"}), (CHAT, {"messages": HI})):
            answer = await web.post(path, {"model": "nobody", "stream": stream, **body})
            assert answer.status_code == 404
            assert answer.json()["error"] == {
                "message": "The model 'nobody' does not exist",
                "type": "invalid_request_error",
                "param": "model",
                "code": "model_not_found",
            }
        assert not world.engine.requests
        answer = await web.get("/v1/models/nobody")
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")

    run(world, scenario)


def test_malformed_bodies_routes_and_methods(tmp_path: Path) -> None:
    world = World(tmp_path, byte_level(), max_body_bytes=1000)

    async def endless() -> AsyncIterator[bytes]:
        for _ in range(100):
            yield b" " * 100

    async def scenario(web: Web) -> None:
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
        answer = await web.get("/nowhere")
        assert answer.status_code == 404 and answer.json()["error"]["message"] == "Not Found"
        answer = await web.get(COMPLETE)
        assert answer.status_code == 405 and answer.headers["allow"] == "POST"
        assert answer.json()["error"]["type"] == "invalid_request_error"

    run(world, scenario)


@pytest.mark.parametrize("stream", [False, True])
def test_an_unexpected_error_tells_nothing(
    world: World, stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    world.engine.fail_after = (0, RuntimeError("secret"))

    async def scenario(web: Web) -> None:
        answer = await web.post(COMPLETE, {"model": "base", "prompt": "x", "stream": stream})
        assert answer.status_code == 500 and "secret" not in answer.text
        assert answer.json()["error"]["type"] == "server_error"

    run(world, scenario)
    assert "secret" in caplog.text


@pytest.mark.parametrize("prompt", ["abc", ["abc", "def"]])
@pytest.mark.parametrize("error", [EngineDead("it died"), RuntimeError("secret")])
def test_an_error_in_the_middle_of_a_stream(world: World, error: Exception, prompt: Any) -> None:
    world.engine.fail_after = (2, error)

    async def scenario(web: Web) -> None:
        chunks = await web.chunks(COMPLETE, {"prompt": prompt})
        assert chunks[0]["choices"][0]["text"]
        assert "[DONE]" not in chunks and chunks[-1]["error"]["type"] == "server_error"
        assert "secret" not in str(chunks[-1])

    run(world, scenario)


def test_errors_of_the_engine_keep_their_status(world: World) -> None:
    async def scenario(web: Web) -> None:
        await web.load("a", world.adapter("a", "A"))
        world.engine.adapters.clear()
        for stream in (False, True):
            answer = await web.post(COMPLETE, {"model": "a", "prompt": "x", "stream": stream})
            assert answer.status_code == 503
            assert answer.json()["error"]["code"] == "adapter_unavailable"

    run(world, scenario)


def test_a_dead_engine(world: World) -> None:
    async def scenario(web: Web) -> None:
        assert (await web.get("/health")).status_code == 200
        world.engine.alive = False
        answer = await web.get("/health")
        assert answer.status_code == 503 and answer.json()["error"]["code"] == "engine_dead"
        answer = await web.post(COMPLETE, {"model": "base", "prompt": "x"})
        assert answer.status_code == 503
        assert "weft:engine_up 0.0" in (await web.get("/metrics")).text

    run(world, scenario)


# Adapters.


def test_load_use_list_unload(world: World) -> None:
    async def scenario(web: Web) -> None:
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
        assert not world.engine.adapters and len(world.engine.dropped) == 1
        answer = await web.post(COMPLETE, {"model": "acme/bot", "prompt": "x"})
        assert answer.status_code == 404
        assert (await web.unload("acme/bot")).status_code == 404

    run(world, scenario)


def test_refused_loads_change_nothing(world: World) -> None:
    async def scenario(web: Web) -> None:
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

    run(world, scenario)


def test_a_repeat_of_the_same_content_is_fine(world: World) -> None:
    async def scenario(web: Web) -> None:
        path = world.adapter("a", "A")
        answers = await asyncio.gather(*(web.load("a", path) for _ in range(3)))
        assert [a.status_code for a in answers] == [200] * 3
        assert (await web.load("b", path)).status_code == 200
        assert (await web.unload("a")).status_code == 200
        assert (await web.complete(model="b"))["choices"][0]["text"] == "cbaA"
        assert world.engine.dropped == []
        assert (await web.unload("b")).status_code == 200
        assert len(world.engine.dropped) == 1

    run(world, scenario)


def test_in_place_load_leaves_running_requests_on_the_old_version(world: World) -> None:
    async def scenario(web: Web) -> None:
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
        assert [ref.version for ref in engine.dropped if ref.version] == [1]

    run(world, scenario)


def test_unload_waits_for_running_streams(world: World) -> None:
    async def scenario(web: Web) -> None:
        engine = world.engine
        await web.load("a", world.adapter("a", "A"))
        engine.gate = asyncio.Event()
        running = asyncio.create_task(web.chunks(COMPLETE, {"model": "a", "prompt": "abc"}))
        await until(lambda: engine.num_open == 1)
        unload = asyncio.create_task(web.unload("a"))
        await asyncio.sleep(0.05)
        assert not unload.done() and not engine.dropped
        answer = await web.post(COMPLETE, {"model": "a", "prompt": "x"})
        assert answer.status_code == 404
        engine.gate.set()
        chunks = await running
        assert "".join(c["choices"][0]["text"] for c in chunks[:-1]) == "cbaA"
        assert (await unload).status_code == 200 and len(engine.dropped) == 1

    run(world, scenario)


def test_an_unload_whose_client_leaves_still_drops(world: World) -> None:
    async def scenario(web: Web) -> None:
        engine = world.engine
        await web.load("a", world.adapter("a", "A"))
        engine.gate = asyncio.Event()
        running = asyncio.create_task(web.complete(model="a"))
        await until(lambda: engine.num_open == 1)
        unload = asyncio.create_task(web.unload("a"))
        await asyncio.sleep(0.02)
        unload.cancel()
        await asyncio.gather(unload, return_exceptions=True)
        engine.gate.set()
        await running
        await until(lambda: not engine.adapters)

    run(world, scenario)


def test_an_unload_during_a_load_of_the_same_content(world: World) -> None:
    async def scenario(web: Web) -> None:
        engine = world.engine
        path = world.adapter("a", "A")
        await web.load("a", path)
        reached, go = asyncio.Event(), asyncio.Event()

        async def pause() -> None:
            reached.set()
            await go.wait()

        engine.on_register = pause
        load = asyncio.create_task(web.load("b", path))
        await reached.wait()
        assert (await web.unload("a")).status_code == 200
        assert not engine.dropped
        go.set()
        assert (await load).status_code == 200
        assert (await web.complete(model="b"))["choices"][0]["text"] == "cbaA"

    run(world, scenario)


# Operations.


def test_metrics(world: World) -> None:
    async def scenario(web: Web) -> None:
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
        config = ("vllm:cache_config_info", ("block_size", "16"), ("num_gpu_blocks", "10"))
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
        assert {"adapter_name": "a", "level": "gpu"} in loaded and len(loaded) == 4
        routes = {
            dict(k[1:])["route"]: v for k, v in samples.items() if "http_requests_total" in k[0]
        }
        assert routes[COMPLETE] == 1 and routes["unmatched"] == 1

    run(world, scenario)


def test_version(world: World) -> None:
    async def scenario(web: Web) -> None:
        assert (await web.get("/version")).json()["version"].count(".") == 2

    run(world, scenario)


def test_work_that_is_cancelled_before_it_began_returns_its_lease(world: World) -> None:
    async def scenario(web: Web) -> None:
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
        await asyncio.wait_for(web.unload("a"), 5)

    run(world, scenario)


# A real server: sockets, the openai client, clients that leave.


@contextmanager
def served(world: World) -> Iterator[str]:
    """The application on a loopback port, on a thread."""
    config = uvicorn.Config(world.app, port=0, log_level="error", lifespan="on")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        wait_until(lambda: server.started)
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(20)


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end, "it took too long"
        time.sleep(0.005)


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
        client.completions.create(model="base", prompt="x", n=2)
    assert refused.value.param == "n"
    with pytest.raises(openai.BadRequestError) as early:
        client.completions.create(model="base", prompt="x" * 100, stream=True)
    assert early.value.code == "context_length_exceeded"


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_before_the_first_token(live: tuple[World, str], stream: bool) -> None:
    world, url = live
    engine = world.engine
    engine.gate, engine.gate_from = asyncio.Event(), 0
    engine.aborted.clear()
    try:
        with pytest.raises(httpx.ReadTimeout):
            body = {"model": "base", "prompt": "x", "stream": stream}
            httpx.post(url + COMPLETE, json=body, timeout=0.3)
        wait_until(lambda: len(engine.aborted) == 1)
        assert engine.num_open == 0
    finally:
        engine.gate, engine.gate_from = None, 1
    assert 'route="/v1/completions",status="499"' in httpx.get(f"{url}/metrics").text


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
            with httpx.stream("POST", url + COMPLETE, json=body) as answer:
                assert next(answer.iter_lines()).startswith("data: ")
        else:
            with pytest.raises(httpx.ReadTimeout):
                httpx.post(url + COMPLETE, json=body, timeout=0.3)
        wait_until(lambda: len(engine.aborted) == num_requests)
        assert engine.num_open == 0
    finally:
        engine.gate = None


def test_a_client_that_leaves_returns_its_lease(tmp_path: Path) -> None:
    world = World(tmp_path, byte_level())
    with served(world) as url:
        body = {"lora_name": "a", "lora_path": world.adapter("a", "A")}
        assert httpx.post(f"{url}/v1/load_lora_adapter", json=body).status_code == 200
        world.engine.gate, world.engine.close_s = asyncio.Event(), 0.2
        ask = {"model": "a", "prompt": "abc", "stream": True}
        with httpx.stream("POST", url + COMPLETE, json=ask) as answer:
            next(answer.iter_lines())
        answer = httpx.post(f"{url}/v1/unload_lora_adapter", json={"lora_name": "a"}, timeout=10)
        assert answer.status_code == 200 and len(world.engine.dropped) == 1
    world.check()

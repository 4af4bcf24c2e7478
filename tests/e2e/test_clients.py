"""Clients that people use, with their own types and helper methods, against a real server.

The example model knows words alone, and calls no tool by itself: forms of the output make it. White
space, which a form allows and the model loves, is biased away.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import socket
import warnings
from collections.abc import Callable, Iterator
from typing import Any, Literal

import httpx
import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from openai.types.chat import ChatCompletionMessageParam
from patience import PATIENCE_S
from pydantic import BaseModel, Field
from serving import Server, until
from shared_server import KEY, MODELS
from tiny import ADAPTERS, LONG, answer, ask

HI: list[ChatCompletionMessageParam] = [{"role": "user", "content": "planet"}]
PROMPT = "<|bos|><|user|>planet<|end|><|assistant|>"
NO_SPACE = {str(6 + ord(char)): -100 for char in "\t\n\r "}


class Paint(BaseModel):
    """Paint a wall."""

    color: Literal["red", "green"]
    coats: int = Field(ge=1, le=9)


PAINT = openai.pydantic_function_tool(Paint)
WASH = {"type": "function", "function": {"name": "wash"}}
NAMED = {"type": "function", "function": {"name": "Paint"}}
THOUGHT = {"structured_outputs": {"regex": "<think>\n[a-z]{3}\n</think>\n\n(yes|no)"}}


@pytest.fixture(scope="module", autouse=True)
def offline() -> Iterator[None]:
    """No client reaches for anything but the server, not even to fail unnoticed."""
    asked: list[object] = []
    connect, look_up = socket.socket.connect, socket.getaddrinfo

    def check(host: object) -> None:
        if host not in ("127.0.0.1", b"127.0.0.1"):
            asked.append(host)
            raise OSError(f"{host!r} is off limits")

    def checked_connect(self: socket.socket, address: Any) -> None:
        check(address[0] if isinstance(address, tuple) else address)
        connect(self, address)

    def checked_look_up(host: Any, *args: Any, **kwargs: Any) -> Any:
        check(host)
        return look_up(host, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket.socket, "connect", checked_connect)
        patch.setattr(socket, "getaddrinfo", checked_look_up)
        yield
    assert not asked


@pytest.fixture
def server(shared_server: Server) -> Server:
    return shared_server


@pytest.fixture
def client(server: Server) -> Iterator[OpenAI]:
    with server.client as made:
        yield made


@pytest.fixture
def http(server: Server) -> Iterator[httpx.Client]:
    headers = {"authorization": f"Bearer {KEY}"}
    with httpx.Client(base_url=server.url, headers=headers, timeout=PATIENCE_S) as made:
        yield made


# openai -------------------------------------------------------------------------------------------


def test_embeddings_of_the_base_and_of_an_adapter(server: Server) -> None:
    """The client asks for base64, and unpacks it."""
    found: dict[str, list[float]] = {}
    for model in ("base", MODELS[1]):
        answered = server.client.embeddings.create(model=model, input=["planet", "garden"])
        assert [each.index for each in answered.data] == [0, 1]
        assert answered.usage.prompt_tokens == answered.usage.total_tokens > 0
        found[model] = answered.data[0].embedding
        assert sum(value * value for value in found[model]) == pytest.approx(1, abs=1e-5)
        plain = server.client.embeddings.create(
            model=model, input="planet", encoding_format="float", dimensions=8
        )
        (vector,) = (each.embedding for each in plain.data)
        scale = vector[0] / found[model][0]
        assert vector == pytest.approx([value * scale for value in found[model][:8]], abs=1e-5)
    assert found["base"] != pytest.approx(found[MODELS[1]], abs=1e-3)


def test_openai_models(client: OpenAI) -> None:
    assert [m.id for m in client.models.list()] == MODELS
    assert client.models.retrieve("upper").id == "upper"
    for model in ("upper", "base:upper"):
        said = client.chat.completions.create(model=model, messages=HI, temperature=0)
        assert (said.model, said.choices[0].message.content) == (model, "PLANET")
        assert said._request_id


def test_openai_sampling_parameters(client: OpenAI) -> None:
    def sample(seed: int) -> list[str | None]:
        many = client.chat.completions.create(
            model="base", messages=HI, n=3, seed=seed, temperature=9, max_completion_tokens=12
        )
        return [c.message.content for c in many.choices]

    assert len(set(sample(7))) > 1 and sample(7) == sample(7) != sample(8)
    chat = client.chat.completions.create(
        model="upper", messages=HI, temperature=0, logprobs=True, top_logprobs=2, stop=["ET", "N"]
    )
    (choice,) = chat.choices
    assert choice.message.content == "PLA" and choice.finish_reason == "stop"
    assert choice.logprobs is not None and choice.logprobs.content is not None
    assert [t.token for t in choice.logprobs.content][:3] == list("PLA")
    assert all(len(t.top_logprobs) == 2 for t in choice.logprobs.content)
    text = client.completions.create(
        model="upper", prompt=PROMPT, temperature=0, max_tokens=3, logprobs=1, echo=True
    )
    assert text.choices[0].text.endswith("PLA") and text.choices[0].finish_reason == "length"
    assert text.usage is not None and text.usage.completion_tokens == 3
    assert text.choices[0].logprobs is not None


def test_openai_streams_with_usage(client: OpenAI) -> None:
    options: Any = {"stream": True, "stream_options": {"include_usage": True}}
    chat = list(
        client.chat.completions.create(
            model="repeat", messages=HI, temperature=0, n=2, logprobs=True, **options
        )
    )
    for index in (0, 1):
        mine = [c.choices[0] for c in chat if c.choices and c.choices[0].index == index]
        assert "".join(c.delta.content or "" for c in mine) == "planet-planet"
        assert mine[0].delta.role == "assistant" and mine[-1].finish_reason == "stop"
    assert chat[-1].usage is not None and chat[-1].usage.completion_tokens == 28
    assert all(c.usage is None for c in chat[:-1])
    text = list(
        client.completions.create(
            model="repeat", prompt=PROMPT, temperature=0, max_tokens=20, **options
        )
    )
    assert "".join(c.choices[0].text for c in text if c.choices) == "planet-planet"
    assert text[-1].usage is not None and text[-1].usage.total_tokens == 24


def test_openai_parses_answers_into_models(client: OpenAI) -> None:
    form: Any = {
        "model": "upper",
        "messages": HI,
        "temperature": 0,
        "response_format": Paint,
        "logit_bias": NO_SPACE,
    }
    whole = client.chat.completions.parse(**form).choices[0].message
    assert isinstance(whole.parsed, Paint)
    with client.chat.completions.stream(**form, logprobs=True) as stream:
        events = [event.type for event in stream]
        streamed = stream.get_final_completion().choices[0].message
    assert streamed.parsed == whole.parsed and streamed.content == whole.content
    assert {"content.delta", "content.done", "logprobs.content.done"} <= set(events)


@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
def test_openai_tools(client: OpenAI, choice: Any) -> None:
    tools: Any = [PAINT] if choice == "required" else [WASH, PAINT]
    form: Any = {
        "model": "upper",
        "messages": HI,
        "temperature": 0,
        "tools": tools,
        "tool_choice": choice,
        "logit_bias": NO_SPACE,
    }
    (whole,) = client.chat.completions.create(**form).choices
    assert whole.finish_reason == "tool_calls" and whole.message.content is None
    (call,) = whole.message.tool_calls or ()
    assert call.type == "function" and call.function.name == "Paint"
    Paint.model_validate_json(call.function.arguments)

    chunks = [c.choices[0] for c in client.chat.completions.create(**form, stream=True)]
    deltas = [d for c in chunks for d in c.delta.tool_calls or ()]
    assert deltas and [d.index for d in deltas] == [0] * len(deltas)
    assert deltas[0].id and deltas[0].function and deltas[0].function.name == "Paint"
    arguments = "".join(d.function.arguments or "" for d in deltas if d.function)
    assert arguments == call.function.arguments
    assert chunks[-1].finish_reason == "tool_calls"

    form["tools"] = [PAINT]  # the helper parses arguments of functions that are strict alone
    with client.chat.completions.stream(**form) as stream:
        kinds = {event.type for event in stream}
        message = stream.get_final_completion().choices[0].message
    assert "tool_calls.function.arguments.done" in kinds
    (parsed,) = message.tool_calls or ()
    assert isinstance(parsed.function.parsed_arguments, Paint)


def test_openai_tools_that_need_not_be_called(client: OpenAI) -> None:
    for choice in ("auto", "none", openai.omit):
        form: Any = {"model": "upper", "messages": HI, "tools": [PAINT], "tool_choice": choice}
        (whole,) = client.chat.completions.create(**form, temperature=0).choices
        assert whole.message.content == "PLANET" and whole.message.tool_calls is None
        assert whole.finish_reason == "stop"
        with client.chat.completions.stream(**form, temperature=0) as stream:
            assert stream.until_done().get_final_completion().choices[0].finish_reason == "stop"


def test_openai_second_turn_with_a_tool(client: OpenAI) -> None:
    """What the client's own message has goes back as it came; the tool's answer is read."""
    first = client.chat.completions.create(
        model="upper", messages=HI, tools=[PAINT], tool_choice="required", logit_bias=NO_SPACE
    )
    said = first.choices[0].message
    (call,) = said.tool_calls or ()

    def again(result: str) -> int:
        turn: Any = [
            {"role": "system", "content": "x"},
            *HI,
            said,
            {"role": "tool", "tool_call_id": call.id, "content": result},
        ]
        more = client.chat.completions.create(
            model="upper", messages=turn, tools=[PAINT], max_tokens=5
        )
        assert more.usage is not None
        return more.usage.prompt_tokens

    assert again("painted red") == again("done") + len("painted red") - len("done")


def test_openai_reasoning(client: OpenAI) -> None:
    form: Any = {"model": "base", "messages": HI, "temperature": 0, "extra_body": THOUGHT}
    message: Any = client.chat.completions.create(**form).choices[0].message
    assert message.content in ("yes", "no") and len(message.reasoning_content) == 3
    stream: Any = client.chat.completions.create(**form, stream=True)
    deltas = [c.choices[0].delta for c in stream]
    thought = "".join(getattr(d, "reasoning_content", None) or "" for d in deltas)
    assert thought == message.reasoning_content
    assert "".join(d.content or "" for d in deltas) == message.content


def test_openai_responses(client: OpenAI) -> None:
    whole = client.responses.create(model="repeat", input="planet", temperature=0)
    assert whole.output_text == "planet-planet" and whole.status == "completed"
    assert whole.usage is not None and whole.usage.output_tokens == 14
    events = list(
        client.responses.create(model="repeat", input="planet", temperature=0, stream=True)
    )
    deltas = [e.delta for e in events if e.type == "response.output_text.delta"]
    assert "".join(deltas) == "planet-planet" and events[-1].type == "response.completed"
    with client.responses.stream(model="repeat", input="planet", temperature=0) as stream:
        assert stream.get_final_response().output_text == "planet-planet"
    parsed = client.responses.parse(model="upper", input="planet", temperature=0, text_format=Paint)
    assert isinstance(parsed.output_parsed, Paint)


def test_openai_responses_with_tools(client: OpenAI) -> None:
    function: Any = PAINT["function"]
    form: Any = {"model": "upper", "temperature": 0}
    form["tools"] = [{"type": "function", **function}]
    first = client.responses.create(**form, input="planet", tool_choice="required")
    call = first.output[0]
    assert call.type == "function_call" and call.name == "Paint"
    Paint.model_validate_json(call.arguments)
    events = list(
        client.responses.create(**form, input="planet", tool_choice="required", stream=True)
    )
    done = [e for e in events if e.type == "response.function_call_arguments.done"]
    assert done[0].arguments == call.arguments
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "red"}
    turn: Any = [{"role": "user", "content": "planet"}, call, result]
    assert client.responses.create(**form, input=turn).status == "completed"


def test_openai_errors_are_of_its_own_classes(client: OpenAI) -> None:
    create = client.chat.completions.create
    with pytest.raises(openai.BadRequestError) as bad:
        create(model="upper", messages=HI, temperature=-1)
    assert bad.value.param == "temperature" and bad.value.type == "invalid_request_error"
    with pytest.raises(openai.BadRequestError) as bad:
        create(model="upper", messages=HI, max_tokens=10**6, stream=True)
    assert (bad.value.param, bad.value.code) == ("max_tokens", "context_length_exceeded")
    for missing in (
        lambda: create(model="nobody", messages=HI),
        lambda: client.models.retrieve("nobody"),
    ):
        with pytest.raises(openai.NotFoundError) as gone:
            missing()
        assert gone.value.code == "model_not_found" and gone.value.param == "model"
    with pytest.raises(openai.AuthenticationError) as refused:
        client.with_options(api_key="wrong").models.list()
    assert refused.value.code == "invalid_api_key"
    with pytest.raises(openai.LengthFinishReasonError):
        client.chat.completions.parse(
            model="upper", messages=HI, max_tokens=4, response_format=Paint
        )


def test_openai_closing_a_stream_frees_the_request(client: OpenAI, server: Server) -> None:
    def aborted() -> float:
        samples = server.metrics().get("weft:requests_finished", [])
        return sum(s.value for s in samples if s.labels["finish_reason"] == "abort")

    form: Any = {"model": "upper", "prompt": PROMPT, "max_tokens": LONG, "stream": True}
    form["extra_body"] = {"ignore_eos": True}
    before = aborted()
    with client.completions.create(**form) as stream:
        next(iter(stream))

    async def leave() -> None:
        async with server.async_client() as other:
            stream: Any = await other.completions.create(**form)
            async for _ in stream:
                break
            await stream.close()

    asyncio.run(leave())
    until(lambda: aborted() == before + 2, "a request went on")


def test_openai_async(server: Server) -> None:
    async def whole(made: AsyncOpenAI) -> str | None:
        said = await made.chat.completions.create(model="upper", messages=HI, temperature=0)
        return said.choices[0].message.content

    async def streamed(made: AsyncOpenAI) -> str:
        stream = await made.chat.completions.create(
            model="repeat", messages=HI, temperature=0, stream=True
        )
        return "".join([c.choices[0].delta.content or "" async for c in stream])

    async def called(made: AsyncOpenAI) -> object:
        async with made.chat.completions.stream(
            model="upper",
            messages=HI,
            temperature=0,
            tools=[PAINT],
            tool_choice="required",
            logit_bias=NO_SPACE,  # type: ignore[arg-type]
        ) as stream:
            message = (await stream.get_final_completion()).choices[0].message
        return (message.tool_calls or [])[0].function.parsed_arguments

    async def response(made: AsyncOpenAI) -> str:
        stream = await made.responses.create(
            model="upper", input="planet", temperature=0, stream=True
        )
        return "".join([e.delta async for e in stream if e.type == "response.output_text.delta"])

    async def run() -> None:
        async with server.async_client() as made:
            assert [m.id async for m in made.models.list()] == MODELS
            said, text, arguments, answered = await asyncio.gather(
                whole(made), streamed(made), called(made), response(made)
            )
            assert (said, text, answered) == ("PLANET", "planet-planet", "PLANET")
            assert isinstance(arguments, Paint)
            with pytest.raises(openai.NotFoundError):
                await made.completions.create(model="nobody", prompt="x")

    asyncio.run(run())


# litellm ------------------------------------------------------------------------------------------

its_own_warnings = pytest.mark.filterwarnings(
    "ignore:Items? '.*' on TypedDict class '.*' (is|are) using the `ReadOnly`:UserWarning",
    r"ignore::DeprecationWarning:litellm\..*",
)


@pytest.fixture(scope="module")
def litellm() -> Iterator[Any]:
    """The package, which would ask GitHub for the prices of models. What it warns of while it is
    imported is its own business."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
        with warnings.catch_warnings(action="ignore"):
            import litellm
            from litellm.litellm_core_utils.thread_pool_executor import executor

        patch.setattr(litellm, "suppress_debug_info", True)
        asyncio.set_event_loop(None)  # or else it makes one for this thread, and leaves it open
        yield litellm
        for kept in litellm.in_memory_llm_clients_cache.cache_dict.values():
            if isinstance(kept, OpenAI):
                kept.close()
        litellm.in_memory_llm_clients_cache.flush_cache()
        executor.shutdown()


def to_server(server: Server, model: str, **more: Any) -> dict[str, Any]:
    """Arguments of litellm's functions."""
    place = {"api_base": f"{server.url}/v1", "api_key": KEY, "max_retries": 0}
    return {"model": f"openai/{model}", "messages": HI, "temperature": 0, **place, **more}


@its_own_warnings
@pytest.mark.exhaustive  # also one of `make test-clients`
def test_litellm_completion(litellm: Any, server: Server) -> None:
    whole = litellm.completion(**to_server(server, "upper", logprobs=True, top_logprobs=1))
    assert whole.choices[0].message.content == "PLANET"
    assert whole.usage.total_tokens == 17 and len(whole.choices[0].logprobs.content) == 7
    chunks = list(
        litellm.completion(
            **to_server(server, "repeat", stream=True, stream_options={"include_usage": True})
        )
    )
    built = litellm.stream_chunk_builder(chunks, messages=HI)
    assert built.choices[0].message.content == "planet-planet"
    assert built.usage.completion_tokens == 14
    thinking = litellm.completion(**to_server(server, "base", extra_body=THOUGHT))
    assert len(thinking.choices[0].message.reasoning_content) == 3
    with pytest.raises(litellm.NotFoundError):
        litellm.completion(**to_server(server, "nobody"))
    with pytest.raises(litellm.BadRequestError, match="top_p"):
        litellm.completion(**to_server(server, "upper", top_p=7))
    with pytest.raises(litellm.AuthenticationError):
        litellm.completion(**to_server(server, "upper") | {"api_key": "wrong"})


@its_own_warnings
@pytest.mark.exhaustive  # also one of `make test-clients`
def test_litellm_forms(litellm: Any, server: Server) -> None:
    """Without its proxy's packages litellm can't look for tools of MCP servers: it is told not
    to."""
    tools = {"tools": [PAINT], "tool_choice": "required", "_skip_mcp_handler": True}
    form = to_server(server, "upper", logit_bias=NO_SPACE, **tools)
    (call,) = litellm.completion(**form).choices[0].message.tool_calls
    Paint.model_validate_json(call.function.arguments)
    built = litellm.stream_chunk_builder(list(litellm.completion(**form, stream=True)))
    (again,) = built.choices[0].message.tool_calls
    assert again.function.arguments == call.function.arguments
    assert built.choices[0].finish_reason == "tool_calls"
    form = to_server(server, "upper", logit_bias=NO_SPACE, response_format=Paint)
    Paint.model_validate_json(litellm.completion(**form).choices[0].message.content)


@its_own_warnings
@pytest.mark.exhaustive  # also one of `make test-clients`
def test_litellm_async(litellm: Any, server: Server) -> None:
    async def run() -> None:
        async with server.async_client() as made:  # its own would outlive the loop
            form = to_server(server, "upper", client=made)
            whole = await litellm.acompletion(**form)
            assert whole.choices[0].message.content == "PLANET"
            stream = await litellm.acompletion(**form, stream=True)
            said = [c.choices[0].delta.content async for c in stream]
            assert "".join(s or "" for s in said) == "PLANET"

    asyncio.run(run())


# LangChain ----------------------------------------------------------------------------------------


ChatModel = Callable[..., Any]


@pytest.fixture
def chat_model(server: Server) -> Iterator[ChatModel]:
    """Makes ChatOpenAI objects."""
    from langchain_openai import ChatOpenAI

    with httpx.Client() as http:

        def make(model: str, **more: Any) -> Any:
            return ChatOpenAI(
                model=model,
                base_url=f"{server.url}/v1",
                api_key=KEY,
                temperature=0,
                max_retries=0,
                http_client=http,
                **more,
            )

        yield make


def test_langchain_chat(chat_model: ChatModel) -> None:
    model = chat_model("upper")
    whole = model.invoke("planet")
    assert whole.content == "PLANET" and whole.usage_metadata["total_tokens"] == 17
    assert [m.content for m in model.batch(["planet", "river"])] == ["PLANET", "RIVER"]
    chunks = list(model.stream("planet", stream_usage=True))
    assert "".join(c.content for c in chunks) == "PLANET" and len(chunks) > 2
    assert sum(c.usage_metadata["output_tokens"] for c in chunks if c.usage_metadata) == 7
    logprobs = model.bind(logprobs=True, top_logprobs=2).invoke("planet")
    assert len(logprobs.response_metadata["logprobs"]["content"]) == 7
    with pytest.raises(openai.BadRequestError, match="top_p"):
        model.invoke("planet", top_p=7)


@pytest.mark.exhaustive  # also one of `make test-clients`
def test_langchain_tools(chat_model: ChatModel) -> None:
    model = chat_model("upper", logit_bias={int(key): bias for key, bias in NO_SPACE.items()})
    for choice in ("any", "Paint"):
        bound = model.bind_tools([Paint], tool_choice=choice)
        (call,) = bound.invoke("planet").tool_calls
        assert call["name"] == "Paint" and call["id"]
        Paint.model_validate(call["args"])
        first, *others = bound.stream("planet")
        for other in others:
            first += other
        assert [c["args"] for c in first.tool_calls] == [call["args"]]
    assert model.bind_tools([Paint]).invoke("planet").content == "PLANET"


@pytest.mark.exhaustive  # also one of `make test-clients`
@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings:UserWarning:pydantic.main")
@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_langchain_structured_output(chat_model: ChatModel, method: str) -> None:
    model = chat_model("upper", logit_bias={int(key): bias for key, bias in NO_SPACE.items()})
    structured = model.with_structured_output(Paint, method=method)
    whole = structured.invoke("planet")
    assert isinstance(whole, Paint)
    assert list(structured.stream("planet"))[-1] == whole


def test_langchain_responses(chat_model: ChatModel) -> None:
    model = chat_model("upper", use_responses_api=True)
    assert model.invoke("planet").text == "PLANET"
    assert "".join(chunk.text for chunk in model.stream("planet")) == "PLANET"


def test_langchain_async(server: Server, chat_model: ChatModel) -> None:
    async def run() -> None:
        async with httpx.AsyncClient() as http:
            model = chat_model("upper", http_async_client=http)
            assert (await model.ainvoke("planet")).content == "PLANET"
            assert "".join([c.content async for c in model.astream("planet")]) == "PLANET"
            said = await model.abatch(["planet", "river"])
            assert [m.content for m in said] == ["PLANET", "RIVER"]

    asyncio.run(run())


# Controllers of adapters --------------------------------------------------------------------------


def test_controllers_load_and_unload(http: httpx.Client, server: Server) -> None:
    """vLLM's texts, SGLang's and Dynamo's objects, to the letter."""
    folder = shutil.copytree(ADAPTERS["reverse"], server.root / "late")
    body = {"lora_name": "late", "lora_path": str(folder)}

    def post(path: str) -> httpx.Response:
        done = http.post(path, json=body)
        assert done.status_code == 200, done.text
        return done

    def answers() -> str | None:
        asked = {"model": "late", "messages": ask("planet"), "temperature": 0}
        said = http.post("/v1/chat/completions", json=asked)
        return said.json()["choices"][0]["message"]["content"] if said.is_success else None

    added = post("/v1/load_lora_adapter").text
    assert added == "Success: LoRA adapter 'late' added successfully."
    assert answers() == answer("reverse", "planet")
    assert set(http.get("/v1/loras").json()["loras"]) == {*MODELS[1:], "late"}
    removed = post("/v1/unload_lora_adapter").text
    assert removed == "Success: LoRA adapter 'late' removed successfully."
    assert answers() is None

    loaded = post("/load_lora_adapter").json()
    assert loaded["success"] and loaded["error_message"] is None
    assert loaded["loaded_adapters"]["late"] == str(folder) and answers()
    assert "late" not in post("/unload_lora_adapter").json()["loaded_adapters"]

    source = {"lora_name": "late", "source": {"uri": f"file://{folder}"}}
    made = http.post("/v1/loras", json=source).json()
    assert (made["status"], made["lora_name"]) == ("success", "late") and answers()
    assert http.delete("/v1/loras/late").json()["status"] == "success"
    assert http.delete("/v1/loras/late").status_code == 404 and answers() is None


def test_controllers_are_told_what_is_wrong(http: httpx.Client) -> None:
    body = {"lora_name": "x", "lora_path": "/etc"}
    refused = http.post("/v1/load_lora_adapter", json=body)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "lora_path"
    sglang = http.post("/load_lora_adapter", json=body)
    assert sglang.status_code == 400 and not sglang.json()["success"]
    assert "/etc" in sglang.json()["error_message"]
    uri = {"lora_name": "x", "source": {"uri": "s3://bucket/x"}}
    assert http.post("/v1/loras", json=uri).json()["error"]["param"] == "source.uri"
    gone = http.post("/v1/unload_lora_adapter", json={"lora_name": "x"})
    assert gone.status_code == 404 and "'x'" in gone.json()["error"]["message"]


# Anything over the wire ---------------------------------------------------------------------------


CHAT, COMPLETE, RESPOND = "/v1/chat/completions", "/v1/completions", "/v1/responses"
NAN, HUGE = float("nan"), 10**30
WRONG: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, {"temperature": "hot"}, "temperature"),
    (CHAT, {"temperature": NAN}, "temperature"),
    (CHAT, {"presence_penalty": float("inf")}, "presence_penalty"),
    (CHAT, {"logit_bias": {"7": NAN}}, "logit_bias[7]"),
    (CHAT, {"logit_bias": {"9" * 30: 1}}, "logit_bias"),
    (CHAT, {"max_tokens": True}, "max_tokens"),
    (CHAT, {"max_tokens": 1.5}, "max_tokens"),
    *((CHAT, {n: HUGE}, n) for n in ("max_tokens", "n", "seed", "top_k", "min_tokens")),
    (CHAT, {"stop_token_ids": [HUGE]}, "stop_token_ids"),
    (CHAT, {"allowed_token_ids": [HUGE]}, "allowed_token_ids"),
    (CHAT, {"stop": "x" * 2000}, "stop"),
    (CHAT, {"bad_words": ["x" * 100_000]}, "bad_words"),
    (CHAT, {"messages": []}, "messages"),
    (CHAT, {"messages": "planet"}, "messages"),
    (CHAT, {"messages": [{"content": "x"}]}, "messages[0].role"),
    (CHAT, {"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
    (CHAT, {"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    (CHAT, {"stream": "yes"}, "stream"),
    (CHAT, {"model": 5}, "model"),
    (
        CHAT,
        {"tools": [{"type": "function", "function": {"name": "a b"}}]},
        "tools[0].function.name",
    ),
    (CHAT, {"tool_choice": "required"}, "tool_choice"),
    (CHAT, {"response_format": {"type": "xml"}}, "response_format.type"),
    (CHAT, {"structured_outputs": {"regex": "("}}, "structured_outputs"),
    (CHAT, {"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    (COMPLETE, {"prompt": []}, "prompt"),
    (COMPLETE, {"prompt": [HUGE]}, "prompt"),
    (COMPLETE, {"prompt": [1, "a"]}, "prompt[1]"),
    (COMPLETE, {"prompt": "x" * 100_000}, "prompt"),
    (COMPLETE, {"prompt": "x", "logprobs": HUGE}, "logprobs"),
    (RESPOND, {"input": []}, "input"),
    (RESPOND, {"input": [{"type": "image"}]}, "input[0].type"),
    (RESPOND, {"input": "x", "max_output_tokens": HUGE}, "max_output_tokens"),
    (RESPOND, {"input": "x", "conversation": "c"}, "conversation"),
]


def refused(answer: httpx.Response, status: int = 400) -> dict[str, Any]:
    """The error of an answer, in OpenAI's shape."""
    assert answer.status_code == status, answer.text
    error: dict[str, Any] = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["message"]
    return error


@pytest.fixture
def unharmed(http: httpx.Client) -> Iterator[None]:
    yield
    assert http.get("/health").status_code == 200
    said = http.post(CHAT, json={"model": "upper", "messages": HI, "temperature": 0}).json()
    assert said["choices"][0]["message"]["content"] == "PLANET"


@pytest.mark.usefixtures("unharmed")
def test_wrong_fields_are_named(http: httpx.Client) -> None:
    own = {"content-type": "application/json"}
    for path, fields, param in WRONG:
        rest = {CHAT: {"messages": HI}, COMPLETE: {"prompt": "x"}, RESPOND: {"input": "x"}}[path]
        body = json.dumps({"model": "upper", **rest, **fields})
        error = refused(http.post(path, content=body, headers=own))
        assert error["param"] == param and error["type"] == "invalid_request_error"


@pytest.mark.usefixtures("unharmed")
def test_what_is_no_request_is_refused(http: httpx.Client) -> None:
    deep = b"[" * 100_000 + b"]" * 100_000
    said = b'{"model": "upper", "messages": [{"role": "user", "content": "%b"}]}'
    own = {"content-type": "application/json; charset=utf-8"}
    for body in (
        b"",
        b"{",
        b"null",
        b"[]",
        b"\xff\xfe",
        "{}".encode("utf-16"),
        said % b"\xff",
        said % b"\\ud800",
        deep,
        said.replace(b'"%b"', deep),
        said.replace(b'"%b"', b"9" * 10_000),
    ):
        refused(http.post(CHAT, content=body, headers=own))
    assert http.post(CHAT, content=said % b"planet", headers=own).status_code == 200
    nested = {"name": "f", "arguments": '{"a":' * 900 + "1" + "}" * 900}
    call = {"role": "assistant", "tool_calls": [{"id": "1", "function": nested}]}
    error = refused(http.post(CHAT, json={"model": "upper", "messages": [*HI, call]}))
    assert error["param"] and error["param"].startswith("messages")
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data"):
        sent = http.post(CHAT, content=said % b"planet", headers={"content-type": kind})
        assert refused(sent, 415)["code"] == "unsupported_media_type"
    refused(http.get(CHAT), 405)
    refused(http.get("/v1/nothing"), 404)

"""Tools and reasoning over HTTP: what the model is asked, and what clients get of its text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import openai
import pytest
from http_api import CHAT, HI, Web, World, served
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from thinking_model import THOUGHT, ids, prompt_of, thinking_world
from toy_tokenizers import byte_level, thinking

from weft.api import ApiSettings
from weft.core.errors import ConfigError, InvalidRequest

BEGIN_OF_REASONING, END_OF_REASONING = thinking().encode("<think></think>", False)
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a place",
        "parameters": {"type": "object", "properties": {"place": {"type": "string"}}},
    },
}
TIME = {"type": "function", "function": {"name": "time"}}
PARIS = '{"place": "Paris"}'
CALL = f'<tool_call>\n{{"name": "weather", "arguments": {PARIS}}}\n</tool_call>'
CALL_TIME = '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>'


async def both(web: Web, text: str, **body: Any) -> tuple[Any, list[Any]]:
    """The choice that the model's text makes, whole and as the choices of a stream. Strictly
    read: no field may be of another type than the client has it."""
    engine = web.world.engine
    engine.answers = [ids(text)]
    whole = await web.chat(**body)
    ChatCompletion.model_validate(whole, strict=True)
    engine.answers = [ids(text)]
    chunks = (await web.chunks(CHAT, {"messages": HI, **body}))[:-1]
    for chunk in chunks:
        ChatCompletionChunk.model_validate(chunk, strict=True)
    return whole["choices"][0], [c["choices"][0] for c in chunks]


def joined(choices: list[Any], name: str) -> str:
    return "".join(c["delta"].get(name) or "" for c in choices)


def calls_of(choices: list[Any]) -> list[Any]:
    """The calls that a stream's deltas add up to."""
    calls: list[Any] = []
    for delta in (d for c in choices for d in c["delta"].get("tool_calls", ())):
        if delta["index"] == len(calls):
            assert delta["type"] == "function" and delta["id"]
            calls.append({"id": delta["id"], "type": "function", "function": delta["function"]})
        else:
            assert set(delta) == {"index", "function"} and set(delta["function"]) == {"arguments"}
            calls[delta["index"]]["function"]["arguments"] += delta["function"]["arguments"]
    return calls


# Calls.


async def test_half_of_a_surrogate_pair_in_a_literal(tmp_path: Path) -> None:
    """No answer can hold it."""
    web = Web(thinking_world(tmp_path, tool_call_parser="olmo3"))
    text = "<function_calls>time(zone='\\ud83d')</function_calls>"
    whole, stream = await both(web, text, tools=[TIME])
    for call in (*whole["message"]["tool_calls"], *calls_of(stream)):
        assert json.loads(call["function"]["arguments"]) == {"zone": "\ufffd"}


async def test_a_call_and_its_stream(web: Web, world: World) -> None:
    whole, stream = await both(web, "let me see\n" + CALL, tools=[WEATHER, TIME])
    assert whole["finish_reason"] == stream[-1]["finish_reason"] == "tool_calls"
    message = whole["message"]
    assert message["content"] == joined(stream, "content") == "let me see"
    (call,) = message["tool_calls"]
    assert call["type"] == "function" and call["id"].startswith("call_")
    assert call["function"] == {"name": "weather", "arguments": PARIS}
    assert [c["function"] for c in calls_of(stream)] == [call["function"]]
    assert "weather" in prompt_of(world) and '"properties": {}' in prompt_of(world)


async def test_a_call_alone_has_no_content(web: Web) -> None:
    whole, stream = await both(web, CALL + "\n" + CALL_TIME, tools=[WEATHER, TIME])
    assert whole["message"]["content"] is None and joined(stream, "content") == ""
    names = [c["function"]["name"] for c in whole["message"]["tool_calls"]]
    assert names == [c["function"]["name"] for c in calls_of(stream)] == ["weather", "time"]


async def test_one_call_if_they_may_not_be_parallel(web: Web) -> None:
    for text in (CALL + "\n" + CALL_TIME, "no"):
        whole, stream = await both(web, text, tools=[WEATHER], parallel_tool_calls=False)
        calls = whole["message"].get("tool_calls", [])
        assert len(calls) == len(calls_of(stream)) == (text != "no")
    for fields in ({"tool_choice": "required"}, {"response_format": {"type": "json_object"}}):
        await web.chat(tools=[WEATHER], parallel_tool_calls=False, **fields)
        form = web.world.engine.requests[-1].params.structured_outputs
        assert form is not None
        tag = form.structural_tag or form.around or ""
        assert '"stop_after_first": true' in tag


async def test_a_call_that_was_cut_off_keeps_its_reason(web: Web) -> None:
    whole, stream = await both(web, CALL, tools=[WEATHER], max_tokens=len(ids(CALL)) - 4)
    assert whole["finish_reason"] == stream[-1]["finish_reason"] == "length"
    assert len(calls_of(stream)) == 1


@pytest.mark.parametrize(("stop", "reason"), [('"Paris', "stop"), ("</tool", "tool_calls")])
async def test_a_call_that_a_stop_string_cut_is_none_to_carry_out(
    web: Web, stop: str, reason: str
) -> None:
    whole, stream = await both(web, CALL, tools=[WEATHER], stop=[stop])
    assert whole["finish_reason"] == stream[-1]["finish_reason"] == reason
    assert len(calls_of(stream)) == 1


async def test_without_tools_a_call_is_content(web: Web, world: World) -> None:
    for body in ({}, {"tools": [WEATHER], "tool_choice": "none"}):
        whole, stream = await both(web, CALL, **body)
        text = CALL.replace("<tool_call>", "").replace("</tool_call>", "")
        assert whole["message"]["content"] == joined(stream, "content") == text
        assert "tool_calls" not in whole["message"]
        assert whole["finish_reason"] == "stop" and "weather" not in prompt_of(world)


async def test_forced_calls_are_a_form_of_the_output(web: Web, world: World) -> None:
    named = {"type": "function", "function": {"name": "time"}}
    for choice, names in (
        (None, None),
        ("auto", None),
        ("required", {"weather", "time"}),
        (named, {"time"}),
    ):
        await both(web, CALL, tools=[WEATHER, TIME], tool_choice=choice)
        form = world.engine.requests[-1].params.structured_outputs
        assert (form is None) == (names is None)
        if form is not None:
            tag = form.structural_tag or ""
            assert {n for n in ("weather", "time") if n in tag} == names
            marks = form.reasoning_token, form.begin_after_token
            assert marks == (BEGIN_OF_REASONING, END_OF_REASONING)


async def test_a_schema_that_the_engine_refuses_is_the_tools_fault(web: Web, world: World) -> None:
    refused = InvalidRequest("structured_outputs: no such type", "structured_outputs")
    world.engine.fail_after = (0, refused)
    body = {"model": "base", "messages": HI, "tools": [WEATHER], "tool_choice": "required"}
    answer = await web.post(CHAT, body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tools")


SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
AS_SCHEMA = {"type": "json_schema", "json_schema": {"name": "city", "schema": SCHEMA}}
CALLS_TIME = {
    "hermes": CALL_TIME,
    "llama3_json": '{"name": "time", "parameters": {}}',
    "mistral": '[TOOL_CALLS] [{"name": "time", "arguments": {}}]',
    "mistral_v11": "[TOOL_CALLS]time[ARGS]{}",
    "glm45": "<tool_call>time\n</tool_call>",
    "minimax_m2": '<minimax:tool_call>\n<invoke name="time">\n</invoke>\n</minimax:tool_call>',
    "hunyuan": "<tool_calls><tool_call>time\n```json\n{}\n```</tool_call></tool_calls>",
    "nemotron_json": '<TOOLCALL>[{"name": "time", "arguments": {}}]</TOOLCALL>',
    "lfm2": "<|tool_call_start|>[time()]<|tool_call_end|>",
    "qwen3_coder": "<tool_call>\n<function=time>\n</function>\n</tool_call>",
    "seed_oss": "<seed:tool_call>\n<function=time>\n</function>\n</seed:tool_call>",
    "gemma4": "<|tool_call>call:time{}<tool_call|>",
    "olmo3": "<function_calls>time()</function_calls>",
    "glm4": "time\n{}",
    "harmony": "<|channel|>commentary to=functions.time <|constrain|>json<|message|>{}",
}


@pytest.mark.parametrize("tool_format", CALLS_TIME)
async def test_an_answer_is_either_a_call_or_has_the_form(tmp_path: Path, tool_format: str) -> None:
    """What it begins with decides: a text may hold what a call looks like."""
    world = thinking_world(tmp_path, tool_call_parser=tool_format, reasoning_parser=None)
    call = CALLS_TIME[tool_format]
    text = f'{{"city":"{call}"}}'
    head = "<|channel|>final<|message|>" if tool_format == "harmony" else ""
    fields: dict[str, Any] = {"tools": [TIME], "response_format": AS_SCHEMA}
    web = Web(world)
    for said in (call, head + text):
        whole, stream = await both(web, said, **fields)
        form = world.engine.requests[-1].params.structured_outputs
        assert form is not None and form.json == json.dumps(SCHEMA)
        assert "time" in (form.around or "")
        called = said == call
        assert whole["finish_reason"] == stream[-1]["finish_reason"]
        assert whole["finish_reason"] == ("tool_calls" if called else "stop")
        assert len(whole["message"].get("tool_calls", [])) == called
        assert len(calls_of(stream)) == called
        content = whole["message"]["content"]
        assert (content or "") == joined(stream, "content") == ("" if called else text)


@pytest.mark.parametrize("said", [CALL_TIME, '{"city":"Ghent"}'])
async def test_either_comes_after_the_reasoning(web: Web, world: World, said: str) -> None:
    fields: dict[str, Any] = {"tools": [TIME], "tool_choice": "auto", "n": 2}
    world.engine.answers = [ids(THOUGHT + said) for _ in "12"]
    answer = await web.chat(**fields, structured_outputs={"json_object": True})
    for choice in answer["choices"]:
        assert choice["message"]["reasoning_content"] == "hm"
        assert choice["finish_reason"] == ("tool_calls" if said == CALL_TIME else "stop")
    form = world.engine.requests[-1].params.structured_outputs
    assert form is not None and form.json_object and form.around
    marks = form.reasoning_token, form.begin_after_token
    assert marks == (BEGIN_OF_REASONING, END_OF_REASONING)


async def test_other_apis_take_tools_and_a_form_too(web: Web, world: World) -> None:
    function = {"type": "function", "name": "time"}
    of_responses = {
        "model": "base",
        "input": "hi",
        "tools": [function],
        "text": {"format": {"type": "json_schema", "name": "city", "schema": SCHEMA}},
    }
    of_messages = {
        "model": "base",
        "messages": HI,
        "max_tokens": 500,
        "tools": [{"name": "time", "input_schema": {"type": "object"}}],
        "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}},
    }
    for said, item, block in (
        (CALL_TIME, "function_call", "tool_use"),
        ('{"city":"Ghent"}', "message", "text"),
    ):
        world.engine.answers = [ids(said) for _ in "12"]
        answer = await web.post("/v1/responses", of_responses)
        assert [each["type"] for each in answer.json()["output"]] == [item]
        answer = await web.post("/v1/messages", of_messages)
        assert [each["type"] for each in answer.json()["content"]] == [block]
        form = world.engine.requests[-1].params.structured_outputs
        assert form is not None and form.json and "time" in (form.around or "")


async def test_the_fault_of_a_form_beside_tools_has_its_name(web: Web, world: World) -> None:
    body = {"model": "base", "messages": HI, "tools": [TIME], "response_format": AS_SCHEMA}
    of_messages = {
        "model": "base",
        "messages": HI,
        "max_tokens": 5,
        "tools": [{"name": "time", "input_schema": {"type": "object"}}],
        "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}},
    }
    for field, ours, theirs in (
        ("structured_outputs", "response_format", "output_config.format"),
        ("structured_outputs.around", "tools", "tools"),
    ):
        world.engine.fail_after = (0, InvalidRequest(f"{field}: no such type", field))
        answer = await web.post(CHAT, body)
        told = answer.json()["error"]
        assert (told["param"], told["message"]) == (ours, f"{ours}: no such type")
        answer = await web.post("/v1/messages", of_messages)
        assert answer.status_code == 400
        assert answer.json()["error"]["message"] == f"{theirs}: no such type"
    deep: dict[str, Any] = {"type": "integer"}
    for _ in range(130):
        deep = {"items": deep}
    for schema in ({"description": "a" * 70_000}, deep):
        function = {"name": "time", "parameters": {"type": "object", **schema}}
        tools = [{"type": "function", "function": function}]
        answer = await web.post(CHAT, body | {"tools": tools})
        told = answer.json()["error"]
        assert (answer.status_code, told["param"]) == (400, "tools"), told
        assert told["message"].startswith("tools: ")


async def test_tools_that_may_not_be_called_leave_the_form_alone(web: Web, world: World) -> None:
    fields: dict[str, Any] = {"tools": [WEATHER], "response_format": {"type": "json_object"}}
    await web.chat(**fields, tool_choice="none")
    form = world.engine.requests[-1].params.structured_outputs
    assert form is not None and form.around is None
    await web.chat(tools=[WEATHER], response_format={"type": "text"})
    assert world.engine.requests[-1].params.structured_outputs is None


async def test_a_form_beside_a_forced_call_has_nothing_to_bind(web: Web, world: World) -> None:
    """instructor sends both to /v1/responses."""
    schema = {"type": "object", "properties": {"city": {"type": "string"}}}
    function = {"type": "function", "name": "weather"}
    text = {"format": {"type": "json_schema", "name": "weather", "schema": schema}}
    fields: dict[str, Any] = {"tools": [WEATHER], "response_format": {"type": "json_object"}}
    for choice in ("required", {"type": "function", "function": {"name": "weather"}}):
        whole, _ = await both(web, CALL, **fields, tool_choice=choice)
        assert whole["finish_reason"] == "tool_calls"
        form = world.engine.requests[-1].params.structured_outputs
        assert form is not None and not form.json_object and form.structural_tag
    body = {"model": "base", "input": "hi", "text": text, "tool_choice": function}
    answer = await web.post("/v1/responses", body | {"tools": [function]})
    assert answer.status_code == 200, answer.text


async def test_earlier_calls_and_results_are_in_the_prompt(web: Web, world: World) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "time", "arguments": ""}}
    messages = [
        *HI,
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "hm",
            "tool_calls": [call],
            "refusal": None,
            "function_call": None,
        },
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "noon"}]},
    ]
    await web.chat(messages=messages, tools=[TIME])
    assert prompt_of(world).endswith(
        "<s>assistant: <think>hm</think><tool_call>time{}</tool_call><s>tool: noon<s>assistant:"
    )


# Reasoning.


@pytest.mark.parametrize("opened", [False, True])
async def test_reasoning_and_its_stream(web: Web, opened: bool) -> None:
    text = ("" if opened else "<think>\n") + "hm, well\n</think>\n\nyes"
    kwargs = {"begun": opened}
    whole, stream = await both(web, text, chat_template_kwargs=kwargs, logprobs=True)
    message = whole["message"]
    assert (message["content"], message["reasoning_content"]) == ("yes", "hm, well")
    assert message["reasoning"] == "hm, well"
    assert joined(stream, "content") == "yes"
    assert joined(stream, "reasoning_content") == joined(stream, "reasoning") == "hm, well"
    tokens = [t for c in stream for t in (c["logprobs"] or {"content": []})["content"]]
    assert tokens == whole["logprobs"]["content"]
    assert len(tokens) == len(ids(text)) + 1


async def test_reasoning_before_a_call(web: Web) -> None:
    text = THOUGHT + CALL
    whole, stream = await both(web, text, tools=[WEATHER], skip_special_tokens=True)
    assert whole["message"]["reasoning_content"] == joined(stream, "reasoning") == "hm"
    assert len(whole["message"]["tool_calls"]) == len(calls_of(stream)) == 1


async def test_a_form_binds_after_the_reasoning_if_there_is_any(web: Web, world: World) -> None:
    form = {"type": "json_object"}
    for kwargs, marks in (
        ({}, (BEGIN_OF_REASONING, END_OF_REASONING)),
        ({"begun": True}, (None, END_OF_REASONING)),
        ({"enable_thinking": False}, (None, None)),
    ):
        await web.chat(response_format=form, chat_template_kwargs=kwargs)
        asked = world.engine.requests[-1].params.structured_outputs
        assert asked is not None
        assert (asked.reasoning_token, asked.begin_after_token) == marks


# What the operator says.


async def test_parsers_are_what_the_operator_says(tmp_path: Path) -> None:
    web = Web(thinking_world(tmp_path, tool_call_parser="mistral", reasoning_parser=None))
    text = '<think>[TOOL_CALLS][{"name": "time", "arguments": {}}]'
    whole, _ = await both(web, text, tools=[TIME])
    assert whole["message"]["content"] == "<think>"
    assert whole["message"]["tool_calls"][0]["function"]["name"] == "time"
    web = Web(thinking_world(tmp_path, tool_call_parser=None))
    answer = await web.post(CHAT, {"model": "base", "messages": HI, "tools": [TIME]})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tools")
    for name in ("tool_call_parser", "reasoning_parser"):
        with pytest.raises(ConfigError) as error:
            ApiSettings(("base",), **{name: "no such"})
        assert error.value.param == name


async def test_a_required_call_to_an_odd_schema_is_refused_by_name(tmp_path: Path) -> None:
    web = Web(thinking_world(tmp_path, tool_call_parser="gemma4"))
    place: dict[str, Any] = {"type": "string"}
    for _ in range(12):
        place = {"type": "object", "properties": {"near": {"type": "string"}, "in": place}}
    for schema, reason in ((place, "too large"), ({"enum": 5}, "'enum'")):
        parameters = {"type": "object", "properties": {"place": schema}}
        function = {"name": "weather", "parameters": parameters}
        tools = [{"type": "function", "function": function}]
        body = {"model": "base", "messages": HI, "tools": tools, "tool_choice": "required"}
        answer = await web.post(CHAT, body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tools")
        assert reason in answer.text


# The client.


@pytest.mark.parametrize("tokens_per_event", [1, 1000])
def test_the_openai_client_reads_calls(world: World, tokens_per_event: int) -> None:
    world.engine.tokens_per_event = tokens_per_event
    world.engine.answers = [ids(f"<think>\nhm\n</think>\n\n{CALL}\n{CALL_TIME}") for _ in "12"]
    ask: dict[str, Any] = {"model": "base", "messages": HI, "tools": [WEATHER, TIME]}
    with served(world) as url, openai.OpenAI(base_url=f"{url}/v1", api_key="none") as client:
        whole = client.chat.completions.create(**ask).choices[0]
        with client.chat.completions.stream(**ask) as stream:
            done = [e.name for e in stream if e.type == "tool_calls.function.arguments.done"]
            final = stream.get_final_completion().choices[0]
    assert done == ["weather", "time"]
    assert whole.finish_reason == final.finish_reason == "tool_calls"
    for choice in (whole, final):
        functions = [c.function for c in choice.message.tool_calls or ()]  # type: ignore[union-attr]
        assert [(f.name, json.loads(f.arguments)) for f in functions] == [
            ("weather", {"place": "Paris"}),
            ("time", {}),
        ]


async def test_the_name_of_a_function_is_refused_with_what_it_may_be(web: Web) -> None:
    tools = [{"type": "function", "function": {"name": "two words"}}]
    answer = await web.post(CHAT, {"model": "base", "messages": HI, "tools": tools})
    told = "tools[0].function.name must match ^[a-zA-Z0-9_.-]{1,128}$"
    assert answer.json()["error"]["message"] == told


async def test_a_model_without_tools_says_so(tmp_path: Path) -> None:
    world = World(tmp_path, byte_level())
    web = Web(world)
    answer = await web.post(CHAT, {"model": "base", "messages": HI, "tools": [TIME]})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tools")
    assert (await web.chat(tools=[TIME], tool_choice="none"))["choices"]
    world.check()


@pytest.mark.parametrize("cut", ["\n</tool_c", "\n<", "\n", ""])
async def test_a_call_that_is_cut_inside_its_last_mark(web: Web, cut: str) -> None:
    whole, chunks = await both(web, CALL.partition("\n</")[0] + cut, tools=[WEATHER])
    assert whole["message"]["content"] is None and not joined(chunks, "content")
    assert calls_of(chunks)[0]["function"]["arguments"] == PARIS

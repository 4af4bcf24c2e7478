"""`/v1/messages`, as the anthropic client speaks and reads it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import anthropic
import pytest
from http_api import Web, World, served
from pydantic_core import from_json
from thinking_model import BIG, CALL, THOUGHT, ids, prompt_of, thinking_world

from weft.core.errors import EngineDead, InvalidRequest
from weft.core.sampling import StructuredOutputs

PATH = "/v1/messages"
TIME: dict[str, Any] = {
    "name": "time",
    "input_schema": {"type": "object"},
    "cache_control": {"type": "ephemeral"},
}
HI = [{"role": "user", "content": "hi"}]
ASK: dict[str, Any] = {"model": "base", "max_tokens": 400, "messages": HI}


async def whole_of(web: Web, says: str, **body: Any) -> Any:
    web.world.engine.answers = [ids(says)]
    answer = await web.post(PATH, {**ASK, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


async def events_of(web: Web, says: str, **body: Any) -> list[Any]:
    web.world.engine.answers = [ids(says)]
    answer = await web.post(PATH, {**ASK, "stream": True, **body})
    assert answer.status_code == 200, answer.text
    blocks = answer.text.split("\n\n")
    assert blocks.pop() == ""
    events = []
    for block in blocks:
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


async def test_an_answer(web: Web, world: World) -> None:
    message = await whole_of(
        web, "yes", system=[{"type": "text", "text": "be brief"}], max_tokens=9, top_p=0.5
    )
    assert prompt_of(world) == "<s>system: be brief<s>user: hi<s>assistant:"
    params = world.engine.requests[0].params
    assert (params.max_tokens, params.top_p) == (9, 0.5)
    assert message.pop("id").startswith("msg_")
    assert message == {
        "type": "message",
        "role": "assistant",
        "model": "base",
        "content": [{"type": "text", "text": "yes"}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": len(world.engine.requests[0].prompt_ids) - 1,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 1,
            "output_tokens": 4,
            "output_tokens_details": {"thinking_tokens": 0},
        },
    }


async def test_why_an_answer_ends(web: Web) -> None:
    for fields, said, reason, sequence in (
        ({"max_tokens": 2}, "ye", "max_tokens", None),
        ({"stop_sequences": ["es"]}, "y", "stop_sequence", "es"),
        ({"max_tokens": 100_000}, "yes", "end_turn", None),
    ):
        message = await whole_of(web, "yes", **fields)
        assert message["content"] == [{"type": "text", "text": said}]
        assert (message["stop_reason"], message["stop_sequence"]) == (reason, sequence)
        *_, last, _ = await events_of(web, "yes", **fields)
        assert last["delta"] == {"stop_reason": reason, "stop_sequence": sequence}
    message = await whole_of(web, "x" * 5000, max_tokens=100_000)
    assert message["stop_reason"] == "model_context_window_exceeded"
    usage = message["usage"]
    assert usage["input_tokens"] + 1 + usage["output_tokens"] == BIG.max_model_len


@pytest.mark.parametrize("tokens_per_event", [1, 7, 50, 1000])
async def test_text_beside_calls_has_its_place(
    web: Web, world: World, tokens_per_event: int
) -> None:
    world.engine.tokens_per_event = tokens_per_event
    text = f"Here. {CALL} There. {CALL}\nThat is all that there is to say of the time."
    kinds = ["text", "tool_use", "text", "tool_use", "text"]
    blocks = (await whole_of(web, text, tools=[TIME]))["content"]
    assert [block["type"] for block in blocks] == kinds
    assert blocks[1]["input"] == blocks[3]["input"] == {"zone": "UTC"}
    events = await events_of(web, text, tools=[TIME])
    deltas = [e for e in events if e["type"] == "content_block_delta"]
    for n, kind in enumerate(kinds):
        said = {e["delta"]["type"] for e in deltas if e["index"] == n}
        assert said == {"input_json_delta" if kind == "tool_use" else "text_delta"}


async def test_streams_add_up_to_whole_answers(web: Web) -> None:
    text = THOUGHT + "let me see\n" + CALL + "\n" + CALL
    whole = await whole_of(web, text, tools=[TIME])
    events = await events_of(web, text, tools=[TIME])
    kinds = [block["type"] for block in whole["content"]]
    assert kinds == ["thinking", "text", "tool_use", "tool_use"]
    assert whole["content"][2]["input"] == {"zone": "UTC"}
    assert whole["stop_reason"] == "tool_use"
    first, ping, *between, delta, stop = events
    assert (ping["type"], stop["type"]) == ("ping", "message_stop")
    assert first["message"]["content"] == [] and first["message"]["stop_reason"] is None
    assert delta["delta"]["stop_reason"] == "tool_use" and delta["usage"] == whole["usage"]
    for index, block in enumerate(whole["content"]):
        begin, *grows, end = [e for e in between if e["index"] == index]
        assert begin["type"] == "content_block_start" and end["type"] == "content_block_stop"
        kind = block["type"]
        name = {"tool_use": "partial_json"}.get(kind, kind)
        said = "".join(each["delta"].get(name, "") for each in grows)
        assert (json.loads(said) if kind == "tool_use" else said) == (
            block["input"] if kind == "tool_use" else block[kind]
        )
    cut = await whole_of(web, CALL, tools=[TIME], max_tokens=len(ids(CALL)) - 8)
    assert cut["content"][0]["input"] == {} and cut["stop_reason"] == "max_tokens"


TURNS: list[dict[str, Any]] = [
    {"role": "user", "content": [{"type": "text", "text": "time?", "cache_control": {}}]},
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "m", "signature": "s"},
            {"type": "text", "text": "so"},
            {"type": "tool_use", "id": "1", "name": "time", "input": {}},
            {"type": "tool_use", "id": "2", "name": "time", "input": {"z": 1}},
        ],
    },
    {
        "role": "user",
        "content": [
            {"type": "tool_result", "tool_use_id": "1", "content": "noon"},
            {"type": "tool_result", "tool_use_id": "2", "content": [{"type": "text", "text": "1"}]},
            {"type": "text", "text": "and"},
            {"type": "text", "text": "now?"},
        ],
    },
]
SHOWN = (
    "<s>user: time?<s>assistant: <think>m</think>so<tool_call>time{}</tool_call>"
    '<tool_call>time{"z": 1}</tool_call><s>tool: noon<s>tool: 1<s>user: and\nnow?'
)


@pytest.mark.parametrize(
    ("value", "read"),
    [('"a\\ud83d"', {"zone": "a\ufffd"}), ('"\\ud83d\\ude00"', {"zone": "\U0001f600"})]
    + [("[" * depth + "]" * depth, {}) for depth in (400, 960, 1500)],
)
async def test_arguments_that_no_answer_can_hold(
    web: Web, world: World, value: str, read: Any
) -> None:
    """Half of a surrogate pair, and what is nested too deeply."""
    says = CALL.replace('"UTC"', value)
    message = await whole_of(web, says, tools=[TIME], max_tokens=4000)
    assert message["content"][0]["input"] == read
    assert (await events_of(web, says, tools=[TIME], max_tokens=4000))[-1]["type"] != "error"
    for stream in (False, True):
        world.engine.answers = [ids(says)]
        tool = {"type": "function", "name": "time"}
        body = {"model": "base", "input": "hi", "tools": [tool], "max_output_tokens": 4000}
        answer = await web.post("/v1/responses", {**body, "stream": stream})
        assert answer.status_code == 200 and "internal server error" not in answer.text


@pytest.mark.parametrize(
    ("value", "read"),
    [
        ('"a\\ud83d"', "a\ufffd"),
        ('"\\udE00 \\ud83d\\ud83d\\ude00"', "\ufffd \ufffd\U0001f600"),
        ('"\\\\ud83d \\ue000\\n"', "\\ud83d \ue000\n"),
    ],
)
async def test_strict_readers_can_read_streamed_arguments(
    web: Web, world: World, value: str, read: str
) -> None:
    """Anthropic's client reads them anew with each piece, and half of a surrogate pair ends it."""
    says = CALL.replace('"UTC"', value)
    events = await events_of(web, says, tools=[TIME])
    so_far = ""
    for event in events:
        so_far += event.get("delta", {}).get("partial_json", "")
        from_json(so_far or "{}", allow_partial=True)
    assert from_json(so_far) == {"zone": read}
    world.engine.answers = [ids(says)]
    tool = {"type": "function", "function": {"name": "time"}}
    said = (await web.chat(tools=[tool], messages=HI))["choices"][0]["message"]
    assert from_json(said["tool_calls"][0]["function"]["arguments"]) == {"zone": read}
    await web.chat(tools=[tool], messages=[*HI, said, *HI])


async def test_conversations(web: Web, world: World) -> None:
    await whole_of(web, "x", messages=TURNS)
    assert prompt_of(world) == SHOWN + "<s>assistant:"
    begun = [*TURNS, {"role": "assistant", "content": "It is"}]
    await whole_of(web, "x", messages=begun)
    assert prompt_of(world) == SHOWN + "<s>assistant: It is"
    await whole_of(web, "x", thinking={"type": "disabled"})
    assert prompt_of(world).endswith("<s>assistant:<think>\n\n</think>\n\n")


async def test_counting(web: Web) -> None:
    for messages in (HI, TURNS, [{"role": "user", "content": "x" * 9000}]):
        body = {"model": "base", "messages": messages, "tools": [TIME]}
        answer = await web.post(f"{PATH}/count_tokens", body)
        assert answer.status_code == 200, answer.text
        if messages[0]["content"] == "x" * 9000:
            assert answer.json()["input_tokens"] > 9000
            continue
        message = await whole_of(web, "x", messages=messages, tools=[TIME])
        num_input = message["usage"]["input_tokens"] + 1
        assert answer.json() == {"input_tokens": num_input}


async def test_forms_calls_and_hints(web: Web, world: World) -> None:
    form = {"format": {"type": "json_schema", "schema": {"type": "object"}}, "effort": "low"}
    await whole_of(web, "x", output_config=form)
    asked = world.engine.requests[-1].params.structured_outputs
    begin, end = ids("<think></think>")
    assert asked == StructuredOutputs(
        json='{"type": "object"}', begin_after_token=end, reasoning_token=begin
    )
    for choice in ({"type": "any"}, {"type": "tool", "name": "time"}):
        one = choice | {"disable_parallel_tool_use": True}
        message = await whole_of(web, CALL + "\n" + CALL, tools=[TIME], tool_choice=one)
        assert [block["type"] for block in message["content"]] == ["tool_use"]
        asked = world.engine.requests[-1].params.structured_outputs
        assert asked is not None and "time" in (asked.structural_tag or "")
    hints = {
        "metadata": {"user_id": "u"},
        "thinking": {"type": "enabled", "budget_tokens": 9},
        "zeta": 1,
    }
    answer = await web.post(PATH, {**ASK, "max_tokens": 3, **hints})
    assert answer.headers["x-weft-ignored"] == "zeta,thinking.budget_tokens"
    assert answer.headers["request-id"] == answer.headers["x-request-id"]


def block(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [fields]}]}


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
        ({"messages": [*HI, {"role": "system", "content": []}]}, "messages[1].content"),
        (block(type="image", source={}), "messages[0].content[0].type"),
        (block(type="thinking", thinking="x"), "messages[0].content[0].type"),
        (block(type="text"), "messages[0].content[0].text"),
        ({"messages": [*HI, {**TURNS[1]}]}, "messages"),
        ({"tools": [{"type": "web_search_20250305", "name": "w"}]}, "tools[0].type"),
        ({"tools": [TIME, TIME]}, "tools"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tool_choice": {"type": "tool"}, "tools": [TIME]}, "tool_choice.name"),
        ({"temperature": -1}, "temperature"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_bad_requests_name_the_field(
    shared: World, body: dict[str, Any], told: str, stream: bool
) -> None:
    web = Web(shared)
    answer = await web.post(PATH, {**ASK, "stream": stream, **body})
    assert answer.status_code == 400, answer.text
    error = answer.json()
    assert error["type"] == "error" and error["error"]["type"] == "invalid_request_error"
    assert error["error"]["param"] == told and told in error["error"]["message"]


async def test_other_errors(web: Web, world: World) -> None:
    answer = await web.post(PATH, {**ASK, "model": "nobody"})
    assert (answer.status_code, answer.json()["error"]["type"]) == (404, "not_found_error")
    world.engine.fail_after = (0, InvalidRequest("stop: bad", "stop"))
    answer = await web.post(PATH, {**ASK, "stream": True})
    assert answer.json()["error"]["message"] == "stop_sequences: bad"
    world.engine.fail_after = (1, EngineDead("it died"))
    answer = await web.post(PATH, {**ASK, "stream": True})
    last = answer.text.strip().split("\n\n")[-1]
    assert last.startswith("event: error\n")
    error = json.loads(last.split("data: ")[1])
    assert error["type"] == "error" and error["error"]["type"] == "overloaded_error"
    world.engine.fail_after, world.engine.ending = None, "abort"  # as the server stops
    answer = await web.post(PATH, ASK)
    assert answer.status_code == 503
    assert answer.json()["error"]["type"] == "overloaded_error"
    answer = await web.post(PATH, {**ASK, "stream": True})
    assert "event: error\n" in answer.text and "message_delta" not in answer.text


async def test_keys(tmp_path: Path) -> None:
    world = thinking_world(tmp_path, api_keys=["secret"])
    web = Web(world)
    for headers, status in (
        ({"x-api-key": "secret"}, 200),
        ({"authorization": "Bearer secret"}, 200),
        ({"x-api-key": "other"}, 401),
        ({}, 401),
    ):
        answer = await web.post(PATH, {**ASK, "max_tokens": 2}, headers=headers)
        assert answer.status_code == status
        if status == 401:
            assert answer.json()["error"]["type"] == "authentication_error"
    world.check()


def test_the_anthropic_client(world: World) -> None:
    """What the library makes of answers goes back to it as the next turn."""
    ask: Any = ASK | {"tools": [TIME]}
    with (
        served(world) as url,
        anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as client,
    ):
        world.engine.answers = [ids(THOUGHT + "so\n" + CALL)] * 2
        whole = client.messages.create(**ask)
        with client.messages.stream(**ask) as stream:
            final = stream.get_final_message()
        kinds = [each.type for each in whole.content]
        assert kinds == [each.type for each in final.content] == ["thinking", "text", "tool_use"]
        assert whole.usage.output_tokens == final.usage.output_tokens
        call: Any = final.content[2]
        assert call.input == {"zone": "UTC"}
        result = {"type": "tool_result", "tool_use_id": call.id, "content": "noon"}
        messages: Any = [
            *HI,
            {"role": "assistant", "content": final.content},
            {"role": "user", "content": [result]},
        ]
        world.engine.answers = [ids("noon it is")]
        answer: Any = client.messages.create(model="base", max_tokens=20, messages=messages)
        assert answer.content[0].text == "noon it is"
        assert prompt_of(world).endswith(
            '</think>so<tool_call>time{"zone": "UTC"}</tool_call><s>tool: noon<s>assistant:'
        )
        counted = client.messages.count_tokens(model="base", messages=messages)
        assert counted.input_tokens == len(world.engine.requests[-1].prompt_ids)
        with pytest.raises(anthropic.NotFoundError, match="nobody"):
            client.messages.create(**ask | {"model": "nobody"})
        with pytest.raises(anthropic.BadRequestError) as caught:
            client.messages.create(**ask | {"max_tokens": 0})
        assert caught.value.request_id
        world.engine.fail_after = (1, EngineDead("it died"))
        with pytest.raises(anthropic.APIStatusError, match="it died"):
            list(client.messages.create(**ask, stream=True))

"""`/v1/responses`, as the openai client speaks and reads it."""

from __future__ import annotations

import gc
import json
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest
from http_api import INFO, Web, World, served
from hypothesis import given
from hypothesis import strategies as st
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter
from thinking_model import CALL, THOUGHT, ids, prompt_of, thinking_world
from tokenizers import AddedToken
from toy_tokenizers import byte_level

from weft.api.bodies import Message
from weft.api.stored import StoredResponse, StoredResponses
from weft.core.errors import EngineDead, InvalidRequest, ResponseNotFound
from weft.core.sampling import StructuredOutputs
from weft.text import Tokenizer
from weft.text.tools import TOOL_FORMATS

PATH = "/v1/responses"
TIME: dict[str, Any] = {"type": "function", "name": "time", "parameters": None, "strict": True}
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


async def whole_of(web: Web, says: str, **body: Any) -> Response:
    web.world.engine.answers = [ids(says)]
    answer = await web.post(PATH, {"model": "base", "input": "hi", **body})
    assert answer.status_code == 200, answer.text
    return Response.model_validate(answer.json())


async def events_of(web: Web, says: str, **body: Any) -> list[Any]:
    web.world.engine.answers = [ids(says)]
    answer = await web.post(PATH, {"model": "base", "input": "hi", "stream": True, **body})
    assert answer.status_code == 200, answer.text
    blocks = answer.text.split("\n\n")
    assert blocks.pop() == ""
    events = []
    for block in blocks:
        name, data = block.split("\n")
        events.append(EVENT.validate_json(data.removeprefix("data: ")))
        assert name == f"event: {events[-1].type}"
    assert [e.sequence_number for e in events] == list(range(len(events)))
    return events


def without_ids(response: Response) -> list[dict[str, Any]]:
    items = [item.model_dump() for item in response.output]
    for item in items:
        assert item.pop("id")
        item.pop("call_id", None)
    return items


async def test_an_answer(web: Web, world: World) -> None:
    response = await whole_of(
        web, "yes", instructions="be brief", max_output_tokens=9, temperature=0.5, top_p=0.5
    )
    assert prompt_of(world) == "<s>system: be brief<s>user: hi<s>assistant:"
    params = world.engine.requests[0].params
    assert (params.max_tokens, params.temperature, params.top_p) == (9, 0.5, 0.5)
    assert (response.status, response.output_text) == ("completed", "yes")
    assert response.id.startswith("resp_") and response.incomplete_details is None
    usage = response.usage
    assert usage is not None and usage.input_tokens == len(world.engine.requests[0].prompt_ids)
    assert (usage.output_tokens, usage.input_tokens_details.cached_tokens) == (4, 1)
    assert usage.output_tokens_details.reasoning_tokens == 0


async def test_an_answer_that_was_cut_off(web: Web) -> None:
    response = await whole_of(web, "yes", max_output_tokens=2)
    assert (response.status, response.output_text) == ("incomplete", "ye")
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.output[0].status == "incomplete"  # type: ignore[union-attr]
    *_, last = await events_of(web, "yes", max_output_tokens=2)
    assert last.type == "response.incomplete" and last.response.output_text == "ye"


async def test_the_events_of_a_text(web: Web) -> None:
    events = await events_of(web, "yes")
    kinds = [e.type.removeprefix("response.") for e in events]
    assert kinds == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        *["output_text.delta"] * 3,
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]
    assert "".join(e.delta for e in events if e.type.endswith("text.delta")) == "yes"
    assert events[0].response.status == "in_progress" and events[0].response.output == []
    assert events[2].item.status == "in_progress" and events[2].item.content == []
    assert events[3].part.text == "" and events[7].text == events[8].part.text == "yes"
    assert events[9].item == events[-1].response.output[0]
    assert {e.item_id for e in events[3:9]} == {events[2].item.id}


def told_and_thought(response: Response) -> tuple[str, int]:
    """The tokens that have log-probabilities, and how many tokens were thoughts."""
    texts = [item.content[0] for item in response.output if item.type == "message"]
    told = [each.token for text in texts for each in text.logprobs or ()]  # type: ignore[union-attr]
    assert response.usage is not None
    return "".join(told), response.usage.output_tokens_details.reasoning_tokens


@pytest.mark.parametrize("tokens_per_event", [1, 5, 1000])
@pytest.mark.parametrize(
    ("says", "told", "thought"),
    [
        ("let me see\n" + CALL, "let me see", ""),
        (THOUGHT + "see\n" + CALL, "\n\nsee", THOUGHT.strip()),
        ("<think>\nhm", "", "<think>\nhm</s>"),
        ("<think></think>so", "so</s>", "<think></think>"),
        ("so </think> it is", "so </think> it is</s>", ""),
    ],
)
async def test_tokens_of_the_answer_alone_are_told(
    web: Web, world: World, says: str, told: str, thought: str, tokens_per_event: int
) -> None:
    world.engine.tokens_per_event = tokens_per_event
    asked = {"tools": [TIME], "include": ["message.output_text.logprobs"]}
    expected = told, len(ids(thought))
    assert told_and_thought(await whole_of(web, says, **asked)) == expected
    assert told_and_thought((await events_of(web, says, **asked))[-1].response) == expected


async def test_headers_of_messages_are_no_answer(tmp_path: Path) -> None:
    tokenizer = byte_level.__wrapped__()
    marks = [AddedToken(mark, special=True) for mark in TOOL_FORMATS["harmony"].marks]
    tokenizer._hf.add_tokens(marks, True)
    tokenizer = Tokenizer(tokenizer._hf)
    info = replace(INFO, max_model_len=4096, vocab_size=tokenizer.vocab_size)
    world = World(tmp_path, tokenizer, info, tool_call_parser="harmony")
    thought = "<|channel|>analysis<|message|>hm<|end|>"
    says = thought + "<|start|>assistant<|channel|>final<|message|>yes"
    body = {"model": "base", "input": "hi", "top_logprobs": 1}
    expected = "yes</s>", len(tokenizer.encode(thought))
    web = Web(world)
    world.engine.answers = [tokenizer.encode(says) for _ in "12"]
    whole = await web.post(PATH, body)
    assert told_and_thought(Response.model_validate(whole.json())) == expected
    events = (await web.post(PATH, {**body, "stream": True})).text.split("data: ")
    response = json.loads(events[-1])["response"]
    assert told_and_thought(Response.model_validate(response)) == expected


@pytest.mark.parametrize("tokens_per_event", [1, 7, 50, 1000])
async def test_text_beside_calls_has_its_place(
    web: Web, world: World, tokens_per_event: int
) -> None:
    world.engine.tokens_per_event = tokens_per_event
    text = f"Here. {CALL} There. {CALL}\nThat is all that there is to say of the time."
    whole = await whole_of(web, text, tools=[TIME])
    kinds = [item.type for item in whole.output]
    assert kinds == ["message", "function_call", "message", "function_call", "message"]
    assert whole.output[3].arguments == '{"zone": "UTC"}'  # type: ignore[union-attr]
    events = await events_of(web, text, tools=[TIME])
    assert without_ids(events[-1].response) == without_ids(whole)


async def test_streams_add_up_to_whole_answers(web: Web) -> None:
    text = THOUGHT + "let me see\n" + CALL + "\n" + CALL
    whole = await whole_of(web, text, tools=[TIME])
    events = await events_of(web, text, tools=[TIME])
    final = events[-1].response
    assert without_ids(whole) == without_ids(final)
    assert [item.type for item in whole.output] == [
        "reasoning",
        "message",
        "function_call",
        "function_call",
    ]
    assert whole.output[2].arguments == '{"zone": "UTC"}'  # type: ignore[union-attr]
    assert whole.usage == final.usage and whole.usage is not None
    assert whole.usage.output_tokens_details.reasoning_tokens == len(ids(THOUGHT.strip()))
    for index, item in enumerate(final.output):
        own = [e for e in events if getattr(e, "output_index", None) == index]
        assert own[0].type == "response.output_item.added"
        assert own[-1].type == "response.output_item.done" and own[-1].item == item
        deltas = "".join(getattr(e, "delta", "") for e in own)
        shown = item.arguments if item.type == "function_call" else item.content[0].text
        assert deltas == shown


async def test_an_empty_answer_is_an_empty_message(web: Web) -> None:
    whole = await whole_of(web, "</s>", max_output_tokens=1)
    assert [item.type for item in whole.output] == ["message"] and whole.output_text == ""


async def test_conversations_as_items(web: Web, world: World) -> None:
    def text(kind: str, text: str) -> list[dict[str, Any]]:
        return [{"type": kind, "text": text}]

    items = [
        {"role": "user", "content": text("input_text", "hi")},
        {"type": "message", "role": "assistant", "content": text("output_text", "so")},
        {"role": "user", "content": "time?"},
        {"type": "reasoning", "id": "r", "summary": [], "content": text("reasoning_text", "m")},
        {"type": "function_call", "call_id": "1", "name": "time", "arguments": "{}"},
        {"type": "function_call", "call_id": "2", "name": "time", "arguments": '{"z": 1}'},
        {"type": "message", "role": "assistant", "content": text("output_text", "wait")},
        {"type": "function_call_output", "call_id": "1", "output": "noon"},
        {"type": "function_call_output", "call_id": "2", "output": text("input_text", "1 pm")},
    ]
    await whole_of(web, "x", input=items)
    assert prompt_of(world) == (
        "<s>user: hi<s>assistant: so<s>user: time?<s>assistant: <think>m</think>wait"
        '<tool_call>time{}</tool_call><tool_call>time{"z": 1}</tool_call>'
        "<s>tool: noon<s>tool: 1 pm<s>assistant:"
    )


async def test_forms_and_forced_calls(web: Web, world: World) -> None:
    form = {"type": "json_schema", "name": "x", "schema": {"type": "object"}, "strict": True}
    response = await whole_of(web, "x", text={"format": form})
    asked = world.engine.requests[-1].params.structured_outputs
    begin, end = ids("<think></think>")
    assert asked == StructuredOutputs(
        json='{"type": "object"}', begin_after_token=end, reasoning_token=begin
    )
    assert response.text is not None and response.text.format is not None
    assert response.text.format.model_dump(by_alias=True, exclude_none=True) == form
    choice = {"type": "function", "name": "time"}
    response = await whole_of(web, CALL, tools=[TIME], tool_choice=choice)
    asked = world.engine.requests[-1].params.structured_outputs
    assert asked is not None and "time" in (asked.structural_tag or "")
    assert response.tool_choice.model_dump() == choice  # type: ignore[union-attr]


async def test_going_on_from_a_stored_response(web: Web, world: World) -> None:
    rules = {"instructions": "be brief", "tools": [TIME]}
    first = await whole_of(web, THOUGHT + "so\n" + CALL, input="time?", **rules)
    assert first.store is True
    stored = await web.get(f"{PATH}/{first.id}")
    assert Response.model_validate(stored.json()) == first
    streamed = await web.get(f"{PATH}/{first.id}?stream=true")
    assert (streamed.status_code, streamed.json()["error"]["param"]) == (400, "stream")
    call_id = first.output[2].call_id  # type: ignore[union-attr]
    output = [{"type": "function_call_output", "call_id": call_id, "output": "noon"}]
    *_, last = await events_of(
        web, "noon it is", input=output, previous_response_id=first.id, instructions="shout"
    )
    told = (
        "<s>user: time?<s>assistant: <think>hm</think>so<tool_call>time"
        '{"zone": "UTC"}</tool_call><s>tool: noon'
    )
    assert prompt_of(world) == f"<s>system: shout{told}<s>assistant:"
    assert last.response.previous_response_id == first.id
    await whole_of(web, "x", input="and now?", previous_response_id=last.response.id)
    assert prompt_of(world) == f"{told}<s>assistant: noon it is<s>user: and now?<s>assistant:"
    cut = await whole_of(web, CALL, max_output_tokens=len(ids(CALL)) - 8, tools=[TIME])
    await whole_of(web, "x", previous_response_id=cut.id)
    assert "<tool_call>time{}</tool_call><s>user: hi" in prompt_of(world)
    gone = await web.http.delete(f"{PATH}/{first.id}")
    assert gone.json() == {"id": first.id, "object": "response", "deleted": True}
    own = await whole_of(web, "x", store=False)
    assert own.store is False
    for response_id in (first.id, own.id, "resp_1"):
        assert (await web.get(f"{PATH}/{response_id}")).status_code == 404
        body = {"model": "base", "input": "x", "previous_response_id": response_id}
        answer = await web.post(PATH, body)
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (404, "previous_response_id")


async def test_items_of_stored_responses_by_their_ids(web: Web, world: World) -> None:
    """Vercel's AI SDK sends earlier turns in this way."""
    user = {"role": "user", "content": "time?"}
    first = await whole_of(web, THOUGHT + "so\n" + CALL, input=[user], tools=[TIME])
    kinds = [item.type for item in first.output]
    assert kinds == ["reasoning", "message", "function_call"]
    references = [{"type": "item_reference", "id": item.id} for item in first.output]
    call_id = first.output[2].call_id  # type: ignore[union-attr]
    result = {"type": "function_call_output", "call_id": call_id, "output": "noon"}
    sent = [item.model_dump(mode="json") for item in first.output]
    prompts = []
    for items in (references, sent):
        await whole_of(web, "x", input=[user, *items, result])
        prompts.append(prompt_of(world))
    assert prompts[0] == prompts[1] and "<think>hm</think>so<tool_call>time" in prompts[0]
    own = await whole_of(web, "x", store=False)
    for gone in (own.output[0].id, first.id, "msg_1_0", ""):
        body = {"model": "base", "input": [user, {"type": "item_reference", "id": gone}]}
        answer = await web.post(PATH, body)
        assert answer.status_code == 404, answer.text
        assert answer.json()["error"]["param"] == "input[1].id"


async def test_a_server_that_stores_nothing(tmp_path: Path) -> None:
    web = Web(thinking_world(tmp_path, response_store_bytes=0))
    answer = await web.post(PATH, {"model": "base", "input": "x", "store": True})
    assert answer.json()["store"] is False
    assert (await web.get(f"{PATH}/{answer.json()['id']}")).status_code == 404


async def test_stored_responses_take_the_memory_that_is_counted(web: Web) -> None:
    """Though their conversations have thousands of messages of a few bytes."""
    items = [{"role": "user", "content": "x"}] * 500
    body = {"model": "base", "input": items, "truncation": "auto"}
    ids = [(await web.post(PATH, body)).json()["id"]]
    tracemalloc.start()
    try:
        ids += [(await web.post(PATH, body)).json()["id"] for _ in range(2)]
        gc.collect()
        assert tracemalloc.get_traced_memory()[0] < 300_000
    finally:
        tracemalloc.stop()
    for stored in ids:
        assert (await web.get(f"{PATH}/{stored}")).json()["id"] == stored


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 300), st.booleans())))
def test_stored_responses_are_bounded(puts: list[tuple[str, int, bool]]) -> None:
    """Whoever stores little keeps it, however much others store."""
    kept = StoredResponses(1000)
    sizes = {"a": 0, "b": 0, "c": 0}
    for number, (tenant, size, deletes) in enumerate(puts):
        shown = {"id": str(number), "text": "x" * size}
        stored = StoredResponse.of(shown, [Message(role="user", content="hi")])
        kept.put(tenant, str(number), stored)
        kept.check()
        sizes[tenant] += size + 100
        if sizes[tenant] < 1000 // 3:
            assert kept.get(tenant, str(number)) is stored
        for other in {*sizes} - {tenant}:
            with pytest.raises(ResponseNotFound):
                kept.get(other, str(number))
        if deletes and sizes[tenant] < 1000 // 3:
            kept.delete(tenant, str(number))
            kept.check()


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": []}, "input"),
        ({"input": 5}, "input"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"type": "computer_call"}]}, "input[0].type"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input[0].content[0].type",
        ),
        (
            {
                "input": [
                    {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{"},
                ]
            },
            "input[0].arguments",
        ),
        ({"input": [{"type": "reasoning", "summary": []}]}, "input"),
        ({"input": "x" * 100_000}, "input"),
        ({"background": True}, "background"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "some"}, "tool_choice"),
        ({"tool_choice": {"type": "function"}}, "tool_choice.name"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": 5000}, "max_output_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"truncation": "some"}, "truncation"),
        ({"reasoning": {"effort": "some"}}, "reasoning.effort"),
        (
            {"input": [{"type": "reasoning", "summary": [], "encrypted_content": "x"}]},
            "input[0].encrypted_content",
        ),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_bad_requests_name_the_field(
    shared: World, body: dict[str, Any], param: str, stream: bool
) -> None:
    web = Web(shared)
    answer = await web.post(PATH, {"model": "base", "input": "x", "stream": stream, **body})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param
    assert not shared.engine.requests


async def test_errors_of_the_engine(web: Web, world: World) -> None:
    body: dict[str, Any] = {"model": "base", "input": "x"}
    refused = InvalidRequest("structured_outputs: bad", "structured_outputs")
    world.engine.fail_after = (0, refused)
    for stream in (False, True):
        form = {"format": {"type": "json_object"}}
        answer = await web.post(PATH, {**body, "stream": stream, "text": form})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "text.format")
    world.engine.fail_after = (1, EngineDead("it died"))
    answer = await web.post(PATH, {**body, "stream": True})
    *events, last = answer.text.strip().split("\n\n")
    event = json.loads(last.removeprefix("event: error\ndata: "))
    assert event["error"]["code"] == "engine_dead"
    read = EVENT.validate_python(event)
    assert (read.type, read.code, read.message) == ("error", "engine_dead", "it died")
    assert read.sequence_number == len(events)
    world.engine.fail_after, world.engine.ending = None, "abort"  # as the server stops
    answer = await web.post(PATH, body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_dead")
    answer = await web.post(PATH, {**body, "stream": True})
    assert "event: error\n" in answer.text and "response.completed" not in answer.text


def test_the_openai_client(world: World) -> None:
    ask: dict[str, Any] = {"model": "base", "input": "hi", "tools": [TIME]}
    text = THOUGHT + CALL
    with served(world) as url, openai.OpenAI(base_url=f"{url}/v1", api_key="none") as client:
        world.engine.answers = [ids(text)] * 3
        whole = client.responses.create(**ask)
        *_, last = client.responses.create(**ask, stream=True)
        with client.responses.stream(**ask) as stream:
            final = stream.get_final_response()
        assert last.type == "response.completed"
        assert without_ids(whole) == without_ids(last.response)
        assert [i.type for i in final.output] == ["reasoning", "function_call"]
        again = [
            {"role": "user", "content": "hi"},
            *whole.output,
            {
                "type": "function_call_output",
                "call_id": whole.output[1].call_id,  # type: ignore[union-attr]
                "output": "noon",
            },
        ]
        world.engine.answers = [ids("noon it is")]
        answer = client.responses.create(model="base", input=again)  # type: ignore[arg-type]
        assert answer.output_text == "noon it is"
        assert prompt_of(world).endswith(
            '<think>hm</think><tool_call>time{"zone": "UTC"}</tool_call><s>tool: noon<s>assistant:'
        )
        world.engine.fail_after = (1, EngineDead("it died"))
        with pytest.raises(openai.APIError, match="it died"):
            list(client.responses.create(model="base", input="hi", stream=True))

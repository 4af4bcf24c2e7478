"""Bodies as clients of this field send them, and bodies that are made to hold up a server."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from http_api import CHAT, COMPLETE, HI, Web, World
from prometheus_client.parser import text_string_to_metric_families
from thinking_model import prompt_of, thinking_world
from toy_tokenizers import byte_level, thinking

from weft.api.reading import IGNORED, MAX_ARRAYS, MAX_MEMBERS, MAX_OBJECTS, MAX_STRINGS
from weft.core.sampling import StructuredOutputs

RESPONSES = "/v1/responses"
ROUTES = ((COMPLETE, {"prompt": "abc"}), (CHAT, {"messages": HI}), (RESPONSES, {"input": "hi"}))
MB = 1 << 20


@pytest.fixture(scope="module")
def counting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """For tests that look at their own answers alone, and at what counters have grown by."""
    made = thinking_world(tmp_path_factory.mktemp("world"))
    yield made
    made.check()


TURNS = [
    *HI,
    {
        "role": "assistant",
        "id": "msg_1",
        "content": "yes",
        "provider_specific_fields": {"refusal": None},
        "refusal": None,
        "audio": None,
        "function_call": None,
    },
    {"role": "user", "id": None, "content": "and?"},
]
PART = {"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}
CALLS = [
    *HI,
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {
                "id": "1",
                "type": "function",
                "index": 0,
                "provider_specific_fields": {"signature": "x"},
                "function": {"name": "f", "arguments": "{}", "provider_specific_fields": None},
            }
        ],
    },
    {"role": "tool", "tool_call_id": "1", "content": "2", "cache_control": None},
]
TOOL = {"type": "function", "function": {"name": "f"}, "cache_control": {"type": "ephemeral"}}
NULLS = {
    "tools": [TOOL | {"custom": None, "function": {"name": "f", "examples": None}}],
    "response_format": {"type": "text", "schema": None},
    "tool_choice": None,
}
ITEMS = [
    {"type": "message", "role": "user", "id": "m", "content": "hi", "cache_control": None},
    {
        "type": "reasoning",
        "id": "r",
        "summary": [],
        "encrypted_content": None,
        "content": [{"type": "reasoning_text", "text": "hm", "format": "x"}],
    },
    {
        "role": "assistant",
        "provider_data": {"model": "x"},
        "content": [{"type": "output_text", "text": "yes", "annotations": [], "citations": None}],
    },
]

# The route, fields as the client sends them, and what the answer says that it ignored.
ROWS: list[tuple[str, str, dict[str, Any], str]] = [
    ("litellm", CHAT, {"messages": TURNS}, ""),
    ("litellm calls", CHAT, {"messages": CALLS, "tools": [TOOL]}, ""),
    ("nulls within", CHAT, NULLS, ""),
    ("anthropic parts", CHAT, {"messages": [{"role": "user", "content": [PART]}]}, ""),
    ("sglang bench", COMPLETE, {"best_of": 1, "ignore_eos": False, "lora_path": None}, ""),
    ("ai sdk", CHAT, {"reasoning_effort": "high"}, ""),
    ("ai sdk responses", RESPONSES, {"reasoning": {"effort": "low", "summary": "auto"}}, ""),
    ("codex nulls", RESPONSES, {"reasoning": {"effort": None, "summary": None}}, ""),
    ("agents chat", CHAT, {"verbosity": "medium", "prediction": {"type": "content"}}, "verbosity"),
    ("agents verbosity", RESPONSES, {"text": {"verbosity": "high"}}, "text.verbosity"),
    ("agents top verbosity", RESPONSES, {"verbosity": "low"}, "verbosity"),
    ("agents include", RESPONSES, {"include": ["reasoning.encrypted_content"]}, ""),
    ("agents calls", RESPONSES, {"max_tool_calls": 3, "truncation": "auto"}, ""),
    ("agents items", RESPONSES, {"input": ITEMS}, ""),
    ("vllm nulls", COMPLETE, {"kv_transfer_params": None, "mm_processor_kwargs": None}, ""),
    ("vllm bools", CHAT, {"ignore_eos": None, "skip_special_tokens": None, "new": None}, ""),
    ("vllm priority", COMPLETE, {"priority": 3, "vllm_xargs": {"a": 1}}, "priority,vllm_xargs"),
    ("vllm thinking", CHAT, {"enable_thinking": True, "mm_processor_kwargs": {}}, ""),
    ("completion effort", COMPLETE, {"reasoning_effort": "low"}, "reasoning_effort"),
    ("unknown", COMPLETE, {"zeta": 1, "a,b\r\nc": 2}, "zeta,a_b__c"),
    ("unknown option", CHAT, {"stream_options": {"x": 1}, "stream": True}, "stream_options.x"),
    ("unsafe id", CHAT, {"request_id": "a\nb", "rid": ["a"]}, "request_id,rid"),
    ("bounded", RESPONSES, {f"f{i:02}": 1 for i in range(99)}, ""),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "fields", "ignored"), [r[1:] for r in ROWS], ids=[r[0] for r in ROWS]
)
async def test_bodies_of_clients(
    counting: World, path: str, fields: dict[str, Any], ignored: str, stream: bool
) -> None:
    async def count(web: Web) -> float:
        text = (await web.get("/metrics")).text
        counted = {f.name: f.samples for f in text_string_to_metric_families(text)}
        samples = counted["weft:ignoring_requests"]
        return sum(
            s.value for s in samples if s.name.endswith("_total") and s.labels["route"] == path
        )

    web = Web(counting)
    least, before = dict(ROUTES)[path], await count(web)
    answer = await web.post(path, {"model": "base", **least, "stream": stream, **fields})
    assert answer.status_code == 200, answer.text
    told = answer.headers.get(IGNORED, "")
    assert told == ignored or ("f15,..." in told and len(told) < 100)
    assert await count(web) - before == bool(told)


async def test_strict_fields(tmp_path: Path) -> None:
    world = thinking_world(tmp_path, strict_fields=True)
    web = Web(world)
    for path, least in ROUTES:
        for fields, param in (
            ({"tempreture": 1}, "tempreture"),
            ({"stream_options": {"x": 1}, "stream": True}, "stream_options.x"),
        ):
            if path == RESPONSES and "stream_options" in fields:
                continue
            answer = await web.post(path, {"model": "base", **least, **fields})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
        answer = await web.post(path, {"model": "base", **least, "priority": 1, "user": "x"})
        assert answer.headers[IGNORED] == "priority"
    world.check()


@pytest.mark.parametrize("path", [COMPLETE, CHAT, RESPONSES])
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("kv_transfer_params", {"do_remote_prefill": True}),
        ("stop_regex", "a+"),
        ("web_search_options", {}),
        ("chat_template", "{{ messages }}"),
        ("conversation", "c"),
    ],
)
async def test_what_would_change_the_answer_is_refused(
    shared: World, path: str, field: str, value: Any
) -> None:
    responses_only = field == "conversation"
    if responses_only != (path == RESPONSES):
        pytest.skip("another route's")
    web = Web(shared)
    answer = await web.post(path, {"model": "base", **dict(ROUTES)[path], field: value})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)


async def test_fields_of_chats_are_not_ignored_where_they_are_missing(counting: World) -> None:
    """The answer would be another than the client asked for."""
    asked: tuple[tuple[str, Any, Any], ...] = (
        ("stop", ["a"], []),
        ("seed", 5, None),
        ("n", 2, 1),
        ("min_p", 0.5, 0),
        ("structured_outputs", {"choice": ["a"]}, None),
        ("guided_json", {"type": "object"}, None),
        ("chat_template_kwargs", {"enable_thinking": False}, {}),
        ("max_completion_tokens", 5, None),
    )
    short = {"messages": HI, "max_tokens": 5}
    bodies = {RESPONSES: {"input": "hi"}, "/v1/messages": short, COMPLETE: {"prompt": "a"}}
    web = Web(counting)
    for path, least in bodies.items():
        for field, value, harmless in asked[-1:] if path == COMPLETE else asked:
            for given, status in ((value, 400), (harmless, 200)):
                answer = await web.post(path, {"model": "base", **least, field: given})
                assert answer.status_code == status, (path, field, answer.text)
                assert status == 200 or answer.json()["error"]["param"] == field
    counted = {"model": "base", **short, "seed": 5}
    assert (await web.post("/v1/messages/count_tokens", counted)).status_code == 200


@pytest.mark.parametrize("path", [COMPLETE, CHAT])
async def test_usage_in_every_event(web: Web, world: World, path: str) -> None:
    for include in (True, False):
        options = {"include_usage": include, "continuous_usage_stats": True}
        body = {**dict(ROUTES)[path], "stream_options": options}
        *chunks, _ = await web.chunks(path, body)
        counts = [c["usage"]["completion_tokens"] for c in chunks]
        assert counts == sorted(counts) and counts[-1] > 2
        assert {c["usage"]["prompt_tokens"] for c in chunks} == {
            len(world.engine.requests[-1].prompt_ids)
        }
        assert bool(chunks[-1]["choices"]) != include


async def test_lora_path_beside_the_model(web: Web, world: World) -> None:
    for name in ("a", "b"):
        await web.load(name, world.adapter(name, name))
    for path, least in ROUTES:
        for model in ("base", "a", "base:a"):
            answer = await web.post(path, {"model": model, **least, "lora_path": "a"})
            assert answer.status_code == 200, answer.text
            adapter = world.engine.requests[-1].adapter
            assert adapter is not None and adapter.name == "a"
        for fields, status in (
            ({"model": "b", "lora_path": "a"}, 400),
            ({"model": "base", "lora_path": "a", "adapters": [{"name": "b"}]}, 400),
            ({"model": "base", "lora_path": "c"}, 404),
        ):
            answer = await web.post(path, {**least, **fields})
            error = answer.json()["error"]
            assert (answer.status_code, error["param"]) == (status, "lora_path")


async def test_an_adapter_named_as_elsewhere_is_never_ignored(web: Web, world: World) -> None:
    """The base would answer, and the client would take its answer for the adapter's."""
    await web.load("a", world.adapter("a", "a"))
    for path, least in (*ROUTES, ("/v1/embeddings", {"input": "x"})):
        for field, value in (
            ("adapter", "a"),
            ("adapter_id", "a"),
            ("adapter_name", "a"),
            ("lora", [{"id": 0, "scale": 0.5}]),
            ("lora_name", "a"),
            ("lora_request", {"lora_name": "a"}),
            ("merged_adapters", {"ids": ["a"], "weights": [1]}),
        ):
            answer = await web.post(path, {"model": "base", **least, field: value})
            error = answer.json()["error"]
            assert answer.status_code == 400 and field in error["message"], answer.text
            assert "the adapter's name as model" in error["message"]
            answer = await web.post(path, {"model": "a", **least, field: None})
            assert answer.status_code == 200, answer.text


async def test_an_unknown_model_is_answered_with_one_like_it(web: Web, world: World) -> None:
    await web.load("reverse", world.adapter("reverse", "r"))
    for asked, meant in (("revrese", "reverse"), ("bsae", "base"), ("x" * 70, ""), ("q", "")):
        error = (await web.post(COMPLETE, {"model": asked, "prompt": "x"})).json()["error"]
        hint = f"did you mean '{meant}'?" if meant else "models that do: 'base', 'alias', 'reverse'"
        assert error["message"] == f"The model '{asked}' does not exist; {hint}"
        assert (await web.get(f"/v1/models/{asked}")).json()["error"] == error


async def test_templates_of_requests(tmp_path: Path) -> None:
    world = thinking_world(tmp_path, allow_request_templates=True)
    web = Web(world)
    await web.chat(chat_template="{{ messages[0].content }}{{ mood }}!")
    assert prompt_of(world) == "hi!"
    documents = [{"text": "A"}, {"text": "B"}]
    shows = "{{ documents | map(attribute='text') | join }}{{ messages[0].content }}"
    await web.chat(chat_template=shows, documents=documents)
    assert prompt_of(world) == "ABhi"
    for template, at_fault in (
        ("{{ messages[0].content.x.y }}", "messages"),
        ("{% if %}", "chat_template"),
        ("{{ 'a' | no_filter }}", "chat_template"),
    ):
        body = {"model": "base", "messages": HI, "chat_template": template}
        answer = await web.post(CHAT, body)
        assert answer.status_code == 400 and answer.json()["error"]["param"] == at_fault
    world.check()


async def test_ids_of_clients(web: Web, world: World) -> None:
    for field in ("request_id", "rid"):
        assert (await web.complete(**{field: "mine"}))["id"] == "mine"
        chunks = await web.chunks(CHAT, {"messages": HI, field: "mine"})
        assert {c["id"] for c in chunks[:-1]} == {"mine"}
        assert (await web.chat(**{field: "x" * 129}))["id"].startswith("chatcmpl-")
    ids = [request.request_id for request in world.engine.requests]
    assert len(set(ids)) == len(ids) and "mine" not in "".join(ids)


@pytest.mark.parametrize(
    ("fields", "off"),
    [
        ({"reasoning_effort": "none"}, True),
        ({"reasoning_effort": "low"}, False),
        ({"reasoning_effort": None}, False),
        ({"enable_thinking": False}, True),
        ({"enable_thinking": True, "reasoning_effort": "none"}, False),
        ({"reasoning_effort": "low", "chat_template_kwargs": {"enable_thinking": False}}, True),
    ],
)
async def test_thinking_is_turned_off(
    web: Web, world: World, fields: dict[str, Any], off: bool
) -> None:
    await web.chat(**fields)
    assert prompt_of(world).endswith("</think>\n\n") == off


async def test_effort_reaches_a_template_that_takes_it(tmp_path: Path) -> None:
    template = "{{ messages[0].content }} {{ reasoning_effort }} {{ messages[0].thinking }}"
    world = World(tmp_path, byte_level().with_template(template))
    web = Web(world)
    await web.chat(reasoning_effort="high")
    answer = await web.post(
        RESPONSES, {"model": "base", "input": "x", "reasoning": {"effort": "minimal"}}
    )
    assert answer.json()["reasoning"] == {"effort": "minimal", "summary": None}
    prompts = [byte_level().decode(r.prompt_ids) for r in world.engine.requests]
    assert prompts == ["hi high ", "x minimal "]
    world.check()


@pytest.mark.parametrize(("field", "kind"), [("regex", "regex"), ("ebnf", "grammar")])
async def test_forms_of_sglang(web: Web, world: World, field: str, kind: str) -> None:
    for path, least in ROUTES[:2]:
        body = {"model": "base", **least, field: "x", "reasoning_effort": "none"}
        assert (await web.post(path, body)).status_code == 200
        form = world.engine.requests[-1].params.structured_outputs
        assert form == StructuredOutputs(**{kind: "x"})
        body["guided_choice"] = ["a"]
        error = (await web.post(path, body)).json()["error"]
        assert error["param"] == field


@pytest.mark.parametrize(
    "asked", [{"top_logprobs": 2}, {"include": ["message.output_text.logprobs"]}]
)
async def test_logprobs_of_responses(web: Web, world: World, asked: dict[str, Any]) -> None:
    said = thinking().encode("<think>\nhm\n</think>\n\nyes", add_special_tokens=False)
    num_top = asked.get("top_logprobs", 0)
    world.engine.answers = [said, said]
    body = {"model": "base", "input": "hi", **asked}
    whole = (await web.post(RESPONSES, body)).json()["output"][-1]["content"][0]["logprobs"]
    assert "".join(e["token"] for e in whole) == "\n\nyes</s>"
    assert all(e["logprob"] == -0.25 and len(e["top_logprobs"]) == num_top for e in whole)
    text = (await web.post(RESPONSES, {**body, "stream": True})).text
    events = [json.loads(e.partition("data: ")[2]) for e in text.split("\n\n")[:-1]]
    deltas = [e["logprobs"] for e in events if e["type"] == "response.output_text.delta"]
    (done,) = [e["logprobs"] for e in events if e["type"] == "response.output_text.done"]
    assert [e for d in deltas for e in d] == whole[: sum(map(len, deltas))]
    assert len(deltas) > 1 and done == whole
    assert events[-1]["response"]["output"][-1]["content"][0]["logprobs"] == whole


async def test_the_oldest_turns_are_left_out(web: Web, world: World) -> None:
    turns: list[dict[str, Any]] = [{"role": "system", "content": "rule"}]
    for n in range(40):
        turns += [
            {"role": "user", "content": f"{n:02}" * 50},
            {"role": "assistant", "content": "y"},
        ]
    turns.append({"role": "user", "content": "last"})
    body = {"model": "base", "input": turns, "max_output_tokens": 100}
    answer = await web.post(RESPONSES, body)
    assert answer.status_code == 400, "they are too long"
    answer = await web.post(RESPONSES, {**body, "truncation": "auto"})
    assert answer.json()["truncation"] == "auto"
    prompt = prompt_of(world)
    num_tokens = len(world.engine.requests[-1].prompt_ids)
    assert 4096 - 100 - 120 < num_tokens <= 4096 - 100, "no more than it takes"
    assert prompt.startswith("<s>system: rule<s>user: ") and "<s>user: last" in prompt
    await web.post(RESPONSES, {**body, "input": turns[-3:], "truncation": "auto"})
    assert "39" in prompt_of(world), "nothing need be left out"
    turns[-1]["content"] = "x" * 5000
    answer = await web.post(RESPONSES, {**body, "truncation": "auto"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "input")


# What must not hold up a server.


Body = Callable[[], bytes]


def filled(head: str, item: str, tail: str) -> Body:
    """A body of 1 MB, most of it `item`s."""
    count = (MB - len(head) - len(tail)) // (len(item) + 1)
    return lambda: (head + ",".join([item] * count) + tail).encode()


def members(head: str, tail: str, value: str = "1") -> Body:
    count = (MB - 200) // (len(value) + 10)
    return lambda: (head + ",".join(f'"{i:06}":{value}' for i in range(count)) + tail).encode()


OPEN_CHAT = '{"model":"base","messages":['
TEXT = '{"model":"base","prompt":"a",'
HOSTILE: list[tuple[str, Body, str | None]] = [
    (CHAT, filled(OPEN_CHAT, '{"role":"user","content":""}', "]}"), None),
    (CHAT, filled(OPEN_CHAT, "{}", "]}"), None),
    (CHAT, filled(OPEN_CHAT, "0", "]}"), "messages[0]"),
    (CHAT, filled(OPEN_CHAT + '{"role":"user","content":[', "0", "]}]}"), "messages[0].content[0]"),
    (
        CHAT,
        filled(OPEN_CHAT + '{"role":"user","content":[', '""', "]}]}"),
        "messages[0].content[0]",
    ),
    (CHAT, filled(OPEN_CHAT + '{"role":"user"}],"tools":[', "0", "]}"), "tools[0]"),
    (CHAT, filled(OPEN_CHAT + '{"role":"user"}],"guided_json":{"a":[', "[]", "]}}"), None),
    (COMPLETE, filled('{"model":"base","prompt":[', "[5]", "]}"), None),
    (COMPLETE, filled('{"model":"base","prompt":[[5],', "5", "]}"), "prompt[1]"),
    (COMPLETE, filled('{"model":"base","prompt":[', '""', "]}"), "prompt"),
    (COMPLETE, filled('{"model":"base","prompt":[1,', '"a"', "]}"), "prompt[1]"),
    (COMPLETE, filled('{"model":"base","prompt":[', "5", "]}"), "prompt"),
    (COMPLETE, filled(TEXT + '"stop":[', '"a"', "]}"), "stop"),
    (COMPLETE, filled(TEXT + '"bad_words":[', '"a"', "]}"), "bad_words"),
    (COMPLETE, filled(TEXT + '"stop_token_ids":[', "1", "]}"), "stop_token_ids"),
    (COMPLETE, filled(TEXT + '"allowed_token_ids":[', "1", "]}"), "allowed_token_ids"),
    (COMPLETE, members(TEXT + '"logit_bias":{', "}}"), None),
    (COMPLETE, members(TEXT + '"logit_bias":{', "}}", '"x"'), None),
    (COMPLETE, members(TEXT, "}"), None),
    (COMPLETE, members(TEXT + '"structured_outputs":{', "}}"), None),
    (RESPONSES, filled('{"model":"base","input":[', '{"role":"user","content":""}', "]}"), None),
    (RESPONSES, filled('{"model":"base","input":[', "0", "]}"), "input[0]"),
]


@pytest.mark.parametrize(("path", "body", "param"), HOSTILE)
async def test_large_bodies_are_refused_at_once(
    shared: World, path: str, body: Body, param: str | None
) -> None:
    web = Web(shared)
    content = body()
    start_s = time.process_time()
    answer = await web.http.post(path, content=content)
    took_s = time.process_time() - start_s
    assert answer.status_code == 400 and len(answer.content) < 500
    error = answer.json()["error"]
    assert error["param"] == param or (param is None and "the body has " in error["message"])
    assert took_s < 0.4, "it took seconds to describe all faults"


async def test_counts_are_of_json_and_not_of_texts(web: Web) -> None:
    text = '{[":,\\\\"' * 60_000
    body = {"model": "base", "prompt": text, "truncate_prompt_tokens": 3}
    assert len(json.dumps(body)) < MB
    assert (await web.post(COMPLETE, body)).status_code == 200
    for part, most, what in (
        ([{}], MAX_OBJECTS, "objects"),
        ([[]], MAX_ARRAYS, "lists"),
        ([""], MAX_STRINGS, "strings"),
    ):
        content = {
            "model": "base",
            "prompt": "x",
            "zeta": part * most,
            "eta": [[]] * MAX_ARRAYS,
        }
        answer = await web.post(COMPLETE, content)
        assert answer.status_code == 400
        assert f" {what}, and may have {most}" in answer.text
    fields = {"zeta": {f"{i}": 1 for i in range(MAX_MEMBERS - 3)}}
    answer = await web.post(COMPLETE, {"model": "base", "prompt": "x", **fields})
    assert answer.status_code == 200
    answer = await web.post(COMPLETE, {"model": "base", "prompt": "x", "u": 1, **fields})
    assert "fields, and may have" in answer.text


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": [[1] * 2000] * 40, "prompt_logprobs": 4, "max_tokens": 1}, "prompt_logprobs"),
        ({"prompt": [[1]] * 100, "n": 8, "logprobs": 5}, "logprobs"),
        ({"prompt": [[1] * 2000] * 100, "echo": True, "logprobs": 1}, "logprobs"),
        ({"prompt": [[1]] * 1025}, "prompt"),
        ({"prompt": "x", "logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias"),
    ],
)
async def test_bounds_of_what_is_asked_for(
    shared: World, fields: dict[str, Any], param: str
) -> None:
    web = Web(shared)
    answer = await web.post(COMPLETE, {"model": "base", **fields})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert not shared.engine.requests

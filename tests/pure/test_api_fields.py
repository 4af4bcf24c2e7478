"""Fields of requests for an answer: what reaches the engine, and what they make of its output."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from http_api import CHAT, COMPLETE, EOS, HI, INFO, Web, World
from toy_tokenizers import byte_level, sentencepiece

from weft.core.errors import InvalidRequest
from weft.core.sampling import StructuredOutputs
from weft.text import Tokenizer


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path, byte_level())
    yield made
    made.check()


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """For tests that look only at their own last requests."""
    made = World(tmp_path_factory.mktemp("world"), byte_level())
    yield made
    made.check()


def ids(text: str) -> list[int]:
    return byte_level().encode(text, add_special_tokens=False)


async def test_the_models_own_way_to_sample_is_the_default(tmp_path: Path) -> None:
    world = World(tmp_path, byte_level(), sampling_defaults={"temperature": 0.6, "top_k": 20})
    web = Web(world)
    await web.complete()
    await web.chat(temperature=0, top_k=None)
    await web.post("/v1/messages", {"model": "base", "max_tokens": 5, "messages": HI, "top_k": 3})
    shown = (await web.post("/v1/responses", {"model": "base", "input": HI, "top_p": 0.9})).json()
    asked = [(r.params.temperature, r.params.top_k, r.params.top_p) for r in world.engine.requests]
    assert asked == [(0.6, 20, 1.0), (0, 20, 1.0), (0.6, 3, 1.0), (0.6, 20, 0.9)]
    assert (shown["temperature"], shown["top_p"]) == (0.6, 0.9)


async def test_sampling_fields_reach_the_engine(web: Web, world: World) -> None:
    fields: dict[str, Any] = {
        "min_p": 0.25,
        "repetition_penalty": 1.5,
        "presence_penalty": -2,
        "frequency_penalty": 0.5,
        "min_tokens": 3,
        "bad_words": ["bad", "worse"],
        "allowed_token_ids": [1, 5],
        "prompt_logprobs": 2,
    }
    await web.complete(**fields, logit_bias={"5": -100, "6": 1.5})
    await web.chat(**fields, logit_bias={"5": -100, "6": 1.5})
    await web.complete(**dict.fromkeys(fields), logit_bias=None)
    for request in world.engine.requests[:2]:
        for name, value in fields.items():
            whole = tuple(value) if isinstance(value, list) else value
            assert getattr(request.params, name) == whole
        assert request.params.logit_bias == {5: -100, 6: 1.5}
        assert tuple(ids("bad")) in request.bad_token_ids
    last = world.engine.requests[2]
    assert (last.params.min_p, last.params.repetition_penalty) == (0, 1)
    assert last.params.logit_bias == {} and last.bad_token_ids == ()


# Several choices.


async def test_choices_share_a_prompt_and_have_seeds_of_their_own(web: Web, world: World) -> None:
    world.engine.answers = [ids(text) for text in ("one", "two", "three", "four")]
    answer = await web.complete(prompt=["ab", "xyz"], n=2, seed=2**63 - 1)
    texts = [(c["index"], c["text"]) for c in answer["choices"]]
    requests = {r.request_id: r for r in world.engine.requests}
    assert sorted(texts) == texts and [i for i, _ in texts] == [0, 1, 2, 3]
    assert {t for _, t in texts} == {"one", "two", "three", "four"}
    assert len(requests) == 4
    assert [r.seed for r in requests.values()] == [2**63 - 1, -(2**63)] * 2
    assert [r.prompt_ids for r in requests.values()] == [ids("ab")] * 2 + [ids("xyz")] * 2
    tokens = sum(len(ids(t)) + 1 for _, t in texts)
    assert answer["usage"]["prompt_tokens"] == 5
    assert answer["usage"]["completion_tokens"] == tokens
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 2


async def test_choices_of_a_chat_and_their_stream(web: Web, world: World) -> None:
    world.engine.answers = [ids("one"), ids("two")]
    answer = await web.chat(n=2)
    contents = {c["index"]: c["message"]["content"] for c in answer["choices"]}
    assert contents == {0: "one", 1: "two"}
    world.engine.answers = [ids("one"), ids("two")]
    body = {"messages": HI, "n": 2, "stream_options": {"include_usage": True}}
    *chunks, last, _ = await web.chunks(CHAT, body)
    choices = [c["choices"][0] for c in chunks]
    for index, text in ((0, "one"), (1, "two")):
        own = [c for c in choices if c["index"] == index]
        assert own[0]["delta"] == {"role": "assistant", "content": ""}
        assert "".join(c["delta"].get("content", "") for c in own) == text
        assert [c["finish_reason"] for c in own][-1] == "stop"
    assert [c["index"] for c in choices[:4]] != [0] * 4, "one choice after the other"
    assert last["usage"] == answer["usage"]


# The prompt in the answer.


@pytest.mark.parametrize("prompt", ["abc", ids("abc")])
async def test_echo(web: Web, world: World, prompt: Any) -> None:
    body = {"prompt": prompt, "echo": True, "logprobs": 1}
    (choice,) = (await web.complete(**body))["choices"]
    assert choice["text"] == "abccba"
    assert choice["logprobs"] == {
        "tokens": ["a", "b", "c", "c", "b", "a", "</s>"],
        "token_logprobs": [None, -3, -3, -0.25, -0.25, -0.25, -0.25],
        "top_logprobs": [
            None,
            {"!": -0.5, "b": -3},
            {"!": -0.5, "c": -3},
            {"c": -0.25},
            {"b": -0.25},
            {"a": -0.25},
            {"</s>": -0.25},
        ],
        "text_offset": [0, 1, 2, 3, 4, 5, 6],
    }
    chunks = (await web.chunks(COMPLETE, body))[:-1]
    assert "".join(c["choices"][0]["text"] for c in chunks) == "abccba"
    pieces = [c["choices"][0]["logprobs"] for c in chunks]
    for key, whole in choice["logprobs"].items():
        assert [x for p in pieces for x in p[key]] == whole
    plain = await web.complete(prompt=prompt, echo=True)
    assert plain["choices"][0]["text"] == "abccba"
    assert world.engine.requests[-1].params.prompt_logprobs is None


async def test_the_prompt_alone(web: Web) -> None:
    """As harnesses ask for the log-probabilities of a text."""
    body = {"prompt": ["abc", "xy"], "echo": True, "max_tokens": 0, "logprobs": 1}
    answer = await web.complete(**body)
    assert [choice["text"] for choice in answer["choices"]] == ["abc", "xy"]
    for choice, length in zip(answer["choices"], (3, 2), strict=True):
        assert choice["finish_reason"] == "length"
        assert choice["logprobs"]["token_logprobs"] == [None, *[-3.0] * (length - 1)]
    assert answer["usage"]["completion_tokens"] == 0
    *chunks, _ = await web.chunks(COMPLETE, body)
    assert "".join(c["choices"][0]["text"] for c in chunks) in ("abcxy", "xyabc")
    for refused in ({"echo": False}, {"max_tokens": -1}):
        answer = await web.post(COMPLETE, {"model": "base", **body, **refused})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "max_tokens")


async def test_echo_of_several_prompts_and_choices(web: Web) -> None:
    answer = await web.complete(prompt=["ab", "xy"], echo=True, n=2)
    assert [c["text"] for c in answer["choices"]] == ["abba", "abba", "xyyx", "xyyx"]


async def test_prompt_logprobs(web: Web) -> None:
    a, b = ids("ab")
    position = {
        str(b): {"logprob": -3, "rank": 7, "decoded_token": "b"},
        "0": {"logprob": -0.5, "rank": 1, "decoded_token": "!"},
    }
    answer = await web.complete(prompt=[a, b], prompt_logprobs=1)
    assert answer["choices"][0]["prompt_logprobs"] == [None, position]
    answer = await web.complete(
        prompt=[a, b], prompt_logprobs=0, return_tokens_as_token_ids=True, logprobs=0
    )
    choice = answer["choices"][0]
    shown = {"logprob": -3, "rank": 7, "decoded_token": f"token_id:{b}"}
    assert choice["prompt_logprobs"] == [None, {str(b): shown}]
    assert choice["logprobs"]["tokens"] == [f"token_id:{t}" for t in (b, a, EOS)]
    assert choice["logprobs"]["text_offset"] == [0, 1, 2]
    answer = await web.chat(prompt_logprobs=1)
    assert len(answer["prompt_logprobs"]) == answer["usage"]["prompt_tokens"]
    body = {"model": "base", "prompt": "x", "prompt_logprobs": 1, "stream": True}
    error = (await web.post(COMPLETE, body)).json()["error"]
    assert error["param"] == "prompt_logprobs"


async def test_truncated_prompts(web: Web, world: World) -> None:
    for body, kept in (
        ({"prompt": "abcdef", "truncate_prompt_tokens": 2}, "ef"),
        ({"prompt": "ab", "truncate_prompt_tokens": 5}, "ab"),
        ({"prompt": "a" * 500 + "b", "truncate_prompt_tokens": -1}, "a" * 62 + "b"),
        (
            {"prompt": "a" * 500 + "b", "truncate_prompt_tokens": -1, "max_tokens": 10},
            "a" * 53 + "b",
        ),
    ):
        answer = await web.complete(**body, echo=True)
        assert answer["choices"][0]["text"].startswith(kept)
        assert byte_level().decode(world.engine.requests[-1].prompt_ids) == kept
    long = [{"role": "user", "content": "x" * 500}]
    await web.chat(messages=long, truncate_prompt_tokens=10)
    assert len(world.engine.requests[-1].prompt_ids) == 10


async def test_an_answer_that_was_begun_is_continued(web: Web, world: World) -> None:
    begun = [*HI, {"role": "assistant", "content": "well"}]
    await web.chat(messages=begun, continue_final_message=True)
    await web.chat(messages=begun, continue_final_message=True, add_generation_prompt=False)
    for request in world.engine.requests:
        assert byte_level().decode(request.prompt_ids).endswith("<s>assistant: well")
    body = {"model": "base", "messages": begun, "continue_final_message": True}
    error = (await web.post(CHAT, {**body, "add_generation_prompt": True})).json()["error"]
    assert error["param"] == "continue_final_message"


async def test_developers_are_the_system_to_a_template_without_them(web: Web, world: World) -> None:
    await web.chat(messages=[{"role": "developer", "content": "rule"}, *HI])
    prompt = byte_level().decode(world.engine.requests[0].prompt_ids)
    assert prompt.startswith("<s>system: rule")


# The form of the answer.

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
SCHEMA_TEXT = '{"type": "object", "properties": {"a": {"type": "integer"}}}'
FORMS = [
    ("response_format", {"type": "text"}, None),
    ("response_format", {"type": "json_object"}, StructuredOutputs(json_object=True)),
    (
        "response_format",
        {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": SCHEMA}},
        StructuredOutputs(json=SCHEMA_TEXT),
    ),
    ("structured_outputs", {"json": SCHEMA}, StructuredOutputs(json=SCHEMA_TEXT)),
    ("structured_outputs", {"json": SCHEMA_TEXT}, StructuredOutputs(json=SCHEMA_TEXT)),
    ("structured_outputs", {"json_object": True}, StructuredOutputs(json_object=True)),
    ("structured_outputs", {"regex": "a+"}, StructuredOutputs(regex="a+")),
    ("structured_outputs", {"choice": ["a", "b"]}, StructuredOutputs(choice=("a", "b"))),
    ("structured_outputs", {"grammar": "root ::= x"}, StructuredOutputs(grammar="root ::= x")),
    ("structured_outputs", {"structural_tag": {}}, StructuredOutputs(structural_tag="{}")),
    ("guided_json", SCHEMA, StructuredOutputs(json=SCHEMA_TEXT)),
    ("json_schema", SCHEMA_TEXT, StructuredOutputs(json=SCHEMA_TEXT)),
    (
        "response_format",
        {"type": "json_object", "schema": SCHEMA},
        StructuredOutputs(json=SCHEMA_TEXT),
    ),
    (
        "response_format",
        {"type": "structural_tag", "format": {"type": "any_text"}},
        StructuredOutputs(
            structural_tag='{"type": "structural_tag", "format": {"type": "any_text"}}'
        ),
    ),
    (
        "structured_outputs",
        {
            "regex": "a+",
            "disable_fallback": False,
            "disable_any_whitespace": True,
            "disable_additional_properties": False,
        },
        StructuredOutputs(regex="a+"),
    ),
    ("guided_regex", "a+", StructuredOutputs(regex="a+")),
    ("guided_choice", ["a", "b"], StructuredOutputs(choice=("a", "b"))),
    ("guided_grammar", "root ::= x", StructuredOutputs(grammar="root ::= x")),
]


@pytest.mark.parametrize(("field", "value", "form"), FORMS)
async def test_forms_reach_the_engine(
    shared: World, field: str, value: Any, form: StructuredOutputs | None
) -> None:
    web = Web(shared)
    await web.complete(**{field: value})
    await web.chat(**{field: value})
    assert [r.params.structured_outputs for r in shared.engine.requests[-2:]] == [form, form]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("field", "value"), [form[:2] for form in FORMS[1:]])
async def test_a_form_that_the_engine_refuses_is_named_as_the_client_did(
    shared: World, field: str, value: Any, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = InvalidRequest("structured_outputs: no such grammar", "structured_outputs")
    monkeypatch.setattr(shared.engine, "fail_after", (0, refused))
    web = Web(shared)
    for path, what in ((COMPLETE, {"prompt": "x"}), (CHAT, {"messages": HI})):
        body = {"model": "base", "stream": stream, field: value, **what}
        answer = await web.post(path, body)
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, field)
        assert error["message"] == f"{field}: no such grammar"


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"messages": []}, "messages must not be empty"),
        ({"max_tokens": "x"}, "max_tokens must be an integer"),
        ({"stop": 5}, "stop must be a string or a list"),
        ({"logit_bias": 3}, "logit_bias must be an object"),
        ({"response_format": {"type": "json"}}, "response_format.type must be 'text'"),
        (
            {"response_format": {"type": "text", "schema": {}}},
            "response_format.schema is only allowed with type 'json_object'",
        ),
        ({"documents": ["x"]}, "documents[0] must be an object"),
        ({"documents": [{"text": "x"}]}, "this model's chat template takes no documents"),
        ({"no_stop_trim": True}, "no_stop_trim is not supported by this version; use include_"),
        ({"thinking_token_budget": 5}, "thinking_token_budget is not supported by this version"),
    ],
)
async def test_a_field_of_the_wrong_kind_is_told_what_it_must_be(
    shared: World, fields: dict[str, Any], told: str
) -> None:
    web = Web(shared)
    answer = await web.post(CHAT, {"model": "base", "messages": HI, **fields})
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith(told)


async def test_offsets_count_what_is_shown_for_bytes_that_are_no_text(
    web: Web, world: World
) -> None:
    part, a = ids("日")[0], ids("a")[0]
    world.engine.answers = [[part, a, a]]
    answer = await web.complete(prompt=[part, a, part], echo=True, logprobs=0, max_tokens=3)
    (choice,) = answer["choices"]
    assert choice["text"] == "\ufffda\ufffd\ufffdaa"
    assert choice["logprobs"]["text_offset"] == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("tokenizer", "prompt"),
    [
        (sentencepiece(), "hello the"),
        (sentencepiece(), " hi"),
        (sentencepiece(), [354, 356, 357]),
        (sentencepiece(), "<s>hello the</s><s> hi the</s>"),
        (byte_level(), "hi<s>the é</s></s>hi"),
    ],
)
async def test_offsets_in_echoed_texts(tmp_path: Path, tokenizer: Tokenizer, prompt: Any) -> None:
    """They count special tokens that the text has. Sentencepiece's first token, and its first after
    a special one, begin with a space that the text does not have."""
    world = World(tmp_path, tokenizer, replace(INFO, vocab_size=tokenizer.vocab_size))
    world.engine.answers = [tokenizer.encode(" world", add_special_tokens=False)]
    web = Web(world)
    answer = await web.complete(prompt=prompt, echo=True, logprobs=1, max_tokens=5)
    (choice,) = answer["choices"]
    text, told, end = choice["text"], choice["logprobs"], 0
    for token, start in zip(told["tokens"], told["text_offset"], strict=True):
        assert text.startswith(token, start) or text.startswith(token[1:], start)
        assert start <= end, "no character is left out"
        end = start + len(token)
    assert end >= len(text)
    world.check()

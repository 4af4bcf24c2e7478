"""Tokenizer, detokenizer, stop strings and output streams, without a model."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from toy_tokenizers import byte_chars, byte_level, sentencepiece

from weft.core.errors import AdapterUnavailable, InvalidRequest
from weft.core.requests import TokenEvent, TokenLogprob
from weft.core.sampling import SamplingParams
from weft.text import Detokenizer, OutputStream, StopStrings, Tokenizer


def stream(detokenizer: Detokenizer, ids: list[int]) -> list[str]:
    return [*(detokenizer.feed(i) for i in ids), detokenizer.flush()]


@given(st.text(max_size=60))
def test_deltas_add_up_to_any_text_byte_level(text: str) -> None:
    tokenizer = byte_level()
    ids = tokenizer.encode(text, add_special_tokens=False)
    deltas = stream(Detokenizer(tokenizer), ids)
    assert "".join(deltas) == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in delta for delta in deltas)


@given(st.text(max_size=40), st.text(max_size=40))
def test_a_prompt_is_context_only(prompt: str, text: str) -> None:
    tokenizer = byte_level()
    prompt_ids = tokenizer.encode(prompt, add_special_tokens=False)
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert "".join(stream(Detokenizer(tokenizer, prompt_ids), ids)) == text


@given(st.lists(st.integers(0, 261), max_size=28))
def test_random_tokens_equal_the_full_decode(ids: list[int]) -> None:
    tokenizer = byte_level()
    ids = [i for i in ids if i < tokenizer.vocab_size]
    deltas = stream(Detokenizer(tokenizer), ids)
    assert "".join(deltas) == tokenizer.decode(ids, skip_special_tokens=True)


@given(st.text(st.characters(exclude_characters="▁\ufffd", exclude_categories=["Cs"]), max_size=40))
def test_deltas_add_up_to_any_text_sentencepiece(text: str) -> None:
    tokenizer = sentencepiece()
    ids = tokenizer.encode(text, add_special_tokens=False)
    deltas = stream(Detokenizer(tokenizer), ids)
    assert "".join(deltas) == tokenizer.decode(ids, skip_special_tokens=True) == text
    assert not any("\ufffd" in delta for delta in deltas)


@pytest.mark.parametrize("make", [byte_level, sentencepiece])
@given(ids=st.lists(st.integers(0, 261), max_size=40), prompt=st.integers(0, 9), size=...)
def test_pieces_of_any_size_have_one_text(
    make: Callable[[], Tokenizer], ids: list[int], prompt: int, size: Literal[2, 3, 7, 40]
) -> None:
    tokenizer = make()
    ids = [i for i in ids if i < tokenizer.vocab_size]
    one_by_one, at_once = (Detokenizer(tokenizer, ids[:prompt]) for _ in range(2))
    parts = [ids[i : i + size] for i in range(prompt, len(ids), size)]
    text = "".join([*map(at_once.feed_all, parts), at_once.flush()])
    assert text == "".join(stream(one_by_one, ids[prompt:]))


def test_a_continuation_keeps_its_leading_space() -> None:
    tokenizer = sentencepiece()
    ids = tokenizer.encode("hello", add_special_tokens=False)
    assert "".join(stream(Detokenizer(tokenizer), ids)) == "hello"
    assert "".join(stream(Detokenizer(tokenizer, ids), ids)) == " hello"


def test_special_tokens_are_skipped_or_shown() -> None:
    tokenizer = byte_level()
    ids = [*tokenizer.encode("a", add_special_tokens=False), *tokenizer.eos_ids]
    assert "".join(stream(Detokenizer(tokenizer), ids)) == "a"
    assert "".join(stream(Detokenizer(tokenizer, skip_special_tokens=False), ids)) == "a</s>"


def test_endless_broken_bytes_come_out_and_text_after_them_is_right() -> None:
    tokenizer = byte_level()
    broken = byte_chars().index("ÿ")
    detokenizer = Detokenizer(tokenizer)
    deltas = [detokenizer.feed(broken) for _ in range(200)]
    assert "".join(deltas) == "\ufffd" * len("".join(deltas)) and len("".join(deltas)) >= 150
    rest = stream(detokenizer, tokenizer.encode("日", add_special_tokens=False))
    assert "".join(deltas + rest) == "\ufffd" * 200 + "日"


def test_a_broken_byte_takes_nothing_back_with_byte_fallback() -> None:
    tokenizer = sentencepiece()
    ids = [3 + b for b in "日".encode()] + [3 + 0xFF] + tokenizer.encode("h", False)
    assert "".join(stream(Detokenizer(tokenizer), ids)) == "日\ufffd h"


def test_a_prompt_that_ends_inside_a_character() -> None:
    tokenizer = byte_level()
    first, *rest = [byte_chars().index(c) for c in "ãģĤ"]
    assert "".join(stream(Detokenizer(tokenizer, [first]), rest)) == "あ"


def test_ids_without_a_token_have_no_text() -> None:
    tokenizer = byte_level()
    detokenizer = Detokenizer(tokenizer)
    assert "".join(detokenizer.feed(10_000) for _ in range(100)) == ""
    assert detokenizer.feed(tokenizer.encode("a", False)[0]) == "a"


def test_token_bytes() -> None:
    tokenizer = byte_level()
    for text in ("the日本é😀 x", "</s>"):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()
    other = sentencepiece()
    ids = other.encode("hello 日", add_special_tokens=False)
    assert b"".join(map(other.token_bytes, ids)) == " hello 日".encode()
    assert other.token_bytes(100_000) == b""


def test_chat_template() -> None:
    tokenizer = byte_level()
    messages = [{"role": "user", "content": "hi"}]
    assert tokenizer.decode(tokenizer.chat(messages)) == "<s>user: hi<s>assistant:"
    without = tokenizer.chat(messages, add_generation_prompt=False)
    assert tokenizer.decode(without) == "<s>user: hi"
    kind = tokenizer.chat(messages, template_kwargs={"mood": "kind"})
    assert tokenizer.decode(kind).endswith("assistant:kind")


def test_chat_template_refusals() -> None:
    tokenizer = byte_level()
    with pytest.raises(InvalidRequest, match="no such role") as caught:
        tokenizer.chat([{"role": "bad", "content": ""}])
    assert caught.value.param == "messages"
    with pytest.raises(InvalidRequest, match="tokenize") as caught:
        tokenizer.chat([], template_kwargs={"tokenize": True})
    assert caught.value.param == "chat_template_kwargs"
    with pytest.raises(InvalidRequest, match="no chat template"):
        sentencepiece().chat([{"role": "user", "content": "hi"}])


QWEN = (
    "{% if tools %}<tools>{% for tool in tools %}{{ tool | tojson }}{% endfor %}</tools>{% endif %}"
    "{% for m in messages %}<s>{{ m.role }}: {{ m.content or '' }}"
    "{% for call in m.tool_calls or [] %}<tool_call>{{ call.function.name }}"
    "{% for key, value in call.function.arguments | items %} {{ key }}={{ value }}{% endfor %}"
    "</tool_call>{% endfor %}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant:{% endif %}"
)


def with_template(template: str) -> Tokenizer:
    hf = copy.copy(byte_level()._hf)
    hf.chat_template = template
    return Tokenizer(hf)


def test_a_chat_with_tools() -> None:
    tokenizer = with_template(QWEN)
    calls = [{"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"x": [1]}'}}]
    messages = [
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c", "content": "2"},
    ]
    tools = [{"type": "function", "function": {"name": "f"}}]
    text = tokenizer.decode(tokenizer.chat(messages, tools=tools))
    assert json.dumps(tools[0]) in text
    assert "<tool_call>f x=[1]</tool_call></s><s>tool: 2</s><s>assistant:" in text
    assert calls[0]["function"]["arguments"] == '{"x": [1]}'  # type: ignore[index]
    assert "<tools>" not in tokenizer.decode(tokenizer.chat(messages))


@pytest.mark.parametrize("arguments", ["{", "[1]", "", "[" * 100_000])
def test_arguments_that_are_no_object_reach_the_template_as_they_are(arguments: str) -> None:
    tokenizer = with_template("{{ messages[0].tool_calls[0].function.arguments }}")
    call = {"function": {"name": "f", "arguments": arguments}}
    message = {"role": "assistant", "content": "", "tool_calls": [call]}
    assert tokenizer.decode(tokenizer.chat([message], add_generation_prompt=False)) == arguments


def test_a_template_that_shows_no_tools_is_not_given_any() -> None:
    with pytest.raises(InvalidRequest, match="takes no tools") as caught:
        byte_level().chat([{"role": "user", "content": "hi"}], tools=[{"type": "function"}])
    assert caught.value.param == "tools"


def test_a_template_shows_documents() -> None:
    tokenizer = with_template("{% for each in documents %}{{ each.text }};{% endfor %}")
    ids = tokenizer.chat([{"role": "user"}], documents=[{"text": "A"}, {"text": "B"}])
    assert tokenizer.decode(ids) == "A;B;"


def test_the_last_message_is_continued() -> None:
    tokenizer = with_template(QWEN)
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Well,"}]
    ids = tokenizer.chat(messages, add_generation_prompt=False, continue_final_message=True)
    assert tokenizer.decode(ids) == "<s>user: hi</s><s>assistant: Well,"
    with pytest.raises(InvalidRequest) as caught:
        tokenizer.chat(messages, continue_final_message=True)
    assert caught.value.param == "continue_final_message"


def test_the_template_for_tools_is_the_template() -> None:
    assert with_template(QWEN).chat_template == QWEN
    assert sentencepiece().chat_template is None
    several = with_template(QWEN)
    several._hf.chat_template = {"default": "a", "tool_use": "b tools"}
    assert several.chat_template == "b tools"


# Stop strings.


def cut(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """The oracle: grow the text by characters until it ends in a stop string."""
    for end in range(1, len(text) + 1):
        found = [s for s in stops if text[:end].endswith(s)]
        if found:
            longest = max(found, key=len)
            return (text[:end] if include else text[: end - len(longest)]), longest
    return text, None


def pieces(text: str, rng: random.Random) -> list[str]:
    cuts = sorted(rng.randrange(len(text) + 1) for _ in range(rng.randrange(len(text) + 2)))
    return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


@settings(max_examples=80, deadline=None)
@given(
    st.text("ab", max_size=40),
    st.lists(st.text("ab", min_size=1, max_size=6), max_size=4),
    st.booleans(),
    st.randoms(use_true_random=False),
)
def test_stop_strings_whatever_the_pieces(
    text: str, stops: list[str], include: bool, rng: random.Random
) -> None:
    checker = StopStrings(stops, include)
    out = ""
    for piece in pieces(text, rng):
        out += checker.feed(piece)
        assert cut(text, stops, include)[0].startswith(out)
        if checker.matched is not None:
            break
    else:
        out += checker.flush()
    assert (out, checker.matched) == cut(text, stops, include)


def test_only_what_may_become_a_stop_is_held_back() -> None:
    checker = StopStrings(["END", "stop"])
    assert checker.feed("abcE") == "abc"
    assert checker.feed("N") == ""
    assert checker.feed("x st") == "ENx "
    assert checker.flush() == "st"


# Output streams.


def events(text: str, size: int, finish: str | None = "length") -> list[TokenEvent]:
    ids = byte_level().encode(text, add_special_tokens=False)
    parts = [ids[i : i + size] for i in range(0, len(ids), size)]
    return [
        TokenEvent(
            "r",
            part,
            [TokenLogprob(-0.5, 1, [(t, -0.5)]) for t in part],
            finish if n == len(parts) - 1 else None,  # type: ignore[arg-type]
        )
        for n, part in enumerate(parts)
    ]


@given(st.text(max_size=30), st.integers(1, 5), st.booleans())
def test_output_stream_gives_all_text_and_tokens(text: str, size: int, at_end: bool) -> None:
    output = OutputStream(byte_level(), SamplingParams(), [], text_at_end=at_end)
    deltas = [output.feed(event) for event in events(text, size)]
    assert "".join(d.text for d in deltas) == text
    assert not (at_end and any(d.text for d in deltas[:-1]))
    assert [t for d in deltas for t in d.token_ids] == byte_level().encode(text, False)
    assert [d.finish_reason for d in deltas if d.finish_reason] == (["length"] if text else [])
    assert not any(d.abort for d in deltas)


@given(st.text(max_size=30), st.integers(1, 5))
def test_tokens_that_are_held_come_with_the_last_delta(text: str, size: int) -> None:
    output = OutputStream(byte_level(), SamplingParams(), [], text_at_end=True)
    quiet = [event._replace(logprobs=None) for event in events(text, size)]
    assert [output.holds(event) for event in quiet] == [e.finish_reason is None for e in quiet]
    assert "".join(output.feed(event).text for event in quiet[-1:]) == text


def test_what_a_delta_is_needed_for_is_not_held() -> None:
    logged, *_ = events("ab", 1)
    quiet = logged._replace(logprobs=None)
    for stop, at_end, event in (((), True, logged), (("b",), True, quiet), ((), False, quiet)):
        output = OutputStream(byte_level(), SamplingParams(stop=stop), [], text_at_end=at_end)
        assert not output.holds(event)


@pytest.mark.parametrize("size", [1, 2, 3, 100])
def test_a_stop_string_ends_the_output_and_asks_for_abort(size: int) -> None:
    output = OutputStream(byte_level(), SamplingParams(stop=("STOP",)), [])
    deltas = []
    for event in events("abc STOP and more", size, finish=None):
        deltas.append(output.feed(event))
        if deltas[-1].finish_reason:
            break
    last = deltas[-1]
    assert "".join(d.text for d in deltas) == "abc "
    assert (last.finish_reason, last.stop_reason, last.abort) == ("stop", "STOP", True)
    ids = [t for d in deltas for t in d.token_ids]
    assert byte_level().decode(ids) == "abc STOP"
    assert len(ids) == sum(len(d.logprobs or []) for d in deltas)


def test_held_back_text_comes_with_the_end() -> None:
    output = OutputStream(byte_level(), SamplingParams(stop=("STOP",)), [])
    assert "".join(output.feed(e).text for e in events("abc STO", 1)) == "abc STO"


@pytest.mark.parametrize(("include", "text"), [(False, "ab"), (True, "abc")])
def test_the_token_that_stopped_is_not_text_unless_asked_for(include: bool, text: str) -> None:
    params = SamplingParams(include_stop_str_in_output=include)
    ids = byte_level().encode("abc", add_special_tokens=False)
    event = TokenEvent("r", ids, finish_reason="stop", stop_reason=ids[-1])
    delta = OutputStream(byte_level(), params, []).feed(event)
    assert (delta.text, delta.token_ids, delta.stop_reason) == (text, ids, ids[-1])


def test_without_a_tokenizer_there_are_tokens_only() -> None:
    delta = OutputStream(None, SamplingParams(), [1]).feed(TokenEvent("r", [5, 6]))
    assert (delta.text, delta.token_ids) == ("", [5, 6])
    with pytest.raises(InvalidRequest) as caught:
        OutputStream(None, SamplingParams(stop=("x",)), [1])
    assert caught.value.param == "stop"


def test_an_error_event_is_raised_as_what_it_was() -> None:
    event = TokenEvent("r", [], finish_reason="error", error=("adapter_unavailable", "gone", None))
    with pytest.raises(AdapterUnavailable, match="gone"):
        OutputStream(byte_level(), SamplingParams(), []).feed(event)

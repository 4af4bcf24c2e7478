"""The Python API over the example model."""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
import signal
import socketserver
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engines import MakeLLM
from huggingface_hub import DryRunFileInfo
from patience import PATIENCE_S
from tiny import ADAPTERS, BASE, answer, ask

from weft import LLM, SamplingParams
from weft.core.adapters import AdapterSource
from weft.core.config import engine_args
from weft.core.errors import (
    AdapterConflict,
    AdapterInvalid,
    AdapterNotFound,
    AdapterPathRefused,
    AdapterUnavailable,
    ConfigError,
    ContextLengthExceeded,
    EngineDead,
    InvalidRequest,
    ModelNotFound,
)
from weft.core.files import CONFIG_FILE
from weft.core.requests import EngineRequest
from weft.core.sampling import StructuredOutputs
from weft.llm import RequestOutput
from weft.worker.reading import AdapterReader

GREEDY = SamplingParams(max_tokens=24, temperature=0.0)
HALF = "\ud83d"
"""One half of a surrogate pair."""
EOS = 2
HUB = "huggingface_hub.constants"


@pytest.fixture(scope="module")
def llm(make_module_llm: MakeLLM) -> LLM:
    return make_module_llm()


def texts(outputs: list[RequestOutput]) -> list[str]:
    return [output.text for output in outputs]


def prompt_of(llm: LLM, word: str) -> list[int]:
    return llm.tokenizer.chat(ask(word))


def copy_adapter(name: str, folder: Path) -> Path:
    return Path(shutil.copytree(ADAPTERS[name], folder / name))


# -- prompts, parameters and adapters ----------------------------------------------------------


def test_prompts_as_text_and_as_token_ids(llm: LLM) -> None:
    text, ids = "<s><|user|>hello<|end|><|assistant|>", prompt_of(llm, "hello")
    (one,) = llm.generate(ids, GREEDY)
    assert (one.prompt, one.prompt_token_ids, one.text) == (None, ids, "hello?")
    assert one.token_ids[-1] == EOS and one.finish_reason == "stop" and one.stop_reason is None
    assert one.adapter is None and one.logprobs is None
    assert texts(llm.generate([ids, prompt_of(llm, "tiny")], GREEDY)) == ["hello?", "tiny?"]
    (written,) = llm.generate(text, GREEDY)
    assert written.prompt == text
    assert written.prompt_token_ids == llm.tokenizer.encode(text)
    mixed = llm.generate([text, ids], GREEDY)
    assert [o.prompt for o in mixed] == [text, None]
    assert mixed[0].token_ids == written.token_ids and mixed[1].token_ids == one.token_ids


@pytest.mark.parametrize("kind", [np.array, torch.tensor, lambda ids: list(map(np.int64, ids))])
def test_token_ids_of_numpy_and_torch(llm: LLM, kind: Callable[[Any], Any]) -> None:
    first, second = prompt_of(llm, "hello"), prompt_of(llm, "world")
    assert texts(llm.generate(kind(first), GREEDY)) == ["hello?"]
    assert texts(llm.generate([kind(first), kind(second)], GREEDY)) == ["hello?", "world?"]
    rows = np.array([first, first])
    assert texts(llm.generate(rows, GREEDY)) == ["hello?"] * 2


def test_no_prompts(llm: LLM) -> None:
    assert llm.generate([]) == []
    assert llm.generate([], [], []) == []


def test_chat(llm: LLM) -> None:
    assert texts(llm.chat(ask("hello"), GREEDY, "upper")) == ["HELLO"]
    outputs = llm.chat([ask("hello"), ask("hello")], GREEDY, ["reverse", None])
    assert texts(outputs) == ["olleh", "hello?"]
    assert outputs[0].prompt_token_ids == prompt_of(llm, "hello")
    (message,) = ask("hello")
    parts = {**message, "content": [{"type": "text", "text": message["content"]}]}
    assert texts(llm.chat([parts], GREEDY, "upper")) == ["HELLO"]
    for part in ({"type": "image_url"}, "hello"):
        with pytest.raises(InvalidRequest) as caught:
            llm.chat([message, {**message, "content": [part]}])
        assert caught.value.param == "messages[1].content[0].type"


def test_a_call_without_content_is_a_message(llm: LLM) -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": "{}"}}
    said = {"role": "assistant", "content": None, "tool_calls": [call]}
    (output,) = llm.chat([*ask("hello"), said, *ask("hello")], GREEDY)
    empty = {**said, "content": ""}
    same = llm.chat([*ask("hello"), empty, *ask("hello")], GREEDY)[0]
    assert output.prompt_token_ids == same.prompt_token_ids


@pytest.mark.parametrize(
    ("conversation", "param"),
    [
        ({"role": "user", "content": "hello"}, "messages"),
        (None, "messages"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "user", "content": None}], "messages[0].content"),
        ([{"content": "hello"}], "messages[0].role"),
        ([{"role": 1, "content": "hello"}], "messages[0].role"),
        ([{"role": "user", "content": HALF}], "messages"),
    ],
)
def test_no_conversations(llm: LLM, conversation: Any, param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        llm.chat(conversation)
    assert caught.value.param == param


@pytest.mark.parametrize("conversations", ["hello", ["hello"], None, [5]])
def test_a_text_is_no_conversation(llm: LLM, conversations: Any) -> None:
    with pytest.raises(InvalidRequest, match="a conversation must be a list of messages, got"):
        llm.chat(conversations)


def test_halves_of_surrogate_pairs_are_no_text(llm: LLM) -> None:
    form = StructuredOutputs(regex=HALF)
    for params, prompt, param in (
        (GREEDY, HALF, "prompt"),
        (SamplingParams(bad_words=(HALF,)), "a", "bad_words"),
        (SamplingParams(structured_outputs=form), "a", "structured_outputs"),
    ):
        with pytest.raises(InvalidRequest) as caught:
            llm.generate(prompt, params)
        assert caught.value.param == param


def test_one_of_each_or_one_for_all(llm: LLM) -> None:
    prompts = [prompt_of(llm, "hello")] * 3
    params = [GREEDY, SamplingParams(max_tokens=2, temperature=0.0), GREEDY]
    outputs = llm.generate(prompts, params, ["upper", "caesar", None])
    assert texts(outputs) == ["HELLO", "kh", "hello?"]
    assert [o.finish_reason for o in outputs] == ["stop", "length", "stop"]
    assert [o.adapter and o.adapter.name for o in outputs] == ["upper", "caesar", None]
    assert texts(llm.generate(prompts, GREEDY, "sort")) == ["ehllo"] * 3
    assert texts(llm.generate(prompts[:1], [GREEDY], ["sort"])) == ["ehllo"]


@pytest.mark.parametrize("temperature", [1e-320, 1e-45, 1e-38, 1e-14])
def test_hardly_any_temperature_is_greedy(llm: LLM, temperature: float) -> None:
    prompt = prompt_of(llm, "hello")
    params = replace(GREEDY, temperature=temperature)
    assert texts(llm.generate(prompt, params)) == texts(llm.generate(prompt, GREEDY))
    lowest = replace(params, repetition_penalty=1e-14)
    cold = replace(lowest, temperature=0.0)
    assert texts(llm.generate(prompt, lowest)) == texts(llm.generate(prompt, cold))


def test_default_parameters(llm: LLM) -> None:
    (output,) = llm.generate(prompt_of(llm, "hello"))
    assert 1 <= len(output.token_ids) <= 16


def test_many_more_requests_than_rows(make_llm: MakeLLM) -> None:
    llm = make_llm(max_num_seqs=2)
    names: list[str | None] = [*ADAPTERS, None]
    each = [names[i % len(names)] for i in range(16)]
    words = ["hello", "world", "spring"]
    outputs = llm.chat([ask(words[i % 3]) for i in range(16)], GREEDY, each)
    assert texts(outputs) == [answer(name, words[i % 3]) for i, name in enumerate(each)]


@pytest.mark.parametrize(
    ("params", "adapter", "param"),
    [
        ([GREEDY], None, "params"),
        (GREEDY, ["upper"], "adapter"),
        ([GREEDY] * 3, None, "params"),
        (GREEDY, [None] * 3, "adapter"),
    ],
)
def test_wrong_lengths(llm: LLM, params: object, adapter: object, param: str) -> None:
    with pytest.raises(InvalidRequest, match="for 2 prompts") as caught:
        llm.generate([[1, 4], [1, 5]], params, adapter)
    assert caught.value.param == param


@pytest.mark.parametrize("name", ["nobody", str(BASE), ""])
def test_unknown_adapter(llm: LLM, name: str) -> None:
    """Also the base's own name: the base is asked for by None. Nothing has run."""
    before = llm.stats()
    with pytest.raises(ModelNotFound):
        llm.generate([[1, 4], [1, 5]], GREEDY, ["upper", name])
    assert llm.stats() == before


@pytest.mark.parametrize("switch", [{"replace": "no"}, {"pinned": 1}])
def test_switches_of_other_types(llm: LLM, switch: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest) as refused:
        llm.load_adapter("another", ADAPTERS["upper"], **switch)
    assert refused.value.param in switch


@pytest.mark.parametrize(
    "prompt",
    [
        *([], [1, 262], [1, -1], [1.5], [True], None, {"prompt": "hello"}, np.array([1.5])),
        *(b"abc", bytearray(b"abc")),
    ],
)
def test_bad_prompts(llm: LLM, prompt: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        llm.generate([prompt_of(llm, "hello"), prompt], GREEDY)
    assert caught.value.param == "prompt"
    assert texts(llm.chat(ask("hello"), GREEDY)) == ["hello?"]


def test_what_is_neither_one_value_nor_several(llm: LLM) -> None:
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"prompts": 5}, "prompt"),
        ({"prompts": {"prompt": "hello"}}, "prompt"),
        ({"params": {"max_tokens": 2}}, "params"),
        ({"params": [{"max_tokens": 2}]}, "params"),
        ({"tenant": 5}, "tenant"),
        ({"adapter": 5}, "adapter"),
    ]
    for options, param in wrong:
        with pytest.raises(InvalidRequest) as caught:
            llm.generate(**({"prompts": [1, 5]} | options))
        assert caught.value.param == param
    messages: Any = [*ask("hello"), "hello"]
    with pytest.raises(InvalidRequest, match=r"messages\[1\] must be a mapping"):
        llm.chat(messages)


def test_context_length(make_llm: MakeLLM) -> None:
    llm = make_llm(adapters={}, max_model_len=32)
    assert llm.info.max_model_len == 32
    endless = SamplingParams(max_tokens=None, temperature=0.0, ignore_eos=True)
    (output,) = llm.generate([7] * 20, endless)
    assert (len(output.token_ids), output.finish_reason) == (12, "length")
    (last,) = llm.generate([7] * 31, endless)
    assert len(last.token_ids) == 1
    with pytest.raises(ContextLengthExceeded):
        llm.generate([7] * 32, endless)


# -- the end of an output ----------------------------------------------------------------------


def test_stop_strings(llm: LLM) -> None:
    def run(**options: object) -> RequestOutput:
        params = SamplingParams(max_tokens=24, temperature=0.0, **options)
        return llm.chat(ask("hello"), params, "repeat")[0]

    plain = run(stop=("-h",))
    assert (plain.text, plain.finish_reason, plain.stop_reason) == ("hello", "stop", "-h")
    assert llm.tokenizer.decode(plain.token_ids) == "hello-h"
    assert run(stop="-h", include_stop_str_in_output=True).text == "hello-h"
    assert run(stop=("xyz", "lo", "o-")).stop_reason == "lo"
    never = run(stop=("xyz",))
    assert (never.text, never.stop_reason) == ("hello-hello", None)


def test_stop_token_ids(llm: LLM) -> None:
    dash = llm.tokenizer.encode("-")[-1]
    params = SamplingParams(max_tokens=24, temperature=0.0, stop_token_ids=(dash,))
    (output,) = llm.chat(ask("hello"), params, "repeat")
    assert (output.text, output.stop_reason, output.token_ids[-1]) == ("hello", dash, dash)


def test_ignore_eos_and_max_tokens(llm: LLM) -> None:
    for count in (1, 5, 20):
        params = SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True)
        (output,) = llm.chat(ask("hello"), params, "upper")
        assert (len(output.token_ids), output.finish_reason) == (count, "length")
        assert output.text.startswith("HELLO"[:count])


def test_on_finished_is_called_once_each(llm: LLM) -> None:
    done: list[RequestOutput] = []
    params = [SamplingParams(max_tokens=n, ignore_eos=True, seed=1) for n in (9, 1, 5)]
    outputs = llm.generate([[1, 4, 9]] * 3, params, None, done.append)
    assert [len(o.token_ids) for o in done] == [1, 5, 9]
    assert {id(o) for o in done} == {id(o) for o in outputs}


def test_on_finished_must_not_call_the_same_llm(llm: LLM) -> None:
    """Each call is refused before it changes anything, also one that could not end."""
    calls: list[Callable[[], object]] = [
        lambda: llm.generate([[1, 4, 9]]),
        lambda: llm.chat(ask("hello")),
        lambda: llm.load_adapter("new", ADAPTERS["reverse"]),
        lambda: llm.publish_adapter("new", {}, {}),
        lambda: llm.unload_adapter("sort"),
        llm.stats,
        llm.close,
    ]
    refused: list[InvalidRequest] = []

    def call_all(_: RequestOutput) -> None:
        for each in calls:
            with pytest.raises(InvalidRequest, match="on_finished must not call") as caught:
                each()
            refused.append(caught.value)

    params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (1, 5)]
    llm.generate([[1, 4, 9]] * 2, params, ["upper", "sort"], call_all)
    assert [error.param for error in refused] == ["on_finished"] * 2 * len(calls)
    assert texts(llm.chat(ask("hello"), GREEDY, "sort")) == ["ehllo"]


def test_an_exception_in_the_middle(llm: LLM) -> None:
    """What still runs is aborted, and the engine serves on."""

    def interrupt(_: RequestOutput) -> None:
        raise KeyboardInterrupt

    params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (2, 200, 200)]
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[1, 4, 9]] * 3, params, ["upper", "sort", None], interrupt)
    stats = llm.stats()
    assert (stats.num_running, stats.num_waiting) == (0, 0)
    assert texts(llm.chat([ask("hello")] * 2, GREEDY, ["upper", "sort"])) == ["HELLO", "ehllo"]


@pytest.fixture
def ctrl_c() -> Iterator[Callable[[], None]]:
    """Raises SIGINT as in a terminal: programs that run in the background ignore it."""
    usual = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield lambda: signal.raise_signal(signal.SIGINT)
    signal.signal(signal.SIGINT, usual)


@pytest.mark.parametrize("doing", ["a step", "a load"])
def test_ctrl_c_leaves_nothing_half_done(
    make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch, ctrl_c: Callable[[], None], doing: str
) -> None:
    """The interrupted adapter gives its only place to another one."""
    llm = make_llm(adapters={"upper": ADAPTERS["upper"]}, max_loras=1)
    worker = llm._client.engine._worker
    verb, whole = ("step", worker.step) if doing == "a step" else ("load", worker.load)

    def interrupted(*args: Any) -> Any:
        monkeypatch.setattr(worker, verb, whole)
        flight = whole(*args)
        ctrl_c()
        return flight

    monkeypatch.setattr(worker, verb, interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.chat(ask("hello"), GREEDY, "upper")
    llm.load_adapter("sort", ADAPTERS["sort"])
    outputs = llm.chat([ask("hello")] * 3, GREEDY, ["sort", None, "upper"])
    assert texts(outputs) == ["ehllo", "hello?", "HELLO"]
    llm._client.engine.check()


def test_ctrl_c_while_an_adapter_is_registered(
    make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch, ctrl_c: Callable[[], None]
) -> None:
    """The load goes on, so that the adapter can be used, or unloaded."""
    llm = make_llm(adapters={})
    worker = llm._client.engine._worker
    pack = worker.pack

    def interrupted(source: Any) -> Any:
        ctrl_c()
        return pack(source)

    monkeypatch.setattr(worker, "pack", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.load_adapter("upper", ADAPTERS["upper"])
    assert texts(llm.chat(ask("hello"), GREEDY, "upper")) == ["HELLO"]
    llm.unload_adapter("upper")
    llm._client.engine.check()


def test_calls_from_several_threads_take_turns(llm: LLM) -> None:
    wanted = ["upper", None, "sort", "reverse"] * 4

    def chat(adapter: str | None) -> str:
        return llm.chat(ask("hello"), GREEDY, adapter)[0].text

    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(chat, wanted)) == ["HELLO", "hello?", "ehllo", "olleh"] * 4
    llm._client.engine.check()


# -- seeds -------------------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [pytest.param(False, marks=pytest.mark.exhaustive), True])
def test_seeds_do_not_depend_on_the_batch(make_llm: MakeLLM, overlap: bool) -> None:
    adapters = {name: ADAPTERS[name] for name in ("caesar", "sort", "upper")}
    llm = make_llm(adapters=adapters, overlap=overlap, block_size=4)
    prompt = prompt_of(llm, "hello")
    wild = {"temperature": 4.0, "max_tokens": 16, "ignore_eos": True}

    def ids(params: list[SamplingParams], adapters: list[str | None]) -> list[list[int]]:
        return [o.token_ids for o in llm.generate([prompt] * len(params), params, adapters)]

    seeded = [
        SamplingParams(seed=5, **wild),
        SamplingParams(seed=-6, top_k=20, **wild),
        SamplingParams(seed=5, top_p=0.8, **wild),
    ]
    names: list[str | None] = ["upper", None, "sort"]
    alone = [ids([p], [n])[0] for p, n in zip(seeded, names, strict=True)]
    others = [SamplingParams(**wild), GREEDY, SamplingParams(seed=9, **wild)]
    crowd = ids([*others, *seeded], ["caesar", None, "upper", *names])
    assert crowd[3:] == alone
    assert ids(seeded[::-1], names[::-1]) == alone[::-1]
    assert len({tuple(each) for each in crowd}) == len(crowd)


def test_without_a_seed_outputs_differ(llm: LLM) -> None:
    params = SamplingParams(temperature=4.0, max_tokens=16, ignore_eos=True)
    outputs = llm.generate([[1, 4, 9]] * 4, params)
    assert len({tuple(o.token_ids) for o in outputs}) == 4


# -- guesses -----------------------------------------------------------------------------------


@pytest.mark.usefixtures("eager_guesses")
def test_guesses_change_no_token(llm: LLM) -> None:
    prompts = [[5, 6, 7, 8, 9, 10, 11, 12] * 6, [3, 1, 4, 1, 5, 9, 2, 6] * 5, [20, 21, 22] * 9]
    params = [
        SamplingParams(max_tokens=48, temperature=0.0, ignore_eos=True, logprobs=2),
        SamplingParams(max_tokens=48, temperature=0.0, ignore_eos=True, min_tokens=40),
        SamplingParams(max_tokens=48, temperature=0.3, top_p=0.9, seed=3, ignore_eos=True),
    ]

    def generate(speculative: str) -> list[RequestOutput]:
        asked = [replace(p, speculative=speculative) for p in params]
        return llm.generate(prompts, asked, ["reverse", None, "upper"])

    plain, before = generate("off"), llm.stats()
    guessed, after = generate("ngram"), llm.stats()
    assert [o.token_ids for o in guessed] == [o.token_ids for o in plain]
    assert [o.finish_reason for o in guessed] == [o.finish_reason for o in plain]
    pairs = zip(guessed[0].logprobs or [], plain[0].logprobs or [], strict=True)
    assert all(mine.logprob == pytest.approx(other.logprob, abs=1e-4) for mine, other in pairs)
    right = after.right_guesses - before.right_guesses
    assert 10 < right <= after.guessed_tokens - before.guessed_tokens
    assert after.generated_tokens - before.generated_tokens == 3 * 48


# -- adapters at run time ----------------------------------------------------------------------


def test_load_and_unload(make_llm: MakeLLM) -> None:
    llm = make_llm(adapters={})
    with pytest.raises(ModelNotFound):
        llm.chat(ask("hello"), GREEDY, "x")
    first = llm.load_adapter("x", ADAPTERS["upper"])
    assert (first.name, first.version) == ("x", 1)
    assert texts(llm.chat(ask("hello"), GREEDY, "x")) == ["HELLO"]
    llm.unload_adapter("x")
    with pytest.raises(ModelNotFound):
        llm.chat(ask("hello"), GREEDY, "x")
    with pytest.raises(AdapterNotFound):
        llm.unload_adapter("x")
    second = llm.load_adapter("x", ADAPTERS["reverse"])
    assert second.version == 2 and second.digest != first.digest
    (output,) = llm.chat(ask("hello"), GREEDY, "x")
    assert (output.text, output.adapter) == ("olleh", second)
    assert llm.stats().resident_adapters == llm.stats().host_adapters == (second.digest,)


def test_two_names_for_one_content(make_llm: MakeLLM) -> None:
    llm = make_llm(adapters={"a": ADAPTERS["upper"], "b": ADAPTERS["upper"]})
    assert texts(llm.chat([ask("hello")] * 2, GREEDY, ["a", "b"])) == ["HELLO"] * 2
    assert len(llm.stats().resident_adapters) == 1
    llm.unload_adapter("a")
    assert texts(llm.chat(ask("hello"), GREEDY, "b")) == ["HELLO"]
    llm.unload_adapter("b")
    assert_forgotten(llm)


def test_loading_the_same_again_changes_nothing(make_llm: MakeLLM) -> None:
    llm = make_llm(adapters={"a": ADAPTERS["upper"]})
    again = llm.load_adapter("a", ADAPTERS["upper"])
    assert again.version == 1
    assert texts(llm.chat(ask("hello"), GREEDY, "a")) == ["HELLO"]
    llm.unload_adapter("a")
    assert_forgotten(llm)


def test_a_taken_name(make_llm: MakeLLM) -> None:
    """The other adapter is refused and leaves nothing behind."""
    llm = make_llm(adapters={"a": ADAPTERS["upper"]})
    with pytest.raises(AdapterConflict):
        llm.load_adapter("a", ADAPTERS["reverse"])
    assert texts(llm.chat(ask("hello"), GREEDY, "a")) == ["HELLO"]
    assert len(llm.stats().host_adapters) == 1
    llm.unload_adapter("a")
    assert_forgotten(llm)


def assert_forgotten(llm: LLM) -> None:
    """No adapter takes any memory."""
    llm.chat(ask("hello"), GREEDY)
    stats = llm.stats()
    assert stats.resident_adapters == stats.host_adapters == ()
    assert stats.adapter_bytes == 0


def test_a_load_that_fails(make_llm: MakeLLM, tmp_path: Path) -> None:
    llm = make_llm(adapters={"a": ADAPTERS["upper"]})
    with pytest.raises(AdapterNotFound) as caught:
        llm.load_adapter("b", tmp_path / "nothing")
    assert caught.value.param == "lora_path"
    with pytest.raises(ModelNotFound):
        llm.chat(ask("hello"), GREEDY, "b")
    assert texts(llm.chat(ask("hello"), GREEDY, "a")) == ["HELLO"]
    with pytest.raises(AdapterNotFound):
        make_llm(adapters={"a": tmp_path})


def test_a_configuration_nested_too_deeply(make_llm: MakeLLM, tmp_path: Path) -> None:
    adapter = copy_adapter("upper", tmp_path)
    (adapter / "adapter_config.json").write_text('{"a":' * 50_000 + "1" + "}" * 50_000)
    with pytest.raises(AdapterInvalid) as caught:
        make_llm().load_adapter("deep", adapter)
    assert caught.value.param == "adapter_config.json"


def test_an_adapter_from_the_hub(make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def download(name: str, dry_run: bool = False, **_: object) -> str | list[object]:
        if dry_run:
            return [DryRunFileInfo("1" * 40, 1, CONFIG_FILE, "", False, True)]
        asked.append(name)
        return str(ADAPTERS["upper"])

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    llm = make_llm(adapters={"a": "hf://acme/upper"})
    assert texts(llm.chat(ask("hello"), GREEDY, "a")) == ["HELLO"] and asked == ["acme/upper"]
    for path, error in (("hf://acme", AdapterNotFound), ("ftp://acme/upper", AdapterPathRefused)):
        with pytest.raises(error) as caught:
            llm.load_adapter("b", path)
        assert caught.value.param == "lora_path"


async def test_in_a_notebook(make_llm: MakeLLM) -> None:
    """All of it works where an event loop is running already."""
    llm = make_llm(adapters={"a": ADAPTERS["upper"]})
    assert texts(llm.chat([ask("hello")] * 2, GREEDY, ["a", None])) == ["HELLO", "hello?"]
    llm.load_adapter("a", ADAPTERS["reverse"], replace=True)
    assert texts(llm.chat(ask("hello"), GREEDY, "a")) == ["olleh"]
    llm.unload_adapter("a")
    assert_forgotten(llm)


def test_its_client_serves_several_requests_at_a_time(llm: LLM) -> None:
    """As any EngineClient does: each stream has its own tokens, and a closed one ends."""
    client, params = llm._client, SamplingParams(max_tokens=24, temperature=0.0)

    def request(name: str) -> EngineRequest:
        return EngineRequest(f"own-{name}", prompt_of(llm, name), params, seed=0)

    async def tokens(name: str) -> list[int]:
        return [t async for event in client.generate(request(name)) for t in event.token_ids]

    async def together() -> list[list[int]]:
        async with aclosing(client.generate(request("spring"))) as left:
            await anext(left)
            return await asyncio.gather(tokens("hello"), tokens("world"))

    found = [llm.tokenizer.decode(ids, True) for ids in asyncio.run(together())]
    assert found == ["hello?", "world?"]
    assert llm.stats().num_running == 0


def test_an_adapter_that_changed_on_disk(make_llm: MakeLLM, tmp_path: Path) -> None:
    """Its requests get AdapterUnavailable, never other content; others go on."""
    names = ("caesar", "stutter")
    folders = {n: copy_adapter(n, tmp_path) for n in names}
    llm = make_llm(adapters=folders, adapter_host_memory=1, adapter_cache_dir="none")
    original = copy_adapter("caesar", tmp_path / "kept")
    shutil.copytree(ADAPTERS["reverse"], tmp_path / "caesar", dirs_exist_ok=True)
    for wanted in (["caesar"], ["stutter", "caesar", None]):
        with pytest.raises(AdapterUnavailable, match="changed on disk"):
            llm.chat([ask("hello")] * len(wanted), GREEDY, wanted)
        stats = llm.stats()
        assert (stats.num_running, stats.num_waiting) == (0, 0)
    assert texts(llm.chat([ask("hello")] * 2, GREEDY, ["stutter", None])) == [
        "hheelllloo",
        "hello?",
    ]
    shutil.copytree(original, tmp_path / "caesar", dirs_exist_ok=True)
    assert texts(llm.chat(ask("hello"), GREEDY, "caesar")) == ["khoor"]


# -- the start ---------------------------------------------------------------------------------


def test_skip_tokenizer_init(make_llm: MakeLLM, llm: LLM) -> None:
    bare = make_llm(adapters={"upper": ADAPTERS["upper"]}, skip_tokenizer_init=True)
    prompt = prompt_of(llm, "hello")
    (output,) = bare.generate([prompt], GREEDY, "upper")
    assert output.text == ""
    assert output.token_ids == llm.generate([prompt], GREEDY, "upper")[0].token_ids
    for call in (
        lambda: bare.generate("hello", GREEDY),
        lambda: bare.chat(ask("hello"), GREEDY),
        lambda: bare.generate(prompt, SamplingParams(stop="x")),
    ):
        with pytest.raises(InvalidRequest, match="tokenizer"):
            call()


def test_dummy_weights(make_llm: MakeLLM, tmp_path: Path) -> None:
    """Only a config.json: random weights, the same each time."""
    shutil.copy(BASE / "config.json", tmp_path)
    options = {"load_format": "dummy", "skip_tokenizer_init": True, "adapters": {}}
    params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    first, second = (make_llm(tmp_path, **options).generate([5, 6, 7], params) for _ in range(2))
    assert len(first[0].token_ids) == 8 and first[0].token_ids == second[0].token_ids
    with pytest.raises(ConfigError, match=r"model\.safetensors"):
        make_llm(tmp_path, skip_tokenizer_init=True, adapters={})


@pytest.mark.parametrize(
    ("name", "hint"),
    [("max_modellen", "did you mean 'max_model_len'"), ("enable_lora", "options are the flags of")],
)
def test_an_option_that_is_not_there(name: str, hint: str) -> None:
    with pytest.raises(ConfigError, match=f"there is no option '{name}'; {hint}"):
        engine_args("m", **{name: 1})


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"max_model_len": 128, "num_blocks": 4, "block_size": 16}, "max_model_len"),
        ({"max_model_len": 513}, "max_model_len"),
        ({"max_num_batched_tokens": 8, "max_num_seqs": 9}, "max_num_batched_tokens"),
        ({"max_num_seqs": 0}, "max_num_seqs"),
        ({"lora_backend": "nonesuch"}, "lora_backend"),
        ({"nonesuch": 1}, "nonesuch"),
        ({"adapter_memory": "much"}, "adapter_memory"),
        ({"kv_cache_memory": "0.5"}, "kv_cache_memory"),
        ({"max_num_seqs": "x"}, "max_num_seqs"),
        ({"max_num_seqs": True}, "max_num_seqs"),
        ({"max_model_len": 1.5}, "max_model_len"),
        ({"num_threads": "2"}, "num_threads"),
        ({"num_threads": 100_000}, "num_threads"),
        ({"dtype": "bf16"}, "dtype"),
        ({"tenant_weights": [1]}, "tenant_weights"),
        ({"adapters": ["sql"]}, "adapters"),
    ],
)
def test_options_that_cannot_be(make_llm: MakeLLM, options: dict[str, object], param: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make_llm(**options)
    assert caught.value.param == param


def test_more_memory_than_there_is(make_llm: MakeLLM) -> None:
    with pytest.raises(ConfigError, match="not enough memory for --kv-cache-memory"):
        make_llm(kv_cache_memory=9000 << 30, num_blocks=None)
    with pytest.raises(ConfigError, match="KV cache; raise --kv-cache-memory"):
        make_llm(kv_cache_memory=1, num_blocks=None)
    with pytest.raises(ConfigError, match="not enough memory for --max-num-seqs"):
        make_llm(max_num_seqs=10**11, max_num_batched_tokens=10**12)


def test_not_a_model(make_llm: MakeLLM, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "nonesuch"}))
    with pytest.raises(ConfigError):
        make_llm(tmp_path, skip_tokenizer_init=True)


def test_a_name_that_is_no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is told of the model, before anybody looks for a tokenizer."""

    def no_such(*_: object, **__: object) -> None:
        raise OSError("404")

    monkeypatch.setattr("huggingface_hub.snapshot_download", no_such)
    monkeypatch.setattr("weft.llm.load_tokenizer", no_such)
    with pytest.raises(ConfigError, match="nope is neither a local folder nor a model"):
        LLM("nope")
    for model in (None, 5, ""):
        with pytest.raises(ConfigError, match=f"model must be a folder or a name .* got {model!r}"):
            LLM(model)  # type: ignore[arg-type]


def test_a_repository_without_a_models_files(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The hub's client then names a folder that it has not made."""
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: str(tmp_path / "no"))
    with pytest.raises(ConfigError, match="acme/gguf is no base model: it has no config"):
        LLM("acme/gguf")


def test_a_model_that_does_not_fit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    shutil.copytree(BASE, tmp_path, dirs_exist_ok=True)
    config = json.loads((BASE / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "head_dim": 1 << 30}))
    advice = r" \(--quantization .* see weft plan\)$"
    with pytest.raises(ConfigError, match=f"not enough memory .* can't allocate .*{advice}"):
        LLM(tmp_path, load_format="dummy")

    def load_model(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nSee ...")

    monkeypatch.setattr("weft.worker.build.load_model", load_model)
    with pytest.raises(ConfigError, match=rf"not enough memory .* 2 GiB\.{advice}"):
        LLM(BASE)


def test_a_hub_that_hangs_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What the hub's client raises then comes from a library that differs by its version."""
    with socketserver.TCPServer(("127.0.0.1", 0), socketserver.BaseRequestHandler) as hub:
        monkeypatch.setattr(f"{HUB}.ENDPOINT", f"http://127.0.0.1:{hub.server_address[1]}")
        monkeypatch.setattr(f"{HUB}.HF_HUB_CACHE", str(tmp_path))
        monkeypatch.setattr(f"{HUB}.HF_HUB_OFFLINE", False)
        thread = threading.Thread(target=hub.serve_forever, args=(0.01,))
        thread.start()
        try:
            with pytest.raises(ConfigError, match="org/model is neither a local folder") as error:
                LLM("org/model")
        finally:
            hub.shutdown()
            thread.join()
    assert error.value.param == "model"


def test_context_manager() -> None:
    with LLM(BASE, num_threads=1, num_blocks=64) as llm:
        assert texts(llm.chat(ask("hello"), GREEDY)) == ["hello?"]
    llm.close()
    for call in (
        lambda: llm.generate("hello", GREEDY),
        lambda: llm.load_adapter("upper", ADAPTERS["upper"]),
        lambda: llm.stats(),
    ):
        with pytest.raises(EngineDead, match="closed"):
            call()


def test_random_numbers_of_the_program_stay_its_own(llm: LLM) -> None:
    """A training loop in the same process draws the same numbers with and without requests."""
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    llm.generate("hello", SamplingParams(max_tokens=3))
    after = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    assert before[:2] == after[:2] and torch.equal(before[2], after[2])


def test_a_closed_llm_has_given_its_memory_back() -> None:
    """The object may live on: in a notebook, its variable does."""
    llm = LLM(BASE, num_threads=1, num_blocks=64)
    stream = llm._client.run([EngineRequest("open", [1, 2, 3], GREEDY, seed=0)])
    next(stream)
    engine = weakref.ref(llm._client.engine)
    llm.close()
    assert engine() is None
    assert [event.finish_reason for event in stream] == ["abort"]
    llm.close()


def test_a_dropped_llm_has_given_its_memory_back() -> None:
    """Also after a structured output, for which it has threads and processes of its own."""
    llm = LLM(BASE, num_threads=1, num_blocks=64)
    form = StructuredOutputs(choice=("a", "b"))
    assert llm.chat(ask("hello"), replace(GREEDY, structured_outputs=form))[0].text in ("a", "b")
    engine = weakref.ref(llm._client.engine)
    del llm
    assert engine() is None


def test_a_forked_process_is_told_that_the_engine_is_not_there(llm: LLM) -> None:
    try:
        with warnings.catch_warnings(action="ignore"):  # there are other threads
            child = os.fork()
    except OSError as error:
        pytest.skip(f"this process has too much memory to be forked here: {error}")
    if child == 0:
        signal.alarm(int(PATIENCE_S))
        try:
            llm.generate([1, 2, 3], GREEDY)
        except EngineDead:
            llm.close()
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0) == (child, 0)
    assert texts(llm.chat(ask("hello"), GREEDY)) == ["hello?"]


def test_first_adapters_are_read_while_the_engine_starts(
    make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    take, taken = AdapterReader._take, list[str]()

    def note(self: AdapterReader, source: AdapterSource, ahead: Any, ended: Any) -> None:
        if ahead is not None:
            taken.append(source.path)
        take(self, source, ahead, ended)

    monkeypatch.setattr(AdapterReader, "_take", note)
    (tmp_path / "sort").symlink_to(ADAPTERS["sort"])
    llm = make_llm(adapters={**ADAPTERS, "link": tmp_path / "sort"})
    paths = {str(path.resolve()) for path in ADAPTERS.values()}
    assert set(taken) == paths and len(taken) == len(paths), "each is handed out once"
    outputs = llm.chat([ask("world")] * 2, SamplingParams(max_tokens=40), ["sort", "link"])
    assert [o.text for o in outputs] == [answer("sort", "world")] * 2
    with pytest.raises(AdapterNotFound, match="no folder /nowhere"):
        make_llm(adapters={"sort": ADAPTERS["sort"], "none": "/nowhere"})

"""The server as its users meet it: a real process, the real `openai` client, real adapters."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
import tiny
from openai import AsyncOpenAI, OpenAI
from patience import PATIENCE_S
from serving import Server, until
from shared_server import LATE, MODELS
from tiny import ADAPTERS, LONG


def expected(model: str, word: str) -> str:
    return tiny.answer(None if model == "base" else model, word)


@pytest.fixture
def server(shared_server: Server) -> Server:
    return shared_server


async def ask(client: AsyncOpenAI, model: str, word: str) -> str:
    answer = await client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": word}], temperature=0, max_tokens=32
    )
    return answer.choices[0].message.content or ""


def prompt_of(word: str) -> str:
    return f"<|bos|><|user|>{word}<|end|><|assistant|>"


def ids_of(word: str) -> list[int]:
    return [1, 4, *(b + 6 for b in word.encode()), 2, 5]


def copy_adapter(name: str, to: Path, **config: object) -> Path:
    """An adapter's folder under another path, with some fields changed."""
    to.mkdir()
    for file in ADAPTERS[name].iterdir():
        (to / file.name).write_bytes(file.read_bytes())
    path = to / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    return to


def test_a_hangup_ends_neither_the_server_nor_its_engine(server: Server) -> None:
    """Nor does it renew anything here, which the log says."""
    for pid in (server.engine_pid(), server.process.pid):
        os.kill(pid, signal.SIGHUP)
    until(lambda: "SIGHUP renews --tenants and --audit-log" in server.log.read_text(), "not told")
    assert server.post("/v1/completions", model="base", prompt="x").status_code == 200


# -- answers ---------------------------------------------------------------------------------------


def test_every_adapter_and_the_base_answer_right_in_one_mixed_batch(server: Server) -> None:
    asked = [(m, w) for w in tiny.tasks.words(seed=11, n=6) for m in MODELS]

    async def run() -> list[str]:
        async with server.async_client() as client:
            return await asyncio.gather(*(ask(client, m, w) for m, w in asked))

    assert asyncio.run(run()) == [expected(m, w) for m, w in asked]


def test_chat_streams_the_same_text_with_usage(server: Server) -> None:
    stream = server.client.chat.completions.create(
        model="repeat",
        messages=[{"role": "user", "content": "planet"}],
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == "planet-planet"
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
    usage = chunks[-1].usage
    assert usage is not None and (usage.prompt_tokens, usage.completion_tokens) == (10, 14)


def test_async_streams_of_several_adapters_side_by_side(server: Server) -> None:
    async def read(client: AsyncOpenAI, model: str) -> str:
        stream = await client.completions.create(
            model=model, prompt=prompt_of("melody"), temperature=0, max_tokens=32, stream=True
        )
        return "".join([c.choices[0].text async for c in stream if c.choices])

    async def run() -> list[str]:
        async with server.async_client() as client:
            return await asyncio.gather(*(read(client, m) for m in MODELS))

    assert asyncio.run(run()) == [expected(m, "melody") for m in MODELS]


@pytest.mark.parametrize(
    "prompt",
    [prompt_of("planet"), ids_of("planet"), [prompt_of("planet"), prompt_of("river")],
     [ids_of("planet"), ids_of("river")]],
    ids=["text", "ids", "texts", "ids-batch"],
)  # fmt: skip
def test_completions_take_text_ids_and_batches(server: Server, prompt: Any) -> None:
    answer = server.client.completions.create(
        model="reverse", prompt=prompt, temperature=0, max_tokens=32
    )
    several = isinstance(prompt[0], str | list) and not isinstance(prompt, str)
    words = ["planet", "river"] if several else ["planet"]
    assert [c.text for c in answer.choices] == [w[::-1] for w in words]
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == sum(len(w) + 4 for w in words)
    assert answer.usage.completion_tokens == sum(len(w) + 1 for w in words)


def test_logprobs_of_chat_and_completions_agree(server: Server) -> None:
    chat = server.client.chat.completions.create(
        model="upper",
        messages=[{"role": "user", "content": "planet"}],
        temperature=0,
        logprobs=True,
        top_logprobs=2,
    )
    logprobs = chat.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None
    assert "".join(t.token for t in logprobs.content[:6]) == "PLANET"
    assert all(t.top_logprobs[0].logprob == t.logprob <= 0 for t in logprobs.content)
    done = server.client.completions.create(
        model="upper", prompt=prompt_of("planet"), temperature=0, max_tokens=7, logprobs=2
    )
    same = done.choices[0].logprobs
    assert same is not None and same.token_logprobs is not None
    assert same.token_logprobs == pytest.approx([t.logprob for t in logprobs.content], abs=1e-3)


def test_stop_strings_end_the_text(server: Server) -> None:
    answer = server.client.chat.completions.create(
        model="upper",
        messages=[{"role": "user", "content": "planet"}],
        temperature=0,
        stop=["NE"],
    )
    assert answer.choices[0].message.content == "PLA"
    assert answer.choices[0].finish_reason == "stop"


def test_seeded_sampling_repeats_also_among_other_requests(server: Server) -> None:
    async def sample(client: AsyncOpenAI, seed: int) -> str:
        answer = await client.completions.create(
            model="base",
            prompt=ids_of("planet"),
            temperature=1.5,
            seed=seed,
            max_tokens=24,
            extra_body={"ignore_eos": True},
        )
        return answer.choices[0].text

    async def run() -> None:
        async with server.async_client() as client:
            alone = await sample(client, 7)
            assert await sample(client, 7) == alone
            others = [sample(client, seed) for seed in range(100, 108)]
            among = await asyncio.gather(*others, sample(client, 7), ask(client, "sort", "planet"))
            assert among[-2:] == [alone, "aelnpt"]
            assert len(set(among[:8])) > 4

    asyncio.run(run())


# -- adapters under traffic ------------------------------------------------------------------------


def test_an_unknown_model_is_404(server: Server) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        server.client.completions.create(model="nobody", prompt="x")
    assert "nobody" in str(caught.value)


@contextmanager
def traffic(server: Server) -> Iterator[list[bool]]:
    """Requests that keep coming from a thread meanwhile; whether each was answered right."""
    right: list[bool] = []

    async def run(stop: asyncio.Event) -> None:
        async with server.async_client() as client:
            while not stop.is_set():
                texts = await asyncio.gather(*(ask(client, m, "window") for m in MODELS[:6]))
                right.extend(
                    text == expected(model, "window")
                    for model, text in zip(MODELS[:6], texts, strict=True)
                )

    with ThreadPoolExecutor(1) as pool:
        stop, loop = asyncio.Event(), asyncio.new_event_loop()
        running = pool.submit(lambda: loop.run_until_complete(run(stop)))
        try:
            yield right
        finally:
            loop.call_soon_threadsafe(stop.set)
            running.result(PATIENCE_S)
            loop.close()
    assert right and all(right)


def test_load_and_unload_under_traffic(server: Server) -> None:
    copy_adapter(LATE, server.root / LATE)
    with traffic(server) as answered:
        for _ in range(3):
            loaded = server.post("/v1/load_lora_adapter", lora_name=LATE, lora_path=LATE)
            assert loaded.status_code == 200, loaded.text
            assert LATE in [m.id for m in server.client.models.list()]
            answer = asyncio.run(_ask_once(server, LATE, "planet"))
            assert answer == expected(LATE, "planet")
            gone = server.post("/v1/unload_lora_adapter", lora_name=LATE)
            assert gone.status_code == 200, gone.text
            with pytest.raises(openai.NotFoundError):
                asyncio.run(_ask_once(server, LATE, "planet"))
        until(lambda: len(answered) > 6, "traffic stopped")
    assert server.post("/v1/unload_lora_adapter", lora_name=LATE).status_code == 404


async def _ask_once(server: Server, model: str, word: str) -> str:
    async with server.async_client() as client:
        return await ask(client, model, word)


def test_paths_outside_the_roots_are_refused(server: Server, tmp_path: Path) -> None:
    outside = copy_adapter("upper", tmp_path / "outside")
    (server.root / "link").symlink_to(outside)
    for path in (str(outside), "../outside", f"{server.root}/../x", "link", "/etc", "~/x"):
        answer = server.post("/v1/load_lora_adapter", lora_name="x", lora_path=path)
        assert answer.status_code in (400, 404), (path, answer.text)
        error = answer.json()["error"]
        assert error["param"] == "lora_path" and error["code"].startswith("adapter_"), error
        if path != "~/x":
            assert error["code"] == "adapter_path_refused", error
    assert "x" not in [m.id for m in server.client.models.list()]


def test_pickle_files_are_never_opened(server: Server) -> None:
    folder = copy_adapter("upper", server.root / "pickled")
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    answer = server.post("/v1/load_lora_adapter", lora_name="x", lora_path="pickled")
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "adapter_model.bin"


def test_a_broken_adapter_harms_nothing(server: Server) -> None:
    copy_adapter("upper", server.root / "dora", use_dora=True)
    cut = copy_adapter("upper", server.root / "cut") / "adapter_model.safetensors"
    cut.write_bytes(cut.read_bytes()[:-100])
    with traffic(server):
        for path, param in (("dora", "use_dora"), ("cut", "adapter_model.safetensors")):
            answer = server.post("/v1/load_lora_adapter", lora_name="x", lora_path=path)
            assert answer.status_code == 400, answer.text
            assert answer.json()["error"]["param"] == param
    with pytest.raises(openai.NotFoundError):
        server.client.completions.create(model="x", prompt="x")


# -- operation -------------------------------------------------------------------------------------


def _running(server: Server) -> float:
    return float(server.metrics()["vllm:num_requests_running"][0].value)


def _long_stream(client: OpenAI) -> Any:
    return client.completions.create(
        model="upper",
        prompt=ids_of("planet"),
        max_tokens=LONG,
        stream=True,
        extra_body={"ignore_eos": True},
    )


def test_a_client_that_leaves_frees_its_request(server: Server) -> None:
    before = {s.labels["finish_reason"]: s.value for s in _finished(server)}
    stream = _long_stream(server.client)
    first = next(iter(stream))
    assert first.choices[0].text and first.choices[0].finish_reason is None
    stream.close()
    until(lambda: _running(server) == 0, "the request went on")
    after = {s.labels["finish_reason"]: s.value for s in _finished(server)}
    assert after["abort"] == before.get("abort", 0) + 1


def _finished(server: Server) -> list[Any]:
    return server.metrics().get("weft:requests_finished", [])


def test_metrics_tell_the_adapters_in_one_series(server: Server) -> None:
    server.client.completions.create(model="upper", prompt="a", max_tokens=1)
    metrics = server.metrics()
    [info] = metrics["vllm:lora_requests_info"]
    resident = info.labels["running_lora_adapters"].split(",")
    assert "upper" in resident and LATE not in resident
    assert metrics["weft:engine_up"][0].value == 1

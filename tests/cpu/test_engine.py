"""EngineClient: one suite for the engine in a thread and the engine in its own process."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from engine_thread import start_in_process
from http_api import INFO
from patience import PATIENCE_S, in_time
from quick_start import quick_start
from tiny import ADAPTERS, BASE, LONG, answer, ask, long_base

from weft.core.adapters import AdapterRef, AdapterSource
from weft.core.config import engine_args
from weft.core.errors import (
    AdapterInvalid,
    AdapterNotFound,
    ConfigError,
    EngineDead,
    InvalidRequest,
)
from weft.core.messages import Command, Started, Tokens
from weft.core.requests import EngineRequest, TokenEvent, TokenLogprob
from weft.core.sampling import SamplingParams, StructuredOutputs
from weft.engine.engine import Engine
from weft.fleet import client as client_module
from weft.fleet import process as process_module
from weft.fleet.client import LinkClient
from weft.fleet.process import start_process
from weft.grammar.regex import FIELD
from weft.text import load_tokenizer

_folder = tempfile.TemporaryDirectory(prefix="weft-tests-")
ARGS = engine_args(str(long_base(Path(_folder.name) / "base")), num_threads=1, num_blocks=2000)
GREEDY = SamplingParams(max_tokens=24, temperature=0.0)
ENDLESS = SamplingParams(max_tokens=LONG, temperature=0.0, ignore_eos=True)
TOKENIZER = load_tokenizer(str(BASE))

Start = Callable[..., Awaitable[LinkClient]]
STARTS: list[Start] = [start_in_process, start_process]


class Bench:
    """A client and the event loop that it belongs to."""

    def __init__(self, start: Start) -> None:
        self._runner = asyncio.Runner()
        self.client = self._runner.run(start(ARGS))
        self.num_requests = 0

    def run(self, work: Awaitable[Any]) -> Any:
        return self._runner.run(in_time(work))

    def close(self) -> None:
        """Requests that run or have just been sent end with it, once."""
        self.run(idle(self.client))
        self.run(close_ends_open_streams(self.client))
        self._runner.close()


@pytest.fixture(scope="module", params=STARTS, ids=["thread", "process"])
def bench(request: pytest.FixtureRequest, engines: list[Engine]) -> Iterator[Bench]:
    with quick_start():
        made = Bench(request.param)
    yield made
    made.close()


@pytest.fixture(scope="module", autouse=True)
def engines() -> Iterator[list[Engine]]:
    """All engines that were started in a thread; they must keep the scheduler's invariants."""
    made: list[Engine] = []
    init = Engine.__init__

    def record(engine: Engine, *args: Any, **options: Any) -> None:
        init(engine, *args, **options)
        made.append(engine)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Engine, "__init__", record)
        yield made
    for engine in made:
        engine.check()
        assert not engine.scheduler.busy


_ids = iter(range(10**6))


def request_of(
    word: str = "hello",
    adapter: AdapterRef | None = None,
    params: SamplingParams = GREEDY,
) -> EngineRequest:
    return EngineRequest(f"r{next(_ids)}", TOKENIZER.chat(ask(word)), params, adapter, seed=0)


async def collect(client: LinkClient, request: EngineRequest) -> list[TokenEvent]:
    return [event async for event in client.generate(request)]


def text_of(events: list[TokenEvent]) -> str:
    """What was generated; the events must be those of one request that ended once."""
    assert [e.finish_reason is None for e in events] == [True] * (len(events) - 1) + [False]
    ids = [token for event in events for token in event.token_ids]
    return TOKENIZER.decode(ids, skip_special_tokens=True)


async def register(client: LinkClient, name: str, holder: str = "") -> AdapterRef:
    info = await client.hold(AdapterSource(str(ADAPTERS[name])), holder or name)
    assert info.path == str(ADAPTERS[name])
    return AdapterRef(name, 1, info.digest)


async def idle(client: LinkClient) -> None:
    """Nothing runs and nothing waits any more."""
    end = time.monotonic() + PATIENCE_S
    while True:
        stats = await client.stats()
        if (stats.num_running, stats.num_waiting, stats.kv_usage) == (0, 0, 0.0):
            return
        assert time.monotonic() < end, stats
        await asyncio.sleep(0.01)


# -- one client for many tests -----------------------------------------------------------------


def test_info(bench: Bench) -> None:
    info = bench.client.info
    assert bench.client.alive
    assert (info.model, info.architecture) == (ARGS.model.model, "LlamaForCausalLM")
    assert (info.dtype, info.num_blocks, info.vocab_size) == ("float32", 2000, 262)
    assert info.max_model_len == LONG + 100 and info.num_parameters > 10**6


def test_many_requests_at_once(bench: Bench) -> None:
    """All adapters and the base, side by side; each gets its own answer."""

    async def go() -> None:
        refs = await asyncio.gather(*(register(bench.client, name) for name in ADAPTERS))
        each = [*refs, None] * 3
        words = ["hello", "world", "spring"]
        runs = [collect(bench.client, request_of(words[i % 3], ref)) for i, ref in enumerate(each)]
        for i, events in enumerate(await asyncio.gather(*runs)):
            name = each[i].name if each[i] else None
            assert text_of(events) == answer(name, words[i % 3])
            assert events[-1].finish_reason == "stop"
        await asyncio.gather(*(bench.client.release(ref.digest, ref.name) for ref in refs))

    bench.run(go())


def test_events_carry_what_was_asked_for(bench: Bench) -> None:
    params = SamplingParams(max_tokens=3, temperature=0.0, logprobs=2)
    events = bench.run(collect(bench.client, request_of("hello", None, params)))
    assert text_of(events) == "hel" and events[-1].finish_reason == "length"
    logprobs = [lp for event in events for lp in event.logprobs]
    assert [len(lp.top) for lp in logprobs] == [2] * 3
    ids = [token for event in events for token in event.token_ids]
    assert [lp.top[0][0] for lp in logprobs] == ids
    (event,) = bench.run(
        collect(bench.client, request_of("hello", None, replace(GREEDY, stop_token_ids=[110])))
    )
    assert (event.token_ids, event.finish_reason, event.stop_reason) == ([110], "stop", 110)


def test_all_parameters_reach_the_engine(bench: Bench) -> None:
    """Those that are no plain values too: dicts, tuples of tuples, records."""
    request = request_of(
        params=SamplingParams(
            max_tokens=30,
            temperature=0.0,
            logit_bias={TOKENIZER.encode("q")[-1]: 50.0},
            structured_outputs=StructuredOutputs(regex="[a-z]{4}Z[0-9]"),
            prompt_logprobs=2,
            frequency_penalty=0.1,
        )
    )
    q, seven = (TOKENIZER.encode(c)[-1] for c in "q7")
    request = replace(request, bad_token_ids=((q, q), (seven,)))
    first, *others = events = bench.run(collect(bench.client, request))
    assert re.fullmatch("(q[a-z]){2}Z[0-689]", text_of(events)), text_of(events)
    assert events[-1].finish_reason == "stop"
    assert first.prompt_logprobs[0] is None and first.queue_s >= 0
    assert [len(lp.top) for lp in first.prompt_logprobs[1:]] == [2] * (len(request.prompt_ids) - 1)
    assert all(e.prompt_logprobs is None and e.queue_s is None for e in others)
    wrong = replace(request_of(), params=replace(GREEDY, stop_token_ids=(262,)))
    (event,) = bench.run(collect(bench.client, wrong))
    assert event.error is not None and event.error[2] == "stop_token_ids"


@pytest.mark.parametrize(
    "bench",
    [pytest.param(start_in_process, marks=pytest.mark.exhaustive), start_process],
    ids=["thread", "process"],
    indirect=True,
    scope="module",
)
def test_hostile_forms_harm_nobody(bench: Bench) -> None:
    """Those that would take for ever, and those whose masks would: a stream goes on, and a good
    form is served."""
    hostile = [StructuredOutputs(regex="a?" * n + "a" * n) for n in range(9000, 9003)]
    hostile += [StructuredOutputs(regex="(a|b)*?" * n) for n in (3000, 400)]

    def asking(form: StructuredOutputs, tenant: str) -> EngineRequest:
        params = replace(GREEDY, structured_outputs=form)
        return replace(request_of(params=params), tenant=tenant)

    async def go() -> None:
        num_tokens = 0

        async def stream() -> None:
            nonlocal num_tokens
            async for event in bench.client.generate(request_of(params=ENDLESS)):
                num_tokens += len(event.token_ids)

        victim = asyncio.create_task(stream())
        attacks = [
            asyncio.create_task(collect(bench.client, asking(form, "attacker"))) for form in hostile
        ]
        await asyncio.sleep(0)
        good = asking(StructuredOutputs(regex="[a-z]{3}[0-9]"), "victim")
        assert re.fullmatch("[a-z]{3}[0-9]", text_of(await collect(bench.client, good)))
        for events in await asyncio.gather(*attacks):
            error = events[-1].error
            assert error is not None and error[::2] == ("invalid_request_error", FIELD), error
        assert num_tokens > 20 and not victim.done()
        victim.cancel()
        await asyncio.wait([victim])

    bench.run(go())


def test_closing_the_iterator_aborts(bench: Bench) -> None:
    async def go() -> None:
        before = (await bench.client.stats()).finished
        async with aclosing(bench.client.generate(request_of(params=ENDLESS))) as stream:
            async for event in stream:
                assert event.finish_reason is None
                break
        await idle(bench.client)
        after = (await bench.client.stats()).finished
        assert after.get("abort", 0) == before.get("abort", 0) + 1
        assert {k: v for k, v in after.items() if k != "abort"} == {
            k: v for k, v in before.items() if k != "abort"
        }

    bench.run(go())


def test_cancelling_the_reader_aborts(bench: Bench) -> None:
    async def go() -> None:
        reader = asyncio.create_task(collect(bench.client, request_of(params=ENDLESS)))
        while (await bench.client.stats()).num_running == 0:
            await asyncio.sleep(0.001)
        reader.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reader
        await idle(bench.client)

    bench.run(go())


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"prompt_ids": []}, ("invalid_request_error", "prompt")),
        ({"prompt_ids": [1, 262]}, ("invalid_request_error", "prompt")),
        ({"prompt_ids": [1, 1 << 63]}, ("invalid_request_error", "prompt")),
        ({"prompt_ids": [1] * (LONG + 100)}, ("context_length_exceeded", "prompt")),
        ({"adapter": AdapterRef("x", 1, "ab" * 32)}, ("adapter_unavailable", "model")),
    ],
)
def test_a_refused_request_ends_at_once(
    bench: Bench, change: dict[str, Any], error: tuple[str, str]
) -> None:
    (event,) = bench.run(collect(bench.client, replace(request_of(), **change)))
    assert event.finish_reason == "error" and event.token_ids == []
    assert (event.error[0], event.error[2]) == error


def test_a_request_id_that_is_in_use(bench: Bench) -> None:
    """The second is refused, the first goes on; both are sent before either is answered."""

    async def go() -> None:
        request = request_of(params=replace(ENDLESS, max_tokens=200))
        first, second = await asyncio.gather(
            collect(bench.client, request),
            collect(bench.client, request),
            return_exceptions=True,
        )
        assert isinstance(second, InvalidRequest) and second.param == "request_id"
        assert not isinstance(first, BaseException)
        assert sum(len(event.token_ids) for event in first) == 200

    bench.run(go())


def test_register_errors_are_typed(bench: Bench, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(ADAPTERS["caesar"], tmp_path / "dora"))
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(config | {"use_dora": True}))

    async def go() -> None:
        with pytest.raises(AdapterNotFound) as missing:
            await bench.client.hold(AdapterSource(str(tmp_path / "nothing")), "x")
        assert missing.value.param == "lora_path"
        with pytest.raises(AdapterInvalid, match="use_dora") as invalid:
            await bench.client.hold(AdapterSource(str(folder)), "x")
        assert invalid.value.param == "use_dora"
        assert (await bench.client.stats()).host_adapters == ()

    bench.run(go())


def test_an_adapter_is_served_while_anybody_holds_it(bench: Bench) -> None:
    """To repeat a hold or a release changes nothing."""

    async def go() -> None:
        client = bench.client
        ref = await register(client, "upper")
        for holder in ("upper", "other"):
            assert await register(client, "upper", holder) == ref
        for holder in ("nobody", "other", "other", "upper"):
            assert text_of(await collect(client, request_of("hello", ref))) == "HELLO"
            assert (await client.stats()).resident_adapters == (ref.digest,)
            await client.release(ref.digest, holder)
        (event,) = await collect(client, request_of("hello", ref))
        assert event.error is not None and event.error[0] == "adapter_unavailable"
        await idle(client)
        stats = await client.stats()
        assert (stats.resident_adapters, stats.host_adapters, stats.adapter_bytes) == ((), (), 0)

    bench.run(go())


def test_a_release_lets_running_requests_end(bench: Bench) -> None:
    async def go() -> None:
        client = bench.client
        ref = await register(client, "upper")
        request = request_of("hello", ref, replace(ENDLESS, max_tokens=60))
        async with aclosing(client.generate(request)) as stream:
            seen = [await anext(stream)]
            await client.release(ref.digest, ref.name)
            (refused,) = await collect(client, request_of("hello", ref))
            assert refused.error is not None and refused.error[0] == "adapter_unavailable"
            seen += [event async for event in stream]
        assert (sum(len(e.token_ids) for e in seen), seen[-1].finish_reason) == (60, "length")
        end = time.monotonic() + PATIENCE_S
        while (await client.stats()).host_adapters and time.monotonic() < end:
            await asyncio.sleep(0.01)
        assert (await client.stats()).adapter_bytes == 0

    bench.run(go())


def test_stats(bench: Bench) -> None:
    async def go() -> None:
        before = await bench.client.stats()
        prompt = request_of("world").prompt_ids
        await collect(bench.client, request_of("world", params=replace(ENDLESS, max_tokens=7)))
        after = await bench.client.stats()
        assert after.prompt_tokens - before.prompt_tokens == len(prompt)
        assert after.generated_tokens - before.generated_tokens == 7
        assert after.steps > before.steps
        assert after.finished["length"] == before.finished.get("length", 0) + 1

    bench.run(go())


# -- the start and the end, each test with its own engine --------------------------------------


async def outcome(stream: AsyncIterator[TokenEvent]) -> str:
    """How a stream ends: its finish reason or the error; and it must end there."""
    last: TokenEvent | None = None
    try:
        async for event in stream:
            assert last is None or last.finish_reason is None, "an event after the last"
            last = event
    except EngineDead:
        assert last is None or last.finish_reason is None, "ended twice"
        return "dead"
    assert last is not None and last.finish_reason is not None, "ended without an end"
    return last.finish_reason


async def open_streams(client: LinkClient, count: int) -> list[asyncio.Task[str]]:
    """Readers of requests that all run."""
    streams = [client.generate(request_of(params=ENDLESS)) for _ in range(count)]
    for stream in streams:
        assert (await anext(stream)).finish_reason is None
    return [asyncio.create_task(outcome(stream)) for stream in streams]


async def assert_dead(client: LinkClient) -> None:
    assert not client.alive
    for call in (
        client.stats(),
        client.hold(AdapterSource(str(ADAPTERS["upper"])), "upper"),
        client.release("ab" * 32, "x"),
        collect(client, request_of()),
    ):
        with pytest.raises(EngineDead):
            await call


class Silence:
    """A link to nobody."""

    def send(self, command: Command) -> None:
        pass

    async def join(self, timeout_s: float) -> None:
        pass


async def read_late(after: Callable[[LinkClient], None], *events: TokenEvent) -> list[Any]:
    """What a reader gets that has not looked since the request's first event."""
    client = LinkClient()
    client.dispatch(Started(INFO))
    await client.start(Silence())
    stream = client.generate(replace(request_of(), request_id="r"))
    asyncio.get_running_loop().call_soon(client.dispatch, Tokens([events[0]]))
    found: list[Any] = [await anext(stream)]
    for event in events[1:]:
        client.dispatch(Tokens([event]))
    after(client)
    try:
        while True:
            found.append(await anext(stream))
    except StopAsyncIteration:
        pass
    except EngineDead as error:
        found.append(error)
    assert not client._streams
    return found


def test_who_reads_late_gets_all_tokens_at_once() -> None:
    """In one event, with all that the single ones said."""
    told = [TokenLogprob(-0.5, rank, [(rank, -0.5)]) for rank in (1, 2, 3)]
    first = TokenEvent("r", [], num_cached_tokens=16, queue_s=0.5)
    events = (
        TokenEvent("r", [7], [told[0]], num_cached_tokens=16),
        TokenEvent("r", [8, 9], told[1:]),
        TokenEvent("r", [2], finish_reason="stop", stop_reason=2),
    )
    got = asyncio.run(read_late(lambda client: None, first, *events))
    assert got == [first, TokenEvent("r", [7, 8, 9, 2], told, "stop", 2, 16)]


def test_who_reads_late_gets_tokens_before_an_error() -> None:
    first, *more = (TokenEvent("r", [token]) for token in (6, 7, 8))
    failed = TokenEvent("r", [], finish_reason="error", error=("no", "no", None))
    dead = EngineDead("gone")
    got = asyncio.run(read_late(lambda client: client.died(dead), first, *more, failed))
    assert got == [first, TokenEvent("r", [7, 8]), failed], "nothing after the end"
    assert asyncio.run(read_late(lambda client: client.died(dead), first, *more)) == [
        first,
        TokenEvent("r", [7, 8]),
        dead,
    ]


async def close_ends_open_streams(client: LinkClient) -> None:
    readers = await open_streams(client, 3)
    late = asyncio.create_task(collect(client, request_of(params=ENDLESS)))
    await asyncio.sleep(0)
    await client.close()
    assert set(await asyncio.gather(*readers)) <= {"abort", "dead"}
    (ended,) = await asyncio.gather(late, return_exceptions=True)
    assert isinstance(ended, EngineDead) or ended[-1].finish_reason == "abort"
    await assert_dead(client)
    await client.close()


@pytest.mark.usefixtures("quick_engines")
async def test_a_killed_process_ends_open_streams() -> None:
    """Streams and calls alike, also those that are sent before its death is known."""
    client = await start_process(ARGS)
    link: Any = client._link
    readers = await open_streams(client, 3)
    os.kill(link.pid, signal.SIGSTOP)  # so that the first call is not answered any more
    calls = [asyncio.create_task(client.stats())]
    await asyncio.sleep(0.05)
    os.kill(link.pid, signal.SIGKILL)
    time.sleep(0.1)  # the event loop does not see it yet, ZeroMQ does
    assert client.alive
    async with asyncio.timeout(PATIENCE_S):
        calls.append(asyncio.create_task(client.stats()))
        assert await outcome(client.generate(request_of())) == "dead"
        assert await asyncio.gather(*readers) == ["dead"] * 3
        for call in calls:
            with pytest.raises(EngineDead, match="exit code -9"):
                await call
    await assert_dead(client)
    await client.close()
    assert not link._folder.path.exists()


async def test_a_start_that_is_cancelled(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process ends by itself, without an engine, and nothing is left."""
    monkeypatch.setattr(client_module, "CLOSE_S", PATIENCE_S)
    monkeypatch.setattr(process_module, "END_S", PATIENCE_S)
    others = set(multiprocessing.active_children())
    starting = asyncio.create_task(start_process(ARGS))
    async with asyncio.timeout(PATIENCE_S):
        while not (begun := set(multiprocessing.active_children()) - others):
            await asyncio.sleep(0.01)
    (process,) = begun
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert not process.is_alive() and process.exitcode == 0
    assert not caplog.records


async def test_an_engine_that_fails_ends_open_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """An exception in its thread is told to everybody who waits."""
    client = await start_in_process(ARGS)
    readers = await open_streams(client, 2)

    def step(engine: Engine) -> None:
        for request_id in list(engine.scheduler._by_id):
            engine.scheduler.abort(request_id)
        raise RuntimeError("out of luck")

    monkeypatch.setattr(Engine, "step", step)
    async with asyncio.timeout(PATIENCE_S):
        assert await asyncio.gather(*readers) == ["dead"] * 2
    with pytest.raises(EngineDead, match="out of luck"):
        await client.stats()
    await client.close()


@pytest.mark.parametrize(
    ("start", "options", "param"),
    [
        (start_in_process, {"max_model_len": 513}, "max_model_len"),
        # test_cli.py has a server whose engine's process can't start.
        pytest.param(
            start_process, {"max_model_len": 513}, "max_model_len", marks=pytest.mark.exhaustive
        ),
    ],
    ids=["runner-thread", "runner-process"],
)
async def test_a_failed_start(
    start: Start, options: dict[str, int], param: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The typed error arrives, and nothing is left of the attempt."""
    clients: list[LinkClient] = []

    def make() -> LinkClient:
        clients.append(LinkClient())
        return clients[-1]

    monkeypatch.setattr(sys.modules[start.__module__], "LinkClient", make)
    with pytest.raises(ConfigError) as caught:
        await start(engine_args(str(BASE), num_threads=1, **options))
    assert caught.value.param == param
    (client,) = clients
    link: Any = client._link
    assert not client.alive
    if start is start_process:
        assert not link._process.is_alive() and not link._folder.path.exists()
    else:
        assert not link._thread.is_alive()

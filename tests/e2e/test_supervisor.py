"""The supervisor over fake engines, and over real processes that are killed."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import shutil
import signal
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from patience import PATIENCE_S, in_time, until
from tiny import ADAPTERS, BASE, LONG, answer, ask, long_base

from weft.core.adapters import AdapterInfo, AdapterRef, AdapterSource
from weft.core.config import EngineArgs, engine_args
from weft.core.errors import (
    AdapterConflict,
    AdapterNotFound,
    AdapterUnavailable,
    ConfigError,
    EngineDead,
    RequestRefused,
    WeftError,
    from_wire,
)
from weft.core.requests import EngineRequest, TokenEvent
from weft.core.sampling import SamplingParams
from weft.core.stats import EngineInfo, EngineStats
from weft.core.tenants import Caps, Tenant
from weft.fleet import supervisor, vitals
from weft.fleet.client import LinkClient
from weft.fleet.supervisor import Supervisor, start_supervised
from weft.text import load_tokenizer

ARGS = engine_args(str(BASE))
GREEDY = SamplingParams(max_tokens=24, temperature=0.0)
ENDLESS = SamplingParams(max_tokens=LONG, temperature=0.0, ignore_eos=True)


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(in_time(work))


async def outcome(stream: AsyncGenerator[TokenEvent, None]) -> WeftError | None:
    """The one terminal error of a stream, raised or as an event; None if it ended well."""
    last: TokenEvent | None = None
    try:
        async for event in stream:
            assert last is None or last.finish_reason is None, "an event after the last"
            last = event
    except EngineDead as error:
        assert last is None or last.finish_reason is None, "ended twice"
        return error
    assert last is not None and last.finish_reason is not None, "ended without an end"
    return from_wire(last.error) if last.error else None


# -- over fake engines -------------------------------------------------------------------------


class Fake:
    """An engine whose disk is `World.disk`; it dies when told so."""

    info: Any = EngineInfo("m", "a", "float32", "cpu", 64, 99, 8, 16, 4, 8, 100, 1)

    def __init__(self, world: World) -> None:
        self.world = world
        self.held: dict[str, dict[str, bool]] = {}
        """By digest: the pin of each holder."""
        self.checked: list[bool] = []
        """Whether what was held was said to be checked."""
        self.tenants: list[Tenant] = []
        self.asked = 0
        self.lost: list[EngineRequest] = []
        self.closed = False
        self._dead = asyncio.Event()

    @property
    def alive(self) -> bool:
        return not self._dead.is_set()

    def die(self) -> None:
        self.world.error = EngineDead("the fake is dead", killed=self.world.killed)
        self._dead.set()

    def died(self, error: WeftError) -> None:
        self.world.given_up.append(error.message)
        self.die()

    async def ended(self) -> WeftError:
        await self._dead.wait()
        return self.world.error

    async def _wait(self, work: Awaitable[Any]) -> Any:
        """The result of `work`, unless the engine dies first."""
        both = [asyncio.ensure_future(work), asyncio.ensure_future(self._dead.wait())]
        try:
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            if not self.alive:
                raise self.world.error
            return both[0].result()
        finally:
            for each in both:
                each.cancel()

    async def generate(self, request: EngineRequest) -> AsyncGenerator[TokenEvent, None]:
        if self.alive:
            self.lost.append(request)
        await self._wait(self.world.first_gate.wait())
        yield TokenEvent(request.request_id, [1])
        await self._wait(self.world.gate.wait())
        self.lost.remove(request)
        yield TokenEvent(request.request_id, [2], finish_reason="stop")

    async def hold(self, source: AdapterSource, holder: str, pinned: bool = False) -> AdapterInfo:
        await self._wait(self.world.gate.wait())
        digest = self.world.disk.get(source.path)
        if digest is None:
            raise AdapterNotFound(f"{source.path} is gone", "lora_path")
        if source.digest not in (None, digest):
            raise AdapterUnavailable(f"{source.path} changed", "lora_path")
        self.checked.append(source.checked)
        self.held.setdefault(digest, {})[holder] = pinned
        return AdapterInfo(digest, source.path, 4, 100, ("q_proj",), checked=True)

    async def release(self, digest: str, holder: str) -> None:
        await self._wait(asyncio.sleep(0))
        self.held.get(digest, {}).pop(holder, None)
        self.held = {digest: holders for digest, holders in self.held.items() if holders}

    async def set_tenants(self, tenants: Sequence[Tenant]) -> None:
        if not self.alive:
            raise EngineDead("the fake is dead")
        self.tenants = list(tenants)

    async def stats(self) -> EngineStats:
        self.asked += 1
        if self.world.gate.is_set() and self.alive:
            return EngineStats()  # at once, which no watch can take for silence
        return await self._wait(self.world.gate.wait()) and EngineStats()

    async def close(self) -> None:
        self.closed = True
        self.die()


class World:
    """Disk and engines of a supervisor. A start that is to fail raises what is in `failures`."""

    def __init__(self) -> None:
        self.disk = {"/a": "A", "/b": "B"}
        self.engines: list[Fake] = []
        self.failures: list[Exception] = []
        self.starts_s: list[float] = []
        self.given_up: list[str] = []
        self.killed = False
        """Whether engines that die were killed."""
        self.error = EngineDead("the fake is dead")
        self.gate = asyncio.Event()
        """Closed, holds and streams wait."""
        self.gate.set()
        self.first_gate = asyncio.Event()
        """Closed, requests wait for their first token."""
        self.first_gate.set()
        self.start_gate = asyncio.Event()
        self.start_gate.set()
        self.first: tuple[AdapterSource, ...] = ()
        """What the last engine was told that it would hold."""

    async def start(self, args: EngineArgs) -> Fake:
        self.starts_s.append(time.monotonic())
        self.first = args.first_adapters
        await self.start_gate.wait()
        if self.failures:
            raise self.failures.pop(0)
        self.engines.append(Fake(self))
        return self.engines[-1]

    @property
    def engine(self) -> Fake:
        return self.engines[-1]


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Callable[[Test], None]:
    """Runs a test over fake engines; afterwards none is left open."""
    monkeypatch.setattr(supervisor, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(supervisor, "MAX_PAUSE_S", 0.03)

    async def go(test: Test) -> None:
        world = World()
        client = await start_supervised(ARGS, world.start)
        await test(world, client)
        await client.close()
        assert not client.alive and all(engine.closed for engine in world.engines)
        await asyncio.sleep(0)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    return lambda test: run(go(test))


Test = Callable[[World, Supervisor], Coroutine[Any, Any, None]]


async def hold(client: Supervisor, path: str, holder: str = "", pinned: bool = False) -> None:
    """Hold what is in a folder, for the folder's name unless another holder is given."""
    await client.hold(AdapterSource(path), holder or path[1:], pinned)


def request_of(token: int) -> EngineRequest:
    return EngineRequest(f"r{token}", [token], GREEDY, seed=0)


def request_to(ref: AdapterRef | None = None) -> EngineRequest:
    return EngineRequest("r", [1], GREEDY, ref, seed=0)


def ref_of(digest: str) -> AdapterRef:
    return AdapterRef("x", 1, digest)


async def restarted(world: World, client: Supervisor) -> None:
    """Let the engine die, and wait for the next one."""
    count = client.restarts
    world.engine.die()
    assert not client.alive
    await until(lambda: client.restarts > count)
    assert client.alive and client.info is world.engine.info


def test_what_is_open_when_the_engine_dies(fake: Callable[[Test], None]) -> None:
    async def test(world: World, client: Supervisor) -> None:
        world.gate.clear()
        streams = [client.generate(request_to()) for _ in range(3)]
        assert [(await anext(s)).token_ids for s in streams] == [[1]] * 3
        calls = [asyncio.ensure_future(c) for c in (client.stats(), hold(client, "/a"))]
        await asyncio.sleep(0)
        world.start_gate.clear()
        world.engine.die()
        assert not client.alive
        for stream in streams:
            assert isinstance(await outcome(stream), EngineDead)
        for call in calls:
            with pytest.raises(EngineDead):
                await call
        await until(lambda: len(world.starts_s) == 2)
        assert world.engines[0].closed, "a new engine is started only when the old one is gone"
        assert isinstance(await outcome(client.generate(request_to())), EngineDead)
        for late in (client.stats(), hold(client, "/a")):
            with pytest.raises(EngineDead, match="started again"):
                await late
        world.gate.set()
        world.start_gate.set()
        await until(lambda: client.alive)
        assert client.restarts == 1 and not world.engine.held
        assert await outcome(client.generate(request_to())) is None

    fake(test)


def test_tenants_are_told_again(fake: Callable[[Test], None]) -> None:
    """Also those that were set while the engine was down."""

    async def test(world: World, client: Supervisor) -> None:
        first, second = [Tenant("a", 2.0)], [Tenant("b")]
        await client.set_tenants(first)
        assert world.engine.tenants == first
        await restarted(world, client)
        assert world.engine.tenants == first
        world.start_gate.clear()
        world.engine.die()
        await until(lambda: not client.alive)
        await client.set_tenants(second)
        world.start_gate.set()
        await until(lambda: client.alive)
        assert world.engine.tenants == second

    fake(test)


async def die_with(world: World, client: Supervisor, tokens: str) -> list[WeftError | None]:
    """Let the engine die while requests with these prompts are open; how each ended."""
    world.gate.clear()
    readers = [
        asyncio.ensure_future(outcome(client.generate(request_of(int(token))))) for token in tokens
    ]
    for _ in range(10):
        await asyncio.sleep(0)
    if not all(reader.done() for reader in readers):
        await restarted(world, client)
    world.gate.set()
    return await asyncio.gather(*readers)


def test_requests_that_engines_die_of_are_refused(fake: Callable[[Test], None]) -> None:
    async def test(world: World, client: Supervisor) -> None:
        assert all(isinstance(e, EngineDead) for e in await die_with(world, client, "123"))
        assert all(isinstance(e, EngineDead) for e in await die_with(world, client, "145"))
        [refused] = await die_with(world, client, "1")
        assert isinstance(refused, RequestRefused) and "prompt" in refused.message
        assert await outcome(client.generate(request_of(2))) is None
        world.killed = True
        for _ in range(3):
            assert all(isinstance(e, EngineDead) for e in await die_with(world, client, "67"))
        assert client.restarts == 5, "killed from outside, no request is to blame"
        assert await outcome(client.generate(request_of(6))) is None

    fake(test)


def test_who_may_be_to_blame_is_tried_alone(fake: Callable[[Test], None]) -> None:
    """Two were open at two deaths; only the one that was alone at the third is refused."""

    async def test(world: World, client: Supervisor) -> None:
        for _ in range(2):
            assert all(isinstance(e, EngineDead) for e in await die_with(world, client, "12"))
        world.first_gate.clear()
        assert all(isinstance(e, EngineDead) for e in await die_with(world, client, "123"))
        world.first_gate.set()
        assert isinstance(await outcome(client.generate(request_of(1))), RequestRefused)
        for token in (2, 3):
            assert await outcome(client.generate(request_of(token))) is None

    fake(test)


def test_holds_are_repeated(fake: Callable[[Test], None]) -> None:
    """Holders, their pins and releases are the same across engines."""

    async def test(world: World, client: Supervisor) -> None:
        world.disk["/other"] = "A"
        for path, pinned in (("/a", False), ("/other", True), ("/b", False)):
            await hold(client, path, pinned=pinned)
        expected = {"A": {"a": False, "other": True}, "B": {"b": False}}
        assert world.engine.held == expected
        await restarted(world, client)
        assert world.engine.held == expected
        assert world.engine.checked == [True] * 3
        for _ in range(2):
            await client.release("A", "a")
            assert world.engine.held == {"A": {"other": True}, "B": {"b": False}}
        await hold(client, "/a", "other")
        await restarted(world, client)
        assert world.engine.held == {"A": {"other": False}, "B": {"b": False}}
        await client.release("A", "other")
        await restarted(world, client)
        assert world.engine.held == {"B": {"b": False}}
        assert await outcome(client.generate(request_to(ref_of("B")))) is None

    fake(test)


def test_another_folder_serves_where_one_is_gone(fake: Callable[[Test], None]) -> None:
    async def test(world: World, client: Supervisor) -> None:
        world.disk["/other"] = "A"
        await hold(client, "/a")
        await hold(client, "/other")
        del world.disk["/other"]
        await restarted(world, client)
        assert world.engine.held == {"A": {"a": False, "other": False}}
        assert await outcome(client.generate(request_to(ref_of("A")))) is None

    fake(test)


@pytest.mark.parametrize(("now", "why"), [(None, "/a is gone"), ("C", "/a changed")])
def test_files_that_are_not_what_they_were(
    fake: Callable[[Test], None], caplog: pytest.LogCaptureFixture, now: str | None, why: str
) -> None:
    """Requests say so; the others are served; to hold it again heals it for all its holders."""

    async def test(world: World, client: Supervisor) -> None:
        await hold(client, "/a")
        await hold(client, "/a", "x", pinned=True)
        await hold(client, "/b")
        if now is None:
            del world.disk["/a"]
        else:
            world.disk["/a"] = now
        await restarted(world, client)
        assert world.engine.held == {"B": {"b": False}}
        error = await outcome(client.generate(request_to(ref_of("A"))))
        assert isinstance(error, AdapterUnavailable) and why in error.message
        assert await outcome(client.generate(request_to(ref_of("B")))) is None
        assert sum(why in record.message for record in caplog.records) == 1
        world.disk["/a"] = "A"
        await hold(client, "/a")
        assert await outcome(client.generate(request_to(ref_of("A")))) is None
        assert world.engine.held == {"A": {"a": False, "x": True}, "B": {"b": False}}

    fake(test)


def test_releasing_what_could_not_be_held_again(fake: Callable[[Test], None]) -> None:
    async def test(world: World, client: Supervisor) -> None:
        await hold(client, "/a")
        del world.disk["/a"]
        await restarted(world, client)
        await client.release("A", "a")
        assert await outcome(client.generate(request_to(ref_of("A")))) is None, "it is forgotten"
        world.disk["/a"] = "A"
        await restarted(world, client)
        assert not world.engine.held

    fake(test)


@pytest.mark.parametrize("when", ["dying", "down", "holding"])
def test_a_release_while_there_is_no_engine(fake: Callable[[Test], None], when: str) -> None:
    """It succeeds and holds, whenever it comes."""

    async def test(world: World, client: Supervisor) -> None:
        await hold(client, "/a")
        await hold(client, "/b")
        (world.gate if when == "holding" else world.start_gate).clear()
        world.engine.die()
        if when == "down":
            await until(lambda: len(world.starts_s) == 2)
        elif when == "holding":
            await until(lambda: len(world.engines) == 2)
            await asyncio.sleep(0.01)
            assert not client.alive, "its adapters are not there yet"
            assert isinstance(await outcome(client.generate(request_to())), EngineDead)
        await client.release("A", "a")
        world.gate.set()
        world.start_gate.set()
        await until(lambda: client.alive)
        assert world.engine.held == {"B": {"b": False}}

    fake(test)


def test_a_new_engine_is_told_what_it_will_hold(fake: Callable[[Test], None]) -> None:
    async def test(world: World, client: Supervisor) -> None:
        assert world.first == ()
        await hold(client, "/a")
        await hold(client, "/b")
        await restarted(world, client)
        assert [(source.path, source.digest) for source in world.first] == [
            ("/a", "A"),
            ("/b", "B"),
        ]
        await client.release("A", "a")
        await restarted(world, client)
        assert [source.path for source in world.first] == ["/b"]

    fake(test)


def test_a_release_just_before_holds_are_repeated(fake: Callable[[Test], None]) -> None:
    async def test(world: World, client: Supervisor) -> None:
        await hold(client, "/a")
        await hold(client, "/b")
        releases: list[asyncio.Future[None]] = []

        async def start(args: EngineArgs) -> Fake:
            releases.append(asyncio.ensure_future(client.release("A", "a")))
            return await world.start(args)

        client._start = start
        await restarted(world, client)
        await asyncio.gather(*releases)
        assert len(world.engines) == 2 and world.engine.held == {"B": {"b": False}}

    fake(test)


def test_starts_that_fail_are_repeated(
    fake: Callable[[Test], None], caplog: pytest.LogCaptureFixture
) -> None:
    """At once, then after pauses that grow up to a limit; each failure is one line."""

    async def test(world: World, client: Supervisor) -> None:
        world.failures = [ConfigError("no memory"), OSError("no files"), *[RuntimeError("no")] * 3]
        died_s = time.monotonic()
        await restarted(world, client)
        times_s = [died_s, *world.starts_s[1:]]
        pauses_s = [b - a for a, b in itertools.pairwise(times_s)]
        assert all(
            pause >= least
            for pause, least in zip(pauses_s, [0, 0.01, 0.02, 0.03, 0.03, 0.03], strict=True)
        )
        assert client.restarts == 1
        lines = [r.message for r in caplog.records if "could not be started" in r.message]
        assert len(lines) == 5 and "no memory" in lines[0] and "OSError: no files" in lines[1]

    fake(test)


def test_a_start_that_hangs_is_repeated(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(supervisor, "FIRST_PAUSE_S", 0.01)

    async def go() -> None:
        world = World()
        client = await start_supervised(ARGS, world.start, watchdog_s=0.05)
        world.start_gate.clear()
        world.engine.die()
        await until(lambda: len(world.starts_s) >= 3)
        assert not client.alive and len(world.engines) == 1
        world.start_gate.set()
        await until(lambda: client.alive)
        assert client.restarts == 1 and "it was not ready within" in caplog.text
        await client.close()

    run(go())


def test_an_engine_that_dies_while_holds_are_repeated(fake: Callable[[Test], None]) -> None:
    async def test(world: World, client: Supervisor) -> None:
        await hold(client, "/a")
        world.gate.clear()
        world.engine.die()
        await until(lambda: len(world.engines) == 2)
        world.engine.die()
        world.gate.set()
        await until(lambda: client.alive)
        assert len(world.engines) == 3 and world.engine.held == {"A": {"a": False}}
        assert client.restarts == 1

    fake(test)


def test_only_a_good_engine_is_started_again_at_once(
    fake: Callable[[Test], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that dies young is followed by a pause."""

    async def test(world: World, client: Supervisor) -> None:
        monkeypatch.setattr(supervisor, "MAX_PAUSE_S", 1000.0)  # however slow this machine is
        await restarted(world, client)
        died_s = time.monotonic()
        await restarted(world, client)
        assert world.starts_s[-1] - died_s >= 0.01
        assert client.restarts == 2

    fake(test)


def test_an_engine_that_lived_long_is_started_again_at_once(
    fake: Callable[[Test], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(world: World, client: Supervisor) -> None:
        monkeypatch.setattr(supervisor, "FIRST_PAUSE_S", 1000.0)
        monkeypatch.setattr(supervisor, "MAX_PAUSE_S", 1000.0)
        await restarted(world, client)  # the next pause would be long
        monkeypatch.setattr(supervisor, "MAX_PAUSE_S", 0.01)
        await asyncio.sleep(0.05)
        await restarted(world, client)

    fake(test)


def test_an_engine_that_hangs_is_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also while holds are repeated, but not while it answers. Nobody asks with a limit of 0."""
    monkeypatch.setattr(supervisor, "FIRST_PAUSE_S", 0.01)

    async def go() -> None:
        world, calm = World(), World()
        client = await start_supervised(ARGS, world.start, watchdog_s=0.5)
        trusting = await start_supervised(ARGS, calm.start, watchdog_s=0)
        await until(lambda: world.engine.asked >= 3)
        assert client.restarts == 0 and client.alive
        await hold(client, "/a")
        calm.gate.clear()
        world.gate.clear()
        stream = client.generate(request_to())
        assert (await anext(stream)).token_ids == [1]
        assert isinstance(await outcome(stream), EngineDead)
        await until(lambda: len(world.engines) >= 3)
        assert all(engine.closed for engine in world.engines[:-1])
        world.gate.set()
        await until(lambda: client.alive)
        assert world.engine.held == {"A": {"a": False}} and client.restarts == 1
        assert await outcome(client.generate(request_to())) is None
        assert trusting.alive and not trusting.restarts and not calm.engine.asked
        await client.close()
        await trusting.close()
        assert set(world.given_up) == {"no answer from the engine in 0.5 s"}

    run(go())


@pytest.mark.parametrize("when", ["up", "pausing", "starting", "holding"])
def test_close_in_every_phase(fake: Callable[[Test], None], when: str) -> None:
    async def test(world: World, client: Supervisor) -> None:
        await hold(client, "/a")
        if when == "pausing":
            world.failures = [ConfigError("no")] * 99
        elif when == "starting":
            world.start_gate.clear()
        elif when == "holding":
            world.gate.clear()
        if when != "up":
            world.engine.die()
            await until(lambda: len(world.starts_s) >= 2)
        await client.close()
        assert not client.alive
        error = await outcome(client.generate(request_to()))
        assert isinstance(error, EngineDead) and "stopped" in error.message
        await client.release("A", "a")
        starts = len(world.starts_s)
        await asyncio.sleep(0.05)
        assert len(world.starts_s) == starts

    fake(test)


def test_the_first_start_fails_as_it_is() -> None:
    async def go() -> None:
        world = World()
        world.failures = [ConfigError("no memory")]
        with pytest.raises(ConfigError, match="no memory"):
            await start_supervised(ARGS, world.start)
        assert len(world.starts_s) == 1

    run(go())


def test_a_hold_that_is_refused_is_not_remembered(
    fake: Callable[[Test], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(*_: object) -> AdapterInfo:
        raise AdapterConflict("too much is pinned", "pinned")

    async def test(world: World, client: Supervisor) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(Fake, "hold", refuse)
            with pytest.raises(AdapterConflict):
                await hold(client, "/a", pinned=True)
        await restarted(world, client)
        assert not world.engine.held

    fake(test)


Change = tuple[str, str, str, bool]
"""What happens ("hold", "fail", "release" or "restart"), to which folder and holder; the pin."""
CHANGES = st.tuples(
    st.sampled_from(["hold", "hold", "fail", "release", "release", "restart"]),
    st.sampled_from(["/a", "/other", "/b"]),
    st.sampled_from(["x", "y", "z"]),
    st.booleans(),
)


@settings(max_examples=60, deadline=None)
@given(changes=st.lists(CHANGES, max_size=25))
def test_an_engine_holds_what_survived(changes: list[Change]) -> None:
    """Whatever was held, released, refused and repeated in any order, and begun while an engine
    was down: each engine has just the holds that a fresh one would get."""

    async def go() -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(supervisor, "FIRST_PAUSE_S", 0.0)
            world = World()
            world.disk["/other"] = "A"
            client = await start_supervised(ARGS, world.start)
            held: dict[str, dict[str, bool]] = {"A": {}, "B": {}}
            for what, path, holder, pinned in changes:
                digest = world.disk[path]
                if what == "hold":
                    await hold(client, path, holder, pinned)
                    held[digest][holder] = pinned
                elif what == "fail":
                    with pytest.raises(AdapterNotFound):
                        await hold(client, "/nowhere", holder, pinned)
                elif what == "release":
                    await client.release(digest, holder)
                    held[digest].pop(holder, None)
                else:
                    world.start_gate.clear()
                    world.engine.die()
                    for lost in (digest, "A"):
                        with pytest.raises(EngineDead):
                            await hold(client, path, holder, pinned)
                        await client.release(lost, holder)
                        held[lost].pop(holder, None)
                    world.start_gate.set()
                    count = len(world.engines)
                    await until(lambda n=count: len(world.engines) > n and client.alive)
                expected = {digest: holders for digest, holders in held.items() if holders}
                assert world.engine.held == expected
            await client.close()

    run(go())


# -- over real processes -----------------------------------------------------------------------


@pytest.mark.usefixtures("quick_engines")
def test_a_killed_engine_comes_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed under 24 streams; it is back by itself, and its adapters answer as before, but for
    those whose files are not what they were. Then it hangs, and is closed while it is started."""
    caplog.set_level(logging.WARNING)
    tokenizer = load_tokenizer(str(BASE))
    ids = iter(range(10**6))

    def request(word: str, ref: AdapterRef | None, params: SamplingParams) -> EngineRequest:
        return EngineRequest(f"r{next(ids)}", tokenizer.chat(ask(word)), params, ref, seed=0)

    async def says(client: Supervisor, word: str, ref: AdapterRef | None) -> str:
        events = [event async for event in client.generate(request(word, ref, GREEDY))]
        assert events[-1].finish_reason == "stop"
        tokens = [token for event in events for token in event.token_ids]
        return tokenizer.decode(tokens, skip_special_tokens=True)

    async def go() -> None:
        folders = {name: shutil.copytree(ADAPTERS[name], tmp_path / name) for name in ADAPTERS}
        base = str(long_base(tmp_path / "base"))
        args = engine_args(base, num_threads=1, num_blocks=3000, adapter_cache_dir="none")
        client = await start_supervised(args, watchdog_s=PATIENCE_S)
        await client.set_tenants([Tenant("acme", 2.0, Caps(max_seats=3))])
        refs: dict[str, AdapterRef] = {}
        for name, folder in folders.items():
            source = AdapterSource(str(folder))
            info = await client.hold(source, name, pinned=name == "upper")
            refs[name] = AdapterRef(name, 1, info.digest)
        each = [*refs.values(), None]
        streams = [
            client.generate(request("hello", each[i % len(each)], ENDLESS)) for i in range(24)
        ]
        readers = [asyncio.create_task(outcome(stream)) for stream in streams]
        await until_running(client, 24)
        shutil.copytree(ADAPTERS["reverse"], folders["caesar"], dirs_exist_ok=True)
        shutil.rmtree(folders["sort"])

        end(client, signal.SIGKILL)
        async with asyncio.timeout(PATIENCE_S):
            errors = await asyncio.gather(*readers)
        assert all(isinstance(error, EngineDead) for error in errors)
        assert not client.alive
        assert isinstance(
            await outcome(client.generate(request("hello", None, GREEDY))), EngineDead
        )
        await until(lambda: client.alive)
        assert client.restarts == 1
        good = {name: ref for name, ref in refs.items() if name not in ("caesar", "sort")}
        texts = await asyncio.gather(*(says(client, "world", ref) for ref in good.values()))
        assert texts == [answer(name, "world") for name in good]
        assert await says(client, "world", None) == answer(None, "world")
        for name, why in (("caesar", "changed on disk"), ("sort", "not a folder")):
            error = await outcome(client.generate(request("world", refs[name], GREEDY)))
            assert isinstance(error, AdapterUnavailable) and why in error.message
        stats = await client.stats()
        assert stats.pinned_adapters == (refs["upper"].digest,)
        assert set(stats.host_adapters) == {ref.digest for ref in good.values()}
        shutil.copytree(ADAPTERS["sort"], folders["sort"])
        await client.hold(AdapterSource(str(folders["sort"])), "sort")
        assert await says(client, "world", refs["sort"]) == answer("sort", "world")

        assert not client.troubles
        monkeypatch.setattr(vitals, "HANG_S", 2.0)
        end(client, signal.SIGSTOP)
        await until(lambda: "no sign of life" in "".join(client.troubles))
        assert client.alive
        end(client, signal.SIGCONT)
        await until(lambda: not client.troubles)

        begin, begun = client._start, asyncio.Event()

        async def start(args: EngineArgs) -> LinkClient:
            begun.set()
            return await begin(args)

        client._start = start
        client._watchdog_s = 1.0
        end(client, signal.SIGSTOP)
        with client._watched(client._engine):  # the watch from before sleeps for long
            await until(lambda: not client.alive)
        assert client.troubles
        await begun.wait()
        assert client.restarts == 1, "it is being started"
        link: Any = client._engine
        await client.close()
        assert not client.alive and not link._link._folder.path.exists()

    run(go())
    lines = [record.message for record in caplog.records]
    assert sum("exit code -9" in line for line in lines) == 1
    assert sum("no answer from the engine in 1 s" in line for line in lines) == 1


async def until_running(client: Supervisor, count: int) -> None:
    while (await client.stats()).num_running < count:
        await asyncio.sleep(0.01)


def end(client: Supervisor, how: signal.Signals) -> None:
    engine: Any = client._engine
    os.kill(engine._link.pid, how)

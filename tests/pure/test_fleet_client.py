"""Streams over a fleet whose nodes die, hang, are cut off and drained: each reader gets each token
once, as if nothing had happened."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from functools import wraps
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from inspect import Signature, signature
from queue import SimpleQueue
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from lossy_fleet import INFO, LossyFleet, PretendedEngine, VirtualLoop, stream_of

from weft.core.adapters import AdapterRef, AdapterSource
from weft.core.errors import (
    AdapterUnavailable,
    EngineDead,
    RegistryUnavailable,
    RequestRefused,
    from_wire,
)
from weft.core.requests import EngineRequest, TokenEvent
from weft.core.sampling import SamplingParams
from weft.fleet.consolidate import SPARE, NodeLoad, loads_of
from weft.fleet.controller import Controller
from weft.fleet.fleet_client import FORGET_S, MAX_LOSSES, WAIT_S
from weft.fleet.view import FleetView
from weft.registry.labels import NodePin

DIGESTS = [f"{number:064x}" for number in (1 << 200, 2 << 200, 3 << 200)]
NUM_NODES = 3


@dataclass
class Reader:
    """Somebody who reads a stream."""

    request: EngineRequest
    events: list[TokenEvent] = field(default_factory=list)
    error: Exception | None = None
    left: bool = False
    task: asyncio.Task[None] | None = None

    async def read(self, fleet: LossyFleet) -> None:
        try:
            async with aclosing(fleet.client.generate(self.request)) as events:
                async for event in events:
                    self.events.append(event)
        except EngineDead as error:
            self.error = error

    @property
    def tokens(self) -> list[int]:
        return [token for event in self.events for token in event.token_ids]

    @property
    def ended(self) -> bool:
        return bool(self.events) and self.events[-1].finish_reason is not None


class FleetMachine(RuleBasedStateMachine):
    """At the end everything is healed, and every stream must be what it would have been."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = VirtualLoop()
        self.readers: list[Reader] = []

    def run(self, act: Callable[[], object] = lambda: None, seconds: float = 0.0) -> None:
        """Do something on the event loop, and whatever follows from it."""

        async def settle() -> None:
            done = act()
            if isinstance(done, Awaitable):
                await done
            for _ in range(10):
                await asyncio.sleep(0)
            if seconds:
                await asyncio.sleep(seconds)

        self.loop.run_until_complete(settle())

    @initialize(seed=st.integers(0, 1 << 30))
    def begin(self, seed: int) -> None:
        async def begin() -> None:
            self.fleet = LossyFleet(NUM_NODES, seed)
            for engine in self.fleet.engines:
                engine.begin()
                await self.fleet.join(engine)

        self.run(begin)
        for digest in DIGESTS[:2]:
            held = self.loop.create_task(
                self.fleet.client.hold(AdapterSource("/a", digest), f"name of {digest}")
            )
            while not held.done():
                self.run(self.carry_all)
            held.result()

    def carry_all(self) -> None:
        for link in list(self.fleet.links.values()):
            link.carry()

    @rule(
        length=st.integers(1, 12),
        adapter=st.sampled_from((None, *DIGESTS[:2])),
        logprobs=st.booleans(),
        seed=st.integers(0, 99),
    )
    def ask(self, length: int, adapter: str | None, logprobs: bool, seed: int) -> None:
        ref = None if adapter is None else AdapterRef("a", 1, adapter)
        params = SamplingParams(max_tokens=length, prompt_logprobs=1 if logprobs else None)
        name = f"r{len(self.readers)}"
        reader = Reader(EngineRequest(name, [1, 2, 3, seed], params, ref, seed=seed))
        reader.task = self.loop.create_task(reader.read(self.fleet))
        self.readers.append(reader)
        self.run()

    @precondition(lambda self: any(not reader.ended for reader in self.readers))
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        """A reader goes away."""
        reader = data.draw(st.sampled_from([r for r in self.readers if not r.ended]))
        reader.left = True
        self.run(reader.task.cancel)

    @rule(number=st.integers(0, NUM_NODES - 1), times=st.integers(1, 4))
    def step(self, number: int, times: int) -> None:
        for _ in range(times):
            self.fleet.engines[number].step()

    @rule(number=st.integers(0, NUM_NODES - 1), most=st.integers(1, 5))
    def carry(self, number: int, most: int) -> None:
        link = self.fleet.links.get(f"n{number}")
        if link is not None:
            self.run(lambda: link.carry(most))

    @rule(number=st.integers(0, NUM_NODES - 1))
    def report(self, number: int) -> None:
        self.fleet.engines[number].report()

    @rule(seconds=st.floats(0, 3))
    def wait(self, seconds: float) -> None:
        self.run(seconds=seconds)

    @rule(number=st.integers(0, NUM_NODES - 1), killed=st.just(True))
    def kill(self, number: int, killed: bool) -> None:
        """The node's engine dies, and begins anew."""
        engine = self.fleet.engines[number]
        engine.begin()
        if engine.name in self.fleet.links:
            self.run(lambda: self.fleet.lose(engine.name, "the engine died", killed))

    @rule(number=st.integers(0, NUM_NODES - 1))
    def cut(self, number: int) -> None:
        """The link is lost, while the engine goes on with what it has."""
        name = f"n{number}"
        if name in self.fleet.links:
            self.run(lambda: self.fleet.lose(name, "it gives no sign of life", True))

    @rule(number=st.integers(0, NUM_NODES - 1), most=st.integers(0, 3), side=st.booleans())
    def drop(self, number: int, most: int, side: bool) -> None:
        """The link carries a few messages more, loses those behind them of one direction, and the
        other end knows it before this one: what is sent from now on is lost."""
        link = self.fleet.links.get(f"n{number}")
        if link is not None and not link.cut:
            self.run(lambda: link.carry(most))
            (link.up if side else link.down).clear()
            link.cut, link.engine.link, link.engine.running = True, None, {}

    @rule(number=st.integers(0, NUM_NODES - 1), away=st.booleans())
    def registry(self, number: int, away: bool) -> None:
        """A node can't reach the registry, or can again."""
        self.fleet.engines[number].registry_away = away

    @rule(number=st.integers(0, NUM_NODES - 1), draining=st.booleans(), idle=st.booleans())
    def drain(self, number: int, draining: bool, idle: bool) -> None:
        engine = self.fleet.engines[number]
        engine.draining, engine.idle = draining, idle
        engine.report()
        link = self.fleet.links.get(engine.name)
        if link is not None:
            self.run(link.carry)

    @rule()
    def hear_late(self) -> None:
        """What was said on links that are given up still comes, and comes once more."""
        for link in self.fleet.old:
            link.up.extend(tuple(link.up))
            self.run(link.carry)

    @rule(number=st.integers(0, NUM_NODES - 1))
    def join(self, number: int) -> None:
        engine = self.fleet.engines[number]
        if engine.name not in self.fleet.links:
            engine.running = {}  # those of the old link ended with it
            self.run(lambda: self.fleet.join(engine))

    @rule(number=st.integers(0, NUM_NODES - 1), digest=st.sampled_from(DIGESTS[:2]))
    def forget(self, number: int, digest: str) -> None:
        """A node loses an adapter that it was to hold."""
        engine = self.fleet.engines[number]
        engine.held = {each for each in engine.held if each[0] != digest}

    @invariant()
    def sound(self) -> None:
        if not hasattr(self, "fleet"):
            return
        self.fleet.client.check()
        for reader in self.readers:
            assert reader.tokens == stream_of(reader.request)[: len(reader.tokens)]
            assert all(event.request_id == reader.request.request_id for event in reader.events)
            assert sum(event.prompt_logprobs is not None for event in reader.events) <= 1
            assert sum(event.queue_s is not None for event in reader.events) <= 1

    def teardown(self) -> None:
        try:
            if hasattr(self, "fleet"):
                self.heal()
        finally:
            self.run(self.stop)
            self.loop.close()

    async def stop(self) -> None:
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def heal(self) -> None:
        for engine in self.fleet.engines:
            engine.draining = engine.idle = engine.registry_away = False
            if engine.name in self.fleet.links and self.fleet.links[engine.name].cut:
                self.cut(int(engine.name[1:]))
            self.join(int(engine.name[1:]))
            engine.report()
        open_ones = [r for r in self.readers if not r.left]
        for _ in range(400):
            if all(reader.task.done() for reader in open_ones):
                break
            for engine in self.fleet.engines:
                engine.step()
                engine.report()
            self.run(self.carry_all, seconds=0.06)
        for reader in open_ones:
            if isinstance(reader.error, EngineDead):  # there was no node for long
                assert "no node" in str(reader.error)
                continue
            last = reader.events[-1].error
            if last is not None and isinstance(from_wire(last), RegistryUnavailable):  # likewise
                continue
            assert reader.tokens == stream_of(reader.request), reader.request
            assert reader.events[-1].finish_reason == "length"
            wanted = reader.request.params.prompt_logprobs is not None
            assert sum(event.prompt_logprobs is not None for event in reader.events) == wanted
        self.run(self.fleet.client.close)
        self.fleet.client.check()


TestFleet = FleetMachine.TestCase
TestFleet.settings = settings(max_examples=15, stateful_step_count=40, deadline=None)


@pytest.mark.exhaustive
class TestFleetAtLength(FleetMachine.TestCase):
    settings = settings(max_examples=2000, stateful_step_count=80, deadline=None)


def in_fleet(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Makes a test of a coroutine, which gets a fleet whose nodes are all up, in virtual time."""

    async def run(**others: object) -> None:
        fleet = LossyFleet(NUM_NODES, seed=1)
        for engine in fleet.engines:
            engine.begin()
            await fleet.join(engine)
        await test(fleet, **others)
        await fleet.client.close()
        fleet.client.check()

    @wraps(test)
    def found(**others: object) -> None:
        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            runner.run(run(**others))

    _, *parameters = signature(test).parameters.values()
    found.__signature__ = Signature(parameters)  # pytest asks it which fixtures are wanted
    return found


async def settle(fleet: LossyFleet, steps: int = 1) -> None:
    """Let what is under way arrive, and the engines make some tokens."""
    for _ in range(steps):
        for engine in fleet.engines:
            engine.step()
            engine.report()
        for link in list(fleet.links.values()):
            link.carry()
        await asyncio.sleep(0.06)


async def hold(fleet: LossyFleet, source: AdapterSource, pinned: bool = False) -> None:
    held = asyncio.create_task(fleet.client.hold(source, "name", pinned))
    await settle(fleet, 4)
    await held


def asked(length: int, adapter: str | None = None) -> EngineRequest:
    ref = None if adapter is None else AdapterRef("a", 1, adapter)
    return EngineRequest("r", [1, 2, 3], SamplingParams(max_tokens=length), ref, seed=3)


def begun(fleet: LossyFleet, request: EngineRequest) -> Reader:
    reader = Reader(request)
    reader.task = asyncio.create_task(reader.read(fleet))
    return reader


def where(fleet: LossyFleet) -> list[str]:
    return [engine.name for engine in fleet.engines if engine.running]


@in_fleet
async def test_what_two_engines_died_of_is_refused(fleet: LossyFleet) -> None:
    reader = begun(fleet, asked(100))
    for _ in range(2):
        await settle(fleet, 2)
        (name,) = where(fleet)
        next(engine for engine in fleet.engines if engine.name == name).begin()
        fleet.lose(name, "the engine process ended with exit code 1", killed=False)
    await reader.task
    last = reader.events[-1]
    assert last.error is not None and isinstance(from_wire(last.error), RequestRefused)
    assert not where(fleet)


@pytest.mark.parametrize("slip", ["missing", "twice"])
@pytest.mark.parametrize("read_at_once", [False, True])
@in_fleet
async def test_tokens_that_are_missing_or_come_twice_are_noticed(
    fleet: LossyFleet, slip: str, read_at_once: bool
) -> None:
    """The request begins anew from the output that it has, whether its reader is behind or not."""
    reader = begun(fleet, asked(60))
    await settle(fleet, 3)
    (name,) = where(fleet)
    engine = next(engine for engine in fleet.engines if engine.name == name)
    up = fleet.links[name].up
    for _ in range(3):
        engine.step()
    if slip == "missing":
        del up[1]
    else:
        up.insert(1, up[1])
    while up:
        fleet.links[name].carry(1 if read_at_once else 3)
        await asyncio.sleep(0.01)
    await settle(fleet, 100)
    assert reader.tokens == stream_of(reader.request)
    assert fleet.client.figures.losses == 1
    assert "missing" in fleet.client.explain("r")[-1]["why"]


@in_fleet
async def test_a_drained_node_is_empty_at_once_and_takes_nothing(fleet: LossyFleet) -> None:
    reader = begun(fleet, asked(60))
    await settle(fleet, 3)
    (name,) = where(fleet)
    fleet.client.drain(name)
    await settle(fleet, 3)
    (other,) = where(fleet)
    assert other != name and fleet.client.figures.moves == 1
    assert fleet.client.explain("r")[-1]["node"] == other
    described = {each["node"]: each["state"] for each in fleet.client.describe()}
    assert described[name] == "draining"
    await settle(fleet, 100)
    assert reader.tokens == stream_of(reader.request)


@in_fleet
async def test_a_node_that_was_lost_is_listed_until_it_is_back(fleet: LossyFleet) -> None:
    name = next(iter(fleet.client.nodes))

    def down() -> dict[str, object]:
        found = fleet.client.describe()
        return {str(each["node"]): each["since"] for each in found if each["state"] == "down"}

    fleet.lose(name, "cut", killed=True)
    assert down().keys() == fleet.client.measure().lost_at.keys() == {name}
    assert datetime.now(UTC) - datetime.fromisoformat(str(down()[name])) < timedelta(minutes=1)
    await fleet.join(next(each for each in fleet.engines if each.name == name))
    assert not down()


@in_fleet
async def test_only_losses_are_counted_against_a_request(fleet: LossyFleet) -> None:
    """However often it was moved, it goes on when its node is lost."""
    reader = begun(fleet, asked(300))
    for _ in range(MAX_LOSSES + 5):
        await settle(fleet, 2)
        (name,) = where(fleet)
        fleet.client.drain(name)
        await settle(fleet, 2)
        fleet.client.drain(name, False)
    (name,) = where(fleet)
    fleet.lose(name, "the link is cut", killed=True)
    await settle(fleet, 300)
    assert reader.tokens == stream_of(reader.request)
    assert fleet.client.figures.moves > MAX_LOSSES and fleet.client.figures.losses == 1


@pytest.fixture
def one_resumes_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft.fleet.fleet_client.MAX_RESUMING", 1)


@pytest.mark.usefixtures("one_resumes_at_a_time")
@in_fleet
async def test_who_lost_a_node_before_it_could_move_away_stays_where_it_went(
    fleet: LossyFleet,
) -> None:
    first, *others = fleet.engines
    for engine in others:
        fleet.lose(engine.name, "it ends", killed=True)
    readers = [begun(fleet, replace(asked(100), request_id=f"r{i}")) for i in range(6)]
    await settle(fleet, 3)
    assert where(fleet) == [first.name] and len(first.running) == 6
    for engine in others:
        engine.begin()
        await fleet.join(engine)
    fleet.client.drain(first.name)
    first.report()
    fleet.links[first.name].carry()
    await asyncio.sleep(0)
    first.begin()
    fleet.lose(first.name, "it ends", killed=True)
    await settle(fleet, 200)
    assert all(reader.tokens == stream_of(reader.request) for reader in readers)
    assert fleet.client.figures.moves + fleet.client.figures.losses == 6


@pytest.mark.parametrize("closing", [False, True])
@in_fleet
async def test_a_request_that_moves_and_finds_no_node_ends(
    fleet: LossyFleet, closing: bool
) -> None:
    reader = begun(fleet, asked(60))
    await settle(fleet, 3)
    (name,) = where(fleet)
    fleet.client.drain(name)
    engine = next(engine for engine in fleet.engines if engine.name == name)
    engine.report()
    fleet.links[name].carry()
    for each in list(fleet.links):
        fleet.lose(each, "it ends", killed=True)
    await asyncio.sleep(0.2)
    if closing:
        await fleet.client.close()
    await asyncio.sleep(1.0 if closing else 2 * WAIT_S)
    assert isinstance(reader.error, EngineDead)
    assert fleet.client.figures.moves == 1


@pytest.mark.parametrize(
    ("other", "named"),
    [
        ({"weights": "0123456789abcdef"}, "with weights 0123456789abcdef"),
        ({"quantization": "int4"}, "quantized to int4"),
        ({"dtype": "bfloat16"}, "in bfloat16"),
    ],
)
@in_fleet
async def test_a_node_with_another_base_is_not_used(
    fleet: LossyFleet, other: dict[str, str], named: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Such as another version of the base in the same shape, from which other tokens come."""
    first = fleet.engines[0]
    fleet.lose(first.name, "it ends", killed=True)
    first.begin()
    await fleet.join(first, replace(INFO, **other))
    assert first.name not in fleet.client.nodes
    assert f"node {first.name} is not used: it serves Tiny" in caplog.text
    assert named in caplog.text.partition("and this fleet")[0]


@in_fleet
async def test_requests_go_to_nodes_whose_context_has_room_for_them(fleet: LossyFleet) -> None:
    """Contexts differ with the memory of the nodes' devices."""
    short, other, long = fleet.engines
    for engine in (short, other):
        fleet.lose(engine.name, "it begins anew", killed=True)
        engine.context = 10
        engine.begin()
        await fleet.join(engine)
    readers = [begun(fleet, replace(asked(40), request_id=f"r{i}", seed=i)) for i in range(9)]
    await settle(fleet, 4)
    assert where(fleet) == [long.name]
    fleet.client.drain(long.name)
    await settle(fleet, 60)
    assert all(reader.tokens == stream_of(reader.request) for reader in readers)
    fleet.client.drain(long.name, False)
    whole = asked(INFO.max_model_len - 3)
    fleet.client.drain(long.name)
    await settle(fleet, 2)
    reader = begun(fleet, whole)
    await settle(fleet, 20)
    assert reader.ended and len(reader.tokens) == 7, "it may end with a node's own context"
    fleet.lose(long.name, "it ends", killed=True)
    late = begun(fleet, replace(asked(40), request_id="late"))
    await settle(fleet, 120)
    assert isinstance(late.error, EngineDead) and "no room" in str(late.error)


@in_fleet
async def test_a_node_that_is_away_for_long_is_forgotten(fleet: LossyFleet) -> None:
    first, second = fleet.engines[:2]
    for engine in (first, second):
        fleet.lose(engine.name, "it ends", killed=True)
    await fleet.join(second)
    view = fleet.client.router.view
    assert first.name in {node.name for node in view.nodes.values()}
    await asyncio.sleep(2 * FORGET_S)
    assert {node.name for node in view.nodes.values()} == fleet.client.nodes.keys()
    await fleet.join(first)
    reader = begun(fleet, asked(5))
    await settle(fleet, 30)
    assert reader.tokens == stream_of(reader.request)


@in_fleet
async def test_who_lost_its_memory_to_others_goes_where_there_is_room(fleet: LossyFleet) -> None:
    """The youngest first; nobody goes where there is no more room than here."""
    first, *others = fleet.engines
    for engine in others:
        engine.idle = True
    await settle(fleet, 2)
    readers = [begun(fleet, replace(asked(90), request_id=f"r{k}")) for k in range(3)]
    await settle(fleet, 3)
    for engine in others:
        engine.idle, engine.kv_usage = False, 0.95
    _, *stranded = first.running
    first.stranded = tuple(stranded)
    await settle(fleet, 3)
    assert where(fleet) == [first.name], "no node has room"
    others[0].kv_usage, first.stranded = 0.5, ()
    await settle(fleet, 2)
    first.stranded = tuple(stranded)
    await settle(fleet, 1)
    first.stranded = ()
    await settle(fleet, 3)
    assert [len(engine.running) for engine in fleet.engines] == [2, 1, 0]
    assert fleet.client.explain("r2")[-1]["why"] == "its node was short of memory"
    await settle(fleet, 100)
    assert all(reader.tokens == stream_of(reader.request) for reader in readers)


@in_fleet
async def test_a_long_request_that_fits_nowhere_holds_up_no_short_one(fleet: LossyFleet) -> None:
    """The youngest of those that lost their memory is too long for the other nodes."""
    first, *others = fleet.engines
    for engine in others:
        engine.idle = True
    await settle(fleet, 2)
    info = fleet.client.nodes[first.name].info
    long = [1, 2, 3] * (info.num_blocks * info.block_size // 6)
    asks = [asked(90), asked(90), replace(asked(90), prompt_ids=long)]
    readers = [begun(fleet, replace(ask, request_id=f"r{k}")) for k, ask in enumerate(asks)]
    await settle(fleet, 3)
    for engine in others:
        engine.idle, engine.kv_usage = False, 0.5
    await settle(fleet, 2)
    first.stranded = tuple(first.running)[1:]
    await settle(fleet, 1)
    first.stranded = ()
    await settle(fleet, 3)
    assert fleet.client.explain("r1")[-1]["why"] == "its node was short of memory"
    assert len(fleet.client.explain("r2")) == 1
    await settle(fleet, 100)
    assert all(reader.tokens == stream_of(reader.request) for reader in readers)


@in_fleet
async def test_who_left_for_want_of_memory_comes_back_if_there_is_no_other_node(
    fleet: LossyFleet,
) -> None:
    reader = begun(fleet, asked(90))
    await settle(fleet, 3)
    (name,) = where(fleet)
    source = next(engine for engine in fleet.engines if engine.name == name)
    source.stranded = tuple(source.running)
    source.report()
    fleet.links[name].carry()
    source.stranded = ()
    for engine in fleet.engines:
        if engine is not source:
            fleet.lose(engine.name, "it gives no sign of life", killed=True)
    await settle(fleet, 5)
    assert where(fleet) == [name]
    await settle(fleet, 100)
    assert reader.tokens == stream_of(reader.request)


def states(fleet: LossyFleet) -> Counter[str]:
    return Counter(str(each["state"]) for each in fleet.client.describe())


@in_fleet
async def test_few_requests_end_up_on_few_nodes_and_more_on_more(fleet: LossyFleet) -> None:
    for engine in fleet.engines:
        engine.controller = fleet.client.process
    controller = Controller(fleet.client, target=0.5)
    readers = [begun(fleet, asked(400))]
    await settle(fleet, 120)
    assert states(fleet) == {"up": 1, "idle": 2} and len(where(fleet)) == 1
    assert fleet.client.figures.wanted_replicas == 1 + SPARE
    readers += [begun(fleet, replace(asked(80), request_id=f"r{k}")) for k in range(6)]
    await settle(fleet, 10)
    assert states(fleet) == {"up": 3}
    assert fleet.client.figures.wanted_replicas == 3 + SPARE
    await settle(fleet, 50)  # until they are warm
    readers += [begun(fleet, replace(asked(80), request_id=f"s{k}")) for k in range(4)]
    await settle(fleet, 5)
    assert len(where(fleet)) == 3
    await settle(fleet, 400)
    assert all(reader.tokens == stream_of(reader.request) for reader in readers)
    await controller.close()


@in_fleet
async def test_one_process_decides_and_the_next_one_begins_with_what_nodes_were_told(
    fleet: LossyFleet,
) -> None:
    first, second, _ = fleet.engines
    first.controller, second.controller = "another", fleet.client.process
    second.idle = True
    controller = Controller(fleet.client, target=0.5)
    await settle(fleet, 120)
    assert fleet.client.figures.wanted_replicas is None and states(fleet)["idle"] == 1
    first.begin()
    fleet.lose(first.name, "the engine died", killed=True)
    await settle(fleet, 10)
    assert fleet.client.figures.wanted_replicas is not None
    assert second.idle and states(fleet) == {"idle": 1, "up": 1, "down": 1}
    await controller.close()


@in_fleet
async def test_a_controller_goes_on_after_an_error(
    fleet: LossyFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    errors, prefetched = [RuntimeError("one"), RuntimeError("two")], []

    def loads(view: FleetView) -> list[NodeLoad]:
        if errors:
            raise errors.pop()
        return loads_of(view)

    async def prefetch(*args: object) -> None:
        prefetched.append(args)
        raise RuntimeError

    monkeypatch.setattr("weft.fleet.controller.loads_of", loads)
    monkeypatch.setattr(fleet.client.adapters, "prefetch", prefetch)
    for engine in fleet.engines:
        engine.controller = fleet.client.process
    controller = Controller(fleet.client)
    await settle(fleet, 100)
    assert fleet.client.figures.wanted_replicas == 1 + SPARE and len(prefetched) > 1
    await controller.close()


@in_fleet
async def test_idle_nodes_serve_again_when_nobody_wants_them_idle(fleet: LossyFleet) -> None:
    for engine in fleet.engines:
        engine.controller, engine.idle = fleet.client.process, True
    controller = Controller(fleet.client)
    await settle(fleet, 10)
    assert states(fleet) == {"up": 3}
    await controller.close()


@in_fleet
async def test_a_hot_adapter_comes_to_a_second_node_ahead_of_requests(fleet: LossyFleet) -> None:
    """That node is told which ones have it, to get it from there."""
    controller = Controller(fleet.client)
    source = AdapterSource("/a", DIGESTS[0])
    await hold(fleet, source)
    reader = begun(fleet, asked(90, DIGESTS[0]))
    await settle(fleet, 60)
    assert sum(bool(engine.held) for engine in fleet.engines) > 1
    (first,) = (engine for engine in fleet.engines if engine.sources[:1] == [source])
    for other in fleet.engines:
        if other is not first and other.sources:
            assert fleet.links[first.name].address in other.sources[0].peers
    assert len(where(fleet)) <= 1, "its request did not go there"
    await settle(fleet, 60)
    assert reader.tokens == stream_of(reader.request)
    await controller.close()


@in_fleet
async def test_labels_say_which_nodes_keep_an_adapter(fleet: LossyFleet) -> None:
    """It is pinned there whatever its load, only they serve it, and a request that none of them
    takes ends with the label's name. Without the label, all nodes serve it again."""
    placed, digest = fleet.client.adapters, DIGESTS[0]
    placed.pins = {digest: NodePin(("n1", "n2"), 0)}
    controller = Controller(fleet.client)
    await hold(fleet, AdapterSource("/a", digest))
    await settle(fleet, 60)
    n0, n1, n2 = fleet.engines
    assert n1.pinned == n2.pinned == {digest} and not n0.sources
    (shown,) = fleet.client.pins()
    assert shown == {
        "adapters": ["name"], "labels": "weft.nodes=n1,n2", "on": ["n1", "n2"], "missing": 0
    }  # fmt: skip
    reader = begun(fleet, asked(40, digest))
    for _ in range(3):
        await settle(fleet, 3)
        (name,) = where(fleet)
        assert name != "n0"
        fleet.client.drain(name)
        await settle(fleet, 3)
        fleet.client.drain(name, False)
    assert fleet.client.explain("r")[0]["pins"] == "weft.nodes=n1,n2"
    for name in ("n1", "n2"):
        fleet.client.drain(name)
    await settle(fleet, 60)
    assert reader.tokens == stream_of(reader.request), "drained nodes serve what no other may"
    for name in ("n1", "n2"):
        fleet.lose(name, "it ends", killed=True)
    refused = begun(fleet, asked(5, digest))
    await settle(fleet, 120)
    assert refused.events[-1].error is not None
    error = from_wire(refused.events[-1].error)
    assert isinstance(error, AdapterUnavailable) and "weft.nodes lets only n1, n2" in str(error)
    placed.pins = {}
    reader = begun(fleet, asked(5, digest))
    await settle(fleet, 60)
    assert reader.tokens == stream_of(reader.request)
    for engine in (n1, n2):
        engine.begin()
        await fleet.join(engine)
    await settle(fleet, 60)
    assert not (n1.pinned or n2.pinned or fleet.client.pins())
    await controller.close()


@in_fleet
async def test_adapters_are_kept_on_nodes_with_certain_labels(fleet: LossyFleet) -> None:
    """A node that comes later and has the labels keeps the adapter too, and if no such node is
    left, the request ends with the labels' names."""

    async def begin(engine: PretendedEngine, **labels: str) -> None:
        fleet.lose(engine.name, "it begins anew", killed=True)
        engine.labels = labels
        engine.begin()
        await fleet.join(engine)

    n0, n1, n2 = fleet.engines
    await begin(n1, gpu="h200", zone="a")
    await begin(n2, gpu="h200", zone="b")
    await settle(fleet, 10)
    shown = {each["node"]: each["labels"] for each in fleet.client.describe()}
    assert shown == {"n0": {}, "n1": n1.labels, "n2": n2.labels}

    placed, digest = fleet.client.adapters, DIGESTS[0]
    placed.pins = {digest: NodePin(labels={"gpu": "h200", "zone": "a"})}
    controller = Controller(fleet.client)
    await hold(fleet, AdapterSource("/a", digest))
    await settle(fleet, 56)
    assert n1.pinned == {digest} and not (n0.sources or n2.sources)
    (pin,) = fleet.client.pins()
    assert (pin["labels"], pin["on"]) == ("weft.node-labels=gpu=h200,zone=a", ["n1"])
    reader = begun(fleet, asked(20, digest))
    await settle(fleet, 3)
    assert where(fleet) == ["n1"]
    await begin(n2, gpu="h200", zone="a", rack="7")
    await settle(fleet, 60)
    assert n2.pinned == {digest} and fleet.client.pins()[0]["missing"] == 0
    assert reader.tokens == stream_of(reader.request)

    placed.pins = {digest: NodePin(labels={"gpu": "h200"}, replicas=1)}
    await settle(fleet, 60)
    assert sorted(map(len, (n0.pinned, n1.pinned, n2.pinned))) == [0, 0, 1] and not n0.pinned
    for engine in (n1, n2):
        fleet.lose(engine.name, "it ends", killed=True)
    refused = begun(fleet, asked(5, digest))
    await settle(fleet, 120)
    assert refused.events[-1].error is not None
    error = from_wire(refused.events[-1].error)
    assert isinstance(error, AdapterUnavailable)
    assert "weft.node-labels=gpu=h200 lets only nodes with these labels" in str(error)
    await controller.close()


@in_fleet
async def test_an_adapter_is_kept_on_as_many_nodes_as_its_label_says(fleet: LossyFleet) -> None:
    placed, digest = fleet.client.adapters, DIGESTS[0]
    placed.pins = {digest: NodePin(replicas=2)}
    controller = Controller(fleet.client)
    await hold(fleet, AdapterSource("/a", digest))
    await settle(fleet, 60)
    keeping = [engine.name for engine in fleet.engines if engine.pinned]
    assert len(keeping) == 2 and fleet.client.pins()[0]["missing"] == 0
    fleet.lose(keeping[0], "it ends", killed=True)
    await settle(fleet, 60)
    assert fleet.client.pins()[0]["on"] == sorted(
        engine.name for engine in fleet.engines if engine.name != keeping[0]
    )
    placed.pins = {digest: NodePin(replicas=4)}
    await settle(fleet, 60)
    assert fleet.client.pins()[0]["missing"] == 2
    await controller.close()


@in_fleet
async def test_the_webhook_is_told_how_many_nodes_are_wanted(fleet: LossyFleet) -> None:
    """Each change once; what could not be told is told again."""
    told: SimpleQueue[Any] = SimpleQueue()

    answers = ["503", "no HTTP at all"]

    class Hook(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            how = answers.pop() if answers else "204"
            if how.isdecimal():
                self.send_response(int(how))
                self.end_headers()
            else:
                self.wfile.write(how.encode())
            if how == "204":
                told.put(body)

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Hook)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    for engine in fleet.engines:
        engine.controller = fleet.client.process
    controller = Controller(fleet.client, None, f"http://127.0.0.1:{server.server_port}")
    while told.empty():
        await settle(fleet, 1)
        await asyncio.to_thread(time.sleep, 0.002)  # the clock here is not the server's
    await controller.close()
    server.shutdown()
    server.server_close()
    assert told.get() == {"wanted_replicas": 1 + SPARE, "nodes": {"up": 3}}


@in_fleet
async def test_requests_go_where_their_adapter_can_be_had(fleet: LossyFleet) -> None:
    """A node that can't read it is passed over; if none can, the request ends with that error."""
    source = AdapterSource("/a", DIGESTS[0])
    await hold(fleet, source)
    for engine in fleet.engines[:2]:
        engine.refuses, engine.held = {DIGESTS[0]}, set()
    fleet.engines[2].held = set()
    for node in fleet.client.nodes.values():
        node.held.clear()
    reader = begun(fleet, asked(5, DIGESTS[0]))
    await settle(fleet, 30)
    assert reader.tokens == stream_of(reader.request)
    fleet.engines[2].refuses = {DIGESTS[0]}
    fleet.client.nodes["n2"].held.clear()
    reader = begun(fleet, asked(5, DIGESTS[0]))
    await settle(fleet, 30)
    error = reader.events[-1].error
    assert error is not None and isinstance(from_wire(error), AdapterUnavailable)


@in_fleet
async def test_a_request_waits_while_the_registry_is_away(fleet: LossyFleet) -> None:
    await hold(fleet, AdapterSource("/a", DIGESTS[0]))
    for engine in fleet.engines:
        engine.held, engine.registry_away = set(), True
        fleet.client.nodes[engine.name].held.clear()
    reader = begun(fleet, asked(5, DIGESTS[0]))
    await settle(fleet, 30)
    assert not reader.events
    fleet.engines[1].registry_away = False
    await settle(fleet, 30)
    assert reader.tokens == stream_of(reader.request)
    late = begun(fleet, asked(5, DIGESTS[0]))
    fleet.engines[1].begin()
    fleet.client.nodes["n1"].held.clear()
    fleet.engines[1].registry_away = True
    await settle(fleet, 200)
    error = late.events[-1].error
    assert error is not None and isinstance(from_wire(error), RegistryUnavailable)


@in_fleet
async def test_pinned_adapters_are_everywhere_and_are_released_everywhere(
    fleet: LossyFleet,
) -> None:
    source = AdapterSource("/a", DIGESTS[0])
    await hold(fleet, source, pinned=True)
    assert all(engine.held for engine in fleet.engines)
    released = asyncio.create_task(fleet.client.release(DIGESTS[0], "name"))
    await settle(fleet, 4)
    await released
    assert not any(engine.held for engine in fleet.engines)


@in_fleet
async def test_content_that_one_name_leaves_while_another_takes_it_stays(fleet: LossyFleet) -> None:
    """Nodes know all names of a process as one, so they let go of it after they have held it."""
    client, digest = fleet.client, DIGESTS[0]
    one = asyncio.create_task(client.hold(AdapterSource("/a", digest), "one"))
    await settle(fleet, 4)
    await one
    two = asyncio.create_task(client.hold(AdapterSource("/b", digest), "two"))
    await asyncio.sleep(0)  # it is on its way
    leaving = asyncio.create_task(client.release(digest, "one"))
    await settle(fleet, 8)
    await asyncio.gather(two, leaving)
    for engine in fleet.engines:
        held = next(node for node in client.nodes.values() if node.name == engine.name).held
        assert held == {digest for digest, _ in engine.held}
    assert any(engine.held for engine in fleet.engines)

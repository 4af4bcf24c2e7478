"""Links between nodes over TCP, in one process: who is let in, and what silence leads to."""

from __future__ import annotations

import asyncio
import errno
import socket
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
import zmq.asyncio
from hypothesis import example, given
from hypothesis import strategies as st
from lossy_fleet import INFO
from patience import PATIENCE_S, until

from weft.core.adapters import AdapterInfo, AdapterSource
from weft.core.config import EngineArgs, ModelArgs
from weft.core.errors import ConfigError, EngineDead, WeftError
from weft.core.folders import Folder
from weft.core.load import EngineLoad
from weft.core.messages import Abort, Command, Report, Started, Submit, Tokens
from weft.core.requests import EngineRequest, FollowingTokens, TokenEvent, TokenLogprob
from weft.core.sampling import SamplingParams
from weft.fleet.client import GROUP, LinkClient
from weft.fleet.curve import FleetKey, read_fleet_key
from weft.fleet.fleet_client import FleetClient
from weft.fleet.listener import Session
from weft.fleet.members import Members, read_addresses
from weft.fleet.node import OwnNode
from weft.fleet.patience import Patience
from weft.fleet.process import ProcessLink
from weft.fleet.reports import REPORT_S
from weft.fleet.start import FleetArgs, start_fleet
from weft.fleet.supervisor import start_supervised
from weft.fleet.tcp import TcpLink
from weft.fleet.wire import DOWN, REPORTS, Hello
from weft.registry.blobs import Blobs
from weft.registry.contents import Contents
from weft.registry.stores import DirectoryStore


class PretendedSupervisor:
    """What a node knows of its engine, which answers when the test says so."""

    def __init__(self) -> None:
        self.info = INFO
        self.alive = True
        self.restarts = 0
        self.troubles: list[str] = []
        self.death: WeftError | None = None
        self.load = EngineLoad(max_seats=4)
        self.on_pulse: Callable[[], None] = lambda: None
        self.open: dict[str, Callable[[TokenEvent | WeftError], None]] = {}
        self.held: set[tuple[str, str]] = set()

    def is_suspect(self, request: EngineRequest) -> bool:
        return False

    def follow(self, request: EngineRequest, put: Callable[[TokenEvent | WeftError], None]) -> None:
        self.open[request.request_id] = put

    def leave(self, request_id: str, error: WeftError) -> None:
        self.open.pop(request_id, None)

    async def hold(self, source: AdapterSource, holder: str, pinned: bool) -> AdapterInfo:
        self.held.add((source.digest or "", holder))
        return AdapterInfo(source.digest or "", source.path, 8, 100, ())

    async def release(self, digest: str, holder: str) -> None:
        self.held.discard((digest, holder))

    async def close(self) -> None: ...


def key_of(tmp_path: Path, text: str) -> FleetKey:
    path = tmp_path / "key"
    path.write_text(text)
    return read_fleet_key(path)


def link_key(tmp_path: Path) -> FleetKey:
    return key_of(tmp_path, "our secret " * 5)


async def same(source: AdapterSource) -> AdapterSource:
    return source


@asynccontextmanager
async def linked(
    tmp_path: Path,
    other: str | None = None,
    host: str = "127.0.0.1",
    engine: PretendedSupervisor | None = None,
) -> AsyncIterator[tuple[PretendedSupervisor, OwnNode, LinkClient, TcpLink]]:
    """A node, and a client with a link to it that is not started. `other`: the client's key."""
    engine = engine or PretendedSupervisor()
    own = OwnNode("a", engine, f"{host}:0", link_key(tmp_path), same, Contents(None))
    context, client = zmq.asyncio.Context(), LinkClient()
    address = f"{host}:{own.listener.port}"
    key = key_of(tmp_path, other) if other else link_key(tmp_path)
    link = TcpLink(context, address, key, "me", client, Patience(), "node b")
    try:
        yield engine, own, client, link
    finally:
        await client.close()
        await link.join(0)
        await own.close()
        own.listener.check()
        context.term()


def asked(name: str, in_groups: bool = False) -> EngineRequest:
    return EngineRequest(name, [1, 2], SamplingParams(), seed=1, in_groups=in_groups)


async def started(engine: PretendedSupervisor, client: LinkClient, link: TcpLink) -> None:
    starting = asyncio.create_task(client.start(link))
    while not starting.done():
        engine.on_pulse()
        await asyncio.sleep(REPORT_S / 5)
    await starting


async def test_requests_run_over_a_link_until_the_engine_dies(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "weft.fleet.node")
    async with linked(tmp_path) as (engine, own, client, link):
        await started(engine, client, link)
        assert link.node == "a" and client.info == INFO
        await until(lambda: link.report is not None)
        info = await client.hold(AdapterSource("/x", "ab"), "name")
        assert info.digest == "ab" and engine.held == {("ab", "me/name")}
        events = client.generate(asked("r"))
        first = asyncio.create_task(anext(events))
        await until(lambda: "r" in engine.open)
        engine.open["r"](TokenEvent("r", [7]))
        assert (await first).token_ids == [7]
        own.drain(True)
        await until(lambda: link.report is not None and link.report.draining)
        assert "this node takes no more requests" in caplog.text
        engine.alive, engine.death = False, EngineDead("exit code 1")
        engine.on_pulse()
        with pytest.raises(EngineDead, match="exit code 1"):
            await anext(events)
        assert not engine.open and own.report is None


async def test_what_a_client_does_not_ask_for_again_is_released(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new link begins with nothing, so nobody would release what was held over the old one."""
    async with linked(tmp_path) as (engine, _, client, link):
        await started(engine, client, link)
        for digest in ("ab", "cd"):
            await client.hold(AdapterSource("/x", digest), "name")
        await client.close()
        context, client = zmq.asyncio.Context(), LinkClient()
        link = TcpLink(context, link.address, link_key(tmp_path), "me", client, Patience())
        await started(engine, client, link)
        await client.hold(AdapterSource("/x", "ab"), "name")
        assert len(engine.held) == 2, "it might have been cut off only"
        monkeypatch.setattr("weft.fleet.listener.KEPT_S", 0.0)
        await until(lambda: engine.held == {("ab", "me/name")})
        engine.alive, engine.death = False, EngineDead("exit code 1")
        engine.on_pulse()
        await until(lambda: not engine.held)  # else the next engine is told to hold it
        await client.close()
        context.term()


async def test_a_suspect_whose_client_leaves_is_not_tried_any_more(tmp_path: Path) -> None:
    """It may wait for its turn until then, and an engine would die of it for nobody."""

    class Suspecting(PretendedSupervisor):
        waiting = 0

        def is_suspect(self, request: EngineRequest) -> bool:
            return True

        async def generate(self, request: EngineRequest) -> AsyncGenerator[TokenEvent, None]:
            self.waiting += 1
            try:
                await asyncio.sleep(PATIENCE_S)
                yield TokenEvent(request.request_id, [1])
            finally:
                self.waiting -= 1

    engine = Suspecting()
    async with linked(tmp_path, engine=engine) as (_, _own, client, link):
        await started(engine, client, link)
        readers = [asyncio.create_task(anext(client.generate(asked(name)))) for name in "ab"]
        await until(lambda: engine.waiting == 2)
        readers[0].cancel()
        await until(lambda: engine.waiting == 1)
        await client.close()
        await until(lambda: engine.waiting == 0)
        await asyncio.gather(*readers, return_exceptions=True)


def refused() -> bytes:
    """A request that can't be made of what the message says, as from another version of Weft."""
    params = SamplingParams(max_tokens=99)
    said = DOWN.encode(Submit(EngineRequest("r", [1, 2], params, seed=1)))
    return said.replace(b"max_tokens\x63", b"max_tokens\x00")


@pytest.mark.parametrize("parts", [[refused()], [b"\xc1"], [b"", b""]])
async def test_who_is_not_understood_is_dropped_and_heard_again_over_a_new_link(
    parts: list[bytes], tmp_path: Path
) -> None:
    async with linked(tmp_path) as (engine, own, client, link):
        await started(engine, client, link)
        await link._socket.send_multipart(parts)
        await until(lambda: not own.listener.clients)
        link._put(Hello("me"))
        await until(lambda: own.listener.clients == {"me"})


async def test_silent_nodes_are_dropped_though_one_could_not_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("weft.fleet.listener.MAX_SILENT", 1)
    async with linked(tmp_path) as (engine, own, client, link):
        await started(engine, client, link)
        drop, errors = own.listener._drop, [RuntimeError()]

        def drop_next_time(session: Session) -> None:
            if errors:
                raise errors.pop()
            drop(session)

        monkeypatch.setattr(own.listener, "_drop", drop_next_time)
        await until(lambda: not own.listener.clients)
    assert "node b has said nothing for 0 s; its requests are ended here" in caplog.text


@pytest.mark.parametrize("content", [b"\xc1", b"\x92\xa5Later\x80", b"\x92\xa7Welcome\x80"])
async def test_a_link_ends_whose_message_is_not_understood(content: bytes, tmp_path: Path) -> None:
    """As one of another version of Weft."""
    async with linked(tmp_path) as (engine, own, client, link):
        await started(engine, client, link)
        (session,) = own.listener._sessions.values()
        own.listener._send(session, content)
        async with asyncio.timeout(PATIENCE_S):
            error = await client.ended()
        assert "node a sends what is not understood here, as another version" in error.message


class SilentLink:
    """A link on which nothing comes but what a test dispatches."""

    def __init__(self) -> None:
        self.sent: list[Command] = []
        self.broken_for: LinkClient | None = None
        """Who is to learn with the next command that the link is broken."""

    def send(self, command: Command) -> None:
        if self.broken_for is not None:
            self.broken_for.died(EngineDead("it takes no messages"))
        self.sent.append(command)

    async def join(self, timeout_s: float) -> None: ...


@pytest.mark.parametrize("followed", [False, True])
async def test_a_request_that_finds_the_link_broken_ends_with_that(followed: bool) -> None:
    client, link = LinkClient(), SilentLink()
    client.dispatch(Started(INFO))
    await client.start(link)
    link.broken_for = client
    if followed:
        got: list[TokenEvent | WeftError] = []
        client.follow(asked("r"), got.append)
        assert [str(each) for each in got] == ["it takes no messages"]
    else:
        with pytest.raises(EngineDead, match="takes no messages"):
            async with asyncio.timeout(PATIENCE_S):
                await anext(client.generate(asked("r")))


HAPPENINGS = ("a token", "the reader's turn", "it is left", "the engine dies", "the last token")


@given(st.lists(st.sampled_from(HAPPENINGS), max_size=12), st.booleans())
@example(["the reader's turn", "a token", "it is left", "a token"], False)
@example(["the reader's turn", "a token", "the engine dies", "a token", "a token"], False)
def test_a_stream_is_what_came_before_its_end_however_late_it_is_read(
    happened: list[str], in_groups: bool
) -> None:
    """An error ends it too, and what an engine says after that is nobody's."""

    async def test() -> None:
        client, link = LinkClient(), SilentLink()
        client.dispatch(Started(INFO))
        await client.start(link)
        got: list[int | str] = []

        async def read() -> None:
            try:
                async for event in client.generate(asked("r", in_groups)):
                    got.extend(event.token_ids)
            except EngineDead as error:
                got.append(error.message)

        reading = asyncio.create_task(read())
        await asyncio.sleep(0)
        wanted: list[int | str] = []
        ends: list[str] = []
        for number, what in enumerate([*happened, "the last token"]):
            match what:
                case "a token" | "the last token":
                    reason = "length" if what == "the last token" else None
                    client.dispatch(Tokens([TokenEvent("r", [number], finish_reason=reason)]))
                    wanted += [] if ends else [number]
                case "it is left":
                    client.leave("r", EngineDead(what))
                    wanted += [] if ends else [what]
                case "the engine dies":
                    client.died(EngineDead(what))
                    wanted += [] if ends else [what]
                case _:
                    await asyncio.sleep(0)
                    continue
            ends += [] if what == "a token" else [what]
        await reading
        assert got == wanted
        assert (Abort("r") in link.sent) == (ends[0] == "it is left")

    asyncio.run(test())


def test_tokens_that_follow_are_one_record_of_what_events_say() -> None:
    """Also over a link, and without those of some requests."""
    told = TokenLogprob(-0.5, 2, [(7, -0.25), (4, -0.5)])
    following = FollowingTokens(
        ["a", "b", "c"], [3, 4, 5], [0, 16, 0], [9, 40, 2], [None, told, None]
    )
    first = TokenEvent("d", [6], queue_s=0.5)
    a, b, c = (
        TokenEvent("a", [3], num_tokens=11),
        TokenEvent("b", [4], [told], num_cached_tokens=16, num_tokens=42),
        TokenEvent("c", [5], num_tokens=4),
    )
    for tokens, events in [
        (Tokens([first], following), [first, a, b, c]),
        (Tokens([], following.without([0, 2])), [b]),
        (Tokens([], following._replace(logprobs=None).without([1])), [a, c]),
        (Tokens([first]), [first]),
    ]:
        sent = REPORTS.decode(REPORTS.encode(tokens))
        assert isinstance(sent, Tokens) and list(sent) == list(tokens) == events
        assert sent
    assert not Tokens([])


@pytest.mark.parametrize(
    ("in_groups", "sizes"), [(False, [1] * 40), (True, [1, GROUP, GROUP, 39 - 2 * GROUP])]
)
async def test_a_reader_of_groups_is_woken_for_the_first_token_and_then_for_many(
    in_groups: bool, sizes: list[int]
) -> None:
    """The last token is never waited for."""
    client = LinkClient()
    client.dispatch(Started(INFO))
    await client.start(SilentLink())
    got: list[list[int]] = []

    async def read() -> None:
        got.extend([e.token_ids async for e in client.generate(asked("r", in_groups))])

    reading = asyncio.create_task(read())
    for number in range(40):
        await asyncio.sleep(0)
        reason = "length" if number == 39 else None
        client.dispatch(Tokens([TokenEvent("r", [number], finish_reason=reason)]))
        await asyncio.sleep(0)
    await reading
    assert [len(ids) for ids in got] == sizes
    assert [token for ids in got for token in ids] == [*range(40)]


async def test_silence_is_taken_for_a_hang_and_only_by_those_who_listen(tmp_path: Path) -> None:
    """The node ends what it has for a client that is silent."""
    async with linked(tmp_path) as (engine, own, client, link):
        await started(engine, client, link)
        events = client.generate(asked("r"))
        waiting = asyncio.create_task(anext(events))
        await until(lambda: "r" in engine.open)
        await asyncio.sleep(10 * REPORT_S)  # nobody ticks: nobody is blamed
        assert client.alive
        for _ in range(10):
            link.tick()
        with pytest.raises(EngineDead, match="sign of life"):
            await waiting
        await until(lambda: not engine.open)
        for _ in range(10):
            own.tick()
        assert own.report is None


async def test_a_closed_link_is_seen_at_once(tmp_path: Path) -> None:
    async with linked(tmp_path) as (engine, own, client, link):
        await started(engine, client, link)
        await own.listener.close()
        async with asyncio.timeout(PATIENCE_S):
            assert isinstance(await client.ended(), EngineDead)


async def test_a_link_whose_end_is_cancelled_holds_up_nothing(tmp_path: Path) -> None:
    context = zmq.asyncio.Context()
    key = key_of(tmp_path, "secret " * 8)
    link = TcpLink(context, "127.0.0.1:1", key, "me", LinkClient(), Patience())
    ending = asyncio.create_task(link.join(0))
    await asyncio.sleep(0)
    ending.cancel()
    await asyncio.gather(ending, return_exceptions=True)
    assert link._socket.closed and link._monitor.closed
    context.term()


async def test_nobody_is_let_in_without_the_key(tmp_path: Path) -> None:
    async with linked(tmp_path, "another secret " * 5) as (engine, _, client, link):
        with suppress(EngineDead):
            async with asyncio.timeout(10 * REPORT_S):
                await started(engine, client, link)
        assert not link.node and link.report is None


async def test_an_address_at_which_no_node_answers_is_named_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As when that node has another key."""
    monkeypatch.setattr("weft.fleet.members.RETRY_S", 0.01)
    monkeypatch.setattr("weft.fleet.members.MAX_RETRY_S", 0.02)
    tries = []

    def link(*args: Any) -> TcpLink:
        tries.append(args)
        return TcpLink(*args)

    monkeypatch.setattr("weft.fleet.members.TcpLink", link)
    async with linked(tmp_path) as (_, own, _, _):
        path = tmp_path / "nodes"
        path.write_text(f"127.0.0.1:{own.listener.port}\n")
        fleet = FleetClient()
        members = Members(str(path), key_of(tmp_path, "another secret " * 5), "", fleet)
        await until(lambda: len(tries) > 4)
        await members.close()
        await fleet.close()
        silent = f"answers at 127.0.0.1:{own.listener.port} so far"
        assert caplog.text.count(silent) == 1


async def test_two_nodes_with_one_name_are_named_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("weft.fleet.members.RETRY_S", 0.01)
    monkeypatch.setattr("weft.fleet.members.MAX_RETRY_S", 0.02)
    tries = []

    async def serve(self: Members, address: str, *args: Any) -> bool:
        tries.append(address)
        return await serve_it(self, address, *args)

    serve_it = Members._serve
    monkeypatch.setattr(Members, "_serve", serve)
    async with linked(tmp_path) as (engine, own, _, _):
        path = tmp_path / "nodes"
        path.write_text(f"127.0.0.1:{own.listener.port}\n")
        fleet = FleetClient()
        members = Members(str(path), link_key(tmp_path), "a", fleet)

        def tried() -> bool:
            engine.on_pulse()
            return len(tries) > 3

        await until(tried)
        await members.close()
        await fleet.close()
    assert caplog.text.count("two nodes are called a") == 1


async def test_no_request_is_to_blame_for_nodes_that_are_taken_off_the_list(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As when pods are replaced while it runs. A process that ends itself loses no node by that."""
    monkeypatch.setattr("weft.fleet.members.READ_S", 0.01)
    monkeypatch.setattr("weft.fleet.members.RETRY_S", 0.01)
    caplog.set_level("INFO")
    path, nobody = tmp_path / "nodes", "127.0.0.1:1\n"
    path.write_text(nobody)

    async def first_token(fleet: FleetClient) -> list[int]:
        await fleet.until_joined()
        return (await anext(fleet.generate(asked("r")))).token_ids

    fleet = FleetClient()
    members = Members(str(path), link_key(tmp_path), "", fleet)
    reading = asyncio.create_task(first_token(fleet))
    for number in range(3):
        async with linked(tmp_path) as (engine, own, _, _):

            def has_it(engine: PretendedSupervisor = engine) -> bool:
                engine.on_pulse()
                return bool(engine.open) or reading.done()

            path.write_text(f"127.0.0.1:{own.listener.port}\n")
            await until(has_it)
            if number == 2:
                [(name, put)] = engine.open.items()
                put(TokenEvent(name, [7], num_tokens=3))
                assert await reading == [7]
                await members.close()
            else:
                path.write_text("")  # it is being written
                await until(lambda: "it names no HOST:PORT" in caplog.text)
                assert fleet.nodes
                path.write_text(nobody)
                await until(lambda: not fleet.nodes)
    await fleet.close()
    assert caplog.text.count("node a has left: node a is not in the list any more") == 2
    assert "is lost" not in caplog.text and not fleet.measure().lost_at


async def test_nodes_meet_over_ipv6(tmp_path: Path) -> None:
    try:
        with socket.socket(socket.AF_INET6) as there:
            there.bind(("::1", 0))
    except OSError:
        pytest.skip("this machine has no IPv6")
    async with linked(tmp_path, host="[::1]") as (engine, _, client, link):
        await started(engine, client, link)
        assert link.node == "a"


async def test_an_address_at_which_no_node_can_be_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "nodes"
    path.write_text("a b:7070\n")
    fleet = FleetClient()
    members = Members(str(path), link_key(tmp_path), "", fleet)
    await until(lambda: "'a b:7070': Invalid argument" in caplog.text)
    await members.close()
    await fleet.close()


async def test_a_list_of_nodes_is_read_again_after_one_that_is_no_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("weft.fleet.members.READ_S", 0.01)
    path = tmp_path / "nodes"
    path.write_bytes(b"\xff:7070\n")
    fleet = FleetClient()
    members = Members(str(path), link_key(tmp_path), "", fleet)
    await until(lambda: "it is not UTF-8" in caplog.text)
    await asyncio.sleep(0.1)  # it is read several times
    assert caplog.text.count("it is not UTF-8") == 1
    path.write_text("a b:7070\n")
    await until(lambda: "'a b:7070': Invalid argument" in caplog.text)
    await members.close()
    await fleet.close()


async def test_nodes_are_sought_again_after_errors_of_any_kind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as when there is no room for a thread, or there are too many open files."""
    errors = [zmq.ZMQError(errno.EMFILE), RuntimeError("can't start new thread")]
    made = []

    async def read(where: str) -> list[str]:
        if len(errors) > 1:
            raise errors.pop()
        return ["127.0.0.1:1"]

    def link(*args: Any) -> TcpLink:
        if errors:
            raise errors.pop()
        made.append(TcpLink(*args))
        return made[-1]

    monkeypatch.setattr("weft.fleet.members.READ_S", 0.01)
    monkeypatch.setattr("weft.fleet.members.read_addresses", read)
    monkeypatch.setattr("weft.fleet.members.TcpLink", link)
    fleet = FleetClient()
    members = Members("nodes", link_key(tmp_path), "", fleet)
    await until(lambda: bool(made))
    made[0].tick = lambda: 1 / 0
    await until(lambda: len(made) > 1)
    await members.close()
    await fleet.close()


async def test_an_engine_is_started_again_though_nobody_could_be_told_of_its_death() -> None:
    async def start(args: EngineArgs) -> LinkClient:
        client = LinkClient()
        client.dispatch(Started(INFO))
        return await client.start(SilentLink())

    supervisor = await start_supervised(EngineArgs(ModelArgs("m")), start, watchdog_s=0)
    supervisor.on_pulse = lambda: 1 / 0
    supervisor._engine.died(EngineDead("exit code 1"))
    await until(lambda: supervisor.restarts == 1)
    await supervisor.close()


def test_a_process_is_heard_after_a_report_that_could_not_be_taken() -> None:
    reports: SimpleQueue[bytes] = SimpleQueue()
    taken: list[Report] = []

    class Up:
        async def recv(self) -> bytes:
            return reports.get()

    class Client:
        def dispatch(self, report: Report) -> None:
            taken.append(report)
            raise RuntimeError if len(taken) < 2 else asyncio.CancelledError

    link = ProcessLink.__new__(ProcessLink)
    link._up, link._client, link._has_started = Up(), Client(), True
    for _ in range(2):
        reports.put(REPORTS.encode(Tokens([])))
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(link._receive())
    assert len(taken) == 2


def test_addresses_come_from_a_file_or_dns(tmp_path: Path) -> None:
    path = tmp_path / "nodes"
    path.write_text("# ours\nhost:7070\n\n[::1]:7071 # that one\n")
    assert asyncio.run(read_addresses(str(path))) == ["host:7070", "[::1]:7071"]
    assert asyncio.run(read_addresses("127.0.0.1:7070")) == ["127.0.0.1:7070"]
    path.write_text("host\n")
    with pytest.raises(ConfigError, match="HOST:PORT, got 'host'"):
        asyncio.run(read_addresses(str(path)))


async def test_what_a_node_fetches_for_others_holds_up_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 1)  # by which an event loop counts its threads
    go, num_fetched = threading.Event(), 8
    is_dir, looking = Path.is_dir, list[threading.Thread]()

    def looked(path: Path) -> bool:
        looking.extend([threading.current_thread()] if path.name == "nowhere" else [])
        return is_dir(path)

    monkeypatch.setattr(Path, "is_dir", looked)

    class SlowBlobs(Blobs):
        def open(self, digest: str, holders: Sequence[str] = (), sha256: str = "") -> Folder:
            assert go.wait(PATIENCE_S)
            return Folder(str(tmp_path))

    async def supervised(*_: object) -> PretendedSupervisor:
        return PretendedSupervisor()

    monkeypatch.setattr("weft.fleet.start.start_supervised", supervised)
    args = FleetArgs(where="127.0.0.1:1", key=link_key(tmp_path), listen="127.0.0.1:0")
    contents = Contents(tmp_path / "kept")
    blobs = SlowBlobs(DirectoryStore(tmp_path / "registry"), contents)
    fleet = await start_fleet(args, EngineArgs(ModelArgs("x")), 0, contents, blobs)
    assert fleet.own is not None
    locate = fleet.own.listener._locate
    sources = [AdapterSource("/nowhere", f"{i:064d}") for i in range(num_fetched)]
    fetched = [asyncio.create_task(locate(source)) for source in sources]
    await asyncio.sleep(0)  # all of them have begun
    async with asyncio.timeout(PATIENCE_S / 4):
        await asyncio.to_thread(lambda: None)
    go.set()
    assert {found.path for found in await asyncio.gather(*fetched)} == {str(tmp_path)}
    assert threading.main_thread() not in looking, "its disk might not answer"
    await fleet.close()


@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        ({"where": "/nowhere"}, "fleet"),
        ({"listen": "7070"}, "fleet_listen"),
        ({"name": ""}, "node_name"),
        ({"has_engine": False, "has_api": False}, "no_api"),
        ({"labels": ("gpu",)}, "node_label"),
        ({"labels": ("gpu=a", "gpu=b")}, "node_label"),
        ({"labels": tuple(f"k{i}=v" for i in range(17))}, "node_label"),
        ({"labels": ("weft.x=1",)}, "node_label"),
        ({"labels": ("gpu=a",), "has_engine": False}, "node_label"),
    ],
)
def test_wrong_flags_are_named(tmp_path: Path, wrong: dict[str, object], param: str) -> None:
    with pytest.raises(ConfigError) as refused:
        FleetArgs(**{"where": "host:1", "key": link_key(tmp_path), **wrong})
    assert refused.value.param == param


async def test_a_port_that_is_taken_is_named_before_an_engine_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weft.fleet.start.start_supervised", None)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        listen = f"127.0.0.1:{taken.getsockname()[1]}"
        args = FleetArgs(where="127.0.0.1:1", key=link_key(tmp_path), listen=listen)
        with pytest.raises(
            ConfigError, match=rf"{listen}: Address already in use \(--fleet-listen"
        ):
            await start_fleet(args, EngineArgs(ModelArgs("x")), 0, Contents(None), None)


def test_a_key_must_be_long_enough(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="32 random bytes"):
        key_of(tmp_path, "short")
    with pytest.raises(ConfigError, match="No such file"):
        read_fleet_key(tmp_path / "none")

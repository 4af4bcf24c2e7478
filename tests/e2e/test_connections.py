"""Connections that cost a place, silent, slow or too many, beside others that are served; and ends
of processes, whatever hangs in them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from http.client import HTTPResponse
from pathlib import Path

import httpx
import pytest
from http_api import COMPLETE, World, served, wait_until
from hypothesis import given
from hypothesis import strategies as st
from patience import PATIENCE_S
from quick_start import command_of, start_weft
from serving import until
from tiny import BASE
from toy_tokenizers import byte_level

from weft.cli import connections
from weft.cli.connections import (
    METRICS_LIMITS,
    SPARE,
    ConnectionLimits,
    Places,
    connection_limits,
    served_beside,
)
from weft.core.locked_folder import LockedFolder
from weft.fleet.process import SOCKETS

BODY = json.dumps({"model": "base", "prompt": "abc"}).encode()
HEAD = f"POST {COMPLETE} HTTP/1.1\r\nhost: x\r\n".encode()
ASK = HEAD + b"content-length: %d\r\n\r\n" % len(BODY) + BODY
HEALTH = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"


CLIENTS: list[socket.socket] = []
"""Those of this test."""


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path, byte_level())
    yield made
    made.check()
    while CLIENTS:
        CLIENTS.pop().close()


def connect(url: str, source: str = "127.0.0.1") -> socket.socket:
    host, port = url.removeprefix("http://").split(":")
    CLIENTS.append(
        socket.create_connection((host, int(port)), timeout=PATIENCE_S, source_address=(source, 0))
    )
    return CLIENTS[-1]


def is_closed(client: socket.socket, within_s: float = PATIENCE_S) -> bool:
    client.settimeout(within_s)
    try:
        return not client.recv(4096)
    except TimeoutError:
        return False
    except ConnectionError:
        return True


def answer(client: socket.socket, request: bytes) -> bytes:
    """The answer, or as much as came before the connection was cut."""
    got = b""
    with contextlib.suppress(ConnectionError):
        client.sendall(request)
        while chunk := client.recv(65536):
            got += chunk
            head, end, body = got.partition(b"\r\n\r\n")
            length = head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]
            if end and len(body) >= int(length or 0):
                break
    return got


@contextlib.contextmanager
def gated(world: World) -> Iterator[None]:
    """Requests wait until the gate is set, or the block ends."""
    world.engine.gate = asyncio.Event()
    try:
        yield
    finally:
        world.engine.gate.set()


def answered(url: str, request: bytes) -> socket.socket:
    """A client that has been answered. One that was too slow to ask in time was cut, and is not the
    one."""
    end = time.monotonic() + PATIENCE_S
    while not answer(client := connect(url), request).startswith(b"HTTP/1.1 200 "):
        assert time.monotonic() < end, "nobody is answered"
    return client


def begun(url: str, world: World) -> socket.socket:
    """As `answered`, but its request is under way."""
    end = time.monotonic() + PATIENCE_S
    while not world.engine.num_open:
        assert time.monotonic() < end, "no request is begun"
        client = connect(url)
        with contextlib.suppress(ConnectionError):
            client.sendall(ASK)
        while not world.engine.num_open and not is_closed(client, 0.01):
            pass
    client.settimeout(PATIENCE_S)
    return client


def drip(client: socket.socket, piece: bytes) -> bool:
    """Whether the server cuts a client that sends a little now and then."""
    end = time.monotonic() + PATIENCE_S
    while time.monotonic() < end:
        try:
            client.sendall(piece)
        except ConnectionError:
            return True
        if is_closed(client, 0.1):
            return True
    return False


def test_who_sends_no_head_in_time_is_cut(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Idle connections and requests under way are not."""
    monkeypatch.setattr(connections, "HEAD_TIMEOUT_S", 1.0)
    with served(world) as url, gated(world):
        idle, waiting = answered(url, HEALTH), begun(url, world)
        silent, slow = connect(url), connect(url)
        assert drip(slow, b"G") and is_closed(silent)
        again = answered(url, HEALTH)
        assert drip(again, b"G"), "the time begins with the first byte of the next head"
        early = b"GET /health HTTP/1.1\r\nhost: x\r\ncontent-length: 9999\r\n\r\n"
        unread = answered(url, early)
        assert drip(unread, b"x"), "its request has been answered, so its body may not go on"
        assert answer(idle, HEALTH).startswith(b"HTTP/1.1 200 ")
        world.engine.gate.set()
        assert answer(waiting, b"").startswith(b"HTTP/1.1 200 ")


def test_a_length_stated_in_two_ways_ends_the_connection(world: World) -> None:
    """Who forwarded it may have taken its rest for another request."""
    chunked = b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)
    both = HEAD + b"content-length: 4\r\ntransfer-encoding: chunked\r\n\r\n" + chunked
    with served(world) as url:
        client = connect(url)
        client.sendall(both + HEALTH)
        got = b"".join(iter(lambda: client.recv(65536), b""))
        assert got.count(b"HTTP/1.1 ") == 1 and b"connection: close" in got.lower()


def test_what_has_not_ended_when_the_server_does_is_told_or_cut(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    """No error is logged but that there are such requests."""
    body = BODY[:-1] + b', "stream": true, "max_tokens": 3}'
    stream = HEAD + b"content-length: %d\r\n\r\n" % len(body) + body
    upload = b"PUT /v1/adapters/x HTTP/1.1\r\nhost: x\r\n"
    with gated(world), served(world, timeout_graceful_shutdown=0) as url:
        reading, *sending = (connect(url) for _ in range(3))
        reading.sendall(stream)
        assert reading.recv(65536).startswith(b"HTTP/1.1 200 ")
        reading.settimeout(PATIENCE_S)
        for client, head in zip(sending, (HEAD, upload), strict=True):
            client.sendall(head + b"content-length: 9\r\nexpect: 100-continue\r\n\r\n{")
            assert client.recv(4096).startswith(b"HTTP/1.1 100 ")  # its body is awaited
    assert all(answer(client, b"").startswith(b"HTTP/1.1 503 ") for client in sending)
    with contextlib.suppress(ConnectionError):
        while more := reading.recv(4096):
            assert b"0\r\n\r\n" not in more, "as if the stream were complete"
    assert [line.message for line in caplog.records if line.levelname == "ERROR"] == [
        "Cancel 3 running task(s), timeout graceful shutdown exceeded"
    ]


@pytest.mark.parametrize("version", ["1.0", "1.1"])
def test_streams_are_framed_as_the_version_of_http_asks(world: World, version: str) -> None:
    body = BODY[:-1] + b', "stream": true, "max_tokens": 3}'
    head = HEAD.replace(b"1.1", version.encode()) + b"connection: close\r\n"
    with served(world) as url:
        client = connect(url)
        client.sendall(head + b"content-length: %d\r\n\r\n" % len(body) + body)
        answer = HTTPResponse(client)
        answer.begin()
        events = answer.read().decode().split("\n\n")
    assert answer.status == 200 and answer.chunked == (version == "1.1")
    assert events[-2:] == ["data: [DONE]", ""]
    texts = [json.loads(event[6:])["choices"][0]["text"] for event in events[:-2]]
    assert len(texts) > 1 and "".join(texts)


def test_connections_of_one_address_are_bounded(world: World) -> None:
    with served(world, limits=ConnectionLimits(100, 3)) as url:
        mine = [connect(url) for _ in range(3)]
        assert all(answer(each, HEALTH) for each in mine)
        assert is_closed(connect(url))
        assert answer(connect(url, "127.0.0.2"), HEALTH).startswith(b"HTTP/1.1 200 ")
        mine[0].close()
        wait_until(lambda: answer(connect(url), HEALTH).startswith(b"HTTP/1.1 200 "))


def test_a_tenants_burst_is_not_ahead_of_others(tmp_path: Path) -> None:
    """All of it is there at once, before the other's request: tenants take turns nevertheless."""
    world = World(tmp_path, byte_level(), api_keys=["flood=f", "victim=v"])
    blocked, all_sent = threading.Event(), threading.Event()
    ask = ASK.replace(b"\r\n\r\n", b"\r\nAuthorization: Bearer %b\r\n\r\n")

    @world.app.get("/block")
    async def block() -> None:
        blocked.set()
        all_sent.wait(PATIENCE_S)

    with served(world) as url, gated(world):
        head = b"GET /block HTTP/1.1\r\nhost: x\r\nauthorization: Bearer f\r\n\r\n"
        flood, victim, blocker = [connect(url) for _ in range(80)], connect(url), connect(url)
        for each in (*flood, victim):
            assert answer(each, HEALTH).startswith(b"HTTP/1.1 200 ")
        blocker.sendall(head)
        assert blocked.wait(PATIENCE_S)
        for each in flood:
            each.sendall(ask % b"f")
        victim.sendall(ask % b"v")
        all_sent.set()
        wait_until(lambda: world.engine.num_open == 81)
        begun = [request.tenant for request in world.engine.requests]
        assert begun.index("victim") < 20
        world.engine.gate.set()
        for each in (*flood, victim):
            assert answer(each, b"").startswith(b"HTTP/1.1 200 ")


def test_idle_connections_make_room_and_probes_have_their_own(world: World) -> None:
    with served(world, limits=ConnectionLimits(4, 0)) as url, gated(world):
        idle, *asking = (connect(url) for _ in range(4))
        for each in asking:
            each.sendall(ASK)
        wait_until(lambda: world.engine.num_open == 3)
        last = connect(url)
        last.sendall(ASK)
        wait_until(lambda: world.engine.num_open == 4)
        assert is_closed(idle)
        refused = answer(connect(url), ASK)
        assert refused.startswith(b"HTTP/1.1 429 ") and b"connection: close" in refused.lower()
        silent = [connect(url) for _ in range(SPARE + 10)]
        assert answer(connect(url), HEALTH).startswith(b"HTTP/1.1 200 ")
        assert is_closed(silent[0])
        world.engine.gate.set()
        for each in (*asking, last):
            assert answer(each, b"").startswith(b"HTTP/1.1 200 ")
        assert httpx.post(url + COMPLETE, content=BODY, timeout=PATIENCE_S).status_code == 200


def test_the_address_for_metrics_has_limits_too(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "HEAD_TIMEOUT_S", 1.0)

    async def scenario(listener: socket.socket) -> None:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        async with served_beside(world.app.state.metrics_app, listener):
            places = range(METRICS_LIMITS.per_address)
            silent = [await asyncio.to_thread(connect, url) for _ in places]
            assert await asyncio.to_thread(is_closed, connect(url)), "one too many"
            assert await asyncio.to_thread(is_closed, silent[-1]), "no head in time"
            await asyncio.to_thread(answered, url, HEALTH)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        asyncio.run(scenario(listener))


def test_who_reads_metrics_is_not_logged(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A node without an API has no other server, and Prometheus asks it every few seconds."""
    for log in map(logging.getLogger, ("uvicorn.error", "uvicorn.access")):
        monkeypatch.setattr(log, "level", log.level)  # other tests have changed it
        log.setLevel(logging.NOTSET)
    caplog.set_level(logging.INFO)

    async def scenario(listener: socket.socket) -> None:
        async with served_beside(world.app.state.metrics_app, listener):
            url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            await asyncio.to_thread(answered, url, HEALTH)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        asyncio.run(scenario(listener))
    assert not [each for each in caplog.records if each.name.startswith("uvicorn")]


class Client:
    """As much of a connection as `Places` knows."""

    def __init__(self, address: str) -> None:
        self.client = (address, 1)
        self.closed = False

    def close_idle(self) -> None:
        self.closed = True


ADDRESSES = st.sampled_from(["10.0.0.1", "::ffff:10.0.0.1", "2001:db8::1", "2001:db8::2", ""])


@given(st.lists(st.tuples(st.sampled_from(["take", "ask", "wait", "leave"]), ADDRESSES)))
def test_places_are_counted_once(changes: list[tuple[str, str]]) -> None:
    places = Places(ConnectionLimits(4, 3))
    clients: list[Client] = []
    for what, address in changes:
        if what == "take":
            client = Client(address)
            if places.take(client):  # type: ignore[arg-type]
                clients.append(client)
        elif clients:
            client = clients[len(address) % len(clients)]
            getattr(places, what)(client)
        clients = [c for c in clients if not c.closed and c in places._open]
        places.check()
    assert len(clients) == len(places._open)


def test_the_limits_leave_files_for_the_rest() -> None:
    limits = connection_limits()
    assert 0 < limits.per_address <= limits.in_all
    assert connection_limits(7).per_address == 7


def test_too_few_open_files_are_an_error_at_the_start(tmp_path: Path) -> None:
    """Not an end within a library, which says nothing of the limit."""
    log = tmp_path / "log"
    with log.open("wb") as out:
        process = start_weft(["serve", str(BASE), "--device", "cpu"], out, max_files=20)
    assert process.wait(PATIENCE_S) == 1
    assert log.read_text().splitlines()[-1] == (
        "weft: error: the system lets a server open 20 files, and it needs 256: raise the limit"
        " (ulimit -n)"
    )


# -- ends ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("hang", "limit_s", "backstop_s", "why"),
    [
        (
            "threading.Thread(target=time.sleep, args=(600,)).start()",
            *(2 * PATIENCE_S, 2 * PATIENCE_S - 0.5),
            f"has not ended in {2 * PATIENCE_S:g} s",
        ),
        ("ctypes.PyDLL(None).sleep(600)", 1.5, 1.0, "Timeout"),  # it holds the interpreter
    ],
    ids=["a thread", "the interpreter"],
)
def test_a_process_that_hangs_is_ended(
    hang: str, limit_s: float, backstop_s: float, why: str
) -> None:
    """The first is said so long before the limit, that the second can't come first."""
    code = f"""
import ctypes, threading, time
from weft.cli import deadline
deadline.BACKSTOP_S = {backstop_s}
deadline.end_within({limit_s})
{hang}
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=PATIENCE_S)
    assert ended.returncode == 1 and why in ended.stderr.decode()


START = f"""
import asyncio
from weft.core.config import engine_args
from weft.fleet.client import LinkClient
from weft.fleet.process import ProcessLink

async def start():
    link = ProcessLink(engine_args({str(BASE)!r}), LinkClient())
    print(link.pid, link._folder.path, flush=True)
    await asyncio.sleep(600)

if __name__ == "__main__":
    asyncio.run(start())
"""


def test_a_stopped_engine_dies_with_its_parent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What its folder holds is removed when another one is made."""
    with tempfile.TemporaryDirectory() as short:  # the paths of sockets are limited
        monkeypatch.setenv("TMPDIR", short)
        monkeypatch.setattr(tempfile, "tempdir", short)  # nobody else makes one there
        _dies_with_its_parent(tmp_path)


def _dies_with_its_parent(tmp_path: Path) -> None:
    script = tmp_path / "start.py"
    script.write_text(START)
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        pid_text, path = parent.stdout.readline().decode().split()
        pid = int(pid_text)
        until(lambda: _ignores_sigterm(pid), "it does not start")
        os.kill(pid, signal.SIGSTOP)
        parent.kill()
    until(lambda: not command_of(pid), "it is an orphan")
    assert Path(path).exists()
    mine = LockedFolder(SOCKETS)
    other = LockedFolder(SOCKETS)
    assert not Path(path).exists() and mine.path.exists()
    for each in (mine, other):
        each.remove()
        assert not each.path.exists()


def _ignores_sigterm(pid: int) -> bool:
    status = Path(f"/proc/{pid}/status").read_text()
    ignored = int(status.partition("SigIgn:")[2].split()[0], 16)
    return bool(ignored >> (signal.SIGTERM - 1) & 1)

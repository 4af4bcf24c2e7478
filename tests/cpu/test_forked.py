"""What workers for what nobody trusts can't do."""

from __future__ import annotations

import os
import platform
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from patience import PATIENCE_S, wait_until

from weft.core import frames
from weft.core.forked import ForkedProcess, ForkServer, ProcessEnded, WorkerTask, run_fork_server

ATTEMPTS: dict[str, Callable[[], object]] = {
    "connect": socket.socket,
    "read a file": lambda: Path("/etc/hostname").read_text(),
    "fork": os.fork,
    "run a program": lambda: os.execv("/bin/true", ["true"]),
    "begin a thread": lambda: threading.Thread(target=int).start(),
    "signal others": lambda: os.kill(os.getppid(), 0),
    "take much memory": lambda: bytearray(1 << 30),
    "compute": lambda: sum(range(1000)),
    "take some memory": lambda: bytearray(1 << 20),
}


def attempt(connection: socket.socket) -> None:
    """Do what is asked for, and tell what came of it."""
    while True:
        what = frames.receive(connection).decode()
        if what == "crash":
            os.abort()
        if what == "sleep":
            time.sleep(600)
        try:
            ATTEMPTS[what]()
            said = "done"
        except Exception as error:
            said = type(error).__name__
        frames.send(connection, said.encode())


def serve_forks() -> None:
    run_fork_server(lambda kind: WorkerTask(attempt, 64 << 20, 1 << 20 if kind == b"files" else 0))


@pytest.fixture(scope="module")
def shared() -> Iterator[ForkServer]:
    made = ForkServer("import sys; from test_forked import serve_forks; serve_forks()")
    yield made
    made.close()


def ask(process: ForkedProcess, what: str, within_s: float = PATIENCE_S) -> str:
    until_s = time.monotonic() + within_s
    return process.ask(what.encode(), 100, until_s, within_s).decode()


def test_a_worker_can_only_compute(shared: ForkServer) -> None:
    harmless = {"compute", "take some memory"}
    with ForkedProcess(shared) as process:
        found = {what: ask(process, what) for what in ATTEMPTS}
    assert {what for what, said in found.items() if said == "done"} == harmless
    assert found["take much memory"] == "MemoryError"


@pytest.mark.skipif(platform.machine() not in ("x86_64", "aarch64"), reason="no filter of calls")
def test_one_that_uses_files_can_do_no_more_than_that(shared: ForkServer) -> None:
    with ForkedProcess(shared, b"files") as process:
        assert ask(process, "read a file") == "done"
        for what in ("connect", "fork", "run a program", "signal others"):
            assert ask(process, what) == "PermissionError"


def test_how_a_worker_ended_is_told(shared: ForkServer) -> None:
    with ForkedProcess(shared) as process:
        with pytest.raises(ProcessEnded, match="crashes"):
            ask(process, "crash")
        assert not process.alive
    with ForkedProcess(shared) as process, pytest.raises(ProcessEnded, match=r"than 0\.1 s"):
        ask(process, "sleep", 0.1)


def test_its_environment_has_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFT_API_KEY", "secret")
    made = ForkServer("import time; time.sleep(600)")
    told = Path(f"/proc/{made._process.pid}/environ")
    wait_until(lambda: "PYTHONPATH=" in told.read_text())
    assert "secret" not in told.read_text()
    made.close()

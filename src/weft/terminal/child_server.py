"""A `weft serve` as a process of its own, for commands that show or measure one."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from typing import IO

from weft.core.errors import ConfigError

LOOK_S = 0.02
"""How long to wait between two looks whether the server is ready."""
STOP_S = 35.0
"""How long the server may take to end by itself."""


@contextlib.contextmanager
def child_server(
    args: Sequence[str], port: int, log: IO[str], start_s: float
) -> Iterator[tuple[str, float]]:
    """A context in which `weft serve` with these arguments answers at this port of 127.0.0.1, and
    writes to `log`. Gives its URL, and the seconds from its start until it was ready. SIGTERM ends
    the context. Raises ConfigError with the end of the log if it is not ready within `start_s`."""
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "weft", "serve", *args, f"--port={port}"]
    began = time.perf_counter()
    process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    previous = signal.signal(signal.SIGTERM, _exit)
    try:
        while not _is_healthy(url):
            waited = time.perf_counter() - began
            if process.poll() is not None:
                raise ConfigError(f"the server did not start: {_end_of(log)}")
            if waited > start_s:
                message = f"the server was not ready within {start_s:.0f} s: {_end_of(log)}"
                raise ConfigError(message)
            time.sleep(LOOK_S)
        yield url, time.perf_counter() - began
    finally:
        process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        signal.signal(signal.SIGTERM, previous)


def _is_healthy(url: str) -> bool:
    with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=5):
        return True
    return False


def _end_of(log: IO[str]) -> str:
    log.seek(0)
    return log.read().strip()[-600:] or "it said nothing"


def _exit(number: int, _: object) -> None:
    raise SystemExit(128 + number)

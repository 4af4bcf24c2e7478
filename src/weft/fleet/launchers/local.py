"""Nodes as processes of this machine, which end with the process that started them."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from http.client import HTTPException
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import urlopen

from weft.core.errors import ConfigError
from weft.core.processes import die_with_parent
from weft.fleet.launchers import ClusterArgs, ClusterFolder, Placed, State, fleet_port_of

logger = logging.getLogger(__name__)

HOST = "127.0.0.1"
MAX_PAUSE_S = 30.0
READY_S = 2.0
"""How long a node may take to say that it is ready."""
MAX_FAILED = 3
"""While no node has been ready yet, one that ends so often is not started again."""
LAST_LINES = 5
LAST_BYTES = 1 << 16
"""How much of the end of a node's log is read to find its last lines."""
ERROR = "weft: error: "
"""Begins the last line of a command that says itself why it could not go on."""


def is_ready(url: str) -> bool | None:
    """Whether the node there takes requests; None if nothing answers."""
    try:
        with urlopen(f"{url}/ready", timeout=READY_S) as answer:
            return bool(answer.status == 200)
    except HTTPError:
        return False
    except (OSError, HTTPException):
        return None


@dataclass(slots=True)
class _Running:
    port: int
    process: subprocess.Popen[bytes]
    restarts: int = 0
    again_s: float | None = None
    """When it is to be started again, if it has ended."""
    log_start: int = 0
    """Where the lines of this process begin in its log."""
    was_ready: bool = False
    """Whether this process was ready at some time."""


def _end(node: _Running) -> None:
    """Let it hand its requests over and end, even if it was stopped."""
    for number in (signal.SIGTERM, signal.SIGCONT):
        node.process.send_signal(number)


def _pause_s(node: _Running) -> float:
    return min(2.0 ** min(node.restarts, 10), MAX_PAUSE_S)  # a large power would overflow


def _message(line: str) -> str:
    """What a line of a log says, in either of the formats of `--log-format`."""
    with suppress(ValueError, KeyError, TypeError):
        return str(json.loads(line)["message"])
    return re.sub(r"^[0-9T:.-]+Z [A-Z]+ [\w.]+: ", "", line.removeprefix(ERROR))


class LocalLauncher:
    """Processes of this machine. `tend` has to be called now and then."""

    def __init__(
        self, folder: ClusterFolder, args: ClusterArgs, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._folder = folder
        self._args = args
        self._clock = clock
        self._running: dict[str, _Running] = {}
        self._some_was_ready = False

    def start(self, name: str) -> None:
        if name not in self._running:
            port = self._args.port_of(name)
            log_start = self._log_size(name)
            process = self._spawn(name, port)
            self._running[name] = _Running(port, process, log_start=log_start)
            self._tell()

    def stop(self, name: str) -> None:
        node = self._running.pop(name)
        _end(node)
        node.process.wait()
        self._tell()

    def stop_all(self) -> None:
        """Stop all nodes at the same time."""
        for node in self._running.values():
            _end(node)
        for name in list(self._running):
            self.stop(name)

    def tend(self) -> None:
        """Start again what has ended, after a pause that grows with each time. Raises ConfigError
        when nodes can't be started at all."""
        now = self._clock()
        for name, node in self._running.items():
            if node.process.poll() is None:
                continue
            if node.again_s is None:
                self._give_up_in_vain(name, node)
                node.again_s = now + _pause_s(node)
            elif now >= node.again_s:
                node.log_start = self._log_size(name)
                try:
                    node.process, node.again_s = self._spawn(name, node.port), None
                    node.restarts += 1
                    node.was_ready = False
                except OSError as error:  # such as no room for a process
                    logger.warning("%s can't be started again now: %s", name, error)
                    node.again_s = now + _pause_s(node)

    def _give_up_in_vain(self, name: str, node: _Running) -> None:
        """Raise ConfigError if a node that has ended need not be started again: its own error says
        so, or it has ended several times, and no node has been ready yet."""
        if self._some_was_ready:
            return
        last = self._last_lines(name, node)
        if last and last[-1].startswith(ERROR):
            raise ConfigError(f"{name}: {last[-1].removeprefix(ERROR)}")
        if node.restarts + 1 >= MAX_FAILED:
            message = f"{name} has ended {MAX_FAILED} times before it was ready; the end of"
            raise ConfigError(f"{message} {self._log(name)}: {' | '.join(last)}")

    def _last_lines(self, name: str, node: _Running) -> list[str]:
        """The last lines that the process of a node has written to its log."""
        with self._log(name).open("rb") as log:
            size = log.seek(0, os.SEEK_END)
            log.seek(max(node.log_start, size - LAST_BYTES))
            lines = log.read().decode(errors="replace").split("\n")
        return [line.strip() for line in lines if line.strip()][-LAST_LINES:]

    def _why_ended(self, name: str, node: _Running) -> str:
        """The signal that ended a node, or else the last line of its log; and where that is."""
        number, last = -(node.process.poll() or 0), self._last_lines(name, node)
        if number > 0:
            why = f"by signal {number} ({signal.strsignal(number)})"
        else:
            why = _message(last[-1]) if last else "it said nothing"
        return f"{why}; see {self._log(name)}"

    def list(self) -> list[Placed]:
        found = []
        for name, node in self._running.items():
            state = self._state(node)
            why = self._why_ended(name, node) if state == "ended" else ""
            found.append(Placed(name, self._url(node.port), state, node.restarts, why))
        return found

    def _state(self, node: _Running) -> State:
        if node.process.poll() is not None:
            return "ended"
        if not is_ready(self._url(node.port)):
            return "not ready" if node.was_ready else "starting"
        self._some_was_ready = node.was_ready = True
        return "up"

    def _url(self, port: int) -> str:
        return f"http://{HOST}:{port}"

    def _tell(self) -> None:
        ports = [fleet_port_of(node.port) for node in self._running.values()]
        self._folder.tell_members([f"{HOST}:{port}" for port in ports])

    def _log(self, name: str) -> Path:
        return self._folder.path / f"{name}.log"

    def _log_size(self, name: str) -> int:
        log = self._log(name)
        return log.stat().st_size if log.exists() else 0

    def _spawn(self, name: str, port: int) -> subprocess.Popen[bytes]:
        folder, fleet_port = self._folder, fleet_port_of(port)
        command = self._args.command(name, folder.members, folder.key, HOST, port, fleet_port)
        with self._log(name).open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "weft", *command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                preexec_fn=partial(die_with_parent, os.getpid()),
                start_new_session=True,  # Ctrl-C is for the one that started them
            )

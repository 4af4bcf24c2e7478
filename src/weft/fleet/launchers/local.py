"""Nodes as processes of this machine, which end with the process that started them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from urllib.error import URLError
from urllib.request import urlopen

from weft.core.processes import die_with_parent
from weft.fleet.launchers import ClusterArgs, ClusterFolder, Placed, State, fleet_port_of

HOST = "127.0.0.1"
MAX_PAUSE_S = 30.0
READY_S = 2.0
"""How long a node may take to say that it is ready."""


def is_ready(url: str) -> bool:
    try:
        with urlopen(f"{url}/ready", timeout=READY_S) as answer:
            return bool(answer.status == 200)
    except (URLError, OSError):
        return False


@dataclass(slots=True)
class _Running:
    port: int
    process: subprocess.Popen[bytes]
    restarts: int = 0
    again_s: float | None = None
    """When it is to be started again, if it has ended."""


class LocalLauncher:
    """Processes of this machine. `tend` has to be called now and then."""

    def __init__(
        self,
        folder: ClusterFolder,
        args: ClusterArgs,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._folder = folder
        self._args = args
        self._clock = clock
        self._running: dict[str, _Running] = {}

    def start(self, name: str) -> None:
        if name not in self._running:
            port = self._args.port + int(name.rpartition("-")[2])
            self._running[name] = _Running(port, self._spawn(name, port))
            self._tell()

    def stop(self, name: str) -> None:
        node = self._running.pop(name)
        node.process.send_signal(signal.SIGTERM)  # it hands its requests over, and ends
        node.process.wait()
        self._tell()

    def stop_all(self) -> None:
        """All at a time."""
        for node in self._running.values():
            node.process.send_signal(signal.SIGTERM)
        for name in list(self._running):
            self.stop(name)

    def tend(self) -> None:
        """Start again what has ended, after a pause that grows with each time."""
        now = self._clock()
        for name, node in self._running.items():
            if node.process.poll() is None:
                continue
            if node.again_s is None:
                node.again_s = now + min(2.0**node.restarts, MAX_PAUSE_S)
            elif now >= node.again_s:
                node.process, node.again_s = self._spawn(name, node.port), None
                node.restarts += 1

    def list(self) -> list[Placed]:
        return [
            Placed(name, self._url(node.port), self._state(node), node.restarts)
            for name, node in self._running.items()
        ]

    def _state(self, node: _Running) -> State:
        if node.process.poll() is not None:
            return "ended"
        return "up" if is_ready(self._url(node.port)) else "starting"

    def _url(self, port: int) -> str:
        return f"http://{HOST}:{port}"

    def _tell(self) -> None:
        ports = [fleet_port_of(self._args, node.port) for node in self._running.values()]
        self._folder.tell_members([f"{HOST}:{port}" for port in ports])

    def _spawn(self, name: str, port: int) -> subprocess.Popen[bytes]:
        folder = self._folder
        command = self._args.command(name, folder.members, folder.key, HOST, port)
        with (folder.path / f"{name}.log").open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "weft", *command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                preexec_fn=partial(die_with_parent, os.getpid()),
                start_new_session=True,  # Ctrl-C is for the one that started them
            )

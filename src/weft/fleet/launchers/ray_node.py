"""A node of a cluster on Ray: an actor that has a `weft serve` as its child."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from functools import partial
from pathlib import Path
from typing import NamedTuple

from weft.core.processes import die_with_parent
from weft.fleet.launchers import ClusterFolder, fleet_port_of
from weft.fleet.launchers.local import is_ready
from weft.fleet.launchers.ray_state import RayState

LOOK_S = 1.0
"""The pause between two looks at which other nodes there are."""
STOP_S = 60.0
"""How long a node may take to hand over its requests and end."""


def free_port(host: str, wanted: int) -> int:
    """The port `wanted`, or a free one if something listens there, such as a node of another
    cluster."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # old connections don't matter
        try:
            probe.bind((host, wanted))
        except OSError:
            probe.bind((host, 0))
        return int(probe.getsockname()[1])


class NodePlace(NamedTuple):
    """Where a node is."""

    address: str
    """HOST:PORT for other nodes."""
    url: str
    is_ready: bool
    pid: int


class NodeActor:
    """One node. It ends when its server does, so that Ray starts it again."""

    def __init__(self, name: str, cluster: str) -> None:
        """`cluster`: see `RayState`. Raises RuntimeError if that cluster has ended."""
        import ray

        self._name, self._state = name, RayState(ray, cluster)
        plan = self._state.read()
        if plan is None:
            raise RuntimeError(f"the cluster of {name} has ended")
        args = plan.args
        self._folder = ClusterFolder(Path(tempfile.mkdtemp(prefix=f"weft-{name}-")))
        self._folder.key.touch(0o600)
        self._folder.key.write_text(plan.key)
        host = ray.util.get_node_ip_address()
        port = free_port(host, args.port_of(name))
        fleet_port = free_port(host, fleet_port_of(args.port_of(name)))
        self._address, self._url = f"{host}:{fleet_port}", f"http://{host}:{port}"
        self._stopping = threading.Event()
        self._writing = threading.Lock()  # held by who writes into the folder or removes it
        self._members: dict[str, str] = {}
        self._look()
        folder = self._folder
        command = args.command(name, folder.members, folder.key, host, port, fleet_port)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "weft", *command],
            stdin=subprocess.DEVNULL,
            preexec_fn=partial(die_with_parent, os.getpid()),
        )
        threading.Thread(target=self._watch, daemon=True).start()
        threading.Thread(target=self._keep_looking, daemon=True).start()

    def place(self) -> NodePlace:
        return NodePlace(self._address, self._url, bool(is_ready(self._url)), os.getpid())

    def stop(self) -> None:
        """Returns when the node has handed over its requests and has ended."""
        if not self._stopping.is_set():
            self._stopping.set()
            self._process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_S)

    def _watch(self) -> None:
        self._process.wait()
        with self._writing:
            shutil.rmtree(self._folder.path, ignore_errors=True)
        if not self._stopping.is_set():
            os._exit(1)  # Ray starts the actor again

    def _keep_looking(self) -> None:
        while not self._stopping.wait(LOOK_S):
            with contextlib.suppress(Exception):  # Ray is away: who is known stays known
                self._look()

    def _look(self) -> None:
        """Bring the list of nodes that the server reads up to date."""
        members = {**self._state.members, self._name: self._address}
        if members != self._members:
            with self._writing:
                self._folder.tell_members(list(members.values()))
            self._members = members

"""Launchers start the nodes of a cluster: as processes of this machine, or on Ray.

Each node is a `weft serve --fleet ...`. A launcher keeps nodes running and knows where they are.
The nodes arrange among themselves what they do.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal, Protocol

from weft.core.errors import ConfigError

BELOW_HTTP = 930
"""How much lower the port is at which other nodes reach a node, than its port for HTTP."""

ON_RAY: Final = {"on": "ray"}
"""The content of the file that describes a cluster, if it is on Ray."""
OWN_FLAGS = ("--fleet", "--fleet-key", "--fleet-listen", "--node-name", "--no-api", "--no-engine")
"""The flags of `weft serve` that a launcher gives each node, and those with which no node would
ever become ready."""
NODE = "node-"
"""A node's name is this and the node's number, from 0 on."""

State = Literal["unplaced", "starting", "up", "not ready", "no answer", "ended"]
"""unplaced: no machine of a Ray cluster has room for the node yet. not ready: it takes no requests
now, for example because it starts, drains or hangs. no answer: nothing answers at the address of a
node that somebody else has started."""


@dataclass(frozen=True, slots=True)
class Placed:
    """A node that a launcher has started."""

    name: str
    url: str
    """Where it answers HTTP."""
    state: State
    restarts: int = 0
    why: str = ""
    """Why it has ended, and where its log is, if the launcher knows that."""


class Launcher(Protocol):
    """Starts and stops nodes by name; a node that ends by itself is started again."""

    def start(self, name: str) -> None:
        """Start a node, unless it is there. Raises WeftError."""

    def stop(self, name: str) -> None:
        """Let a node's requests go to other nodes, and then end it."""

    def list(self) -> Sequence[Placed]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterArgs:
    """What all nodes of a cluster are started with."""

    model: str
    num_nodes: int
    registry: str
    port: int = 8000
    """The HTTP port of the first node; those after it on its machine have the next ones."""
    num_cpus: float = 1
    """The CPUs that a node takes of Ray's."""
    num_gpus: float = 0
    """The GPUs that a node takes of Ray's, all on one machine."""
    flags: tuple[str, ...] = ()
    """Further flags of `weft serve`."""

    def __post_init__(self) -> None:
        for flag in (each.partition("=")[0] for each in self.flags):
            if flag in OWN_FLAGS:
                raise ConfigError(f"{flag} can't be given to the nodes of a cluster", "flags")

    @classmethod
    def of(cls, found: dict[str, Any]) -> ClusterArgs:
        """From the fields, as JSON has them."""
        return cls(**{**found, "flags": tuple(found["flags"])})

    @property
    def names(self) -> list[str]:
        return [f"{NODE}{index}" for index in range(self.num_nodes)]

    @property
    def resources(self) -> dict[str, float]:
        """What must be free on a machine for Ray to place a node there."""
        wanted = {"CPU": self.num_cpus, "GPU": self.num_gpus}
        return {name: number for name, number in wanted.items() if number}

    def port_of(self, name: str) -> int:
        """The HTTP port of a node."""
        return self.port + int(name.removeprefix(NODE))

    def command(
        self, name: str, members: Path, key: Path, host: str, port: int, fleet_port: int
    ) -> list[str]:
        """The arguments of `weft` for a node that others reach at `host`; `members` lists all."""
        return [
            *("serve", self.model, "--host", host, "--port", str(port)),
            *("--registry", self.registry, "--fleet", str(members), "--fleet-key", str(key)),
            *("--fleet-listen", f"{host}:{fleet_port}", "--node-name", name, *self.flags),
        ]


def fleet_port_of(port: int) -> int:
    """The port at which other nodes reach the node with this HTTP port: 7070 for 8000, and none
    below 1024, which only root may have. It differs for nodes of different clusters on one machine,
    as their HTTP ports do."""
    return (port - BELOW_HTTP - 1024) % (65536 - 1024) + 1024


class ClusterFolder:
    """A machine's folder of a cluster: what its nodes are started with, and their secret. For one
    on Ray it says only that it is there; `weft.fleet.launchers.ray_state` has the rest."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.members = path / "members"
        """The addresses of all nodes, for `--fleet`."""
        self.key = path / "key"

    @contextmanager
    def held(self, args: ClusterArgs) -> Iterator[None]:
        """Have the folder for a cluster of this process, as long as that lives: if it is killed,
        another one may. Raises ConfigError if another process has it, or it can't be made."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            lock = self._lock.open("w")
        except OSError as error:
            raise ConfigError(f"{self.path} can't be made: {error.strerror}", "name") from None
        with lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                end = f"end it with weft cluster scale 0 --name {self.path.name}"
                message = f"there is a cluster in {self.path}; {end}, and wait for its nodes"
                raise ConfigError(message, "name") from None
            if not self.key.exists():
                _write_whole(self.key, secrets.token_hex(32), mode=0o600)
            self.tell_members([])
            self._write(args)
            yield

    def point_to_ray(self) -> None:
        """Say that the cluster is on Ray from now on."""
        self.path.mkdir(parents=True, exist_ok=True)
        _write_whole(self._file, json.dumps(ON_RAY))

    @property
    def is_on_ray(self) -> bool:
        return self._file.exists() and self._said() == ON_RAY

    def read(self) -> ClusterArgs:
        """What the nodes of this machine were started with. Raises ConfigError."""
        try:
            return ClusterArgs.of(self._said())
        except (TypeError, KeyError):
            raise ConfigError(f"{self._file} does not describe a cluster", "name") from None

    def _said(self) -> Any:
        """The content of `cluster.json`. Raises ConfigError."""
        try:
            return json.loads(self._file.read_text("utf-8"))
        except FileNotFoundError:
            message = f"there is no cluster in {self.path}; start one with weft cluster up"
            raise ConfigError(f"{message}, or give --at", "name") from None
        except (OSError, ValueError) as error:
            raise ConfigError(f"{self._file} can't be read: {error}", "name") from None

    def scale(self, num_nodes: int) -> None:
        """Let there be so many nodes from now on. Raises ConfigError, also if nobody has the
        folder, so that no node would be started or ended."""
        args = self.read()
        try:
            with self._lock.open("a") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._write(replace(args, num_nodes=num_nodes))
        except OSError as error:
            raise ConfigError(f"{self._lock} can't be read: {error.strerror}", "name") from None
        else:
            message = f"weft cluster up does not run for {self.path}; start it again"
            raise ConfigError(message, "name")

    def tell_members(self, addresses: Sequence[str]) -> None:
        """Write the file `members`. `addresses`: HOST:PORT each."""
        _write_whole(self.members, "".join(f"{address}\n" for address in addresses))

    @property
    def _file(self) -> Path:
        return self.path / "cluster.json"

    @property
    def _lock(self) -> Path:
        return self.path / "lock"

    def _write(self, args: ClusterArgs) -> None:
        _write_whole(self._file, json.dumps(asdict(args), indent=1))


def _write_whole(path: Path, text: str, mode: int = 0o666) -> None:
    """Write a file whose readers see either the old content or the new one. Raises ConfigError."""
    part = path.with_suffix(".new")
    try:
        with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode), "w") as file:
            file.write(text)
        part.replace(path)
    except OSError as error:
        raise ConfigError(f"{path} can't be written: {error.strerror}", "name") from None

"""Who starts the nodes of a cluster: processes of this machine, Ray, or somebody else.

Each node is a `weft serve --fleet ...`. A launcher keeps nodes running and knows where they are.
What they do, they arrange among themselves.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal, Protocol

from weft.core.errors import ConfigError

FLEET_PORT = 7070
"""The port at which the first node of a machine is reached by others; HTTP has 8000."""

State = Literal["starting", "up", "ended"]


@dataclass(frozen=True, slots=True)
class Placed:
    """A node that a launcher has started."""

    name: str
    url: str
    """Where it answers HTTP."""
    state: State
    restarts: int = 0


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
    """What a node takes of Ray's resources."""
    num_gpus: float = 0
    flags: tuple[str, ...] = ()
    """Further ones, of `weft serve`."""

    @property
    def names(self) -> list[str]:
        return [f"node-{index}" for index in range(self.num_nodes)]

    def command(self, name: str, members: Path, key: Path, host: str, port: int) -> list[str]:
        """The arguments of `weft` for a node that others find at `host`. `members` lists them."""
        fleet_port = fleet_port_of(self, port)
        return [
            *("serve", self.model, "--host", host, "--port", str(port)),
            *("--registry", self.registry, "--fleet", str(members), "--fleet-key", str(key)),
            *("--fleet-listen", f"{host}:{fleet_port}", "--node-name", name, *self.flags),
        ]


def fleet_port_of(args: ClusterArgs, port: int) -> int:
    """Where the node with this HTTP port is reached by other nodes."""
    return FLEET_PORT + port - args.port


class ClusterFolder:
    """What a machine knows of a cluster: what it was started with, and its secret."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.members = path / "members"
        """The addresses of all nodes, for `--fleet`."""
        self.key = path / "key"

    def create(self, on: str, args: ClusterArgs) -> None:
        """Raises ConfigError if a cluster of that name is there."""
        if self._file.exists() and self.read()[1].num_nodes:
            message = f"there is a cluster in {self.path}; end it with weft cluster scale 0"
            raise ConfigError(message, "name")
        self.path.mkdir(parents=True, exist_ok=True)
        if not self.key.exists():
            with os.fdopen(os.open(self.key, os.O_WRONLY | os.O_CREAT, 0o600), "w") as file:
                file.write(secrets.token_hex(32))
        self.tell_members([])
        self._write(on, args)

    def read(self) -> tuple[str, ClusterArgs]:
        """The kind of its launcher, and its arguments. Raises ConfigError."""
        try:
            found = json.loads(self._file.read_text())
        except FileNotFoundError:
            message = f"there is no cluster in {self.path}; start one with weft cluster up"
            raise ConfigError(message, "name") from None
        on = found.pop("on")
        return on, ClusterArgs(**{**found, "flags": tuple(found["flags"])})

    def scale(self, num_nodes: int) -> ClusterArgs:
        """Let there be so many nodes from now on."""
        on, args = self.read()
        args = replace(args, num_nodes=num_nodes)
        self._write(on, args)
        return args

    def tell_members(self, addresses: Sequence[str]) -> None:
        """`addresses`: HOST:PORT each."""
        _write_whole(self.members, "".join(f"{address}\n" for address in addresses))

    @property
    def _file(self) -> Path:
        return self.path / "cluster.json"

    def _write(self, on: str, args: ClusterArgs) -> None:
        _write_whole(self._file, json.dumps({"on": on, **asdict(args)}, indent=1))


def _write_whole(path: Path, text: str) -> None:
    """Whoever reads it sees the old content or the new one."""
    part = path.with_suffix(".new")
    part.write_text(text)
    part.replace(path)

"""Encodes records for links between processes and nodes, as msgpack."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar, get_args

import msgspec

from weft.core.config import EngineArgs
from weft.core.messages import Command, Report
from weft.core.stats import EngineInfo
from weft.fleet.reports import ReportUpdate
from weft.metrics.logs import LogArgs

T = TypeVar("T")


class Codec(Generic[T]):
    """Encodes records of a union in msgpack, each as a pair: its class's name and its fields."""

    def __init__(self, kinds: tuple[type[T], ...]) -> None:
        self._encode = msgspec.msgpack.Encoder().encode
        self._split = msgspec.msgpack.Decoder(tuple[str, msgspec.Raw]).decode
        self._decode = {kind.__name__: msgspec.msgpack.Decoder(kind).decode for kind in kinds}

    def encode(self, record: T) -> bytes:
        return self._encode((type(record).__name__, record))

    def decode(self, data: bytes) -> T:
        kind, payload = self._split(data)
        return self._decode[kind](payload)


@dataclass(frozen=True, slots=True)
class EngineOrder:
    """The first message to an engine's process: what it is to run, and how it logs."""

    args: EngineArgs
    logs: LogArgs | None
    """None: logging is not configured."""
    report_s: float | None
    """See `weft.engine.serve.run_engine`."""


@dataclass(frozen=True, slots=True)
class Hello:
    """The first message of a link to another node: who sends its requests over it."""

    client: str
    """The id of that process, the same on all of its links."""
    who: str = ""
    """What logs call it; "" from a version of Weft that does not say."""


@dataclass(frozen=True, slots=True)
class Beat:
    """A sign of life of a node's client."""


@dataclass(frozen=True, slots=True)
class Drain:
    """Take no more requests, so that clients move those that they have there; or serve again."""

    draining: bool


@dataclass(frozen=True, slots=True)
class Rest:
    """Be idle, as the other nodes can serve all requests; or serve again."""

    idle: bool


@dataclass(frozen=True, slots=True)
class Welcome:
    """The answer to Hello: this node's engine is up."""

    node: str
    process: str
    """Which process it is; see `Hello.client`."""
    info: EngineInfo


@dataclass(frozen=True, slots=True)
class Gone:
    """The node's engine is gone, with all requests that it had; the link ends with this."""

    message: str
    killed: bool
    """See `EngineDead`."""


@dataclass(frozen=True, slots=True)
class GetPiece:
    """Asks for a part of a file that the node keeps of an adapter. It needs no Hello before it."""

    content: str
    """The `Listing.key` of the files."""
    name: str
    start: int
    """From which byte on."""


@dataclass(frozen=True, slots=True)
class FilePiece:
    """The answer to GetPiece; those of one link come in the order in which they were asked for."""

    data: bytes | None
    """None: the node does not have it, or has too much to do."""


Down = Command | Hello | Beat | Drain | Rest | GetPiece
Up = Report | Welcome | Gone | ReportUpdate

ORDERS: Codec[EngineOrder] = Codec((EngineOrder,))
COMMANDS: Codec[Command] = Codec(get_args(Command))
REPORTS: Codec[Report] = Codec(get_args(Report))
DOWN: Codec[Down] = Codec(get_args(Down))
UP: Codec[Up] = Codec(get_args(Up))
PIECES: Codec[FilePiece] = Codec((FilePiece,))

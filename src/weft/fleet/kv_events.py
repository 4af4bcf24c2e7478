"""Tells subscribers which prefixes an engine has cached, over ZeroMQ, in the form that vLLM gives
such events since its version 0.24: llm-d's index of prefixes and Dynamo's router read it.

    frames    topic | number of the message, 8 bytes, big-endian | EventBatch in msgpack
    batch     [unix time, [event, ...], 0]
    event     {"type": "BlockStored", "block_hashes": [...], "lora_name": ..., ...}

The first event says that nothing is cached, as an engine with blocks may have died before. A
subscriber that has missed messages asks for them at the replay endpoint, from a DEALER socket, by
the number of the first one.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import msgspec
import zmq

from weft.core.config import KvEventsArgs
from weft.core.errors import ConfigError
from weft.schedule.journal import BlocksStored, CacheEvent

logger = logging.getLogger(__name__)

MEDIUM = "GPU"
"""Where the blocks are, as readers know it, whatever the device is."""
END = (-1).to_bytes(8, "big", signed=True)
"""The number of the message that ends a replay."""


class BlockStored(msgspec.Struct, omit_defaults=True, tag=True):
    """Blocks of `block_size` tokens each that can be found from now on."""

    block_hashes: list[int]
    """Any 64 bits. The same content has the same ones, in all engines of one version of Weft."""
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None


class BlockRemoved(msgspec.Struct, omit_defaults=True, tag=True):
    """Blocks that can't be found any more."""

    block_hashes: list[int]
    medium: str | None


class AllBlocksCleared(msgspec.Struct, omit_defaults=True, tag=True):
    """There are no blocks."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(msgspec.Struct, array_like=True):
    """The content of a message."""

    ts: float
    events: list[Event]
    data_parallel_rank: int | None = 0


def _hash(key: bytes) -> int:
    return int.from_bytes(key[-8:], "big")


def _to_wire(event: CacheEvent, block_size: int) -> Event:
    hashes = [_hash(key) for key in event.keys]
    if isinstance(event, BlocksStored):
        parent = None if event.parent is None else _hash(event.parent)
        adapter = event.adapter
        return BlockStored(hashes, parent, event.token_ids, block_size, None, MEDIUM, adapter)
    return BlockRemoved(hashes, MEDIUM)


class KvEventPublisher:
    """Publishes for one engine, on the thread that made it. Sending never waits: a subscriber that
    is too slow loses messages, and sees that by their numbers."""

    def __init__(self, args: KvEventsArgs, block_size: int) -> None:
        """Raises ConfigError if the endpoints can't be bound."""
        self._block_size = block_size
        self._topic = args.topic.encode()
        self._context: Any = zmq.Context()
        self._encode = msgspec.msgpack.Encoder().encode
        self._number = 0
        self._lock = threading.Lock()
        self._sent: deque[tuple[bytes, bytes]] = deque(maxlen=args.buffer_steps)
        """The last messages, for replays."""
        self._socket = self._open(zmq.PUB, args.endpoint, "endpoint")
        self._socket.set_hwm(args.hwm)
        if args.replay_endpoint is not None:
            replays = self._open(zmq.ROUTER, args.replay_endpoint, "replay_endpoint")
            threading.Thread(target=self._serve_replays, args=(replays,), daemon=True).start()

    def _open(self, kind: int, endpoint: str, field: str) -> Any:
        """A socket that binds to its endpoint or, as with vLLM, connects to it if it has no
        wildcard: it is then that of a subscriber to many engines."""
        socket = self._context.socket(kind)
        socket.linger = 0
        binds = kind == zmq.ROUTER or "*" in endpoint or "::" in endpoint or "ipc:" in endpoint
        try:
            socket.bind(endpoint) if binds else socket.connect(endpoint)
        except zmq.ZMQError as error:
            self._context.destroy()
            message = f"--kv-events-config: {field} {endpoint}: {error.strerror}"
            raise ConfigError(message, "kv_events_config") from error
        return socket

    def publish(self, events: Sequence[CacheEvent]) -> None:
        told: list[Event] = [] if self._number else [AllBlocksCleared()]
        told += [_to_wire(event, self._block_size) for event in events]
        number = self._number.to_bytes(8, "big")
        payload = self._encode(EventBatch(time.time(), told))
        self._number += 1
        with self._lock:
            self._sent.append((number, payload))
        self._socket.send_multipart((self._topic, number, payload))

    def _serve_replays(self, socket: Any) -> None:
        """Answer each number with all messages from it on that are still there."""
        while True:
            try:
                client, _, first = socket.recv_multipart()
            except ValueError:
                logger.warning("a request for a replay that is not a number was ignored")
                continue
            except zmq.ContextTerminated:
                socket.close()
                return
            with self._lock:
                sent = list(self._sent)
            for number, payload in sent:
                if number >= first:
                    socket.send_multipart((client, b"", number, payload))
            socket.send_multipart((client, b"", END, b""))

    def close(self) -> None:
        """End the thread of the replays too."""
        self._socket.close()
        self._context.term()

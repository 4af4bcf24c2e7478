"""Fetches contents of adapters from other nodes, which is faster and cheaper than a bucket.

    this node, on a thread of its own                       a node that has the content
      GetPiece(content, file, from here on) ──────────────▶   (`weft.fleet.lender`)
      ... up to WINDOW of them                             ◀── FilePiece, and so on

Pieces have a connection of their own, so that tokens don't queue behind them. It goes to the port
at which the other node listens anyway, with the fleet's key. The registry's log names the sha256 of
the list of a content's files, which has the sha256 of each. So the list may come from another node
too. A list or file with another sha256 is dropped, and the node that sent it is not asked for a
while; nor is one that is slow or breaks off. Then the next node is asked, and the store in the end.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import msgspec
import zmq

from weft.fleet.curve import FleetKey
from weft.fleet.wire import DOWN, PIECES, GetPiece
from weft.registry.contents import (
    LISTING,
    MAX_LISTING_BYTES,
    Listing,
    StoredFile,
    content_key,
    parse_listing,
)

T = TypeVar("T")

logger = logging.getLogger(__name__)

PIECE_BYTES = 1 << 18
"""A node's tokens wait for one piece at most, which takes some tenths of a millisecond."""
WINDOW = 4
"""How many pieces are asked for before the first one has come."""
MAX_FETCHES = 4
"""How many contents a process gets from other nodes at a time; others come from the store."""
MAX_ASKED = 3
"""How many nodes are asked for a content."""
PIECE_S = 2.0
"""How long a node may take for the next piece, and to be reached."""
MIN_BYTES_PER_S, GRACE_S = 8 << 20, 1.0
"""A node whose average speed is below this, after this many seconds, is given up."""
AVOID_S = 60.0
"""For how long a node that failed is not asked again."""


class _PeerFailed(Exception):
    """A node did not give what it was asked for."""


class _PeerLacks(Exception):
    """A node has not got the content, or has too much to do."""


def choose_peers(
    content: str, asker: str, addresses: Iterable[str], avoided: Collection[str]
) -> list[str]:
    """Which of the nodes that are said to have a content are asked for it, one after the other.
    Each asker has an order of its own for each content, so that they don't all ask the same node.
    """
    usable = {address for address in addresses if address and address not in avoided}

    def place(address: str) -> bytes:
        return hashlib.blake2b(f"{content} {asker} {address}".encode(), digest_size=8).digest()

    return sorted(usable, key=place)[:MAX_ASKED]


class PeerContents:
    """Gets contents from other nodes; for any thread."""

    def __init__(self, key: FleetKey, asker: str) -> None:
        """`asker` is a name that tells this process from others."""
        self._key, self._asker = key, asker
        self._context: Any = zmq.Context()
        self._places = threading.BoundedSemaphore(MAX_FETCHES)
        self._avoided: dict[str, float] = {}
        """Until when each node is not asked."""
        self._closed = False

    def find_listing(self, digest: str, sha256: str, addresses: Sequence[str]) -> Listing | None:
        """The list of a content's files, with this sha256; None if none of the nodes at these
        addresses gives it soon."""
        key = content_key(digest, sha256)

        def ask(socket: Any) -> Listing:
            said = b""
            while not len(said) % PIECE_BYTES and len(said) < MAX_LISTING_BYTES:
                socket.send(DOWN.encode(GetPiece(key, LISTING, len(said))), zmq.DONTWAIT)
                if not (piece := self._next(socket)):
                    break
                said += piece
            listing = parse_listing(said, digest, sha256)
            if listing is None:
                raise _PeerFailed("its list of files is not the one that the registry names")
            return listing

        return self._from_any(key, addresses, ask)

    def fetch(self, listing: Listing, stage: Path, addresses: Sequence[str]) -> bool:
        """Write the files of a content to an empty folder. `addresses`: the nodes that may have
        it. False, with the folder empty, if none of them gives it soon."""

        def ask(socket: Any) -> bool:
            try:
                self._fetch_all(socket, listing, stage)
            except BaseException:
                for file in listing.files:
                    (stage / file.name).unlink(missing_ok=True)
                raise
            return True

        return bool(self._from_any(listing.key, addresses, ask))

    def _from_any(self, key: str, addresses: Sequence[str], ask: Callable[[Any], T]) -> T | None:
        """What `ask` gets of one of the nodes that may have a content; None if none gives it, or if
        enough is under way."""
        if not addresses or not self._places.acquire(blocking=False):
            return None
        try:
            now = time.monotonic()
            avoided = {each for each, until_s in self._avoided.copy().items() if now < until_s}
            for address in choose_peers(key, self._asker, addresses, avoided):
                try:
                    with self._connected(address) as socket:
                        return ask(socket)
                except _PeerLacks:
                    logger.debug("the node at %s does not give %s", address, key)
                except (_PeerFailed, zmq.ZMQError, msgspec.DecodeError) as error:
                    message = "the node at %s is not asked for adapters for %d s: %s"
                    logger.warning(message, address, AVOID_S, error)
                    self._avoided[address] = time.monotonic() + AVOID_S
            return None
        finally:
            self._places.release()

    async def close(self) -> None:
        """Cancel the fetches under way, and start no more."""
        self._closed = True
        await asyncio.to_thread(self._context.term)

    @contextmanager
    def _connected(self, address: str) -> Iterator[Any]:
        socket: Any = self._context.socket(zmq.DEALER)
        try:
            socket.linger = 0
            socket.ipv6 = address.startswith("[")
            socket.setsockopt(zmq.MAXMSGSIZE, 2 * PIECE_BYTES)
            self._key.lock(socket, server=False)
            socket.connect(f"tcp://{address}")
            yield socket
        finally:
            socket.close()

    @staticmethod
    def _next(socket: Any) -> bytes:
        """The next piece that a node sends. Raises _PeerFailed, _PeerLacks."""
        if not socket.poll(int(PIECE_S * 1e3)):
            raise _PeerFailed("it does not answer")
        data = PIECES.decode(socket.recv()).data
        if data is None:
            raise _PeerLacks
        return data

    def _fetch_all(self, socket: Any, listing: Listing, stage: Path) -> None:
        begun_s, before = time.monotonic(), 0
        for file in listing.files:
            with (stage / file.name).open("xb") as stream:
                self._fetch_file(socket, listing.key, file, stream, begun_s, before)
            before += file.num_bytes

    def _fetch_file(
        self,
        socket: Any,
        content: str,
        file: StoredFile,
        stream: BinaryIO,
        begun_s: float,
        before: int,
    ) -> None:
        """`before`: the bytes that have come since `begun_s`."""
        sha, asked, got = hashlib.sha256(), 0, 0
        while got < file.num_bytes:
            while asked < min(file.num_bytes, got + WINDOW * PIECE_BYTES):
                socket.send(DOWN.encode(GetPiece(content, file.name, asked)), zmq.DONTWAIT)
                asked += PIECE_BYTES
            piece = self._next(socket)
            if len(piece) != min(PIECE_BYTES, file.num_bytes - got):
                raise _PeerFailed(f"it sends {file.name} in pieces of another size")
            stream.write(piece)
            sha.update(piece)
            got += len(piece)
            slow_s = time.monotonic() - begun_s - GRACE_S
            if self._closed or slow_s > (before + got) / MIN_BYTES_PER_S:
                raise _PeerFailed("it is too slow")
        if sha.hexdigest() != file.sha256:
            raise _PeerFailed(f"what it has as {file.name} is not what the registry has")

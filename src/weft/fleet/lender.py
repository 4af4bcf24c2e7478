"""Sends contents on this machine to other nodes, piece by piece; see `weft.fleet.peers`.

One piece at a time is read, on a thread, and sent before the next one, after a pause. So what
others fetch takes no more memory than that, a step's tokens wait for one piece at most, and the
thread that encrypts both has time for tokens.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from weft.core.duty import going_on
from weft.fleet.peers import PIECE_BYTES
from weft.fleet.wire import FilePiece, GetPiece
from weft.registry.contents import Contents

MAX_WAITING = 64
"""How many pieces may be asked for and not sent yet; who asks for more is refused."""
PAUSE_S = 0.001
"""Between two pieces, which makes 256 MB a second at most."""


class ContentLender:
    """Answers who asks for pieces; on one event loop."""

    def __init__(self, contents: Contents, send: Callable[[bytes, FilePiece], None]) -> None:
        """`send`: called with the address of the one who asked, and the answer."""
        self._contents = contents
        self._send = send
        self._waiting: asyncio.Queue[tuple[bytes, GetPiece]] = asyncio.Queue(MAX_WAITING)

    def ask(self, address: bytes, wanted: GetPiece) -> None:
        try:
            self._waiting.put_nowait((address, wanted))
        except asyncio.QueueFull:
            self._send(address, FilePiece(None))

    async def serve(self) -> None:
        loop, read = asyncio.get_running_loop(), self._contents.read_piece
        # A thread of its own, as all others of this process may be waiting for pieces themselves.
        with ThreadPoolExecutor(1, "weft-lender") as reader:
            while True:
                address, asked = await self._waiting.get()
                data = None
                with going_on("a piece was not read"):
                    data = await loop.run_in_executor(
                        reader, read, asked.content, asked.name, asked.start, PIECE_BYTES
                    )
                self._send(address, FilePiece(data))
                await asyncio.sleep(PAUSE_S)

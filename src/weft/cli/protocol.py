"""HTTP as uvicorn speaks it with httptools, with a bound on what comes before a body."""

from __future__ import annotations

from typing import Any

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES = 64 << 10
"""Of a request line and headers, beyond what one read from the socket brings."""
KEEP_ALIVE_S = 75
"""How long an idle connection stays open. Clients and proxies keep theirs for up to a minute, and
must be the first to close: a request that crosses the server's close is lost."""


def http_config(app: FastAPI, **options: Any) -> uvicorn.Config:
    """What is the same for all servers of the application."""
    return uvicorn.Config(
        app,
        http=BoundedHead,
        log_config=None,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        **options,
    )


class BoundedHead(HttpToolsProtocol):
    """A request whose head does not end gets a 400, and its connection is closed."""

    _head_bytes: int | None = None
    """Of the head that is coming; None: none is."""

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._head_bytes is not None:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
                self.send_400_response("The head of the request is too large.")

    def on_message_begin(self) -> None:
        self._head_bytes = 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._head_bytes = None
        super().on_headers_complete()

"""What happens to every request, whatever its route: its id, its key, its place in the metrics."""

from __future__ import annotations

import hashlib
import hmac
import logging
import uuid
from collections.abc import Sequence

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from weft.api.errors import error_response
from weft.api.http import CLIENT_LEFT
from weft.api.settings import ApiKey, key_name_var
from weft.core.errors import Unauthorized
from weft.metrics import Metrics
from weft.metrics.logs import request_id_var

logger = logging.getLogger(__name__)

REQUEST_ID = "x-request-id"
OPEN_PATHS = frozenset({"/health", "/metrics", "/version"})
"""These routes answer without a key, as probes and scrapers have none."""

_MAX_ID_LENGTH = 128


class RequestIds:
    """Gives each request an id, the client's own if it sent a plain one, and answers with it."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        own = Headers(scope=scope).get(REQUEST_ID, "")
        chosen = own if _plain(own) else uuid.uuid4().hex

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[REQUEST_ID] = chosen
            await send(message)

        token = request_id_var.set(chosen)
        try:
            await self._app(scope, receive, send_with_id)
        finally:
            request_id_var.reset(token)


def _plain(own: str) -> bool:
    return 0 < len(own) <= _MAX_ID_LENGTH and own.isascii() and own.isprintable()


class Observe:
    """Counts requests by route and status, and answers what nobody expected with a plain 500."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status = CLIENT_LEFT

        async def watch(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, watch)
        except ClientDisconnect:
            logger.debug("a client left while it sent its request")
        except Exception as error:
            if status != CLIENT_LEFT:
                raise
            await error_response(error)(scope, receive, watch)
        finally:
            route = getattr(scope.get("route"), "path", "unmatched")
            self._metrics.http_requests.labels(route, str(status)).inc()


class RequireKey:
    """Lets only requests pass that carry one of the keys as a bearer token, and keeps its name."""

    def __init__(self, app: ASGIApp, keys: Sequence[ApiKey]) -> None:
        self._app = app
        self._names = {_digest(key.secret.encode()): key.name for key in keys}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            given = Headers(scope=scope).get("authorization")
            name = None if given is None else self._name_of(given)
            if name is None:
                what = "Incorrect API key" if given else "No API key"
                error = Unauthorized(f"{what} provided; send it as 'Authorization: Bearer KEY'")
                await error_response(error)(scope, receive, send)
                return
            key_name_var.set(name)
        await self._app(scope, receive, send)

    def _name_of(self, given: str) -> str | None:
        """The name of the key that is given; None if it is no key. Takes the same time for every
        wrong token: all keys are compared, by digest."""
        scheme, _, token = given.partition(" ")
        digest = _digest(token.strip().encode("latin-1"))
        equal = [key for key in self._names if hmac.compare_digest(digest, key)]
        return self._names[equal[0]] if equal and scheme.lower() == "bearer" else None


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()

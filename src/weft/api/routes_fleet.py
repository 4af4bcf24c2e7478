"""Routes for operators of a fleet: its nodes, why requests went where they did, and draining."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from weft.api.audit import AuditLog
from weft.api.bodies import ClosedBody
from weft.api.http import ERRORS, body_of, error_response, json_response
from weft.api.reading import read_body
from weft.api.service import Fleet, Service
from weft.core.errors import InvalidRequest, WeftError
from weft.metrics.logs import request_id_var

EXPLAIN = "x-weft-explain"
"""The header that asks for `ROUTED` in the answer."""
ROUTED = "x-weft-routed"
MAX_SHOWN = 4
"""How many placements, and how many nodes of each, an answer's header tells of."""


class ExplainRoutes:
    """Tells those who ask for it, in the header `ROUTED` of the answer, where a request went until
    its answer began, and what that and the next best nodes would have cost it."""

    def __init__(self, app: ASGIApp, service: Service, fleet: Fleet) -> None:
        self._app = app
        self._service = service
        self._fleet = fleet

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or EXPLAIN not in Headers(scope=scope):
            await self._app(scope, receive, send)
            return
        try:
            self._service.access.need("admin")
        except WeftError as error:
            await error_response(error, scope["path"])(scope, receive, send)
            return

        async def send_explained(message: Message) -> None:
            if message["type"] == "http.response.start":
                placed = self._fleet.explain(request_id_var.get() or "")
                MutableHeaders(scope=message)[ROUTED] = _shown(placed)
            await send(message)

        await self._app(scope, receive, send_explained)


def _shown(placed: Sequence[dict[str, Any]]) -> str:
    return json.dumps(
        [{**each, "costs": each["costs"][:MAX_SHOWN]} for each in placed[-MAX_SHOWN:]],
        separators=(",", ":"),
    )


class DrainBody(ClosedBody):
    node: str = Field(min_length=1)
    draining: bool = True
    """False lets the node take requests again."""


def fleet_routes(service: Service, fleet: Fleet, audit: AuditLog) -> APIRouter:
    router = APIRouter(responses=ERRORS)

    @router.get("/fleet")
    async def nodes() -> Response:
        """All nodes as this server knows them: whether they are up, their load, what their steps
        and loads take. Costs are in seconds. `pins`: adapters that labels keep on some nodes."""
        service.access.need("admin")
        return json_response({"nodes": fleet.describe(), "pins": fleet.pins()})

    @router.post("/fleet/drain", openapi_extra=body_of(DrainBody))
    async def drain(request: Request) -> Response:
        """Move all requests away from a node, wherever they came from, and let it take none; or
        let it take requests again."""
        service.access.need("admin")
        body = await read_body(request, DrainBody, service.settings.max_body_bytes)
        with audit.entry("drain" if body.draining else "undrain", body.node):
            fleet.drain(body.node, body.draining)
        return json_response({"node": body.node, "draining": body.draining})

    @router.get("/fleet/why/{request_id}")
    async def why(request_id: str) -> Response:
        """Why a request that came to this server lately went to which nodes: each time that it was
        placed, with what every node would have cost it. The id is that of the answer, or of its
        header `x-request-id`."""
        service.access.need("admin")
        placed = fleet.explain(request_id)
        if not placed:
            message = f"no request {request_id!r} came to this server lately"
            raise InvalidRequest(message, "request_id")
        return json_response({"request_id": request_id, "placed": placed})

    return router

"""Routes for those who run a fleet: its nodes, why requests went where they did, and draining."""

from __future__ import annotations

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import Response

from weft.api.bodies import ClosedBody
from weft.api.http import ERRORS, body_of, json_response
from weft.api.reading import read_body
from weft.api.service import Fleet, Service
from weft.core.errors import InvalidRequest


class DrainBody(ClosedBody):
    node: str = Field(min_length=1)
    draining: bool = True
    """False lets the node take requests again."""


def fleet_routes(service: Service, fleet: Fleet) -> APIRouter:
    router = APIRouter(responses=ERRORS)

    @router.get("/fleet")
    async def nodes() -> Response:
        """All nodes as this server knows them: whether they are up, their load, what their steps
        and loads take. Costs are in seconds."""
        service.access.need("admin")
        return json_response({"nodes": fleet.describe()})

    @router.post("/fleet/drain", openapi_extra=body_of(DrainBody))
    async def drain(request: Request) -> Response:
        """Move all requests away from a node, wherever they came from, and let it take none; or
        let it take requests again."""
        service.access.need("admin")
        body = await read_body(request, DrainBody, service.settings.max_body_bytes)
        fleet.drain(body.node, body.draining)
        return json_response({"node": body.node, "draining": body.draining})

    @router.get("/fleet/why/{request_id}")
    async def why(request_id: str) -> Response:
        """Why a request that came to this server lately went to which nodes: each time that it was
        placed, with what every node would have cost it."""
        service.access.need("admin")
        placed = fleet.explain(request_id)
        if not placed:
            message = f"no request {request_id!r} came to this server lately"
            raise InvalidRequest(message, "request_id")
        return json_response({"request_id": request_id, "placed": placed})

    return router

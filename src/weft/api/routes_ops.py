"""Routes for operators: `/health`, `/metrics`, `/version`."""

from __future__ import annotations

from importlib.metadata import version

from fastapi import APIRouter
from starlette.responses import Response

from weft.api.http import json_response
from weft.api.openapi import TEXT
from weft.api.service import Service
from weft.core.errors import EngineDead
from weft.metrics import CONTENT_TYPE


def ops_routes(service: Service) -> APIRouter:
    router = APIRouter()

    @router.get("/health", response_class=Response)
    async def health() -> Response:
        """Answers 200 while the engine runs, 503 while it does not or starts again."""
        if not service.engine.alive:
            raise EngineDead("the engine is not running")
        return Response(status_code=200)

    @router.get("/metrics", response_class=Response, responses=TEXT)
    async def metrics() -> Response:
        """Metrics for Prometheus."""
        adapters = service.registry.adapters()
        text = service.metrics.render(service.engine.info, await service.stats(), adapters)
        return Response(text, media_type=CONTENT_TYPE)

    @router.get("/version")
    async def show_version() -> Response:
        return json_response({"version": version("weft")})

    return router

"""For operators: `/health`, `/metrics`, `/version`."""

from __future__ import annotations

from importlib.metadata import version

from fastapi import APIRouter
from starlette.responses import Response

from weft.api.http import json_response
from weft.api.service import Service
from weft.core.errors import EngineDead
from weft.core.types import EngineStats
from weft.metrics import CONTENT_TYPE


def ops_routes(service: Service) -> APIRouter:
    router = APIRouter()

    @router.get("/health")
    async def health() -> Response:
        if not service.engine.alive:
            raise EngineDead("the engine is not running")
        return Response(status_code=200)

    @router.get("/metrics")
    async def metrics() -> Response:
        text = service.metrics.render(
            service.engine.info, await _stats(service), _names_of(service)
        )
        return Response(text, media_type=CONTENT_TYPE)

    @router.get("/version")
    async def show_version() -> Response:
        return json_response({"version": version("weft")})

    return router


async def _stats(service: Service) -> EngineStats | None:
    try:
        return await service.engine.stats()
    except EngineDead:
        return None


def _names_of(service: Service) -> dict[str, list[str]]:
    """The live names of each digest."""
    names: dict[str, list[str]] = {}
    for ref in service.registry.adapters():
        names.setdefault(ref.digest, []).append(ref.name)
    return names

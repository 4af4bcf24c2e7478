"""Routes that tell of the server: `/v1/models`, `/health`, `/metrics`, `/version`."""

from __future__ import annotations

import time
from importlib.metadata import version
from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

from weft.api.http import TEXT, json_response
from weft.api.service import Service
from weft.core.errors import EngineDead
from weft.metrics import CONTENT_TYPE
from weft.registry import ModelCard


def server_routes(service: Service) -> APIRouter:
    router = APIRouter()
    created = int(time.time())

    async def quarantined() -> set[str]:
        """The names of adapters whose requests are refused."""
        cards = service.registry.adapter_cards()
        stats = await service.stats() if cards else None
        digests = stats.quarantined_adapters if stats else ()
        return {card.ref.name for card in cards if card.ref.digest in digests}

    def shown(card: ModelCard, refused: set[str]) -> dict[str, Any]:
        return {
            "id": card.id,
            "object": "model",
            "created": created,
            "owned_by": "weft",
            "root": card.root,
            "parent": card.parent,
            "max_model_len": service.engine.info.max_model_len,
            "quarantined": card.id in refused,
        }

    @router.get("/v1/models")
    async def list_models() -> Response:
        """The base model under each of its names, then the adapters. Those that failed their check
        when they were loaded again are quarantined: their requests are refused."""
        refused = await quarantined()
        cards = [shown(card, refused) for card in service.registry.models()]
        return json_response({"object": "list", "data": cards})

    @router.get("/v1/models/{model:path}")
    async def retrieve_model(model: str) -> Response:
        card = service.registry.card(model)
        return json_response(shown(card, await quarantined()))

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

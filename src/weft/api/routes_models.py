"""Which models there are: `/v1/models`."""

from __future__ import annotations

import time
from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

from weft.api.http import json_response
from weft.api.service import Service
from weft.registry import ModelCard


def model_routes(service: Service) -> APIRouter:
    router = APIRouter()
    created = int(time.time())

    def shown(card: ModelCard) -> dict[str, Any]:
        return {
            "id": card.id,
            "object": "model",
            "created": created,
            "owned_by": "weft",
            "root": card.root,
            "parent": card.parent,
            "max_model_len": service.engine.info.max_model_len,
        }

    @router.get("/v1/models")
    async def list_models() -> Response:
        """The base model under each of its names, then the adapters."""
        cards = service.registry.models()
        return json_response({"object": "list", "data": [shown(card) for card in cards]})

    @router.get("/v1/models/{model:path}")
    async def retrieve_model(model: str) -> Response:
        return json_response(shown(service.registry.card(model)))

    return router

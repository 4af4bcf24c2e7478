"""Which models there are: `/v1/models`, and loading and unloading adapters as vLLM does."""

from __future__ import annotations

import time
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import PlainTextResponse, Response

from weft.api.adapters import AdapterAdmin
from weft.api.http import json_response, read_body
from weft.api.schemas import LoadBody, UnloadBody
from weft.api.service import Service
from weft.core.errors import ModelNotFound


def model_routes(service: Service) -> APIRouter:
    router = APIRouter()
    created = int(time.time())

    def cards() -> list[dict[str, Any]]:
        return [
            {
                "id": card.id,
                "object": "model",
                "created": created,
                "owned_by": "weft",
                "root": card.root,
                "parent": card.parent,
                "max_model_len": service.engine.info.max_model_len,
            }
            for card in service.registry.models()
        ]

    @router.get("/v1/models")
    async def list_models() -> Response:
        return json_response({"object": "list", "data": cards()})

    @router.get("/v1/models/{model:path}")
    async def retrieve_model(model: str) -> Response:
        for card in cards():
            if card["id"] == model:
                return json_response(card)
        raise ModelNotFound(f"The model {model!r} does not exist", "model")

    return router


def adapter_routes(admin: AdapterAdmin, max_body_bytes: int) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/load_lora_adapter")
    async def load_lora_adapter(request: Request) -> Response:
        body = await read_body(request, LoadBody, max_body_bytes)
        body.check()
        await admin.load(body.lora_name, body.lora_path, replace=body.load_inplace)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")

    @router.post("/v1/unload_lora_adapter")
    async def unload_lora_adapter(request: Request) -> Response:
        body = await read_body(request, UnloadBody, max_body_bytes)
        await admin.unload(body.lora_name)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")

    return router

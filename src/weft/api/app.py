"""The HTTP application, put together."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from weft.api.adapters import AdapterAdmin
from weft.api.errors import add_error_handlers, error_response
from weft.api.http import CLIENT_LEFT
from weft.api.routes_chat import chat_routes
from weft.api.routes_completions import completion_routes
from weft.api.routes_models import adapter_routes, model_routes
from weft.api.routes_ops import ops_routes
from weft.api.service import Service
from weft.api.settings import ApiSettings
from weft.core.protocols import EngineClient
from weft.metrics import Metrics
from weft.registry import AdapterRegistry, AdapterRoots
from weft.text import Tokenizer

logger = logging.getLogger(__name__)


def create_app(
    engine: EngineClient,
    registry: AdapterRegistry,
    tokenizer: Tokenizer | None,
    roots: AdapterRoots,
    settings: ApiSettings,
) -> FastAPI:
    """The application; it neither starts nor closes the engine.

    `app.state.adapters` is its AdapterAdmin, for adapters that are loaded before serving.
    """
    metrics = Metrics()
    service = Service(engine, registry, tokenizer, settings, metrics)
    admin = AdapterAdmin(engine, registry, roots)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await admin.close()

    app = FastAPI(title="Weft", lifespan=lifespan, openapi_url=None)
    app.state.adapters = admin
    app.include_router(chat_routes(service))
    app.include_router(completion_routes(service))
    app.include_router(model_routes(service))
    app.include_router(adapter_routes(admin, settings.max_body_bytes))
    app.include_router(ops_routes(service))
    add_error_handlers(app)
    app.add_middleware(_Observe, metrics=metrics)
    return app


class _Observe:
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

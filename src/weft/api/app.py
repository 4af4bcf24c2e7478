"""Puts the HTTP application together."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

from weft.api.audit import AuditLog
from weft.api.callers import Tenants, keychain_of, tenant_of_key
from weft.api.desk import AdapterDesk
from weft.api.http import new_app
from weft.api.loop_watch import LoopWatch
from weft.api.middleware import (
    PROBES,
    REQUEST_ID,
    STATE,
    Observe,
    RequestIds,
    RequireKey,
    TraceContext,
    TraceSink,
)
from weft.api.reading import IGNORED
from weft.api.routes_adapters import adapter_routes
from weft.api.routes_chat import chat_routes
from weft.api.routes_completions import completion_routes
from weft.api.routes_fleet import ROUTED, ExplainRoutes, fleet_routes
from weft.api.routes_messages import message_routes
from weft.api.routes_page import ABOUT, page_files, page_routes
from weft.api.routes_pooling import pooling_routes
from weft.api.routes_registry import registry_routes
from weft.api.routes_responses import response_routes
from weft.api.routes_server import metrics_app, server_routes, tokenize_routes
from weft.api.routes_uploads import upload_routes
from weft.api.service import DIGEST, VERSION, Fleet, Service
from weft.api.settings import ApiSettings, parse_key
from weft.core.messages import EngineClient
from weft.core.version import __version__
from weft.metrics import Metrics
from weft.registry import AdapterRegistry, Sources
from weft.registry.blobs import Blobs
from weft.registry.shared import SharedRegistry
from weft.serving import LoopExecutor, Publisher
from weft.serving.follower import Follower
from weft.serving.releases import Releases
from weft.text import AdapterTokenizers, Tokenizer


def create_app(
    engine: EngineClient,
    registry: AdapterRegistry,
    tokenizer: Tokenizer | AdapterTokenizers | None,
    sources: Sources,
    settings: ApiSettings,
    traces: TraceSink | None = None,
    tenants: Tenants | None = None,
    audit: AuditLog | None = None,
    shared: tuple[SharedRegistry, Blobs] | None = None,
    fleet: Fleet | None = None,
) -> FastAPI:
    """The application; it neither starts nor closes the engine. `tokenizer` is the base's, with
    those of adapters already loaded; None: texts are not served. `sources` limits where clients'
    adapters may come from. `state.metrics_app` is for an address with metrics alone, and
    `state.tenant_of_key` finds the tenant of a connection. With a `shared` registry, all names are
    its own, and `state.follower` must be started before the application serves. `fleet`: the nodes
    behind `engine`, if it has several."""
    if tenants is not None:
        settings = replace(settings, tenants=tenants.by_name)
    if not isinstance(tokenizer, AdapterTokenizers):
        tokenizer = AdapterTokenizers(tokenizer)
    metrics = Metrics(settings.served_model_names[0])
    executor = LoopExecutor()
    publisher = Publisher(engine, registry, tokenizer, sources, executor, settings.tenants)
    follower = Follower(*shared, registry, publisher) if shared is not None else None
    releases = Releases(follower, publisher, executor) if follower is not None else None
    service = Service(
        engine,
        registry,
        tokenizer,
        settings,
        metrics,
        executor,
        traces=traces,
        tenants=tenants,
        follower=follower,
        fleet=fleet,
    )
    audit = audit or AuditLog(None)
    desk = AdapterDesk(service, publisher, releases, sources, executor, audit, tenants)

    watch = LoopWatch()

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with watch.watching(), audit.counting():
            yield
        await executor.close()
        await service.close()

    app = new_app("Weft", version=__version__, lifespan=lifespan)
    app.state.request_timeout_s = settings.request_timeout_s
    _add_routes(app, service, desk, watch, fleet, audit)
    app.state.follower, app.state.shadows = follower, service.shadows
    app.state.metrics_app = metrics_app(service, watch)
    _add_middleware(app, metrics, audit, settings, tenants)
    if traces is not None:
        app.add_middleware(TraceContext)
    return app


def _add_routes(
    app: FastAPI,
    service: Service,
    desk: AdapterDesk,
    watch: LoopWatch,
    fleet: Fleet | None,
    audit: AuditLog,
) -> None:
    """Add the routers' routes themselves: to include the routers would create each route again."""
    routers = [
        *(
            routes(service)
            for routes in (
                chat_routes,
                completion_routes,
                response_routes,
                message_routes,
                pooling_routes,
                tokenize_routes,
            )
        ),
        server_routes(service, watch),
        *(routes(service, desk) for routes in (adapter_routes, upload_routes, registry_routes)),
    ]
    if fleet is not None:
        routers.append(fleet_routes(service, fleet, audit))
        app.add_middleware(ExplainRoutes, service=service, fleet=fleet)
    for router in routers:
        app.router.routes.extend(router.routes)
    settings = service.settings
    if settings.page:
        registry, metrics = service.follower is not None, not settings.metrics_apart
        app.router.routes.extend(
            page_routes(registry=registry, metrics=metrics, fleet=fleet is not None)
        )


def _add_middleware(
    app: FastAPI, metrics: Metrics, audit: AuditLog, settings: ApiSettings, tenants: Tenants | None
) -> None:
    """The middleware added last sees a request first. Browsers' preflight requests carry no key."""
    given = keychain_of([parse_key(key) for key in settings.api_keys])
    open_paths = PROBES | ({ABOUT, *page_files()} if settings.page else frozenset())
    if tenants is not None:
        app.add_middleware(RequireKey, keychain=lambda: tenants.keychain, open_paths=open_paths)
    elif settings.api_keys:
        app.add_middleware(RequireKey, keychain=lambda: given, open_paths=open_paths | STATE)
    app.state.tenant_of_key = lambda key: tenant_of_key(
        key, (tenants.keychain if tenants is not None else None) or given
    )
    app.add_middleware(Observe, metrics=metrics, audit=audit)
    if settings.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.allowed_origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=[REQUEST_ID, IGNORED, VERSION, DIGEST, ROUTED, "retry-after"],
        )
    app.add_middleware(RequestIds)

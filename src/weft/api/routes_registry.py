"""Routes for a shared registry: what it knows of a name, and releases of versions."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated

from fastapi import APIRouter, Request
from pydantic import BaseModel, Field
from starlette.responses import Response

from weft.api.bodies import ClosedBody
from weft.api.desk import AdapterDesk
from weft.api.http import ERRORS, body_of, json_response
from weft.api.reading import read_body
from weft.api.service import Service
from weft.core.errors import AdapterNotFound, InvalidRequest
from weft.registry.records import Name
from weft.serving.releases import Order, Wait

_Named = Annotated[str, Field(min_length=1)]


class RollbackBody(ClosedBody):
    name: _Named
    expect: int | None = None
    """The generation that the name must have, if nobody else may have changed it meanwhile."""
    wait: Wait = "here"
    """What the answer waits for: `commit`, `here` or `all`."""


class ReleaseBody(RollbackBody):
    to: str | None = None
    """The version that is to answer: `v8`, `8` or `sha256:...`."""
    canary: float | None = None
    """The percentage of the requests that it gets; without it, all."""
    shadow: str | None = None
    """A version that runs the requests too. Nobody sees its answers."""


class ShownVersion(BaseModel):
    digest: str
    bytes: int
    source: str
    base: str
    metadata: dict[str, str]


class ShownShare(BaseModel):
    version: int
    weight: float


class ShownChange(BaseModel):
    generation: int
    time: str
    actor: str
    change: str


class ShownName(BaseModel):
    """What a shared registry knows of one name."""

    name: str
    generation: int
    """How many changes there were; the next change may expect it."""
    pinned: bool
    route: list[ShownShare]
    shadow: int | None
    versions: dict[int, ShownVersion]
    history: list[ShownChange]
    """The last changes, the newest first."""


def registry_routes(service: Service, desk: AdapterDesk) -> APIRouter:
    router = APIRouter(responses=ERRORS)

    @router.get("/v1/registry/names/{name:path}", response_model=ShownName)
    async def show_name(name: str) -> Response:
        """The versions of a name, which of them answer, and its history."""
        if service.follower is None:
            raise InvalidRequest("this server has no shared registry (--registry)")
        whole = service.access.to_retire(name)
        entry = service.follower.names.entry(whole)
        if entry is None:
            raise AdapterNotFound(f"the registry has no adapter {name!r}", "name")
        return _answer(whole, entry)

    @router.post(
        "/v1/registry/releases", response_model=ShownName, openapi_extra=body_of(ReleaseBody)
    )
    async def release(request: Request) -> Response:
        """Let requests for a name go to one of its versions, or a part of them."""
        body = await read_body(request, ReleaseBody, service.settings.max_body_bytes)
        order = Order(body.to, body.canary, body.shadow)
        return _answer(*await desk.release(body.name, order, body.expect, body.wait))

    @router.post(
        "/v1/registry/rollbacks", response_model=ShownName, openapi_extra=body_of(RollbackBody)
    )
    async def rollback(request: Request) -> Response:
        """Let requests for a name go where they went before the version that came last."""
        body = await read_body(request, RollbackBody, service.settings.max_body_bytes)
        return _answer(*await desk.release(body.name, None, body.expect, body.wait))

    return router


def _answer(name: str, entry: Name) -> Response:
    shown = ShownName(
        name=name,
        generation=entry.generation,
        pinned=entry.pinned,
        route=[ShownShare(version=s.number, weight=s.weight) for s in entry.route.shares],
        shadow=entry.route.shadow,
        versions={
            number: ShownVersion(
                digest=version.digest,
                bytes=version.num_bytes,
                source=version.source,
                base=version.base,
                metadata=version.metadata,
            )
            for number, version in sorted(entry.versions.items())
        },
        history=[
            ShownChange(
                generation=change.generation,
                time=datetime.fromtimestamp(change.time, UTC).isoformat(timespec="milliseconds"),
                actor=change.actor,
                change=change.what,
            )
            for change in reversed(entry.history)
        ],
    )
    return json_response(shown.model_dump())

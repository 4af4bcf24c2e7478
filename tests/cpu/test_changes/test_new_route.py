"""A route is a router that the application includes: it gets keys, errors, request ids and metrics
from what is there."""

from __future__ import annotations

from pathlib import Path

from fastapi import APIRouter
from http_api import Web, World
from toy_tokenizers import byte_level

from weft.registry import AdapterRegistry


def shout_routes(registry: AdapterRegistry) -> APIRouter:
    router = APIRouter()

    @router.get("/v1/shout/{name}")
    async def shout(name: str) -> dict[str, str]:
        """The name of a model that is served, loudly."""
        registry.resolve(name).release()
        return {"shout": name.upper()}

    return router


async def test_a_route_is_a_router(tmp_path: Path) -> None:
    world = World(tmp_path, byte_level(), api_keys=["secret"])
    world.app.include_router(shout_routes(world.registry))
    key = {"authorization": "Bearer secret"}
    web = Web(world)
    assert (await web.get("/v1/shout/base")).status_code == 401
    found = await web.http.get("/v1/shout/base", headers=key)
    assert (found.status_code, found.json()) == (200, {"shout": "BASE"})
    assert found.headers["x-request-id"]
    missing = await web.http.get("/v1/shout/nobody", headers=key)
    assert missing.status_code == 404 and "nobody" in missing.json()["error"]["message"]
    metrics = (await web.http.get("/metrics", headers=key)).text
    assert 'route="/v1/shout/{name}",status="404"' in metrics
    assert "/v1/shout/{name}" in world.app.openapi()["paths"]

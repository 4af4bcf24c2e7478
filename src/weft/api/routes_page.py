"""The page at `/`: chat, adapters and load, for people. Its files lie in `page`, and it asks the
same routes as every client."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import cache
from importlib.resources import files

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from weft.api.http import json_response

ABOUT = "/ui/about.json"
"""What the server has, for the page to know which of its parts to show."""
_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
_HEADERS = {
    # The page loads nothing from elsewhere, runs nothing inline, and can't be shown in a frame.
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self';"
    " img-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none';"
    " frame-ancestors 'none'",
    "cache-control": "no-cache",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


@cache
def page_files() -> dict[str, tuple[bytes, str]]:
    """The page's files by their path on the server, each with its media type."""
    found = {}
    for file in files("weft.api").joinpath("page").iterdir():
        path = "/" if file.name == "index.html" else f"/ui/{file.name}"
        found[path] = file.read_bytes(), _TYPES[file.name.rpartition(".")[2]]
    return found


def page_routes(**has: bool) -> list[Route]:
    """A route for each file, and one for what the server has: a registry, metrics, a fleet. They
    are no part of the API, and need no key."""
    routes = [Route(ABOUT, _showing(json_response(has, headers=_HEADERS)))]
    for path, (content, media_type) in page_files().items():
        routes.append(Route(path, _showing(Response(content, 200, _HEADERS, media_type))))
    return routes


def _showing(answer: Response) -> Callable[[Request], Awaitable[Response]]:
    async def show(_: Request) -> Response:
        return answer

    return show

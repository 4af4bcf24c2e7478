"""The page at `/`: chat, adapters and load, for people. Its files lie in `page`, and it asks the
same routes as every client."""

from __future__ import annotations

from functools import cache
from importlib.resources import files

from fastapi import APIRouter
from starlette.responses import Response

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
    # Nothing from elsewhere, nothing inline, and in nobody's frame.
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


def page_routes(**has: bool) -> APIRouter:
    """A route for each file, and one for what the server has: a registry, metrics, a fleet. They
    are no part of the API, and need no key."""
    router = APIRouter()
    about = json_response(has, headers=_HEADERS)
    router.add_api_route(ABOUT, lambda: about, include_in_schema=False)
    for path, (content, media_type) in page_files().items():

        def show(content: bytes = content, media_type: str = media_type) -> Response:
            return Response(content, headers=_HEADERS, media_type=media_type)

        router.add_api_route(path, show, include_in_schema=False)
    return router

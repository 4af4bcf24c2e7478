"""Asks running servers over HTTP: their addresses, what they say of a fleet, and errors."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import urllib.error
import urllib.request
from collections.abc import Sequence
from typing import Any
from urllib.parse import quote

from weft.core.errors import InvalidRequest, Unreachable, WeftError
from weft.fleet.launchers import Placed
from weft.terminal.options import refusal_of
from weft.terminal.plain import plain_json

TIMEOUT_S = 10.0


def plain_url(given: str) -> str:
    """`localhost:8000/v1/` and `localhost:8000/metrics` as http://localhost:8000. Raises
    Unreachable."""
    url = given if "://" in given else f"http://{given}"
    plain = url.rstrip("/").removesuffix("/metrics").removesuffix("/v1").rstrip("/")
    if "://" not in plain:
        raise Unreachable(f"can't reach {given!r}: no server is named")
    return plain


def in_path(name: str) -> str:
    """The name as a part of a URL's path. Its dots are escaped, as clients resolve `..`."""
    return quote(name).replace(".", "%2E")


def request_to(url: str, key: str) -> urllib.request.Request:
    """A request that carries the key, if it is not "", but not to where the server may redirect."""
    request = urllib.request.Request(url)
    if key:
        request.add_unredirected_header("Authorization", f"Bearer {key}")
    return request


def ask(url: str, path: str, key: str, body: object = None) -> Any:
    """A node's answer. Raises Unreachable, InvalidRequest with what the node says."""
    request = request_to(url + path, key)
    if body is not None:
        request.data = json.dumps(body).encode()
        request.add_header("Content-Type", "application/json")
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
            return _said_of_fleet(url, path, plain_json(json.load(answer)))
    except urllib.error.HTTPError as error:
        with error:
            text = error.read().decode(errors="replace") or f"status {error.code}"
        with contextlib.suppress(ValueError, KeyError, TypeError):
            text = json.loads(text)["error"]["message"]
        raise InvalidRequest(refusal_of(error.code, f"{url}{path}: {text}")) from None
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise unreachable(url, error) from None


def ask_any(nodes: Sequence[Placed], path: str, key: str, body: object = None) -> Any:
    """The answer of the first node that gives one. Raises InvalidRequest with what a node says, or
    Unreachable if none says anything."""
    errors: list[WeftError] = [Unreachable("no node of the cluster answers")]
    for url in (node.url for node in nodes if node.url):
        try:
            return ask(url, path, key, body)
        except (Unreachable, InvalidRequest) as error:
            errors.append(error)
    raise next((each for each in errors if isinstance(each, InvalidRequest)), errors[-1])


def _said_of_fleet(url: str, path: str, said: Any) -> Any:
    """What a server said at `path`, one of the routes of a fleet. Raises InvalidRequest if it lacks
    what a Weft server says there."""
    if path == "/fleet":
        good = _has_list(said, "nodes", {"node", "own", "state"})
    elif path.startswith("/fleet/why/"):
        good = _has_list(said, "placed", {"request_id", "node", "why", "pins", "costs"})
    else:
        good = isinstance(said, dict) and "draining" in said
    if not good:
        raise InvalidRequest(f"{url}{path} is not from a Weft server")
    return said


def _has_list(said: Any, field: str, fields: set[str]) -> bool:
    """Whether a field holds a list of objects with these fields."""
    each = said.get(field) if isinstance(said, dict) else None
    return isinstance(each, list) and all(
        isinstance(one, dict) and fields <= one.keys() for one in each
    )


def unreachable(url: str, error: Exception) -> Unreachable:
    """What to say of a server to which no connection can be made, or whose answer breaks off."""
    reason = getattr(error, "reason", None) or error
    why = getattr(reason, "strerror", None) or str(reason) or type(error).__name__
    without_number = re.sub(r"^\[Errno -?[0-9]+\] ", "", why)
    return Unreachable(f"can't reach {url}: {without_number}")

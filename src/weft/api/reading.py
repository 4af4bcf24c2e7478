"""Reads and validates the bodies of requests, within limits of time and size."""

from __future__ import annotations

import asyncio
import codecs
import hashlib
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import Request

from weft.api.bodies import OpenBody, Take, ignored_fields
from weft.api.settings import ApiSettings
from weft.core.errors import (
    AdapterUnavailable,
    BodyTimeout,
    BodyTooLarge,
    InvalidRequest,
    UnsupportedMediaType,
)

BodyT = TypeVar("BodyT", bound=BaseModel)
OpenT = TypeVar("OpenT", bound=OpenBody)

BODY_TIMEOUT_S = 30.0
"""How long a client may take to send its body."""

MIN_BYTES_PER_S = 256 << 10
"""A body that is written to a file may take a second longer for each this many of its bytes."""
PIECE_BYTES = 1 << 20
"""A file is written in pieces of at least this size, each on a thread."""

MAX_OBJECTS = 10_000
MAX_ARRAYS = 10_000
MAX_MEMBERS = 20_000
MAX_STRINGS = 50_000
IGNORED = "x-weft-ignored"
"""The header that names fields which were accepted and ignored; also where a request's scope has
them."""
MAX_NAMES, MAX_NAME_LENGTH = 16, 64
_UNSAFE = re.compile(r"[^A-Za-z0-9_.\[\]-]")

_MAX_FAULTS = 1000
"""Bodies with more faults than this get no details: pydantic would first describe all of them."""

_BOUNDED = (
    (b"{", MAX_OBJECTS, "objects"),
    (b"[", MAX_ARRAYS, "lists"),
    (b":", MAX_MEMBERS, "fields"),
)


async def read_body(request: Request, model: type[BodyT], max_bytes: int) -> BodyT:
    """The body as `model`. Raises InvalidRequest naming the field, BodyTooLarge, BodyTimeout or
    UnsupportedMediaType."""
    body = await read_json(request, max_bytes)
    check_counts(body)
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        raise invalid(error) from None


async def read_json(request: Request, max_bytes: int) -> bytes:
    """The bytes of a JSON body, without the mark that editors on Windows write before a text.
    Raises as `read_body`."""
    media_type = request.headers.get("content-type", "application/json").partition(";")[0]
    if media_type.strip().lower() != "application/json":
        raise UnsupportedMediaType("the content-type of a body must be application/json")
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("", "identity"):
        raise UnsupportedMediaType("a body must not be compressed: it has a content-encoding")
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            body = await _read(request, max_bytes)
    except TimeoutError:
        raise BodyTimeout(f"the body did not come within {BODY_TIMEOUT_S:g} s") from None
    if not body:
        raise InvalidRequest("the body is empty; a JSON object is expected")
    return body.removeprefix(codecs.BOM_UTF8)


async def receive_file(request: Request, path: Path, max_bytes: int) -> str:
    """Write a body of any kind to a new file, piece by piece; its sha256 in hex.

    Raises InvalidRequest (it is empty), BodyTooLarge, BodyTimeout, and AdapterUnavailable if there
    is no room.
    """
    _check_size(_declared_size(request), max_bytes)
    begun_s, size, sha = time.monotonic(), 0, hashlib.sha256()
    pieces, stream = bytearray(), request.stream()
    try:
        with path.open("xb") as file:

            def flush() -> None:
                sha.update(pieces)
                file.write(pieces)
                pieces.clear()

            while True:
                left_s = begun_s + BODY_TIMEOUT_S + size / MIN_BYTES_PER_S - time.monotonic()
                async with asyncio.timeout(min(BODY_TIMEOUT_S, left_s)):
                    piece = await anext(stream, None)
                if piece is None:
                    break
                pieces += piece
                size += len(piece)
                _check_size(size, max_bytes)
                if len(pieces) >= PIECE_BYTES:
                    await asyncio.to_thread(flush)
            flush()
    except TimeoutError:
        raise BodyTimeout("the body comes too slowly") from None
    except OSError as error:
        raise AdapterUnavailable(f"the body can't be kept: {error.strerror}") from error
    if not size:
        raise InvalidRequest("the body is empty; a tar or a safetensors file is expected", "body")
    return sha.hexdigest()


async def read_request(request: Request, model: type[OpenT], settings: ApiSettings) -> OpenT:
    """Read as `read_body` does, and note the ignored fields for the answer's header. Also raises
    InvalidRequest for fields that must not be ignored."""
    body = await read_body(request, model, settings.max_body_bytes)
    note_ignored(request, body.ignored(settings.strict_fields))
    return body


def note_unknown(
    request: Request, given: Mapping[str, Any], known: Iterable[str], settings: ApiSettings
) -> None:
    """Let the answer name what is given beside `known`. Raises InvalidRequest if fields are read
    strictly."""
    silently = dict.fromkeys(known, Take.SILENTLY)
    note_ignored(request, ignored_fields(given, silently, strict=settings.strict_fields))


def note_ignored(request: Request, names: Sequence[str]) -> None:
    """Let the answer name the fields that were accepted and ignored."""
    if names:
        request.scope[IGNORED] = shown_names(names)


def shown_names(names: Sequence[str]) -> str:
    """Names that a client chose, for a header: safe, and not too many."""
    shown = [_UNSAFE.sub("_", name[:MAX_NAME_LENGTH]) for name in names[:MAX_NAMES]]
    return ",".join(shown if len(names) <= MAX_NAMES else [*shown, "..."])


async def _read(request: Request, max_bytes: int) -> bytes:
    _check_size(_declared_size(request), max_bytes)
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        _check_size(len(body), max_bytes)
    return bytes(body)


def _declared_size(request: Request) -> int:
    """What the client says of its body's size; 0 if it says nothing."""
    declared = request.headers.get("content-length", "")
    return int(declared) if declared.isdecimal() else 0


def _check_size(size: int, max_bytes: int) -> None:
    if size > max_bytes:
        raise BodyTooLarge(f"the body is larger than {max_bytes} bytes")


def check_counts(body: bytes, with_strings: bool = False) -> None:
    """Raise InvalidRequest for JSON with so many parts that parsing would hold up other requests.

    Signs within strings don't count. `with_strings`: strings are bounded even if there are few
    other parts. Most routes leave that to the fields, whose errors say more.
    """
    signs = (*_BOUNDED, (b'"', 2 * MAX_STRINGS, "")) if with_strings else _BOUNDED
    if all(body.count(sign) <= most for sign, most, _ in signs):
        return
    # Two bytes that are no signs stand for an escape, and every other piece between quotes is
    # outside of strings.
    bare = body.replace(rb"\\", b"__").replace(rb"\"", b"__")
    num_strings = bare.count(b'"') // 2
    if num_strings > MAX_STRINGS:
        raise _too_many(num_strings, "strings", MAX_STRINGS)
    outside = b"".join(bare.split(b'"')[::2])
    for sign, most, what in _BOUNDED:
        if (count := outside.count(sign)) > most:
            raise _too_many(count, what, most)


def _too_many(count: int, what: str, most: int) -> InvalidRequest:
    return InvalidRequest(f"the body has {count} {what}, and may have {most}")


def invalid(error: ValidationError) -> InvalidRequest:
    """The first complaint about a body, naming the field: `messages[0].content`."""
    if error.error_count() > _MAX_FAULTS:
        return InvalidRequest(f"the body has {error.error_count()} faults")
    first = error.errors(include_url=False)[0]
    if first["type"] == "json_invalid":
        return InvalidRequest(f"the body is not valid JSON: {first['ctx']['error']}")
    param = field_path(first["loc"])
    if first["type"] == "missing":
        return InvalidRequest(f"{param} is required", param)
    if first["type"] == "union_tag_invalid":
        tags = first["ctx"]["expected_tags"].replace("<", "").replace(">", "")
        return InvalidRequest(f"{param}.type must be one of {tags}", f"{param}.type")
    return InvalidRequest(f"{param or 'the body'}{_complaint(error, param)}", param)


_WANTED = {
    "bool": "true or false",
    "dict": "an object",
    "float": "a number",
    "int": "an integer",
    "list": "a list",
    "model": "an object",
    "string": "a string",
}


def _complaint(error: ValidationError, param: str | None) -> str:
    """What is wrong with the field, to be read after its name."""
    faults = error.errors(include_url=False)
    first = faults[0]
    match first["type"]:
        case "extra_forbidden":
            return " is not a known field"
        case "greater_than_equal":
            return f" must be at least {first['ctx']['ge']:g}"
        case "less_than_equal":
            return f" must be at most {first['ctx']['le']:g}"
        case "string_too_long":
            return f" must have at most {first['ctx']['max_length']} characters"
        case "string_pattern_mismatch":
            return f" must match {first['ctx']['pattern']}"
        case "literal_error":
            return f" must be {first['ctx']['expected']}"
        case "too_short" | "string_too_short" if first["ctx"]["min_length"] == 1:
            return " must not be empty"
        case "too_short":
            return f" must have at least {first['ctx']['min_length']} items"
        case "too_long":
            return f" must have at most {first['ctx']['max_length']} items"
    kinds = [fault["type"].split("_")[0] for fault in faults if field_path(fault["loc"]) == param]
    if kinds[0] not in _WANTED or first["type"].endswith(("_too_short", "_too_long", "_mismatch")):
        return f": {first['msg']}"
    wanted = dict.fromkeys(_WANTED[kind] for kind in kinds if kind in _WANTED)
    if first["loc"][-1:] == ("<text>",):  # a field of TextOr
        wanted["a list"] = None
    return f" must be {' or '.join(wanted)}"


def field_path(loc: tuple[int | str, ...]) -> str | None:
    """Write `("messages", 0, "content", "str")` as `messages[0].content`: names of union members
    are no fields, and are left out. Token ids are keys, as in `logit_bias[5]`."""
    path = ""
    for part in loc:
        if isinstance(part, int) or (path and part.isdecimal()):
            path += f"[{part}]"
        elif (path and not part.isidentifier()) or part in _UNION_MEMBERS:
            continue
        else:
            path += f".{part}" if path else part
    return path or None


_UNION_MEMBERS = frozenset({"str", "int", "bool", "float"})

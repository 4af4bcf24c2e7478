"""Every error in OpenAI's shape: `{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

import logging
from typing import Any

import msgspec
from fastapi import Request
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from weft.core.errors import InvalidRequest, WeftError

logger = logging.getLogger(__name__)

_TYPE_OF_STATUS = {401: "authentication_error", 429: "rate_limit_error"}


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    """The field at fault."""
    code: str | None


class ErrorBody(BaseModel):
    """Every error, as OpenAI's API has it."""

    error: ErrorDetail


ERRORS: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": ErrorBody, "description": "The request is at fault."},
    "5XX": {"model": ErrorBody, "description": "The server is at fault, or overloaded."},
}


def error_body(error: BaseException) -> tuple[int, dict[str, Any]]:
    """The status and the body of an answer. The body tells nothing of an unexpected error, which
    the log has."""
    if isinstance(error, WeftError):
        plain = error.kind in ("invalid_request_error", "server_error")
        code = None if plain else error.kind
        return error.status, _shape(error.status, error.message, error.param, code)
    if isinstance(error, HTTPException):
        return error.status_code, _shape(error.status_code, str(error.detail), None, None)
    logger.error("internal error", exc_info=error)
    return 500, _shape(500, "internal server error", None, None)


def _shape(status: int, message: str, param: str | None, code: str | None) -> dict[str, Any]:
    kind = "server_error" if status >= 500 else "invalid_request_error"
    kind = _TYPE_OF_STATUS.get(status, kind)
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def error_response(error: BaseException) -> Response:
    status, body = error_body(error)
    headers = dict(error.headers or {}) if isinstance(error, WeftError | HTTPException) else {}
    return Response(msgspec.json.encode(body), status, headers, "application/json")


def invalid(error: ValidationError) -> InvalidRequest:
    """The first complaint about a body, naming the field: `messages[0].content`."""
    first = error.errors(include_url=False)[0]
    if first["type"] == "json_invalid":
        return InvalidRequest(f"the body is not valid JSON: {first['msg']}")
    param = field_path(first["loc"])
    if first["type"] == "missing":
        return InvalidRequest(f"{param} is required", param)
    if first["type"] == "union_tag_invalid":
        tags = first["ctx"]["expected_tags"].replace("<", "").replace(">", "")
        return InvalidRequest(f"{param}.type must be one of {tags}", f"{param}.type")
    return InvalidRequest(f"{param or 'the body'}: {first['msg']}", param)


def field_path(loc: tuple[int | str, ...]) -> str | None:
    """Write `("messages", 0, "content", "str")` as `messages[0].content`: names of union members
    are no fields, and are left out."""
    path = ""
    for part in loc:
        if isinstance(part, int):
            path += f"[{part}]"
        elif (path and not part.isidentifier()) or part in _UNION_MEMBERS:
            continue
        else:
            path += f".{part}" if path else part
    return path or None


_UNION_MEMBERS = frozenset({"str", "int", "bool", "float"})


async def handle_error(_: Request, error: Exception) -> Response:
    return error_response(error)

"""Errors in OpenAI's form, answers, streams of events, and clients that leave or are too slow."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Mapping
from typing import Any, TypeVar

import msgspec
from fastapi import FastAPI
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Match
from starlette.types import Message, Receive, Scope, Send

from weft.core.errors import RequestTimeout, WeftError
from weft.metrics.logs import request_id_var

logger = logging.getLogger(__name__)

T = TypeVar("T")

CLIENT_LEFT = 499
"""The status counted for a request whose client left before the answer."""

READER_TIMEOUT_S = 120.0
"""The least time that a stream waits for a client that does not read; this is checked four times as
often. Meanwhile the request goes on, and its tokens, at most max_tokens, are kept."""

WRITE = "weft.write"
"""The key in the state of a request's scope under which a connection offers a short way for pieces
of a streamed answer: a function that writes one at once, or returns False if it can't."""
_encode = msgspec.json.Encoder().encode

STREAMED: dict[int | str, dict[str, Any]] = {200: {"content": {"text/event-stream": {}}}}
"""The `responses` of routes that answer with JSON, or with events if a stream is asked for."""
TEXT: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "Successful Response",
        "content": {"text/plain": {"schema": {"type": "string"}}},
    }
}
"""The `responses` of routes that answer with plain text. Their response class is `Response`,
without a media type, which errors would get too."""


# -- errors ---------------------------------------------------------------------------------------

_TYPE_OF_STATUS = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    """The field at fault."""
    code: str | None


class ErrorBody(BaseModel):
    """Every error, as OpenAI's API has it: `{"error": {"message", "type", "param", "code"}}`."""

    error: ErrorDetail


def described(body: type[BaseModel], description: str) -> dict[str, Any]:
    """An entry of a route's `responses`. Its schema is made once, and not for each route."""
    return {"description": description, "content": _content_of(body)}


def error_body(error: BaseException) -> tuple[int, dict[str, Any]]:
    """The status and body of an error's answer. An unexpected error's text is only in the log."""
    if isinstance(error, WeftError):
        log_full(error)
        plain = error.kind in ("invalid_request_error", "server_error")
        code = None if plain else error.kind
        return error.status, _shape(error.status, error.message, error.param, code)
    if isinstance(error, HTTPException):
        return error.status_code, _shape(error.status_code, str(error.detail), None, None)
    logger.error("internal error", exc_info=error)
    return 500, _shape(500, "internal server error", None, None)


def log_full(error: WeftError) -> None:
    """Log the text of an error that clients get in fewer words, with the request's id."""
    if str(error) != error.message:
        logger.warning("%s", error, extra={"request_id": request_id_var.get()})


def _shape(status: int, message: str, param: str | None, code: str | None) -> dict[str, Any]:
    kind = "server_error" if status >= 500 else "invalid_request_error"
    kind = _TYPE_OF_STATUS.get(status, kind)
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


MESSAGES = "/v1/messages"
"""Where Anthropic's API begins."""
_TYPE_IN_MESSAGES = {404: "not_found_error", 413: "request_too_large", 503: "overloaded_error"}


def error_response(error: BaseException, path: str) -> Response:
    """The answer to a request of this path: Anthropic's API has a shape of its own."""
    status, body = error_body(error)
    if path.startswith(MESSAGES):
        kind = "api_error" if status >= 500 else body["error"]["type"]
        body["error"]["type"] = _TYPE_IN_MESSAGES.get(status, kind)
        body = {"type": "error", **body}
    headers = dict(error.headers or {}) if isinstance(error, WeftError | HTTPException) else {}
    return Response(msgspec.json.encode(body), status, headers, "application/json")


async def _handle_error(request: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException) and error.status_code in (404, 405):
        error = HTTPException(error.status_code, _no_route(request, error), error.headers)
    return error_response(error, request.url.path)


_INSTEAD = {
    "/docs": "/openapi.json",
    "/encode": "/v1/embeddings",
    "/generate": "/v1/completions",
    "/generate_stream": "/v1/completions",
    "/get_model_info": "/v1/models",
    "/get_server_info": "/version, /v1/models or /metrics",
    "/health_generate": "/health",
    "/info": "/v1/models",
    "/invocations": "/v1/chat/completions or /v1/completions",
    "/load": "/metrics",
    "/model_info": "/v1/models",
    "/ping": "/health",
    "/pooling": "/v1/embeddings",
    "/server_info": "/version, /v1/models or /metrics",
}
"""Routes of vLLM, SGLang and LoRAX, and what serves the same purpose here."""


def _no_route(request: Request, error: HTTPException) -> str:
    """The message for a path that no route serves, with the right one if it is clear: clients often
    have an address with /v1 where it belongs without, or the other way round."""
    path = request.url.path
    told = f"there is no {request.method} {path[:200]}"
    if use := _INSTEAD.get(path):
        return f"{told}, as other servers have; use {use}"
    if error.status_code == 405:
        return f"{told}, only {(error.headers or {})['Allow']}"
    bare = path.removeprefix("/v1").removeprefix("/v1").rstrip("/")
    for near in (f"/v1{bare}", bare):
        asked = {**request.scope, "path": near}
        if any(route.matches(asked)[0] is Match.FULL for route in request.app.router.routes):
            return f"{told}; did you mean {near[:200]}?"
    return told


def new_app(title: str, **options: Any) -> FastAPI:
    """An application whose errors have this form. It has no /docs: that page would load scripts
    from elsewhere."""
    return FastAPI(
        title=title,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,  # behind a proxy the address would be another, and without TLS
        exception_handlers={WeftError: _handle_error, HTTPException: _handle_error},
        **options,
    )


# -- answers ---------------------------------------------------------------------------------------


def json_response(
    body: Any, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    return Response(msgspec.json.encode(body), status, headers, "application/json")


async def unless_client_leaves(left: Coroutine[Any, Any, None], work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, unless `left` ends first: `work` is then cancelled, and
    ClientDisconnect is raised when it has ended."""
    task = asyncio.create_task(work)
    watch = asyncio.create_task(left)
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        task.cancel()
        watch.cancel()
        await asyncio.wait({task, watch})


async def _disconnected(receive: Receive) -> None:
    """Wait until the client has left."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def answer(
    request: Request,
    work: Coroutine[Any, Any, dict[str, Any]],
    release: Callable[[], None],
    headers: Mapping[str, str],
) -> Response:
    """The JSON answer that `work` gives, unless the client leaves first. Calls `release` at the
    end. Raises RequestTimeout."""
    try:
        async with _in_time(request.scope):
            body = await unless_client_leaves(_disconnected(request.receive), work)
            return json_response(body, headers=headers)
    except ClientDisconnect:
        return Response(status_code=CLIENT_LEFT)
    finally:
        release()


@contextlib.asynccontextmanager
async def _in_time(scope: Scope) -> AsyncIterator[None]:
    """Cancel the context's work if it takes longer than the operator allows. Raises
    RequestTimeout."""
    limit_s: float | None = scope["app"].state.request_timeout_s
    timer = asyncio.timeout(limit_s)
    try:
        async with timer:
            yield
    except TimeoutError:
        if not timer.expired():
            raise
        raise RequestTimeout(f"the answer took longer than {limit_s:g} s") from None


class EventStream(Response):
    """Server-sent events of the JSON-encodable chunks of a generator, then `[DONE]`; or events
    named after their chunk's type, if they are `typed`.

    The first chunk is awaited before the status is sent, so that a request which fails at once
    gets its status; a later failure is sent as an event, and ends the stream. Whatever happens,
    also when nothing was ever sent, the generator is closed and then `release()` is called.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        chunks: AsyncGenerator[dict[str, Any], None],
        release: Callable[[], None],
        headers: Mapping[str, str],
        typed: bool = False,
    ) -> None:
        own = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        super().__init__(headers=own | dict(headers))
        del self.headers["content-length"]
        self._chunks = chunks
        self._release = release
        self._typed = typed
        self._started = False
        self._write: Callable[[bytes], bool] = _can_not_write
        self._sending_since_s: float | None = None
        """When the send under way began; None while the client has taken everything sent."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._write = scope.get("state", {}).get(WRITE, _can_not_write)
        try:
            await unless_client_leaves(self._left(receive), self._pump(scope, receive, send))
        except ClientDisconnect:
            logger.debug("a client left its stream")
        finally:
            self._release()

    async def _left(self, receive: Receive) -> None:
        """Wait until the client has left, or did not read for too long."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(READER_TIMEOUT_S / 4):
                    await _disconnected(receive)
                return
            since_s = self._sending_since_s
            if since_s is not None and time.monotonic() - since_s > READER_TIMEOUT_S:
                return

    async def _pump(self, scope: Scope, receive: Receive, send: Send) -> None:
        number: int | None = None
        async with contextlib.aclosing(self._chunks):
            try:
                async with _in_time(scope):
                    async for chunk in self._chunks:
                        number = chunk.get("sequence_number")
                        name = chunk["type"].encode() if self._typed else None
                        await self._send(send, _event(_encode(chunk), name))
            except ClientDisconnect:
                raise
            except Exception as error:
                answer = error_response(error, scope["path"])
                if not self._started:
                    await answer(scope, receive, send)
                    return
                body = bytes(answer.body) if number is None else _numbered(answer, number + 1)
                await self._send(send, _event(body, b"error" if self._typed else None))
            else:
                if not self._typed:
                    await self._send(send, _event(b"[DONE]"))
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send(self, send: Send, event: bytes) -> None:
        if not self._started:
            self._started = True
            head = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
            await self._pass_on(send, head)
        if not self._write(event):
            body = {"type": "http.response.body", "body": event, "more_body": True}
            await self._pass_on(send, body)

    async def _pass_on(self, send: Send, message: Message) -> None:
        """Send a message through the ASGI server, which may have to wait for the client."""
        self._sending_since_s = time.monotonic()
        try:
            await send(message)
        except OSError as error:
            raise ClientDisconnect from error
        self._sending_since_s = None


def _numbered(answer: Response, number: int) -> bytes:
    """An error's answer as an event of the responses API. Some clients read the error's fields in
    the event, others in its `error`."""
    body = msgspec.json.decode(answer.body)
    return _encode({**body["error"], **body, "type": "error", "sequence_number": number})


def _event(data: bytes, name: bytes | None = None) -> bytes:
    return b"%bdata: %b\n\n" % (b"" if name is None else b"event: %b\n" % name, data)


def _can_not_write(data: bytes) -> bool:
    return False


@functools.cache
def body_of(model: type[BaseModel]) -> dict[str, Any]:
    """The `openapi_extra` of a route that reads its body as `model`."""
    return {"requestBody": {"required": True, "content": _content_of(model)}}


def _content_of(model: type[BaseModel]) -> dict[str, Any]:
    """The `content` of a body in JSON, in the terms of OpenAPI."""
    schema = model.model_json_schema()
    return {"application/json": {"schema": _inlined(schema, schema.pop("$defs", {}))}}


def _inlined(node: Any, models: dict[str, Any]) -> Any:
    """The schema with references to models replaced by what they refer to."""
    if isinstance(node, list):
        return [_inlined(item, models) for item in node]
    if not isinstance(node, dict):
        return node
    if "$ref" in node:
        return _inlined(models[node["$ref"].removeprefix("#/$defs/")], models)
    return {key: _inlined(value, models) for key, value in node.items()}


ERRORS: dict[int | str, dict[str, Any]] = {
    "4XX": described(ErrorBody, "The request is at fault."),
    "5XX": described(ErrorBody, "The server is at fault, or overloaded."),
}
"""The `responses` of all routes."""

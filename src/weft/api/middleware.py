"""What happens to every request, whatever its route: ids, keys, metrics, logs and traces."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple, Protocol

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from weft.api.audit import AuditEntry, AuditLog, told_var
from weft.api.bodies import is_id
from weft.api.callers import caller_of, caller_var, client_var, owner_of
from weft.api.http import CLIENT_LEFT, MESSAGES, error_response
from weft.api.reading import IGNORED
from weft.core.errors import PermissionDenied, Unauthorized, to_wire
from weft.core.requests import EngineRequest, TokenEvent
from weft.metrics import Metrics, RequestRecord
from weft.metrics.logs import log_request, request_id_var
from weft.registry.tenants import Caller, Keychain

logger = logging.getLogger(__name__)

REQUEST_ID = "x-request-id"
PROBES = frozenset({"/health", "/ready"})
"""Routes that never need a key, as probes have none."""
STATE = frozenset({"/metrics", "/version"})
"""Routes that need no key unless there are tenants, who must not learn of each other from them."""

REFUSED = {Unauthorized.status: Unauthorized.kind, PermissionDenied.status: PermissionDenied.kind}


class RequestIds:
    """Gives each request an id, the client's own if it sent a plain one, and answers with it.
    Keeps the client's address."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        own = Headers(scope=scope).get(REQUEST_ID, "")
        chosen = own if is_id(own) else uuid.uuid4().hex

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers[REQUEST_ID] = chosen
                if scope["path"].startswith(MESSAGES):
                    headers["request-id"] = chosen  # where Anthropic's clients look for it
            await send(message)

        client = scope.get("client")
        token = request_id_var.set(chosen)
        client_token = client_var.set(client[0] if client else None)
        try:
            await self._app(scope, receive, send_with_id)
        finally:
            request_id_var.reset(token)
            client_var.reset(client_token)


class Observe:
    """Counts requests by route and status, has unauthorized ones written to the audit log, and
    answers an unexpected error with a plain 500."""

    def __init__(self, app: ASGIApp, metrics: Metrics, audit: AuditLog) -> None:
        self._app = app
        self._metrics = metrics
        self._audit = audit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status = CLIENT_LEFT

        async def watch(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                if status in REFUSED:
                    self._audit.refuse(AuditEntry("refuse", scope["path"], outcome=REFUSED[status]))
                if ignored := scope.get(IGNORED):
                    MutableHeaders(scope=message)[IGNORED] = ignored
            await send(message)

        token = told_var.set([])
        try:
            await self._app(scope, receive, watch)
        except ClientDisconnect:
            logger.debug("a client left while it sent its request")
        except Exception as error:
            if status != CLIENT_LEFT:
                raise
            await error_response(error, scope["path"])(scope, receive, watch)
        finally:
            told_var.reset(token)
            route = getattr(scope.get("route"), "path", "unmatched")
            self._metrics.http_requests.labels(route, str(status)).inc()
            if IGNORED in scope:
                self._metrics.ignoring_requests.labels(route).inc()


class RequireKey:
    """Refuses requests without a valid key, and notes the caller of the others."""

    def __init__(
        self, app: ASGIApp, keychain: Callable[[], Keychain | None], open_paths: Collection[str]
    ) -> None:
        """`keychain` is called for each request, as keys come and go; None means that no key is
        needed. `open_paths` never need one."""
        self._app = app
        self._keychain = keychain
        self._open_paths = open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        open_now = scope["type"] != "http" or scope["path"] in self._open_paths
        keychain = None if open_now else self._keychain()
        if keychain is None:
            await self._app(scope, receive, send)
            return
        authorization, app = _authorization(Headers(scope=scope)), self._app
        caller: Caller | None
        try:
            caller = caller_of(authorization, keychain)
        except Unauthorized as error:
            caller = owner_of(authorization, keychain)
            app = error_response(error, scope["path"])
        token = caller_var.set(caller)
        try:
            await app(scope, receive, send)
        finally:
            caller_var.reset(token)


def _authorization(headers: Headers) -> str | None:
    """The key as a bearer token. Anthropic's clients send it in a header of its own."""
    own = headers.get("x-api-key")
    return headers.get("authorization") or (f"Bearer {own}" if own else None)


# -- requests to the engine ------------------------------------------------------------------------


class TracedCall(NamedTuple):
    """What a trace says of an HTTP request."""

    operation: str
    """What was asked for, in OpenTelemetry's words for generative AI: chat, text_completion or
    embeddings; or another route's last part, such as rerank."""
    headers: Mapping[str, str]
    """The headers that say which trace it is part of."""


_call: ContextVar[TracedCall] = ContextVar("call", default=TracedCall("chat", {}))  # noqa: B039
_CHATS = "/chat/completions", "/responses", "/messages"


class TraceSink(Protocol):
    """Where traces go: `weft.metrics.traces.Traces`."""

    def record(self, record: RequestRecord, operation: str, headers: Mapping[str, str]) -> None: ...


class TraceContext:
    """Keeps what traces say of an HTTP request."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            headers = Headers(scope=scope)
            names = ("traceparent", "tracestate")
            found = {name: headers[name] for name in names if name in headers}
            _call.set(TracedCall(_operation_of(scope["path"]), found))
        await self._app(scope, receive, send)


def _operation_of(path: str) -> str:
    name = path.rpartition("/")[2]
    return "chat" if path.endswith(_CHATS) else {"completions": "text_completion"}.get(name, name)


@contextmanager
def watched(
    request: EngineRequest, model_name: str, metrics: Metrics, traces: TraceSink | None
) -> Iterator[Watch]:
    """A context around the life of a request. Its end, however it comes, is recorded once: in
    metrics, log and, if enabled, traces. `model_name` is the base model's name."""
    watch = Watch(request, model_name, metrics)
    record = watch.record
    try:
        yield watch
    except Exception as error:
        record.finish_reason, record.error = "error", to_wire(error)[0]
        raise
    finally:
        watch.end()
        log_request(record)
        if traces is not None:
            traces.record(record, *_call.get())


class Watch:
    """One request under way. If it ends without a finish reason, it was aborted."""

    def __init__(self, request: EngineRequest, model_name: str, metrics: Metrics) -> None:
        self._metrics = metrics
        self._tenant = request.tenant
        self._adapter = request.adapter.bare if request.adapter else None
        self._start_s = time.monotonic()
        self._computed = False
        """Whether all of the prompt was computed."""
        self.record = RequestRecord(
            request_id=request.request_id,
            model=self._adapter or model_name,
            adapter=request.adapter,
            params=request.params,
            start_unix_s=time.time(),
            num_prompt_tokens=len(request.prompt_ids),
        )
        metrics.arrived(self._adapter, len(request.prompt_ids))

    def event(self, event: TokenEvent) -> None:
        record = self.record
        if event.queue_s is not None:
            record.queue_s = event.queue_s
            self._metrics.queued(self._adapter, event.queue_s)
        record.num_cached_tokens = max(record.num_cached_tokens, event.num_cached_tokens)
        count = len(event.token_ids)
        if count or event.vector is not None:
            self._computed = True
        if not count:
            return
        now_s = time.monotonic() - self._start_s
        if record.last_token_s is None:
            record.first_token_s = now_s
            self._metrics.first_tokens(self._adapter, count, now_s)
        else:
            self._metrics.more_tokens(self._adapter, count, now_s - record.last_token_s)
        record.last_token_s = now_s
        record.num_output_tokens += count

    def end(self) -> None:
        record, num_tokens = self.record, self.record.num_output_tokens
        record.duration_s = time.monotonic() - self._start_s
        per_token_s = None
        if record.first_token_s is not None and record.last_token_s is not None and num_tokens > 1:
            per_token_s = (record.last_token_s - record.first_token_s) / (num_tokens - 1)
        reason = record.finish_reason
        self._metrics.finished(self._adapter, reason, record.duration_s, per_token_s)
        self._metrics.requests.ended(record)
        num_prompt = record.num_prompt_tokens - record.num_cached_tokens if self._computed else 0
        self._metrics.served(self._tenant, num_prompt, num_tokens)

"""Watches each request to the engine: its times and tokens go to metrics, log and traces."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from weft.core.errors import to_wire
from weft.core.requests import EngineRequest, TokenEvent
from weft.metrics import Metrics, RequestRecord
from weft.metrics.logs import log_request

_trace_headers: ContextVar[Mapping[str, str]] = ContextVar("trace_headers", default={})  # noqa: B039


class TraceSink(Protocol):
    """Where traces go: `weft.metrics.traces.Traces`."""

    def record(self, record: RequestRecord, headers: Mapping[str, str]) -> None: ...


class TraceHeaders:
    """Keeps what an HTTP request says of the trace that it is part of."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            headers = Headers(scope=scope)
            names = ("traceparent", "tracestate")
            _trace_headers.set({name: headers[name] for name in names if name in headers})
        await self._app(scope, receive, send)


class Observer:
    """Tells metrics, the log and, if there are any, traces of every request."""

    def __init__(self, metrics: Metrics, model_name: str, traces: TraceSink | None = None) -> None:
        """`model_name` is what the base model is called."""
        self._metrics = metrics
        self._model_name = model_name
        self._traces = traces

    @contextmanager
    def watch(self, request: EngineRequest) -> Iterator[Watch]:
        """A context around the life of a request. However it ends, that is told once."""
        watch = Watch(request, self._metrics)
        error: str | None = None
        try:
            yield watch
        except Exception as caught:
            watch.finish_reason = "error"
            error = to_wire(caught)[0]
            raise
        finally:
            record = watch.end(self._model_name, error)
            log_request(record)
            if self._traces is not None:
                self._traces.record(record, _trace_headers.get())


class Watch:
    """One request under way. If it ends without a finish reason, it was aborted."""

    def __init__(self, request: EngineRequest, metrics: Metrics) -> None:
        self._request = request
        self._metrics = metrics
        self._adapter = request.adapter.name if request.adapter else None
        self._start_unix_s = time.time()
        self._start_s = time.monotonic()
        self._queue_s: float | None = None
        self._first_s: float | None = None
        self._last_s = self._start_s
        self._num_tokens = 0
        self._num_cached = 0
        self.finish_reason: str = "abort"
        metrics.arrived(self._adapter, len(request.prompt_ids))

    def event(self, event: TokenEvent) -> None:
        if event.queue_s is not None:
            self._queue_s = event.queue_s
            self._metrics.queued(self._adapter, event.queue_s)
        self._num_cached = max(self._num_cached, event.num_cached_tokens)
        count = len(event.token_ids)
        if not count:
            return
        now_s = time.monotonic()
        if self._first_s is None:
            self._first_s = now_s
            self._metrics.first_tokens(self._adapter, count, now_s - self._start_s)
        else:
            self._metrics.more_tokens(self._adapter, count, now_s - self._last_s)
        self._last_s = now_s
        self._num_tokens += count

    def end(self, model_name: str, error: str | None) -> RequestRecord:
        duration_s = time.monotonic() - self._start_s
        per_token_s = None
        if self._first_s is not None and self._num_tokens > 1:
            per_token_s = (self._last_s - self._first_s) / (self._num_tokens - 1)
        self._metrics.finished(self._adapter, self.finish_reason, duration_s, per_token_s)
        num_prompt = len(self._request.prompt_ids) - self._num_cached if self._num_tokens else 0
        self._metrics.served(self._request.tenant, num_prompt, self._num_tokens)
        return RequestRecord(
            request_id=self._request.request_id,
            model=self._adapter or model_name,
            adapter=self._request.adapter,
            params=self._request.params,
            start_unix_s=self._start_unix_s,
            duration_s=duration_s,
            queue_s=self._queue_s,
            first_token_s=None if self._first_s is None else self._first_s - self._start_s,
            last_token_s=None if self._first_s is None else self._last_s - self._start_s,
            num_prompt_tokens=len(self._request.prompt_ids),
            num_cached_tokens=self._num_cached,
            num_output_tokens=self._num_tokens,
            finish_reason=self.finish_reason,
            error=error,
        )

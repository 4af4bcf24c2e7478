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


@contextmanager
def watched(
    request: EngineRequest, model_name: str, metrics: Metrics, traces: TraceSink | None
) -> Iterator[Watch]:
    """A context around the life of a request. However it ends, that is told once: to metrics, the
    log and, if there are any, traces. `model_name` is what the base model is called."""
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
            traces.record(record, _trace_headers.get())


class Watch:
    """One request under way. If it ends without a finish reason, it was aborted."""

    def __init__(self, request: EngineRequest, model_name: str, metrics: Metrics) -> None:
        self._metrics = metrics
        self._tenant = request.tenant
        self._adapter = request.adapter.name if request.adapter else None
        self._start_s = time.monotonic()
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
        num_prompt = record.num_prompt_tokens - record.num_cached_tokens if num_tokens else 0
        self._metrics.served(self._tenant, num_prompt, num_tokens)

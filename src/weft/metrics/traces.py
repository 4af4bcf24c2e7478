"""Traces: one span for each request to the engine, sent over OTLP. Needs the extra `weft[otel]`.

    span of the caller (header `traceparent`), if there is one
    └── generate MODEL        start ............................................ end
        ├── queue             ├───────────┤
        ├── prefill                       ├───────────┤ first token
        └── decode                                    ├──────────┤ last token

Spans are made when a request has ended, with the times it had. Attributes follow OpenTelemetry's
conventions for generative AI (`gen_ai.*`); Weft's own are under `weft.*`.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from urllib.parse import urlsplit

from weft.core.errors import ConfigError
from weft.core.version import __version__
from weft.metrics.logs import RequestRecord

try:
    from opentelemetry import trace
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
    from opentelemetry.util.types import AttributeValue
except ImportError as error:
    raise ConfigError(
        "--otlp-endpoint needs OpenTelemetry: pip install weft[otel]", "otlp_endpoint"
    ) from error

_NS = 1_000_000_000


class Traces:
    """Sends spans to where the processor leads, until `close`."""

    def __init__(self, processor: SpanProcessor) -> None:
        name = os.environ.get("OTEL_SERVICE_NAME", "weft")
        resource = Resource.create({"service.name": name, "service.version": __version__})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("weft", __version__)

    def record(self, record: RequestRecord, operation: str, headers: Mapping[str, str]) -> None:
        """Send the spans of a request. `operation` is what was asked for, such as chat, and the
        `headers` of its HTTP request name the parent span."""
        parent = TraceContextTextMapPropagator().extract(headers)
        span = self._tracer.start_span(
            f"{operation} {record.model}",
            parent,
            trace.SpanKind.SERVER,
            {"gen_ai.operation.name": operation, **_attributes(record)},
            start_time=_unix_ns(record, 0.0),
        )
        if record.error is not None:
            span.set_status(trace.StatusCode.ERROR, record.error)
        within = trace.set_span_in_context(span)
        for name, start_s, end_s in _phases(record):
            child = self._tracer.start_span(name, within, start_time=_unix_ns(record, start_s))
            child.end(_unix_ns(record, end_s))
        span.end(_unix_ns(record, record.duration_s))

    def close(self) -> None:
        """Send what is left. This waits for a few seconds at most."""
        self._provider.shutdown()


def open_traces(endpoint: str) -> Traces:
    """Open traces to an OTLP collector at an HTTP URL. Without a path, `/v1/traces` is used. A
    query, which may hold a token, does not get into the log.

    Raises ConfigError.
    """
    try:
        url = urlsplit(endpoint)
    except ValueError:
        url = urlsplit("")
    if url.scheme not in ("http", "https") or not url.hostname:
        raise ConfigError(
            f"--otlp-endpoint must be a URL like http://localhost:4318, got {endpoint!r}",
            "otlp_endpoint",
        )
    if url.path in ("", "/"):
        url = url._replace(path="/v1/traces")
    if url.query:

        def without_query(record: logging.LogRecord) -> bool:
            record.msg, record.args = record.getMessage().replace(url.query, "..."), ()
            return True

        logging.getLogger(OTLPSpanExporter.__module__).addFilter(without_query)
    return Traces(BatchSpanProcessor(OTLPSpanExporter(url.geturl(), timeout=3)))


def _unix_ns(record: RequestRecord, seconds: float) -> int:
    return round((record.start_unix_s + seconds) * _NS)


def _attributes(record: RequestRecord) -> dict[str, AttributeValue]:
    params, ref = record.params, record.adapter
    attributes: dict[str, AttributeValue | None] = {
        "gen_ai.provider.name": "weft",
        "gen_ai.request.model": record.model,
        "gen_ai.request.max_tokens": params.max_tokens,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.response.id": record.request_id,
        "gen_ai.response.finish_reasons": [record.finish_reason],
        "gen_ai.usage.input_tokens": record.num_prompt_tokens,
        "gen_ai.usage.output_tokens": record.num_output_tokens,
        "gen_ai.latency.time_to_first_token": record.first_token_s,
        "gen_ai.latency.e2e": record.duration_s,
        "error.type": record.error,
        "weft.queue_s": record.queue_s,
        "weft.cached_tokens": record.num_cached_tokens,
        "weft.adapter.name": ref.name if ref else None,
        "weft.adapter.version": ref.version if ref else None,
        "weft.adapter.digest": ref.digest if ref else None,
    }
    return {name: value for name, value in attributes.items() if value is not None}


def _phases(record: RequestRecord) -> list[tuple[str, float, float]]:
    """The name, start and end of each phase, in seconds from the record's start."""
    if record.first_token_s is None or record.last_token_s is None:
        return []
    queue_s = min(record.queue_s or 0.0, record.first_token_s)
    return [
        ("queue", 0.0, queue_s),
        ("prefill", queue_s, record.first_token_s),
        ("decode", record.first_token_s, record.last_token_s),
    ]

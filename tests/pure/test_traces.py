"""Traces: one span a request, its phases below it, its parent the caller's; sent over OTLP."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from http_api import Web, World
from observed import DIGEST, ScriptedEngine, client_of, complete
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode
from toy_tokenizers import byte_level

from weft.core.adapters import AdapterRef
from weft.core.errors import ConfigError
from weft.core.requests import TokenEvent
from weft.core.sampling import SamplingParams
from weft.metrics import RequestRecord
from weft.metrics.traces import Traces, open_traces

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
UNSAMPLED = PARENT.removesuffix("01") + "00"
RECORD = RequestRecord(
    request_id="r",
    model="sql",
    adapter=AdapterRef("sql", 2, DIGEST),
    params=SamplingParams(max_tokens=9, temperature=0.5, top_p=0.9),
    start_unix_s=1000.0,
    duration_s=2.0,
    queue_s=0.25,
    first_token_s=0.5,
    last_token_s=1.75,
    num_prompt_tokens=7,
    num_cached_tokens=4,
    num_output_tokens=3,
    finish_reason="stop",
)


class Traced:
    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        self.traces = Traces(SimpleSpanProcessor(self._exporter))

    @property
    def finished(self) -> tuple[ReadableSpan, ...]:
        return self._exporter.get_finished_spans()

    @property
    def spans(self) -> dict[str, ReadableSpan]:
        spans = self.finished
        assert len({span.name for span in spans}) == len(spans)
        return {span.name: span for span in spans}


@pytest.fixture
def traced() -> Iterator[Traced]:
    made = Traced()
    yield made
    made.traces.close()


def test_a_request_is_a_span_with_its_phases(traced: Traced) -> None:
    traced.traces.record(RECORD, "text_completion", {})
    spans = traced.spans
    whole = spans.pop("text_completion sql")
    assert whole.kind is SpanKind.SERVER and whole.parent is None
    assert (whole.start_time, whole.end_time) == (1000_000_000_000, 1002_000_000_000)
    assert dict(whole.attributes or {}) == {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "weft",
        "gen_ai.request.model": "sql",
        "gen_ai.request.max_tokens": 9,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.9,
        "gen_ai.response.id": "r",
        "gen_ai.response.finish_reasons": ("stop",),
        "gen_ai.usage.input_tokens": 7,
        "gen_ai.usage.output_tokens": 3,
        "gen_ai.latency.time_to_first_token": 0.5,
        "gen_ai.latency.e2e": 2.0,
        "weft.queue_s": 0.25,
        "weft.cached_tokens": 4,
        "weft.adapter.name": "sql",
        "weft.adapter.version": 2,
        "weft.adapter.digest": DIGEST,
    }
    assert whole.resource.attributes["service.name"] == "weft"
    assert whole.context is not None
    times = {}
    for name, span in spans.items():
        assert span.parent is not None and span.parent.span_id == whole.context.span_id
        assert span.start_time is not None and span.end_time is not None
        times[name] = (span.start_time / 1e9 - 1000, span.end_time / 1e9 - 1000)
    assert times == {"queue": (0.0, 0.25), "prefill": (0.25, 0.5), "decode": (0.5, 1.75)}


async def test_a_request_of_a_server(traced: Traced) -> None:
    client = client_of(ScriptedEngine(), traced.traces)
    answer = await complete(client, "sql", traceparent=PARENT, tracestate="x=y")
    assert answer.status_code == 200, answer.text
    assert (await client.get("/health")).status_code == 200
    assert traced.spans.keys() == {"text_completion sql", "queue", "prefill", "decode"}
    span = traced.spans["text_completion sql"]
    assert span.parent is not None and span.context is not None and span.attributes is not None
    assert f"{span.parent.trace_id:032x}" in PARENT and f"{span.parent.span_id:016x}" in PARENT
    assert span.context.trace_state.get("x") == "y"
    assert span.attributes["weft.adapter.version"] == 1
    assert span.attributes["gen_ai.usage.output_tokens"] == 3


async def test_each_operation_has_its_name(traced: Traced, tmp_path: Path) -> None:
    web = Web(World(tmp_path, byte_level(), traces=traced.traces))
    messages = [{"role": "user", "content": "hello"}]
    for path, body in (
        ("chat/completions", {"messages": messages}),
        ("messages", {"messages": messages, "max_tokens": 3}),
        ("responses", {"input": "hello"}),
        ("completions", {"prompt": "hello"}),
        ("embeddings", {"input": "hello"}),
    ):
        answer = await web.post(f"/v1/{path}", {"model": "base", **body})
        assert answer.status_code == 200, answer.text
    names = [span.name for span in traced.finished if span.parent is None]
    assert names == [*["chat base"] * 3, "text_completion base", "embeddings base"]


async def test_requests_do_not_share_parents(traced: Traced) -> None:
    engine = ScriptedEngine()
    engine.script = engine.script[1:]
    engine.script[0] = engine.script[0]._replace(token_ids=[])
    client = client_of(engine, traced.traces)
    ours = [complete(client, "sql", traceparent=PARENT), complete(client, "base")]
    await asyncio.gather(*ours)
    assert traced.spans["text_completion sql"].parent is not None
    assert traced.spans["text_completion base"].parent is None


@pytest.mark.parametrize("header", ["", "nonsense", "00-" + "0" * 32 + "-" + "0" * 16 + "-01"])
def test_a_parent_that_is_none(traced: Traced, header: str) -> None:
    traced.traces.record(RECORD, "text_completion", {"traceparent": header})
    assert traced.spans["text_completion sql"].parent is None


def test_what_the_caller_does_not_sample_is_not_recorded(traced: Traced) -> None:
    traced.traces.record(RECORD, "text_completion", {"traceparent": UNSAMPLED})
    assert not traced.spans


async def test_a_failure(traced: Traced) -> None:
    engine = ScriptedEngine()
    wire = ("adapter_unavailable", "it is gone", None)
    engine.script = [TokenEvent("", [], finish_reason="error", error=wire)]
    client = client_of(engine, traced.traces)
    assert (await complete(client)).status_code == 503
    [span] = traced.spans.values()
    assert span.status.status_code is StatusCode.ERROR
    assert span.attributes is not None
    assert span.attributes["error.type"] == "adapter_unavailable"
    assert "gen_ai.latency.time_to_first_token" not in span.attributes


# -- sending ---------------------------------------------------------------------------------------


class Collector(HTTPServer):
    """Takes traces."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Take)
        self.taken: list[tuple[str, ExportTraceServiceRequest]] = []


class _Take(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.server.taken.append((self.path, ExportTraceServiceRequest.FromString(body)))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_spans_are_sent_over_otlp_at_the_latest_at_the_end(collector: Collector) -> None:
    traces = open_traces(f"http://127.0.0.1:{collector.server_port}")
    traces.record(RECORD, "text_completion", {})
    traces.close()
    [(path, request)] = collector.taken
    assert path == "/v1/traces"
    [spans] = [scope.spans for r in request.resource_spans for scope in r.scope_spans]
    assert {span.name for span in spans} == {"text_completion sql", "queue", "prefill", "decode"}


def test_a_token_in_the_endpoint_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        traces = open_traces(f"http://127.0.0.1:{nobody.getsockname()[1]}/v1/traces?token=secret")
        traces.record(RECORD, "chat", {})
        traces.close()
    assert "/v1/traces" in caplog.text and "secret" not in caplog.text


@pytest.mark.parametrize("endpoint", ["", "localhost:4318", "grpc://x:1", "http://", "http://[x"])
def test_an_endpoint_that_is_none(endpoint: str) -> None:
    with pytest.raises(ConfigError, match="--otlp-endpoint must be a URL") as caught:
        open_traces(endpoint)
    assert caught.value.param == "otlp_endpoint"

"""`weft top`: what it makes of metrics, how it shows that, and what it says when it can't."""

from __future__ import annotations

import io
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from patience import PATIENCE_S
from rich.console import Console

from weft.cli import top
from weft.cli.asking import plain_url
from weft.cli.scrapes import Scrape, TierLoad, View, measure, parse, quantile
from weft.cli.top import run_top
from weft.cli.watch import Watched
from weft.core.errors import Unreachable


def text(
    at: int = 0,
    *,
    up: int = 1,
    slow: int = 0,
    names: tuple[str, ...] = ("sql", "french"),
) -> str:
    """A server's metrics `at` seconds after its start at 1000: 20 tokens, 10 of them sql's, and
    one request each second."""
    adapters = "\n".join(
        f"""
weft:adapter_output_tokens_total{{adapter="{name}"}} {at * share}
weft:adapter_requests_total{{adapter="{name}",finished_reason="stop"}} {at + 1}
weft:adapter_time_to_first_token_seconds_bucket{{adapter="{name}",le="0.1"}} {at - slow}
weft:adapter_time_to_first_token_seconds_bucket{{adapter="{name}",le="1.0"}} {at}
weft:adapter_time_to_first_token_seconds_bucket{{adapter="{name}",le="+Inf"}} {at}
"""
        for name, share in zip((*names, "base"), (10, 4, 6), strict=True)
    )
    return f"""
process_start_time_seconds 1000
weft:engine_up {up}
vllm:e2e_request_latency_seconds_count{{model_name="base"}} {at}
vllm:num_requests_running{{model_name="base"}} 12
vllm:num_requests_waiting{{model_name="base"}} 3
vllm:kv_cache_usage_perc{{model_name="base"}} 0.25
vllm:generation_tokens_total{{model_name="base"}} {at * 20}
vllm:prompt_tokens_total{{model_name="base"}} {at * 100}
vllm:prefix_cache_hits_total{{model_name="base"}} {at * 40}
vllm:num_preemptions_total{{model_name="base"}} 0
vllm:request_success_total{{model_name="base",finished_reason="stop"}} {at}
vllm:time_to_first_token_seconds_bucket{{model_name="base",le="0.1"}} {at - slow}
vllm:time_to_first_token_seconds_bucket{{model_name="base",le="1.0"}} {at}
vllm:time_to_first_token_seconds_bucket{{model_name="base",le="+Inf"}} {at}
vllm:lora_adapter_loaded{{adapter_name="{names[0]}",level="cpu",pinned="false"}} 1
vllm:lora_adapter_loaded{{adapter_name="{names[0]}",level="gpu",pinned="false"}} 1
vllm:max_gpu_lora_adapters 40
weft:adapters{{level="gpu"}} 1
weft:adapters{{level="cpu"}} 2
weft:adapters{{level="disk"}} 997
weft:adapter_loads_total {at * 2}
weft:adapter_evictions_total {at}
weft:adapter_tier_bytes{{tier="device"}} 1610612736
weft:adapter_tier_bytes{{tier="host"}} 0
weft:adapter_tier_limit_bytes{{tier="device"}} 2147483648
weft:adapter_tier_limit_bytes{{tier="host"}} 536870912
weft:adapter_tier_hits_total{{tier="device"}} {at * 3}
weft:adapter_tier_misses_total{{tier="device"}} {at}
weft:adapter_tier_evictions_total{{tier="device"}} {at}
weft:adapter_load_seconds_count{{stage="read"}} {at}
weft:adapter_load_seconds_bucket{{stage="read",le="0.01"}} {at}
weft:adapter_load_seconds_bucket{{stage="read",le="+Inf"}} {at}
weft:adapter_load_seconds_count{{stage="copy"}} {at}
weft:adapter_load_seconds_bucket{{stage="copy",le="0.002"}} {at}
weft:adapter_load_seconds_bucket{{stage="copy",le="+Inf"}} {at}
weft:adapter_wait_seconds_bucket{{le="0.02"}} {at}
weft:adapter_wait_seconds_bucket{{le="+Inf"}} {at}
weft:http_requests_total{{route="/v1/completions",status="200"}} {at}
weft:http_requests_total{{route="/v1/completions",status="503"}} 0
{adapters}
"""


def scrape(at: int, **more: int) -> Scrape:
    return parse(text(at, **more), 1000.0 + at)


def shown(view: View, width: int = 80, max_rows: int = 20, notice: str = "") -> list[str]:
    console = Console(width=width, file=io.StringIO(), color_system=None)
    console.print(top.render(view, "http://host:8000", max_rows, notice))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


# -- measuring -------------------------------------------------------------------------------------


def test_rates_are_of_the_time_between() -> None:
    view = measure(scrape(120), scrape(110))
    assert (view.model, view.uptime_s) == ("base", 120)
    assert view.rate("vllm:generation_tokens_total") == 20
    assert view.rate("vllm:prompt_tokens_total") == 100
    assert view.cached_share == pytest.approx(0.4)
    assert view.rate("vllm:request_success_total") == 1
    assert view.rate("weft:adapter_loads_total") == 2
    assert view.errors_per_s == 0


def test_adapters_the_busiest_first() -> None:
    rows = measure(scrape(120), scrape(110)).adapters()
    assert [(r.name, r.tokens_per_s, r.level) for r in rows] == [
        ("sql", 10, "gpu"),
        ("base", 6, "base"),
        ("french", 4, "disk"),
    ]
    assert all(r.requests_per_s == 1 and r.num_requests == 121 for r in rows)


def test_tiers() -> None:
    view = measure(scrape(120), scrape(110))
    assert list(view.tiers()) == [
        TierLoad("device", 1.5 * 2**30, 2**31, 0.75, 1.0),
        TierLoad("host", 0.0, 2**29, None, 0.0),
    ]
    stages = {name: each.p50_s for name, each in view.stages().items()}
    assert stages == {"read": 0.005, "copy": 1e-3}
    assert view.latency("weft:adapter_wait_seconds").p50_s == 0.01


def test_latencies_are_of_late_if_there_were_requests() -> None:
    name = "vllm:time_to_first_token_seconds"
    recent = measure(scrape(120, slow=10), scrape(110)).latency(name)
    assert recent.recent and recent.p50_s == pytest.approx(0.1 + 0.9 * 0.5)
    idle = measure(scrape(120, slow=10), scrape(120, slow=10)).latency(name)
    assert not idle.recent and idle.p50_s == pytest.approx(0.1 * 60 / 110)
    none = measure(scrape(0), scrape(0)).latency(name)
    assert (none.p50_s, none.p95_s) == (None, None)


def test_a_restarted_server_counts_from_zero() -> None:
    view = measure(scrape(5), scrape(500))
    assert view.rate("vllm:generation_tokens_total") > 0
    assert view.rate("vllm:request_success_total") > 0
    assert all(row.tokens_per_s >= 0 for row in view.adapters())


def test_an_engine_that_is_down() -> None:
    without = "\n".join(line for line in text(9, up=0).splitlines() if "num_requests" not in line)
    view = measure(parse(without, 1009), parse(without, 1009))
    assert "the engine does not answer" in "\n".join(shown(view))


@pytest.mark.parametrize(
    ("share", "expected"), [(0.0, None), (0.25, 0.5), (0.5, 1.0), (0.75, 1.5), (1.0, 2.0)]
)
def test_quantiles(share: float, expected: float | None) -> None:
    assert quantile({1.0: 10, 2.0: 20, float("inf"): 20}, share) == expected


def test_quantiles_beyond_the_last_bound_are_that_bound() -> None:
    assert quantile({1.0: 1, float("inf"): 10}, 0.9) == 1.0
    assert quantile({}, 0.5) is None


# -- showing ---------------------------------------------------------------------------------------


FRAME_80 = """\
weft top  base  http://host:8000                                       up 1h 12m
╭─ Requests ──────────────╮╭─ Tokens ────────────────╮╭─ Latency ──────────────╮
│ running              12 ││ output             20/s ││             p50    p95 │
│ waiting               3 ││ prompt            100/s ││ TTFT      50 ms  95 ms │
│ finished          1.0/s ││ cached              40% ││ TPOT          -      - │
╰─────────────────────────╯╰─────────────────────────╯╰────────────────────────╯
KV cache  ━━━━━━━━━━━━━━━━╸                                                  25%
Adapters  1 on device (room for about 40), 2 in host memory, 997 on disk
          2.0 loads/s, 1.0 evictions/s
  device  1.5G of 2.0G, 75% hits, 1.0 evictions/s
  host    0 of 512M, - hits
  p50     read 5.0 ms, copy 1.0 ms, requests wait 10 ms

Adapter          Tokens/s   Requests/s   Requests   TTFT p50   TPOT p50   In
────────────────────────────────────────────────────────────────────────────────
sql                    10          1.0      4,321      50 ms          -   device
base                  6.0          1.0      4,321      50 ms          -   base
french                4.0          1.0      4,321      50 ms          -   disk
"""


def test_a_frame_of_80_columns() -> None:
    lines = shown(measure(scrape(4320), scrape(4310)))
    assert [line.rstrip() for line in lines] == FRAME_80.splitlines()


@pytest.mark.parametrize("width", [80, 120, 200])
def test_frames_fit(width: int) -> None:
    long = "a-name-of-an-adapter/" * 9
    view = measure(parse(text(120, names=(long, "b[bold]c")), 1120), scrape(110))
    lines = shown(view, width)
    assert all(len(line) <= width for line in lines)
    assert any("b[bold]c" in line for line in lines)
    assert any(line.startswith("a-name-of-an-") and "…" in line for line in lines)


@pytest.mark.parametrize(
    ("width", "figures"), [(60, ["10", "1.0", "121"]), (50, ["10", "1.0"]), (40, ["10"])]
)
def test_a_narrow_frame_has_names_before_figures(width: int, figures: list[str]) -> None:
    lines = shown(measure(scrape(120), scrape(110)), width)
    assert all(len(line) <= width for line in lines)
    assert lines[-3].split() == ["sql", *figures, "device"]


def test_a_sum_of_adapters_is_not_said_to_be_on_disk() -> None:
    summed = parse(text(120, names=("sql", "french,sql")), 1120)
    rows = measure(summed, summed).adapters()
    assert [(r.name, r.level) for r in rows if "french" in r.name] == [("french,sql", "")]


def test_at_most_so_many_rows() -> None:
    view = measure(scrape(120), scrape(110))
    lines = "\n".join(shown(view, max_rows=2))
    assert "sql" in lines and "base" in lines and "french" not in lines


# -- the command -----------------------------------------------------------------------------------


class Server(HTTPServer):
    """Answers /metrics with `answers` in turn, the last one for ever; None: with status 500."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.answers: list[str | None] = [text(100), text(101)]
        self.paths: list[str] = []
        self.key = ""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        self.server.paths.append(self.path)
        answers = self.server.answers
        if self.headers.get("authorization", "") != self.server.key:
            self.send_error(401)
            return
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        self.send_response(500 if answer is None else 200)
        self.end_headers()
        self.wfile.write((answer or "").encode())

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as made:
        thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield made
        made.shutdown()
        thread.join()


def weft_top(*args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "weft", "top", *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)


def test_one_frame(server: Server) -> None:
    done = weft_top(f"{server.url}/v1/", "--once", "--interval", "0.1")
    assert (done.returncode, done.stderr) == (0, "")
    assert re.search(r"^sql .* 102 .* device", done.stdout, re.MULTILINE), done.stdout
    assert "/s" in done.stdout and server.paths == ["/metrics", "/metrics"]


def test_a_clock_that_is_set_changes_no_rate(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = Watched({"it": server.url}, "")
    watched.read()
    for jump_s in (-7200, 7200):
        then = time.time() + jump_s
        monkeypatch.setattr(time, "time", lambda then=then: then)
        watched.read()
        assert 0 <= watched.age_s < PATIENCE_S
        assert watched.view().seconds < PATIENCE_S


def test_a_server_that_asks_for_a_key(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    server.key = "Bearer secret"
    with pytest.raises(Unreachable, match="status 401; does it need a key"):
        run_top([server.url], 0.1, once=True)
    monkeypatch.setenv("WEFT_API_KEY", "secret")
    assert weft_top(server.url, "--once", "--interval", "0.1").returncode == 0


def test_a_server_that_is_not_there() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # nobody listens, and nobody else can
        port = taken.getsockname()[1]
        done = weft_top(f"127.0.0.1:{port}")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        f"weft: error: can't reach http://127.0.0.1:{port}: Connection refused\n"
    )


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (None, "answers with status 500"),
        ("up 1\n", "not from a Weft server"),
        ("<html>{", "not from a Weft server"),
    ],
)
def test_a_server_of_another_kind(server: Server, answer: str | None, message: str) -> None:
    server.answers = [answer]
    with pytest.raises(Unreachable, match=message) as caught:
        run_top([server.url], 0.1, once=True)
    assert caught.value.message.startswith(f"{server.url}/metrics")


@pytest.mark.parametrize("url", ["http://", "ftp://x", "http://[x", "http://x:y", "\x00"])
def test_an_address_that_is_none(url: str) -> None:
    with pytest.raises(Unreachable, match="can't reach"):
        run_top([url], 0.1, once=True)


@pytest.mark.parametrize("url", ["", "http://", "/v1"])
def test_an_address_without_a_server(url: str) -> None:
    with pytest.raises(Unreachable, match=re.escape(f"can't reach {url!r}: no server is named")):
        plain_url(url)


def test_urls() -> None:
    for given in ("host:1", "http://host:1", "http://host:1/", "http://host:1/v1", "host:1/v1/"):
        assert plain_url(given) == "http://host:1"
    assert plain_url("https://host/weft/v1") == "https://host/weft"
    assert plain_url("host:1/metrics") == "http://host:1"


def test_several_servers(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    """One that does not answer is shown as such, and one that comes later counts from then on."""
    server.answers = [text(100), text(101, up=0)]
    with Server() as late:
        thread = threading.Thread(target=late.serve_forever, kwargs={"poll_interval": 0.01})
        late.answers = [None, text(5000)]
        thread.start()
        here, there = (each.url.removeprefix("http://") for each in (server, late))
        urls = [server.url, f"{here}/v1", late.url, "127.0.0.1:1"]
        run_top(urls, 0.0, once=True, console=Console(width=80, color_system=None))
        late.shutdown()
        thread.join()
    shown = capsys.readouterr().out
    assert "base  1 of 3 servers up" in shown
    assert "can't reach http://127.0.0.1:1: Connection refused" in shown
    assert re.search(rf"^{here} +engine down +12 +3 +25% +[1-9]", shown, re.MULTILINE), shown
    assert re.search(rf"^{there} +up +12 +3 +25% +0 +1 +2", shown, re.MULTILINE), shown
    assert re.search(r"^127.0.0.1:1 +no answer +- +-", shown, re.MULTILINE), shown
    assert "running              24" in shown
    run_top(urls[::3], 0.0, once=True, console=Console(width=40, color_system=None))
    assert re.search(rf"^{here} +engine down +12$", capsys.readouterr().out, re.MULTILINE)
    with pytest.raises(Unreachable, match="none of 2 servers answers; the first: can't reach"):
        run_top(["127.0.0.1:1", "127.0.0.1:2"], 0.0, once=True)


class _Left(Exception):
    pass


def test_live(server: Server) -> None:
    """A frame after each interval; a server that stops answering is said to, and may return."""
    server.answers = [text(100), text(101), None, text(103)]
    console = Console(width=80, height=24, file=io.StringIO(), force_terminal=True)
    frames: list[str] = []

    def sleep(_: float) -> None:
        assert isinstance(console.file, io.StringIO)
        frames.append(console.file.getvalue())
        console.file.truncate(0)
        if len(frames) == 4:
            raise _Left

    with pytest.raises(_Left):
        run_top([server.url], 1.0, once=False, console=console, sleep=sleep)
    noticed = ["answers with status 500; the figures are" in frame for frame in frames]
    assert noticed == [False, False, True, False]
    assert all("french" in frame for frame in frames)

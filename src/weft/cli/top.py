"""`weft top`: what a server does right now, from its metrics.

read /metrics each second ─> Scrape ─> increase over the last seconds ─> View ─> what is shown
"""

from __future__ import annotations

import http.client
import time
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise

from prometheus_client.parser import text_string_to_metric_families
from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from weft.core.errors import Unreachable

WINDOW_S = 10.0
"""Rates and percentiles are of the last seconds, so many."""
TIMEOUT_S = 5.0
ROWS_ONCE = 20
HEAD_LINES = 16
"""Lines that are not rows of the table, at most."""

Labels = frozenset[tuple[str, str]]
Buckets = dict[float, float]
"""Number of values up to each bound."""


# -- reading -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Scrape:
    """All series at one time."""

    time_s: float
    """Unix time."""
    series: Mapping[str, Mapping[Labels, float]]
    """By name and labels."""

    def sum(self, name: str) -> float:
        return sum(self.series.get(name, {}).values())

    def by(self, label: str, name: str) -> dict[str, float]:
        """Sums by a label's value."""
        sums: dict[str, float] = {}
        for labels, value in self.series.get(name, {}).items():
            key = dict(labels).get(label, "")
            sums[key] = sums.get(key, 0.0) + value
        return sums

    def buckets(self, name: str, **only: str) -> Buckets:
        """Of a histogram: all its series with these labels together."""
        found: Buckets = {}
        for labels, value in self.series.get(f"{name}_bucket", {}).items():
            values = dict(labels)
            if only.items() <= values.items():
                bound = float(values["le"])
                found[bound] = found.get(bound, 0.0) + value
        return found

    def since(self, before: Scrape) -> Scrape:
        """What counters have gained; one that is smaller than before began anew."""
        gained = {
            name: {
                labels: value - old if value >= (old := then.get(labels, 0.0)) else value
                for labels, value in now.items()
            }
            for name, now in self.series.items()
            for then in (before.series.get(name, {}),)
        }
        return Scrape(self.time_s, gained)


def parse(text: str, time_s: float) -> Scrape:
    """Raises Unreachable when the text is not of a Weft server."""
    series: dict[str, dict[Labels, float]] = {}
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                labels = frozenset(sample.labels.items())
                series.setdefault(sample.name, {})[labels] = sample.value
    except ValueError:
        series = {}
    if "weft:engine_up" not in series:
        raise Unreachable("/metrics is not that of a Weft server")
    return Scrape(time_s, series)


def fetch(url: str) -> Scrape:
    """The server's metrics now. Raises Unreachable."""
    try:
        with urllib.request.urlopen(f"{url}/metrics", timeout=TIMEOUT_S) as answer:
            return parse(answer.read().decode("utf-8", "replace"), time.time())
    except Unreachable as error:
        raise Unreachable(f"{url}{error.message}") from None
    except urllib.error.HTTPError as error:
        error.close()
        raise Unreachable(f"{url}/metrics answers with status {error.code}") from None
    except (OSError, http.client.HTTPException, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        why = getattr(reason, "strerror", None) or str(reason) or type(error).__name__
        raise Unreachable(f"can't reach {url}: {why}") from None


def plain_url(given: str) -> str:
    """`localhost:8000/v1/` as http://localhost:8000."""
    url = given if "://" in given else f"http://{given}"
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


# -- measuring -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Latency:
    """Percentiles, in seconds; None: there was no request."""

    p50_s: float | None = None
    p95_s: float | None = None
    recent: bool = True
    """Of the last seconds, not since the server's start."""


@dataclass(frozen=True, slots=True)
class AdapterRow:
    name: str
    tokens_per_s: float
    requests_per_s: float
    num_requests: float
    """Since its series began."""
    first_token: Latency
    per_token: Latency
    level: str
    """gpu, cpu, disk; of the base `base`, of the sum of others nothing."""


@dataclass(frozen=True, slots=True)
class TierRow:
    """A place of adapters."""

    name: str
    """device, host, disk."""
    num_bytes: float
    max_bytes: float
    hit_share: float | None
    """Of what was looked for there, 0 to 1; None: nothing was."""
    evictions_per_s: float


@dataclass(frozen=True, slots=True)
class View:
    """All that is shown. Rates are per second."""

    model: str
    engine_up: bool
    uptime_s: float | None
    running: float = 0.0
    waiting: float = 0.0
    requests_per_s: float = 0.0
    errors_per_s: float = 0.0
    """HTTP answers with status 500 and above."""
    output_tokens_per_s: float = 0.0
    prompt_tokens_per_s: float = 0.0
    cached_share: float | None = None
    """Of the prompt tokens, 0 to 1."""
    kv_usage: float = 0.0
    preemptions_per_s: float = 0.0
    first_token: Latency = field(default_factory=Latency)
    per_token: Latency = field(default_factory=Latency)
    levels: Mapping[str, int] = field(default_factory=dict)
    """Adapters by gpu, cpu, disk."""
    room: float = 0.0
    """Adapters that fit on the device, about."""
    loads_per_s: float = 0.0
    evictions_per_s: float = 0.0
    tiers: tuple[TierRow, ...] = ()
    stages: Mapping[str, Latency] = field(default_factory=dict)
    """Of loads: read, pack, copy."""
    wait: Latency = field(default_factory=Latency)
    """Of requests, for their adapter's residency."""
    adapters: tuple[AdapterRow, ...] = ()
    """The busiest first."""


def measure(now: Scrape, before: Scrape) -> View:
    """What happened between two scrapes of one server."""
    gained = now.since(before)
    per_s = 1.0 / max(now.time_s - before.time_s, 1e-3)
    started = now.sum("process_start_time_seconds")
    prompt = gained.sum("vllm:prompt_tokens_total")
    return View(
        model=next(iter(now.by("model_name", "vllm:e2e_request_latency_seconds_count")), ""),
        engine_up=bool(now.sum("weft:engine_up")),
        uptime_s=max(now.time_s - started, 0.0) if started else None,
        running=now.sum("vllm:num_requests_running"),
        waiting=now.sum("vllm:num_requests_waiting"),
        requests_per_s=gained.sum("vllm:request_success_total") * per_s,
        errors_per_s=_server_errors(gained) * per_s,
        output_tokens_per_s=gained.sum("vllm:generation_tokens_total") * per_s,
        prompt_tokens_per_s=prompt * per_s,
        cached_share=gained.sum("vllm:prefix_cache_hits_total") / prompt if prompt else None,
        kv_usage=now.sum("vllm:kv_cache_usage_perc"),
        preemptions_per_s=gained.sum("vllm:num_preemptions_total") * per_s,
        first_token=_latency(now, gained, "vllm:time_to_first_token_seconds"),
        per_token=_latency(now, gained, "vllm:request_time_per_output_token_seconds"),
        levels={level: int(n) for level, n in now.by("level", "weft:adapters").items()},
        room=now.sum("vllm:max_gpu_lora_adapters"),
        loads_per_s=gained.sum("weft:adapter_loads_total") * per_s,
        evictions_per_s=gained.sum("weft:adapter_evictions_total") * per_s,
        tiers=tuple(_tier_rows(now, gained, per_s)),
        stages={
            stage: _latency(now, gained, "weft:adapter_load_seconds", stage=stage)
            for stage in now.by("stage", "weft:adapter_load_seconds_count")
        },
        wait=_latency(now, gained, "weft:adapter_wait_seconds"),
        adapters=tuple(_adapter_rows(now, gained, per_s)),
    )


def _server_errors(gained: Scrape) -> float:
    by_status = gained.by("status", "weft:http_requests_total")
    return sum(count for status, count in by_status.items() if status.startswith("5"))


def _tier_rows(now: Scrape, gained: Scrape, per_s: float) -> Iterator[TierRow]:
    limits = now.by("tier", "weft:adapter_tier_limit_bytes")
    num_bytes = now.by("tier", "weft:adapter_tier_bytes")
    hits = gained.by("tier", "weft:adapter_tier_hits_total")
    misses = gained.by("tier", "weft:adapter_tier_misses_total")
    evictions = gained.by("tier", "weft:adapter_tier_evictions_total")
    for tier, limit in limits.items():
        asked = hits.get(tier, 0.0) + misses.get(tier, 0.0)
        share = hits.get(tier, 0.0) / asked if asked else None
        evicted = evictions.get(tier, 0.0) * per_s
        yield TierRow(tier, num_bytes.get(tier, 0.0), limit, share, evicted)


def _adapter_rows(now: Scrape, gained: Scrape, per_s: float) -> list[AdapterRow]:
    models = now.by("model_name", "vllm:e2e_request_latency_seconds_count").keys()
    level_of = _levels(now) | dict.fromkeys(models, "base") | {"other": ""}
    tokens = gained.by("adapter", "weft:adapter_output_tokens_total")
    requests = gained.by("adapter", "weft:adapter_requests_total")
    total = now.by("adapter", "weft:adapter_requests_total")
    rows = [
        AdapterRow(
            name=name,
            tokens_per_s=tokens.get(name, 0.0) * per_s,
            requests_per_s=requests.get(name, 0.0) * per_s,
            num_requests=count,
            first_token=_latency(
                now, gained, "weft:adapter_time_to_first_token_seconds", adapter=name
            ),
            per_token=_latency(
                now, gained, "weft:adapter_time_per_output_token_seconds", adapter=name
            ),
            level=level_of.get(name, "disk"),
        )
        for name, count in total.items()
        if count
    ]
    rows.sort(key=lambda row: (-row.tokens_per_s, -row.num_requests, row.name))
    return rows


def _levels(now: Scrape) -> dict[str, str]:
    """The fastest memory that has an adapter, of those that are in one."""
    levels: dict[str, str] = {}
    for labels in now.series.get("vllm:lora_adapter_loaded", {}):
        values = dict(labels)
        name, level = values["adapter_name"], values["level"]
        levels[name] = "gpu" if "gpu" in (level, levels.get(name)) else level
    return levels


def _latency(now: Scrape, gained: Scrape, name: str, **only: str) -> Latency:
    recent = gained.buckets(name, **only)
    any_recent = recent.get(float("inf"), 0.0) > 0
    buckets = recent if any_recent else now.buckets(name, **only)
    return Latency(quantile(buckets, 0.5), quantile(buckets, 0.95), any_recent)


def quantile(buckets: Buckets, share: float) -> float | None:
    """Estimated as Prometheus does: values are spread evenly in their bucket."""
    edges = [(0.0, 0.0), *sorted(buckets.items())]
    rank = share * edges[-1][1]
    if rank <= 0:
        return None
    for (low, below), (high, up_to) in pairwise(edges):
        if up_to >= rank:
            if high == float("inf"):
                return low
            return low + (high - low) * (rank - below) / (up_to - below)
    return None


# -- showing -------------------------------------------------------------------------------------


def render(view: View, url: str, max_rows: int, notice: str = "") -> RenderableType:
    """One frame, for any width from 80 on. `notice`: what is wrong with it."""
    parts: list[RenderableType] = [_head(view, url)]
    if notice or not view.engine_up:
        parts.append(Text(notice or "the engine does not answer", style="bold red"))
    if view.errors_per_s:
        parts.append(Text(f"{_rate(view.errors_per_s)} HTTP errors/s", style="bold red"))
    parts += [_panels(view), _kv(view), _adapters(view), Text(), _table(view, max_rows)]
    return Group(*parts)


def _head(view: View, url: str) -> Table:
    line = Table.grid(expand=True)
    line.add_column(no_wrap=True, overflow="ellipsis", ratio=1)
    line.add_column(justify="right", no_wrap=True)
    state = ("up", "green") if view.engine_up else ("down", "bold red")
    left = Text.assemble(("weft top  ", "bold cyan"), (view.model, "bold"), f"  {url}")
    right = Text.assemble(state, f" {_span(view.uptime_s)}" if view.uptime_s is not None else "")
    line.add_row(left, right)
    return line


def _panels(view: View) -> Table:
    """Side by side, three equal parts of the width."""
    row = Table.grid(expand=True)
    for _ in range(3):
        row.add_column(ratio=1)
    cached = "-" if view.cached_share is None else f"{view.cached_share:.0%}"
    requests = [
        ("running", f"{view.running:,.0f}"),
        ("waiting", f"{view.waiting:,.0f}"),
        ("finished", f"{_rate(view.requests_per_s)}/s"),
    ]
    tokens = [
        ("output", f"{_rate(view.output_tokens_per_s)}/s"),
        ("prompt", f"{_rate(view.prompt_tokens_per_s)}/s"),
        ("cached", cached),
    ]
    row.add_row(_panel("Requests", requests), _panel("Tokens", tokens), _latencies(view))
    return row


def _panel(title: str, lines: Iterable[tuple[str, str]]) -> Panel:
    grid = Table.grid(expand=True)
    grid.add_column(style="dim")
    grid.add_column(justify="right", style="bold")
    for name, value in lines:
        grid.add_row(name, value)
    return Panel(grid, title=title, title_align="left", border_style="dim")


def _latencies(view: View) -> Panel:
    grid = Table.grid(expand=True)
    grid.add_column(style="dim")
    grid.add_column(justify="right", style="bold")
    grid.add_column(justify="right", style="bold")
    grid.add_row("", Text("p50", style="dim"), Text("p95", style="dim"))
    for name, latency in (("TTFT", view.first_token), ("TPOT", view.per_token)):
        grid.add_row(name, _seconds(latency.p50_s), _seconds(latency.p95_s))
    when = "Latency" if view.first_token.recent else "Latency so far"
    return Panel(grid, title=when, title_align="left", border_style="dim")


def _kv(view: View) -> Table:
    style = "green" if view.kv_usage < 0.8 else "yellow" if view.kv_usage < 0.95 else "red"
    line = Table.grid(expand=True, padding=(0, 1))
    line.add_column(style="dim", width=9)
    line.add_column(ratio=1)
    line.add_column(justify="right", no_wrap=True)
    bar = ProgressBar(100.0, view.kv_usage * 100, complete_style=style, finished_style=style)
    more = f", {_rate(view.preemptions_per_s)} preempted/s" if view.preemptions_per_s else ""
    line.add_row("KV cache", bar, f"{view.kv_usage:.0%}{more}")
    return line


def _adapters(view: View) -> Table:
    levels = view.levels
    parts = [
        f"{levels.get('gpu', 0):,} on device (room for about {view.room:,.0f})",
        f"{levels.get('cpu', 0):,} in host memory",
        f"{levels.get('disk', 0):,} on disk",
    ]
    lines = Table.grid(padding=(0, 1))
    lines.add_column(style="dim", width=9)
    lines.add_row("Adapters", ", ".join(parts))
    loads, evictions = _rate(view.loads_per_s), _rate(view.evictions_per_s)
    lines.add_row("", f"{loads} loads/s, {evictions} evictions/s")
    for tier in view.tiers:
        lines.add_row(f"  {tier.name}", _tier(tier))
    if any(latency.p50_s is not None for latency in view.stages.values()):
        lines.add_row("  p50", _load_times(view))
    return lines


def _tier(tier: TierRow) -> str:
    hits = "-" if tier.hit_share is None else f"{tier.hit_share:.0%}"
    evictions = f", {_rate(tier.evictions_per_s)} evictions/s" if tier.evictions_per_s else ""
    return f"{_size(tier.num_bytes)} of {_size(tier.max_bytes)}, {hits} found{evictions}"


def _load_times(view: View) -> str:
    stages = [f"{name} {_seconds(each.p50_s)}" for name, each in view.stages.items()]
    return ", ".join([*stages, f"requests wait {_seconds(view.wait.p50_s)}"])


def _table(view: View, max_rows: int) -> Table:
    table = Table(box=box.SIMPLE_HEAD, expand=True, show_edge=False, pad_edge=False)
    table.add_column("Adapter", ratio=1, no_wrap=True, overflow="ellipsis")
    for name in ("Tokens/s", "Requests/s", "Requests", "TTFT p50", "TPOT p50"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("In", no_wrap=True)
    for row in view.adapters[:max_rows]:
        idle = not (row.tokens_per_s or row.requests_per_s)
        table.add_row(
            Text(row.name),
            _rate(row.tokens_per_s),
            _rate(row.requests_per_s),
            f"{row.num_requests:,.0f}",
            _seconds(row.first_token.p50_s),
            _seconds(row.per_token.p50_s),
            _SHOWN_LEVEL.get(row.level, row.level),
            style="dim" if idle else "",
        )
    return table


_SHOWN_LEVEL = {"gpu": "device", "cpu": "host"}


def _rate(per_s: float) -> str:
    if 0 < per_s < 9.95:
        return f"{per_s:.1f}"
    return f"{per_s:,.0f}"


def _size(num_bytes: float) -> str:
    """In the units of the flags: 1.5G."""
    power = 0
    while num_bytes >= 1000 and power < 4:
        num_bytes, power = num_bytes / 1024, power + 1
    number = f"{num_bytes:.1f}" if power and num_bytes < 9.95 else f"{num_bytes:,.0f}"
    return number + " KMGT"[power].strip()


def _seconds(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    if seconds >= 1:
        return f"{seconds:.1f} s"
    ms = seconds * 1000
    return f"{ms:.1f} ms" if ms < 10 else f"{ms:.0f} ms"


def _span(seconds: float) -> str:
    minutes, hours, days = seconds // 60, seconds // 3600, seconds // 86400
    if days:
        return f"{days:.0f}d {hours % 24:.0f}h"
    if hours:
        return f"{hours:.0f}h {minutes % 60:.0f}m"
    return f"{minutes:.0f}m {seconds % 60:.0f}s"


# -- the command ---------------------------------------------------------------------------------


def run_top(
    url: str,
    interval_s: float,
    once: bool,
    console: Console | None = None,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Show the server at `url` until interrupted; `once`, or without a terminal: one frame, whose
    rates are of `interval_s`. Raises Unreachable when the server can't be read at the start."""
    console = console or Console()
    url = plain_url(url)
    first = fetch(url)
    if once or not console.is_terminal:
        sleep(interval_s)
        console.print(render(measure(fetch(url), first), url, ROWS_ONCE))
        return
    scrapes = deque([first])
    view = measure(first, first)
    notice = ""
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            max_rows = max(console.height - HEAD_LINES - bool(notice), 1)
            live.update(render(view, url, max_rows, notice), refresh=True)
            sleep(interval_s)
            try:
                scrapes.append(fetch(url))
            except Unreachable as error:
                silent_s = time.time() - scrapes[-1].time_s
                notice = f"{error.message}; the figures are {silent_s:.0f} s old"
                continue
            notice = ""
            while len(scrapes) > 2 and scrapes[1].time_s <= scrapes[-1].time_s - WINDOW_S:
                scrapes.popleft()
            view = measure(scrapes[-1], scrapes[0])

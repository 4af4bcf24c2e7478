"""`weft top`: what a server does right now, from its metrics.

read /metrics each second ─> Scrape ─> increase over the last seconds ─> View ─> what is shown
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from weft.cli.scrapes import TierLoad, View, fetch, measure, plain_url
from weft.core.errors import Unreachable

WINDOW_S = 10.0
"""Rates and percentiles are of the last seconds, so many."""
ROWS_ONCE = 20
HEAD_LINES = 16
"""Lines that are not rows of the table, at most."""


def render(view: View, url: str, max_rows: int, notice: str = "") -> RenderableType:
    """One frame, for any width from 80 on. `notice`: what is wrong with it."""
    parts: list[RenderableType] = [_head(view, url)]
    if notice or not view.sum("weft:engine_up"):
        parts.append(Text(notice or "the engine does not answer", style="bold red"))
    if view.errors_per_s:
        parts.append(Text(f"{_rate(view.errors_per_s)} HTTP errors/s", style="bold red"))
    parts += [panels(view), _kv(view), adapter_lines(view), Text(), adapter_table(view, max_rows)]
    return Group(*parts)


def _head(view: View, url: str) -> Table:
    line = Table.grid(expand=True)
    line.add_column(no_wrap=True, overflow="ellipsis", ratio=1)
    line.add_column(justify="right", no_wrap=True)
    state = ("up", "green") if view.sum("weft:engine_up") else ("down", "bold red")
    left = Text.assemble(("weft top  ", "bold cyan"), (view.model, "bold"), f"  {url}")
    right = Text.assemble(state, f" {_span(view.uptime_s)}" if view.uptime_s is not None else "")
    line.add_row(left, right)
    return line


def panels(view: View) -> Table:
    """Side by side, three equal parts of the width."""
    row = Table.grid(expand=True)
    for _ in range(3):
        row.add_column(ratio=1)
    requests = [
        ("running", f"{view.sum('vllm:num_requests_running'):,.0f}"),
        ("waiting", f"{view.sum('vllm:num_requests_waiting'):,.0f}"),
        ("finished", f"{_rate(view.rate('vllm:request_success_total'))}/s"),
    ]
    tokens = [
        ("output", f"{_rate(view.rate('vllm:generation_tokens_total'))}/s"),
        ("prompt", f"{_rate(view.rate('vllm:prompt_tokens_total'))}/s"),
        ("cached", _share(view.cached_share)),
    ]
    row.add_row(_panel("Requests", requests), _panel("Tokens", tokens), _latencies(view))
    return row


def _panel(title: str, rows: Sequence[tuple[str | Text, ...]]) -> Panel:
    grid = Table.grid(expand=True)
    grid.add_column(style="dim")
    for _ in rows[0][1:]:
        grid.add_column(justify="right", style="bold")
    for row in rows:
        grid.add_row(*row)
    return Panel(grid, title=title, title_align="left", border_style="dim")


def _latencies(view: View) -> Panel:
    first_token = view.latency("vllm:time_to_first_token_seconds")
    per_token = view.latency("vllm:request_time_per_output_token_seconds")
    rows: list[tuple[str | Text, ...]] = [("", Text("p50", "dim"), Text("p95", "dim"))]
    for name, latency in (("TTFT", first_token), ("TPOT", per_token)):
        rows.append((name, _seconds(latency.p50_s), _seconds(latency.p95_s)))
    return _panel("Latency" if first_token.recent else "Latency so far", rows)


def _kv(view: View) -> Table:
    usage, preempted = view.sum("vllm:kv_cache_usage_perc"), view.rate("vllm:num_preemptions_total")
    style = "green" if usage < 0.8 else "yellow" if usage < 0.95 else "red"
    line = Table.grid(expand=True, padding=(0, 1))
    line.add_column(style="dim", width=9)
    line.add_column(ratio=1)
    line.add_column(justify="right", no_wrap=True)
    bar = ProgressBar(100.0, usage * 100, complete_style=style, finished_style=style)
    more = f", {_rate(preempted)} preempted/s" if preempted else ""
    line.add_row("KV cache", bar, f"{usage:.0%}{more}")
    return line


def adapter_lines(view: View) -> Table:
    levels = view.now.by("level", "weft:adapters")
    room = view.sum("vllm:max_gpu_lora_adapters")
    parts = [
        f"{levels.get('gpu', 0):,.0f} on device (room for about {room:,.0f})",
        f"{levels.get('cpu', 0):,.0f} in host memory",
        f"{levels.get('disk', 0):,.0f} on disk",
    ]
    lines = Table.grid(padding=(0, 1))
    lines.add_column(style="dim", width=9)
    lines.add_row("Adapters", ", ".join(parts))
    loads, evictions = (
        _rate(view.rate(f"weft:adapter_{what}_total")) for what in ("loads", "evictions")
    )
    lines.add_row("", f"{loads} loads/s, {evictions} evictions/s")
    for tier in view.tiers():
        lines.add_row(f"  {tier.name}", _tier(tier))
    stages = view.stages()
    if any(latency.p50_s is not None for latency in stages.values()):
        times = [f"{name} {_seconds(each.p50_s)}" for name, each in stages.items()]
        wait = view.latency("weft:adapter_wait_seconds")
        lines.add_row("  p50", ", ".join([*times, f"requests wait {_seconds(wait.p50_s)}"]))
    return lines


def _tier(tier: TierLoad) -> str:
    evictions = f", {_rate(tier.evictions_per_s)} evictions/s" if tier.evictions_per_s else ""
    used = f"{_size(tier.num_bytes)} of {_size(tier.max_bytes)}"
    return f"{used}, {_share(tier.hit_share)} found{evictions}"


def adapter_table(view: View, max_rows: int) -> Table:
    table = Table(box=box.SIMPLE_HEAD, expand=True, show_edge=False, pad_edge=False)
    table.add_column("Adapter", ratio=1, no_wrap=True, overflow="ellipsis")
    for name in ("Tokens/s", "Requests/s", "Requests", "TTFT p50", "TPOT p50"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("In", no_wrap=True)
    for row in view.adapters()[:max_rows]:
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


def _share(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"


def _size(num_bytes: float) -> str:
    """The size in the units of the flags: 1.5G."""
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
    key: str = "",
    console: Console | None = None,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Show the server at `url` until interrupted; `once`, or without a terminal: one frame, whose
    rates are of `interval_s`. `key` is sent with each request. Raises Unreachable when the server
    can't be read at the start."""
    console = console or Console()
    url = plain_url(url)
    first = fetch(url, key)
    if once or not console.is_terminal:
        sleep(interval_s)
        console.print(render(measure(fetch(url, key), first), url, ROWS_ONCE))
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
                scrapes.append(fetch(url, key))
            except Unreachable as error:
                silent_s = time.time() - scrapes[-1].time_s
                notice = f"{error.message}; the figures are {silent_s:.0f} s old"
                continue
            notice = ""
            while len(scrapes) > 2 and scrapes[1].time_s <= scrapes[-1].time_s - WINDOW_S:
                scrapes.popleft()
            view = measure(scrapes[-1], scrapes[0])

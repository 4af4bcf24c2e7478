"""`weft top`: shows live what one or several servers do, from their metrics."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial

from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from weft.cli.asking import plain_url
from weft.cli.scrapes import TierLoad, View
from weft.cli.watch import Watched, show

NAME_WIDTH = 12
"""The narrowest that the column of names may be."""


def render(view: View, url: str, max_rows: int, notice: str = "") -> RenderableType:
    """One frame. All of it fits into 80 columns; a narrower one has fewer figures of adapters.
    `notice`: what is wrong with it."""
    parts: list[RenderableType] = [_head(view, url)]
    if notice or not view.sum("weft:engine_up"):
        parts.append(Text(notice or "the engine does not answer", style="bold red"))
    if view.errors_per_s:
        parts.append(Text(f"{_rate(view.errors_per_s)} HTTP errors/s", style="bold red"))
    parts += [panels(view), _kv(view), adapter_lines(view), Text(), adapter_table(view, max_rows)]
    return Group(*parts)


def render_several(watch: Watched, max_rows: int, notice: str) -> RenderableType:
    """One frame about several servers: a row for each, and then what they do together."""
    view = watch.view()
    up = view.now.by("node", "weft:engine_up")
    num_up = sum(bool(up.get(name)) for name in watch.urls if name not in watch.silent)
    parts: list[RenderableType] = [
        Text.assemble(
            ("weft top  ", "bold cyan"),
            (view.model, "bold"),
            f"  {num_up} of {len(watch.urls)} servers up",
        )
    ]
    whys = [notice] if notice else [_why_silent(watch, name) for name in watch.silent]
    parts += [Text(why, style="bold red", no_wrap=True, overflow="ellipsis") for why in whys]
    parts += [_OfWidth(partial(_servers, watch, view)), panels(view), adapter_lines(view), Text()]
    return Group(*parts, adapter_table(view, max_rows - len(whys)))


def _why_silent(watch: Watched, name: str) -> str:
    since = datetime.fromtimestamp(watch.since[name]).astimezone()
    return f"{since:%H:%M:%S}: {watch.silent[name].message}"


def _servers(watch: Watched, view: View, width: int) -> Table:
    """A row for each server. Where there is no room for all figures, the last ones are left out."""
    table = Table(box=None, pad_edge=False)
    table.add_column("Server", no_wrap=True, overflow="ellipsis")
    table.add_column("State", no_wrap=True)
    titles = ["Running", "Waiting", "KV", "Tokens/s", "Device", "Host"]
    while titles and NAME_WIDTH + sum(2 + len(t) for t in ["engine down", *titles]) > width:
        titles.pop()
    for title in titles:
        table.add_column(title, justify="right", no_wrap=True)
    for name in watch.urls:
        if name in watch.silent:
            table.add_row(Text(name), Text("no answer", "bold red"), *["-"] * len(titles))
            continue
        node = view.of_node(name)
        levels = node.now.by("level", "weft:adapters")
        is_up = node.sum("weft:engine_up")
        figures = (
            f"{node.sum('vllm:num_requests_running'):,.0f}",
            f"{node.sum('vllm:num_requests_waiting'):,.0f}",
            f"{node.sum('vllm:kv_cache_usage_perc'):.0%}",
            _rate(node.rate("vllm:generation_tokens_total")),
            f"{levels.get('gpu', 0):,.0f}",
            f"{levels.get('cpu', 0):,.0f}",
        )
        state = Text("up", "green") if is_up else Text("engine down", "bold red")
        table.add_row(Text(name), state, *figures[: len(titles)])
    return table


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
    return f"{used}, {_share(tier.hit_share)} hits{evictions}"


def adapter_table(view: View, max_rows: int) -> RenderableType:
    """The busiest adapters. Where there is no room for all figures, the last ones are left out."""
    return _OfWidth(partial(_adapter_table, view, max_rows))


def _adapter_table(view: View, max_rows: int, width: int) -> Table:
    table = Table(box=box.SIMPLE_HEAD, expand=True, show_edge=False, pad_edge=False)
    table.add_column("Adapter", ratio=1, no_wrap=True, overflow="ellipsis")
    titles = ["Tokens/s", "Requests/s", "Requests", "TTFT p50", "TPOT p50"]
    while titles and NAME_WIDTH + sum(3 + len(each) for each in [*titles, "device"]) > width:
        titles.pop()
    for title in titles:
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("In", no_wrap=True)
    for row in view.adapters()[:max_rows]:
        idle = not (row.tokens_per_s or row.requests_per_s)
        figures = (
            _rate(row.tokens_per_s),
            _rate(row.requests_per_s),
            f"{row.num_requests:,.0f}",
            _seconds(row.first_token.p50_s),
            _seconds(row.per_token.p50_s),
        )
        table.add_row(
            Text(row.name),
            *figures[: len(titles)],
            _SHOWN_LEVEL.get(row.level, row.level),
            style="dim" if idle else "",
        )
    return table


@dataclass(frozen=True)
class _OfWidth:
    """Something to show that is made once its width in columns is known."""

    made: Callable[[int], RenderableType]

    def __rich_console__(
        self, console: Console, options: ConsoleOptions
    ) -> Iterator[RenderableType]:
        yield self.made(options.max_width)


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
    urls: Sequence[str],
    interval_s: float,
    once: bool,
    key: str = "",
    console: Console | None = None,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Show the servers at `urls` until interrupted; `once`, or without a terminal: one frame, whose
    rates are of `interval_s`. `key` is sent with each request. Raises Unreachable when none can be
    read at the start."""
    plain = list(dict.fromkeys(plain_url(url) for url in urls))
    names = [url.removeprefix("http://") for url in plain]
    watch = Watched(dict(zip(names, plain, strict=True)), key)

    def frame(max_rows: int) -> RenderableType:
        lost, notice = watch.lost, ""
        if lost is not None:
            notice = f"{lost.message}; the figures are {watch.age_s:.0f} s old"
        if len(plain) == 1:
            return render(watch.view(), plain[0], max_rows - bool(notice), notice)
        return render_several(watch, max_rows - bool(notice), notice)

    show(watch, frame, interval_s, once, console, sleep)

"""What churn did to throughput and latency, as a table, a plot and figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from rich.table import Table

from weft.bench.report import COLOURS, new_figure, new_table, plot_bars, rounded, set_counts
from weft.core.stats import EngineInfo

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Run = Literal["at once", "capacity", "calm", "churn"]
"""Kinds of runs. In `capacity` all requests come at once; in `calm` they come at the rate of
`churn`. Both use adapters that stay on the device."""


@dataclass(frozen=True, slots=True)
class ChurnRow:
    """One run of all requests."""

    run: Run
    population: int
    rate: float | None
    """Requests a second; None: all at once."""
    output_tokens: int
    seconds: float
    steps: int
    adapters_per_step: float
    """How many different adapters a step has on average; each of them costs a step some time."""
    least_steps: int
    """The number of steps that no order of the requests can beat, by `least_steps`."""
    loads: int
    evictions: int
    preemptions: int
    """How often a running request was put back to go on later."""
    hit_rate: float
    """Share of the requests that needed no load of their own."""
    tpot_ms: tuple[float, float]
    """Mean time per token of a request, after its first: p50 and p99."""
    resident_tpot_p99_ms: float
    """The p99 of the same time, over requests whose adapter was on the device when they came."""
    ttft_ms: tuple[float, float]
    resident_adapters: int
    """Adapters on the device at the end of the run."""
    fit: float
    """How many adapters of the mean size there is memory for."""
    used_bytes: int
    """Device bytes that resident adapters take at the end of the run."""
    wrong: int | None
    """Requests with other tokens than without churn; None: not compared."""

    @property
    def output_tokens_per_s(self) -> float:
        return self.output_tokens / self.seconds


def churn_result(row: ChurnRow, rows: Sequence[ChurnRow], info: EngineInfo) -> dict[str, object]:
    return {
        **rounded(row),
        "output_tokens_per_s": round(row.output_tokens_per_s, 1),
        "share": round(_share(row, rows), 4),
        "resident_tpot_p99_share": round(_resident_share(row, rows), 4),
        "memory_used": round(row.used_bytes / info.adapter_memory_bytes, 4),
    }


def _share(row: ChurnRow, rows: Sequence[ChurnRow]) -> float:
    """Throughput over that of the first run; under a given load, over that of the calm one."""
    return row.output_tokens_per_s / _without_churn(rows).output_tokens_per_s


def _resident_share(row: ChurnRow, rows: Sequence[ChurnRow]) -> float:
    """The p99 time per token of requests whose adapters were there, over that of the run without
    churn."""
    calm_ms = _without_churn(rows).resident_tpot_p99_ms
    return row.resident_tpot_p99_ms / calm_ms if calm_ms else 0.0


def _without_churn(rows: Sequence[ChurnRow]) -> ChurnRow:
    return rows[0] if rows[-1].rate is None else rows[1]


def churn_table(
    rows: Sequence[ChurnRow], info: EngineInfo, others: Mapping[str, Mapping[int, int]]
) -> Table:
    under_load = rows[-1].rate is not None
    names = (name.replace(" ", "\n") for name in others)
    share = "of\ncalm" if under_load else "of the\nfirst"
    steps = () if under_load else ("steps", "at\nleast")
    figures = ("output\ntokens/s", share, *names, *steps, "loads", "hit\nrate", "put\nback")
    there = ("if there\np99", *((share,) if under_load else ()))
    columns = ("adap-\nters", *figures, "ms/tok\np50", "ms/tok\np99", *there)
    table = new_table("", *(("run", "req.\n/s") if under_load else ()), dense=True)
    for column in (*columns, "resi-\ndent", "fit", "mem.\nused"):
        table.add_column(column, justify="right")
    for row in rows:
        rate = "-" if row.rate is None else f"{row.rate:.1f}"
        table.add_row(
            *((row.run, rate) if under_load else ()),
            f"{row.population:,}",
            f"{row.output_tokens_per_s:,.0f}",
            f"{_share(row, rows):.2f}",
            *(_count(figures.get(row.population)) for figures in others.values()),
            *(() if under_load else (f"{row.steps:,}", f"{row.least_steps:,}")),
            f"{row.loads:,}",
            f"{row.hit_rate:.2f}",
            f"{row.preemptions:,}",
            *(f"{ms:.2f}" for ms in (*row.tpot_ms, row.resident_tpot_p99_ms)),
            *((f"{_resident_share(row, rows):.2f}",) if under_load else ()),
            f"{row.resident_adapters:,}",
            f"{row.fit:.1f}",
            f"{row.used_bytes / info.adapter_memory_bytes:.2f}",
        )
    return table


def churn_in_words(row: ChurnRow, rows: Sequence[ChurnRow]) -> str:
    return (
        f"{row.population:,} adapters, against the run without churn: {_share(row, rows):.3f} of "
        f"the throughput, {_resident_share(row, rows):.3f} times the p99 ms/token where the "
        f"adapter was there; {row.adapters_per_step:.1f} adapters in a step, against "
        f"{_without_churn(rows).adapters_per_step:.1f}"
    )


def _count(value: int | None) -> str:
    return "-" if value is None else f"{value:,}"


def churn_plot(
    rows: Sequence[ChurnRow], title: str, others: Mapping[str, Mapping[int, int]]
) -> Figure:
    """Throughput over population, or, under a given load, what happens to latency."""
    figure, panels = new_figure(title, 2)
    if rows[-1].rate is None:
        points = {row.population: row.output_tokens_per_s for row in rows}
        throughput_panel(panels[0], points, others)
        latencies = rows
    else:
        labels = [f"{row.run}\n{row.population:,} adapters" for row in rows]
        speeds = [row.output_tokens_per_s for row in rows]
        plot_bars(panels[0], labels, speeds, "output tokens per second", digits=0)
        latencies = rows[1:]
    places = range(len(latencies))
    for p, colour in ((0, COLOURS[2]), (1, COLOURS[4])):
        values = [row.tpot_ms[p] for row in latencies]
        panels[1].plot(places, values, "o-", color=colour, lw=1.8, ms=5, label=("p50", "p99")[p])
    panels[1].set_xticks(places, [f"{row.population:,}" for row in latencies])
    panels[1].set_xlabel("adapters in demand")
    panels[1].set_ylabel("ms per output token")
    panels[1].set_ylim(bottom=0)
    panels[1].legend(frameon=False, fontsize=9)
    return figure


def throughput_panel(
    axes: Axes, ours: Mapping[int, float], others: Mapping[str, Mapping[int, int]]
) -> None:
    """Output tokens per second over the number of adapters in demand."""
    series = {"Weft": ours, **others}
    for (name, points), colour in zip(series.items(), COLOURS[1:], strict=False):
        axes.plot(list(points), list(points.values()), "o-", color=colour, lw=1.8, ms=5, label=name)
    set_counts(axes, list(ours), "adapters in demand")
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.set_ylabel("output tokens per second")
    if others:
        axes.legend(frameon=False, fontsize=9)

"""What eviction policies do to hit rate and waiting: a table over traces, numbers of adapters and
policies, each beside the best that could be done in hindsight."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import TYPE_CHECKING

import numpy as np
from rich.table import Table

from weft.bench.optimum import fewest_loads
from weft.bench.report import (
    COLOURS,
    Advance,
    Report,
    bytes_in_words,
    new_figure,
    new_table,
    progress,
    rounded,
)
from weft.bench.simulator import DeviceModel, Memory, Replay, replay, sizes_of
from weft.bench.traces import Trace, TraceKind
from weft.core.errors import ConfigError
from weft.schedule.policy import POLICIES

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

TITLE = "Adapter memory, simulated"


@dataclass(frozen=True, slots=True)
class SimulationPlan:
    """What to replay. The same plan gives the same figures."""

    traces: tuple[TraceKind, ...]
    adapters: tuple[int, ...]
    ranks: tuple[int, ...]
    policies: tuple[str, ...]
    memory: Memory
    num_requests: int
    rate: float
    """Requests per second."""
    seed: int
    shares: bool = False
    """Whether tenants share seats too, or only the order of admission."""


@dataclass(frozen=True, slots=True)
class SimulationRow:
    """One trace over so many adapters, with one policy. Times in ms, rates from 0 to 1."""

    trace: str
    adapters: int
    policy: str
    hit_rate: float
    """Share of the admissions that needed no load of their own."""
    optimum: float
    """The hit rate of a cache that knows the future, over the admissions in this replay's order."""
    wait_p50_ms: float
    wait_p99_ms: float
    """Milliseconds from arrival to the first step."""
    residency_p99_ms: float
    """The part of the wait until the adapter was on the device."""
    tenant_p99_ms: float
    """The median over tenants of their own p99: what those who do not flood see."""
    output_tokens_per_s: float
    fairness: float | None
    """Jain's index over tenants with waiting requests in ten seconds, on average; None if there
    never were two of them for so long."""
    gap: float | None
    """The largest difference between two of these tenants, as a part of the mean."""
    loads: int
    preemptions: int
    seconds: float


def run_simulate(plan: SimulationPlan) -> Report:
    """Replay all traces. Raises ConfigError if an adapter can't fit into the device's memory."""
    model = DeviceModel()
    largest = max(plan.ranks) * model.rank_bytes
    if largest > plan.memory.device_bytes:
        message = f"an adapter takes {largest} bytes, more than --adapter-memory has"
        raise ConfigError(message, "adapter_memory")
    total = len(plan.traces) * len(plan.adapters) * len(plan.policies)
    with progress("Replays", total) as advance:
        rows = simulate(plan, model, advance)
    ranks = "/".join(map(str, plan.ranks))
    size = bytes_in_words(plan.memory.device_bytes)
    title = f"{TITLE}: {size} for adapters of rank {ranks}; waits in ms"
    return Report(
        benchmark="simulate",
        title=title,
        config={**asdict(plan), "model": asdict(model)},
        results=[rounded(row) for row in rows],
        shown=simulation_table(rows),
        plot=lambda: simulation_plot(rows, title),
    )


def simulate(plan: SimulationPlan, model: DeviceModel, advance: Advance) -> list[SimulationRow]:
    """Replay, and return rows by trace, number of adapters and policy."""
    rows: list[SimulationRow] = []
    for kind in plan.traces:
        for count in plan.adapters:
            trace = kind.draw(count, plan.ranks, plan.num_requests, plan.rate, plan.seed)
            for policy in plan.policies:
                found = replay(trace, policy, plan.memory, model, plan.shares)
                rows.append(_row(trace, policy, found, plan.memory, model))
                advance()
    return rows


def _row(
    trace: Trace, policy: str, found: Replay, memory: Memory, model: DeviceModel
) -> SimulationRow:
    least = fewest_loads(found.uses, sizes_of(trace, model), memory.device_bytes)
    by_tenant: dict[int, list[float]] = defaultdict(list)
    for ask, wait_s in zip(trace.asks, found.wait_s, strict=True):
        by_tenant[ask.tenant].append(wait_s)
    return SimulationRow(
        trace=trace.name,
        adapters=len(trace.ranks),
        policy=policy,
        hit_rate=found.hit_rate,
        optimum=1.0 - least / len(found.uses),
        wait_p50_ms=_percentile_ms(found.wait_s, 50),
        wait_p99_ms=_percentile_ms(found.wait_s, 99),
        residency_p99_ms=_percentile_ms(found.residency_s, 99),
        tenant_p99_ms=float(np.median([_percentile_ms(w, 99) for w in by_tenant.values()])),
        output_tokens_per_s=found.output_tokens / found.seconds,
        fairness=float(np.mean(found.fairness)) if found.fairness else None,
        gap=max(found.gaps, default=None),
        loads=found.num_loads,
        preemptions=found.num_preemptions,
        seconds=found.seconds,
    )


def _percentile_ms(seconds: Sequence[float], percent: int) -> float:
    return 1000 * float(np.percentile(seconds, percent))


# -- what is shown ---------------------------------------------------------------------------------


def simulation_table(rows: Sequence[SimulationRow]) -> Table:
    """A table of the rows; its columns are the fields of `SimulationRow`, with waits in ms."""
    figures = ("hit\nrate", "best", "wait\np50", "wait\np99", "load\np99", "tenant\np99")
    columns = ("adapt-\ners", "policy", *figures, "tok/s", "fair", "gap")
    table = new_table("", "trace", *columns, dense=True)
    table.columns[2].justify = "left"
    for _, group in groupby(rows, key=lambda row: (row.trace, row.adapters)):
        of_group = list(group)
        for row in of_group:
            waits = (row.wait_p50_ms, row.wait_p99_ms, row.residency_p99_ms, row.tenant_p99_ms)
            table.add_row(
                row.trace,
                f"{row.adapters:,}",
                row.policy,
                f"{row.hit_rate:.2f}",
                f"{row.optimum:.2f}",
                *map(_show_ms, waits),
                f"{row.output_tokens_per_s:,.0f}",
                *("-" if part is None else f"{part:.2f}" for part in (row.fairness, row.gap)),
                end_section=row is of_group[-1],
            )
    return table


def _show_ms(ms: float) -> str:
    return f"{ms:,.0f}" if ms >= 100 else f"{ms:.1f}"


def simulation_plot(rows: Sequence[SimulationRow], title: str) -> Figure:
    """Plot the hit rate over the number of adapters, with a panel for each trace."""
    traces = list(dict.fromkeys(row.trace for row in rows))
    figure, panels = new_figure(title, len(traces))
    for axes, trace in zip(panels, traces, strict=True):
        of_trace = [row for row in rows if row.trace == trace]
        _panel(axes, of_trace)
        axes.set_title(trace, loc="left", fontsize=10)
    panels[0].set_ylabel("hit rate")
    panels[0].legend(frameon=False, fontsize=9, loc="lower left")
    return figure


def _panel(axes: Axes, rows: Sequence[SimulationRow]) -> None:
    counts = sorted({row.adapters for row in rows})
    best = [max(row.optimum for row in rows if row.adapters == count) for count in counts]
    axes.plot(counts, best, "--", color=COLOURS[0], lw=1.4, label="optimum")
    for name, colour in zip(POLICIES, COLOURS[1:], strict=False):
        values = [row.hit_rate for row in rows if row.policy == name]
        if values:
            axes.plot(counts, values, "o-", color=colour, lw=1.8, ms=4, label=name)
    axes.set_xscale("log")
    axes.set_xticks(counts, [f"{count:,}" for count in counts], rotation=30, ha="right")
    axes.minorticks_off()
    axes.set_ylim(0, 1.02)
    axes.set_xlabel("adapters")

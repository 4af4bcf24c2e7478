"""`weft bench simulate --fleet`: what routing does to throughput, first tokens and busy nodes: a
table over traces and policies, and a picture of each node's batch over time."""

from __future__ import annotations

import gc
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import numpy as np
from rich.table import Table

from weft.bench.fleet_node import H200
from weft.bench.fleet_simulator import FleetReplay, FleetSetup, FleetSimulator
from weft.bench.fleet_trace import FleetAsk, FleetTrace
from weft.bench.report import Report, new_figure, new_table, progress, rounded
from weft.fleet.route import POLICIES

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WARM = 0.3
"""The part of a replay that is not measured: memory is empty at first."""
LAST_S = 3.0
"""First tokens of requests that come in these last seconds of a long replay are not measured."""
GC_EACH = 50_000
"""Python looks for cyclic garbage, of which a replay makes hardly any, once in so many objects."""
OMNISCIENT = "omniscient"
"""A router for all nodes that always knows everything, beside the policies: it decides by cost."""


@dataclass(frozen=True, slots=True)
class FleetPlan:
    """What to replay. The same plan gives the same figures."""

    traces: tuple[FleetTrace, ...]
    policies: tuple[str, ...]
    num_nodes: int
    num_adapters: int
    seats: int
    """Requests that run at a node at a time."""
    rate: float
    """Requests per second and node, at the peak."""
    answer: float
    """Mean tokens of an answer."""
    seconds: float
    num_routers: int
    report_s: float
    target: float | None
    faults_each_s: float | None
    seed: int


@dataclass(frozen=True, slots=True)
class FleetRow:
    """One trace with one policy. Times in ms; what is by second or node is after warming up."""

    trace: str
    policy: str
    tokens_per_s: float
    first_p50_ms: float | None
    first_p99_ms: float | None
    """Until the first token; None if no request was measured."""
    gap_p99_ms: float | None
    """Between two tokens of requests that moved, around the move; None if none did."""
    batch: float
    """Rows of a step, on average."""
    loads_per_s: float
    node_seconds: float
    """Seconds in which nodes were enabled or busy."""
    moves: int
    faults: int
    unserved: int
    """Measured requests without a first token, however late."""


def run_fleet(plan: FleetPlan) -> Report:
    """Replay all traces."""
    thresholds = gc.get_threshold()
    gc.set_threshold(GC_EACH)
    rows: list[FleetRow] = []
    batches: list[tuple[str, FleetReplay]] = []
    with progress("Replays", len(plan.traces) * len(plan.policies)) as advance:
        for trace in plan.traces:
            rate = plan.rate * plan.num_nodes
            asks = trace.draw(plan.num_adapters, rate, plan.seconds, plan.answer, plan.seed)
            for policy in plan.policies:
                found = FleetSimulator(setup_of(plan, policy), asks, plan.seconds).run()
                rows.append(row_of(trace.name, policy, asks, found, plan.seconds))
                batches.append((f"{trace.name}, {policy}", found))
                advance()
    gc.set_threshold(*thresholds)
    title = f"{plan.num_nodes} nodes, {plan.num_adapters:,} adapters, simulated; times in ms"
    return Report(
        benchmark="simulate-fleet",
        title=title,
        config={**asdict(plan), "model": asdict(H200)},
        results=[rounded(row) for row in rows],
        shown=fleet_table(rows),
        plot=lambda: fleet_plot(batches, plan.seats, title),
    )


def setup_of(plan: FleetPlan, policy: str) -> FleetSetup:
    knows = policy == OMNISCIENT
    return FleetSetup(
        plan.num_nodes,
        plan.num_adapters,
        plan.seats,
        next(iter(POLICIES)) if knows else policy,
        1 if knows else plan.num_routers,
        0.0 if knows else plan.report_s,
        plan.target,
        plan.faults_each_s,
        plan.seed,
    )


def row_of(
    trace: str, policy: str, asks: Sequence[FleetAsk], found: FleetReplay, seconds: float
) -> FleetRow:
    warm_s = WARM * seconds
    last_s = seconds - min(LAST_S, 0.1 * seconds)
    replayed = list(zip(asks, found.first_s, found.done_s, strict=True))
    firsts = sorted(first for ask, first, _ in replayed if warm_s <= ask.arrival_s <= last_s)
    tokens = sum(ask.output_tokens for ask, _, done in replayed if warm_s <= done < seconds)
    return FleetRow(
        trace=trace,
        policy=policy,
        tokens_per_s=tokens / (seconds - warm_s),
        first_p50_ms=_percentile_ms(firsts, 0.5),
        first_p99_ms=_percentile_ms(firsts, 0.99),
        gap_p99_ms=_percentile_ms(sorted(found.gaps_s), 0.99),
        batch=found.rows / max(found.steps, 1),
        loads_per_s=found.loads / seconds,
        node_seconds=found.node_seconds,
        moves=found.moves,
        faults=found.faults,
        unserved=sum(map(math.isinf, firsts)),
    )


def _percentile_ms(ordered: Sequence[float], part: float) -> float | None:
    return 1000 * ordered[int(part * len(ordered))] if ordered else None


def fleet_table(rows: Sequence[FleetRow]) -> Table:
    """A table of the rows."""
    columns = ("policy", "tok/s", "first\np50", "first\np99", "gap\np99", "batch", "loads/s")
    table = new_table("", "trace", *columns, "node\nseconds", "moves", dense=True)
    table.columns[1].justify = "left"
    for row in rows:
        times = (row.first_p50_ms, row.first_p99_ms, row.gap_p99_ms)
        table.add_row(
            row.trace,
            row.policy,
            f"{row.tokens_per_s:,.0f}",
            *("-" if ms is None else f"{ms:,.0f}" for ms in times),
            f"{row.batch:.1f}",
            f"{row.loads_per_s:,.0f}",
            f"{row.node_seconds:,.0f}",
            f"{row.moves:,}",
        )
    return table


def fleet_plot(batches: Sequence[tuple[str, FleetReplay]], seats: int, title: str) -> Figure:
    """Plot each node's batch over time, the busiest nodes at the bottom, with a panel each."""
    from matplotlib.ticker import MaxNLocator

    figure, panels = new_figure(title, len(batches))
    for axes, (name, found) in zip(panels, batches, strict=True):
        by_node = np.array(found.batches, dtype=float).T
        order = np.argsort(-by_node.sum(axis=1), kind="stable")
        extent = (0.0, float(by_node.shape[1]), -0.5, len(order) - 0.5)
        image = axes.imshow(
            by_node[order],
            aspect="auto",
            origin="lower",
            extent=extent,
            cmap="viridis",
            vmin=0,
            vmax=seats,
            interpolation="nearest",
        )
        axes.grid(visible=False)
        axes.yaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_title(name.replace(", ", "\n"), loc="left", fontsize=10)
        axes.set_xlabel("seconds")
    panels[0].set_ylabel("node")
    figure.colorbar(image, ax=list(panels), label="running requests")
    return figure

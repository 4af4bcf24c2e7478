"""The table of a cluster's nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from weft.fleet.launchers import Placed


def show_state(console: Console, shown: dict[str, str], node: Placed, why: str) -> None:
    """Print a node's state, if it differs from the one that was `shown` before."""
    if shown.get(node.name) != node.state:
        shown[node.name] = node.state
        line = f"{node.name}  {node.url}  {node.state}{f': {why}' if why else ''}"
        console.print(line, highlight=False, soft_wrap=True)


def nodes_table(
    nodes: Sequence[Placed],
    reports: dict[str, Any],
    more: Mapping[str, Mapping[str, float]] | None = None,
) -> Table:
    """`reports`: what `/fleet` says of each node, by its name. `more`: further columns, by their
    titles, in place of the URL: a number of each node by its name."""
    more = more or {}
    table = Table(box=None, pad_edge=False)
    for title in ("Node", "State"):
        table.add_column(title, no_wrap=True)
    for title in ("Running", "Waiting", "KV", "Device", "Host", *more):
        table.add_column(title, justify="right", no_wrap=True)
    labelled = any(report.get("labels") for report in reports.values())
    if labelled:
        table.add_column("Labels")
    if not more:
        table.add_column("URL", overflow="fold")
    urls = {node.name: node for node in nodes}
    for each in sorted(reports.keys() | urls.keys()):
        report, node = reports.get(each, {}), urls.get(each)
        adapters, labels = report.get("adapters", {}), report.get("labels", {})
        table.add_row(
            Text(each),
            _state_of(report, node),
            str(report.get("running", "-")),
            str(report.get("waiting", "-")),
            f"{report['kv_usage']:.0%}" if "kv_usage" in report else "-",
            str(adapters.get("device", "-")),
            str(adapters.get("host", "-")),
            *(f"{column[each]:.0f}" if each in column else "-" for column in more.values()),
            *([",".join(f"{k}={v}" for k, v in labels.items())] if labelled else []),
            *([] if more else [Text(node.url if node else "")]),
        )
    return table


def _state_of(report: dict[str, Any], node: Placed | None) -> str:
    """A node's state as the other nodes report it. Only the launcher knows that a node waits for a
    machine, and the state of one that nobody has heard of."""
    if node is not None and (not report or node.state == "unplaced"):
        return node.state
    since = f" since {report['since']}" if "since" in report else ""
    return f"{report.get('state', 'unknown')}{since}"

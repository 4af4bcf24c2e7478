"""Plots earlier measurements from the lines of JSON that `--record` keeps."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weft.bench import peers
from weft.bench.churn_report import throughput_panel
from weft.bench.report import COLOURS, need, new_figure
from weft.core.errors import ConfigError
from weft.core.option_files import read_option_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Line = Mapping[str, Any]
"""One run, as a benchmark printed it."""


def draw_history(history: Path, folder: Path) -> list[Path]:
    """Draw step-time.png and churn.png from the newest runs that they can show.

    Returns the files that were written. Raises ConfigError if there is no such run, or a file can't
    be read or written.
    """
    lines = read_history(history)
    need("matplotlib", "plots need matplotlib")
    drawn: list[Path] = []
    for name, wanted, draw in _PLOTS:
        line = next((line for line in reversed(lines) if _fits(wanted, line)), None)
        if line is not None:
            drawn.append(folder / name)
            try:
                draw(line).savefig(drawn[-1], dpi=150)
            except OSError as error:
                raise ConfigError(f"--to {folder}: {error.strerror}", "to") from None
    if not drawn:
        wanted_runs = f"decode or churn of {peers.MODEL} on an {peers.DEVICE}"
        raise ConfigError(f"--history {history} has no run of {wanted_runs}", "history")
    return drawn


def read_history(path: Path) -> list[Line]:
    """The recorded runs, oldest first. Raises ConfigError if the file can't be read."""
    try:
        lines = read_option_text(path, f"--history {path}", "history").splitlines()
        return [dict(json.loads(line)) for line in lines if line.strip()]
    except (TypeError, ValueError) as error:
        raise ConfigError(f"--history {path} can't be read: {error}", "history") from None


def _fits(wanted: Callable[[Line], bool], line: Line) -> bool:
    """Whether a line is a run that is wanted, which one without the fields of such a run is not."""
    try:
        return wanted(line)
    except (KeyError, TypeError):
        return False


def is_step_time(line: Line) -> bool:
    """Whether this run measured the work whose figures `peers` holds."""
    return _is("decode", line) and _steps(line).keys() >= peers.STEP_FLOOR_MS.keys()


def is_churn(line: Line) -> bool:
    config = line["config"]
    return (
        _is("churn", line)
        and config["load"] is None
        and config["ranks"] == [peers.RANK]
        and config["resident"] == peers.CHURN_RESIDENT
        and config["num_requests"] == peers.CHURN_REQUESTS
        and config["choice"]["exponent"] == 0.0
    )


def _is(benchmark: str, line: Line) -> bool:
    config = line["config"]
    options = config.get("options", {})
    return (
        line["benchmark"] == benchmark
        and line["ok"]
        and str(line["device"]).startswith(peers.DEVICE)
        and config["model"] == peers.MODEL
        and config["rank"] == peers.RANK
        and config["targets"] == "all linear"
        and options.get("tensor_parallel_size", 1) == 1
        and options.get("quantization") is None
    )


def _steps(line: Line) -> dict[int, float]:
    """Milliseconds per step by the number of adapters in the batch."""
    found = {
        row["num_adapters"]: row["ms_per_step"]
        for row in line["results"]
        if row["batch"] == peers.STEP_BATCH and row["pattern"] != "skewed"
    }
    return dict(sorted(found.items()))


def draw_step_time(line: Line) -> Figure:
    title = f"Time of a decode step of {peers.STEP_BATCH} requests: {_subject(line)}"
    figure, [axes] = new_figure(title, 1)
    series = {"Weft": _steps(line), **peers.STEP_MS}
    _draw(axes, {**series, "memory alone": peers.STEP_FLOOR_MS})
    counts = sorted({*series["Weft"], *peers.STEP_FLOOR_MS})
    axes.set_xscale("symlog", base=2, linthresh=1)
    axes.set_xticks(counts, [str(count) for count in counts])
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.set_xlabel("different adapters in the batch")
    axes.set_ylabel("ms per decode step")
    return figure


def _draw(axes: Axes, series: Mapping[str, Mapping[int, float]]) -> None:
    """Draw each series as a line with its name at its end."""
    *lines, (floor, points) = series.items()
    for (name, values), colour in zip(lines, COLOURS[1:], strict=False):
        axes.plot(list(values), list(values.values()), "o-", color=colour, lw=2, ms=5, label=name)
    axes.plot(list(points), list(points.values()), "--", color=COLOURS[0], lw=1.4, label=floor)
    axes.legend(frameon=False, fontsize=9)


def draw_churn(line: Line) -> Figure:
    title = f"Memory for {peers.CHURN_RESIDENT} adapters, more in demand: {_subject(line)}"
    figure, [axes] = new_figure(title, 1)
    ours = {row["population"]: row["output_tokens_per_s"] for row in line["results"]}
    throughput_panel(axes, ours, peers.CHURN_TOKENS_PER_S)
    return figure


def _subject(line: Line) -> str:
    return f"{line['config']['model']}, rank {line['config']['rank']}, {line['device']}"


_PLOTS: Sequence[tuple[str, Callable[[Line], bool], Callable[[Line], Figure]]] = (
    ("step-time.png", is_step_time, draw_step_time),
    ("churn.png", is_churn, draw_churn),
)

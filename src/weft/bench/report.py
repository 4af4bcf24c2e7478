"""The output of a benchmark: a table, a plot and a line of JSON. Only this decides how it looks."""

from __future__ import annotations

import importlib
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from weft.core.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#4c4c4c", "#0072b2", "#009e73", "#e69f00", "#d55e00", "#cc79a7")
"""Colours that everybody can tell apart. The first is for what others are compared with."""
INK, FAINT = "#333333", "#e3e3e3"
PLOT_INCHES = (10.0, 4.2)
FILE_WIDTH = 110
"""The width of tables, in columns, where no terminal says how wide it is."""

Advance = Callable[[], None]


@dataclass(frozen=True, slots=True)
class Report:
    """What one run found."""

    benchmark: str
    title: str
    config: Mapping[str, object]
    results: object
    """The figures, as values that JSON knows."""
    shown: RenderableType
    plot: Callable[[], Figure]
    device: str | None = None
    """The device's name, or None when it is not this machine's."""
    ok: bool = True


def show(
    report: Report, environment: Mapping[str, object], plot: Path | None, record: Path | None
) -> None:
    """Print the table and write the plot unless None. The line of JSON goes to the end of `record`,
    and is printed last unless a person looks at it."""
    console = new_console()
    console.width = _width_without_cuts(console, report.shown)
    console.print(Text(report.title, "bold"))
    console.print(report.shown)
    if plot is not None:
        report.plot().savefig(plot, dpi=150)
        console.print(f"Plot: {plot}", soft_wrap=True, highlight=False)
    line = {
        "ok": report.ok,
        "benchmark": report.benchmark,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": report.device,
        "environment": environment,
        "config": report.config,
        "results": report.results,
    }
    text = json.dumps(line)
    if record is not None:
        with record.open("a", encoding="utf-8") as file:
            file.write(text + "\n")
    if not console.is_terminal:
        print(text, flush=True)


def new_console() -> Console:
    """The console for stdout, which has a fixed width where no terminal says how wide it is."""
    console = Console()
    return console if console.is_terminal else Console(width=FILE_WIDTH)


def _width_without_cuts(console: Console, shown: RenderableType) -> int:
    """The console's width, or more if figures would be cut there. The terminal then wraps lines."""
    for width in range(console.width, 2 * FILE_WIDTH, 10):
        lines = console.render_lines(shown, console.options.update_width(width))
        if not any("…" in part.text for line in lines for part in line):
            return width
    return console.width


def check_writable(flag: str, file: Path | None) -> None:
    """Check that the file that `--flag` names, or a new one of this name, can be opened for
    writing. Raises ConfigError if not."""
    if file is None:
        return
    place = file if file.exists() else file.absolute().parent
    if file.is_dir() or not os.access(place, os.W_OK):
        raise ConfigError(f"--{flag} {file} can't be written", flag)


def check_plot(plot: Path | None) -> None:
    """Check that the plot can be written, before anything is measured. Raises ConfigError if
    not."""
    check_writable("plot", plot)
    if plot is not None and plot.suffix.lower() != ".png":
        raise ConfigError(f"--plot takes the name of a .png file; got {str(plot)!r}", "plot")


def need(module: str, why: str) -> None:
    """Check that an optional dependency is there. Raises ConfigError that says how to get it if it
    is not."""
    try:
        importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(f"{why}: pip install 'weft[bench]'", module) from error


@contextmanager
def progress(title: str, total: int) -> Iterator[Advance]:
    """A progress bar, which is shown on a terminal only. Each call of what it yields advances it by
    one."""
    console = Console()
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=30),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    quiet = not console.is_terminal
    # Rarely drawn: its thread takes time from what is measured.
    with Progress(
        *columns, console=console, transient=True, disable=quiet, refresh_per_second=2
    ) as bar:
        task = bar.add_task(title, total=total)
        yield lambda: bar.advance(task)


def new_table(title: str, *columns: str, names: int = 1, dense: bool = False) -> Table:
    """A table whose first `names` columns hold text, and the others figures. `dense` is for many
    columns."""
    table = Table(
        title=title or None,
        title_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, 1, 0, 0) if dense else (0, 1),
    )
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index < names else "right")
    return table


def rounded(row: Any) -> dict[str, object]:
    """The fields of a row, with four digits: null in JSON for a time that never came."""
    return {name: _rounded(value) for name, value in asdict(row).items()}


def _rounded(value: object) -> object:
    if isinstance(value, tuple):
        return [_rounded(part) for part in value]
    if not isinstance(value, float):
        return value
    return round(value, 4) if math.isfinite(value) else None


def bytes_in_words(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 1e8 else f"{num_bytes / 1e6:.2f} MB"


def new_figure(title: str, num_panels: int) -> tuple[Figure, Sequence[Axes]]:
    """A figure with panels side by side, which needs no display."""
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    layout = ConstrainedLayoutEngine(w_pad=0.14, h_pad=0.08)
    figure = Figure(figsize=PLOT_INCHES, layout=layout, facecolor="white")
    figure.suptitle(title, x=0.01, ha="left", fontsize=12, fontweight="bold", color=INK)
    panels: list[Any] = [figure.add_subplot(1, num_panels, n + 1) for n in range(num_panels)]
    for axes in panels:
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["left", "bottom"]].set_color("#999999")
        axes.tick_params(colors=INK, labelsize=9)
        axes.grid(color=FAINT, linewidth=0.8)
        axes.set_axisbelow(True)
    return figure, panels


def plot_bars(
    axes: Axes,
    names: Sequence[str],
    values: Sequence[float],
    label: str,
    *,
    colours: str | Sequence[str] = COLOURS[1],
    digits: int = 1,
) -> None:
    """Draw a horizontal bar for each name, from top to bottom, with its value at the end."""
    bars = axes.barh(names, values, 0.6, color=colours)
    axes.bar_label(bars, fmt=f"{{:,.{digits}f}}", padding=5, color=INK, fontsize=10)
    axes.set_xlabel(label)
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    axes.margins(x=0.15)


def set_counts(axes: Axes, counts: Sequence[int], label: str) -> None:
    """Make the x axis logarithmic, with a tick for each of the counts."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(counts, [str(count) for count in counts])
    axes.minorticks_off()
    axes.set_xlabel(label)

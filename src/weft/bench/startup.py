"""From a new process to the first token with an adapter, stage by stage: without compiled kernels,
and with those that the run before has left."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from weft.bench.engine import (
    AdapterShape,
    RandomAdapters,
    default_model,
    describe,
    device_name,
    preset_folder,
    subject,
)
from weft.bench.report import COLOURS, Report, new_figure, new_table, progress
from weft.core.errors import WeftError, from_wire
from weft.core.stats import EngineInfo

if TYPE_CHECKING:
    from matplotlib.figure import Figure

KERNELS = "TRITON_CACHE_DIR"
"""Where Triton keeps what it has compiled."""
RUNS = ("cold", "warm")


@dataclass(frozen=True, slots=True)
class Start:
    """How long one start took."""

    run: str
    seconds: Mapping[str, float]
    """Seconds of each stage, in their order."""

    @property
    def total_s(self) -> float:
        return sum(self.seconds.values())


def run_startup(model: str | None, shape: AdapterShape, options: Mapping[str, object]) -> Report:
    """Start twice; `model` None: `default_model`. Raises what a start raises, as WeftError."""
    name = model or default_model(options)
    starts: list[Start] = []
    with preset_folder(name) as folder, tempfile.TemporaryDirectory(prefix="weft-bench-") as place:
        adapters = RandomAdapters(folder, shape, options)
        [adapter] = adapters.write(Path(place), [shape.rank], "bfloat16")
        settings = {k: v for k, v in options.items() if v is not None}
        settings["adapter_cache_dir"] = "none"
        order = {"model": folder, "adapter": str(adapter), "options": settings}
        with progress("Starts", len(RUNS)) as advance:
            for run in RUNS:
                answer = _start(order, Path(place) / "kernels")
                starts.append(Start(run, answer["seconds"]))
                advance()
    info = EngineInfo(**answer["info"])
    title = f"From a new process to the first token: {subject(name, info, shape)}"
    return Report(
        benchmark="startup",
        title=title,
        config={"model": name, **describe(info, shape), "options": dict(options)},
        results=[
            {
                "run": start.run,
                "total_s": round(start.total_s, 3),
                "seconds": {stage: round(s, 3) for stage, s in start.seconds.items()},
            }
            for start in starts
        ],
        shown=startup_table(starts),
        plot=lambda: startup_plot(starts, title),
        device=device_name(info),
    )


def _start(order: Mapping[str, object], kernels: Path) -> dict[str, Any]:
    """Start in a process of its own, which writes its errors where this one does."""
    done = subprocess.run(
        [sys.executable, "-m", "weft.bench.first_token"],
        input=json.dumps({**order, "began": time.time()}),
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, KERNELS: str(kernels)},
        check=False,
    )
    if done.returncode:
        raise WeftError(f"the start ended with exit status {done.returncode}")
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    if "error" in answer:
        raise from_wire(answer["error"])
    return answer


# -- what is shown ---------------------------------------------------------------------------------


def startup_table(starts: Sequence[Start]) -> Table:
    table = new_table("", "stage", *(f"{start.run}, s" for start in starts))
    for stage in starts[0].seconds:
        table.add_row(stage, *(f"{start.seconds[stage]:.2f}" for start in starts))
    table.add_section()
    table.add_row("total", *(f"{start.total_s:.2f}" for start in starts))
    return table


def startup_plot(starts: Sequence[Start], title: str) -> Figure:
    """Plot a bar for each start, with its stages from left to right."""
    figure, [axes] = new_figure(title, 1)
    ends = [0.0] * len(starts)
    for number, stage in enumerate(starts[0].seconds):
        widths = [start.seconds[stage] for start in starts]
        shade = 1.0 if number < len(COLOURS) else 0.5
        colour = COLOURS[number % len(COLOURS)]
        runs = [start.run for start in starts]
        axes.barh(runs, widths, left=ends, color=colour, alpha=shade, label=stage)
        ends = [end + width for end, width in zip(ends, widths, strict=True)]
    axes.invert_yaxis()
    axes.set_xlabel("seconds")
    axes.legend(frameon=False, fontsize=9, loc="upper center", bbox_to_anchor=(0.5, -0.18), ncols=4)
    return figure

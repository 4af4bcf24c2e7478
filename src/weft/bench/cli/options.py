"""What the commands of `weft bench` have in common: options, and how each ends."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn, ParamSpec, Protocol

import typer

from weft.core.config import MAX_RANK
from weft.terminal.options import (
    ending_in_one_line,
    engine_parameters,
    model_option,
    tell_start,
    with_parameters,
)

if TYPE_CHECKING:
    from weft.bench.report import Report

P = ParamSpec("P")

workload_option = partial(typer.Option, rich_help_panel="Workload")
output_option = partial(typer.Option, rich_help_panel="Output")
SHAPES = (
    "tiny, llama-3.2-1b, llama-3-8b, llama-3-70b, qwen3-8b, qwen3-32b, qwen3-30b-a3b, qwen3.5-9b,"
    " qwen3.5-35b-a3b, mixtral-8x7b, gemma-3-12b, gemma-4-e4b, gpt-oss-20b, granite-4.0-h-micro,"
    " glm-4.7-flash"
)
"""The names in `weft.bench.presets`."""

Model = Annotated[
    str | None,
    model_option(
        "--model",
        metavar="BASE",
        help="The base model: a folder, a name on the hub, or a known shape:"
        f" {SHAPES}. Default: llama-3-8b on a GPU, tiny on a CPU.",
    ),
]
Rank = Annotated[int, workload_option(help="Rank of the adapters.", min=1, max=MAX_RANK)]
Ranks = Annotated[str, workload_option(metavar="N,...", help="Ranks of the adapters.")]
Targets = Annotated[
    str | None,
    workload_option(
        metavar="NAME,...",
        help="The projections that the adapters have, such as q_proj,v_proj, or experts.down_proj"
        " for those of a mixture's experts. Default: all linear layers, without experts.",
    ),
]
Seed = Annotated[int, workload_option(help="The same seed gives the same requests.", min=0)]
Repeats = Annotated[
    int, workload_option(help="Each result is the median of this many runs.", min=1)
]
INPUT_LEN = (
    "Tokens of prompts: N, uniform:LOW,HIGH or lognormal:MU,SIGMA,LOW,HIGH (natural logarithm,"
    " clipped)."
)
InputLen = Annotated[str, workload_option(metavar="LENGTHS", help=INPUT_LEN)]
OutputLen = Annotated[
    str, workload_option(metavar="LENGTHS", help="Tokens of answers, as for --input-len.")
]
Plot = Annotated[Path, output_option(metavar="FILE.png", help="The file to write the plot to.")]
NoPlot = Annotated[bool, output_option("--no-plot", help="Don't write a plot.")]
Record = Annotated[
    Path | None,
    output_option(
        metavar="FILE.jsonl", help="Also append the line of JSON to this file, with the date."
    ),
]


def engine_options(*fixed: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Do as `with_engine_options`, without the flags that the benchmark sets itself; weights are
    random unless asked for."""
    chosen = [
        p.replace(default="dummy") if p.name == "load_format" else p
        for p in engine_parameters()
        if p.name not in fixed
    ]
    return lambda command: with_parameters(command, chosen)


class Measure(Protocol):
    """Runs a benchmark, whose arguments have been checked, shows its report, and ends the command:
    with exit status 1 if the report is not ok. Raises ConfigError if a plot is asked for and
    matplotlib is not installed."""

    def __call__(
        self, run: Callable[P, Report], /, *args: P.args, **more: P.kwargs
    ) -> NoReturn: ...


def measuring(command: Callable[..., None]) -> Callable[..., None]:
    """Let `command`, which takes `measure`, have the flags that say where its plot and its line of
    JSON go. Whether these files can be written is checked before anything slow."""
    own = inspect.signature(command, eval_str=True)
    name = Path(f"weft-bench-{command.__name__}.png")
    outputs = [
        inspect.Parameter(each, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)
        for each, default, kind in (
            ("plot", name, Plot),
            ("no_plot", False, NoPlot),
            ("record", None, Record),
        )
    ]

    @wraps(command)
    def run(plot: Path, no_plot: bool, record: Path | None, **given: object) -> None:
        with ending_in_one_line():
            tell_start("getting ready to measure, which takes some seconds")
            command(measure=_measure(None if no_plot else plot, record), **given)

    kept = [p for p in own.parameters.values() if p.name != "measure"]
    last = [p for p in kept if p.kind is p.VAR_KEYWORD]
    parameters = [*(p for p in kept if p not in last), *outputs, *last]
    run.__signature__ = own.replace(parameters=parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in parameters}
    return run


def _measure(plot: Path | None, record: Path | None) -> Measure:
    """Raises ConfigError if one of the files can't be written."""
    from weft.bench.report import check_plot, check_writable, need, show
    from weft.terminal.environment import collect

    def measure(run: Callable[P, Report], /, *args: P.args, **more: P.kwargs) -> NoReturn:
        if plot is not None:
            need("matplotlib", "plots need matplotlib, unless you say --no-plot")
        report = run(*args, **more)
        sections = collect()
        environment = {name: sections[name] for name in ("weft", "machine", "gpu")}
        show(report, environment, plot, record)
        raise typer.Exit(0 if report.ok else 1)

    check_plot(plot)
    check_writable("record", record)
    return measure


def split_names(text: str | None) -> tuple[str, ...] | None:
    """The names in `NAME,...`; None if there is no text."""
    return None if text is None else tuple(part.strip() for part in text.split(","))

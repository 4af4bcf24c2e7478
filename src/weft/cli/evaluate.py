"""`weft eval`: the scores of a base and of its adapters, all of them in one batch."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from weft.cli.args import LoraModule, modules_of
from weft.core.config import engine_args
from weft.core.errors import ConfigError
from weft.terminal.options import (
    AsJson,
    Base,
    adapters_option,
    ending_in_one_line,
    with_engine_options,
)

if TYPE_CHECKING:
    from weft.cli.harness import Asked, Scores

BASE = "base"
"""What the base is called in the table."""

TaskFolder = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR", help="A folder with tasks of your own.", exists=True, file_okay=False
    ),
]
Compare = Annotated[
    bool,
    typer.Option(
        "--compare",
        help="Also evaluate one model after the other, and report how much longer that takes. No"
        " prefixes are cached then, so that both do the same work.",
    ),
]


@with_engine_options
def evaluate(
    model: Base,
    tasks: Annotated[
        str, typer.Option(metavar="NAME,...", help="Tasks or groups of lm-evaluation-harness.")
    ],
    lora_modules: Annotated[
        list[str] | None,
        adapters_option(metavar="NAME=PATH", help="An adapter to evaluate. Repeatable."),
    ] = None,
    include_path: TaskFolder = None,
    limit: Annotated[
        int | None, typer.Option(help="Use only the first N documents of each task.", min=1)
    ] = None,
    num_fewshot: Annotated[
        int | None, typer.Option(help="Examples before each question. Default: the task's.", min=0)
    ] = None,
    apply_chat_template: Annotated[
        bool, typer.Option("--apply-chat-template", help="Ask each question as a conversation.")
    ] = False,
    compare: Compare = False,
    as_json: AsJson = False,
    **options: object,
) -> None:
    """Evaluate a base model and many adapters with lm-evaluation-harness, in one batch.

    [bold]weft eval[/] BASE [bold]--lora-modules[/] sql=./sql [bold]--tasks[/] arc_easy
    """
    with ending_in_one_line():
        modules = modules_of(lora_modules or (), [BASE])
        names = tuple(name for name in tasks.split(",") if name)
        if not names:
            raise ConfigError("--tasks names no task", "tasks")
        if compare:
            options["enable_prefix_caching"] = False
        engine_args(model, **options)  # what is wrong shows before the model is loaded
        if importlib.util.find_spec("lm_eval") is None:
            raise ConfigError("this needs lm-evaluation-harness: pip install 'weft[eval]'", "eval")
        # The harness shows a bar for each step of each run.
        os.environ.setdefault("TQDM_DISABLE", "1")
        from weft.cli.harness import Asked

        asked = Asked(names, include_path, limit, num_fewshot, apply_chat_template)
        report = _evaluate(model, modules, asked, compare, options)
    if as_json:
        typer.echo(json.dumps(report))
    else:
        _show(report)


def _evaluate(
    model: str, modules: list[LoraModule], asked: Asked, compare: bool, options: dict[str, Any]
) -> dict[str, Any]:
    """What was measured, as `--json` shows it. Raises WeftError."""
    from weft.cli.harness import Harness, ask_one_by_one, ask_together
    from weft.llm import LLM

    console = Console(stderr=True)
    with console.status(f"Loading {model}"):
        llm = LLM(model, {each.name: each.path for each in modules}, **options)
    with llm:
        with console.status("Reading the tasks"):
            harness = Harness(asked, llm.tokenizer, llm.info.max_model_len)
            prompts = harness.prompts()
        models = [None, *(each.name for each in modules)]
        ask_together(llm, models, prompts[:1])  # adapters are loaded, kernels compiled
        with Progress(console=console, disable=not sys.stderr.isatty()) as progress:
            bar = progress.add_task("Asking", total=len(prompts) * len(models))
            together = ask_together(llm, models, prompts, lambda _: progress.advance(bar))
        scores = dict(zip(_shown(models), map(harness.scores, together.answers), strict=True))
        report: dict[str, Any] = {
            "scores": scores,
            "num_requests": len(prompts) * len(models),
            "together_s": round(together.seconds, 3),
        }
        if compare:
            with console.status("Asking one model after the other"):
                alone = ask_one_by_one(llm, models, prompts)
            own = dict(zip(_shown(models), map(harness.scores, alone.answers), strict=True))
            report |= {
                "one_by_one_s": round(alone.seconds, 3),
                "speedup": round(alone.seconds / together.seconds, 2),
                "same_scores": own == scores,
            }
    return report


def _shown(models: list[str | None]) -> list[str]:
    return [name or BASE for name in models]


def _show(report: dict[str, Any]) -> None:
    scores: dict[str, Scores] = report["scores"]
    columns = [
        (task, metric)
        for task, metrics in next(iter(scores.values())).items()
        for metric in metrics
        if "stderr" not in metric
    ]
    table = Table("model", *(f"{task}\n{metric}" for task, metric in columns), box=None)
    for name, found in scores.items():
        table.add_row(name, *(f"{found[task][metric]:.3f}" for task, metric in columns))
    console = Console()
    console.print(table)
    count, models = report["num_requests"], len(scores)
    line = f"\n{count} requests of {models} models in one batch: {report['together_s']:.1f} s"
    if "speedup" in report:
        same = "the same scores" if report["same_scores"] else "OTHER SCORES"
        line += f"; one model after the other: {report['one_by_one_s']:.1f} s,"
        line += f" {report['speedup']:g} times as long, with {same}"
    console.print(line, highlight=False)

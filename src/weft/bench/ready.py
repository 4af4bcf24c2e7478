"""From a new process to a server that answers over HTTP, with adapters, and its first rounds of
requests: without compiled kernels and packed adapters, and with those that the run before left."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from weft.bench.client import Endpoint, LoadClient
from weft.bench.engine import (
    AdapterShape,
    RandomAdapters,
    adapter_name,
    default_model,
    on_gpu,
    preset_folder,
)
from weft.bench.report import Report, new_figure, new_table, progress
from weft.bench.serve import LoadPlan, run_load, summarize
from weft.bench.startup import RUNS
from weft.bench.workload import Arrival, Choice, Lengths
from weft.core.ports import check_free
from weft.models.config import load_model_config
from weft.terminal.child_server import child_server
from weft.terminal.options import engine_flags

if TYPE_CHECKING:
    from matplotlib.figure import Figure

START_S = 600.0
"""How long a server may take to be ready."""
BASE = "base"
ENDPOINT: Endpoint = "completions"
PATTERNS = ("base", "one", "uniform")


@dataclass(frozen=True, slots=True)
class ReadyPlan:
    """How many adapters the server starts with, and what it is asked then, round by round."""

    num_adapters: int
    num_rounds: int
    concurrency: int
    input_len: Lengths
    output_len: Lengths
    patterns: tuple[str, ...]
    """base: all ask the base; one: one adapter; uniform: all adapters, in turns."""

    def load(self, pattern: str, seed: int) -> LoadPlan:
        """One round: as many requests at once as there may be open."""
        adapters = tuple(map(adapter_name, range(self.num_adapters)))
        models = {"base": (BASE,), "one": adapters[:1], "uniform": adapters}[pattern]
        return LoadPlan(
            endpoint=ENDPOINT,
            models=models,
            choice=Choice("round-robin"),
            arrival=Arrival("closed", concurrency=self.concurrency),
            num_requests=self.concurrency,
            input_len=self.input_len,
            output_len=self.output_len,
            ignore_eos=True,
            seed=seed,
            timeout_s=START_S,
        )


@dataclass(frozen=True, slots=True)
class LoadRound:
    pattern: str
    number: int
    """From 1 on."""
    summary: Mapping[str, Any]
    """As `weft.bench.serve.summarize` gives it."""


@dataclass(frozen=True, slots=True)
class ServedRun:
    """One server, from its start to the end of its last round."""

    run: str
    ready_s: float
    log: tuple[str, ...]
    """What it said of its start."""
    rounds: tuple[LoadRound, ...]

    @property
    def late(self) -> int:
        """How many kernels were compiled while it served."""
        return sum("compiled late" in line for line in self.log)


def run_ready(
    model: str | None, plan: ReadyPlan, shape: AdapterShape, options: Mapping[str, object]
) -> Report:
    """Start a server for each run; `model` None: `default_model`. Raises ConfigError."""
    name = model or default_model(options)
    with preset_folder(name) as folder, tempfile.TemporaryDirectory(prefix="weft-bench-") as place:
        write_tokenizer(Path(folder))
        ranks = [shape.rank] * plan.num_adapters
        dtype = "bfloat16" if on_gpu(options) else "float32"
        adapters = list(RandomAdapters(folder, shape, options).write(Path(place), ranks, dtype))
        runs: list[ServedRun] = []
        with progress("Servers", len(RUNS)) as advance:
            for run in RUNS:
                runs.append(_serve(run, folder, adapters, plan, options, Path(place)))
                advance()
    title = f"From a new process to a server's first rounds: {name}, {plan.num_adapters} adapters"
    return Report(
        benchmark="ready",
        title=title,
        config={"model": name, "rank": shape.rank, **asdict(plan), "options": dict(options)},
        results=[_result(run) for run in runs],
        shown=ready_table(runs),
        plot=lambda: ready_plot(runs, title),
        device=None,
        ok=all(not r.summary["errors"] for run in runs for r in run.rounds),
    )


def write_tokenizer(folder: Path) -> None:
    """Give a model without a tokenizer one that has a word for each token. Does nothing where
    there is one."""
    if not folder.is_dir() or (folder / "tokenizer.json").exists():
        return
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {f"w{i}": i for i in range(load_model_config(folder).vocab_size)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0").save_pretrained(folder)


def _serve(
    run: str,
    folder: str,
    adapters: Sequence[Path],
    plan: ReadyPlan,
    options: Mapping[str, object],
    place: Path,
) -> ServedRun:
    args = [folder, f"--served-model-name={BASE}", *engine_flags(options)]
    args += [f"--adapter-cache-dir={place / 'images'}", f"--kernels={place / 'kernels'}"]
    args += [f"--lora-modules={path.name}={path}" for path in adapters]
    os.sync()  # else the system would write the adapters' files to the disk while the server starts
    port = check_free("127.0.0.1", 0, "--port")
    with (
        (place / f"{run}.log").open("w+", encoding="utf-8") as log,
        child_server(args, port, log, START_S) as (url, ready_s),
    ):
        rounds = tuple(_rounds(url, plan))
    said = (place / f"{run}.log").read_text(encoding="utf-8").splitlines()
    return ServedRun(run, ready_s, tuple(said), rounds)


def _rounds(url: str, plan: ReadyPlan) -> Iterator[LoadRound]:
    """Rounds of each pattern, one after another, each with prompts of its own."""

    async def load(of_round: LoadPlan) -> dict[str, Any]:
        async with LoadClient(url, None) as client:
            return summarize(*await run_load(client, of_round, lambda: None))

    for pattern in plan.patterns:
        for number in range(1, plan.num_rounds + 1):
            seed = 1000 * number + plan.patterns.index(pattern)
            yield LoadRound(pattern, number, asyncio.run(load(plan.load(pattern, seed))))


# -- what is shown ---------------------------------------------------------------------------------


def _result(run: ServedRun) -> dict[str, object]:
    return {
        "run": run.run,
        "ready_s": round(run.ready_s, 3),
        "rounds": [
            {
                "pattern": each.pattern,
                "number": each.number,
                "output_tokens_per_s": each.summary["output_tokens_per_s"],
                **{name: each.summary[name] for name in ("ttft_ms", "itl_ms", "e2e_ms")},
                "errors": each.summary["errors"],
            }
            for each in run.rounds
        ],
        "compiled_late": run.late,
        "log": run.log,
    }


def ready_table(runs: Sequence[ServedRun]) -> Table:
    columns = (
        "first token p50",
        "p99, ms",
        "between tokens p99",
        "whole p99",
        "tokens/s",
        "failed",
    )
    table = new_table("", "run", "ready, s", "round", *columns)
    for run in runs:
        late = f"{run.late} kernels compiled late" if run.late else ""
        table.add_row(run.run, f"{run.ready_s:.2f}", late, *[""] * 6)
        for each in run.rounds:
            summary = each.summary
            times = [("ttft_ms", "p50"), ("ttft_ms", "p99"), ("itl_ms", "p99"), ("e2e_ms", "p99")]
            cells = [summary[name][p] for name, p in times]
            failed = sum(summary["errors"].values())
            table.add_row(
                "",
                "",
                f"{each.pattern} {each.number}",
                *("-" if cell is None else f"{cell:,.1f}" for cell in cells),
                f"{summary['output_tokens_per_s']:,.0f}",
                str(failed),
            )
    return table


def ready_plot(runs: Sequence[ServedRun], title: str) -> Figure:
    """Plot the 99th percentile of times to the first token, round by round."""
    figure, [axes] = new_figure(title, 1)
    for run in runs:
        words = [f"{each.pattern} {each.number}" for each in run.rounds]
        p99 = [each.summary["ttft_ms"]["p99"] or 0.0 for each in run.rounds]
        axes.plot(words, p99, "o-", label=f"{run.run}: ready after {run.ready_s:.1f} s")
    axes.set_ylabel("ms to the first token, p99")
    axes.set_ylim(0)
    axes.legend(frameon=False, fontsize=9)
    return figure

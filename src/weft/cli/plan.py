"""`weft plan`: shows what fits into the memory of GPUs, without a GPU."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from weft.bench.cli.options import SHAPES, Rank, Targets, split_names
from weft.core.errors import ConfigError
from weft.terminal.options import (
    AsJson,
    adapters_option,
    ending_in_one_line,
    model_option,
    parse_bytes,
    tell_start,
    with_some_options,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from weft.core.targets import Target
    from weft.worker.plan import RankMemory, RankPlan

RANKS = (8, 16, 32, 64)
"""Ranks whose adapters' sizes are shown."""


@with_some_options(
    "dtype",
    "quantization",
    "revision",
    "adapter_memory",
    "fully_sharded_loras",
    "block_size",
    "gpu_memory_utilization",
    "max_num_seqs",
    "speculative",
)
def plan(
    model: Annotated[
        str,
        typer.Argument(
            metavar="BASE",
            help="The base model: a folder, a name on the hub, or a known shape:"
            f" {SHAPES}. Only its configuration is read.",
        ),
    ],
    gpu: Annotated[
        str,
        model_option(
            metavar="NAME|BYTES",
            help="The GPU: l4, rtx-4090, a100-40g, l40s, h100, a100-80g, h200, b200; or the bytes"
            " of its memory, such as 48G.",
        ),
    ] = "h200",
    tensor_parallel_size: Annotated[
        str, model_option(metavar="N,...", help="The numbers of GPUs to compare.")
    ] = "1,2,4,8",
    adapters: Annotated[
        int | None,
        adapters_option(
            help="Number of adapters that should fit on the GPUs at a time. They get the memory"
            " that they need, instead of --adapter-memory.",
            min=1,
        ),
    ] = None,
    rank: Rank = 16,
    targets: Targets = None,
    as_json: AsJson = False,
    **options: object,
) -> None:
    """Show what fits into the memory of GPUs: weights, adapters, and tokens of KV cache.

    Needs neither a GPU nor weights. Sizes are computed as a server does when it starts; CUDA itself
    is assumed to take 1.5 GiB. Exit status 1 if nothing that was asked for fits.
    """
    with ending_in_one_line(status=2):
        tell_start(f"working out what {model} takes")
        total, plans, found = _work_out(
            model, gpu, tensor_parallel_size, adapters, (rank, targets), options
        )
    if as_json:
        facts = [{**asdict(each), "fits": each.fits} for each in found]
        typer.echo(json.dumps({"model": model, "gpu_bytes": total, "plans": facts}))
    else:
        _show(f"{model} on {gpu}, adapters of rank {rank}", found)
        _show_adapters(plans, targets)
    raise typer.Exit(0 if any(each.fits for each in found) else 1)


def _work_out(
    model: str,
    gpu: str,
    sizes: str,
    num_adapters: int | None,
    adapter: tuple[int, str | None],
    options: Mapping[str, object],
) -> tuple[int, list[RankPlan], list[RankMemory]]:
    """The bytes of the GPU's memory, and for each number of GPUs that the model can be divided by
    its shares and what they take. `adapter`: rank and targets. Raises ConfigError."""
    from weft.bench.engine import preset_folder
    from weft.bench.workload import parse_counts
    from weft.core.config import engine_args
    from weft.models.config import load_model_config
    from weft.worker.plan import GPUS, RankPlan, total_of

    total = total_of(gpu if gpu in GPUS or not gpu[:1].isdigit() else parse_bytes(gpu))
    wanted = parse_counts(sizes, "tensor_parallel_size")
    with preset_folder(model) as folder:
        args = engine_args(folder, **options)
        config = load_model_config(folder, args.model.revision)
    plans: list[RankPlan] = []
    for size in wanted:
        try:
            plans.append(RankPlan(config, args, size))
        except ConfigError:
            if size == wanted[-1] and not plans:
                raise
    rank, targets = adapter
    found = [
        each.memory(total, each.adapter_bytes(rank, _adapted(each, targets)), num_adapters)
        for each in plans
    ]
    return total, plans, found


def _adapted(plan: RankPlan, targets: str | None) -> Sequence[Target]:
    from weft.bench.engine import AdapterShape

    return AdapterShape(1, split_names(targets)).of(plan.table)


def _show(title: str, found: Sequence[RankMemory]) -> None:
    from weft.bench.report import FILE_WIDTH, bytes_in_words, new_table

    columns = ("GPUs", "weights", "adapters", "how many", "KV cache, tokens")
    table = new_table("", *columns, names=0)
    for each in found:
        shown = (bytes_in_words(each.adapters), f"{each.num_adapters:,}", f"{each.kv_tokens:,}")
        if not each.fits:
            shown = ("", "", "does not fit")
        table.add_row(str(each.size), bytes_in_words(each.weights), *shown)
    Console(width=FILE_WIDTH).print(f"[bold]{title}: the memory of each GPU[/]", table)


def _show_adapters(plans: Sequence[RankPlan], targets: str | None) -> None:
    from weft.bench.report import FILE_WIDTH, new_table

    columns = [f"{plan.size} GPU{'s' * (plan.size > 1)}" for plan in plans]
    table = new_table("", "targets", "rank", *columns, names=1)
    for kind in [targets] if targets else _kinds(plans):
        for rank in RANKS:
            sizes = (plan.adapter_bytes(rank, _adapted(plan, kind)) / 1e6 for plan in plans)
            table.add_row(kind or "all linear", str(rank), *(f"{size:,.1f}" for size in sizes))
    Console(width=FILE_WIDTH).print("[bold]An adapter on each GPU, MB[/]", table)


def _kinds(plans: Sequence[RankPlan]) -> list[str | None]:
    """Targets that adapters often have: all, and those of attention."""
    found = {t.suffix: None for p in plans[:1] for t in p.table.targets if ".self_attn." in t.name}
    return [None, ",".join(found)]

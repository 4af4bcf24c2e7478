"""`weft bench churn` and `cold`, which measure what loading adapters costs; and `alora`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

from weft.bench.cli.options import (
    InputLen,
    Measure,
    Model,
    OutputLen,
    Rank,
    Ranks,
    Seed,
    Targets,
    engine_options,
    measuring,
    split_names,
    workload_option,
)
from weft.terminal.options import with_flags


@dataclass(frozen=True, kw_only=True)
class ChurnFlags:
    """The flags of `weft bench churn` beside those of the engine."""

    model: Model = None
    populations: Annotated[
        str,
        workload_option(metavar="N,...", help="Numbers of adapters in demand, one run for each."),
    ] = "16,32,64,128,256"
    resident: Annotated[
        int,
        workload_option(
            help="Number of adapters that fit on the device, unless --adapter-memory is given.",
            min=1,
        ),
    ] = 16
    choice: Annotated[
        str,
        workload_option(
            "--choice",
            metavar="CHOICE",
            help="How the adapter of each request is chosen: uniform, or zipf:EXPONENT, the first"
            " ones much more often.",
        ),
    ] = "uniform"
    load: Annotated[
        float | None,
        workload_option(
            metavar="SHARE",
            help="Send requests at this share of the rate that the engine reaches while all"
            " adapters in demand are on the device. Default: all at once.",
            min=0.01,
            max=2.0,
        ),
    ] = None
    num_requests: Annotated[int, workload_option(help="Requests of each run.", min=1)] = 512
    ranks: Ranks = "16"
    targets: Targets = None
    input_len: InputLen = "lognormal:5.2,0.8,16,1024"
    output_len: OutputLen = "lognormal:4.9,0.7,8,512"
    on_disk: Annotated[
        bool,
        workload_option(
            "--on-disk",
            help="Write the adapters to disk as PEFT does, and load them from there: those that"
            " do not fit into --adapter-host-memory are read from disk when used. Default: all"
            " stay in host memory.",
        ),
    ] = False
    verify: Annotated[
        bool,
        workload_option(
            "--verify",
            help="Compare all tokens with those of an engine that has memory for all adapters."
            " In float32 they are equal.",
        ),
    ] = False
    seed: Seed = 0


@engine_options("enable_prefix_caching", "adapter_cache_dir")
@measuring
@with_flags
def churn(measure: Measure, flags: ChurnFlags, **options: object) -> None:
    """Measure throughput and latency while more adapters are in demand than fit on the device.

    Adapters are random. Exit status 1 if --verify finds other tokens.
    """
    from weft.bench.churn import ChurnPlan, run_churn
    from weft.bench.workload import Choice, Lengths, parse_counts

    plan = ChurnPlan(
        populations=parse_counts(flags.populations, "populations"),
        resident=flags.resident,
        ranks=parse_counts(flags.ranks, "ranks"),
        targets=split_names(flags.targets),
        choice=Choice.parse(flags.choice),
        num_requests=flags.num_requests,
        input_len=Lengths.parse(flags.input_len, "input_len"),
        output_len=Lengths.parse(flags.output_len, "output_len"),
        load=flags.load,
        on_disk=flags.on_disk,
        verify=flags.verify,
        seed=flags.seed,
    )
    measure(run_churn, flags.model, plan, options)


@engine_options(
    "enable_prefix_caching", "adapter_memory", "adapter_host_memory", "adapter_cache_dir"
)
@measuring
def cold(
    measure: Measure,
    model: Model = None,
    rank: Rank = 16,
    targets: Targets = None,
    repeats: Annotated[
        int,
        typer.Option(help="Each time to a first token is the median of this many requests.", min=1),
    ] = 9,
    seed: Seed = 0,
    **options: object,
) -> None:
    """Measure how long a request waits for its adapter, and how much that delays others.

    Shows the time to the first token of a lone request whose adapter is on the device, in host
    memory or on disk, and the time between tokens of a batch while adapters are loaded.
    """
    from weft.bench.cold import ColdPlan, run_cold
    from weft.bench.engine import AdapterShape

    shape = AdapterShape(rank, split_names(targets))
    measure(run_cold, model, ColdPlan(repeats, seed), shape, options)


@engine_options("enable_prefix_caching", "adapter_memory", "adapter_cache_dir")
@measuring
def alora(
    measure: Measure,
    model: Model = None,
    conversation: Annotated[int, workload_option(help="Tokens of the conversation.", min=1)] = 4000,
    adapters: Annotated[
        int, workload_option(help="Adapters that judge the conversation.", min=1)
    ] = 8,
    rank: Rank = 16,
    targets: Targets = None,
    repeats: Annotated[
        int,
        typer.Option(help="Conversations. Each result is their median.", min=1),
    ] = 5,
    seed: Seed = 0,
    **options: object,
) -> None:
    """Measure how much of a conversation activated LoRA reuses, compared with plain LoRA.

    The base reads the conversation; then several adapters judge it, one by one and all at once.
    Shows the tokens taken from the prefix cache, and the time to the first token.
    """
    from weft.bench.alora import AloraPlan, run_alora
    from weft.bench.engine import AdapterShape

    plan = AloraPlan(conversation, adapters, repeats, seed)
    measure(run_alora, model, plan, AdapterShape(rank, split_names(targets)), options)

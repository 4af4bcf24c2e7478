"""`weft bench`: measurements with a table, a plot, and one line of JSON to keep."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer

from weft.bench.cli.adapters import alora, churn, cold
from weft.bench.cli.kernels import kernels
from weft.bench.cli.options import (
    InputLen,
    Measure,
    Model,
    OutputLen,
    Rank,
    Repeats,
    Seed,
    Targets,
    engine_options,
    measuring,
    output_option,
    split_names,
    workload_option,
)
from weft.bench.cli.simulate import simulate
from weft.terminal.commands import Commands
from weft.terminal.options import ApiKey, ending_in_one_line, with_flags

bench = Commands(
    help="Measure an engine or a running server, or simulate adapter memory.",
    no_args_is_help=True,
)


@bench.command()
@engine_options("enable_prefix_caching", "max_loras", "max_num_batched_tokens", "max_num_seqs")
@measuring
def decode(
    measure: Measure,
    model: Model = None,
    batch: Annotated[
        str, workload_option(metavar="N,...", help="Requests in the batch.")
    ] = "1,8,32,64",
    pattern: Annotated[
        str,
        workload_option(
            metavar="NAME,...",
            help="Adapters in the batch: none; identical, one for all; uniform, as many as the"
            " square root of the batch, equally often; skewed, a few asked much more than others;"
            " distinct, one for each.",
        ),
    ] = "none,identical,uniform,skewed,distinct",
    rank: Rank = 16,
    targets: Targets = None,
    repeats: Repeats = 3,
    seed: Seed = 0,
    **options: object,
) -> None:
    """Measure the time of a decode step, by batch size and by the adapters in the batch.

    The time is the difference between runs of 144 and of 16 output tokens, divided by 128. Prompts
    have 128 tokens. Adapters are random, and get the memory that all of them need.
    """
    from weft.bench.decode import DecodePlan, run_decode
    from weft.bench.engine import AdapterShape
    from weft.bench.workload import PATTERNS, parse_counts, parse_names

    plan = DecodePlan(
        batches=parse_counts(batch, "batch"),
        patterns=parse_names(pattern, PATTERNS, "pattern"),
        repeats=repeats,
        seed=seed,
    )
    measure(run_decode, model, plan, AdapterShape(rank, split_names(targets)), options)


@bench.command()
@engine_options("enable_prefix_caching")
@measuring
def throughput(
    measure: Measure,
    model: Model = None,
    num_requests: Annotated[
        int, workload_option(help="Requests, which are submitted all at once.", min=1)
    ] = 512,
    pattern: Annotated[
        str,
        workload_option(
            metavar="NAME,...",
            help="Adapters of the requests: none; identical, one for all; uniform, all equally"
            " often; skewed, a few asked much more than others.",
        ),
    ] = "none,identical,uniform,skewed",
    adapters: Annotated[
        int, workload_option(help="Adapters of the patterns uniform and skewed.", min=1)
    ] = 64,
    input_len: InputLen = "lognormal:5.2,0.8,16,1024",
    output_len: OutputLen = "lognormal:4.9,0.7,8,512",
    rank: Rank = 16,
    targets: Targets = None,
    seed: Seed = 0,
    **options: object,
) -> None:
    """Measure tokens and requests per second of an engine that always has enough to do.

    Adapters are random, and get the memory that all of them need unless --adapter-memory is given.
    """
    from weft.bench.engine import AdapterShape
    from weft.bench.throughput import ThroughputPlan, run_throughput
    from weft.bench.workload import PATTERNS, Lengths, parse_names

    plan = ThroughputPlan(
        num_requests=num_requests,
        patterns=parse_names(pattern, PATTERNS[:-1], "pattern"),
        num_adapters=adapters,
        input_len=Lengths.parse(input_len, "input_len"),
        output_len=Lengths.parse(output_len, "output_len"),
        seed=seed,
    )
    measure(run_throughput, model, plan, AdapterShape(rank, split_names(targets)), options)


@bench.command()
@engine_options("adapter_cache_dir", "enable_prefix_caching", "max_num_seqs")
@measuring
def prompts(
    measure: Measure,
    model: Model = None,
    tokens: Annotated[
        int, workload_option(help="Tokens of each prompt that is read together with others.", min=1)
    ] = 2048,
    together: Annotated[int, workload_option(help="Number of these prompts.", min=1)] = 8,
    prefix: Annotated[
        int,
        workload_option(
            help="Tokens of the prompt that is read alone, and again from the cache.", min=1
        ),
    ] = 4096,
    beside: Annotated[
        int,
        workload_option(
            help="Number of requests that decode while a prompt is read in one step with them.",
            min=0,
        ),
    ] = 64,
    chunk: Annotated[int, workload_option(help="Tokens of a prompt beside decodes.", min=1)] = 960,
    repeats: Repeats = 5,
    seed: Seed = 0,
    **options: object,
) -> None:
    """Measure how fast prompts are read: at once, alone, from the prefix cache, beside decodes."""
    from weft.bench.prompts import PromptsPlan, run_prompts

    sizes = tokens, together, prefix, beside, chunk
    measure(run_prompts, model, PromptsPlan(*sizes, repeats, seed), options)


@bench.command()
@engine_options(
    "adapter_cache_dir",
    "enable_prefix_caching",
    "max_loras",
    "max_num_batched_tokens",
    "max_num_seqs",
)
@measuring
def profile(
    measure: Measure,
    model: Model = None,
    batch: Annotated[int, workload_option(help="Requests in the batch.", min=1)] = 64,
    pattern: Annotated[
        str,
        workload_option(
            metavar="NAME,...",
            help="Adapters in the batch, as for weft bench decode. LoRA's part is the difference"
            " from the pattern none.",
        ),
    ] = "none,identical",
    rank: Rank = 16,
    targets: Targets = None,
    seed: Seed = 0,
    trace: Annotated[
        Path | None,
        output_option(
            metavar="FILE.json",
            help="Also write a trace of the last pattern's steps, for chrome://tracing.",
        ),
    ] = None,
    **options: object,
) -> None:
    """Show what a GPU runs in decode steps: its idle share, the costliest kernels, LoRA's part."""
    from weft.bench.engine import AdapterShape
    from weft.bench.profile import ProfilePlan, run_profile
    from weft.bench.workload import PATTERNS, parse_names

    plan = ProfilePlan(batch, parse_names(pattern, PATTERNS, "pattern"), seed)
    measure(run_profile, model, plan, AdapterShape(rank, split_names(targets)), options, trace)


@bench.command()
@engine_options("adapter_cache_dir")
@measuring
def startup(
    measure: Measure,
    model: Model = None,
    rank: Rank = 16,
    targets: Targets = None,
    **options: object,
) -> None:
    """Measure the time from a new process to the first token with an adapter, stage by stage.

    The engine is started twice: cold, without compiled kernels, and warm, with those of the first
    start. While kernels compile, it takes host memory for adapters. A server would load its own
    parts and the tokenizer meanwhile, in another process.
    """
    from weft.bench.engine import AdapterShape
    from weft.bench.startup import run_startup

    measure(run_startup, model, AdapterShape(rank, split_names(targets)), options)


@bench.command()
@engine_options("adapter_cache_dir")
@measuring
def ready(
    measure: Measure,
    model: Model = None,
    adapters: Annotated[
        int, workload_option(help="Adapters that the server loads at the start.", min=1)
    ] = 64,
    rank: Rank = 16,
    targets: Targets = None,
    rounds: Annotated[int, workload_option(help="Rounds of requests for each pattern.", min=1)] = 3,
    concurrency: Annotated[
        int, workload_option(help="Requests in a round, sent all at once.", min=1)
    ] = 64,
    input_len: InputLen = "200",
    output_len: OutputLen = "130",
    pattern: Annotated[
        str,
        workload_option(
            metavar="NAME,...",
            help="What is asked. base: the base; one: a single adapter; uniform: all adapters in"
            " turn.",
        ),
    ] = "uniform",
    **options: object,
) -> None:
    """Measure the time from a new process to a ready server, and of its first rounds of requests.

    Starts `weft serve` with adapters in folders, waits until it answers over HTTP, and asks it
    round by round: cold, and once more with the kernels and packed adapters of the first start.
    """
    from weft.bench.report import need
    from weft.bench.workload import Lengths, parse_names

    lengths = Lengths.parse(input_len, "input_len"), Lengths.parse(output_len, "output_len")
    need("aiohttp", "weft bench ready needs aiohttp")
    from weft.bench.engine import AdapterShape
    from weft.bench.ready import PATTERNS, ReadyPlan, run_ready

    patterns = parse_names(pattern, PATTERNS, "pattern")
    plan = ReadyPlan(adapters, rounds, concurrency, *lengths, patterns)
    measure(run_ready, model, plan, AdapterShape(rank, split_names(targets)), options)


@dataclass(frozen=True, kw_only=True)
class LoadFlags:
    """The flags of `weft bench serve`."""

    url: Annotated[
        str,
        typer.Argument(metavar="URL", help="The server's address, such as http://127.0.0.1:8000."),
    ]
    models: Annotated[
        str | None,
        workload_option(
            metavar="NAME,...",
            help="The models to ask. Default: all adapters that the server lists.",
        ),
    ] = None
    include_base: Annotated[
        bool, workload_option("--include-base", help="Ask the base model too.")
    ] = False
    endpoint: Annotated[
        Literal["completions", "chat"],
        workload_option(
            help="The API to use. completions: prompts are token ids. chat: prompts are words."
        ),
    ] = "completions"
    choice: Annotated[
        str,
        workload_option(
            metavar="CHOICE",
            help="How the model of each request is chosen: zipf:EXPONENT, the first ones much more"
            " often; uniform, at random; or round-robin.",
        ),
    ] = "zipf:1.0"
    arrival: Annotated[
        str,
        workload_option(
            metavar="ARRIVAL",
            help="When requests are sent. poisson:RATE: RATE requests per second, at random."
            " bursty:RATE,BURST: RATE per second too, but BURST at a time. all: all at once."
            " closed:CONCURRENCY: by so many users, each of whom waits for the answer before the"
            " next request.",
        ),
    ] = "poisson:8"
    num_requests: Annotated[int, workload_option(min=1, help="Requests to send in all.")] = 256
    input_len: InputLen = "128"
    output_len: OutputLen = "64"
    ignore_eos: Annotated[
        bool,
        workload_option(
            "--ignore-eos/--no-ignore-eos",
            help="Ask for answers of exactly this length. Not all servers know this field.",
        ),
    ] = True
    seed: Seed = 0
    timeout: Annotated[
        float,
        workload_option(
            metavar="SECONDS",
            help="Seconds for the whole run. Requests that are still open then count as failed.",
            min=0.001,
        ),
    ] = 600.0
    api_key: ApiKey = None


@bench.command()
@measuring
@with_flags
def serve(measure: Measure, flags: LoadFlags) -> None:
    """Measure latency and throughput of any OpenAI-compatible server with many adapters.

    Exit status 1 if any request failed.
    """
    from weft.bench.report import need
    from weft.bench.workload import Arrival, Choice, Lengths

    choice, arrival = Choice.parse(flags.choice), Arrival.parse(flags.arrival)
    input_len = Lengths.parse(flags.input_len, "input_len")
    output_len = Lengths.parse(flags.output_len, "output_len")
    need("aiohttp", "weft bench serve needs aiohttp")
    from weft.bench.serve import LoadPlan, run_serve

    plan = LoadPlan(
        endpoint=flags.endpoint,
        models=split_names(flags.models) or (),
        choice=choice,
        arrival=arrival,
        num_requests=flags.num_requests,
        input_len=input_len,
        output_len=output_len,
        ignore_eos=flags.ignore_eos,
        seed=flags.seed,
        timeout_s=flags.timeout,
    )
    measure(run_serve, flags.url, flags.api_key, plan, flags.include_base)


for command in (kernels, churn, cold, alora, simulate):
    bench.command()(command)


@bench.command("plot")
def plot_history(
    history: Annotated[
        Path, typer.Option(metavar="FILE.jsonl", help="The file that --record wrote.")
    ] = Path("benchmarks/history.jsonl"),
    to: Annotated[
        Path, typer.Option(metavar="FOLDER", help="The folder to write the plots to.")
    ] = Path("plots"),
) -> None:
    """Draw what the newest runs in a history show, beside other servers' figures."""
    with ending_in_one_line():
        from weft.bench.history import draw_history

        for path in draw_history(history, to):
            typer.echo(path)

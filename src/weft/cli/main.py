"""`weft`: the commands. What is slow to import is imported by the command that needs it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer.core import TyperCommand

from weft import __version__
from weft.bench.cli.commands import bench
from weft.bench.cli.kernels import tune
from weft.core.config import MAX_RANK, LoraArgs, engine_args
from weft.core.errors import WeftError
from weft.terminal.ending import fail
from weft.terminal.options import (
    ADAPTERS,
    MODEL,
    keys_from_environment,
    parse_lora_modules,
    spread_lora_modules,
    with_engine_options,
    with_flags,
)

HTTP = "HTTP server"

app = typer.Typer(
    help="Serve many LoRA adapters from one copy of a base model.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


app.add_typer(bench, name="bench")


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"weft {__version__}")
        raise typer.Exit


@app.callback()
def weft(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_show_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
) -> None:
    """Serve many LoRA adapters from one copy of a base model."""


class _ServeCommand(TyperCommand):
    """Takes several adapters after one --lora-modules, as vLLM does."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, spread_lora_modules(args))


@dataclass(frozen=True, kw_only=True)
class ServeFlags:
    """The flags of `weft serve` beside those of the engine."""

    host: Annotated[
        str,
        typer.Option(
            help="The address to listen on; 0.0.0.0 stands for all.", rich_help_panel=HTTP
        ),
    ] = "127.0.0.1"
    port: Annotated[
        int,
        typer.Option(
            metavar="PORT",
            help="The port to listen on; 0 takes any free one.",
            min=0,
            max=65535,
            rich_help_panel=HTTP,
        ),
    ] = 8000
    served_model_name: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="What requests call the base model. Repeatable. Default: BASE as given.",
            rich_help_panel=HTTP,
        ),
    ] = None
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY",
            help="Serve only requests with this key as their bearer token; NAME=KEY gives it the"
            " name of a tenant, =KEY none to a key that holds a =. Repeatable. Better:"
            " WEFT_API_KEY=KEY,KEY in the environment, as others can see a command line.",
            rich_help_panel=HTTP,
        ),
    ] = None
    allowed_origins: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ORIGIN",
            help="Let web pages of this origin call the server from a browser; * for all."
            " Repeatable. Default: none.",
            rich_help_panel=HTTP,
        ),
    ] = None
    max_queue: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="How many requests may wait beyond --max-num-seqs; further ones get status 429."
            " Default: four times --max-num-seqs.",
            min=0,
            rich_help_panel=HTTP,
        ),
    ] = None
    request_timeout: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            help="How long one answer may take before it is aborted. Default: no limit.",
            rich_help_panel=HTTP,
        ),
    ] = None
    tool_call_parser: Annotated[
        Literal["auto", "none", "hermes", "llama3_json", "mistral"],
        typer.Option(
            help="How the model writes calls of tools. auto: as its chat template shows.",
            rich_help_panel=HTTP,
        ),
    ] = "auto"
    reasoning_parser: Annotated[
        Literal["auto", "none", "think"],
        typer.Option(
            help="Whether the model reasons between <think> and </think>, which is then told apart"
            " from its answer. auto: if its chat template shows it.",
            rich_help_panel=HTTP,
        ),
    ] = "auto"
    shutdown_timeout: Annotated[
        int,
        typer.Option(
            metavar="SECONDS",
            help="How long open requests may take to finish when the server shuts down.",
            min=0,
            rich_help_panel=HTTP,
        ),
    ] = 20
    watchdog_timeout: Annotated[
        float,
        typer.Option(
            metavar="SECONDS",
            help="How long a step of the engine may take. An engine that takes longer is taken to"
            " hang: it is ended and started again. 0: no limit.",
            min=0,
            rich_help_panel=HTTP,
        ),
    ] = 300
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"],
        typer.Option(help="debug also logs each request.", rich_help_panel=HTTP),
    ] = "info"
    log_format: Annotated[
        Literal["text", "json"],
        typer.Option(
            help="json: one object a line on stderr, also for each request.", rich_help_panel=HTTP
        ),
    ] = "text"
    otlp_endpoint: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Send a trace of each request to this OTLP collector, over HTTP. Needs"
            " [bold]pip install weft\\[otel][/].",
            rich_help_panel=HTTP,
        ),
    ] = None
    skip_tokenizer_init: Annotated[
        bool,
        typer.Option(
            "--skip-tokenizer-init",
            help="Load no tokenizer: prompts and answers are token ids.",
            rich_help_panel=MODEL,
        ),
    ] = False
    lora_modules: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=PATH...",
            help="Adapters to load at the start, from folders or the Hugging Face hub; a request"
            " picks one by NAME as its model.",
            rich_help_panel=ADAPTERS,
        ),
    ] = None
    lora_root: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FOLDER",
            help="A folder below which adapters may be loaded while serving. Repeatable."
            " Default: only the folders of --lora-modules.",
            rich_help_panel=ADAPTERS,
        ),
    ] = None
    allow_hub_adapters: Annotated[
        bool,
        typer.Option(
            "--allow-hub-adapters",
            help="Let clients load adapters from the Hugging Face hub, as org/name.",
            rich_help_panel=ADAPTERS,
        ),
    ] = False
    enable_lora: Annotated[bool, typer.Option("--enable-lora", hidden=True)] = False


@app.command(cls=_ServeCommand)
@with_engine_options
@with_flags
def serve(
    model: Annotated[
        str,
        typer.Argument(
            metavar="BASE", help="The base model: a Hugging Face folder, or a name on the hub."
        ),
    ],
    flags: ServeFlags,
    **options: object,
) -> None:
    """Serve a base model and its adapters over an OpenAI-compatible HTTP API.

    [bold]weft serve[/] meta-llama/Llama-3.1-8B-Instruct [bold]--lora-modules[/] sql=./sql
    """
    from weft.api import ApiSettings
    from weft.cli.serve import ServeArgs, max_open, run

    try:
        engine = engine_args(model, **options)
        tools, reasoning = flags.tool_call_parser, flags.reasoning_parser
        args = ServeArgs(
            engine=engine,
            api=ApiSettings(
                served_model_names=tuple(flags.served_model_name or [model]),
                max_open=max_open(engine, flags.max_queue),
                request_timeout_s=flags.request_timeout,
                api_keys=tuple(flags.api_key or keys_from_environment()),
                allowed_origins=tuple(flags.allowed_origins or []),
                allow_hub_adapters=flags.allow_hub_adapters,
                tool_call_parser=None if tools == "none" else tools,
                reasoning_parser=None if reasoning == "none" else reasoning,
            ),
            host=flags.host,
            port=flags.port,
            lora_modules=tuple(
                m for text in flags.lora_modules or [] for m in parse_lora_modules(text)
            ),
            lora_roots=tuple(flags.lora_root or []),
            skip_tokenizer_init=flags.skip_tokenizer_init,
            shutdown_timeout_s=flags.shutdown_timeout,
            log_level=flags.log_level,
            log_format=flags.log_format,
            otlp_endpoint=flags.otlp_endpoint,
            watchdog_timeout_s=flags.watchdog_timeout,
        )
        run(args)
    except WeftError as error:
        if flags.log_level == "debug":
            raise
        fail(error.message)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


@app.command()
def demo(
    port: Annotated[
        int,
        typer.Option(help="The port of the demo's server; 0 takes any free one.", min=0, max=65535),
    ] = 0,
    examples: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="The folder examples/tiny. Default: that of the checkout."
        ),
    ] = None,
) -> None:
    """Start a server with eleven tiny adapters, ask all of them at once, check every answer."""
    from weft.cli.demo import run_demo

    try:
        ok = run_demo(examples, port)
    except WeftError as error:
        fail(error.message)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    raise typer.Exit(0 if ok else 1)


@app.command()
def top(
    url: Annotated[
        str, typer.Argument(metavar="URL", help="The server's address.")
    ] = "http://127.0.0.1:8000",
    interval: Annotated[
        float,
        typer.Option(
            metavar="SECONDS", help="How long to wait between two readings of the metrics.", min=0.1
        ),
    ] = 1.0,
    once: Annotated[
        bool,
        typer.Option("--once", help="Print what happens within one interval, and end."),
    ] = False,
) -> None:
    """Watch a running server: load, latency, memory, and its busiest adapters."""
    from weft.cli.top import run_top

    try:
        run_top(url, interval, once)
    except WeftError as error:
        fail(error.message)
    except KeyboardInterrupt:  # the way to leave it
        raise typer.Exit(0) from None


@app.command()
def check(
    adapter: Annotated[
        str,
        typer.Argument(metavar="ADAPTER", help="The adapter: a PEFT folder, or a name on the hub."),
    ],
    base: Annotated[
        str,
        typer.Option(
            metavar="BASE",
            help="The base model: a folder or a name on the hub. Only its configuration is read.",
        ),
    ],
    max_lora_rank: Annotated[
        int,
        typer.Option(
            metavar="N",
            help="The largest rank that the server accepts.",
            min=1,
            max=MAX_RANK,
        ),
    ] = MAX_RANK,
    conversion_tolerance: Annotated[
        float,
        typer.Option(
            metavar="NUMBER",
            help="The largest error with which the server accepts an adapter of another kind.",
            min=0.0,
        ),
    ] = LoraArgs().conversion_tolerance,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one line of JSON instead.")
    ] = False,
) -> None:
    """Tell whether an adapter would be served on a base model, and if not, why.

    Needs neither a GPU nor the base's weights.
    Exit status: 0 served, 1 refused, 2 no such adapter or base.
    """
    from weft.cli.check import check_adapter, report_json, show_report

    try:
        report = check_adapter(adapter, base, max_lora_rank, conversion_tolerance)
    except WeftError as error:
        fail(error.message, 2)
    typer.echo(report_json(report) if as_json else show_report(report))
    raise typer.Exit(0 if report.served else 1)


@app.command()
def env(
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one line of JSON instead.")
    ] = False,
) -> None:
    """Print versions, machine and settings, to paste into a bug report. Secrets are hidden."""
    from weft.terminal.environment import collect, show_json, show_text

    typer.echo(show_json(collect()) if as_json else show_text(collect()))


app.command()(tune)

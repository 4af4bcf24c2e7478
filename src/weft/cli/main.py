"""`weft`: the commands. What is slow to import is imported by the command that needs it."""

from __future__ import annotations

import contextlib
import json
import signal
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from weft import __version__
from weft.bench.cli.commands import bench
from weft.bench.cli.kernels import tune
from weft.cli.args import ServeFlags, spread_values
from weft.cli.chat import chat
from weft.cli.cluster import cluster
from weft.cli.compile import compile_kernels, use_kernels
from weft.cli.evaluate import evaluate
from weft.cli.keys import key
from weft.cli.migrate import instead_of, migrate
from weft.cli.plan import plan
from weft.cli.publish import push, registry
from weft.cli.releases import history, label, release, rollback, tenants
from weft.core.config import MAX_RANK, LoraArgs, check_texts, engine_args
from weft.terminal.commands import Command, Commands
from weft.terminal.options import (
    Adapter,
    AsJson,
    Base,
    Interval,
    ending_in_one_line,
    key_to_send,
    with_engine_options,
    with_flags,
)
from weft.terminal.plain import plain

BEGUN_S = time.monotonic()

SERVE, PREPARE, ADAPTERS = "Serving", "Before you serve", "Adapters on running servers"
SHARED, MEASURE = "Nodes and tenants", "Measuring"

app = Commands(
    help="Serve many LoRA adapters from one copy of a base model.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(registry, name="registry", rich_help_panel=ADAPTERS)
app.add_typer(cluster, name="cluster", rich_help_panel=SHARED)
app.add_typer(tenants, name="tenants", rich_help_panel=SHARED)
app.add_typer(key, name="key", rich_help_panel=SHARED)
app.add_typer(bench, name="bench", rich_help_panel=MEASURE)


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


class _ServeCommand(Command):
    """Takes several adapters or names after one flag, as vLLM does, and says what takes the
    place of flags that are not there."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        own = {name for param in self.params for name in (*param.opts, *param.secondary_opts)}
        for name in (arg.partition("=")[0] for arg in args if arg.startswith("-")):
            if name not in own and (instead := instead_of(name, own)):
                raise typer.BadParameter(f"there is no {name}: {instead}", ctx)
        return super().parse_args(ctx, spread_values(args))


@app.command(cls=_ServeCommand, rich_help_panel=SERVE)
@with_engine_options
@with_flags
def serve(
    model: Base,
    flags: ServeFlags,
    **options: object,
) -> None:
    """Serve a base model and its adapters over an OpenAI-compatible HTTP API.

    [bold]weft serve[/] meta-llama/Llama-3.1-8B-Instruct [bold]--lora-modules[/] sql=./sql
    """
    with ending_in_one_line(traceback=flags.log_level == "debug"):
        check_texts(flags)
        engine = engine_args(model, **options)
        if flags.keeps_on_hangup():
            signal.signal(signal.SIGHUP, signal.SIG_IGN)  # until it is handled
        use_kernels(flags.kernels)
        if not flags.no_engine:
            from weft.fleet.process import spawn_engine_ahead

            spawn_engine_ahead(engine.model.tensor_parallel_size)
        from weft.cli.serve import run  # which takes long too

        run(engine, flags, BEGUN_S)


@app.command(rich_help_panel=SERVE)
def demo(
    port: Annotated[
        int, typer.Option(help="The port of the demo's server. 0: any free one.", min=0, max=65535)
    ] = 0,
    examples: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="The folder examples/tiny. Default: that of the checkout."
        ),
    ] = None,
    hybrid: Annotated[
        bool,
        typer.Option(
            "--hybrid",
            help="Serve the base that has linear attention in most of its layers. It is in a"
            " checkout, but not in the wheel.",
        ),
    ] = False,
) -> None:
    """Start a server with eleven tiny adapters, ask all at once, and check every answer."""
    from weft.cli.demo import run_demo

    with ending_in_one_line():
        raise typer.Exit(0 if run_demo(examples, port, hybrid) else 1)


@app.command(rich_help_panel=SERVE)
def top(
    urls: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="URL",
            help="The addresses of one or several servers. Default: http://127.0.0.1:8000.",
        ),
    ] = None,
    interval: Interval = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print one interval, and end.")] = False,
    api_key: Annotated[
        str | None,
        typer.Option(
            metavar="KEY",
            help="The key to send as the bearer token. With tenants, an admin's key.",
            envvar="WEFT_API_KEY",
            callback=key_to_send,
        ),
    ] = None,
) -> None:
    """Watch running servers: load, latency, memory, and their busiest adapters.

    If you name several, each has its own row, even while it does not answer; other figures are for
    all of them together. `weft cluster top` finds the nodes of a cluster itself.
    """
    from weft.cli.top import run_top

    with ending_in_one_line(), contextlib.suppress(KeyboardInterrupt):  # the way to leave it
        run_top(urls or ["http://127.0.0.1:8000"], interval, once, api_key or "")


@app.command(rich_help_panel=PREPARE)
def check(
    adapter: Adapter,
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
            metavar="N", help="The largest rank that the server accepts.", min=1, max=MAX_RANK
        ),
    ] = MAX_RANK,
    conversion_tolerance: Annotated[
        float,
        typer.Option(
            metavar="NUMBER",
            help="The largest relative error (Frobenius norm) that a LoHa or LoKr of too high a"
            " rank may get when it is served as a LoRA.",
            min=0.0,
        ),
    ] = LoraArgs().conversion_tolerance,
    as_json: AsJson = False,
) -> None:
    """Check whether an adapter can be served on a base model, and if not, say why.

    Needs neither a GPU nor the base's weights.
    Exit status: 0 served, 1 refused, 2 no such adapter or base.
    """
    from weft.cli.check import check_adapter, show_report

    with ending_in_one_line(status=2):
        report = check_adapter(adapter, base, max_lora_rank, conversion_tolerance)
    typer.echo(json.dumps(asdict(report)) if as_json else plain(show_report(report)))
    raise typer.Exit(0 if report.served else 1)


@app.command(rich_help_panel=PREPARE)
def env(as_json: AsJson = False) -> None:
    """Print versions, machine and settings, to paste into a bug report. Secrets are hidden."""
    from weft.terminal.environment import collect, show_text

    typer.echo(json.dumps(collect()) if as_json else show_text(collect()))


app.command(rich_help_panel=SERVE)(chat)
app.command(rich_help_panel=PREPARE)(plan)
_AS_IT_IS = {"allow_interspersed_args": False}  # the flags of a command without quotes
app.command(rich_help_panel=PREPARE, context_settings=_AS_IT_IS)(migrate)
app.command("compile", rich_help_panel=PREPARE)(compile_kernels)
for command in (push, release, rollback, label, history):
    app.command(rich_help_panel=ADAPTERS)(command)
app.command("eval", rich_help_panel=MEASURE)(evaluate)
app.command(rich_help_panel=MEASURE)(tune)

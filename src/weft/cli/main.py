"""`weft`: the commands. What is slow to import is imported by the command that needs it."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer.core import TyperCommand

from weft import __version__
from weft.cli.options import (
    ADAPTERS,
    MODEL,
    parse_lora_module,
    spread_lora_modules,
    with_engine_options,
)
from weft.core.config import engine_args
from weft.core.errors import WeftError

HTTP = "HTTP server"

app = typer.Typer(
    help="Serve many LoRA adapters from one copy of a base model.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


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


@app.command(cls=_ServeCommand)
@with_engine_options
def serve(
    model: Annotated[
        str,
        typer.Argument(
            metavar="BASE", help="The base model: a Hugging Face folder, or a name on the hub."
        ),
    ],
    host: Annotated[
        str, typer.Option(help="Address to listen on; 0.0.0.0 for all.", rich_help_panel=HTTP)
    ] = "127.0.0.1",
    port: Annotated[
        int,
        typer.Option(
            metavar="PORT",
            help="Port; 0 for any free one.",
            min=0,
            max=65535,
            rich_help_panel=HTTP,
        ),
    ] = 8000,
    served_model_name: Annotated[
        list[str] | None,
        typer.Option(
            help="What requests call the base model. Repeatable. Default: BASE as given.",
            rich_help_panel=HTTP,
        ),
    ] = None,
    shutdown_timeout: Annotated[
        int,
        typer.Option(
            help="Seconds that open requests get to finish at shut-down.",
            min=0,
            rich_help_panel=HTTP,
        ),
    ] = 20,
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"],
        typer.Option(help="debug also logs each request.", rich_help_panel=HTTP),
    ] = "info",
    skip_tokenizer_init: Annotated[
        bool,
        typer.Option(
            "--skip-tokenizer-init",
            help="Load no tokenizer: prompts and answers are token ids.",
            rich_help_panel=MODEL,
        ),
    ] = False,
    lora_modules: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=PATH...",
            help="Adapters to load at the start; a request picks one by NAME as its model.",
            rich_help_panel=ADAPTERS,
        ),
    ] = None,
    lora_root: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FOLDER",
            help="Folder below which adapters may be loaded while serving. Repeatable."
            " Default: only the folders of --lora-modules.",
            rich_help_panel=ADAPTERS,
        ),
    ] = None,
    enable_lora: Annotated[bool, typer.Option("--enable-lora", hidden=True)] = False,
    **options: object,
) -> None:
    """Serve a base model and its adapters over an OpenAI-compatible HTTP API.

    [bold]weft serve[/] meta-llama/Llama-3.1-8B-Instruct [bold]--lora-modules[/] sql=./sql
    """
    from weft.cli.serve import ServeArgs, run_server

    try:
        args = ServeArgs(
            engine=engine_args(model, **options),
            host=host,
            port=port,
            served_model_names=tuple(served_model_name or [model]),
            lora_modules=tuple(map(parse_lora_module, lora_modules or [])),
            lora_roots=tuple(lora_root or []),
            skip_tokenizer_init=skip_tokenizer_init,
            shutdown_timeout_s=shutdown_timeout,
            log_level=log_level,
        )
        asyncio.run(run_server(args))
    except WeftError as error:
        if log_level == "debug":
            raise
        fail(error.message)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


@app.command()
def demo(
    port: Annotated[
        int,
        typer.Option(help="Port of the demo's server; 0 for any free one.", min=0, max=65535),
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


def fail(message: str) -> None:
    """End with one line on stderr and exit status 1."""
    sys.stderr.write(f"weft: error: {' '.join(message.split())}\n")
    raise typer.Exit(1)


if __name__ == "__main__":
    app()

"""`weft compile`: the kernels of a model, compiled once for all servers that are started later."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from weft.core.config import engine_args
from weft.core.errors import ConfigError
from weft.terminal.options import ending_in_one_line, with_engine_options

KERNELS = "TRITON_CACHE_DIR"
"""Where Triton looks for compiled kernels, and keeps them."""


def use_kernels(folder: Path | None) -> None:
    """Let this process, and those that it starts, keep compiled kernels in a folder. Raises
    ConfigError if it can't be written to, as what is not there yet is compiled into it."""
    if folder is None:
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        writable = os.access(folder, os.W_OK | os.X_OK)
    except OSError:
        writable = False
    if not writable:
        raise ConfigError(f"--kernels {folder} is not a folder that can be written to", "kernels")
    os.environ[KERNELS] = str(folder.absolute())


@with_engine_options
def compile_kernels(
    model: Annotated[
        str,
        typer.Argument(
            metavar="BASE",
            help="The base model: a folder, or a name on the hub. No weights are read.",
        ),
    ],
    kernels: Annotated[
        Path, typer.Option(metavar="FOLDER", help="The folder to write the kernels to.")
    ],
    **options: object,
) -> None:
    """Compile the kernels of a model on a GPU, for servers on GPUs of the same kind.

    Give the options that the server will have. Then start it with weft serve --kernels FOLDER.
    The folder is only for the versions of Weft, torch and Triton that made it. The server compiles
    what is missing in it.
    """
    with ending_in_one_line():
        typer.echo(_compile(model, kernels, options))


def _compile(model: str, kernels: Path, options: Mapping[str, object]) -> str:
    """What was compiled, in a line. Raises ConfigError."""
    use_kernels(kernels)
    import torch  # after the folder is known

    from weft.engine.build import build_engine

    if options.get("device") == "cpu" or not torch.cuda.is_available():
        raise ConfigError("weft compile needs a GPU: nothing is compiled for CPUs", "device")
    engine = build_engine(engine_args(model, **{**options, "load_format": "dummy"}))
    device, seconds = torch.cuda.get_device_name(engine.info.device), engine.info.start_s
    engine.close()
    num = sum(1 for _ in kernels.glob("*/*.cubin"))
    return f"{kernels}: {num} kernels for {device}, in {sum(seconds.values()):.1f} s"

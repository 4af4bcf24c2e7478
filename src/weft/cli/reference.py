"""docs/cli.md, made from the commands themselves: `python -m weft.cli.reference > docs/cli.md`."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin

import typer
from rich.text import Text
from typer.models import ArgumentInfo, OptionInfo

INTRODUCTION = """\
# Commands

`weft COMMAND --help` shows the same in the terminal. Options that mean the same as in vLLM have the
same names. Sizes in bytes may end in K, M, G or T, which are powers of 1024.

`weft --install-completion` makes your shell (bash, zsh, fish or PowerShell) complete commands,
options and their values. `weft --show-completion` only prints what it would install.
"""
_VALUES = {int: "N", float: "NUMBER", str: "TEXT", Path: "PATH"}


def reference(app: typer.Typer) -> str:
    """All commands of `app` as a page of Markdown."""
    return "\n".join([INTRODUCTION, *_commands(app, "weft")])


def _commands(app: typer.Typer, path: str) -> Iterator[str]:
    for command in app.registered_commands:
        assert command.callback is not None
        if not command.hidden:
            name = command.name or command.callback.__name__.replace("_", "-")
            yield _section(f"{path} {name}", command.callback)
    for group in app.registered_groups:
        assert group.typer_instance is not None
        yield from _commands(group.typer_instance, f"{path} {group.name}")


def _section(path: str, callback: Callable[..., object]) -> str:
    usage, arguments = [path], []
    panels: dict[str, list[str]] = {}
    for parameter in inspect.signature(callback, eval_str=True).parameters.values():
        if parameter.annotation is typer.Context:
            continue
        kind, *notes = get_args(parameter.annotation)
        info = next(note for note in notes if isinstance(note, ArgumentInfo | OptionInfo))
        kind, default = _type_of(kind), parameter.default
        value = info.metavar or "|".join(map(str, get_args(kind))) or _VALUES.get(kind, "")
        flags = _flags(parameter.name, kind, info)
        help_text = _plain_text(info.help)
        if info.envvar:
            help_text += f" Also as {info.envvar} in the environment."
        shown = info.show_default if isinstance(info.show_default, str) else default
        help_text += _default(flags, shown)
        if isinstance(info, ArgumentInfo):
            usage.append(value if default is inspect.Parameter.empty else f"[{value}]")
            arguments.append(f"- `{value}`: {help_text.removesuffix(' Required.')}")
        elif not info.hidden:
            lines = panels.setdefault(info.rich_help_panel or "Options", [])
            lines.append(f"- `{f'{flags} {value}'.rstrip()}`: {help_text}")
    about = _plain_text(inspect.getdoc(callback))
    lines = [f"## {path}", "", about, "", "```text", " ".join([*usage, "[OPTIONS]"]), "```"]
    if arguments:
        lines += ["", *arguments]
    for panel, members in panels.items():
        lines += ["", f"**{panel}**", "", *members]
    return "\n".join([*lines, ""])


def _type_of(kind: Any) -> Any:
    """The type of one value: `int` for `int | None` and for `list[int]`."""
    if get_origin(kind) in (Union, UnionType):
        [kind] = [part for part in get_args(kind) if part is not type(None)]
    return get_args(kind)[0] if get_origin(kind) is list else kind


def _flags(name: str, kind: Any, info: ArgumentInfo | OptionInfo) -> str:
    # Within Annotated, typer takes the first spelling for a default.
    spelled = [s for s in (info.default, *(info.param_decls or ())) if s is not ...]
    if spelled:
        return ", ".join(map(str, spelled))
    flag = name.replace("_", "-")
    return f"--{flag}/--no-{flag}" if kind is bool else f"--{flag}"


def _default(flags: str, default: object) -> str:
    if default is inspect.Parameter.empty:
        return " Required."
    if default is None or default is False or default == "":
        return ""
    return f" Default: `{flags.partition('/')[0] if default is True else default}`."


def _plain_text(help_text: str | None) -> str:
    """Without rich's markup."""
    return Text.from_markup(help_text or "").plain


if __name__ == "__main__":
    from weft.cli.main import app

    sys.stdout.write(reference(app))

"""docs/cli.md, made from the commands themselves: `python -m weft.cli.reference > docs/cli.md`."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

import typer
from rich.text import Text
from typer.models import ArgumentInfo, OptionInfo

INTRODUCTION = """\
# Commands

Every command explains itself: `weft COMMAND --help`. Options of `weft serve` are spelled as vLLM
spells them where they mean the same. Sizes in bytes may end in K, M, G or T, powers of 1024.

`weft --install-completion` teaches your shell (bash, zsh, fish or PowerShell) to complete commands,
options and their values; `weft --show-completion` only prints what it would install.
"""
OPTIONS = "Options"
_VALUES = {int: "N", float: "NUMBER", str: "TEXT", Path: "PATH"}


@dataclass(frozen=True, slots=True)
class _Parameter:
    """One argument or option of a command."""

    name: str
    type: Any
    """Without Optional and list."""
    info: ArgumentInfo | OptionInfo
    default: object

    @property
    def panel(self) -> str:
        return self.info.rich_help_panel or OPTIONS

    @property
    def value(self) -> str:
        """What stands for its value: `N`, `auto|cpu|cuda`; empty for a switch."""
        if self.info.metavar:
            return self.info.metavar
        if get_origin(self.type) is Literal:
            return "|".join(map(str, get_args(self.type)))
        return _VALUES.get(self.type, "")

    @property
    def required(self) -> bool:
        return self.default is inspect.Parameter.empty

    @property
    def flags(self) -> str:
        # Within Annotated, typer takes the first spelling for a default.
        spelled = [s for s in (self.info.default, *(self.info.param_decls or ())) if s is not ...]
        if spelled:
            return ", ".join(map(str, spelled))
        flag = "--" + self.name.replace("_", "-")
        return f"{flag}/--no-{flag[2:]}" if self.type is bool else flag

    @property
    def line(self) -> str:
        """One item of a Markdown list."""
        help_text = _plain_text(self.info.help)
        if self.info.envvar:
            help_text += f" Also as {self.info.envvar} in the environment."
        if isinstance(self.info, ArgumentInfo):
            return f"- `{self.value}`: {help_text}{'' if self.required else self._default()}"
        shown = f"{self.flags} {self.value}".rstrip()
        return f"- `{shown}`: {help_text}{self._default()}"

    def _default(self) -> str:
        if self.required:
            return " Required."
        if self.default is None or self.default is False:
            return ""
        if self.default is True:
            return f" Default: `{self.flags.partition('/')[0]}`."
        return f" Default: `{self.default}`."


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
    parameters = list(_parameters(callback))
    arguments = [p for p in parameters if isinstance(p.info, ArgumentInfo)]
    options = [p for p in parameters if isinstance(p.info, OptionInfo) and not p.info.hidden]
    usage = " ".join(
        [path, *(p.value if p.required else f"[{p.value}]" for p in arguments), "[OPTIONS]"]
    )
    lines = [f"## {path}", "", _plain_text(inspect.getdoc(callback)), "", "```text", usage, "```"]
    if arguments:
        lines += ["", *(p.line for p in arguments)]
    panels = list(dict.fromkeys(p.panel for p in options))
    options.sort(key=lambda p: panels.index(p.panel))
    for panel, members in groupby(options, key=lambda p: p.panel):
        lines += ["", f"**{panel}**", "", *(p.line for p in members)]
    return "\n".join([*lines, ""])


def _parameters(callback: Callable[..., object]) -> Iterator[_Parameter]:
    for parameter in inspect.signature(callback, eval_str=True).parameters.values():
        kind, *notes = get_args(parameter.annotation)
        info = next(note for note in notes if isinstance(note, ArgumentInfo | OptionInfo))
        yield _Parameter(parameter.name, _type_of(kind), info, parameter.default)


def _plain_text(help_text: str | None) -> str:
    """Without rich's markup."""
    return Text.from_markup(help_text or "").plain


def _type_of(kind: Any) -> Any:
    """The type of one value: `int` for `int | None` and for `list[int]`."""
    if get_origin(kind) in (Union, UnionType):
        [kind] = [part for part in get_args(kind) if part is not type(None)]
    return get_args(kind)[0] if get_origin(kind) is list else kind


if __name__ == "__main__":
    from weft.cli.main import app

    sys.stdout.write(reference(app))

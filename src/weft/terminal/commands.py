"""Commands whose help cuts nothing, however narrow the terminal is."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import typer
from rich.cells import cell_len
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text
from typer.core import TyperArgument, TyperCommand, TyperGroup, TyperOption

Function = TypeVar("Function", bound=Callable[..., Any])

Row = tuple[str, Text]
"""A name, and what it is."""

NAME_WIDTH = 24
"""How wide the column of names is. A longer name has a line of its own, above its help."""
MOST_WIDTH = 100
INDENT = (0, 0, 0, 2)


class Command(TyperCommand):
    """A command whose options are listed in two columns, under the titles of their panels, and
    which says plainly what is wrong with a value. Texts must be UTF-8, as neither servers nor other
    processes could be told them; paths may be anything. An argument must not be empty."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            rest = super().parse_args(ctx, args)
        except typer.BadParameter as error:
            from pydantic import ValidationError

            if isinstance(error.__cause__, ValidationError):
                error.message = _what_is_wrong(error.__cause__.errors()[0])
            raise
        for param in self.params:
            given = ctx.params.get(param.name or "")
            for text in given if isinstance(given, list) else [given]:
                if isinstance(text, str) and re.search("[\ud800-\udfff]", text):
                    assert isinstance(param, TyperArgument | TyperOption)
                    raise typer.BadParameter("it must be UTF-8.", ctx, param)
                if text == "" and isinstance(param, TyperArgument):
                    raise typer.BadParameter("it must not be empty.", ctx, param)
        return rest

    def get_usage(self, ctx: Any) -> str:
        return super().get_usage(ctx).replace("{", "").replace("}", "").replace("......", "...")

    def format_help(self, ctx: Any, formatter: Any) -> None:
        _print_help(self, ctx, {})


class CommandGroup(TyperGroup):
    """Several commands, which are listed in the same way, under the titles of their panels."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        panels: dict[str, list[Row]] = {}
        for name in self.list_commands(ctx):
            command = self.get_command(ctx, name)
            if command is not None and not command.hidden:
                title = getattr(command, "rich_help_panel", None) or "Commands"
                about = Text.from_markup(_paragraphs(command.help or "")[0])
                panels.setdefault(title, []).append((name, about))
        _print_help(self, ctx, panels)


def _print_help(command: TyperCommand | TyperGroup, ctx: Any, panels: dict[str, list[Row]]) -> None:
    """Print what the command is for, the rows of `panels`, and its parameters in theirs. Options
    without a panel come last, unless one of them is required."""
    console = Console(highlight=False)
    console.width = min(console.width, MOST_WIDTH)
    console.print(Text(f"\n{command.get_usage(ctx)}\n", "bold"))
    about = Text.from_markup("\n\n".join(_paragraphs(command.help or "")))
    console.print(Padding(about, INDENT, expand=False))
    last = True
    for param in command.get_params(ctx):
        if isinstance(param, TyperArgument | TyperOption):
            record = param.get_help_record(ctx)
            is_option = isinstance(param, TyperOption)
            if record is not None:
                title = param.rich_help_panel or ("Options" if is_option else "Arguments")
                last = last and not (is_option and param.required)
                name = record[0] if is_option else param.metavar or record[0]
                row = (_spelled(name), _about(param.help or "", record[1]))
                panels.setdefault(title, []).append(row)
    if last and "Options" in panels:
        panels["Options"] = panels.pop("Options")
    for title, rows in panels.items():
        console.print(Text(f"\n{title}", "bold"))
        for name, told in rows:
            _print_row(console, Text(name, "cyan"), told)


def _paragraphs(text: str) -> list[str]:
    return [" ".join(part.split()) for part in inspect.cleandoc(text).split("\n\n")]


def _spelled(name: str) -> str:
    """The name of an option and of its value. A number is called N or NUMBER, a text TEXT, and a
    value that is one of a few is shown by these. A switch has no value."""
    for kind, shown in (("int", "N"), ("float", "NUMBER")):
        name = name.replace(f"<{kind} range>", shown).replace(f"<{kind}>", shown)
    return name.replace("<str>", "TEXT").replace("<bool>", "").strip()


def _what_is_wrong(found: Mapping[str, Any]) -> str:
    """What pydantic found wrong with the value of an option, in words for the command line."""
    value, bounds = f"{found['input']!r}", found.get("ctx", {})
    match found["type"]:
        case "int_parsing" | "int_type" | "int_from_float":
            return f"{value} is not a whole number."
        case "float_parsing" | "float_type":
            return f"{value} is not a number."
        case "greater_than_equal":
            return f"{value} is too small: it takes {bounds['ge']} or more."
        case "less_than_equal":
            return f"{value} is too large: it takes {bounds['le']} or less."
    return str(found["msg"]).removeprefix("Value error, ")


def _about(given: str, told: str) -> Text:
    """The help that was `given`, which may have markup, and behind it, in dim letters, what typer
    has `told` beyond it, such as the default."""
    more = re.sub(r"\[default: \(([^()]*)\)", r"[default: \1", told.removeprefix(given))
    return Text.from_markup(given).append(more, "dim")


def _print_row(console: Console, name: Text, about: Text) -> None:
    if cell_len(name.plain) > NAME_WIDTH:
        console.print(Padding(name, INDENT, expand=False))
        name = Text()
    row = Table.grid(padding=(0, 2))
    row.add_column(width=NAME_WIDTH)
    row.add_column(overflow="fold")
    row.add_row(name, about)
    console.print(Padding(row, INDENT, expand=False))


class Commands(typer.Typer):
    """An app whose commands are `Command`s in a `CommandGroup`."""

    def __init__(self, **more: Any) -> None:
        super().__init__(cls=CommandGroup, **more)

    def command(
        self, name: str | None = None, *, cls: type[TyperCommand] | None = None, **more: Any
    ) -> Callable[[Function], Function]:
        return super().command(name, cls=cls or Command, **more)

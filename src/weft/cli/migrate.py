"""`weft migrate`: translates the command of another server into one of Weft."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Annotated

import typer
from typer.core import TyperCommand, TyperGroup, TyperOption

from weft.cli.args import ServeFlags, parse_lora_modules
from weft.cli.other_flags import (
    BASE,
    LISTS,
    MISSING,
    NEEDLESS,
    RENAMED,
    REPEATED,
    STATED,
    SWITCHES,
    VALUES,
)
from weft.cli.other_servers import SERVERS, VARIABLES, ServerCommand, server_command
from weft.core.errors import ConfigError, WeftError
from weft.terminal.options import ending_in_one_line
from weft.terminal.plain import plain


@dataclass(frozen=True, slots=True)
class Translation:
    """A command for Weft, and what became of the flags that it does not have."""

    base: str
    args: list[str] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)
    """Flags without which nothing is lost, and why."""
    missing: dict[str, str] = field(default_factory=dict)
    """Flags that would be needed, and what to do instead."""
    notes: list[str] = field(default_factory=list)
    """What is different without a flag."""
    expanded: list[str] = field(default_factory=list)
    """Words of the command with variables, which a shell expands."""

    @property
    def command(self) -> str:
        return " ".join(["weft serve", *map(self.quoted, (self.base, *self.args))])

    def is_expanded(self, word: str) -> bool:
        """Whether a shell expands variables in the word, so that nobody knows yet what it says."""
        return "$" in word and any(word in other for other in self.expanded)

    def quoted(self, word: str) -> str:
        """The word as a shell takes it. Its variables are expanded if the command's were."""
        if self.is_expanded(word):
            return '"' + re.sub(r'["\\`]', r"\\\g<0>", word) + '"'
        return shlex.quote(word)


def migrate(
    context: typer.Context,
    command: Annotated[
        list[str],
        typer.Argument(
            metavar="COMMAND",
            help="The command that starts vLLM, SGLang or LoRAX, best in quotes: then the shell"
            " changes nothing in it.",
        ),
    ],
) -> None:
    """Translate the command that starts another server, and check its adapters.

    [bold]weft migrate[/] 'vllm serve ./llama --enable-lora --lora-modules sql=./sql'

    Exit status: 0 all translated, 1 a flag, variable or adapter is lost, 2 no command of these
    servers.
    """
    with ending_in_one_line(status=2):
        assert context.parent is not None
        whole = command[0] if len(command) == 1 else shlex.join(command)
        found = translated(whole, Options(context.parent.command))
    typer.echo(found.command)
    for title, flags in (("Left out", found.left_out), ("Missing", found.missing)):
        if flags:
            typer.echo(f"\n{title}:")
        for flag, why in flags.items():
            typer.echo(f"  {flag}: {why}")
    verdicts = list(_verdicts(found))
    if verdicts:
        typer.echo("\nAdapters:")
    for name, _, told in verdicts:
        typer.echo(f"  {name}: {plain(told)}")
    if found.notes:
        typer.echo("\n" + "\n".join(found.notes))
    typer.echo(f"\nTo see what fits into which GPUs: weft plan {found.quoted(found.base)}")
    raise typer.Exit(1 if found.missing or not all(good for _, good, _ in verdicts) else 0)


def instead_of(flag: str, own: Iterable[str]) -> str | None:
    """Advice on what to use instead of another server's flag, even if it is misspelled. None for a
    flag that resembles none of those, or one of `own` more."""
    others = {*BASE, *RENAMED, *NEEDLESS, *MISSING}.difference(own)
    if flag not in others:
        flag = next(iter(get_close_matches(flag, [*own, *others], n=1, cutoff=0.75)), "")
    if flag not in others:
        return None
    if flag in BASE:
        return "the base model is the command's argument: weft serve BASE"
    if flag in RENAMED:
        return f"{flag} of other servers is {RENAMED[flag]}"
    if flag in NEEDLESS:
        return f"leave it out, as {NEEDLESS[flag]}"
    return MISSING[flag]


class Options:
    """The options of `weft serve`."""

    def __init__(self, group: object) -> None:
        """`group`: all commands, as typer has them."""
        assert isinstance(group, TyperGroup)
        serve = group.commands["serve"]
        assert isinstance(serve, TyperCommand)
        self._serve = serve
        options = [param for param in serve.params if isinstance(param, TyperOption)]
        self._by_name = {name: o for o in options for name in (*o.opts, *o.secondary_opts)}

    def __contains__(self, name: str) -> bool:
        return name in self._by_name

    def takes_no_value(self, name: str) -> bool:
        return name in self._by_name and bool(self._by_name[name].is_flag)

    def trouble(self, name: str, values: list[str]) -> str | None:
        """Why an option does not take its values; None if it does."""
        if self.takes_no_value(name) == bool(values):
            return "it takes no value" if values else "its value is missing"
        given = [word for value in values for word in (name, value)] or [name]
        try:
            self._serve.make_context("serve", ["BASE", *given])
        except typer.BadParameter as error:
            return error.message
        return None


def translated(command: str, options: Options) -> Translation:
    """The command as one of Weft. Raises ConfigError."""
    server = server_command(command)
    bases, flags = list[tuple[str, str]](), list[tuple[str, list[str]]]()
    for name, values in _flags(server.args, options):
        if name in BASE or not name:
            bases += [(name, value) for value in values if value]
        else:
            flags.append((name, values))
    if not bases:
        raise ConfigError("the command names no base model", "command")
    found = Translation(bases[0][1], expanded=server.expanded)
    found.missing.update((name, VARIABLES[name]) for name in server.variables)
    for name, value in bases[1:]:
        if value != found.base:
            shown = shlex.join([name, value] if name else [value])
            found.missing[shown] = f"there is one base model, which is {found.base}"
    for name, values in flags:
        _translate(found, name, values, options)
    found.notes.extend(_notes(server, found.args))
    return found


def _notes(server: ServerCommand, args: list[str]) -> Iterator[str]:
    """Where Weft listens, if that is somewhere else than where the other server does."""
    if server.in_container:
        yield "Ports, volumes and other variables of the container are not translated."
    title, all_addresses, port = SERVERS[server.server]
    if all_addresses and "--host" not in args:
        yield (
            f"{title} listens on all addresses, and Weft on 127.0.0.1: add --host 0.0.0.0 for"
            " clients on other machines."
        )
    if port != ServeFlags.port and "--port" not in args and not server.in_container:
        yield (
            f"{title} listens on port {port}, and Weft on {ServeFlags.port}: add --port {port}"
            " to keep it."
        )


def _flags(words: list[str], options: Options) -> Iterator[tuple[str, list[str]]]:
    """Each flag with its values; an argument has no name."""
    known = {*BASE, *RENAMED, *NEEDLESS, *MISSING}
    base_is_first = bool(words) and not words[0].startswith("-")
    base_has_flag = any(word.partition("=")[0].replace("_", "-") in BASE for word in words)
    at = 0
    while at < len(words):
        word = words[at]
        at += 1
        if not word.startswith("-"):
            yield "", [word]
            continue
        name, equals, value = word.partition("=")
        name = name.replace("_", "-")
        if equals:
            yield name, [value]
            continue
        if name in SWITCHES or options.takes_no_value(RENAMED.get(name, name)):
            yield name, []
            continue
        is_unknown = name not in known and name not in options
        takes_all = name in LISTS or (is_unknown and (base_is_first or base_has_flag))
        values: list[str] = []
        while at < len(words) and not re.match(r"--?[A-Za-z]", words[at]):
            values.append(words[at])
            at += 1
            if not takes_all:
                break
        if name in REPEATED and values:
            yield from ((name, [value]) for value in values)
        else:
            yield name, values


def _translate(found: Translation, name: str, values: list[str], options: Options) -> None:
    own = RENAMED.get(name, name)
    shown = shlex.join([name, *values])
    values = [VALUES.get((own, value), value) for value in values]
    if name == "--allowed-origins":  # a list of JSON in vLLM
        values = [origin for value in values for origin in _items(value)]
        if len(values) > 1:
            for value in values:
                _translate(found, name, [value], options)
            return
    if name == "--lora-paths":  # one without a name is called by its path
        values = [_named(found, value) for value in values]
    if own in STATED and values and values[0] in STATED[own]:
        found.left_out[shown] = "that is so without it"
    elif name in NEEDLESS:
        found.left_out[shown] = NEEDLESS[name]
    elif name in MISSING:
        found.missing[shown] = MISSING[name]
    elif own not in options:
        found.missing[shown] = "Weft does not know it"
    elif any(map(found.is_expanded, values)):
        found.args.extend([own, *values])
    elif (trouble := options.trouble(own, values)) is not None:
        found.missing[shown] = trouble
    else:
        found.args.extend([own, *values])


def _items(value: str) -> list[str]:
    """The texts of a JSON list; any other value is one text."""
    try:
        items = json.loads(value)
    except ValueError:
        return [value]
    return [str(item) for item in items] if isinstance(items, list) else [value]


def _named(found: Translation, adapter: str) -> str:
    """An adapter as SGLang takes it, as `--lora-modules` does."""
    try:
        given = json.loads(adapter)
        own = json.dumps({"name": given["lora_name"], "path": given["lora_path"]})
    except (ValueError, KeyError, TypeError):
        return adapter if "=" in adapter or adapter[:1] == "{" else f"{adapter}={adapter}"
    if given.get("pinned"):
        again = 'load it again with "pinned": true when the server runs'
        found.missing[f"pinned of {given['lora_name']}"] = again
    return own


def _verdicts(found: Translation) -> Iterator[tuple[str, bool, str]]:
    """Each adapter of `--lora-modules`, whether it would be served, and why not."""
    from weft.cli.check import check_adapter
    from weft.core.config import MAX_RANK, LoraArgs

    inside = False
    for word in found.args:
        if word.startswith("-"):
            inside = word == "--lora-modules"
            continue
        try:
            modules = parse_lora_modules(word) if inside else []
        except ConfigError as error:
            yield word, False, error.message
            continue
        for module in modules:
            try:
                tolerance = LoraArgs().conversion_tolerance
                report = check_adapter(module.path, found.base, MAX_RANK, tolerance)
            except WeftError as error:
                yield module.name, False, f"not checked: {error.message}"
                continue
            reasons = "; ".join(refusal.message for refusal in report.refusals)
            yield module.name, report.served, "served" if report.served else f"refused: {reasons}"

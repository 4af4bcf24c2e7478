"""`weft release`, `rollback`, `history` and `tenants`: a shared registry on the command line. They
need no server: whoever can write to the registry may use them."""

from __future__ import annotations

import getpass
import os
import socket
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from weft.core.errors import AdapterNotFound, ConfigError
from weft.core.interrupts import interrupts_at_once
from weft.core.option_files import read_option_text
from weft.terminal.commands import Commands
from weft.terminal.options import ending_in_one_line

if TYPE_CHECKING:
    from weft.registry.records import Name, Route
    from weft.registry.shared import SharedRegistry

Registry = Annotated[
    str,
    typer.Option(
        "--registry", metavar="URI", help="The registry: a folder or s3://BUCKET/PREFIX (gs, az)."
    ),
]
NamedAdapter = Annotated[
    str, typer.Argument(metavar="NAME", help="The adapter's whole name, such as acme/sql.")
]
tenants = Commands(help="The tenants of a shared registry.", no_args_is_help=True)


def release(
    name: NamedAdapter,
    registry: Registry,
    to: Annotated[
        str | None,
        typer.Option(metavar="VERSION", help="The version that should answer, such as v8."),
    ] = None,
    canary: Annotated[
        float | None,
        typer.Option(
            metavar="PERCENT", help="The percentage of requests that --to gets. Default: all."
        ),
    ] = None,
    shadow: Annotated[
        str | None,
        typer.Option(
            metavar="VERSION",
            help="A version that runs the requests too. Its answers are discarded; only metrics"
            " compare it.",
        ),
    ] = None,
) -> None:
    """Send an adapter's requests to one of its versions, on all servers of a registry."""
    from weft.registry.releases import released

    with opened(registry) as shared:
        if to is None and shadow is None:
            raise ConfigError("weft release needs --to or --shadow with a version", "to")
        entry = _entry(shared, name)
        _move(shared, name, entry, released(name, entry, to, canary, shadow))


def rollback(name: NamedAdapter, registry: Registry) -> None:
    """Send an adapter's requests back to where they went before the version released last."""
    from weft.registry.releases import rolled_back

    with opened(registry) as shared:
        entry = _entry(shared, name)
        _move(shared, name, entry, rolled_back(name, entry))


def label(
    name: NamedAdapter,
    labels: Annotated[
        list[str],
        typer.Argument(
            metavar="KEY=VALUE...",
            help="Labels to set; KEY- removes one. weft.nodes=n1,n2: only these nodes of a fleet"
            " keep and serve the adapter. weft.node-labels=gpu=h200,zone=a: the same for nodes"
            " with all of these labels. weft.replicas=2: at least so many nodes keep it.",
        ),
    ],
    registry: Registry,
) -> None:
    """Label an adapter in a registry, for example with the nodes that should keep it.

    [bold]weft label[/] acme/sql weft.nodes=n1,n2 [bold]--registry[/] s3://models/registry
    """
    from weft.registry.records import Label

    with opened(registry) as shared:
        changes: dict[str, str | None] = {}
        for each in labels:
            key, equals, value = each.partition("=")
            if not (equals or key.endswith("-")) or not key.strip("-"):
                raise ConfigError(f"labels are KEY=VALUE or KEY-, got {each!r}", "labels")
            changes[key if equals else key[:-1]] = value if equals else None
        done = shared.change(Label(name, changes), actor())
        shown = " ".join(f"{k}={v}" for k, v in _entry(shared, name).labels.items())
        typer.echo(f"{name}: {shown or 'no labels'} (generation {done.generation})")


def history(name: NamedAdapter, registry: Registry) -> None:
    """Print the latest changes of an adapter's name, the newest first."""
    with opened(registry, writes=False) as shared:
        changes = shared.history(name)
        if not changes:
            raise AdapterNotFound(f"the registry has no adapter {name!r}", "name")
        for change in reversed(changes):
            when = datetime.fromtimestamp(change.time, UTC).isoformat(" ", "seconds")
            actor = f"  ({change.actor})" if change.actor else ""
            typer.echo(f"{change.generation:>5}  {when}  {change.what}{actor}")


@tenants.callback()
def _tenants() -> None:
    """The tenants of a shared registry."""


@tenants.command("import")
def import_tenants(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="A TOML file, as for weft serve --tenants.")
    ],
    registry: Registry,
) -> None:
    """Replace a registry's tenants by those of a file. Running servers follow."""
    from weft.registry.records import RemoveTenant, SetTenant
    from weft.registry.tenants_file import tenants_as_json

    with ending_in_one_line():
        text = read_option_text(file, str(file), "file")
        try:
            tables = tenants_as_json(text)
        except ConfigError as error:
            raise ConfigError(f"{file}: {error.message}", error.param) from None
        if not tables:  # the file may be half written
            message = "it has no tenants, and an import would make all tenants' keys invalid"
            raise ConfigError(f"{file}: {message}", "file")
    with opened(registry, make=True) as shared:
        known = shared.state.tenants
        changes = [
            SetTenant(name, settings)
            for name, settings in tables.items()
            if name not in known or known[name].settings != settings
        ]
        gone = [RemoveTenant(name) for name in known if name not in tables]
        under_way = [shared.submit(change, actor()) for change in gone]
        under_way += [shared.submit(change, actor()) for change in changes]
        for future in under_way:
            future.result()
        typer.echo(f"Tenants: {len(changes)} set, {len(gone)} removed, {len(tables)} in all")


@tenants.command("list")
def list_tenants(registry: Registry) -> None:
    """Print the names of a registry's tenants."""
    with opened(registry, writes=False) as shared:
        for name in sorted(shared.state.tenants):
            typer.echo(name)


@contextmanager
def opened(
    uri: str, *, make: bool = False, writes: bool = True, cleans: bool = False
) -> Iterator[SharedRegistry]:
    """A context with the registry of a URI; what goes wrong in it ends the command in one line. A
    folder that is not there is made only where that is asked for. To be read, it needs neither room
    nor the right to write; to be cleaned, it need not have room for more."""
    from weft.registry.shared import SharedRegistry
    from weft.registry.stores import is_new_folder, open_store, spare_room

    with ending_in_one_line():
        new = is_new_folder(uri)
        if new and not make:
            raise ConfigError(f"--registry {uri}: there is no such folder", "registry")
        with interrupts_at_once():
            store = open_store(uri)
        with spare_room(store) if cleans else nullcontext():
            with interrupts_at_once():
                shared = SharedRegistry(store, writes=writes)
            with closing(shared):
                yield shared
        if new:
            say_new(uri)


def say_new(uri: str) -> None:
    """Say on stderr that a registry was made, which nobody meant if the URI has a mistake."""
    typer.echo(
        f"--registry {uri}: there was no such folder, so a new registry begins there", err=True
    )


def _entry(shared: SharedRegistry, name: str) -> Name:
    entry = shared.state.names.get(name)
    if entry is None or entry.removed_at is not None:
        raise AdapterNotFound(f"the registry has no adapter {name!r}", "name")
    return entry


def _move(shared: SharedRegistry, name: str, entry: Name, route: Route) -> None:
    from weft.registry.records import Release, shown_route

    done = shared.change(Release(name, route, entry.generation), actor())
    typer.echo(f"{name}: {shown_route(route)} (generation {done.generation})")


def actor() -> str:
    """Who runs this command, for the history."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container may run as a user without a name
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"

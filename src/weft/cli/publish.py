"""`weft push` sends adapters to a server or into a shared registry; `weft registry` lists and
checks what is there, and removes what nobody needs any more."""

from __future__ import annotations

import io
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated

import typer

from weft.cli.asking import in_path, plain_url, unreachable
from weft.cli.releases import NamedAdapter, Registry, actor, opened, say_new
from weft.core.errors import AdapterError, ConfigError, RegistryUnavailable
from weft.core.interrupts import interrupts_at_once
from weft.terminal.commands import Commands
from weft.terminal.options import Adapter, ApiKey, ending_in_one_line, refusal_of
from weft.terminal.plain import plain_json

if TYPE_CHECKING:
    from weft.registry.records import Name

registry = Commands(help="Look at a shared registry and clean it up.", no_args_is_help=True)


@registry.callback()
def _registry() -> None:
    """Look at a shared registry and clean it up."""


def push(
    adapter: Adapter,
    name: NamedAdapter,
    url: Annotated[
        str | None, typer.Option(metavar="URL", help="The server to send the adapter to.")
    ] = None,
    registry: Annotated[
        str | None,
        typer.Option(metavar="URI", help="The registry to put the adapter into, without a server."),
    ] = None,
    base: Annotated[
        str | None,
        typer.Option(
            metavar="BASE",
            help="Refuse an adapter that does not fit this base model. Only the base's"
            " configuration is read.",
        ),
    ] = None,
    pinned: Annotated[
        bool,
        typer.Option(
            "--pinned",
            help="Keep it on the device even when nobody uses it. A push without this flag"
            " unpins the name, unless it has --no-release.",
        ),
    ] = False,
    release: Annotated[
        bool,
        typer.Option(help="Send all requests for the name to this version. Only with --registry."),
    ] = True,
    api_key: ApiKey = None,
) -> None:
    """Send an adapter to a server, or to all servers that share a registry.

    [bold]weft push[/] ./adapter acme/sql [bold]--registry[/] s3://models/registry
    """
    with ending_in_one_line():
        if (url is None) == (registry is None):
            raise ConfigError("give either --url or --registry", "url")
        if url is not None:
            if not release:
                raise ConfigError("--no-release needs --registry", "release")
            _send(adapter, name, url, base, pinned, api_key)
            return
        assert registry is not None
        _publish(adapter, name, registry, base, pinned, release)


def _publish(
    adapter: str, name: str, registry: str, base: str | None, pinned: bool, release: bool
) -> None:
    from weft.publishing import publish
    from weft.registry.stores import is_new_folder

    new = is_new_folder(registry)
    with interrupts_at_once():
        version = publish(
            *(registry, name, adapter), release=release, pinned=pinned, base=base, actor=actor()
        )
    typer.echo(f"{name}: sha256:{version.digest}, {version.num_bytes:,} bytes")
    if new:
        say_new(registry)


def _send(
    adapter: str, name: str, url: str, base: str | None, pinned: bool, api_key: str | None
) -> None:
    import httpx

    from weft.publishing import check, files_of_folder
    from weft.registry.unpack import tar_of

    files = files_of_folder(adapter)
    check(files, base)
    url = plain_url(url)
    streams = {each: io.BytesIO(content) for each, content in files.items()}
    try:
        answer = httpx.put(
            f"{url}/v1/adapters/{in_path(name)}",
            params={"pinned": "true"} if pinned else {},
            content=tar_of(streams),
            headers={"authorization": f"Bearer {api_key}"} if api_key else {},
            timeout=httpx.Timeout(60, read=600),
        )
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        raise unreachable(url, error) from None
    try:
        body = plain_json(answer.json())
        if answer.status_code != 200:
            message = refusal_of(answer.status_code, body["error"]["message"])
            raise AdapterError(f"{url} refuses it ({answer.status_code}): {message}")
        typer.echo(f"{body['lora_name']}: sha256:{body['digest']}")
    except (KeyError, TypeError, ValueError):
        said = f"{url} answers {answer.status_code}, but not as Weft does: {answer.text[:200]}"
        raise AdapterError(refusal_of(answer.status_code, said)) from None


@registry.command("ls")
def list_names(registry: Registry) -> None:
    """Print a registry's names, and the versions that their requests get."""
    from weft.registry.records import shown_route

    with opened(registry, writes=False) as shared:
        for name, entry in sorted(shared.state.names.items()):
            if entry.removed_at is None:
                newest = max(entry.versions, default=0)
                labels = "".join(f"  {key}={value}" for key, value in entry.labels.items())
                typer.echo(f"{name}  {shown_route(entry.route)}  (newest v{newest}){labels}")


@registry.command()
def verify(registry: Registry) -> None:
    """Read the content of all versions of a registry. Exit status: 1 if one is missing or
    damaged."""
    from weft.registry.blobs import Blobs
    from weft.registry.sweep import needed_by

    with opened(registry, writes=False) as shared:
        blobs, bad = Blobs(shared.store), 0
        names = dict(shared.state.names.items())
        needed = sorted(needed_by(names.values(), time.time()))
        for digest in needed:
            try:
                blobs.verify(digest)
            except (AdapterError, RegistryUnavailable) as error:
                shared.poll()  # ends the command if the whole store does not answer
                bad += 1
                typer.echo(f"sha256:{digest} of {_users(names, digest)}: {error}")
    typer.echo(f"{len(needed) - bad} contents are whole, {bad} are missing or damaged")
    raise typer.Exit(1 if bad else 0)


def _users(names: Mapping[str, Name], digest: str) -> str:
    """The versions with this content."""
    versions = ((name, n, v) for name, entry in names.items() for n, v in entry.versions.items())
    return ", ".join(f"{name}@v{n}" for name, n, version in versions if version.digest == digest)


@registry.command()
def gc(
    registry: Registry,
    delete: Annotated[
        bool,
        typer.Option(
            "--delete", help="Really remove, instead of only listing what would be removed."
        ),
    ] = False,
) -> None:
    """Remove contents and log entries that nobody needs.

    This takes two runs, at least an hour apart: the first marks contents, the second removes them.
    A content is kept for a day after it was published or its name was removed, and as long as a
    server serves it. Run this command from time to time, such as every few hours.
    """
    from weft.registry.sweep import GRACE_S, Collector

    words = {
        "doom": ("would be marked", "marked"),
        "wait": ("marked already", "marked already"),
        "sweep": ("would be removed", "removed"),
        "rescued": ("being published again", "being published again"),
    }
    with opened(registry, writes=delete, cleans=delete) as shared:

        def names() -> list[Name]:
            shared.poll()
            return [entry for _, entry in shared.state.names.items()]

        found = Collector(shared.store).run(names, delete)
        for each in found:
            size = f"{each.num_bytes:,} bytes"
            typer.echo(f"sha256:{each.digest}  {size}  {words[each.step][delete]}")
        keys = shared.collect(delete)
    typer.echo(
        f"{len(found)} contents, {len(keys)} keys of the log"
        + ("" if delete else "; nothing was changed, as --delete was not given")
    )
    if delete and any(each.step == "doom" for each in found):
        typer.echo(f"What is marked can be removed {GRACE_S / 60:.0f} minutes from now.")

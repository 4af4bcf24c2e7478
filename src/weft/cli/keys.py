"""`weft key`: keys for the tenants of a server."""

from __future__ import annotations

import hashlib
import json
import re
import secrets
from datetime import UTC, datetime, timedelta
from typing import Annotated

import typer

from weft.core.errors import ConfigError
from weft.terminal.commands import Commands
from weft.terminal.options import ending_in_one_line

key = Commands(help="Make keys for tenants.", no_args_is_help=True)


@key.callback()
def _key() -> None:
    """Make keys for tenants."""


@key.command()
def new(
    tenant: Annotated[str, typer.Argument(metavar="TENANT", help="The tenant that gets the key.")],
    role: Annotated[
        list[str] | None,
        typer.Option(
            metavar="use|publish|admin",
            help="What the key may do. use: use models. publish: load and unload the tenant's"
            " adapters. admin: everything. Repeatable. Default: use.",
        ),
    ] = None,
    key_id: Annotated[
        str | None,
        typer.Option("--id", metavar="ID", help="The key's name in logs. Default: a new name."),
    ] = None,
    days: Annotated[
        int | None,
        typer.Option(
            metavar="N", help="Days until the key expires. Default: never.", min=1, max=36_500
        ),
    ] = None,
) -> None:
    """Print a new random key, and the lines for it in a tenants' file.

    `weft serve --tenants` reads the file, or `weft tenants import` takes it into a registry. The
    key itself is stored nowhere: the file holds only its digest.
    """
    from weft.registry.tenants_file import parse_tenants

    secret = f"weft-{secrets.token_urlsafe(32)}"
    roles = ", ".join(f'"{each}"' for each in dict.fromkeys(role or ["use"]))
    bare = re.fullmatch(r"[A-Za-z0-9_-]+", tenant)
    key_id = key_id or f"{tenant}-{secrets.token_hex(4)}"
    lines = [
        f"[[tenants.{tenant if bare else json.dumps(tenant)}.keys]]",
        f"id = {json.dumps(key_id)}",
        f'sha256 = "{hashlib.sha256(secret.encode()).hexdigest()}"',
        f"roles = [{roles}]",
    ]
    if days is not None:
        expires = datetime.now(UTC) + timedelta(days=days)
        lines.append(f"expires = {expires.isoformat(timespec='seconds')}")
    with ending_in_one_line():
        for each in role or ():
            if each not in ("use", "publish", "admin"):
                raise ConfigError(f"--role takes use, publish or admin, got {each!r}")
        try:
            parse_tenants("\n".join(lines))
        except ConfigError as error:
            raise ConfigError(f"the file can't have such a key: {error.message}") from None
    typer.echo(f"{secret}\n\n" + "\n".join(lines))

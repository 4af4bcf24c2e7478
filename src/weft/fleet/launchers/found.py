"""Finds nodes that somebody else has started, such as Kubernetes or systemd."""

from __future__ import annotations

import re
import socket
from contextlib import suppress
from pathlib import Path

from weft.core.errors import ConfigError, Unreachable
from weft.fleet.launchers import Placed, State
from weft.fleet.launchers.local import is_ready


def find_urls(where: str) -> list[str]:
    """The URLs of nodes from a list `HOST:PORT,...`, a file with one in each line, or a name in DNS
    that has an address for each. Raises ConfigError, Unreachable."""
    text, path = where.replace(",", "\n"), Path(where)
    try:
        with suppress(OSError):  # a long list is no path
            if path.is_file():
                text = path.read_text("utf-8")
    except UnicodeDecodeError:
        raise ConfigError(f"--at {where}: it is not UTF-8", "at") from None
    lines = [line.partition("#")[0].strip() for line in text.splitlines()]
    if not any(lines):
        raise ConfigError(f"--at takes HOST:PORT of nodes, and {where!r} names none", "at")
    return sorted({url for line in lines if line for url in _resolved(line)})


def _resolved(given: str) -> list[str]:
    host, _, port = given.removeprefix("http://").rstrip("/").rpartition(":")
    is_port = re.fullmatch("[0-9]{1,5}", port) and int(port) <= 65535
    if not host or "/" in host or not is_port:
        raise ConfigError(f"--at takes HOST:PORT of nodes, got {given!r}", "at")
    try:
        infos = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise Unreachable(f"can't find {host}: {why}") from error
    hosts = {str(info[4][0]) for info in infos}
    return [f"http://[{each}]:{port}" if ":" in each else f"http://{each}:{port}" for each in hosts]


def find_nodes(where: str) -> list[Placed]:
    """The nodes at these places, as `find_urls` takes them. Their names are not known."""
    states: dict[bool | None, State] = {True: "up", False: "not ready", None: "no answer"}
    return [
        Placed(url.removeprefix("http://"), url, states[is_ready(url)]) for url in find_urls(where)
    ]

"""Says which ports of this machine can't be had, before anything slow happens."""

from __future__ import annotations

import socket

from weft.core.errors import ConfigError


def check_free(host: str, port: int, flag: str) -> None:
    """Raises ConfigError if this port is taken, or the host is no address of this machine. A host
    that names a network interface is not checked. `flag`: which one has the port."""
    try:
        found = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return
    family, kind, protocol, _, address = found[0]
    try:
        with socket.socket(family, kind, protocol) as tried:
            tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            tried.bind(address)
    except OSError as error:
        raise port_refused(host, port, flag, error) from error


def port_refused(host: str, port: int, flag: str, error: OSError) -> ConfigError:
    """The error for a port that this flag has, and that can't be had."""
    message = f"can't listen on {host}:{port}: {error.strerror or error} ({flag})"
    return ConfigError(message, flag.removeprefix("--").replace("-", "_"))

"""Says which ports of this machine can't be had, before anything slow happens."""

from __future__ import annotations

import errno
import socket
from collections.abc import Mapping
from itertools import combinations

from weft.core.errors import ConfigError


def check_free(host: str, port: int, flag: str) -> int:
    """The port itself; for 0, one that is free. Raises ConfigError if it is taken, or the host is
    no address of this machine. A host that names a network interface is not checked. `flag`: which
    one has the port."""
    try:
        found = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return port
    family, kind, protocol, _, address = found[0]
    try:
        with socket.socket(family, kind, protocol) as tried:
            tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            tried.bind(address)
            return int(tried.getsockname()[1])
    except OSError as error:
        raise port_refused(host, port, flag, error) from error


def check_different(places: Mapping[str, tuple[str, int]]) -> None:
    """Raises ConfigError if two flags have the same port. `places`: the host and port of each flag
    in use; port 0 is any free one. Both could be bound, but only one could listen."""
    for (one, (host, port)), (other, (beside, again)) in combinations(places.items(), 2):
        if port and port == again and (host == beside or {host, beside} & {"0.0.0.0", "::", "*"}):
            message = f"{other} has the same port as {one}: {port}"
            raise ConfigError(message, other.removeprefix("--").replace("-", "_"))


def port_refused(host: str, port: int, flag: str, error: OSError) -> ConfigError:
    """The error for a port that this flag has, and that can't be had. If it is the host that this
    machine has not, the error names the flag of the host."""
    if error.errno == errno.EADDRNOTAVAIL:
        flag = flag.replace("port", "host")
    shown = f"[{host}]" if ":" in host and host[0] != "[" else host
    message = f"can't listen on {shown}:{port}: {error.strerror or error} ({flag})"
    return ConfigError(message, flag.removeprefix("--").replace("-", "_"))

"""Downloads files from the web, within a limit of bytes. Interrupted downloads are continued. Hosts
inside the operator's network are reached only if the operator has named them.

A name is resolved once, and the connection goes to one of the addresses that were checked. So a
name that resolves to another address a moment later can't evade the check.
"""

from __future__ import annotations

import ipaddress
import logging
import socket
import ssl
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from http import HTTPStatus
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import urljoin, urlunsplit

import httpcore

from weft.core.errors import AdapterError, AdapterInvalid, AdapterPathRefused, AdapterUnavailable
from weft.registry.allowed import Allowed, shown

logger = logging.getLogger(__name__)

MAX_REDIRECTS = 5
ATTEMPTS = 5
"""How often a download is started or continued."""
CONNECT_S, READ_S = 10.0, 30.0
"""How long a server may take to be reached, and to send the next piece."""
MIN_BYTES_PER_S = 64 << 10
"""A download that is slower than this on the whole, after READ_S, is given up."""
NOTHING_THERE = (HTTPStatus.NOT_FOUND, HTTPStatus.GONE, HTTPStatus.FORBIDDEN)
_MOVED = (301, 302, 303, 307, 308)


class Web:
    """Downloads from web servers; for any thread."""

    def __init__(self, allowed: Allowed) -> None:
        self._allowed = allowed

    def download(self, uri: str, into: Path, max_bytes: int) -> bool:
        """Write what is at a URI to a new file; False if the server says that nothing is there.

        Raises AdapterPathRefused (it, or where it leads, is not allowed), AdapterInvalid (it is
        larger), AdapterUnavailable (the server does not answer, or breaks off again and again).
        """
        begun_s, tag, why = time.monotonic(), "", ""
        with into.open("wb") as file:
            for attempt in range(ATTEMPTS):
                time.sleep(0.2 * attempt)
                try:
                    with self._asked(uri, file.tell() if tag else 0, tag) as answer:
                        if answer.status in NOTHING_THERE:
                            return False
                        if not (answer.status == 206 and _goes_on(answer, file.tell())):
                            file.seek(0)
                            file.truncate()
                        tag = _header(answer, b"etag") or _header(answer, b"last-modified")
                        _write(answer, file, max_bytes, begun_s)
                        return True
                except AdapterError:
                    raise
                except (httpcore.NetworkError, httpcore.TimeoutException, OSError) as error:
                    why = str(error) or type(error).__name__
                except httpcore.ProtocolError as error:  # the connection broke off, most often
                    why = str(error)
                logger.info("%s: %s", shown(uri), why)
        raise AdapterUnavailable(f"{shown(uri)} can't be fetched: {why}", "lora_path")

    @contextmanager
    def _asked(self, uri: str, start: int, tag: str) -> Iterator[httpcore.Response]:
        """The answer, after redirects, to a request for a URI's content from byte `start` on."""
        headers: dict[bytes | str, bytes | str]
        headers = {"accept-encoding": "identity", "user-agent": "weft"}
        if start:
            headers |= {"range": f"bytes={start}-", "if-range": tag.encode("latin-1")}
        for _ in range(MAX_REDIRECTS + 1):
            parts = self._allowed.check(uri)
            if parts.scheme not in ("https", "http"):
                raise AdapterPathRefused(f"{shown(uri)!r} is no https:// URI", "lora_path")
            backend = _Checked(inside=self._allowed.may_be_inside(parts))
            tls = _tls() if parts.scheme == "https" else None
            with httpcore.ConnectionPool(tls, network_backend=backend) as pool:
                timeout = dict.fromkeys(("connect", "read", "write", "pool"), READ_S)
                timeout["connect"] = CONNECT_S
                url = urlunsplit(parts._replace(fragment=""))
                with pool.stream(
                    "GET", url, headers=headers, extensions={"timeout": timeout}
                ) as answer:
                    if answer.status not in _MOVED:
                        _check_status(answer, uri)
                        yield answer
                        return
                    uri = _moved_to(uri, _header(answer, b"location"))
        message = f"{shown(uri)} redirects more than {MAX_REDIRECTS} times"
        raise AdapterUnavailable(message, "lora_path")


def _moved_to(uri: str, location: str) -> str:
    try:
        return urljoin(uri, location)
    except ValueError as error:
        message = f"{shown(uri)} redirects to what is no URI: {error}"
        raise AdapterUnavailable(message, "lora_path") from None


def _check_status(answer: httpcore.Response, uri: str) -> None:
    if answer.status not in (200, 206, *NOTHING_THERE):
        message = f"{shown(uri)} can't be fetched: the server answers {answer.status}"
        raise AdapterUnavailable(message, "lora_path")


def _write(answer: httpcore.Response, file: BinaryIO, max_bytes: int, begun_s: float) -> None:
    for piece in answer.iter_stream():
        file.write(piece)
        if file.tell() > max_bytes:
            message = f"it is larger than {max_bytes} bytes, which an adapter may have here"
            raise AdapterInvalid(message, "lora_path")
        if time.monotonic() - begun_s > READ_S + file.tell() / MIN_BYTES_PER_S:
            raise AdapterUnavailable("the server sends it too slowly", "lora_path")


def _goes_on(answer: httpcore.Response, start: int) -> bool:
    return _header(answer, b"content-range").startswith(f"bytes {start}-")


def _header(answer: httpcore.Response, name: bytes) -> str:
    found = (value for key, value in answer.headers if key.lower() == name)
    return next(found, b"").decode("latin-1")


@cache
def _tls() -> ssl.SSLContext:
    """The certificates that the system trusts, which take long to read."""
    return ssl.create_default_context()


class _Checked(httpcore.NetworkBackend):
    """Connects to public addresses only, unless `inside`."""

    def __init__(self, inside: bool) -> None:
        self._inside = inside
        self._backend = httpcore.SyncBackend()

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.NetworkStream:
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except OSError as error:
            raise httpcore.ConnectError(f"{host}: {error.strerror}") from None
        except UnicodeError:
            raise httpcore.ConnectError(f"{host} is no name of a host") from None
        addresses = [str(address[4][0]).partition("%")[0] for address in found]
        if not self._inside and not all(map(is_public, addresses)):
            raise AdapterPathRefused(
                f"{host} has an address inside of this network; the operator has to name it with"
                " --allow-sources",
                "lora_path",
            )
        failed: Exception = httpcore.ConnectError(f"{host} has no address")
        for address in dict.fromkeys(addresses):
            try:
                return self._backend.connect_tcp(
                    address, port, timeout, local_address, socket_options
                )
            except (httpcore.ConnectError, httpcore.ConnectTimeout) as error:
                failed = error
        raise failed


def is_public(address: str) -> bool:
    """Whether an address can be reached from everywhere: it is not private, of this machine, of
    the link, of a cloud's services, for many, or one that stands for such an address."""
    ip = ipaddress.ip_address(address)
    if isinstance(ip, ipaddress.IPv6Address):
        inner = ip.ipv4_mapped or ip.sixtofour or (ip.teredo and ip.teredo[1])
        if ip in _NAT64:
            inner = ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)
        if inner:
            return is_public(str(inner))
    return ip.is_global and not ip.is_multicast and not ip.is_reserved


_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")

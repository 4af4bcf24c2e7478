"""The operator's rules for the URIs that adapters may be fetched from."""

from __future__ import annotations

from collections.abc import Iterable
from urllib.parse import SplitResult, unquote, urlsplit

from weft.core.errors import AdapterPathRefused, ConfigError

HUB, WEB, BUCKETS = "hf", ("https", "http"), ("s3", "gs", "az")
SCHEMES = (HUB, *WEB, *BUCKETS)
_PORTS = {"https": 443, "http": 80}
MAX_URI_LENGTH = 4096


class Allowed:
    """Schemes, and URIs below which everything is allowed. A host that the operator names in such
    a URI may be inside of the network; other hosts must have public addresses."""

    def __init__(self, entries: Iterable[str] = ()) -> None:
        """Such as `hf`, `https`, `s3://bucket/adapters`. Raises ConfigError."""
        self._schemes: set[str] = set()
        self._below: list[SplitResult] = []
        self._inside = False
        for entry in entries:
            scheme = entry.partition("://")[0]
            if scheme not in SCHEMES or (scheme == HUB and entry != HUB):
                names = ", ".join(SCHEMES)
                message = f"--allow-sources takes {names}, or a URI such as s3://bucket/folder"
                raise ConfigError(f"{message}, got {entry!r}", "allow_sources")
            if entry == scheme:
                self._schemes.add(scheme)
            else:
                self._below.append(_split(entry))

    @classmethod
    def everything(cls) -> Allowed:
        """Everything: for those who run this machine."""
        allowed = cls(SCHEMES)
        allowed._inside = True
        return allowed

    def scheme(self, scheme: str) -> bool:
        """Whether all URIs of this scheme are allowed."""
        return scheme in self._schemes

    def check(self, uri: str) -> SplitResult:
        """The parts of a URI that is allowed. Raises AdapterPathRefused."""
        parts = _split(uri)
        if not (parts.scheme in self._schemes or any(_is_below(parts, b) for b in self._below)):
            raise _refused(uri, "is not among the sources that --allow-sources names")
        return parts

    def may_be_inside(self, parts: SplitResult) -> bool:
        """Whether the operator has named this very host and port."""
        return self._inside or any(_place(parts) == _place(below) for below in self._below)


def shown(uri: str) -> str:
    """A URI without the parts that may hold a password or a token; a path is returned as it is."""
    return uri if "://" not in uri else uri.partition("#")[0].partition("?")[0]


def _split(uri: str) -> SplitResult:
    if len(uri) > MAX_URI_LENGTH or not uri.isascii() or not uri.isprintable() or " " in uri:
        raise _refused(uri, f"must be at most {MAX_URI_LENGTH} plain ASCII characters")
    try:
        parts = urlsplit(uri)
        _ = parts.port
    except ValueError as error:
        raise _refused(uri, f"is no URI: {error}") from None
    if not parts.hostname:
        raise _refused(uri, "names no host or bucket")
    if parts.username is not None or parts.password is not None:
        raise _refused("it", "must not hold a user or a password")
    if {".", ".."} & set(unquote(parts.path).split("/")) or "\\" in unquote(parts.path):
        raise _refused(uri, "must be without '.' and '..'")
    return parts


def _place(parts: SplitResult) -> tuple[str, str | None, int | None]:
    return parts.scheme, parts.hostname, parts.port or _PORTS.get(parts.scheme)


def _is_below(parts: SplitResult, below: SplitResult) -> bool:
    folder = below.path.rstrip("/")
    return _place(parts) == _place(below) and (
        parts.path == folder or parts.path.startswith(f"{folder}/")
    )


def _refused(uri: str, why: str) -> AdapterPathRefused:
    return AdapterPathRefused(f"lora_path {shown(uri)[:200]!r} {why}", "lora_path")

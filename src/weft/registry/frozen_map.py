"""An immutable mapping whose changed copies share most of their memory with it.

Keys are spread over many small dicts by their hash. A copy with another value makes only one of
these anew, which takes some microseconds with 100,000 keys.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TypeVar, overload

_V = TypeVar("_V")
_D = TypeVar("_D")
_PARTS = 256


class FrozenMap(Mapping[str, _V]):
    """A mapping from strings that never changes. Any thread may read it."""

    __slots__ = ("_len", "_parts")

    def __init__(self, items: Mapping[str, _V] | None = None) -> None:
        empty: dict[str, _V] = {}
        parts = [empty] * _PARTS
        for key, value in (items or {}).items():
            at = hash(key) % _PARTS
            if parts[at] is empty:
                parts[at] = {}
            parts[at][key] = value
        self._parts = tuple(parts)
        self._len = len(items or ())

    def __getitem__(self, key: str) -> _V:
        return self._parts[hash(key) % _PARTS][key]

    @overload
    def get(self, key: str, /) -> _V | None: ...
    @overload
    def get(self, key: str, default: _V | _D, /) -> _V | _D: ...
    def get(self, key: str, default: _D | None = None, /) -> _V | _D | None:
        return self._parts[hash(key) % _PARTS].get(key, default)

    def __contains__(self, key: object) -> bool:
        return key in self._parts[hash(key) % _PARTS]

    def __iter__(self) -> Iterator[str]:
        for part in self._parts:
            yield from part

    def __len__(self) -> int:
        return self._len

    def having(self, key: str, value: _V) -> FrozenMap[_V]:
        """A copy in which `key` has this value."""
        part = self._parts[hash(key) % _PARTS].copy()
        part[key] = value
        return self._copy(key, part)

    def lacking(self, key: str) -> FrozenMap[_V]:
        """A copy without `key`, which may be missing already."""
        part = self._parts[hash(key) % _PARTS].copy()
        part.pop(key, None)
        return self._copy(key, part)

    def plain(self) -> dict[str, _V]:
        """All of it as a dict."""
        together: dict[str, _V] = {}
        for part in self._parts:
            if part:
                together.update(part)
        return together

    def changed_since(self, old: FrozenMap[_V]) -> frozenset[str]:
        """The keys whose values differ between an older table and this one. If this one was made
        from it, the time goes by how much was changed."""
        changed: set[str] = set()
        for before, after in zip(old._parts, self._parts, strict=True):
            if before is not after:
                keys = before.keys() | after.keys()
                changed.update(k for k in keys if before.get(k) != after.get(k))
        return frozenset(changed)

    def _copy(self, key: str, part: dict[str, _V]) -> FrozenMap[_V]:
        at = hash(key) % _PARTS
        parts = list(self._parts)
        parts[at] = part
        copy: FrozenMap[_V] = FrozenMap.__new__(FrozenMap)
        copy._parts = tuple(parts)
        copy._len = self._len + len(part) - len(self._parts[at])
        return copy

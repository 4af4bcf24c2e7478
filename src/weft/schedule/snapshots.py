"""Owns the snapshots of recurrent states. Pure Python, no tensors.

A snapshot is a copy of a sequence's state at the end of a block. It is known by the key of that
block, which includes the adapter's version and the salt, and is of use as long as the blocks up to
there are in the prefix index:

    free ── begin(key) ──▶ pending ── end(number, True) ──▶ kept, by key ── drop(key) ──▶ free
      ▲                       └─── end(number, False) ───┐        │ the one used longest ago,
      └──────────────────────────────────────────────────┴────────┘ when another is begun

A pending snapshot is written at the end of a planned step. A step reads snapshots at its begin, so
the number of a snapshot that it reads may be given out again in the same step.
"""

from __future__ import annotations

from collections import OrderedDict


class Snapshots:
    """Owner of `num_snapshots` places for states. Their numbers begin at `first`, behind the
    numbers of the states that sequences hold."""

    def __init__(self, first: int, num_snapshots: int) -> None:
        self._numbers = range(first, first + num_snapshots)
        self._free = list(reversed(self._numbers))
        self._pending: dict[int, bytes] = {}
        self._kept: OrderedDict[bytes, int] = OrderedDict()
        """By key, the one used longest ago first."""

    def __contains__(self, key: bytes) -> bool:
        return key in self._kept

    def use(self, key: bytes) -> int:
        """The number of a snapshot that is kept; it counts as used now."""
        self._kept.move_to_end(key)
        return self._kept[key]

    def begin(self, key: bytes) -> int | None:
        """The number of a place for a new snapshot; call `end` afterwards. None if the key is kept
        or pending already, or if all places are pending."""
        if key in self._kept or key in self._pending.values():
            return None
        if self._free:
            number = self._free.pop()
        elif self._kept:
            _, number = self._kept.popitem(last=False)
        else:
            return None
        self._pending[number] = key
        return number

    def end(self, number: int, kept: bool) -> None:
        """End what was begun. `kept`: whether it was written and is of use; else it is dropped."""
        key = self._pending.pop(number)
        if kept:
            self._kept[key] = number
        else:
            self._free.append(number)

    def key_of(self, number: int) -> bytes:
        """The key of a snapshot that is pending."""
        return self._pending[number]

    def drop(self, key: bytes) -> None:
        """Drop a snapshot, if there is one with this key, as its block is gone."""
        number = self._kept.pop(key, None)
        if number is not None:
            self._free.append(number)

    def check(self) -> None:
        """Raise AssertionError unless all invariants hold."""
        numbers = [*self._free, *self._pending, *self._kept.values()]
        assert sorted(numbers) == list(self._numbers)
        assert not self._kept.keys() & set(self._pending.values())

    @property
    def keys(self) -> frozenset[bytes]:
        """The keys of all that are kept."""
        return frozenset(self._kept)

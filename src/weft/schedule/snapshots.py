"""Owns the snapshots of recurrent states. Pure Python, no tensors.

A snapshot is what the tokens up to the end of a block have made of a sequence's state. It is known
by the key of that block, in which the adapter's version and the salt are, and is of use as long as
the blocks up to there are in the prefix index:

    free ── begin(key) ──▶ pending ── end(number, True) ──▶ kept, by key ── drop(key) ──▶ free
      ▲                       └─── end(number, False) ───┐        │ the one used longest ago,
      └──────────────────────────────────────────────────┴────────┘ when another is begun

What is pending is written at the end of a step that is planned. As steps run in their order, a
number may be given out anew in the step that still reads it, which it does at its begin.
"""

from __future__ import annotations

from collections import OrderedDict


class Snapshots:
    """Owner of `num_snapshots` places for states. Their numbers begin at `first`, behind those of
    the states that sequences hold."""

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
        """Give out a place for a new snapshot, whose next call is `end`. None if it is kept or
        pending already, or if all places are pending."""
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
        """What was begun has been written and is of use, or not."""
        key = self._pending.pop(number)
        if kept:
            self._kept[key] = number
        else:
            self._free.append(number)

    def key_of(self, number: int) -> bytes:
        """The key of a snapshot that is pending."""
        return self._pending[number]

    def drop(self, key: bytes) -> None:
        """The blocks that a snapshot needs are gone."""
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

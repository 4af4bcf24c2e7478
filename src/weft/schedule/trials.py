"""Finds the requests that make steps fail, by running them in smaller and smaller groups.

    a step of a b c d fails       groups  [a b] [c d]      the last one is tried first
    c d are tried, and fail       groups  [a b] [c] [d]
    d is tried, and fails         d is to blame
    c is tried, and runs          c is cleared
    a b are tried, and run        no group is left: all is as before

Meanwhile other waiting requests are not admitted, and cleared requests keep running.
"""

from __future__ import annotations

from collections.abc import Collection

MAX_IN_VAIN = 3
"""How often in a row trials may end without finding a request to blame."""
MAX_BLAMED = 8
"""How many requests in a row may be to blame without a successful step in between."""


class Trials:
    """Owner of the groups that are still to be tried."""

    def __init__(self) -> None:
        self.groups: list[list[str]] = []
        """None of them is empty; the last one is on trial."""
        self._in_vain = self._blamed = 0
        self._found = False
        """Whether the current trials have found a request to blame."""

    @property
    def quiet(self) -> bool:
        """Whether all is well, so that `passed` need not be called."""
        return not (self.groups or self._in_vain or self._blamed)

    @property
    def hopeless(self) -> bool:
        """Whether steps seem to fail whatever requests are in them."""
        return self._in_vain >= MAX_IN_VAIN or self._blamed >= MAX_BLAMED

    def admits(self, request_id: str) -> bool:
        """Whether a request may be admitted now."""
        return not self.groups or request_id in self.groups[-1]

    def failed(self, request_ids: Collection[str]) -> str | None:
        """Note that a step with these requests failed. Returns the one to blame, if it is known."""
        suspects = self._take(request_ids) or [*dict.fromkeys(request_ids)]
        if len(suspects) == 1:
            self._found = True
            self._blamed += 1
            self._settle()
            return suspects[0]
        middle = len(suspects) // 2
        rest = [[each for each in group if each not in suspects] for group in self.groups]
        groups = [*rest, suspects[:middle], suspects[middle:]]
        self.groups = [group for group in groups if group]
        return None

    def passed(self, request_ids: Collection[str]) -> None:
        """Note that a step with these requests ran. If it had none of the group on trial, none of
        that group can run now, and the group is dropped."""
        if request_ids:
            self._blamed = 0
        if self.groups:
            if not self._take(request_ids):
                self.groups.pop()
            self._settle()
        elif request_ids:
            self._in_vain = 0

    def _take(self, request_ids: Collection[str]) -> list[str]:
        """Remove these requests from the group on trial. Returns those that were in it."""
        group = self.groups.pop() if self.groups else []
        taken = [each for each in group if each in request_ids]
        if len(taken) < len(group):
            self.groups.append([each for each in group if each not in request_ids])
        return taken

    def _settle(self) -> None:
        """Count the outcome of the trials, if they are over."""
        if not self.groups:
            self._in_vain = 0 if self._found else self._in_vain + 1
            self._found = False

    def check(self) -> None:
        """Raise AssertionError unless the invariants hold."""
        assert all(self.groups)
        ids = [each for group in self.groups for each in group]
        assert len(set(ids)) == len(ids), "in two groups"

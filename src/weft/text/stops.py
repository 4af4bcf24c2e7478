"""Stop strings over text that comes in pieces."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Passes text on up to the first stop string that is complete.

    Text that may be the beginning of a stop string is held back. The stop that ends first wins,
    of those the longest, however the text was cut into pieces. Each stop string is matched by
    its own Knuth-Morris-Pratt automaton: constant time a character, and the states say how much
    of the text's end must wait.
    """

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        self._stops = tuple(stops)
        self._include = include
        self._borders = [_borders(stop) for stop in self._stops]
        self._states = [0] * len(self._stops)
        self._first_chars = {stop[0] for stop in self._stops}
        self._held = ""
        self.matched: str | None = None
        """The stop string that was found; nothing may be fed after it."""

    def feed(self, text: str, may_end: bool = True) -> str:
        """The text that can be given out now. Unless it `may_end`, no stop string ends in `text`,
        though one may begin there."""
        assert self.matched is None
        if not self._held and self._first_chars.isdisjoint(text):
            return text
        for i, char in enumerate(text):
            if self._step(char, may_end):
                return self._cut(self._held + text[: i + 1])
        text = self._held + text
        num_ready = len(text) - max(self._states)
        self._held = text[num_ready:]
        return text[:num_ready]

    def flush(self) -> str:
        """The text that was held back, when the end of the output has come."""
        held, self._held = self._held, ""
        return held

    def _step(self, char: str, may_end: bool) -> bool:
        """Advance all automata by one character; true when a stop string is complete."""
        for n, (stop, borders) in enumerate(zip(self._stops, self._borders, strict=True)):
            state = self._states[n]
            while state and stop[state] != char:
                state = borders[state - 1]
            self._states[n] = state + (stop[state] == char)
            if self._states[n] < len(stop):
                continue
            if not may_end:
                self._states[n] = borders[-1]
            elif len(stop) > len(self.matched or ""):
                self.matched = stop
        return self.matched is not None

    def _cut(self, text: str) -> str:
        assert self.matched is not None
        self._held = ""
        return text if self._include else text[: len(text) - len(self.matched)]


def _borders(stop: str) -> list[int]:
    """For each prefix, the length of its longest proper prefix that is also its suffix."""
    borders = [0] * len(stop)
    state = 0
    for i in range(1, len(stop)):
        while state and stop[state] != stop[i]:
            state = borders[state - 1]
        state += stop[state] == stop[i]
        borders[i] = state
    return borders

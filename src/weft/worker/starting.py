"""Tracks the progress of the ranks' start, and recognises a start that hangs.

    imports ──> ranks ──> model ──> memory ──> compile ──> capture ──> rehearse ──> built
             ^                   ^                      ^           ^            ^
             the ranks wait for each other: all of them take part in what comes next

From the end of its imports on, each rank also loads its share of the model, on a thread of its own;
the stage `model` ends when that is loaded. A rank that hangs would keep the others waiting for
ever, so the time of a stage is bounded.
"""

from __future__ import annotations

ALONE_S = 600.0
"""How long ranks may take for a stage in which each goes on by itself: imports, its share of the
weights, its kernels."""
TOGETHER_S = 120.0
"""How long they may take for a stage that all ranks have reached, in which they wait for each
other."""
IMPORTS, BUILT = "imports", "built"
"""The first stage, and the last one, after which a rank can take steps."""
_BEFORE_TOGETHER = frozenset({IMPORTS, "model", "compile", "capture", "rehearse", BUILT})
"""Stages behind which ranks wait for each other."""


class Starting:
    """The last stage that each rank has ended. Times are in seconds, all by the same clock."""

    def __init__(self, num_ranks: int, now: float) -> None:
        self._ended: list[str | None] = [None] * num_ranks
        self._since = now

    def end(self, rank: int, stage: str, now: float) -> None:
        """Note that a rank has ended a stage."""
        self._ended[rank] = stage
        self._since = now

    def others_ended(self, stage: str) -> bool:
        """Whether `stage` is the last that each rank but the first has ended."""
        return all(ended == stage for ended in self._ended[1:])

    @property
    def is_over(self) -> bool:
        """Whether all ranks can take steps."""
        return all(ended == BUILT for ended in self._ended)

    def hangs(self, now: float) -> str:
        """Why the start counts as hanging, if no rank has ended a stage for too long; else ""."""
        together = all(stage in _BEFORE_TOGETHER for stage in self._ended)
        most_s = TOGETHER_S if together else ALONE_S
        if self.is_over or now - self._since <= most_s:
            return ""
        last = ", ".join(f"rank {i}: {stage or 'none'}" for i, stage in enumerate(self._ended))
        return f"the start of the ranks made no progress for {most_s:.0f} s (last done: {last})"

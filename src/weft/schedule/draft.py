"""A plan in the making: the entries of one step, and how much room is left for more."""

from __future__ import annotations

from weft.schedule.limits import SchedulerLimits
from weft.schedule.plan import Admitted, StepPlan
from weft.schedule.sequence import Sequence
from weft.schedule.slots import Load


class Draft:
    """What the scheduler has planned of one step so far. The lists run in parallel as those of
    `StepPlan` do."""

    def __init__(self, step: int, limits: SchedulerLimits) -> None:
        self.step = step
        self.num_left = self._budget = limits.max_num_batched_tokens
        """Tokens that the step may still take."""
        self._max_num_seqs = limits.max_num_seqs
        self.sequences: list[Sequence] = []
        self.rows: list[int] = []
        self.starts: list[int] = []
        self.counts: list[int] = []
        self.num_samples: list[int] = []
        self.admitted: list[Admitted] = []
        self.new_blocks: list[tuple[int, int, int]] = []
        self.chunks: list[Sequence] = []
        """Running sequences with more than one token to compute."""

    @property
    def full(self) -> bool:
        return not self.num_left or len(self.rows) == self._max_num_seqs

    def schedule(self, seq: Sequence) -> None:
        """Plan as many tokens as there is room for of a sequence with a row and blocks. They are
        two entries where its adapter becomes active in between."""
        if seq.computed < seq.adapter.active_from < seq.known:
            self._schedule(seq, seq.adapter.active_from)
            if self.full:
                return
        self._schedule(seq, seq.known)

    def _schedule(self, seq: Sequence, end: int) -> None:
        count = min(end - seq.computed, self.num_left)
        self.sequences.append(seq)
        self.rows.append(seq.row)
        self.starts.append(seq.computed)
        self.counts.append(count)
        seq.computed += count
        seq.in_flight += 1
        self.num_left -= count
        num_samples = int(seq.computed == seq.known)
        self.num_samples.append(num_samples)
        seq.known += num_samples

    def plan(self, loads: list[Load]) -> StepPlan:
        """The finished plan."""
        return StepPlan(
            self.step,
            self.rows,
            self.starts,
            self.counts,
            self.num_samples,
            self._budget - self.num_left,
            self.admitted,
            self.new_blocks,
            loads,
        )

"""Lays out the sequences, tokens and samples of a step.

S sequences and T tokens of a step, N sampled tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from weft.schedule.plan import StepPlan
from weft.worker.choosing import Ints


class Layout(NamedTuple):
    """Where the S sequences and N samples of a step are among its T tokens, and to which sequence
    each token and sample belongs.

    sequences     0            1    2              firsts 0 4 5   ends 4 5 7
    tokens        p  p  p  p   d    p  p
    samples                x   x                   the prompt of 2 ends in a later step
    """

    counts: Ints
    firsts: Ints
    ends: Ints
    seq_T: Ints | slice
    seq_N: Ints | slice
    token_N: Ints
    """The index of the token after which each sample comes."""
    from_last_N: Ints | None
    """How many samples of the same sequence come after each sample; None: 0 for all."""

    @property
    def plain(self) -> bool:
        """Whether each sequence has one token and one sample, so that all three are alike."""
        return isinstance(self.seq_T, slice)

    def positions(self, starts: Ints) -> tuple[Ints, Ints, Ints]:
        """The positions of all tokens, the lengths of the sequences including them, and the
        positions that the sampled tokens will have; `starts`: the sequences' first positions."""
        seq_lens = starts + self.counts
        if self.from_last_N is None:
            return starts, seq_lens, seq_lens
        seq_T = self.seq_T
        positions_T = np.arange(self.ends[-1]) - (self.firsts - starts)[seq_T]
        return positions_T, seq_lens, seq_lens[self.seq_N] - self.from_last_N


def layout_of(plan: StepPlan, order: Ints, plain: bool) -> Layout:
    """The layout of a plan whose entries are put in this order."""
    if plain:
        firsts, every = np.arange(len(order)), slice(None)  # slices of everything cost nothing
        return Layout(np.ones_like(firsts), firsts, firsts + 1, every, every, firsts, None)
    counts = np.array(plan.counts, dtype=np.int64)[order]
    num_samples = np.array(plan.num_samples, dtype=np.int64)[order]
    seq_T = np.repeat(np.arange(len(order)), counts)
    seq_N = np.repeat(np.arange(len(order)), num_samples)
    ends = np.cumsum(counts)
    # The last sample of a sequence comes after its last token, the one before after that before.
    from_last_N = np.cumsum(num_samples)[seq_N] - 1 - np.arange(len(seq_N))
    token_N = ends[seq_N] - 1 - from_last_N
    return Layout(counts, ends - counts, ends, seq_T, seq_N, token_N, from_last_N)

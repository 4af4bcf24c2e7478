"""Where the sequences, the tokens and the samples of a step lie.

S sequences and T tokens of a step, N sampled tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from weft.schedule.plan import StepPlan
from weft.worker.choosing import Ints


class Layout(NamedTuple):
    """Where the S sequences and the N samples of a step are among its T tokens, and which sequence
    each token and sample is of.

    sequences     0            1    2              firsts 0 4 5   ends 4 5 7
    tokens        p  p  p  p   d    p  p
    samples                x   x                   the prompt of 2 ends in a later step
    """

    starts: Ints
    counts: Ints
    firsts: Ints
    ends: Ints
    seq_lens: Ints
    positions_T: Ints
    seq_T: Ints | slice
    seq_N: Ints | slice
    token_N: Ints
    """The token after which each sample comes."""
    position_N: Ints
    """The position that each sampled token will have."""

    @property
    def plain(self) -> bool:
        """Whether each sequence has one token and one sample, so that all three are alike."""
        return isinstance(self.seq_T, slice)


def layout_of(plan: StepPlan, order: Ints, all_sample: bool) -> Layout:
    """The layout of a plan whose entries are put in this order."""
    starts = np.array(plan.starts, dtype=np.int64)[order]
    if plan.num_tokens == len(order) and all_sample:
        firsts = np.arange(len(order))
        lens, every = starts + 1, slice(None)  # slices of everything cost nothing
        counts = ends = firsts + 1
        return Layout(starts, counts, firsts, ends, lens, starts, every, every, firsts, lens)
    counts = np.array(plan.counts, dtype=np.int64)[order]
    num_samples = np.array(plan.num_samples, dtype=np.int64)[order]
    seq_T = np.repeat(np.arange(len(order)), counts)
    seq_N = np.repeat(np.arange(len(order)), num_samples)
    seq_lens, ends = starts + counts, np.cumsum(counts)
    firsts = ends - counts
    positions_T = np.arange(len(seq_T)) - (firsts - starts)[seq_T]
    # The last sample of a sequence comes after its last token, the one before after that before.
    from_last_N = np.cumsum(num_samples)[seq_N] - 1 - np.arange(len(seq_N))
    token_N, position_N = ends[seq_N] - 1 - from_last_N, seq_lens[seq_N] - from_last_N
    return Layout(
        starts, counts, firsts, ends, seq_lens, positions_T, seq_T, seq_N, token_N, position_N
    )

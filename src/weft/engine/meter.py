"""Measures how long an engine's steps and loads take, for `weft.core.load.Costs`.

A step's seconds are a sum of a few terms, each a coefficient times a count that is known of the
step. The coefficients are found by least squares over what was seen lately, so that each says what
one more row, adapter or token would add. Where little was seen of a term, its coefficient stays
near what was assumed of it at first.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from weft.core.load import Costs

STEPS = 500
"""How many steps back a measurement has lost most of its weight."""
LOADS = 100
REFRESH = 8
"""After how many steps with chunks of prompts the coefficients of decodes are found anew."""
TRUST = 3.0
"""For how many typical measurements an assumption counts."""


class LeastSquares:
    """Coefficients of a sum, from measurements of which older ones count less and less."""

    def __init__(self, assumed: Sequence[float], typical: Sequence[float], memory: float) -> None:
        """`assumed`: the coefficients until much was measured. `typical`: how large the counts
        usually are, which says how soon measurements outweigh the assumption. `memory`: how many
        measurements count."""
        self._assumed = np.array(assumed)
        self._keep = 1.0 - 1.0 / memory
        self._ridge = np.diag(TRUST * np.array(typical) ** 2)
        self._squares = np.zeros((len(assumed), len(assumed)))
        self._products = np.zeros(len(assumed))

    def add(self, counts: Sequence[float], seconds: float) -> None:
        x = np.array(counts)
        self._squares *= self._keep
        self._squares += np.outer(x, x)
        self._products *= self._keep
        self._products += seconds * x

    def solve(self) -> list[float]:
        """The coefficients, none of which is negative: one that would be counts as zero, and the
        others are found again without it."""
        scale = 1.0 / np.sqrt(np.diag(self._ridge))
        squares = (self._squares + self._ridge) * np.outer(scale, scale)
        products = (self._products + self._ridge @ self._assumed) * scale
        found = np.zeros(len(scale))
        left = np.arange(len(scale))
        while len(left):
            some = np.linalg.solve(squares[np.ix_(left, left)], products[left])
            if (some >= 0).all():
                found[left] = some
                break
            left = left[some >= 0]
        return [float(each) for each in found * scale]


class Meter:
    """What was measured of one engine."""

    def __init__(self) -> None:
        costs = Costs()
        self._steps = LeastSquares(
            (costs.step_s, costs.row_s, costs.adapter_s, costs.token_s), (1, 8, 4, 64), STEPS
        )
        self._decode_s = (costs.step_s, costs.row_s, costs.adapter_s)
        """What steps without prompts take, as it was found last."""
        self._steps_left = REFRESH
        """How many steps are measured before it is found anew."""
        self._loads = LeastSquares(
            (costs.load_s, costs.host_byte_s, costs.disk_byte_s), (1, 1e7, 1e7), LOADS
        )

    def step(self, rows: int, adapters: int, tokens: int, seconds: float) -> None:
        """A step has given this many rows a token each, with so many distinct adapters, and has
        computed so many tokens of prompts."""
        self._steps.add((1, rows, adapters, tokens), seconds)

    def chunk_delay(self, rows: int, adapters: int, seconds: float) -> float:
        """How much longer a step took than decodes of so many rows and adapters would have."""
        self._steps_left -= 1
        if self._steps_left <= 0:
            self._steps_left = REFRESH
            step_s, row_s, adapter_s, _ = self._steps.solve()
            self._decode_s = (step_s, row_s, adapter_s)
        step_s, row_s, adapter_s = self._decode_s
        return seconds - step_s - row_s * rows - adapter_s * adapters

    def load(self, num_bytes: int, from_host: bool, seconds: float) -> None:
        host, disk = (num_bytes, 0) if from_host else (0, num_bytes)
        self._loads.add((1, host, disk), seconds)

    @property
    def costs(self) -> Costs:
        return Costs(*self._steps.solve(), *self._loads.solve())

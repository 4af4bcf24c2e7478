"""Measures how long an engine's steps and loads take, for `weft.core.load.Costs`.

A step's seconds are a sum of a few terms, each a coefficient times a count: of rows, adapters or
tokens in the step. The coefficients are found by least squares over recent steps, so that each says
what one more row, adapter or token adds. As long as a term was seldom measured, its coefficient
stays near the assumed one.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from weft.core.load import Costs

STEPS = 500
"""After how many later steps a measurement has lost most of its weight; of loads, LOADS."""
LOADS = 100
REFRESH = 8
"""After how many calls of `Meter.chunk_delay` it computes its coefficients anew."""
TRUST = 3.0
"""An assumed coefficient counts as much as this many typical measurements."""


class LeastSquares:
    """Finds the coefficients of a sum from measurements, of which older ones count less."""

    def __init__(self, assumed: Sequence[float], typical: Sequence[float], memory: float) -> None:
        """`assumed`: the coefficients until enough was measured. `typical`: how large the counts
        usually are, so how soon measurements outweigh the assumption. `memory`: after how many
        measurements one has lost most of its weight."""
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
        """The coefficients. Those that would be negative are zero, and the others are found again
        without them."""
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
    """The measured times of one engine's steps and loads."""

    def __init__(self) -> None:
        costs = Costs()
        self._steps = LeastSquares(
            (costs.step_s, costs.row_s, costs.adapter_s, costs.token_s), (1, 8, 4, 64), STEPS
        )
        self._decode_s = (costs.step_s, costs.row_s, costs.adapter_s)
        """The coefficients of steps without prompts, as `chunk_delay` computed them last."""
        self._steps_left = REFRESH
        """After how many further calls it computes them anew."""
        self._loads = LeastSquares(
            (costs.load_s, costs.host_byte_s, costs.disk_byte_s), (1, 1e7, 1e7), LOADS
        )

    def step(self, rows: int, adapters: int, tokens: int, seconds: float) -> None:
        """Add a step: `rows` sequences got a token, `adapters` distinct adapters were running, and
        `tokens` tokens of prompts were computed."""
        self._steps.add((1, rows, adapters, tokens), seconds)

    def chunk_delay(self, rows: int, adapters: int, seconds: float) -> float:
        """By how many seconds a step took longer than without prompts, by the coefficients."""
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

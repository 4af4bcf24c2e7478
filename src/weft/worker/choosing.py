"""Builds the arrays by which a step's tokens are chosen, from what each row asks for.

Shapes: see `weft.worker.inputs`. Of the N sampled tokens of a step, M are random, P have
penalties, K a mask, and there are B biases (see `weft.kernels.sampling`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from weft.schedule.masks import FOREVER, TokenMask, mask_of
from weft.schedule.plan import Admitted, Words

Ints = NDArray[np.int64]
Rows = TypeVar("Rows", "SamplingArrays", "BiasArrays", "PenaltyArrays", "MaskArrays")


class SamplingArrays(NamedTuple):
    """Parameters of the rows, among the sampled ones, that are not greedy (M of N)."""

    random_M: Ints
    temperature_M: NDArray[np.float32]
    top_k_M: Ints | None
    top_p_M: NDArray[np.float32] | None
    min_p_M: NDArray[np.float32] | None
    seed_M: Ints
    position_M: Ints
    """The positions that their sampled tokens will have."""

    def at(self, position_M: Ints | None) -> SamplingArrays:
        """The same parameters with the positions that the rows' sampled tokens will have."""
        assert position_M is not None
        return SamplingArrays(*self[:-1], position_M)


def part_of(arrays: Rows, begin: int, end: int) -> Rows | None:
    """A record's part for the sampled rows [begin, end), whose indices its first field has; they
    are counted from `begin`. None if it has none of these rows."""
    values: tuple[Any, ...] = arrays
    kept = (values[0] >= begin) & (values[0] < end)
    if not kept.any():
        return None
    parts: list[Any] = [a if a is None else a[kept] for a in values]
    parts[0] -= begin
    return type(arrays)(*parts)


class BiasArrays(NamedTuple):
    sampled_B: Ints
    """The index of the row among the N sampled ones."""
    token_B: Ints
    value_B: NDArray[np.float32]


class PenaltyArrays(NamedTuple):
    sampled_P: Ints
    row_P: Ints
    """The row of the batch, by which the device keeps token counts."""
    repetition_P: NDArray[np.float32]
    presence_P: NDArray[np.float32]
    frequency_P: NDArray[np.float32]


class MaskArrays(NamedTuple):
    sampled_K: Ints
    words_KW: Words


@dataclass(frozen=True, slots=True)
class ShapingArrays:
    """What changes the logits of sampled rows; a field is None if no row has it."""

    bias: BiasArrays | None
    penalties: PenaltyArrays | None
    mask: MaskArrays | None

    def part(self, begin: int, end: int) -> ShapingArrays | None:
        bias = self.bias and part_of(self.bias, begin, end)
        penalties = self.penalties and part_of(self.penalties, begin, end)
        mask = self.mask and part_of(self.mask, begin, end)
        return ShapingArrays(bias, penalties, mask) if bias or penalties or mask else None


@dataclass(frozen=True, slots=True)
class Counted:
    """The tokens of a row with penalties at its admission; later ones are counted on the device."""

    row: int
    prompt_ids: Ints
    output_ids: Ints


class SamplingRows:
    """The sampling parameters of all rows of the batch."""

    def __init__(self, num_rows: int, vocab_size: int) -> None:
        self._vocab_size = np.full(num_rows, vocab_size, dtype=np.int64)
        self._temperature = np.zeros(num_rows, dtype=np.float32)
        self._top_k = np.zeros(num_rows, dtype=np.int64)
        self._top_p = np.ones(num_rows, dtype=np.float32)
        self._min_p = np.zeros(num_rows, dtype=np.float32)
        self._seed = np.zeros(num_rows, dtype=np.int64)

    def admit(self, a: Admitted, vocab_size: int) -> None:
        row, params = a.row, a.params
        self._vocab_size[row] = vocab_size
        self._temperature[row] = params.temperature
        self._top_k[row] = params.top_k if 0 < params.top_k < vocab_size else 0
        self._top_p[row] = params.top_p
        self._min_p[row] = params.min_p
        self._seed[row] = a.seed

    def arrays(self, rows: Ints, most: int = FOREVER) -> SamplingArrays | None:
        """The parameters of the rows that are not greedy, with positions 0, which `at` replaces;
        None if all are greedy. `most`: the upper limit of top_k."""
        random = np.flatnonzero(self._temperature[rows] > 0)
        if not len(random):
            return None
        rows = rows[random]
        top_k, top_p, min_p = self._top_k[rows], self._top_p[rows], self._min_p[rows]
        vocab_size = self._vocab_size[rows]
        return SamplingArrays(
            random,
            self._temperature[rows],
            np.where(top_k > 0, top_k, vocab_size).clip(max=most) if top_k.any() else None,
            top_p if (top_p < 1).any() else None,
            min_p if min_p.any() else None,
            self._seed[rows],
            np.zeros_like(random),
        )


class ShapingRows:
    """What changes the logits, for all rows of the batch: biases, penalties and masks."""

    def __init__(self, num_rows: int) -> None:
        self._shaped_until = np.zeros(num_rows, dtype=np.int64)
        """The position from which on the row's logits are left unchanged."""
        self._masked_until = np.zeros(num_rows, dtype=np.int64)
        self._penalties = np.zeros((num_rows, 3), dtype=np.float32)
        self._penalised = np.zeros(num_rows, dtype=np.bool_)
        self._masks: dict[int, TokenMask] = {}
        self._biases: dict[int, tuple[Ints, NDArray[np.float32]]] = {}

    def admit(self, a: Admitted, vocab_size: int) -> Counted | None:
        """Take a request's parameters. Returns its tokens to count if it has penalties."""
        row, params = a.row, a.params
        self._masks.pop(row, None)
        self._biases.pop(row, None)
        mask = mask_of(a, vocab_size)
        if mask is not None:
            self._masks[row] = mask
        if params.logit_bias:
            self._biases[row] = (
                np.array(list(params.logit_bias), dtype=np.int64),
                np.array(list(params.logit_bias.values()), dtype=np.float32),
            )
        penalties = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
        penalised = penalties != (1.0, 0.0, 0.0)
        self._penalties[row] = penalties
        self._penalised[row] = penalised
        self._masked_until[row] = mask.until if mask else 0
        always = penalised or bool(params.logit_bias)
        self._shaped_until[row] = FOREVER if always else self._masked_until[row]
        if not penalised:
            return None
        return Counted(row, a.token_ids[: a.num_prompt], a.token_ids[a.num_prompt :])

    def any(self, rows: Ints) -> bool:
        """Whether anything may change the logits of these rows."""
        return bool(self._shaped_until[rows].any())

    def arrays(self, rows: Ints, positions: Ints) -> ShapingArrays | None:
        if not (positions < self._shaped_until[rows]).any():
            return None
        return ShapingArrays(
            self._bias(rows), self._penalties_of(rows), self._mask(rows, positions)
        )

    def _bias(self, rows: Ints) -> BiasArrays | None:
        found = [(n, *self._biases[r]) for n, r in enumerate(rows.tolist()) if r in self._biases]
        if not found:
            return None
        sampled, tokens, values = zip(*found, strict=True)
        return BiasArrays(
            np.repeat(sampled, [len(t) for t in tokens]),
            np.concatenate(tokens),
            np.concatenate(values),
        )

    def _penalties_of(self, rows: Ints) -> PenaltyArrays | None:
        sampled = np.flatnonzero(self._penalised[rows])
        if not len(sampled):
            return None
        rows = rows[sampled]
        return PenaltyArrays(sampled, rows, *self._penalties[rows].T.copy())

    def _mask(self, rows: Ints, positions: Ints) -> MaskArrays | None:
        sampled = np.flatnonzero(positions < self._masked_until[rows])
        if not len(sampled):
            return None
        masks = [self._masks[row] for row in rows[sampled].tolist()]
        most = max(mask.num_words for mask in masks)
        words_KW = np.zeros((len(sampled), most), dtype=np.int32)
        for mask, words_W, n in zip(masks, words_KW, sampled.tolist(), strict=True):
            mask.fill(words_W[: mask.num_words], int(positions[n]))
        return MaskArrays(sampled, words_KW)

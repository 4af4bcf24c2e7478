"""The tiles that a step's rows are cut into, laid out by the host for the Triton kernels.

A tile has consecutive rows of one slot: see `weft.kernels.lora.triton_tiles` for its four words.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from weft.kernels.lora.base import LoraBatch, Segment
from weft.kernels.lora.triton_tiles import TILE_ROWS
from weft.kernels.staging import Staging


class TileRows(NamedTuple):
    """The tiles of a step's rows, or of its sampled rows."""

    tiles: Tensor
    """The tiles, int32 (., 4), as many as there are rows."""
    slots: Tensor | None = None
    """The slot of each row, int32, -1 for base rows; None for sampled rows."""


class TileList:
    """The tiles of a step at a fixed place on the device: of its rows, then of its sampled rows.
    Where each begins follows from the numbers of rows."""

    def __init__(self, device: torch.device) -> None:
        self._staging = Staging(0, device)

    def reserve(self, num_tiles: int) -> None:
        """Make room for so many tiles of rows, and as many of sampled rows."""
        self._staging.reserve(9 * num_tiles)

    def fill(self, batch: LoraBatch) -> tuple[TileRows, TileRows]:
        """Lay a step's tiles out, ahead of its kernels on the current stream."""
        parts = [(batch.segments, len(batch.slot_T))]
        if batch.slot_N is not batch.slot_T:
            parts.append((batch.sampled_segments, len(batch.slot_N)))
        bound = sum(num_rows for _, num_rows in parts)
        num_words = 4 * bound + len(batch.slot_T)
        self._staging.reserve(num_words)
        words = self._staging.begin(num_words)
        words[:] = 0
        slots = words[4 * bound :]
        slots[:] = -1
        for slot, start, stop in batch.segments:
            slots[start:stop] = slot
        first = 0
        rows: list[TileRows] = []
        for segments, num_rows in parts:
            place = slice(4 * first, 4 * (first + num_rows))
            rows.append(self._lay_out(segments, words[place], self._staging.device_words[place]))
            first += num_rows
        self._staging.send(len(words))
        tokens = rows[0]._replace(slots=self._staging.device_words[4 * bound : num_words])
        return tokens, rows[-1]

    def _lay_out(
        self, segments: tuple[Segment, ...], words: NDArray[np.int32], place: Tensor
    ) -> TileRows:
        """The tiles of as many rows as there is room for."""
        found = [
            (slot, first, min(TILE_ROWS, stop - first), 0)
            for slot, start, stop in segments
            for first in range(start, stop, TILE_ROWS)
        ]
        if found:
            words[: 4 * len(found)] = np.array(found, np.int32).reshape(-1)
            words[3] = len(found)
        return TileRows(place.view(-1, 4))

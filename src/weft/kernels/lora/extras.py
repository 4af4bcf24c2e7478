"""What adapters hold beside A and B, for every backend: scaled and shifted outputs, norms, rows of
the embedding and the head. It is applied segment by segment, and only in steps that have such an
adapter.

Shapes: as in `weft.kernels.lora.base`; n rows in place of the base's.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.core.targets import ImageLayout, Target, vocabulary
from weft.kernels.linear import product
from weft.kernels.lora.base import (
    AdapterPool,
    ExpertStep,
    LoraBatch,
    LoraStep,
    NormStep,
    Segment,
    VocabularyStep,
)


def has_extras(pool: AdapterPool, slots: Iterable[int]) -> bool:
    """Whether any of these slots holds more than A and B."""
    return any((placed := pool.placed(slot)) and placed[1].has_extras for slot in slots)


def has_experts(pool: AdapterPool, slots: Iterable[int]) -> bool:
    """Whether any of these slots holds an adapter that changes experts, or a router in float32."""
    if not pool.table.has_experts:
        return False
    return any((placed := pool.placed(slot)) and placed[1].has_experts for slot in slots)


def with_extras(step: LoraStep, pool: AdapterPool, batch: LoraBatch) -> LoraStep:
    """A backend's step that also applies what its adapters have besides A and B."""
    slots = [segment.slot for segment in (*batch.segments, *batch.sampled_segments)]
    return ExtrasStep(step, pool, batch) if has_extras(pool, slots) else step


def norms_of(step: LoraStep | None) -> NormStep | None:
    """The norms of a step's adapters; None if none of them has one."""
    return step.norms if isinstance(step, ExtrasStep) else None


def vocabulary_of(step: LoraStep | None) -> VocabularyStep | None:
    """The vocabularies of a step's adapters; None if none of them has added tokens."""
    return step.vocabulary if isinstance(step, ExtrasStep) else None


def vocabulary_runs(
    pool: AdapterPool, sampled: Iterable[tuple[int, int, int]], num_rows: int
) -> list[tuple[int, int, int]] | None:
    """(first row, end, vocabulary) of runs of the sampled rows, which are all of them; None if all
    have the base's vocabulary. `sampled`: their segments, in order."""
    own = [(*rows, size) for slot, *rows in sampled if (size := _vocab_size(pool, slot))]
    if not own:
        return None
    base, _ = vocabulary(pool.table, "embedding")
    found: list[tuple[int, int, int]] = []
    end = 0
    for start, stop, size in [*own, (num_rows, num_rows, 0)]:
        if end < start:
            found.append((end, start, base))
        if size:
            found.append((start, stop, size))
        end = stop
    return found


def _vocab_size(pool: AdapterPool, slot: int) -> int:
    """The size of the vocabulary of a slot's adapter; 0 if it is the base's."""
    placed = pool.placed(slot)
    return placed[1].vocab_size if placed is not None else 0


class ExtrasStep(LoraStep):
    """A LoraStep that runs another one and applies the extras; also the NormStep of their norms."""

    def __init__(self, step: LoraStep, pool: AdapterPool, batch: LoraBatch) -> None:
        self._step = step
        self._pool = pool
        self._segments = _own(pool, batch.segments)
        self._sampled = _own(pool, batch.sampled_segments)
        added = [[own for own in each if own.num_added] for each in (self._segments, self._sampled)]
        self.vocabulary: VocabularyStep | None = _AddedTokens(pool, *added) if any(added) else None
        self.norms = self if any(own.layout.norm_offset for own in self._segments) else None

    def start(self, x_TI: Tensor, group: int) -> None:
        self._step.start(x_TI, group)

    def linear(self, y_TO: Tensor, x_TI: Tensor, group: int) -> None:
        self._step.linear(y_TO, x_TI, group)
        self._scale_and_shift(y_TO, group, self._segments)

    def experts(self, token_P: Tensor, expert_P: Tensor) -> ExpertStep:
        return self._step.experts(token_P, expert_P)

    def embedding(self, y_TO: Tensor, ids_T: Tensor, group: int) -> None:
        for own in self._segments:
            if found := own.rows(own.layout.embedding_rows):
                part = slice(own.start, own.stop)
                y_TO[part] = _looked_up(*found, ids_T[part], y_TO[part])
        self._step.embedding(y_TO, ids_T, group)
        self._scale_and_shift(y_TO, group, self._segments)

    def head(self, y_NV: Tensor, x_NI: Tensor, group: int) -> None:
        for own in self._sampled:
            if found := own.rows(own.layout.head_rows):
                ids_n, rows_nI = found
                y_nV = y_NV[own.start : own.stop]
                logits = own.logits(x_NI, rows_nI)
                if ids_n is None:
                    y_nV[:, : len(rows_nI)] = logits
                else:
                    y_nV.index_copy_(1, ids_n.long(), logits)
        self._step.head(y_NV, x_NI, group)
        self._scale_and_shift(y_NV, group, self._sampled)

    def scaled_queries(self, q_THN: Tensor, group: int) -> Tensor:
        (target,) = self._pool.table.groups[group].slices
        out_THN, (H, N) = q_THN, q_THN.shape[1:]
        for own in self._segments:
            scale_O, _ = own.scale_and_shift(target)
            if scale_O is not None:
                out_THN = q_THN.clone() if out_THN is q_THN else out_THN
                out_THN[own.start : own.stop] *= scale_O.view(H, -1)[:, :N]
        return out_THN

    def absorbed_keys(self, y_THL: Tensor, q_THN: Tensor, group: int) -> None:
        self._step.absorbed_keys(y_THL, q_THN, group)

    def absorbed_values(self, y_THV: Tensor, x_THL: Tensor, group: int) -> None:
        self._step.absorbed_values(y_THV, x_THL, group)
        (target,) = self._pool.table.groups[group].slices
        H, V = y_THV.shape[1:]
        for own in self._segments:
            scale_HV, shift_HV = (
                None if vector_O is None else vector_O.view(H, -1)[:, -V:]
                for vector_O in own.scale_and_shift(target)
            )
            _scale_and_shift(y_THV[own.start : own.stop], scale_HV, shift_HV)

    def of(self, index: int) -> list[tuple[int, int, Tensor]]:
        size = self._pool.table.norms[index].size
        weights = ((own, own.norm(index, size)) for own in self._segments)
        return [(own.start, own.stop, weight) for own, weight in weights if weight is not None]

    def _scale_and_shift(self, y: Tensor, group: int, segments: list[_Own]) -> None:
        for own in segments:
            for s in self._pool.table.groups[group].slices:
                part = y[own.start : own.stop, s.offset : s.offset + s.out_features]
                _scale_and_shift(part, *own.scale_and_shift(s))


class _AddedTokens:
    """The VocabularyStep of the segments that have added tokens."""

    def __init__(self, pool: AdapterPool, segments: list[_Own], sampled: list[_Own]) -> None:
        self._vocab, _ = vocabulary(pool.table, "embedding")
        self._segments, self._sampled = segments, sampled

    def embedding(self, y_TO: Tensor, ids_T: Tensor) -> None:
        for own in self._segments:
            part = slice(own.start, own.stop)
            rows_nO = own.added(own.layout.embedding_rows)
            at_T = ids_T[part] - self._vocab
            found_TO = rows_nO[at_T.clamp(0, len(rows_nO) - 1)]
            y_TO[part] = torch.where((at_T >= 0)[:, None], found_TO, y_TO[part])

    def logits(self, y_NV: Tensor, x_NI: Tensor) -> Tensor:
        if not self._sampled:
            return y_NV
        width = max(own.layout.vocab_size for own in self._sampled)
        y_NW = F.pad(y_NV, (0, width - self._vocab), value=-torch.inf)
        for own in self._sampled:
            rows_nI = own.added(own.layout.head_rows)
            added_Nn = own.logits(x_NI, rows_nI)
            y_NW[own.start : own.stop, self._vocab : own.layout.vocab_size] = added_Nn
        return y_NW


class _Own:
    """The extras of a segment's adapter."""

    def __init__(self, pool: AdapterPool, segment: Segment, at: int, layout: ImageLayout) -> None:
        self.slot, self.start, self.stop = segment
        self.layout = layout
        self._image = pool.arena[at : at + layout.num_elements]
        self._deterministic = pool.deterministic
        vocab, self._hidden = vocabulary(pool.table, "embedding")
        self.num_added = max(layout.vocab_size - vocab, 0)
        """How many tokens the adapter adds to the vocabulary."""

    def scale_and_shift(self, target: Target) -> list[Tensor | None]:
        """What outputs of a projection are multiplied by, and what is then added to them: fp32
        (out_features,) each; None for none."""
        layout, index, size = self.layout, target.slice, target.out_features
        return [
            self._bits(offsets[index], size, torch.float32)
            if offsets and offsets[index] >= 0
            else None
            for offsets in (layout.scale_offset, layout.shift_offset)
        ]

    def logits(self, x_NI: Tensor, rows_nI: Tensor) -> Tensor:
        """The logits of tokens for the segment's rows."""
        x_NI = x_NI[self.start : self.stop]
        return product(x_NI, rows_nI, None, True) if self._deterministic else x_NI @ rows_nI.t()

    def norm(self, index: int, size: int) -> Tensor | None:
        offsets = self.layout.norm_offset
        if not offsets or offsets[index] < 0:
            return None
        return self._image[offsets[index] : offsets[index] + size]

    def rows(self, at: tuple[int, ...]) -> tuple[Tensor | None, Tensor] | None:
        """The rows that replace those of the base's tokens: int32 ids (n,), None for all of the
        vocabulary; and rows (n, hidden)."""
        if not at or not (count := at[2] - self.num_added):
            return None
        ids_n = None if at[1] < 0 else self._bits(at[1], count, torch.int32)
        return ids_n, self._all_rows(at)[:count]

    def added(self, at: tuple[int, ...]) -> Tensor:
        """The rows of added tokens, (n, hidden), which are the last ones."""
        return self._all_rows(at)[at[2] - self.num_added :]

    def _all_rows(self, at: tuple[int, ...]) -> Tensor:
        start, _, num = at
        return self._image[start : start + num * self._hidden].view(num, self._hidden)

    def _bits(self, start: int, size: int, dtype: torch.dtype) -> Tensor:
        words = size * dtype.itemsize // self._image.element_size()
        return self._image[start : start + words].view(dtype)


def _own(pool: AdapterPool, segments: tuple[Segment, ...]) -> list[_Own]:
    found: list[_Own] = []
    for segment in segments:
        placed = pool.placed(segment.slot)
        if placed is not None and placed[1].has_extras:
            found.append(_Own(pool, segment, *placed))
    return found


def _looked_up(ids_n: Tensor | None, rows_nO: Tensor, ids_T: Tensor, y_TO: Tensor) -> Tensor:
    """Look tokens up among an adapter's own rows; those of `y_TO` stay where there are none."""
    if ids_n is None:
        return rows_nO[ids_T]
    at_T = torch.searchsorted(ids_n, ids_T.to(ids_n.dtype)).clamp_(max=len(ids_n) - 1)
    return torch.where((ids_n[at_T] == ids_T)[:, None], rows_nO[at_T], y_TO)


def _scale_and_shift(y_TO: Tensor, scale_O: Tensor | None, shift_O: Tensor | None) -> None:
    """y = y * scale + shift, computed in fp32 and rounded once, in place."""
    if scale_O is None and shift_O is None:
        return
    moved_TO = y_TO.float()
    if scale_O is not None:
        moved_TO = moved_TO * scale_O
    if shift_O is not None:
        moved_TO = moved_TO + shift_O
    y_TO.copy_(moved_TO)

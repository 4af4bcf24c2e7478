"""Computes one adapter from its image alone, as the reference for the check of adapters.

It uses no tables, views or backend, only the image and its layout, as `weft.core.targets` describes
it, and plain torch in fp32.

Shapes: as in `weft.kernels.lora.base`; n rows of the adapter, p pairs of such a row and an expert.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.core.targets import Group, ImageLayout, TargetTable, aligned, vocabulary
from weft.kernels.lora.base import ExpertStep, LoraStep

PAIRS = 16
"""How many pairs of a row and an expert have their matrices gathered at a time."""


class ImageStep(LoraStep):
    """LoraStep and NormStep of a batch in which one adapter has all rows from `first` on, and all
    sampled rows from `first_sampled` on; those before are the base's. The image, 1-D, is on the
    device of the rows."""

    def __init__(
        self,
        table: TargetTable,
        layout: ImageLayout,
        image: Tensor,
        first: int,
        first_sampled: int,
        num_rows: int,
        own_rank: int = 0,
    ) -> None:
        """`own_rank`: the rank whose part of an image this is, if the model is divided."""
        self._table, self._layout, self._image = table, layout, image
        self._first, self._first_sampled, self._num_rows = first, first_sampled, num_rows
        self._own_rank = own_rank

    def linear(self, y_TO: Tensor, x_TI: Tensor, group: int) -> None:
        self._project(y_TO[self._first :], x_TI[self._first :], group)

    def embedding(self, y_TO: Tensor, ids_T: Tensor, group: int) -> None:
        y_nO, ids_n = y_TO[self._first :], ids_T[self._first :]
        exact = y_nO.float()
        if rows := self._rows(self._layout.embedding_rows, y_nO.shape[1]):
            own_m, rows_mO = rows
            is_own_nm = ids_n[:, None] == own_m
            looked_up_nO = rows_mO[is_own_nm.int().argmax(1)].float()
            exact = torch.where(is_own_nm.any(1)[:, None], looked_up_nO, exact)
        g = self._table.groups[group]
        rank = self._rank(g)
        v_nR = None
        if rank:
            v_nR = self._matrix(self._layout.a_offset[group], g.in_features, rank)[ids_n].float()
        self._finish(y_nO, exact, v_nR, g)

    def head(self, y_NV: Tensor, x_NI: Tensor, group: int) -> None:
        y_nV, x_nI = y_NV[self._first_sampled :], x_NI[self._first_sampled :]
        if rows := self._rows(self._layout.head_rows, x_nI.shape[1]):
            own_m, rows_mI = rows
            y_nV[:, own_m.long()] = (x_nI.float() @ rows_mI.float().t()).to(y_nV.dtype)
        self._project(y_nV, x_nI, group)

    def added_embedding(self, y_TO: Tensor, ids_T: Tensor) -> None:
        y_nO, ids_n = y_TO[self._first :], ids_T[self._first :]
        rows_mO = self._added(self._layout.embedding_rows, y_nO.shape[1])
        at_n = ids_n - (self._layout.vocab_size - len(rows_mO))
        y_nO[at_n >= 0] = rows_mO[at_n[at_n >= 0]]

    def added_logits(self, y_NV: Tensor, x_NI: Tensor) -> Tensor:
        rows_mI = self._added(self._layout.head_rows, x_NI.shape[1])
        y_NW = F.pad(y_NV, (0, len(rows_mI)), value=-torch.inf)
        x_nI = x_NI[self._first_sampled :]
        added_nm = x_nI.float() @ rows_mI.float().t()
        y_NW[self._first_sampled :, y_NV.shape[1] :] = added_nm.to(y_NV.dtype)
        return y_NW

    def scaled_queries(self, q_THN: Tensor, group: int) -> Tensor:
        scale_HO = self._absorbed(group, q_THN.shape[1]).scale_HO
        out_THN, own = q_THN.clone(), slice(self._first, None)
        if scale_HO is not None:
            out_THN[own] = (q_THN[own].float() * scale_HO[:, : q_THN.shape[2]]).to(q_THN)
        return out_THN

    def absorbed_keys(self, y_THL: Tensor, q_THN: Tensor, group: int) -> None:
        product_HOL = self._absorbed(group, q_THN.shape[1]).product_HOL
        own = slice(self._first, None)
        if product_HOL is not None:
            keys_HNL = product_HOL[:, : q_THN.shape[2]]
            y_THL[own] += torch.einsum("thn,hnl->thl", q_THN[own].float(), keys_HNL).to(y_THL)

    def absorbed_values(self, y_THV: Tensor, x_THL: Tensor, group: int) -> None:
        V, own = y_THV.shape[2], slice(self._first, None)
        product_HVL, scale_HV, shift_HV = (
            None if part is None else part[:, -V:] for part in self._absorbed(group, y_THV.shape[1])
        )
        exact = y_THV[own].float()
        if product_HVL is not None:
            exact += torch.einsum("thl,hvl->thv", x_THL[own].float(), product_HVL)
        if scale_HV is not None:
            exact *= scale_HV
        y_THV[own] = exact if shift_HV is None else exact + shift_HV

    def experts(self, token_P: Tensor, expert_P: Tensor) -> ExpertStep:
        is_own_P = (token_P >= self._first) & (expert_P >= 0)
        return _ImageExperts(self, is_own_P.nonzero()[:, 0], expert_P)

    def of(self, index: int) -> list[tuple[int, int, Tensor]]:
        offsets = self._layout.norm_offset
        if not offsets or offsets[index] < 0:
            return []
        size = self._table.norms[index].size
        weight_I = self._image[offsets[index] : offsets[index] + size]
        return [(self._first, self._num_rows, weight_I)]

    def _absorbed(self, group: int, num_heads: int) -> _AbsorbedParts:
        """What the adapter does to an absorbed projection, fp32, head by head."""
        g = self._table.groups[group]
        (target,), rank, layout = g.slices, self._rank(g), self._layout
        product_HOL = None
        if rank:
            a_RL = self._matrix(layout.a_offset[group], rank, g.in_features).float()
            b_OR = self._matrix(layout.b_offset[target.slice], target.out_features, rank).float()
            product_HOL = (b_OR @ a_RL).view(num_heads, -1, g.in_features)
        vectors = []
        for offsets in (layout.scale_offset, layout.shift_offset):
            at = offsets[target.slice] if offsets else -1
            vector = None if at < 0 else self._vector(at, target.out_features)
            vectors.append(None if vector is None else vector.view(num_heads, -1))
        return _AbsorbedParts(product_HOL, *vectors)

    def _project(self, y_nO: Tensor, x_nI: Tensor, group: int) -> None:
        g = self._table.groups[group]
        rank = self._rank(g)
        v_nR = None
        if rank:
            a_RI = self._matrix(self._layout.a_offset[group], rank, g.a_features)
            v_nR = x_nI[:, g.a_columns(self._own_rank)].float() @ a_RI.float().t()
        elif not (self._layout.scale_offset or self._layout.shift_offset):
            return
        self._finish(y_nO, y_nO.float(), v_nR, g)

    def _finish(self, y_nO: Tensor, exact_nO: Tensor, v_nR: Tensor | None, group: Group) -> None:
        """y = scale * (exact + v B^T) + shift, rounded once."""
        layout, row = self._layout, 0
        for s in group.slices:
            part = exact_nO[:, s.offset : s.offset + s.out_features]
            rank = layout.rank[s.slice]
            if rank and v_nR is not None:
                b_OR = self._matrix(layout.b_offset[s.slice], s.b_features, rank)
                start = s.b_start(self._own_rank)
                own = exact_nO[:, start : start + s.b_features]
                own += v_nR[:, row : row + rank] @ b_OR.float().t()
                row += rank
            if layout.scale_offset and layout.scale_offset[s.slice] >= 0:
                part *= self._vector(layout.scale_offset[s.slice], s.out_features)
            if layout.shift_offset and layout.shift_offset[s.slice] >= 0:
                part += self._vector(layout.shift_offset[s.slice], s.out_features)
        y_nO.copy_(exact_nO)

    def _rank(self, group: Group) -> int:
        return sum(self._layout.rank[s.slice] for s in group.slices)

    def _matrix(self, start: int, rows: int, columns: int) -> Tensor:
        return self._image[start : start + rows * columns].view(rows, columns)

    def _vector(self, start: int, size: int, dtype: torch.dtype = torch.float32) -> Tensor:
        words = size * dtype.itemsize // self._image.element_size()
        return self._image[start : start + words].view(dtype)

    def _rows(self, at: tuple[int, ...], hidden: int) -> tuple[Tensor, Tensor] | None:
        """The base's tokens that have rows of their own: ids (m,) and rows (m, hidden)."""
        if not at:
            return None
        vocab, _ = vocabulary(self._table, "embedding")
        start, ids, num = at
        num -= max(self._layout.vocab_size - vocab, 0)
        if not num:
            return None
        all_m = torch.arange(num, device=self._image.device)
        own_m = all_m if ids < 0 else self._vector(ids, num, torch.int32)
        return own_m, self._matrix(start, num, hidden)

    def _added(self, at: tuple[int, ...], hidden: int) -> Tensor:
        """The rows of added tokens (m, hidden), which are the last ones."""
        start, _, num = at
        vocab, _ = vocabulary(self._table, "embedding")
        return self._matrix(start, num, hidden)[num - (self._layout.vocab_size - vocab) :]

    def add_experts(self, y_pO: Tensor, x_pI: Tensor, expert_p: Tensor, group: int) -> None:
        """Add the adapter's part to rows, of which each goes through the expert of that number."""
        g = self._table.groups[group]
        rank = self._rank(g)
        if not rank:
            return
        a_at, row = self._layout.a_offset[group], 0
        a_pRI = self._of_experts(a_at, rank, g.a_features)[expert_p].float()
        v_pR = torch.einsum("pri,pi->pr", a_pRI, x_pI[:, g.a_columns(self._own_rank)].float())
        for s in g.slices:
            r = self._layout.rank[s.slice]
            if r:
                b_at = self._layout.b_offset[s.slice]
                b_pOR = self._of_experts(b_at, s.b_features, r)[expert_p].float()
                start = s.b_start(self._own_rank)
                part = y_pO[:, start : start + s.b_features]
                delta_pO = torch.einsum("por,pr->po", b_pOR, v_pR[:, row : row + r])
                part.copy_(part.float() + delta_pO)
                row += r

    def _of_experts(self, start: int, rows: int, columns: int) -> Tensor:
        """The matrices of all experts, (E, rows, columns)."""
        num, size = self._table.num_experts, aligned(rows * columns)
        matrices = self._image[start : start + num * size].view(num, size)
        return matrices[:, : rows * columns].view(num, rows, columns)


class _AbsorbedParts(NamedTuple):
    """What an adapter does to a projection of latents L to the O keys and values of each head H."""

    product_HOL: Tensor | None
    """The product B A; None: the adapter has no A and B there."""
    scale_HO: Tensor | None
    shift_HO: Tensor | None


class _ImageExperts:
    """ExpertStep of an ImageStep, whose pairs are at `place_p` among those of the step."""

    def __init__(self, step: ImageStep, place_p: Tensor, expert_P: Tensor) -> None:
        self._step, self._place_p, self._expert_p = step, place_p, expert_P[place_p]

    def linear(self, y_PO: Tensor, x_PI: Tensor, group: int) -> None:
        for begin in range(0, len(self._place_p), PAIRS):
            place_p = self._place_p[begin : begin + PAIRS]
            y_pO = y_PO[place_p]
            expert_p = self._expert_p[begin : begin + PAIRS]
            self._step.add_experts(y_pO, x_PI[place_p], expert_p, group)
            y_PO[place_p] = y_pO

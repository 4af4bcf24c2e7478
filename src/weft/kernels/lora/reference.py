"""The oracle of all backends: row by row, in fp32, as the definition says."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from weft.kernels.lora.base import AdapterPool, GroupView, LoraBatch, LoraStep


class ReferenceBackend:
    """LoraBackend that other backends are tested against."""

    def __init__(self, pool: AdapterPool) -> None:
        self._pool = pool

    def reserve(self, num_rows: int) -> bool:
        return False

    def begin(self, batch: LoraBatch) -> ReferenceStep:
        return ReferenceStep(self._pool, batch)


class ReferenceStep(LoraStep):
    def __init__(self, pool: AdapterPool, batch: LoraBatch) -> None:
        self._pool = pool
        self._slot_T, self._slot_N = batch.slot_T.tolist(), batch.slot_N.tolist()

    def linear(self, y_TO: Tensor, x_TI: Tensor, group: int) -> None:
        ReferenceRows(self._pool, [(slot, 0) for slot in self._slot_T]).linear(y_TO, x_TI, group)

    def head(self, y_NV: Tensor, x_NI: Tensor, group: int) -> None:
        ReferenceRows(self._pool, [(slot, 0) for slot in self._slot_N]).linear(y_NV, x_NI, group)

    def embedding(self, y_TO: Tensor, ids_T: Tensor, group: int) -> None:
        for t, slot in enumerate(self._slot_T):
            if slot >= 0 and (view := self._pool.view(slot, group)):
                _expand(y_TO[t], view.a_RI[ids_T[t]].float(), view)

    def absorbed_keys(self, y_THL: Tensor, q_THN: Tensor, group: int) -> None:
        N = q_THN.shape[2]
        for t, change_HOL in self._absorbed(group, q_THN.shape[1]):
            delta = torch.einsum("hn,hnl->hl", q_THN[t].float(), change_HOL[:, :N])
            y_THL[t] = (y_THL[t].float() + delta).to(y_THL)

    def absorbed_values(self, y_THV: Tensor, x_THL: Tensor, group: int) -> None:
        V = y_THV.shape[2]
        for t, change_HOL in self._absorbed(group, y_THV.shape[1]):
            delta = torch.einsum("hl,hvl->hv", x_THL[t].float(), change_HOL[:, -V:])
            y_THV[t] = (y_THV[t].float() + delta).to(y_THV)

    def _absorbed(self, group: int, num_heads: int) -> Iterator[tuple[int, Tensor]]:
        """The rows whose adapter changes an absorbed projection, and B A by heads (H, N + V, L)."""
        for t, slot in enumerate(self._slot_T):
            if slot >= 0 and (view := self._pool.view(slot, group)):
                change_OL = view.slices[0].b_OR.float() @ view.a_RI.float()
                yield t, change_OL.view(num_heads, -1, change_OL.shape[1])

    def experts(self, token_P: Tensor, expert_P: Tensor) -> ReferenceRows:
        slots = [self._slot_T[t] for t in token_P.tolist()]
        return ReferenceRows(self._pool, list(zip(slots, expert_P.tolist(), strict=True)))


class ReferenceRows:
    """Rows of which each belongs to a slot (-1: the base) and goes through an expert."""

    def __init__(self, pool: AdapterPool, rows: list[tuple[int, int]]) -> None:
        self._pool = pool
        self._rows = rows

    def linear(self, y_TO: Tensor, x_TI: Tensor, group: int) -> None:
        for t, (slot, expert) in enumerate(self._rows):
            if min(slot, expert) >= 0 and (view := self._pool.view(slot, group, expert)):
                v_R = view.a_RI.float() @ x_TI[t, view.columns].float()
                if view.sums_ranks:
                    v_R = self._pool.ranks.sum(v_R[None])[0]
                _expand(y_TO[t], v_R, view)


def _expand(y_O: Tensor, v_R: Tensor, view: GroupView) -> None:
    for s in view.slices:
        delta = s.b_OR.float() @ v_R[s.r_start : s.r_stop]
        y_O[s.out_start : s.out_stop] = (y_O[s.out_start : s.out_stop].float() + delta).to(y_O)

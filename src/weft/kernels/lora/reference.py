"""The oracle of all backends: row by row, in fp32, as the definition says."""

from __future__ import annotations

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
        self._slot_T = batch.slot_T.tolist()
        self._slot_N = batch.slot_N.tolist()

    def linear(self, y_TO: Tensor, x_TI: Tensor, group: int) -> None:
        self._rows(y_TO, x_TI, group, self._slot_T)

    def head(self, y_NV: Tensor, x_NI: Tensor, group: int) -> None:
        self._rows(y_NV, x_NI, group, self._slot_N)

    def embedding(self, y_TO: Tensor, ids_T: Tensor, group: int) -> None:
        for t, slot in enumerate(self._slot_T):
            if slot >= 0 and (view := self._pool.view(slot, group)):
                _expand(y_TO[t], view.a_RI[ids_T[t]].float(), view)

    def experts(self, token_P: Tensor, expert_P: Tensor) -> ReferenceExperts:
        slots = [self._slot_T[t] for t in token_P.tolist()]
        return ReferenceExperts(self._pool, list(zip(slots, expert_P.tolist(), strict=True)))

    def _rows(self, y: Tensor, x: Tensor, group: int, slots: list[int]) -> None:
        for t, slot in enumerate(slots):
            if slot >= 0 and (view := self._pool.view(slot, group)):
                _expand(y[t], view.a_RI.float() @ x[t].float(), view)


class ReferenceExperts:
    def __init__(self, pool: AdapterPool, pairs: list[tuple[int, int]]) -> None:
        self._pool = pool
        self._pairs = pairs

    def linear(self, y_PO: Tensor, x_PI: Tensor, group: int) -> None:
        for p, (slot, expert) in enumerate(self._pairs):
            if slot >= 0 and (view := self._pool.view(slot, group, expert)):
                _expand(y_PO[p], view.a_RI.float() @ x_PI[p].float(), view)


def _expand(y_O: Tensor, v_R: Tensor, view: GroupView) -> None:
    for s in view.slices:
        delta = s.b_OR.float() @ v_R[s.r_start : s.r_stop]
        y_O[s.out_start : s.out_stop] = (y_O[s.out_start : s.out_stop].float() + delta).to(y_O)

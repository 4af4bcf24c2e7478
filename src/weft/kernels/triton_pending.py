"""What adapters add to a product, added by one kernel, for operations that need the whole result.

Most operations add it themselves while they read the product: see `Pending`.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from weft.core.numbers import cdiv
from weft.kernels.ops import Pending
from weft.kernels.triton_base import (
    ALL_AT_ONCE,
    launch_options,
    load_pending,
    plus_pending,
    starts_early,
)

BLOCK = 1024
"""Columns that one program adds."""


@triton.jit
def _add_pending(
    y_ptr,
    add_ptr,
    slot_ptr,
    out_ptr,
    O,  # noqa: E741
    y_stride,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """out (T, O) = y, plus add where the row's slot is not negative. Programs (T, parts of O)."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    o = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    has = tl.load(slot_ptr + row) >= 0
    if PDL:
        tl.extra.cuda.gdc_wait()
    y = tl.load(y_ptr + row * y_stride + o, mask=o < O)
    add = load_pending(add_ptr + row * O + o, o < O, True)
    tl.store(out_ptr + row * O + o, plus_pending(y, add, has, True), mask=o < O)


@dataclass(frozen=True, slots=True)
class KernelPending(Pending):
    """`Pending` that one kernel adds to the product."""

    def added_to(self, y_TO: Tensor) -> Tensor:
        T, O = y_TO.shape  # noqa: E741
        out_TO = y_TO.new_empty(T, O)
        _add_pending[T, cdiv(O, BLOCK)](
            y_TO, self.add_TO, self.slot_T, out_TO, O, y_TO.stride(0), BLOCK,
            **ALL_AT_ONCE, **launch_options(starts_early(y_TO.device)),
        )  # fmt: skip
        return out_TO

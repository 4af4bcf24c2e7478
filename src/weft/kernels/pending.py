"""What adapters add to a product, left to the operation that reads the product next.

Shapes: T token rows, O outputs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Pending:
    """`y + add` for the rows whose slot is not negative; `add` of the others is undefined."""

    add_TO: Tensor
    """fp32"""
    slot_T: Tensor
    """int32"""

    def added_to(self, y_TO: Tensor) -> Tensor:
        """The sum, rounded once; other rows to the bit as they are."""
        sum_TO = (y_TO.float() + self.add_TO).to(y_TO.dtype)
        return torch.where(self.slot_T[:, None] >= 0, sum_TO, y_TO)


def added(y_TO: Tensor, pending: Pending | None) -> Tensor:
    return y_TO if pending is None else pending.added_to(y_TO)

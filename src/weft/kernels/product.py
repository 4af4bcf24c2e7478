"""The result of a linear layer: the base's product, and what adapters still have to add to it.

Shapes: T token rows, O outputs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Pending:
    """What adapters add to a product, left to the operation that reads the product next.

    The result is `y + add` for the rows whose slot is not negative; `add` of the others is
    undefined.
    """

    add_TO: Tensor
    """fp32"""
    slot_T: Tensor
    """int32"""

    def added_to(self, y_TO: Tensor) -> Tensor:
        """The sum, rounded once; other rows to the bit as they are."""
        sum_TO = (y_TO.float() + self.add_TO).to(y_TO.dtype)
        return torch.where(self.slot_T[:, None] >= 0, sum_TO, y_TO)


class Product(NamedTuple):
    """The product of a linear layer, and what is to be added to it before it is used."""

    y_TO: Tensor
    pending: Pending | None = None
    """None: nothing, y is the whole result. It is there until the next linear layer is called."""

    def whole(self) -> Tensor:
        """The result with what is pending, (T, O); y itself if nothing is."""
        return self.y_TO if self.pending is None else self.pending.added_to(self.y_TO)

"""Numbers as clients and users give them."""

from __future__ import annotations

from numbers import Real
from typing import Any, TypeGuard

MAX_NUMBER = 2**63 - 1
"""Largest number that is passed between processes."""


def is_number(value: Any) -> TypeGuard[float]:
    """Whether a value is a real number of any type, such as numpy's; False for bools and NaN."""
    known = isinstance(value, int | float | Real)  # the first two are found faster
    return known and not isinstance(value, bool) and value == value  # no NaN

"""Numbers as clients and users give them, and arithmetic of whole numbers."""

from __future__ import annotations

from numbers import Real
from typing import Any, TypeGuard

MAX_NUMBER = 2**63 - 1
"""Largest number that is passed between processes."""


def is_number(value: Any) -> TypeGuard[float]:
    """Whether a value is a real number of any type, such as numpy's; False for bools and NaN."""
    known = isinstance(value, int | float | Real)  # the first two are found faster
    return known and not isinstance(value, bool) and value == value  # no NaN


def cdiv(n: int, d: int) -> int:
    """n / d, rounded up. The host's part of a kernel's launch uses this and `next_power_of_2`, as
    Triton's own functions take microseconds there."""
    return -(-n // d)


def next_power_of_2(n: int) -> int:
    """The least power of two that is not less than n (n >= 1)."""
    return 1 << (n - 1).bit_length()

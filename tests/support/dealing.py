"""Pairs of parameters for tests that need not try all of them each time."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import pytest


def deal(many: Collection[Any], few: Collection[Any]) -> list[Any]:
    """All pairs of one of `many` and one of `few`. `make test` runs each of `many` once, with those
    of `few` in turn; only `make exhaustive` runs the other pairs. A tuple in `few` stands for
    several parameters."""
    return [
        pytest.param(
            one,
            *(other if isinstance(other, tuple) else (other,)),
            marks=[] if i % len(few) == j else [pytest.mark.exhaustive],
        )
        for i, one in enumerate(many)
        for j, other in enumerate(few)
    ]

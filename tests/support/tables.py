"""Tables of made-up models."""

from __future__ import annotations

from collections.abc import Sequence

from weft.core.targets import Kind, Packed, TargetTable
from weft.core.targets import build_table as build

Row = tuple[Kind, int, Sequence[tuple[str, int]]]


def build_table(
    rows: Sequence[Row],
    norms: Sequence[tuple[str, int]] = (),
    num_experts: int = 1,
    bias: bool = False,
) -> TargetTable:
    """A table from (kind, in_features, [(projection, out_features), ...]) of each packed layer."""
    packed = [
        Packed(
            key=slices[0][0],
            kind=kind,
            in_features=in_features,
            parts=tuple(out for _, out in slices),
            names=tuple(name for name, _ in slices),
            bias=bias,
        )
        for kind, in_features, slices in rows
    ]
    return build(packed, norms, num_experts=num_experts)

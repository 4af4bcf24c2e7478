"""Adapters that are summed, each with a weight: what a request says, and what names the sum."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass

from weft.core.adapters import AdapterPart, AdapterRef
from weft.core.errors import InvalidRequest

MAX_PARTS = 8
MAX_SCALE = 100.0
"""The largest magnitude of a scale."""


@dataclass(frozen=True, slots=True)
class WeightedAdapter:
    """An adapter by its name, and what its part of a sum is multiplied by: any number from
    -MAX_SCALE to MAX_SCALE. Raises InvalidRequest."""

    name: str
    scale: float = 1.0

    def __post_init__(self) -> None:
        scale = self.scale
        if not isinstance(scale, int | float) or isinstance(scale, bool) or math.isnan(scale):
            raise InvalidRequest(f"adapters: a scale must be a number, got {scale!r}", "adapters")
        if abs(scale) > MAX_SCALE:
            raise InvalidRequest(
                f"adapters: a scale must be in [{-MAX_SCALE:g}, {MAX_SCALE:g}], got {scale}",
                "adapters",
            )


def check_parts(adapters: Sequence[WeightedAdapter]) -> None:
    """Raises InvalidRequest unless there are 1 to MAX_PARTS of them, each under its own name."""
    if not 1 <= len(adapters) <= MAX_PARTS:
        raise InvalidRequest(
            f"adapters must hold 1 to {MAX_PARTS} adapters, got {len(adapters)}", "adapters"
        )
    names = [each.name for each in adapters]
    for name in names:
        if names.count(name) > 1:
            raise InvalidRequest(
                f"adapters names {name!r} twice; name it once, with the sum of its scales",
                "adapters",
            )


def sum_of(parts: Sequence[AdapterPart]) -> tuple[AdapterRef, tuple[AdapterPart, ...]]:
    """What stands for the weighted sum of these, in whatever order they are, and the parts in
    the order in which they are added up.

    Its digest is of the parts' digests and scales. Its name is of all names, joined by commas,
    which are in no adapter's own; its version is 0.
    """
    ordered = tuple(sorted(parts, key=lambda part: (part.ref.digest, part.scale)))
    said = ["weighted sum", *([part.ref.digest, float(part.scale).hex()] for part in ordered)]
    digest = hashlib.sha256(json.dumps(said).encode()).hexdigest()
    return AdapterRef(",".join(sorted(part.ref.name for part in parts)), 0, digest), ordered

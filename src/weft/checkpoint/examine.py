"""Whether an adapter would be served, told without torch, whose import takes seconds.

The rules are those of `pack`: its own code as far as names, shapes and ranks are concerned. What
packing finds out while it copies, that values are numbers, fit the serving dtype and change
something, follows from the largest magnitude of each tensor, as rounding keeps order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray

from weft.checkpoint.config import PeftConfig, parse_config
from weft.checkpoint.parts import AdapterParts, Named, sort_parts
from weft.checkpoint.read import (
    DTYPES,
    WEIGHTS_FILE,
    AdapterFiles,
    Stored,
    item_bytes,
    parse_stored,
)
from weft.checkpoint.refuse import refuse
from weft.core.targets import ImageLayout, TargetTable, layout_of

if TYPE_CHECKING:
    from torch import Tensor

_MATRICES = (".lora_A.weight", ".lora_B.weight", ".lora_embedding_A", ".lora_embedding_B")
_CHUNK = 1 << 16
"""Values looked at in one go, in the processor's cache."""


@dataclass(frozen=True, slots=True)
class Examined:
    """What an adapter's image would be."""

    digest: str
    layout: ImageLayout
    targets: tuple[str, ...]
    """As in `AdapterImage`."""
    num_bytes: int


def examine(files: AdapterFiles, table: TargetTable, dtype: str, max_rank: int) -> Examined | None:
    """The verdict of `pack_image` for the serving dtype (torch's name of it).

    None: not told here, as the adapter holds more than A and B of a plain LoRA, or has experts.
    Raises AdapterInvalid.
    """
    config = parse_config(files.config, max_rank)
    stored = parse_stored(files.weights)
    if not _is_plain(config, stored, table):
        return None
    # Of a tensor, sorting looks at the shape alone where there are only such names.
    parts = sort_parts(cast("dict[str, Tensor]", stored), table, config)
    if parts.needs_base or parts.vocab_size:
        return None
    ranks = [0] * len(table.targets)
    for each in parts.targets:
        ranks[each.target.slice] = each.rank
    if not _check_values(parts, dtype):
        refuse(WEIGHTS_FILE, "the adapter would change nothing: A or B is zero in every target")
    layout = layout_of(table, tuple(ranks))
    targets = tuple(dict.fromkeys(each.target.suffix for each in parts.targets))
    return Examined(files.digest, layout, targets, layout.num_elements * item_bytes(dtype))


def _is_plain(config: PeftConfig, stored: dict[str, Stored], table: TargetTable) -> bool:
    more = (
        config.modules_to_save
        or config.token_indices
        or config.ensure_weight_tying
        or config.residual_init
        or config.invocation
    )
    experts = any(group.kind == "experts" for group in table.groups)
    matrices = all(name.endswith(_MATRICES) for name in stored)
    return config.kind == "LORA" and matrices and not experts and not more


def _check_values(parts: AdapterParts, dtype: str) -> bool:
    """Whether any target is changed. Raises AdapterInvalid."""
    changes = False
    for each in parts.targets:
        assert each.a is not None and each.b is not None
        packed = [_packed(each.a, 1.0, dtype), _packed(each.b, each.scaling, dtype)]
        changes = changes or all(packed)
    return changes


def _packed(named: Named, scale: float, dtype: str) -> float:
    """The largest magnitude that a tensor has in an image."""
    largest = largest_magnitude(cast(Stored, named.tensor))
    if not np.isfinite(largest):
        refuse(named.name, "holds NaN or infinite values")
    with np.errstate(over="ignore", under="ignore"):
        packed = _rounded(largest * np.float32(abs(scale)), dtype)
    if not np.isfinite(packed):
        refuse(named.name, f"holds values too large for {dtype}")
    return packed


def _rounded(value: np.float32, dtype: str) -> float:
    if dtype == "bfloat16":
        bits = int(value.view(np.uint32))
        bits = (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000
        return float(np.uint32(bits).view(np.float32))
    return float(value.astype(dtype))


def largest_magnitude(stored: Stored) -> np.float32:
    """NaN or infinity if there is one. All bits but the sign are ordered as the magnitudes are."""
    assert stored.dtype in DTYPES.values()
    wide = stored.dtype == "float32"
    bits: NDArray[np.unsignedinteger[Any]] = stored.data.view(np.uint32 if wide else np.uint16)
    mask = np.uint32(0x7FFFFFFF) if wide else np.uint16(0x7FFF)
    chunks = (bits[i : i + _CHUNK] for i in range(0, len(bits), _CHUNK))
    largest = max((int((chunk & mask).max()) for chunk in chunks), default=0)
    if stored.dtype == "float16":
        return np.float32(np.uint16(largest).view(np.float16))
    return np.uint32(largest if wide else largest << 16).view(np.float32)

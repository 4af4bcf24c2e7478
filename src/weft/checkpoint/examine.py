"""Whether an adapter would be served, told without torch, whose import takes seconds.

The rules are those of `pack`: its own code as far as names, shapes and ranks are concerned. What
packing finds out while it copies, that values are numbers, fit the serving dtype and change
something, follows from the largest magnitude of each tensor, as rounding keeps order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import numpy as np

from weft.checkpoint.config import PeftConfig, parse_config
from weft.checkpoint.convert import CONVERSION_TOLERANCE, EXACT, Conversion, Limits, convert_parts
from weft.checkpoint.parts import (
    AdapterParts,
    Named,
    Rows,
    check_activated,
    nothing_in,
    same_rows,
    sort_parts,
)
from weft.checkpoint.read import (
    WEIGHTS_FILE,
    AdapterFiles,
    Stored,
    item_bytes,
    parse_stored,
)
from weft.checkpoint.refuse import refuse
from weft.core.targets import Extras, ImageLayout, TargetTable, layout_of, vocabulary

if TYPE_CHECKING:
    from torch import Tensor

    from weft.checkpoint.convert import Deferred


@dataclass(frozen=True, slots=True)
class Examined:
    """What an adapter's image would be."""

    digest: str
    layout: ImageLayout
    targets: tuple[str, ...]
    """As in `AdapterImage`."""
    num_bytes: int
    provisional: bool = False
    """Likewise."""
    conversion_error: float = 0.0
    """Likewise."""


def examine(
    files: AdapterFiles,
    table: TargetTable,
    dtype: str,
    max_rank: int,
    conversion_tolerance: float = CONVERSION_TOLERANCE,
) -> Examined | None:
    """The verdict of `pack_image`, without the base, for the serving dtype (torch's name of it).

    None: not told here, as the adapter is a LoRA for a base with experts, or has added tokens,
    whose rows have to be computed. Raises AdapterInvalid.
    """
    config = parse_config(files.config, max_rank)
    stored = parse_stored(files.weights)
    if config.kind == "LORA" and any(group.kind == "experts" for group in table.groups):
        return None
    parts, conversion = _parts(stored, table, config, Limits(max_rank, conversion_tolerance))
    vocab, _ = vocabulary(table, "embedding")
    if parts.vocab_size > vocab:
        return None
    extras = _check_beside(parts, dtype, parts.vocab_size or vocab)
    ranks = [0] * len(table.targets)
    for each in parts.targets:
        ranks[each.target.slice] = each.rank
    layout = layout_of(table, tuple(ranks))
    if extras != Extras():
        layout = layout_of(table, layout.rank, extras, item_bytes(dtype))
    if not (_check_values(parts, dtype) or layout.vocab_size or parts.needs_base):
        refuse(WEIGHTS_FILE, f"the adapter would change nothing: {nothing_in(parts)}")
    if config.invocation:
        check_activated(config.invocation, parts, layout, table, parts.needs_base)
    num_bytes = layout.num_elements * item_bytes(dtype)
    provisional = parts.needs_base or bool(config.residual_init)
    return Examined(files.digest, layout, parts.names, num_bytes, provisional, conversion.error)


def _parts(
    stored: dict[str, Stored], table: TargetTable, config: PeftConfig, limits: Limits
) -> tuple[AdapterParts, Conversion]:
    if config.kind != "LORA":
        return convert_parts(stored, table, config, limits)
    # Sorting asks tensors for their shapes, and some of them whether they are equal.
    return sort_parts(cast("dict[str, Tensor]", stored), table, config), EXACT


def _check_beside(parts: AdapterParts, dtype: str, vocab: int) -> Extras:
    """Upper bounds of what an image holds beside A and B. Raises AdapterInvalid."""
    shared = same_rows(parts.embedding, parts.head)
    for rows in (parts.embedding,) if shared else (parts.embedding, parts.head):
        for named in (rows.some, rows.whole) if rows is not None else ():
            if named is not None:
                _packed(named, 1.0, dtype)
    affine = [each for each in parts.targets if each.is_affine]
    for each in affine:
        for named in (each.lora_bias, each.bias, each.magnitude, each.gain):
            if named is not None:
                _packed(named, 1.0, "float32")
    for _, named in parts.norms:
        _packed(named, 1.0, dtype)
    return Extras(
        scaled=frozenset(each.target.slice for each in affine if each.magnitude or each.gain),
        shifted=frozenset(each.target.slice for each in affine),
        norms=frozenset(norm.index for norm, _ in parts.norms),
        embedding_rows=_num_rows(parts.embedding, vocab),
        head_rows=_num_rows(parts.head, vocab),
        shared_rows=shared and parts.embedding is not None,
        vocab_size=parts.vocab_size,
    )


def _num_rows(rows: Rows | None, vocab: int) -> int:
    if rows is None:
        return 0
    return vocab if rows.whole is not None else len(rows.ids)


def _check_values(parts: AdapterParts, dtype: str) -> bool:
    """Whether any target is changed. Raises AdapterInvalid."""
    changes = False
    for each in parts.targets:
        if each.a is None or each.b is None:
            continue
        packed = [_packed(each.a, 1.0, dtype), _packed(each.b, each.scaling, dtype)]
        changes = changes or all(packed)
    return changes


def _packed(named: Named, scale: float, dtype: str) -> float:
    """The largest magnitude that a tensor has in an image."""
    largest = cast("Stored | Deferred", named.tensor).largest()
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

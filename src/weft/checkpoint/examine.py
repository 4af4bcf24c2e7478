"""Checks whether an adapter can be served, without importing torch, which takes seconds.

Names, shapes and ranks are checked by the same code as in `pack`. Packing also finds out whether
values are finite, fit the serving dtype and change anything. Here the largest magnitude of each
tensor tells that, as rounding keeps the order of numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from weft.checkpoint.kinds import CONVERSION_TOLERANCE, sort_adapter
from weft.checkpoint.parts import AdapterParts, Values, check_activated, nothing_in, same_rows
from weft.checkpoint.read import AdapterFiles, item_bytes
from weft.checkpoint.refuse import refuse
from weft.core.files import WEIGHTS_FILE
from weft.core.targets import Extras, ImageLayout, TargetTable, layout_of, vocabulary


@dataclass(frozen=True, slots=True)
class Examined:
    """What is known of an adapter's image without packing it."""

    digest: str
    layout: ImageLayout
    targets: tuple[str, ...]
    """This and the next fields are as in `AdapterImage`."""
    num_bytes: int
    provisional: bool = False
    conversion_error: float = 0.0


def examine(
    files: AdapterFiles,
    table: TargetTable,
    dtype: str,
    max_rank: int,
    conversion_tolerance: float = CONVERSION_TOLERANCE,
) -> Examined | None:
    """What `pack_image` would find without the base. `dtype`: torch's name of the serving dtype.
    None for an adapter with added tokens, whose rows have to be computed. Raises AdapterInvalid."""
    config, parts = sort_adapter(files, table, max_rank, conversion_tolerance)
    vocab, _ = vocabulary(table, "embedding")
    if parts.vocab_size > vocab:
        return None
    extras = _check_beside(parts, dtype, parts.vocab_size or vocab)
    layout = layout_of(table, parts.ranks(table), extras, item_bytes(dtype))
    if not (check_values(parts, dtype) or layout.vocab_size or parts.needs_base):
        refuse(WEIGHTS_FILE, f"the adapter would change nothing: {nothing_in(parts)}")
    if config.invocation:
        check_activated(config.invocation, parts, layout, table, parts.needs_base)
    num_bytes = layout.num_elements * item_bytes(dtype)
    provisional = parts.needs_base or bool(config.residual_init)
    return Examined(files.digest, layout, parts.names, num_bytes, provisional, parts.worst[0])


def _check_beside(parts: AdapterParts, dtype: str, vocab: int) -> Extras:
    """Upper bounds of what an image has besides A and B. Raises AdapterInvalid."""
    shared = same_rows(parts.embedding, parts.head)
    for rows in (parts.embedding,) if shared else (parts.embedding, parts.head):
        for stored in (rows.some, rows.whole) if rows is not None else ():
            if stored is not None:
                _packed(stored, dtype)
    affine = [each for each in parts.targets if each.vectors]
    for each in affine:
        for vector in each.vectors:
            _packed(vector, "float32")
    for _, weight in parts.norms:
        _packed(weight, dtype)
    return Extras(
        scaled=frozenset(each.target.slice for each in affine if each.magnitude or each.gain),
        shifted=frozenset(each.target.slice for each in affine),
        norms=frozenset(norm.index for norm, _ in parts.norms),
        embedding_rows=0 if parts.embedding is None else parts.embedding.count(vocab),
        head_rows=0 if parts.head is None else parts.head.count(vocab),
        shared_rows=shared and parts.embedding is not None,
        vocab_size=parts.vocab_size,
    )


def check_values(parts: AdapterParts, dtype: str) -> bool:
    """Whether A and B change any target. Raises AdapterInvalid, naming the tensor, if one is not
    finite in the image, whether it is not in the file or is too large for the serving dtype."""
    changes = False
    for each in parts.targets:
        if each.a is not None and each.b is not None:
            packed = _packed(each.a, dtype), _packed(each.b, dtype, each.scaling)
            changes = changes or all(packed)
    return changes


def _packed(values: Values, dtype: str, scale: float = 1.0) -> float:
    """The largest magnitude that a tensor has in an image. Raises AdapterInvalid."""
    largest = values.largest()
    if not np.isfinite(largest):
        refuse(values.name, "holds NaN or infinite values")
    with np.errstate(over="ignore", under="ignore"):
        packed = _rounded(largest * np.float32(abs(scale)), dtype)
    if not np.isfinite(packed):
        refuse(values.name, f"holds values too large for {dtype}")
    return packed


def _rounded(value: np.float32, dtype: str) -> float:
    if dtype == "bfloat16":
        bits = int(value.view(np.uint32))
        bits = (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000
        return float(np.uint32(bits).view(np.float32))
    return float(value.astype(dtype))

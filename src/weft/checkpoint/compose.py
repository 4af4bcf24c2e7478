"""Builds the weighted sum of adapters as one adapter: A stacked, B scaled and side by side.

    s B A + t D C  =  [s B | t D] [A]
                                  [C]

So the sum is exact, except that scaled B is rounded to the serving dtype.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace

import torch

from weft.checkpoint.base import array_of, is_finite
from weft.checkpoint.pack import AdapterImage, allocate, fill, pair_views
from weft.core.errors import InvalidRequest
from weft.core.targets import Extras, ImageLayout, Target, TargetTable, layout_of

_SUMMED = frozenset({"rank", "a_offset", "b_offset", "num_elements", "shift_offset", "has_experts"})
_DESCRIBES = frozenset(
    {"digest", "layout", "data", "targets", "provisional", "checksums"}
    | {"conversion_error", "conversion_worst"}
)
"""Fields of a layout (`_SUMMED`) and of an image that can be summed, or have no effect. An adapter
with any other field set, even one that is unknown here, can't be part of a sum."""
_HOLDS = {
    "scale_offset": "outputs that it scales (DoRA, IA3)",
    "norm_offset": "norms of its own",
    "embedding_rows": "rows of the embedding of its own",
    "head_rows": "rows of the head of its own",
    "vocab_size": "a vocabulary of its own",
    "invocation": "tokens that activate it (aLoRA)",
}


@dataclass(frozen=True, slots=True)
class Summand:
    """The facts of an adapter that decide of which sums it may be part."""

    rank: tuple[int, ...]
    """Per slice."""
    shifted: frozenset[int]
    """Slices to whose output it adds a vector."""
    beyond: str
    """What it has that can't be summed, for messages; "": nothing."""


def summand_of(image: AdapterImage) -> Summand:
    layout = image.layout
    shifted = frozenset(i for i, offset in enumerate(layout.shift_offset) if offset >= 0)
    beyond = [
        _HOLDS.get(field.name, field.name)
        for record, served in ((layout, _SUMMED), (image, _DESCRIBES))
        for field in fields(record)
        if field.name not in served and getattr(record, field.name)
    ]
    return Summand(layout.rank, shifted, ", ".join(beyond))


def check_sum(
    parts: Sequence[tuple[str, Summand]], table: TargetTable, max_rank: int, dtype: torch.dtype
) -> int:
    """How many elements the image of a sum of adapters takes. Raises InvalidRequest if it can't be
    made; `parts`: (name, Summand)."""
    for name, summand in parts:
        if summand.beyond:
            message = f"adapters: {name!r} can't be part of a sum, as it holds {summand.beyond}"
            raise InvalidRequest(message, "adapters")
    rank = _rank([summand for _, summand in parts])
    worst = max(range(len(rank)), key=rank.__getitem__)
    if rank[worst] > max_rank:
        raise InvalidRequest(
            f"adapters: the ranks add up to {rank[worst]} in {table.targets[worst].name}; at most"
            f" {max_rank} is served",
            "adapters",
        )
    return _layout([summand for _, summand in parts], table, dtype).num_elements


def sum_images(
    digest: str,
    parts: Sequence[tuple[AdapterImage, float]],
    table: TargetTable,
    dtype: torch.dtype,
    into: torch.Tensor | None = None,
    num_ranks: int = 1,
) -> AdapterImage:
    """The weighted sum of images that passed `check_sum`, with its data in `into` (bytes) if given.
    `parts`: (image, weight). `table`: of one of `num_ranks` ranks. Raises InvalidRequest if values
    are too large for the dtype."""
    layout = _layout([summand_of(image) for image, _ in parts], table, dtype)
    num_elements = num_ranks * layout.num_elements
    if into is None:
        data = allocate(num_elements, dtype)
    else:
        data = into[: num_elements * dtype.itemsize].view(dtype).zero_()
    finite = True
    for rank, own in enumerate(data.view(num_ranks, layout.num_elements)):
        of_rank = [(replace(image, data=image.data_of(rank)), scale) for image, scale in parts]
        finite = _fill_sum(own, of_rank, table, layout) and finite
    if not finite:
        raise InvalidRequest(f"adapters: with these scales, weights exceed {dtype}", "adapters")
    names = (name for image, _ in parts for name in image.targets)
    return AdapterImage(digest, layout, data, tuple(dict.fromkeys(names)))


def _fill_sum(
    data: torch.Tensor,
    parts: Sequence[tuple[AdapterImage, float]],
    table: TargetTable,
    layout: ImageLayout,
) -> bool:
    """Fill in one rank's part of the sum. Returns whether all values are finite."""
    for target in table.targets:
        if layout.rank[target.slice]:
            _fill_target(data, parts, target, table, layout)
    matrices = data[: layout_of(table, layout.rank).num_elements]
    finite = not len(matrices) or is_finite(matrices)
    for index, offset in enumerate(layout.shift_offset):
        if offset >= 0:
            shift = _shift(data, layout, table.targets[index])
            for image, scale in parts:
                if image.layout.shift_offset and image.layout.shift_offset[index] >= 0:
                    own = _shift(image.data, image.layout, table.targets[index])
                    shift.add_(own, alpha=scale)
            finite = finite and is_finite(shift)
    return finite


def _rank(summands: Iterable[Summand]) -> tuple[int, ...]:
    ranks = (summand.rank for summand in summands)
    return tuple(map(sum, zip(*ranks, strict=True)))


def _layout(summands: Sequence[Summand], table: TargetTable, dtype: torch.dtype) -> ImageLayout:
    shifted = frozenset[int]().union(*(summand.shifted for summand in summands))
    return layout_of(table, _rank(summands), Extras(shifted=shifted), dtype.itemsize)


def _fill_target(
    data: torch.Tensor,
    parts: Sequence[tuple[AdapterImage, float]],
    target: Target,
    table: TargetTable,
    layout: ImageLayout,
) -> None:
    for expert in range(table.copies(target.kind)):
        a, b = pair_views(array_of(data), target, table, layout, expert)
        stop = 0
        for image, scale in parts:
            rank = image.layout.rank[target.slice]
            if not rank:
                continue
            start, stop = stop, stop + rank
            own_a, own_b = pair_views(array_of(image.data), target, table, image.layout, expert)
            fill(a[start:stop], own_a, 1.0)
            fill(b[:, start:stop], own_b, scale)


def _shift(data: torch.Tensor, layout: ImageLayout, target: Target) -> torch.Tensor:
    """float32 (out,), a view of an image."""
    start = layout.shift_offset[target.slice]
    size = target.out_features * 4 // data.element_size()
    return data[start : start + size].view(torch.float32)

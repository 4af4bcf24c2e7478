"""From an adapter's tensors to its image: names to targets, shapes, ranks, scale.

The layout of an image is stated in `weft.core.targets`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from weft.checkpoint.config import PeftConfig, parse_config
from weft.checkpoint.read import (
    MAX_HEADER_BYTES,
    WEIGHTS_FILE,
    AdapterFiles,
    parse_tensors,
    read_files,
)
from weft.checkpoint.refuse import refuse, show
from weft.core.errors import AdapterUnavailable
from weft.core.targets import ImageLayout, Target, TargetTable, layout_of

PREFIX = "base_model.model."

_BLOCK = 1 << 14
"""Elements copied at a time: few enough to stay in the cache, and for torch not to wake a pool
of threads, which would take the cores from a step that runs meanwhile."""
_LINEAR_PARTS = {".lora_A.weight": "A", ".lora_B.weight": "B"}
_EMBEDDING_PARTS = {".lora_embedding_A": "A", ".lora_embedding_B": "B"}
_WHOLE = (".base_layer.weight", "embed_tokens.weight", "lm_head.weight")


@dataclass(frozen=True)
class AdapterImage:
    """One adapter version, packed for the kernels."""

    digest: str
    """Of its two files, see `weft.checkpoint.read.AdapterFiles.digest`."""
    layout: ImageLayout
    data: torch.Tensor
    """(layout.num_elements,), the serving dtype, CPU; the gaps between matrices are zero."""
    targets: tuple[str, ...]
    """Names of the adapted projections without the layer, in table order."""

    @property
    def num_bytes(self) -> int:
        return self.data.numel() * self.data.element_size()


@dataclass(frozen=True)
class _Pair:
    """The matrices of one target: A (r, in), B (out, r), and their names in the file."""

    target: Target
    a_name: str
    a: torch.Tensor
    b_name: str
    b: torch.Tensor
    scale: float


def load_image(
    path: Path,
    table: TargetTable,
    dtype: torch.dtype,
    max_rank: int,
    expect_digest: str | None = None,
) -> AdapterImage:
    """Read, validate and pack the PEFT adapter in the folder `path` for the base in `table`.

    Raises AdapterNotFound (folder or file missing), AdapterInvalid (not served; `param` names
    the field, tensor or file), AdapterUnavailable (the digest is not `expect_digest`).
    """
    files = read_files(path, _max_weight_bytes(table, max_rank))
    if expect_digest is not None and files.digest != expect_digest:
        message = f"the adapter in {show(str(path))} changed on disk since it was loaded"
        raise AdapterUnavailable(message, "lora_path")
    return pack_image(files, table, dtype, max_rank)


def pack_image(
    files: AdapterFiles, table: TargetTable, dtype: torch.dtype, max_rank: int
) -> AdapterImage:
    """The image of an adapter from the content of its files. Raises AdapterInvalid."""
    config = parse_config(files.config, max_rank)
    pairs = _pair_up(parse_tensors(files.weights), table, config)
    config.check_modules([pair.target.name for pair in pairs])
    ranks = [0] * len(table.targets)
    for pair in pairs:
        ranks[pair.target.slice] = pair.a.shape[0]
    layout = layout_of(table, tuple(ranks))
    data = _pack(pairs, table, layout, dtype)
    targets = tuple(dict.fromkeys(pair.target.suffix for pair in pairs))
    return AdapterImage(files.digest, layout, data, targets)


def _max_weight_bytes(table: TargetTable, max_rank: int) -> int:
    """An upper bound for the file of any adapter of at most `max_rank`, in float32."""
    features = sum(target.in_features + target.out_features for target in table.targets)
    return 4 * max_rank * features + 2 * MAX_HEADER_BYTES


def _pair_up(
    tensors: dict[str, torch.Tensor], table: TargetTable, config: PeftConfig
) -> list[_Pair]:
    """A and B of every adapted target, in table order, checked."""
    parts: dict[str, dict[str, str]] = {}
    for tensor in tensors:
        target, part = _locate(tensor, table)
        parts.setdefault(target.name, {})[part] = tensor
    if not parts:
        refuse(WEIGHTS_FILE, "holds no tensors")
    adapted = [target for target in table.targets if target.name in parts]
    return [_pair(target, parts[target.name], tensors, config) for target in adapted]


def _locate(tensor: str, table: TargetTable) -> tuple[Target, str]:
    """The target that a tensor of the file is for, and whether it is its A or its B."""
    if not tensor.startswith(PREFIX):
        refuse(tensor, f"not a tensor of a PEFT LoRA, whose names start with {PREFIX}")
    name = tensor.removeprefix(PREFIX)
    for suffix, part in (_LINEAR_PARTS | _EMBEDDING_PARTS).items():
        if name.endswith(suffix):
            target = _known(tensor, name.removesuffix(suffix), table)
            if (suffix in _EMBEDDING_PARTS) != (target.kind == "embedding"):
                refuse(tensor, f"{target.name} is a {target.kind} in the base model")
            return target, part
    why = "only lora_A and lora_B matrices are served"
    if name.endswith(_WHOLE):
        why += "; save the adapter with save_embedding_layers=False to leave whole weights out"
    return refuse(tensor, why)


def _known(tensor: str, name: str, table: TargetTable) -> Target:
    target = table.by_name.get(name)
    if target is None:
        refuse(tensor, f"no such projection in the base model{_hint(name, table)}")
    return target


def _hint(name: str, table: TargetTable) -> str:
    """What the base has instead: fewer layers, or other projections."""
    num_layers = 1 + max((_layer(target.name) for target in table.targets), default=-1)
    if _layer(name) >= num_layers:
        return f", which has {num_layers} layers"
    return f", which has {', '.join(dict.fromkeys(target.suffix for target in table.targets))}"


def _layer(name: str) -> int:
    """The first number that is a part of the name; -1 when there is none."""
    parts = (part for part in name.split(".") if part.isdecimal() and len(part) < 10)
    return next((int(part) for part in parts), -1)


def _pair(
    target: Target, parts: dict[str, str], tensors: dict[str, torch.Tensor], config: PeftConfig
) -> _Pair:
    for present, missing in (("A", "B"), ("B", "A")):
        if missing not in parts:
            refuse(parts[present], f"its counterpart, the {missing} matrix, is missing")
    rank = config.rank_of(target.name)
    _check_shape(parts["A"], tensors[parts["A"]], (rank, target.in_features))
    _check_shape(parts["B"], tensors[parts["B"]], (target.out_features, rank))
    return _Pair(
        target,
        parts["A"],
        tensors[parts["A"]],
        parts["B"],
        tensors[parts["B"]],
        config.scale_of(target.name, rank),
    )


def _check_shape(name: str, tensor: torch.Tensor, expected: tuple[int, int]) -> None:
    if tuple(tensor.shape) != expected:
        refuse(
            name,
            f"has the shape {tuple(tensor.shape)}; the base model and the ranks in the config"
            f" make it {expected}",
        )


def _pack(
    pairs: list[_Pair], table: TargetTable, layout: ImageLayout, dtype: torch.dtype
) -> torch.Tensor:
    """The flat buffer (layout.num_elements,). Scaling is done in float32, then cast to `dtype`."""
    data = torch.zeros(layout.num_elements, dtype=dtype)
    changes = False
    for pair in pairs:
        a, b = _views(data, pair.target, table, layout)
        if pair.target.kind == "embedding":
            _fill(a.t(), pair.a.t(), 1.0)
        else:
            _fill(a, pair.a, 1.0)
        _fill(b, pair.b, pair.scale)
        changes = changes or bool(a.any() and b.any())
    _check_finite(data, pairs, table, layout)
    if not changes:
        refuse(WEIGHTS_FILE, "the adapter would change nothing: A or B is zero in every target")
    return data


def _fill(dest: torch.Tensor, source: torch.Tensor, scale: float) -> None:
    """dest = scale * source, both (rows, columns), in blocks of rows."""
    step = max(1, _BLOCK // dest.shape[1])
    for start in range(0, dest.shape[0], step):
        block = source[start : start + step]
        dest[start : start + step].copy_(block if scale == 1.0 else block.float() * scale)


def _views(
    data: torch.Tensor, target: Target, table: TargetTable, layout: ImageLayout
) -> tuple[torch.Tensor, torch.Tensor]:
    """A (r, in) and B (out, r) of one target as views of the image."""
    group = table.groups[target.group]
    rank = layout.rank[target.slice]
    total = sum(layout.rank[s.slice] for s in group.slices)
    row = sum(layout.rank[s.slice] for s in group.slices if s.slice < target.slice)
    start = layout.a_offset[target.group]
    stacked = data[start : start + total * group.in_features]
    if group.kind == "embedding":
        a = stacked.view(group.in_features, total)[:, row : row + rank].t()
    else:
        a = stacked.view(total, group.in_features)[row : row + rank]
    start = layout.b_offset[target.slice]
    b = data[start : start + target.out_features * rank].view(target.out_features, rank)
    return a, b


def _check_finite(
    data: torch.Tensor, pairs: list[_Pair], table: TargetTable, layout: ImageLayout
) -> None:
    if _is_finite(data):
        return
    for pair in pairs:
        views = _views(data, pair.target, table, layout)
        for name, original, packed in zip(
            (pair.a_name, pair.b_name), (pair.a, pair.b), views, strict=True
        ):
            if not _is_finite(original):
                refuse(name, "holds NaN or infinite values")
            if not _is_finite(packed):
                refuse(name, f"holds values too large for {str(data.dtype).removeprefix('torch.')}")


def _is_finite(tensor: torch.Tensor) -> bool:
    """In one pass and without a temporary: NaN and infinity both show in the extremes."""
    low, high = torch.aminmax(tensor)
    return bool(torch.isfinite(low) and torch.isfinite(high))

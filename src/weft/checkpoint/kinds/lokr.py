"""LoKr: the Kronecker product of W1 and W2, each of which may be a product of two matrices.

The singular values of a Kronecker product are the products of its factors', and its singular
vectors the Kronecker products of theirs. So it is decomposed through its factors, and the largest
singular values are served, as long as the error of leaving out the rest is within the tolerance.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from weft.checkpoint.fields import flag, integer
from weft.checkpoint.kinds.base import Kind, LinearModule, PeftAdapter, decompose, lost, peaks
from weft.checkpoint.kinds.loha import LYCORIS_HARMLESS, LYCORIS_READ
from weft.checkpoint.parts import AdapterParts, Array, TargetParts
from weft.checkpoint.refuse import refuse

_MAX_SVD = 1024
"""A dense matrix is decomposed, in seconds, if its smaller side is at most this."""
_NEGLIGIBLE = 3e-7
"""Singular values below this share of the largest are float32's noise."""


def _sort(adapter: PeftAdapter) -> AdapterParts:
    return AdapterParts([_convert(adapter, module) for module in adapter.modules()])


def _convert(adapter: PeftAdapter, module: LinearModule) -> TargetParts:
    target, config, limit = module.target, adapter.config, adapter.max_rank
    r = config.rank_of(target.name)
    factor = integer(config.options, "decompose_factor", -1)
    in_1, in_2 = sides(target.in_features, factor)
    out_1, out_2 = sides(target.out_features, factor)
    small = flag(config.options, "decompose_both") and r < max(out_1, in_1) / 2
    parts_1, (u_1, s_1, v_1) = _factor(module, "lokr_w1", out_1, in_1, r if small else None)
    small = r < max(out_2, in_2) / 2
    parts_2, (u_2, s_2, v_2) = _factor(module, "lokr_w2", out_2, in_2, r if small else None)
    expected = (*parts_1, *parts_2)
    for part, tensor in module.tensors.items():
        if part not in expected:
            refuse(tensor.name, f"does not belong beside {', '.join(expected)}")

    scale = config.scale_of(target.name, r)
    s = np.outer(s_1, s_2).reshape(-1) * abs(scale)
    order = np.argsort(-s, kind="stable")
    exact = max(1, int(np.count_nonzero(s > _NEGLIGIBLE * s[order[0]])))
    kept = order[: min(exact, limit)]
    error = lost(s[order[limit:]], s) if exact > limit else 0.0
    adapter.check_error(module.first, error, exact)
    by_a = np.sqrt(s[kept])
    by_b = by_a * math.copysign(1.0, scale)
    return module.lora(
        len(kept),
        lambda: _rows(v_1, v_2, kept, by_a),
        lambda: _rows(u_1.T, u_2.T, kept, by_b).T,
        lambda: _largest(v_1, v_2, kept, by_a),
        lambda: _largest(u_1.T, u_2.T, kept, by_b),
        error,
    )


def _factor(
    module: LinearModule, part: str, num_out: int, num_in: int, rank: int | None
) -> tuple[tuple[str, ...], tuple[Array, Array, Array]]:
    """The parts that hold W1 or W2, and its singular value decomposition."""
    if rank is not None:
        parts = f"{part}_a", f"{part}_b"
        b, a = module.get(parts[0], num_out, rank), module.get(parts[1], rank, num_in)
        return parts, decompose(b.values(), a.values())
    tensor = module.get(part, num_out, num_in)
    if min(tensor.shape) > _MAX_SVD:
        refuse(
            tensor.name,
            f"a full matrix of more than {_MAX_SVD} rows and columns is no LoRA of a small rank",
        )
    u, s, v = np.linalg.svd(tensor.values().astype(np.float64), full_matrices=False)
    return (part,), (u, s, v)


def _rows(one: Array, other: Array, kept: NDArray[np.intp], by: Array) -> Array:
    """These rows (k, m n) of the Kronecker product of (i, m) and (j, n), times `by`."""
    i, j = np.divmod(kept, len(other))
    return (one[i][:, :, None] * other[j][:, None, :]).reshape(len(by), -1) * by[:, None]


def _largest(one: Array, other: Array, kept: NDArray[np.intp], by: Array) -> np.floating:
    """The largest magnitude in `_rows`."""
    i, j = np.divmod(kept, len(other))
    found: np.floating = (peaks(one)[i] * peaks(other)[j] * abs(by[:, None])).max()
    return found


def sides(features: int, factor: int) -> tuple[int, int]:
    """How PEFT splits a dimension: by `factor` if that divides it, else by the divisors up to it
    (-1: any) until they meet; the smaller side first."""
    if factor > 0 and features % factor == 0:
        return factor, features // factor
    limit = features if factor == -1 else factor
    side = 1
    for divisor in range(2, min(limit, features) + 1):
        if side * side >= features:
            break
        if features % divisor == 0:
            side = divisor
    return min(side, features // side), max(side, features // side)


KIND = Kind(
    peft_type="LOKR",
    title="LoKr",
    sort=_sort,
    tensors=("lokr_w1", "lokr_w1_a", "lokr_w1_b", "lokr_w2", "lokr_w2_a", "lokr_w2_b"),
    read=LYCORIS_READ | {"decompose_both", "decompose_factor"},
    harmless=LYCORIS_HARMLESS | {"rank_dropout_scale"},
)

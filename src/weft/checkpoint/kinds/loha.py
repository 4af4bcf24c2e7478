"""LoHa: (B1 A1) * (B2 A2), multiplied element by element.

That is a B A of rank r * r, whose rows of A are the products of all pairs of rows of A1 and A2, and
whose columns of B are those of B1 and B2. If r * r is above the largest rank, the best
approximation of that rank is served instead, as long as its error is within the tolerance.
"""

from __future__ import annotations

import numpy as np

from weft.checkpoint.kinds.base import LAYERS, Kind, LinearModule, PeftAdapter, decompose, lost
from weft.checkpoint.parts import AdapterParts, Array, TargetParts, largest
from weft.checkpoint.refuse import refuse

_MAX_EXCESS = 4
"""The rank r * r is approximated if it is at most so many times the largest that is served."""

# A linear layer has no kernel, so `use_effective_conv2d` says nothing of it.
LYCORIS_HARMLESS = frozenset(
    {"init_weights", "module_dropout", "rank_dropout", "use_effective_conv2d"}
)
LYCORIS_READ = LAYERS | {"alpha", "alpha_pattern", "exclude_modules", "r", "rank_pattern"}


def _sort(adapter: PeftAdapter) -> AdapterParts:
    return AdapterParts([_convert(adapter, module) for module in adapter.modules()])


def _convert(adapter: PeftAdapter, module: LinearModule) -> TargetParts:
    target, limit = module.target, adapter.max_rank
    num_in, num_out = target.in_features, target.out_features
    r = adapter.config.rank_of(target.name)
    b1, a1 = module.get("hada_w1_a", num_out, r), module.get("hada_w1_b", r, num_in)
    b2, a2 = module.get("hada_w2_a", num_out, r), module.get("hada_w2_b", r, num_in)
    scale = np.float32(adapter.config.scale_of(target.name, r))
    if min(num_in, num_out) <= min(r * r, limit):
        full_a, full_b = _full(b1.values(), a1.values(), b2.values(), a2.values(), scale)
        return module.lora(len(full_a), lambda: full_a, lambda: full_b)

    def pairs_a() -> Array:
        return _pairs(a1.values(), a2.values())

    def pairs_b() -> Array:
        return _pairs(b1.values().T, b2.values().T)

    if r * r <= limit:
        return module.lora(
            r * r,
            pairs_a,
            lambda: pairs_b().T * scale,
            bound_b=lambda: largest(pairs_b()) * abs(scale),
        )
    if r * r > _MAX_EXCESS * limit:
        refuse(
            "r",
            f"a LoHa of rank {r} is a LoRA of rank {r * r}; at most"
            f" {_MAX_EXCESS * limit} is served ({_MAX_EXCESS} times --max-lora-rank)",
        )
    a, b = pairs_a(), pairs_b().T * scale
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        refuse(module.first, "holds values too large for float32 when multiplied")
    u, s, v = decompose(b, a)
    error = lost(s[limit:], s)
    adapter.check_error(module.first, error, r * r)
    root = np.sqrt(s[:limit])
    near_a, near_b = root[:, None] * v[:limit], u[:, :limit] * root
    return module.lora(limit, lambda: near_a, lambda: near_b, error=error)


def _pairs(one: Array, other: Array) -> Array:
    """(r * r, n): the products of all pairs of rows (r, n)."""
    return (one[:, None, :] * other[None, :, :]).reshape(-1, one.shape[1])


def _full(b1: Array, a1: Array, b2: Array, a2: Array, scale: np.float32) -> tuple[Array, Array]:
    """A and B, of which one is the whole matrix, for a target with a side shorter than r * r."""
    whole = (b1 @ a1) * (b2 @ a2) * scale
    identity = np.eye(min(whole.shape), dtype=np.float32)
    return (whole, identity) if whole.shape[0] <= whole.shape[1] else (identity, whole)


KIND = Kind(
    peft_type="LOHA",
    title="LoHa",
    sort=_sort,
    tensors=("hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b"),
    read=LYCORIS_READ,
    harmless=LYCORIS_HARMLESS,
)

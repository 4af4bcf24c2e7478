"""Computes the parts of an adapter that depend on the base's weights, such as DoRA's scales.

Arithmetic is in float32, on the device where the base's weights are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from weft.checkpoint.parts import AdapterParts, Rows, TargetParts, Values
from weft.checkpoint.read import Raw, Stored
from weft.checkpoint.refuse import refuse, show
from weft.core.targets import Kind, Norm, Target, TargetTable

_CHUNK = 1 << 24
"""The most elements of a weight that are converted at a time, which bounds the memory for it."""
_ROUNDING = 1e-6
"""Scales this close to 1 count as 1: peft computes an untrained DoRA's norms in another order."""


class BaseWeights(Protocol):
    """The base model's weights in the serving dtype, on any device. They must not be written to.
    Classes inherit from this."""

    def weight(self, target: Target) -> torch.Tensor:
        """(out, in); of the embedding (hidden, vocab)."""

    def bias(self, target: Target) -> torch.Tensor | None: ...  # (out,)

    def norm(self, norm: Norm) -> torch.Tensor: ...  # (size,)

    def row_squares(self, target: Target, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """See `row_squares`, of the target's weight."""
        return row_squares(self.weight(target), a, b)


@dataclass(frozen=True, slots=True)
class Replaced:
    """Rows of the embedding or the head that differ from the base's."""

    ids: torch.Tensor
    """int32 (n,), rising."""
    rows: torch.Tensor
    """(n, hidden), the serving dtype."""


Affine = tuple[torch.Tensor | None, torch.Tensor | None]
"""Scale and shift, float32 (out,) on the CPU; None: ones, zeros."""


def affine(parts: TargetParts, base: BaseWeights | None, replaced: Replaced | None) -> Affine:
    """Scale and shift that turn `W x + bias + scaling B A x` of the base, with the rows in
    `replaced`, into the adapter's output. Without `base`, placeholders. Raises AdapterInvalid."""
    for vector in parts.vectors:
        check_finite(vector)
    target = parts.target
    if base is None:
        ones, zeros = torch.ones(target.out_features), torch.zeros(target.out_features)
        scaled = parts.magnitude is not None or parts.gain is not None
        return (ones if scaled else None), zeros
    old = base.bias(target)
    old = torch.zeros(target.out_features) if old is None else old.float().cpu()
    new = old if parts.bias is None else tensor_of(parts.bias.array).float()
    scale = torch.ones(target.out_features)
    if parts.magnitude is not None:
        scale = _dora_scale(parts, parts.magnitude, base, replaced)
    elif parts.gain is not None:
        scale = tensor_of(parts.gain.array).float()
        new = scale * new
    shift = new - scale * old
    if parts.lora_bias is not None:
        shift = shift + parts.scaling * tensor_of(parts.lora_bias.array).float()
    is_one = (scale - 1.0).abs().max() <= _ROUNDING
    return (None if is_one else scale), (shift if shift.any() else None)


def replaced_norm(
    norm: Norm, stored: Stored, dtype: torch.dtype, base: BaseWeights | None
) -> torch.Tensor | None:
    """A norm's weight in the serving dtype; None if it equals the base's. Raises AdapterInvalid."""
    weight = tensor_of(stored.array).to(dtype)
    check_finite(stored, weight)
    if base is not None and torch.equal(weight, base.norm(norm).cpu()):
        return None
    return weight


def replaced_rows(
    rows: Rows | None, kind: Kind, table: TargetTable, dtype: torch.dtype, base: BaseWeights | None
) -> Replaced | None:
    """Those rows that differ from the base's; None if none does. Raises AdapterInvalid."""
    if rows is None:
        return None
    some, order = None, torch.argsort(torch.tensor(rows.ids, dtype=torch.int64))
    if rows.some is not None:
        some = tensor_of(rows.some.array)[order].to(dtype)
        check_finite(rows.some, some)
    ids, found = torch.tensor(rows.ids, dtype=torch.int64)[order], some
    if rows.whole is not None:
        found = tensor_of(rows.whole.array).to(dtype)
        check_finite(rows.whole, found)
        if some is not None:
            found = found.clone().index_copy_(0, ids, some)
        ids = torch.arange(len(found))
    assert found is not None
    if base is not None:
        target = next(target for target in table.targets if target.kind == kind)
        weight = _by_token(base.weight(target), target)
        known = int((ids < len(weight)).sum())
        differs = torch.ones(len(ids), dtype=torch.bool)
        differs[:known] = _differs(found[:known], ids[:known], weight)
        if not differs.all():
            ids, found = ids[differs], found[differs]
    return Replaced(ids.to(torch.int32), found) if len(ids) else None


def check_finite(values: Values, packed: torch.Tensor | None = None) -> None:
    """Raises AdapterInvalid, naming the tensor, unless its values are finite, and also those of
    `packed`: the same values in the serving dtype."""
    if not is_finite(tensor_of(values.array)):
        refuse(values.name, "holds NaN or infinite values")
    if packed is not None and not is_finite(packed):
        refuse(values.name, f"holds values too large for {name_of(packed.dtype)}")


def tensor_of(array: Raw) -> torch.Tensor:
    """The tensor of an array, in the same memory where that is aligned."""
    tensor = torch.from_numpy(np.require(array, requirements="A"))
    return tensor.view(torch.bfloat16) if array.dtype == np.uint16 else tensor


def array_of(tensor: torch.Tensor) -> Raw:
    """The array of a tensor on the CPU, in the same memory."""
    return (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def is_finite(tensor: torch.Tensor) -> bool:
    """Whether all values are finite, found in one pass without temporary memory: NaN and infinity
    both show in the minimum and maximum."""
    low, high = torch.aminmax(tensor)
    return bool(torch.isfinite(low) and torch.isfinite(high))


def _by_token(weight: torch.Tensor, target: Target) -> torch.Tensor:
    """(vocab, hidden)"""
    return weight.t() if target.kind == "embedding" else weight


def with_pair(replaced: Replaced, parts: TargetParts, vocab: int, affine: Affine) -> Replaced:
    """The rows, with those of added tokens (from `vocab` on) made final: A, B and `affine` are
    applied to them. Raises AdapterInvalid."""
    scale, shift = affine
    first = int((replaced.ids < vocab).sum())
    rows = replaced.rows[first:].float()
    is_head = parts.target.kind == "head"
    if parts.a is not None and parts.b is not None:
        check_finite(parts.a)
        check_finite(parts.b)
        a, b = tensor_of(parts.a.array).float(), tensor_of(parts.b.array).float()
        pair = b[vocab:] @ a if is_head else a[:, vocab:].t() @ b.t()
        rows = rows + parts.scaling * pair
    if is_head and parts.lora_bias is not None:
        refuse(parts.lora_bias.name, "a bias of added tokens in the head is not served")
    if scale is not None:
        rows = rows * (scale[vocab:, None] if is_head else scale)
    if shift is not None and not is_head:
        rows = rows + shift
    final = rows.to(replaced.rows.dtype)
    if not is_finite(final):
        refuse(parts.target.name, "holds NaN or infinite values")
    return Replaced(replaced.ids, torch.cat((replaced.rows[:first], final)))


def _differs(rows: torch.Tensor, ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Which rows are not those of the base's weight (vocab, hidden): bool (n,)."""
    step = max(1, _CHUNK // weight.shape[1])
    parts = [torch.ones(0, dtype=torch.bool)]
    for start in range(0, len(ids), step):
        old = weight[ids[start : start + step].to(weight.device)]
        parts.append((rows[start : start + step].to(weight.device) != old).any(1).cpu())
    return torch.cat(parts)


def _token_weight(target: Target, base: BaseWeights, replaced: Replaced | None) -> torch.Tensor:
    """(out, in) of the embedding or the head, with the adapter's rows."""
    size = target.in_features if target.kind == "embedding" else target.out_features
    by_token = _by_token(base.weight(target), target)[:size]
    if replaced is not None:
        added = by_token.new_zeros(size - len(by_token), by_token.shape[1])
        by_token = torch.cat((by_token, added))
        by_token[replaced.ids.to(by_token.device, torch.int64)] = replaced.rows.to(by_token.device)
    return by_token.t() if target.kind == "embedding" else by_token


def _dora_scale(
    parts: TargetParts, magnitude: Values, base: BaseWeights, replaced: Replaced | None
) -> torch.Tensor:
    """The magnitudes over the lengths of the rows of W + scaling B A."""
    assert parts.a is not None and parts.b is not None
    # A copy, as the bits of products may depend on where in memory their factors begin.
    a = tensor_of(parts.a.array).to(torch.float32, copy=True)
    b = tensor_of(parts.b.array).float() * parts.scaling
    if parts.target.kind in ("embedding", "head"):
        squares = row_squares(_token_weight(parts.target, base, replaced), a, b)
    else:
        squares = base.row_squares(parts.target, a, b)
    scale = tensor_of(magnitude.array).float() / squares.clamp_min(0.0).sqrt()
    if not is_finite(scale):
        refuse(magnitude.name, "is undefined, as W + B A has rows that are zero")
    return scale


def row_squares(weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """float32 (out,) on the CPU: squared lengths of the rows of W + B A, which is not formed, as
    |w + b A|^2 = |w|^2 + 2 (w A^T) b + b (A A^T) b. Of some columns, it is their part of the sum.

    `a`: float32 (r, in). `b`: float32 (out, r)."""
    a, b = a.to(weight.device), b.to(weight.device)
    gram = a @ a.t()
    step = max(1, _CHUNK // weight.shape[1])
    parts: list[torch.Tensor] = []
    for start in range(0, weight.shape[0], step):
        w, v = weight[start : start + step].float(), b[start : start + step]
        parts.append((w * w).sum(1) + ((2.0 * (w @ a.t()) + v @ gram) * v).sum(1))
    return torch.cat(parts).cpu()


# -- the base that an initialisation left behind ---------------------------------------------------
#
# PiSSA, OLoRA and CorDA split each weight W into what A and B begin with and a residual, which
# takes W's place: W' = W - s B0 A0. An adapter saved as it is trained is right on the residual
# alone. The columns of B0 are orthogonal, and in their span B0 A0 is all of W or, for OLoRA,
# proportional to it. Training turns the span of B only a little. So in this span, the residual has
# nothing (OLoRA: a known multiple of A), while the original base has s B0 A0, and any other base
# has what is in a random span.

_SAMPLED = 12
"""How many targets are checked; a wrong base is wrong in all of them."""
_LARGEST_SHARE = 0.5
"""How much of the base may be in the span of B, as a part of what other bases have there at least.
Training turns B by an angle t, and so adds sin(t)^2. CorDA's kpm begins with directions of so
little weight that training turns them further: such an adapter is refused on any base."""


def check_residual(init: str, parts: AdapterParts, base: BaseWeights) -> None:
    """Raises AdapterInvalid unless `base` is the residual of an adapter initialised by `init`."""
    adapted = [each for each in parts.targets if each.a is not None and each.scaling]
    # An embedding is initialised otherwise, and its weight left alone.
    adapted = [each for each in adapted if each.target.kind in ("linear", "head")]
    step = -(-len(adapted) // _SAMPLED) or 1
    found = expected = 0.0
    for each in adapted[::step]:
        for matrix in (each.a, each.b):
            if matrix is not None:
                check_finite(matrix)
        held, others = _held(init, each, base.weight(each.target))
        found, expected = found + held, expected + others
    experts = any(each.target.kind == "experts" for each in parts.targets)
    if experts or not found <= _LARGEST_SHARE * expected:
        refuse(
            "init_lora_weights",
            f"{show(init)} is right only on the residual base model that PEFT made of the original"
            " one, which this base is not, as far as can be told; serve that base, or save the"
            " adapter with PEFT's path_initial_model_for_weight_conversion, which makes it a plain"
            " LoRA",
        )


def _held(init: str, parts: TargetParts, weight: torch.Tensor) -> tuple[float, float]:
    """Squared norms in the span of B: of what a residual would not have there, and of what any
    other base would have at least."""
    assert parts.a is not None and parts.b is not None
    a, b = (tensor_of(each.array).to(weight.device, torch.float32) for each in (parts.a, parts.b))
    span = torch.linalg.qr(b)[0]
    inside, square = torch.zeros_like(a[: span.shape[1]]), 0.0
    rows = max(1, _CHUNK // weight.shape[1])
    for start in range(0, weight.shape[0], rows):
        block = weight[start : start + rows].float()
        inside += span[start : start + rows].t() @ block
        square += float(block.square().sum())
    own = parts.scaling * (span.t() @ b) @ a
    if init == "olora":
        inside = inside - (1.0 / parts.scaling - 1.0) * own
    random_span = square * span.shape[1] / weight.shape[0]
    return float(inside.square().sum()), min(float(own.square().sum()), random_span)

"""Whether the base model is the one that an adapter's initialisation left behind.

PiSSA, OLoRA and CorDA split each weight W into what A and B begin with and a residual, which takes
W's place: W' = W - s B0 A0. An adapter saved as it is trained is right on the residual alone. The
columns of B0 are orthogonal, and B0 A0 is all of W in their span or, for OLoRA, in proportion to
it. So in the span of B, which training has turned by little, the residual holds nothing (OLoRA:
a known multiple of A), while the base that was split holds s B0 A0 and any other base what a
random span does.
"""

from __future__ import annotations

import torch

from weft.checkpoint.base import BaseWeights, check_finite
from weft.checkpoint.parts import AdapterParts, TargetParts
from weft.checkpoint.refuse import refuse, show

_SAMPLED = 12
"""Targets that are looked at: one wrong base is wrong in all of them."""
_CHUNK = 1 << 24
"""Elements of a weight looked at in one go: bounds what is allocated."""
_LARGEST_SHARE = 0.5
"""How much the residual may hold in the span of B, 1 being what other bases do at least. Training
turns B by an angle t, which lets in sin(t)^2. CorDA's kpm begins with directions of so little
weight that training turns them beyond that: such an adapter is refused anywhere."""


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
                check_finite(matrix.name, matrix.tensor)
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
    """Squared norms in the span of B: of what a residual would not hold, and of the least that
    another base would."""
    assert parts.a is not None and parts.b is not None
    a, b = (each.tensor.to(weight.device, torch.float32) for each in (parts.a, parts.b))
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

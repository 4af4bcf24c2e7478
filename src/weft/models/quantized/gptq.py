"""GPTQ, with and without a reordering of inputs by their activations: integers with a scale and a
zero point for each group of inputs.

Of a matrix (O, I), whose groups are G:
qweight, int32 (I bits / 32, O): the integers, consecutive inputs in one word.
qzeros, int32 (G, O bits / 32): zero points, less one in the first version of the format, in which
the greatest number thus stands for 0.
scales, (G, O). g_idx, int32 (I,): each input's group; without it, groups are of neighbours.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch

from weft.core.errors import ConfigError
from weft.kernels.quant.packed import Codes
from weft.models.quantized.values import (
    FLOATS,
    Dequantized,
    Parts,
    Tensors,
    group_size,
    joined,
    of_codes,
    unpacked,
)


def read_gptq(tensors: Tensors, stated: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    version = stated.get("checkpoint_format") or stated.get("format")
    shift, group = 0 if version == "gptq_v2" else 1, group_size(stated)
    make = partial(_matrix, bits=stated["bits"], shift=shift, group=group or -1)
    return joined(tensors, ".qweight", (".scales", ".qzeros", ".g_idx"), make)


def _matrix(parts: Parts, bits: int, shift: int, group: int) -> Dequantized:
    words, outputs = parts.shape(".qweight", 2)
    inputs, groups = words * 32 // bits, parts.shape(".scales", 2)[0]
    if ".g_idx" not in parts and group > 0:
        groups = -(-inputs // group)

    def codes() -> Codes:
        packed = parts.read(".qweight", (words, outputs), "I32")
        numbers_OI = unpacked(packed.t(), bits).flatten(1).to(torch.uint8)
        scales_GO = parts.read(".scales", (groups, outputs), *FLOATS)
        zeros = parts.read(".qzeros", (groups, -(-outputs * bits // 32)), "I32")
        zeros_GO = (unpacked(zeros, bits).flatten(1)[:, :outputs] + shift) & ((1 << bits) - 1)
        found = Codes("int4" if bits <= 4 else "int8", numbers_OI, scales_GO.t(), zeros_GO.t())
        if ".g_idx" not in parts:
            return found.in_groups(torch.arange(inputs) // group) if group > 0 else found
        index = parts.read(".g_idx", (inputs,), "I32").long()
        if not bool(((index >= 0) & (index < groups)).all()):
            name = f"{parts.stem}.g_idx"
            raise ConfigError(f"{name} names a group that is not among {groups}", name)
        return found.in_groups(index)

    return of_codes((outputs, inputs), codes)

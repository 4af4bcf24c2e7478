"""compressed-tensors: 8-bit floats, and integers of 4 or 8 bits, plain or packed into words.

Of a matrix (O, I), whose groups of inputs are G (one, where there is a scale for each output):
weight_packed, int32 (O, I bits / 32), holds integers plus half their range; weight, int8 (O, I),
holds them as they are. weight_scale is (O, G), or (1,) for the whole matrix. weight_zero_point is
int8 of the same shape, or int32 (O bits / 32, G) where a packed weight has more than one scale.
weight_g_idx, int32 (I,), is each input's group.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from weft.core.errors import ConfigError
from weft.kernels.quant.packed import Codes
from weft.models.quantized.fp8 import Block, block_size, fp8_matrix
from weft.models.quantized.values import (
    FLOATS,
    Dequantized,
    Parts,
    Tensors,
    joined,
    of_codes,
    unpacked,
)

_SCALE, _ZERO, _GROUPS = ".weight_scale", ".weight_zero_point", ".weight_g_idx"
_PACKED, _SHAPE = ".weight_packed", ".weight_shape"


def read_compressed(tensors: Tensors, stated: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    groups = [group["weights"] for group in stated["config_groups"].values()]
    floats = [group for group in groups if group["type"] == "float"]
    blocks = {block_size(g.get("block_structure")) for g in floats if g["strategy"] == "block"}
    if len(blocks) > 1:
        message = "quantization_config: blocks of several sizes in one checkpoint are not served"
        raise ConfigError(message, "quantization_config.config_groups")
    mixed = any(group["strategy"] != "block" for group in floats)
    plain = partial(_plain, block=next(iter(blocks), None), mixed=mixed)
    more = (_ZERO, _GROUPS, ".input_scale", ".input_zero_point")
    whole = dict(joined(tensors, _PACKED, (_SCALE, _SHAPE, *more), _packed))
    return joined(whole, ".weight", (_SCALE, *more), plain)


def _packed(parts: Parts) -> Dequantized:
    shape = parts.read(_SHAPE, (2,), "I32", "I64").tolist()
    outputs, inputs = shape
    rows, words = parts.shape(_PACKED, 2)
    bits = next((b for b in (4, 8) if words == -(-inputs * b // 32)), None)
    if bits is None or rows != outputs:
        name = parts.stem + _PACKED
        raise ConfigError(f"{name} has shape {(rows, words)}, too few for {tuple(shape)}", name)

    def codes() -> Codes:
        packed = parts.read(_PACKED, (outputs, words), "I32")
        numbers = unpacked(packed, bits).flatten(1)[:, :inputs]
        zeros = None
        if _ZERO in parts and parts.dtype(_ZERO) == "I8":
            zeros = _plain_zeros(parts, bits)
        elif _ZERO in parts:
            scales = parts.shape(_SCALE, 2)
            stored = parts.read(_ZERO, (-(-outputs * bits // 32), scales[1]), "I32")
            zeros = unpacked(stored.t(), bits).flatten(1)[:, :outputs].t()
        return _integers(parts, bits, numbers, zeros)

    return of_codes((outputs, inputs), codes)


def _plain(parts: Parts, block: Block | None, mixed: bool) -> Dequantized:
    """`mixed`: whether floats may also have one scale, or one for each output."""
    outputs, inputs = parts.shape(".weight", 2)
    if parts.dtype(".weight") != "I8":
        of_rows = mixed and parts.shape(_SCALE) in ((), (1,), (outputs, 1))
        return fp8_matrix(parts, _SCALE, None if of_rows else block, rounds=True)

    def codes() -> Codes:
        numbers = parts.read(".weight", (outputs, inputs), "I8").to(torch.int32) + 128
        zeros = _plain_zeros(parts, 8) if _ZERO in parts else None
        return _integers(parts, 8, numbers, zeros)

    return of_codes((outputs, inputs), codes)


def _plain_zeros(parts: Parts, bits: int) -> Tensor:
    """Zero points that are not packed, plus half the range of the integers."""
    return parts.read(_ZERO, parts.shape(_SCALE), "I8").to(torch.int32) + (1 << (bits - 1))


def _integers(parts: Parts, bits: int, numbers_OI: Tensor, zeros: Tensor | None) -> Codes:
    """The Codes of integers to which half their range was added. Scales and zero points are (O, G),
    (1,) or ()."""
    outputs, inputs = numbers_OI.shape
    stored = parts.shape(_SCALE)
    wanted = stored if stored in ((), (1,)) else (outputs, stored[-1])
    read = parts.read(_SCALE, wanted, *FLOATS)
    scales = read if read.dim() == 2 else read.reshape(1, 1)
    if zeros is None:
        zeros = torch.full_like(scales, 1 << (bits - 1), dtype=torch.int32)
    scale_OG, zero_OG = (x.reshape(scales.shape).expand(outputs, -1) for x in (scales, zeros))
    found = Codes("int4" if bits == 4 else "int8", numbers_OI.to(torch.uint8), scale_OG, zero_OG)
    if _GROUPS in parts and bool((index := parts.read(_GROUPS, (inputs,), "I32")).ge(0).all()):
        if int(index.max()) >= (groups := scales.shape[1]):
            name = parts.stem + _GROUPS
            raise ConfigError(f"{name} names a group that is not among {groups}", name)
        return found.in_groups(index.long())
    return found

"""bitsandbytes: 4-bit codes with a scale for each block of values, and 8-bit integers with a scale
for each output.

4 bits, of a matrix with N values: weight, uint8 (N / 2, 1), has two codes in a byte, the first in
its high bits; weight.quant_map, float32 (16,), is what codes mean; weight.absmax has the scales of
blocks. With double quantization those are uint8 codes themselves, and weight.nested_absmax and
weight.nested_quant_map say of what; their mean is apart. weight.quant_state.bitsandbytes__nf4 (or
fp4) is JSON text with shape, dtype and sizes of blocks.

8 bits: weight, int8 (O, I), and SCB, float32 (O,), the greatest value of each output's row.
weight_format, a byte, tells in which order values lie; 0 is that of rows.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from weft.core.errors import ConfigError
from weft.models.quantized.values import Dequantized, Parts, Tensors, joined

_MAP, _ABSMAX = ".weight.quant_map", ".weight.absmax"
_NESTED_MAP, _NESTED_ABSMAX = ".weight.nested_quant_map", ".weight.nested_absmax"
_STATES = tuple(f".weight.quant_state.bitsandbytes__{kind}" for kind in ("nf4", "fp4"))
_FORMAT = ".weight_format"
_PER_INT8 = 7.874015718698502e-3
"""1 / 127, as bitsandbytes rounds it."""
_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def read_bitsandbytes(tensors: Tensors, stated: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    parts = (_MAP, _ABSMAX, _NESTED_MAP, _NESTED_ABSMAX, *_STATES)
    whole = dict(joined(tensors, ".weight", parts, _four_bits))
    return joined(whole, ".weight", (".SCB", _FORMAT), _eight_bits)


def _eight_bits(parts: Parts) -> Dequantized:
    shape = outputs, _ = parts.shape(".weight", 2)

    def values() -> Tensor:
        if _FORMAT in parts and (order := int(parts.read(_FORMAT, (), "U8"))) != 0:
            name = parts.stem + _FORMAT
            raise ConfigError(f"{name} is {order}, and only 0, plain rows, is served", name)
        numbers = parts.read(".weight", shape, "I8").float()
        return numbers * parts.read(".SCB", (outputs,), "F32")[:, None] * _PER_INT8

    return Dequantized(shape, values)


def _four_bits(parts: Parts) -> Dequantized:
    state = _state(parts)
    outputs, inputs = state["shape"]
    num_values, block = outputs * inputs, state["blocksize"]

    def values() -> Tensor:
        stored = parts.read(".weight", (-(-num_values // 2), 1), "U8").flatten()
        meaning = parts.read(_MAP, (16,), "F32")
        codes = torch.stack((stored >> 4, stored & 15), -1).flatten()[:num_values]
        scales = _scales(parts, state, -(-num_values // block))
        each = scales.repeat_interleave(block)[:num_values]
        dense: Tensor = (meaning[codes.int()] * each).to(_DTYPES[state["dtype"]])
        return dense.view(outputs, inputs)

    return Dequantized((outputs, inputs), values)


def _scales(parts: Parts, state: Mapping[str, Any], count: int) -> Tensor:
    """The scale of each block, float32 (count,)."""
    if _NESTED_ABSMAX not in parts:
        return parts.read(_ABSMAX, (count,), "F32")
    size = state["nested_blocksize"]
    codes = parts.read(_ABSMAX, (count,), "U8")
    meaning = parts.read(_NESTED_MAP, (256,), "F32")
    scales = parts.read(_NESTED_ABSMAX, (-(-count // size),), "F32")
    offset: float = state["nested_offset"]
    return meaning[codes.int()] * scales.repeat_interleave(size)[:count] + offset


def _state(parts: Parts) -> dict[str, Any]:
    """The JSON text's object. Raises ConfigError, naming the tensor, if it can't be read."""
    name = next((state for state in _STATES if state in parts), _STATES[0])
    text = bytes(parts.read(name, parts.shape(name), "U8").tolist())
    try:
        state = json.loads(text)
        outputs, inputs = state["shape"]
        sizes = outputs, inputs, state["blocksize"], state.get("nested_blocksize", 1)
        if any(type(n) is not int or n < 1 for n in sizes) or state["dtype"] not in _DTYPES:
            raise ValueError(f"it says {state}")
        if _NESTED_ABSMAX in parts and type(state.get("nested_offset")) is not float:
            raise ValueError("it lacks nested_offset")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        message = f"{parts.stem}{name} does not describe a matrix in 4 bits: {error}"
        raise ConfigError(message, parts.stem + name) from error
    found: dict[str, Any] = state
    return found

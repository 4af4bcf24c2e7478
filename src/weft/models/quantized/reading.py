"""Joins a quantized checkpoint's tensors into matrices, by the method that config.json names."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from weft.core.errors import ConfigError
from weft.core.targets import TEXT_PREFIXES, text_name
from weft.kernels.quant.packed import Codes, Coding
from weft.models.quantized.awq import read_awq
from weft.models.quantized.bnb import read_bitsandbytes
from weft.models.quantized.compressed import read_compressed
from weft.models.quantized.fp8 import Block, block_size, read_fp8
from weft.models.quantized.gptq import read_gptq
from weft.models.quantized.mxfp4 import read_mxfp4
from weft.models.quantized.values import Dequantized, Tensors, group_size

_Reader = Callable[[Tensors, Mapping[str, Any]], Iterator[tuple[str, Any]]]
_READERS: dict[str, _Reader] = {
    "awq": read_awq,
    "bitsandbytes": read_bitsandbytes,
    "compressed-tensors": read_compressed,
    "fp8": read_fp8,
    "gptq": read_gptq,
    "mxfp4": read_mxfp4,
}
_UNCONVERTED = ("modules_to_not_convert", "ignored_layers", "ignore")
"""Fields that list modules, by their names or by regular expressions that begin with `re:`."""


def dequantized(
    tensors: Iterable[tuple[str, Any]], stated: Mapping[str, Any] | None
) -> Iterable[tuple[str, Any]]:
    """The tensors of all files by name, in which those of a quantized matrix stand for its values.

    `stated` is the checkpoint's quantization_config, as `read_quantization` returns it. Raises
    ConfigError, naming the tensor, for one that is missing or has another shape or dtype; some of
    that only when the values are read."""
    if stated is None:
        return tensors
    return _READERS[stated["quant_method"]](dict(tensors), stated)


def expected(
    stated: Mapping[str, Any], name: str, shape: tuple[int, int], dtype: torch.dtype
) -> Dequantized:
    """The matrix (out, in), without memory, that a checkpoint has for the module of this name in
    the text model, as far as `stated` says: scales are taken to have the dtype that fits a model
    served in `dtype`. Raises ConfigError for a regular expression or a size that can't be read."""
    found = _coding_and_group(stated, name) if is_converted(stated, name) else None
    return Dequantized(
        shape,
        lambda: torch.empty(shape, dtype=dtype, device="meta"),
        lambda: None if found is None else _empty_codes(*found, shape, dtype),
    )


def _empty_codes(
    coding: Coding, group: int | None, shape: tuple[int, int], dtype: torch.dtype
) -> Codes:
    outputs, inputs = shape
    groups = 1 if group is None or group < 1 else max(inputs // group, 1)
    of_scales = torch.float32 if coding == "e4m3" and dtype != torch.bfloat16 else dtype
    codes = torch.empty(shape, dtype=torch.uint8, device="meta")
    scales = torch.empty((outputs, groups), dtype=of_scales, device="meta")
    return Codes(coding, codes, scales, None if coding == "e4m3" else scales.int())


def is_converted(stated: Mapping[str, Any], name: str) -> bool:
    """Whether a checkpoint has the module of this name in the text model quantized: `stated` does
    not leave out its name, a module that it is in, or some last parts of either, and names it among
    a block's modules if it lists these. Raises ConfigError for a regular expression that can't be
    read."""
    listed = stated.get("modules_in_block_to_quantize")
    if listed and not any(map(name.endswith, _strings(listed))):
        return False
    return not any(
        _means(each, name, f"quantization_config.{field}")
        for field in _UNCONVERTED
        if isinstance(stated.get(field), list)
        for each in stated[field]
    )


def _means(stated: object, name: str, field: str) -> bool:
    """Whether an entry of `field` stands for the module."""
    if not isinstance(stated, str):
        return False
    if not stated.startswith("re:"):
        own = text_name(stated)
        return own is not None and f".{own}." in f".{name}."
    try:
        pattern = re.compile(stated.removeprefix("re:"))
    except re.error as error:
        raise ConfigError(f"{field}: {stated!r} can't be read: {error}", field) from None
    inner = name.removeprefix("model.")
    of_whole = (prefix + inner for prefix, own in TEXT_PREFIXES if own == "model.")
    return any(pattern.match(each) for each in (name, *of_whole))


def _strings(stated: object) -> Iterator[str]:
    """The strings in a list, or in lists within it."""
    if isinstance(stated, str):
        yield stated
    for each in stated if isinstance(stated, list) else ():
        yield from _strings(each)


def _coding_and_group(stated: Mapping[str, Any], name: str) -> tuple[Coding, int | None] | None:
    method = stated["quant_method"]
    if method == "awq" or (method == "gptq" and not stated.get("desc_act")):
        return "int8" if stated["bits"] == 8 else "int4", group_size(stated)
    if method == "fp8":
        return "e4m3", _inputs(block_size(stated.get("weight_block_size")))
    weights = _weights_of(stated, name) if method == "compressed-tensors" else None
    if weights is None or weights.get("actorder") == "group":
        return None
    if weights.get("type") == "float":
        blocks = weights["strategy"] == "block"
        return "e4m3", _inputs(block_size(weights.get("block_structure"))) if blocks else None
    group = group_size(weights) if weights["strategy"] == "group" else None
    return "int4" if weights["num_bits"] == 4 else "int8", group


def _inputs(block: Block | None) -> int | None:
    return None if block is None else block[1]


def _weights_of(stated: Mapping[str, Any], name: str) -> Mapping[str, Any] | None:
    """What compressed-tensors says of a module's weight: the group that targets it by its name,
    else by a regular expression, else by its class; None if no group does."""
    groups = {
        target: group["weights"]
        for group in stated["config_groups"].values()
        for target in _strings(group.get("targets"))
    }
    field = "quantization_config.config_groups"
    named = [target for target in groups if _means(target, name, field)]
    target = min(named, key=lambda each: (each.startswith("re:"), each), default="Linear")
    found: Mapping[str, Any] | None = groups.get(target)
    return found

"""The tensors of a quantized checkpoint, joined into matrices by the method that config.json
names."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from weft.models.quantized.awq import read_awq
from weft.models.quantized.bnb import read_bitsandbytes
from weft.models.quantized.compressed import read_compressed
from weft.models.quantized.fp8 import read_fp8
from weft.models.quantized.gptq import read_gptq
from weft.models.quantized.mxfp4 import read_mxfp4
from weft.models.quantized.values import Tensors

_Reader = Callable[[Tensors, Mapping[str, Any]], Iterator[tuple[str, Any]]]
_READERS: dict[str, _Reader] = {
    "awq": read_awq,
    "bitsandbytes": read_bitsandbytes,
    "compressed-tensors": read_compressed,
    "fp8": read_fp8,
    "gptq": read_gptq,
    "mxfp4": read_mxfp4,
}


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

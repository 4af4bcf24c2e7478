"""What all formats share: joins a matrix's parts in a file into one that is read by slices."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import NoneType
from typing import Any

import torch
from torch import Tensor

from weft.core.errors import ConfigError
from weft.kernels.quant.packed import Codes

Tensors = Mapping[str, Any]
"""The tensors of a checkpoint by name, each read lazily, as safetensors' slices are."""


@dataclass(frozen=True, slots=True)
class Dequantized:
    """A quantized matrix of a file. It is read like a dense tensor of a file; each read computes
    the whole matrix."""

    shape: tuple[int, ...]
    values: Callable[[], Tensor]
    codes: Callable[[], Codes | None] = lambda: None
    """Returns what the values are made of; None if kernels have no layout for that."""

    def get_shape(self) -> list[int]:
        return list(self.shape)

    def get_dtype(self) -> str:
        return "F32"

    def __getitem__(self, index: Any) -> Tensor:
        return self.values()[index]


@dataclass(frozen=True, slots=True)
class Parts:
    """The tensors of one quantized matrix: those of a file whose names have the same prefix."""

    tensors: Tensors
    stem: str

    def __contains__(self, part: str) -> bool:
        return self.stem + part in self.tensors

    def shape(self, part: str, dims: int | None = None) -> tuple[int, ...]:
        """The shape of a part. Raises ConfigError if it is missing or has not `dims` dimensions."""
        found, name = tuple(self._stored(part).get_shape()), self.stem + part
        if dims is not None and len(found) != dims:
            raise ConfigError(f"{name} has shape {found}, expected {dims} dimensions", name)
        return found

    def dtype(self, part: str) -> str:
        """The dtype of a part, by its name in safetensors, such as I8."""
        name: str = self._stored(part).get_dtype()
        return name

    def read(self, part: str, shape: tuple[int, ...], *dtypes: str) -> Tensor:
        """The whole of a part. Raises ConfigError, naming the tensor, if it is missing or has
        another shape, or a dtype other than `dtypes` (names in safetensors)."""
        stored, name = self._stored(part), self.stem + part
        found, dtype = tuple(stored.get_shape()), stored.get_dtype()
        if found != shape:
            raise ConfigError(f"{name} has shape {found}, expected {shape}", name)
        if dtype not in dtypes:
            raise ConfigError(f"{name} has dtype {dtype}, expected {' or '.join(dtypes)}", name)
        read: Tensor = stored[:] if shape else stored[...]
        return read

    def _stored(self, part: str) -> Any:
        name = self.stem + part
        if name not in self.tensors:
            raise ConfigError(f"the checkpoint lacks {name}", name)
        return self.tensors[name]


def joined(
    tensors: Tensors, main: str, others: Iterable[str], make: Callable[[Parts], Dequantized]
) -> Iterator[tuple[str, Any]]:
    """All tensors by name; those that belong to a quantized matrix become one, STEM.weight.

    `main` and `others` end the names of a quantized matrix's parts. A STEM.weight is quantized only
    where the file has STEM with the first of `others`, too."""
    endings = (main, *others)
    needed = endings[1]

    def is_quantized(stem: str) -> bool:
        return stem + main in tensors and (main != ".weight" or stem + needed in tensors)

    for name, stored in tensors.items():
        ending = next((e for e in endings if name.endswith(e)), None)
        stem = name.removesuffix(ending or "")
        if ending is None or not is_quantized(stem):
            yield name, stored
        elif ending == main:
            yield f"{stem}.weight", make(Parts(tensors, stem))


def group_size(stated: Mapping[str, Any]) -> int | None:
    """How many inputs share a scale, as `stated` says. Raises ConfigError for what is no number."""
    size: int | None = stated.get("group_size")
    if type(size) not in (int, NoneType):
        name = "quantization_config.group_size"
        raise ConfigError(f"{name} must be a number, got {size!r}", name)
    return size


FLOATS = ("F16", "BF16", "F32")


def unpacked(packed: Tensor, bits: int) -> Tensor:
    """The unsigned numbers of `bits` bits in int32 words (..., N), lowest first: int32
    (..., N, 32 / bits)."""
    shifts = torch.arange(0, 32, bits, device=packed.device, dtype=torch.int32)
    return (packed[..., None] >> shifts) & ((1 << bits) - 1)


def of_codes(shape: tuple[int, int], codes: Callable[[], Codes]) -> Dequantized:
    """A matrix (out, in) with the values of `codes`. Reading it raises ConfigError if its groups
    have different sizes."""

    def checked() -> Codes:
        found = codes()
        inputs, groups = shape[1], found.scale_OG.shape[1]
        if not groups or inputs % groups:
            message = f"{inputs} inputs of a quantized matrix can't be cut into {groups} groups"
            raise ConfigError(message, "quantization_config")
        return found

    return Dequantized(shape, lambda: checked().values(), checked)


def scaled(values: Tensor, scales: Tensor) -> Tensor:
    """The product, rounded once to the dtype of the scales, as all of these formats define it."""
    return (values.float() * scales.float()).to(scales.dtype)

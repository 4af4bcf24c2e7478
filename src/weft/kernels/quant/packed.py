"""Base weights of 4 or 8 bits, in the one layout from which kernels make 16-bit values.

    w[o, k] = round((code[o, k] - zero[g, o]) * scale[g, o])        g = k // group

Codes are unsigned integers (`int4`, `int8`), or floats of 8 bits (`e4m3`), which have no zeros. The
product is rounded to the dtype of the scales and then to that in which the model is served: these
are the values of a checkpoint that is read as values.

Words, int32 (O / 64, K / step, 64, 32), lie in blocks of 64 rows. A row of a block holds `step`
inputs, in chunks of 32 columns: column c of chunk i is input 32 i + c. Words 2 m and 2 m + 1 hold
columns 2 m and 2 m + 1, each column in one half of either word, 2 m those of the first half of all
chunks. So both numbers in a register of 16-bit values come from one word:

    int4, word 2 m      | chunk 3 | 2 | 1 | 0 |  of column 2 m + 1, and below of column 2 m
    int8, word 2 m + 1  | chunk 3 | 2 |          of column 2 m + 1, and below of column 2 m

Shapes: T token rows, O outputs, K inputs, G groups of inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, Self

import torch
from torch import Tensor

from weft.kernels.quant.e4m3 import FP8

Coding = Literal["int4", "int8", "e4m3"]
ROWS, COLUMNS = 64, 32
"""The rows and columns of a block of words."""
BITS: dict[Coding, int] = {"int4": 4, "int8": 8, "e4m3": 8}
_MOST_SCALE = 128.0
"""Scales of `e4m3` are below this: kernels make them larger by 2^120, as its exponents are less by
as much than those of a 16-bit float."""


@dataclass(frozen=True, slots=True)
class Codes:
    """A matrix, or some of its rows and columns, as a checkpoint has it."""

    coding: Coding
    codes_OK: Tensor
    """uint8: integers from 0 on, or the bits of floats."""
    scale_OG: Tensor
    """bfloat16, float16 or float32."""
    zero_OG: Tensor | None = None
    """The integers that stand for 0, int32; None for floats."""

    @property
    def group(self) -> int:
        """How many inputs share a scale."""
        return self.codes_OK.shape[1] // self.scale_OG.shape[1]

    def values(self) -> Tensor:
        """The values, (O, K): the product, rounded once to the dtype of the scales, as all formats
        define it."""
        numbers_OK = self.codes_OK.view(FP8).float() if self.zero_OG is None else None
        if numbers_OK is None:
            assert self.zero_OG is not None
            numbers_OK = self.codes_OK.float() - self._of_inputs(self.zero_OG.float())
        scale_OK = self._of_inputs(self.scale_OG.float())
        return (numbers_OK * scale_OK).to(self.scale_OG.dtype)

    def _of_inputs(self, of_groups_OG: Tensor) -> Tensor:
        return of_groups_OG.repeat_interleave(self.group, 1)

    def in_groups(self, index_K: Tensor) -> Codes:
        """The same codes, where each input is in the group that `index_K` names. If those are not
        groups of neighbours, each input has a scale of its own."""
        neighbours = torch.arange(len(index_K), device=index_K.device) // self.group
        if torch.equal(index_K, neighbours):
            return self
        assert self.zero_OG is not None
        scale_OK, zero_OK = self.scale_OG[:, index_K], self.zero_OG[:, index_K]
        return Codes(self.coding, self.codes_OK, scale_OK, zero_OK)

    def rows(self, rows: Sequence[slice]) -> Codes:
        """Some of the outputs, in this order."""

        def of(x_ON: Tensor) -> Tensor:
            return x_ON[rows[0]] if len(rows) == 1 else torch.cat([x_ON[each] for each in rows])

        zero = None if self.zero_OG is None else of(self.zero_OG)
        return Codes(self.coding, of(self.codes_OK), of(self.scale_OG), zero)

    def columns(self, columns: slice) -> Codes | None:
        """Some of the inputs; None where they cut a group."""
        size, count = self.group, columns.stop - columns.start
        if self.scale_OG.shape[1] == 1:
            return Codes(self.coding, self.codes_OK[:, columns], self.scale_OG, self.zero_OG)
        if columns.start % size or count % size:
            return None
        groups = slice(columns.start // size, columns.stop // size)
        zero = None if self.zero_OG is None else self.zero_OG[:, groups]
        return Codes(self.coding, self.codes_OK[:, columns], self.scale_OG[:, groups], zero)


def step_of(coding: Coding) -> int:
    """How many inputs a row of a block of words has."""
    return COLUMNS * 32 // BITS[coding]


def has_layout(codes: Codes) -> bool:
    """Whether matrices and groups of this shape can have the layout."""
    (outputs, inputs), step, group = codes.codes_OK.shape, step_of(codes.coding), codes.group
    if outputs % ROWS or inputs % step or group % COLUMNS:
        return False
    return step % group == 0 or group % step == 0


def fits(codes: Codes, dtype: torch.dtype) -> bool:
    """Whether kernels can multiply such a matrix with inputs in that dtype."""
    if not has_layout(codes) or scale_dtype_of(codes, dtype) is None:
        return False
    return codes.coding != "e4m3" or bool((codes.scale_OG.abs() < _MOST_SCALE).all())


def scale_dtype_of(codes: Codes, dtype: torch.dtype) -> torch.dtype | None:
    """The dtype in which kernels have the scales; None: there is no such kernel."""
    stored, bf16 = codes.scale_OG.dtype, torch.bfloat16
    if dtype not in (torch.bfloat16, torch.float16):
        return None
    if stored == bf16:
        return stored if dtype == bf16 else None
    if codes.coding != "e4m3":
        return stored if stored == torch.float16 else None
    if stored != torch.float32:
        return None
    # If the product has few enough bits, to round it once is the same as to round it twice.
    short = dtype == bf16 and torch.equal(codes.scale_OG.bfloat16().float(), codes.scale_OG)
    return bf16 if short else stored


def pack_words(codes_OK: Tensor, bits: int) -> Tensor:
    outputs, inputs = codes_OK.shape
    per = 16 // bits
    # rows, blocks, words: pairs of columns and the half of chunks; then what is in a word
    parts = codes_OK.view(outputs // ROWS, ROWS, -1, 2, per, COLUMNS // 2, 2)
    parts = parts.permute(0, 2, 1, 5, 3, 4, 6)
    shape = (outputs // ROWS, inputs // (COLUMNS * 2 * per), ROWS, COLUMNS // 2, 2)
    words = torch.zeros(shape, dtype=torch.int32, device=codes_OK.device)
    for chunk in range(per):
        for half in range(2):
            words |= parts[..., chunk, half].int() << (16 * half + bits * chunk)
    return words.flatten(3)


def unpack_words(words: Tensor, bits: int) -> Tensor:
    """The codes, uint8 (O, K)."""
    per = 16 // bits
    tiles, blocks = words.shape[:2]
    shape = (tiles, ROWS, blocks, 2, per, COLUMNS // 2, 2)
    codes = torch.empty(shape, dtype=torch.uint8, device=words.device)
    pairs = words.view(tiles, blocks, ROWS, COLUMNS // 2, 2).permute(0, 2, 1, 4, 3)
    for chunk in range(per):
        for half in range(2):
            codes[:, :, :, :, chunk, :, half] = (pairs >> (16 * half + bits * chunk)) & (
                (1 << bits) - 1
            )
    return codes.view(tiles * ROWS, -1)


def offset_of(coding: Coding, scale_dtype: torch.dtype) -> tuple[torch.dtype, int]:
    """The dtype in which a kernel subtracts zeros, and the power of two that it has added to codes
    by then, as it puts their bits below the first bit of that."""
    short = coding == "int4" and scale_dtype == torch.bfloat16
    return (torch.bfloat16, 128) if short else (torch.float16, 1024)


def scale_words(coding: Coding, scale_GO: Tensor, zero_GO: Tensor | None) -> Tensor:
    """Scales for kernels, int32 (G, O): fp32, or a 16-bit float below what takes the zero off."""
    if scale_GO.dtype == torch.float32:
        return scale_GO.view(torch.int32)
    words = scale_GO.view(torch.int16).int() & 0xFFFF
    if zero_GO is not None:
        dtype, added = offset_of(coding, scale_GO.dtype)
        off = (-(zero_GO + added)).to(dtype).view(torch.int16).int()
        words |= off << 16
    return words.contiguous()


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """A matrix in that layout."""

    words: Tensor
    scales_GO: Tensor
    """int32: see `scale_words`."""
    coding: Coding
    scale_dtype: torch.dtype
    dtype: torch.dtype
    """Of the values, and of inputs."""

    @property
    def shape(self) -> torch.Size:
        tiles, blocks = self.words.shape[:2]
        return torch.Size((tiles * ROWS, blocks * step_of(self.coding)))

    @property
    def group(self) -> int:
        return self.shape[1] // len(self.scales_GO)

    @property
    def num_bytes(self) -> int:
        return self.words.nbytes + self.scales_GO.nbytes

    def with_wide_scales(self) -> Self:
        """The same matrix with scales in float32, if its codes are floats; else itself."""
        if self.coding != "e4m3" or self.scale_dtype == torch.float32:
            return self
        scale_GO = self.scales_GO.short().view(self.scale_dtype).float()
        return replace(self, scales_GO=scale_GO.view(torch.int32), scale_dtype=torch.float32)

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        codes_OK = unpack_words(self.words, BITS[self.coding])
        if self.scale_dtype == torch.float32:
            scale_GO = self.scales_GO.view(torch.float32)
        else:
            scale_GO = (self.scales_GO & 0xFFFF).short().view(self.scale_dtype)
        zero_OG = None
        if self.coding != "e4m3":
            in_dtype, added = offset_of(self.coding, self.scale_dtype)
            off_GO = (self.scales_GO >> 16).short().view(in_dtype)
            zero_OG = (-off_GO.float() - added).int().t()
        values = Codes(self.coding, codes_OK, scale_GO.t(), zero_OG).values()
        return values.to(self.dtype).to(dtype)

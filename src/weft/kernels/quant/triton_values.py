"""The values of packed weights, as kernels make them: see `weft.kernels.quant.packed`.

Shapes: O outputs, K inputs, G groups of inputs.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.kernels.quant.packed import BITS, COLUMNS, Coding, PackedMatrix, offset_of, step_of
from weft.kernels.triton_base import INTERPRETED

# PTX for two neighbouring columns. $1 and $2 are their words, $3 is the scale's, $0 the two values.

_SCALES = "prmt.b32 s, $3, $3, 0x1010; prmt.b32 o, $3, $3, 0x3232;"
_TO_BF16 = "mov.b32 {l, h}, t; cvt.f32.f16 a, l; cvt.f32.f16 b, h; cvt.rn.bf16x2.f32 t, b, a;"
_REGISTERS = ".reg .b32 t, u, s, o, one, zero; .reg .b16 l, h; .reg .f32 a, b, m;"


def _int(bits: int, chunk: int, scale: str, dtype: str) -> str:
    """Put codes below the first bit of a power of two, take that and the zero off, and scale."""
    per = 16 // bits
    first = "bf16" if bits == 4 and scale == "bf16" else "f16"
    mask, power = f"0x{(1 << bits) - 1:04x}" * 2, {"bf16": "0x4300", "f16": "0x6400"}[first]
    one = {"bf16": "0x3f80", "f16": "0x3c00"}[first]
    lines = [
        f"shr.u32 t, ${1 + chunk // per}, {bits * (chunk % per)};",
        f"lop3.b32 t, t, {_twice(mask[:6])}, {_twice(power)}, 0xEA;",
        f"mov.b32 one, {_twice(one)}; mov.b32 zero, 0x80008000;",
        f"fma.rn.{first}x2 t, t, one, o;",
        _TO_BF16 if first == "f16" and scale == "bf16" else "",
        f"fma.rn.{scale}x2 t, t, s, zero;",
        _TO_BF16 if scale == "f16" and dtype == "bf16" else "",
    ]
    return f"{{ {_REGISTERS} {_SCALES} {' '.join(lines)} mov.b32 $0, t; }}"


def _e4m3(chunk: int, scale: str, dtype: str) -> str:
    """Put sign, exponent and mantissa where a bf16 has them: that is the number times 2^-120."""
    word, high = f"${1 + chunk // 2}", chunk % 2
    lines = [
        f"shr.u32 u, {word}, 4;" if high else f"shl.b32 u, {word}, 4;",
        "and.b32 u, u, 0x07f007f0;",
        f"mov.b32 t, {word};" if high else f"shl.b32 t, {word}, 8;",
        "lop3.b32 t, t, 0x80008000, u, 0xEA;",
    ]
    if scale == "bf16":
        lines += [
            "mov.b32 one, 0x7b807b80; mov.b32 zero, 0x80008000;",
            "prmt.b32 s, $3, $3, 0x1010; fma.rn.bf16x2 s, s, one, zero;",
            "fma.rn.bf16x2 t, t, s, zero;",
        ]
    else:
        lines += [
            "mov.b32 m, $3; mul.rn.f32 m, m, 0f7B800000;",
            "shl.b32 u, t, 16; mov.b32 a, u; and.b32 u, t, 0xffff0000; mov.b32 b, u;",
            f"mul.rn.f32 a, a, m; mul.rn.f32 b, b, m; cvt.rn.{dtype}x2.f32 t, b, a;",
        ]
    return f"{{ {_REGISTERS} {' '.join(lines)} mov.b32 $0, t; }}"


def _twice(half: str) -> str:
    return half + half.removeprefix("0x")


_NAMES = {torch.bfloat16: "bf16", torch.float16: "f16", torch.float32: "f32"}


@cache
def _code(coding: Coding, scale_dtype: torch.dtype, dtype: torch.dtype) -> tuple[str, ...]:
    """The PTX that makes values of codes, for each chunk of a block."""
    chunks, names = range(step_of(coding) // COLUMNS), (_NAMES[scale_dtype], _NAMES[dtype])
    if coding == "e4m3":
        return tuple(_e4m3(chunk, *names) for chunk in chunks)
    return tuple(_int(BITS[coding], chunk, *names) for chunk in chunks)


@triton.jit
def values_of(
    w,
    w_at,
    s,
    CODE: tl.constexpr,
    PLAIN: tl.constexpr,
    chunk: tl.constexpr,
    COLUMNS: tl.constexpr,
    like,
):
    """The values of a chunk, from words `w` that lie at `w_at`, and from the words of scales; in
    the dtype that pointers `like` are to."""
    if len(PLAIN) == 0:
        v = tl.inline_asm_elementwise(
            CODE[chunk], "=r,r,r,r,r", [w, s], dtype=like.dtype.element_ty, is_pure=True, pack=2
        )
    else:
        v = _plain_values(w_at, s, chunk, COLUMNS, len(CODE), *PLAIN, like.dtype.element_ty)
    return v


@triton.jit
def _plain_values(
    w_at,
    s,
    chunk: tl.constexpr,
    COLUMNS: tl.constexpr,
    NUM: tl.constexpr,
    FLOATS: tl.constexpr,
    ADDED: tl.constexpr,
    FIRST: tl.constexpr,
    SCALE: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """The same in fp32 for the interpreter, which has no PTX."""
    PER: tl.constexpr = NUM // 2
    BITS: tl.constexpr = 16 // PER
    j = tl.arange(0, COLUMNS)
    word = tl.load(w_at + (j // 2 * 2 - j + chunk // PER))
    code = (word >> (j % 2 * 16 + BITS * (chunk % PER))) & ((1 << BITS) - 1)
    if tl.float32 == SCALE:
        scale = s.to(tl.float32, bitcast=True)
    else:
        scale = (s & 0xFFFF).to(tl.int16).to(SCALE, bitcast=True).to(tl.float32)
    if FLOATS:
        bits = ((code & 0x80) << 24) | ((code & 0x7F) << 20)
        number = bits.to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2^120
    else:
        off = (s >> 16).to(tl.int16).to(FIRST, bitcast=True).to(tl.float32) + ADDED
        number = code.to(tl.float32) + off
    return (number * scale).to(SCALE).to(tl.float32).to(DTYPE).to(tl.float32)


@triton.jit
def words_before(o, num_blocks):
    """How many words lie before those of some rows; an integer of the type of `o`."""
    return o // 64 * (num_blocks * 2048) + o % 64 * 32


@triton.jit
def _expand(
    w_ptr,
    s_ptr,
    y_ptr,
    O,  # noqa: E741
    K: tl.constexpr,
    GROUP: tl.constexpr,
    CODE: tl.constexpr,
    PLAIN: tl.constexpr,
):
    """The values of a block of rows and inputs, into y (O, K)."""
    NUM: tl.constexpr = len(CODE)
    BLOCKS: tl.constexpr = K // (32 * NUM)
    block = tl.program_id(0) % BLOCKS
    o = tl.program_id(0) // BLOCKS * 64 + tl.arange(0, 64)
    j = tl.arange(0, 32)
    w_at = w_ptr + (words_before(o.to(tl.int64), BLOCKS) + block * 2048)[:, None] + j[None, :]
    w = tl.load(w_at)
    y_at = y_ptr + o[:, None].to(tl.int64) * K + (block * (32 * NUM) + j)[None, :]
    for i in tl.static_range(NUM):
        s = tl.load(s_ptr + (block * (32 * NUM) + i * 32) // GROUP * O + o)[:, None]
        v = values_of(w, w_at, s, CODE, PLAIN, i, 32, y_ptr)
        tl.store(y_at + i * 32, v.to(y_ptr.dtype.element_ty))


_TRITON = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


def code_of(weight: PackedMatrix) -> tuple[str, ...]:
    """The PTX that makes values of a weight's codes, for each chunk of a block."""
    return _code(weight.coding, weight.scale_dtype, weight.dtype)


def constants_of(weight: PackedMatrix) -> dict[str, object]:
    """The constants of a weight that all kernels take, by name."""
    first, added = offset_of(weight.coding, weight.scale_dtype)
    plain = (weight.coding == "e4m3", added, _TRITON[first], _TRITON[weight.scale_dtype])
    return {
        "K": weight.shape[1],
        "GROUP": weight.group,
        "CODE": code_of(weight),
        "PLAIN": plain if INTERPRETED else (),
    }


def expand(weight: PackedMatrix) -> Tensor:
    """The values, (O, K)."""
    y_OK = torch.empty(weight.shape, dtype=weight.dtype, device=weight.words.device)
    num_programs = weight.words.shape[0] * weight.words.shape[1]
    _expand[num_programs,](
        weight.words, weight.scales_GO, y_OK, weight.shape[0], **constants_of(weight)
    )
    return y_OK

"""Packed weights on a GPU: products with them, and the values that they are products with.

A row of the identity picks a column of the values, so that kernels show them to the bit. All else
as in test_gpu_products.py.
"""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from weft.kernels.quant.packed import BITS, Codes, Coding
from weft.kernels.quant.packed_weight import PackedWeight, pack
from weft.kernels.quant.triton_values import expand

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
KINDS: dict[str, tuple[Coding, int, torch.dtype, torch.dtype]] = {
    "int4": ("int4", 128, BF16, BF16),
    "int4 in fp16": ("int4", 32, F16, F16),
    "int4 with fp16 scales": ("int4", 64, F16, BF16),
    "int8": ("int8", 0, BF16, BF16),
    "int8 with fp16 scales": ("int8", 128, F16, BF16),
    "int8 in fp16": ("int8", 128, F16, F16),
    "fp8": ("e4m3", 0, BF16, BF16),
    "fp8 by block": ("e4m3", 128, F32, BF16),
    "fp8 in fp16": ("e4m3", 0, F32, F16),
}
ROUNDING = {BF16: 2.0**-8, F16: 2.0**-11}


@pytest.fixture(params=list(KINDS))
def kind(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


def make(kind: str, outputs: int, inputs: int) -> PackedWeight:
    coding, group, scale, dtype = KINDS[kind]
    generator = torch.Generator("cuda").manual_seed(0)
    most = 1 << BITS[coding]
    shape, groups = (outputs, inputs), (outputs, inputs // (group or inputs))
    codes = torch.randint(0, most, shape, generator=generator, device="cuda", dtype=torch.uint8)
    scales = torch.rand(groups, generator=generator, device="cuda") / 64 + 2.0**-12
    zeros = None
    if coding == "e4m3":
        codes[codes % 128 == 127] = 8  # is not a number
    else:
        zeros = torch.randint(0, most, groups, generator=generator, device="cuda").int()
    return pack(Codes(coding, codes, scales.to(scale), zeros), dtype)


def test_kernels_make_the_values(kind: str) -> None:
    weight = make(kind, 256, 768)
    values = weight.dequantized(weight.dtype)
    assert torch.equal(expand(weight), values)
    identity = torch.eye(768, device="cuda", dtype=weight.dtype)
    for rows in (1, 16, 64, 100, 256, 768):
        found = [weight.apply(part, None) for part in identity[: 3 * rows].split(rows)]
        assert torch.equal(torch.cat(found), values.t()[: 3 * rows]), rows


@pytest.mark.parametrize("kind", ["int4", "fp8"])
@pytest.mark.parametrize(("outputs", "inputs"), [(28672, 4096), (4096, 14336), (4160, 11008)])
def test_products(kind: str, outputs: int, inputs: int) -> None:
    """Of all matrices of an 8B model, the widest and the deepest; and of one that is odd."""
    weight = make(kind, outputs, inputs)
    values = weight.dequantized(F32)
    bias = torch.randn(outputs, device="cuda").to(weight.dtype)
    for rows in (1, 5, 12, 33, 64, 65, 130, 300, 600):
        x = torch.randn(rows, inputs, device="cuda").to(weight.dtype)
        y, want = weight.apply(x, bias), x.double() @ values.double().t() + bias.double()
        error = (y.double() - want).abs()
        bound = 1.01 * ROUNDING[weight.dtype] * want.abs() + 2.0**-16 * want.abs().max()
        assert bool((error <= bound).all()), rows


@pytest.mark.parametrize("kind", ["int4", "fp8"])
def test_a_row_does_not_see_the_others(kind: str) -> None:
    weight = make(kind, 4096, 4096)
    x = torch.randn(64, 4096, device="cuda").to(weight.dtype)
    for rows in (8, 16, 32, 64):
        whole = weight.apply(x[:rows], None)
        others = torch.cat((torch.randn_like(x[: rows - 1]), x[rows - 1 : rows]))
        assert torch.equal(weight.apply(others, None)[-1], whole[-1])

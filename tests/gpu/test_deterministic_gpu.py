"""With --deterministic, compiled kernels give a request the same bits whatever is beside it."""

from __future__ import annotations

import pytest
import torch
from continuing import assert_same_bits_at_any_cut
from deterministic_cases import (
    assert_rows_of_attention_are_alone,
    assert_rows_of_products_are_alone,
)
from engines import MakeLLM

CUDA = torch.device("cuda")
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)


@DTYPES
@pytest.mark.parametrize(
    "shape",
    [
        (6144, 4096),
        (4096, 4096),
        (28672, 4096),
        (4096, 14336),
        (1536, 4096),
        (5120, 2880),
        (32, 2880),
        (130, 200),
    ],
    ids=lambda shape: "x".join(map(str, shape)),
)
def test_rows_of_products(shape: tuple[int, int], dtype: torch.dtype) -> None:
    numbers = [1, 2, 16, 17, 32, 33, 64, 65, 128, 200, 512, 1500]
    assert_rows_of_products_are_alone(CUDA, dtype, shape, numbers)


@DTYPES
@pytest.mark.parametrize(("window", "chunked"), [(None, False), (200, False), (200, True)])
@pytest.mark.parametrize("heads", [(32, 8, 128), (8, 8, 64), (16, 1, 80)], ids=str)
def test_rows_of_attention(
    heads: tuple[int, int, int], window: int | None, chunked: bool, dtype: torch.dtype
) -> None:
    cuts = [[1, 300], [64, 128, 200, 201], [511]]
    assert_rows_of_attention_are_alone(CUDA, dtype, heads, window, 700, cuts, chunked)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_any_cut_gives_the_same_bits(make_llm: MakeLLM, dtype: str) -> None:
    word = "weaver" * 12
    assert_same_bits_at_any_cut(make_llm, 20, word, device="cuda", dtype=dtype)

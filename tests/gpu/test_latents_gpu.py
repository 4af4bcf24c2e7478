"""Kernels of attention to latents, in the sizes of published models, against the dense oracle."""

from __future__ import annotations

import pytest
import torch
from latent_cases import latent_batch

from weft.kernels.attention import reference_attend
from weft.kernels.ops import make_ops

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 4e-3}


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("num_heads", [16, 20, 64, 128])
@pytest.mark.parametrize(
    "lens",
    [[(1, 200), (1, 0), (1, 5063)], [(1, 20), (150, 0), (1, 3000), (70, 300)], [(1, 70)] * 150],
    ids=["decodes", "mixed", "many decodes"],
)
def test_kernels_attend_to_latents(
    lens: list[tuple[int, int]], num_heads: int, dtype: torch.dtype
) -> None:
    q, cache, batch = latent_batch(lens, num_heads, (512, 64), 16, dtype, "cuda")
    want = reference_attend(q, cache, batch, scale=0.05, window=None)
    got = make_ops("triton", q.device).attend(q, cache, batch, scale=0.05, window=None)
    torch.testing.assert_close(got, want, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])

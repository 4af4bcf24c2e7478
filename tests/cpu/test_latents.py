"""Attention to latents, in torch and in Triton's interpreter, against the dense oracle."""

from __future__ import annotations

import pytest
import torch
from attention_cases import TOLERANCE
from latent_cases import latent_batch, random_rope

from weft.kernels.attention import Attend, KVCache, reference_attend
from weft.kernels.attention.by_row import attend_by_row
from weft.kernels.attention.sdpa import torch_attend
from weft.kernels.ops import Ops

SIZES = 20, 8
MIXED = [(1, 20), (9, 0), (1, 150), (5, 37)]
DECODES = [(1, 20), (1, 0), (1, 300)]


def assert_same(
    attend: Attend,
    lens: list[tuple[int, int]],
    num_heads: int,
    dtype: torch.dtype = torch.float32,
) -> None:
    q, cache, batch = latent_batch(lens, num_heads, SIZES, 4, dtype)
    want = reference_attend(q, cache, batch, scale=0.3, window=None)
    got = attend(q, cache, batch, scale=0.3, window=None)
    assert got.shape == (*q.shape[:2], SIZES[0])
    torch.testing.assert_close(got, want, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("attend", [torch_attend, attend_by_row])
@pytest.mark.parametrize("lens", [MIXED, DECODES])
def test_torch_attends_to_latents(attend: Attend, lens: list[tuple[int, int]]) -> None:
    assert_same(attend, lens, 3)


@pytest.mark.parametrize("num_processors", [1, 16, 64])
@pytest.mark.parametrize(("num_heads", "lens"), [(3, MIXED), (20, MIXED[2:]), (128, DECODES)])
def test_kernels_attend_to_latents(
    num_processors: int, num_heads: int, lens: list[tuple[int, int]]
) -> None:
    """The more processors there are, the more parts a context is cut into. More heads than a
    program has queries are divided among several."""
    pytest.importorskip("triton")
    from weft.kernels.attention.paged import PagedAttention
    from weft.kernels.triton_base import INTERPRETED

    if not INTERPRETED:
        pytest.skip("compiled kernels are for a GPU")
    attend = PagedAttention(torch.device("cpu"))
    attend._programs = num_processors
    assert_same(attend, lens, num_heads)


@pytest.mark.parametrize("interleaved", [False, True])
def test_the_kernel_rotates_and_writes_as_torch_does(interleaved: bool) -> None:
    pytest.importorskip("triton")
    from weft.kernels.triton_ops import INTERPRETED, TritonOps

    if not INTERPRETED:
        pytest.skip("compiled kernels are for a GPU")
    _, cache, batch = latent_batch([(5, 3), (1, 7)], 3, SIZES, 4, torch.float32)
    q_THD, out, a_TO = torch.randn(6, 11, 12), torch.zeros(6, 11, 28), torch.randn(6, 30)
    rope = random_rope(6, 8, interleaved)
    caches, outs = [], []
    for ops in (Ops(), TritonOps(torch.device("cpu"))):
        k = cache.k.clone()
        own, rotated = KVCache(k, k[..., :20]), out.clone()
        parts = q_THD[..., 4:], rotated[..., 20:], a_TO[:, 2:22], a_TO[:, 22:]
        ops.rope_and_write_latents(*parts, rope, own, batch)
        caches.append(k)
        outs.append(rotated)
    torch.testing.assert_close(outs[1], outs[0], atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(caches[1], caches[0], atol=1e-6, rtol=1e-6, equal_nan=True)
    batch.slot_mapping_T[:] = -1  # rows of padding
    untouched = caches[1].clone()
    TritonOps(torch.device("cpu")).rope_and_write_latents(*parts, rope, own, batch)
    torch.testing.assert_close(caches[1], untouched, atol=0, rtol=0, equal_nan=True)

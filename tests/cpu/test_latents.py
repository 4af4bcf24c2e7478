"""Attention to latents, in torch and in Triton's interpreter, against the dense oracle."""

from __future__ import annotations

import pytest
import torch
from attention_cases import TOLERANCE
from latent_cases import latent_batch, random_rope

from weft.kernels.attention import Attend, KVCache, reference_attend
from weft.kernels.attention.by_row import attend_by_row
from weft.kernels.attention.sdpa import torch_attend
from weft.kernels.ops import Ops, Pending, Product

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


def with_pending(y: torch.Tensor, slots: list[int]) -> Product:
    """A product to whose rows of no negative slot something is to be added."""
    slot_T = torch.tensor(slots, dtype=torch.int32)
    add = torch.randn(y.shape).where(slot_T[:, None] >= 0, torch.nan)
    return Product(y, Pending(add, slot_T))


@pytest.mark.parametrize("kind", ["plain", "pending", "row by row", "no queries"])
@pytest.mark.parametrize("interleaved", [False, True])
def test_the_kernels_norm_rotate_and_write_as_torch_does(interleaved: bool, kind: str) -> None:
    pytest.importorskip("triton")
    from weft.kernels.triton_ops import INTERPRETED, TritonOps

    if not INTERPRETED:
        pytest.skip("compiled kernels are for a GPU")
    torch.manual_seed(0)
    _, cache, batch = latent_batch([(5, 3), (1, 7)], 3, SIZES, 4, torch.float32)
    slots = [-1, -1, 0, 0, 0, 2]
    a, q = Product(torch.randn(6, 10 + 28)), Product(torch.randn(6, 11 * 12))
    rope, rows = random_rope(6, 8, interleaved), 1
    if kind == "pending":
        a, q = with_pending(a.y_TO, slots), with_pending(q.y_TO, slots)
        rope = rope._replace(query_T11=1 + torch.rand(6, 1, 1))
    elif kind == "row by row":
        rows = 6
    norms = torch.randn(rows, 10).squeeze(0), torch.randn(rows, 20).squeeze(0)
    query_norm = None if kind == "no queries" else norms[0]
    caches, outs = [], []
    for ops in (Ops(), TritonOps(torch.device("cpu"))):
        k, q_THW = cache.k.clone(), torch.zeros(6, 11, 28)
        own = KVCache(k, k[..., :20])
        query = ops.write_latents(a, query_norm, norms[1], 1e-6, rope, own, batch)
        rest = ops.rotate_queries(q, q_THW[..., 20:], rope)
        assert (query is None) == (kind == "no queries")
        caches.append(k)
        outs.append([q_THW, rest] if query is None else [q_THW, rest, query])
    torch.testing.assert_close(outs[1], outs[0], atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(caches[1], caches[0], atol=1e-6, rtol=1e-6, equal_nan=True)
    batch.slot_mapping_T[:] = -1  # rows of padding
    untouched = caches[1].clone()
    TritonOps(torch.device("cpu")).write_latents(a, None, norms[1], 1e-6, rope, own, batch)
    torch.testing.assert_close(caches[1], untouched, atol=0, rtol=0, equal_nan=True)

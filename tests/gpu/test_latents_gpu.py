"""Kernels of attention to latents, in the sizes of published models, against the dense oracle."""

from __future__ import annotations

import pytest
import torch
from latent_cases import latent_batch, random_rope
from lora_pools import batch_of, random_pool
from tables import build_table

from weft.kernels.attention import KVCache, reference_attend
from weft.kernels.lora import make_backend
from weft.kernels.ops import Pending, Product, Rope, make_ops

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


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("num_heads", "key", "value"), [(16, 128, 128), (20, 192, 256)])
def test_adapters_add_to_keys_and_values(
    num_heads: int, key: int, value: int, dtype: torch.dtype
) -> None:
    table = build_table([("linear", 512, [("kv_b", num_heads * (key + value))])])
    pool = random_pool(table, [(16,), (0,), (3,), (64,)], dtype, "cuda", std=0.05)
    slots = [-1] * 3 + [1] * 2 + [3] * 35 + [0] * 70 + [2]
    generator = torch.Generator("cuda").manual_seed(0)
    for method, sizes in ("absorbed_keys", (key, 512)), ("absorbed_values", (512, value)):
        x, y = (
            torch.randn(len(slots), num_heads, size, generator=generator, device="cuda").to(dtype)
            for size in sizes
        )
        results = []
        for name in ("triton", "reference"):
            step = make_backend(name, pool).begin(batch_of(slots, device="cuda"))
            out = torch.zeros(len(slots), num_heads, sizes[1] + 64, dtype=dtype, device="cuda")
            out[..., : sizes[1]] = y
            getattr(step, method)(out[..., : sizes[1]], x, 0)
            results.append(out)
        torch.testing.assert_close(*results, atol=2 * TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("with_adapters", [False, True])
def test_latents_are_normed_rotated_and_written(with_adapters: bool, dtype: torch.dtype) -> None:
    T, heads, key, query_rank = 39, 20, 192, 1536
    _, cache, batch = latent_batch([(30, 0), (9, 20)], heads, (512, 64), 16, dtype, "cuda")
    torch.manual_seed(0)
    a, q = (
        Product(torch.randn(T, columns, dtype=dtype, device="cuda"))
        for columns in (query_rank + 576, heads * (key + 64))
    )
    if with_adapters:
        slot = torch.arange(T, dtype=torch.int32, device="cuda") - 20
        a, q = (
            Product(y, Pending(torch.randn_like(y, dtype=torch.float32), slot)) for y, _ in (a, q)
        )
    norms = [torch.randn(size, dtype=dtype, device="cuda") for size in (query_rank, 512)]
    rope = random_rope(T, 64, True)
    rope = Rope(rope.cos_T1R.to("cuda", dtype), rope.sin_T1R.to("cuda", dtype), True)
    results = []
    for name in ("triton", "torch"):
        ops, k = make_ops(name, q.y_TO.device), cache.k.clone()
        q_THW = torch.zeros(T, heads, 576, dtype=dtype, device="cuda")
        own = KVCache(k, k[..., :512])
        query = ops.write_latents(a, norms[0], norms[1], 1e-6, rope, own, batch)
        rest = ops.rotate_queries(q, q_THW[..., 512:], rope)
        results.append([query, rest, q_THW, k])
    tolerance = {"atol": TOLERANCE[dtype], "rtol": TOLERANCE[dtype], "equal_nan": True}
    torch.testing.assert_close(*results, **tolerance)

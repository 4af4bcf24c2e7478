"""The fused Triton ops in Triton's interpreter, against the oracles of what they fuse."""

from __future__ import annotations

import pytest
import torch
from attention_cases import (
    HEAD_DIM,
    TOLERANCE,
    assert_same_as_oracle,
    random_batch,
    random_inputs,
    random_sinks,
)
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

import weft.kernels.triton_ops as kernels
from weft.core.errors import ConfigError
from weft.kernels import triton_heads
from weft.kernels.activations import ClampedSwiglu, Xielu, reference_activate_and_mul
from weft.kernels.attention import AttentionBatch, KVCache, make_batch, reference_attend, write_kv
from weft.kernels.attention.rounds import Rounds, rows_at_once
from weft.kernels.ops import Ops, Pending, Product, Rope, reference_rms_norm
from weft.kernels.triton_pending import KernelPending

pytestmark = pytest.mark.skipif(not kernels.INTERPRETED, reason="compiled kernels are for a GPU")

DTYPES = [torch.float32, torch.float16]
"""bfloat16 is for a GPU: the interpreter computes matrix products of it wrongly."""


@pytest.fixture
def ops(request: pytest.FixtureRequest) -> kernels.TritonOps:
    return kernels.TritonOps(torch.device("cpu"))


def with_parts(num_processors: int) -> kernels.TritonOps:
    """Ops as on a device of so many processors: the more, the more parts a decode has, and
    they have no fewest bytes."""
    ops = kernels.TritonOps(torch.device("cpu"))
    ops.attend._programs = num_processors
    ops.attend._part_bytes = 0
    return ops


@settings(max_examples=12, deadline=None)
@given(
    lens=st.lists(
        st.tuples(st.one_of(st.just(1), st.integers(1, 40)), st.integers(0, 90)),
        min_size=1,
        max_size=4,
    ),
    heads=st.sampled_from([(1, 1), (4, 2), (6, 2), (7, 1)]),
    block_size=st.sampled_from([4, 16]),
    window=st.sampled_from([None, 1, 3, 64]),
    chunked=st.booleans(),
    num_processors=st.sampled_from([1, 8]),
    has_sinks=st.booleans(),
    cap=st.sampled_from([None, 0.6]),
    seed=st.integers(0, 1000),
)
def test_mixed_batches_match_the_oracle(
    lens: list[tuple[int, int]],
    heads: tuple[int, int],
    block_size: int,
    window: int | None,
    chunked: bool,
    num_processors: int,
    has_sinks: bool,
    cap: float | None,
    seed: int,
) -> None:
    batch = random_batch(lens, block_size, seed)
    attend, more = with_parts(num_processors).attend, {"has_sinks": has_sinks, "cap": cap}
    more["chunked"] = chunked
    assert_same_as_oracle(attend, batch, heads, block_size, window, seed, **more)


@pytest.mark.parametrize(
    ("num_processors", "window", "chunked"),
    [
        *((1, None, False), (2, 100, False), (8, 5, False), (8, 100, False), (64, None, False)),
        *((64, 5, False), (1, 64, True), (64, 150, True)),
    ],
)
def test_decodes_in_parts_match_the_oracle(
    num_processors: int, window: int | None, chunked: bool
) -> None:
    batch = random_batch([(1, past) for past in (0, 200, 63, 64)], 16, 1)
    attend, more = with_parts(num_processors).attend, {"has_sinks": num_processors > 8}
    more |= {"cap": 0.6 if window == 100 else None, "chunked": chunked}
    assert_same_as_oracle(attend, batch, (4, 2), 16, window, 1, **more)


@pytest.mark.parametrize(
    ("window", "num_processors", "chunked"),
    [
        *((None, 1, False), (3, 1, False), (100, 1, False), (None, 64, False), (100, 64, False)),
        *((100, 1, True), (100, 64, True)),
    ],
)
def test_chunks_after_long_contexts_match_the_oracle(
    window: int | None, num_processors: int, chunked: bool
) -> None:
    """With many processors, contexts are cut into parts."""
    batch = random_batch([(40, 150), (1, 130), (70, 64), (5, 63)], 16, 2)
    attend, more = with_parts(num_processors).attend, {"has_sinks": num_processors > 1}
    more |= {"cap": 0.6 if window != 100 else None, "chunked": chunked}
    assert_same_as_oracle(attend, batch, (4, 2), 16, window, 2, **more)


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("deterministic", [False, True])
def test_rows_of_a_tile_are_shared_by_programs(window: int | None, deterministic: bool) -> None:
    """In fp32 on a device with little shared memory."""
    batch = random_batch([(40, 50), (1, 30), (21, 0)], 16, 2)
    attend = kernels.TritonOps(torch.device("cpu"), deterministic).attend
    attend._shared_bytes = 8000
    assert_same_as_oracle(attend, batch, (6, 2), 16, window, 2, has_sinks=window is None)


def test_a_context_in_parts_whose_scores_are_all_far_below_zero() -> None:
    batch = random_batch([(1, 130), (5, 130)], 16, 2)
    q, k, v, cache = random_inputs(batch, (4, 2), 16, 2, torch.float32)
    write_kv(k, v, cache, batch)
    cache.k.abs_()
    for cap in (None, 50.0):
        more = {"scale": -200.0, "window": None, "cap": cap}
        expected = reference_attend(q.abs(), cache, batch, **more)
        got = with_parts(64).attend(q.abs(), cache, batch, **more)
        torch.testing.assert_close(got, expected, atol=1e-3, rtol=1e-3)


def test_rounds_overlap_as_far_as_shared_memory_goes() -> None:
    rounds = Rounds(tokens=64, warps=4, stages=3)
    assert rounds.within(232_448, num_rows=64, row_bytes=256) == rounds
    assert rounds.within(232_448, num_rows=64, row_bytes=512) == Rounds(64, 4, 2)
    assert rounds.within(101_376, num_rows=64, row_bytes=256) == Rounds(64, 4, 2)
    assert rounds.within(0, num_rows=64, row_bytes=256) == Rounds(64, 4, 2)
    wide = rounds.within(232_448, num_rows=64, row_bytes=1024)
    assert wide == Rounds(32, 8, 2), "two of 64 tokens would not fit"


def test_a_program_has_as_many_rows_as_there_is_room_for() -> None:
    wide, half = torch.float32, torch.float16
    assert rows_at_once(232_448, num_rows=64, row_bytes=2048, dtype=wide) == 64
    assert rows_at_once(166_912, num_rows=64, row_bytes=2048, dtype=wide) == 32
    assert rows_at_once(101_376, num_rows=64, row_bytes=2048, dtype=wide) == 16
    assert rows_at_once(101_376, num_rows=64, row_bytes=512, dtype=wide) == 64
    assert rows_at_once(101_376, num_rows=64, row_bytes=2048, dtype=half) == 64
    assert rows_at_once(0, num_rows=64, row_bytes=2048, dtype=wide) == 64


@pytest.mark.parametrize("window", [None, 6])
def test_half_precision(ops: kernels.TritonOps, window: int | None) -> None:
    batch = random_batch([(1, 20), (9, 0), (1, 0), (70, 13)], 4, 0)
    assert_same_as_oracle(ops.attend, batch, (4, 2), 4, window, 0, torch.float16)


@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("num_processors", [1, 8])
def test_padding_of_a_batch_reads_and_writes_no_cache(num_processors: int, has_sinks: bool) -> None:
    batch = random_batch([(1, 20), (1, 3)], 4, 0)
    q, k, v, cache = random_inputs(batch, (4, 2), 4, 0, torch.float32)
    write_kv(k, v, cache, batch)
    sinks = random_sinks(4, torch.float32) if has_sinks else None
    expected = reference_attend(q, cache, batch, scale=0.3, window=None, sinks_H=sinks)
    padded = AttentionBatch(
        torch.cat((batch.slot_mapping_T, torch.tensor([-1]))),
        torch.cat((batch.block_table_SB, torch.full_like(batch.block_table_SB[:1], 1 << 20))),
        torch.cat((batch.seq_lens_S, torch.zeros(1, dtype=torch.int32))),
        [0, 1, 2, 3],
        [*batch.seq_lens, 0],
    )
    got = with_parts(num_processors).attend(
        torch.cat((q, q[:1])), cache, padded, scale=0.3, window=None, sinks_H=sinks
    )
    torch.testing.assert_close(got[:2], expected, atol=2e-5, rtol=2e-5)
    assert not got[2].any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_norm_and_activation_match_their_oracles(
    ops: kernels.TritonOps, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(0)
    x = (3 * torch.randn(5, 40, generator=generator)).to(dtype)
    delta = torch.randn(5, 40, generator=generator).to(dtype)
    weight = torch.randn(40, generator=generator).to(dtype)
    tolerance = {"atol": TOLERANCE[dtype], "rtol": TOLERANCE[dtype]}
    for centered in (False, True):
        torch.testing.assert_close(
            ops.rms_norm(x, weight, 1e-6, centered=centered),
            reference_rms_norm(x, weight, 1e-6, centered),
            **tolerance,
        )
    added = x + delta
    whole = torch.cat((x, delta), 1)
    means = sum(ops.square_parts(part, whole.shape[1]) for part in (x, delta))
    want = reference_rms_norm(whole, torch.cat((weight, weight)), 1e-6)
    for part, wanted in zip((x, delta), want.chunk(2, 1), strict=True):
        torch.testing.assert_close(ops.norm_parts(part, means, weight, 1e-6), wanted, **tolerance)
    got = ops.rms_norm(x, weight, 1e-6, Product(delta))
    assert torch.equal(x, added)
    torch.testing.assert_close(got, reference_rms_norm(added, weight, 1e-6), **tolerance)
    for before, factor in ((None, None), (weight + 1, None), (weight + 1, x.new_tensor([0.7]))):
        same = added.clone()
        want_added = added + reference_rms_norm(delta, weight, 1e-6)
        if factor is not None:
            want_added *= factor
        got = ops.add_normed(same, Product(delta), weight, before, 1e-6, factor)
        torch.testing.assert_close(same, want_added, **tolerance)
        want = want_added if before is None else reference_rms_norm(want_added, before, 1e-6)
        torch.testing.assert_close(got, want, **tolerance)
    for activation in ("silu", ClampedSwiglu(1.7, 0.5), "relu2", Xielu(0.7, 1.3, 0.5, -1e-6)):
        want = reference_activate_and_mul(x, activation)
        torch.testing.assert_close(ops.activate_and_mul(Product(x), activation), want, **tolerance)
    want = reference_activate_and_mul(torch.cat((x, delta), 1), "gelu_tanh")
    got = ops.activate_and_mul(Product(x), "gelu_tanh", delta)
    torch.testing.assert_close(got, want, **tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rotated", "interleaved"),
    [(HEAD_DIM, False), (HEAD_DIM // 2, False), (HEAD_DIM // 2, True)],
)
@pytest.mark.parametrize("norm_shape", [None, (6, HEAD_DIM), (4, 6, HEAD_DIM), (8, HEAD_DIM)])
def test_rope_and_write_is_the_torch_one(
    ops: kernels.TritonOps,
    dtype: torch.dtype,
    norm_shape: tuple[int, ...] | None,
    rotated: int,
    interleaved: bool,
) -> None:
    batch = random_batch([(3, 5), (1, 9)], 4, 0)
    generator = torch.Generator().manual_seed(0)
    _, _, _, cache = random_inputs(batch, (4, 2), 4, 0, dtype)
    qkv = torch.randn(4, 8 * HEAD_DIM, generator=generator).to(dtype)
    norm = torch.randn(norm_shape, generator=generator).to(dtype) if norm_shape else None
    angle = torch.rand(4, rotated // 2, generator=generator) * 6
    cos, sin = torch.cat((angle.cos(),) * 2, -1), torch.cat((-angle.sin(), angle.sin()), -1)
    table = torch.stack((cos, sin), 1).to(dtype)
    rope = Rope(table[:, :1], table[:, 1:], interleaved)
    same = KVCache(cache.k.clone(), cache.v.clone())
    expected = Ops().rope_and_write(Product(qkv.clone()), rope, norm, 1e-6, same, batch)
    got = ops.rope_and_write(Product(qkv.clone()), rope, norm, 1e-6, cache, batch)
    tolerance = {"atol": TOLERANCE[dtype], "rtol": TOLERANCE[dtype], "equal_nan": True}
    torch.testing.assert_close(got, expected, **tolerance)
    torch.testing.assert_close(cache.k, same.k, **tolerance)
    if norm_shape != (8, HEAD_DIM):  # else values are normed, too
        tolerance = {"atol": 0, "rtol": 0, "equal_nan": True}
    torch.testing.assert_close(cache.v, same.v, **tolerance)


@pytest.mark.parametrize("norm_shape", [(6, HEAD_DIM), (8, HEAD_DIM)])
def test_heads_with_norms_have_the_same_bits_in_turn(
    ops: kernels.TritonOps, monkeypatch: pytest.MonkeyPatch, norm_shape: tuple[int, ...]
) -> None:
    batch = random_batch([(3, 5), (1, 9)], 4, 0)
    generator = torch.Generator().manual_seed(0)
    _, _, _, cache = random_inputs(batch, (4, 2), 4, 0, torch.float32)
    qkv = torch.randn(4, 8 * HEAD_DIM, generator=generator)
    norm = torch.randn(norm_shape, generator=generator)
    table = torch.randn(4, 2, HEAD_DIM, generator=generator)
    rope, found = Rope(table[:, :1], table[:, 1:]), []
    for places in (32, 31):
        monkeypatch.setattr(triton_heads, "PLACES", places)
        own = KVCache(cache.k.clone(), cache.v.clone())
        q = ops.rope_and_write(Product(qkv.clone()), rope, norm, 1e-6, own, batch)
        found.append((q, own.k, own.v))
    for one, in_turn in zip(*found, strict=True):
        torch.testing.assert_close(one, in_turn, atol=0, rtol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_what_is_pending_is_added_where_the_whole_is_needed(dtype: torch.dtype) -> None:
    """And rounded once. What is there for rows without an adapter is undefined."""
    generator = torch.Generator().manual_seed(0)
    y_TO = torch.randn(5, 3000, generator=generator).to(dtype)[:, :1500]
    add_TO = torch.randn(5, 1500, generator=generator)
    slot_T = torch.tensor([0, -1, 3, -1, 0], dtype=torch.int32)
    add_TO[slot_T < 0] = torch.nan
    found, wanted = (kind(add_TO, slot_T).added_to(y_TO) for kind in (KernelPending, Pending))
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("places", [32, 31])
def test_gates_behind_their_heads_are_left_and_applied(
    ops: kernels.TritonOps, monkeypatch: pytest.MonkeyPatch, places: int
) -> None:
    """With what adapters add to some rows, too; head by head, and two heads at a time."""
    monkeypatch.setattr(triton_heads, "PLACES", places)
    monkeypatch.setattr(triton_heads, "MANY_HEADS", 2)
    batch = random_batch([(3, 5), (1, 9)], 4, 0)
    generator = torch.Generator().manual_seed(0)
    _, _, _, cache = random_inputs(batch, (4, 2), 4, 0, torch.float32)
    qkv, add = torch.randn(2, 4, 12 * HEAD_DIM, generator=generator)
    x, table = (torch.randn(4, n, HEAD_DIM, generator=generator) for n in (4, 2))
    rope = Rope(table[:, :1], table[:, 1:])
    product = Product(qkv, Pending(add, torch.tensor([0, -1, 3, 0], dtype=torch.int32)))
    whole, same = product.whole(), KVCache(cache.k.clone(), cache.v.clone())
    heads = whole[:, : 8 * HEAD_DIM].view(4, 4, 2, HEAD_DIM)
    without = torch.cat((heads[:, :, 0].flatten(1), whole[:, 8 * HEAD_DIM :]), 1)
    want = Ops().rope_and_write(Product(without), rope, None, 1e-6, same, batch)
    for chosen in (Ops(), ops):
        got = chosen.rope_and_write(product, rope, None, 1e-6, cache, batch, gated_heads=4)
        torch.testing.assert_close(got, want)
        torch.testing.assert_close((cache.k, cache.v), (same.k, same.v), equal_nan=True)
        gated = chosen.apply_gates(x.clone(), product)
        torch.testing.assert_close(gated, x * heads[:, :, 1].sigmoid())


@pytest.mark.parametrize("name", ["torch", "triton"])
def test_a_layer_without_keys_of_its_own_only_turns_its_queries(
    name: str, ops: kernels.TritonOps
) -> None:
    batch = make_batch([2], [2], [[0]], 4)
    cache = KVCache(torch.zeros(1, 4, 2, HEAD_DIM), torch.zeros(1, 4, 2, HEAD_DIM))
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, 4 * HEAD_DIM, generator=generator)
    table = torch.rand(2, 2, HEAD_DIM, generator=generator)
    rope, norm = Rope(table[:, :1], table[:, 1:]), torch.rand(4, HEAD_DIM, generator=generator)
    with_keys = Product(torch.cat((q, torch.ones(2, 4 * HEAD_DIM)), 1))
    all_norms = torch.cat((norm, torch.ones(2, HEAD_DIM)))
    scratch = KVCache(cache.k.clone(), cache.v.clone())
    expected = Ops().rope_and_write(with_keys, rope, all_norms, 1e-6, scratch, batch)
    chosen = ops if name == "triton" else Ops()
    got = chosen.rope_and_write(Product(q), rope, norm, 1e-6, cache.without_heads(), batch)
    torch.testing.assert_close(got, expected)
    assert not cache.k.any() and not cache.v.any()


def test_rows_without_a_slot_are_not_written(ops: kernels.TritonOps) -> None:
    batch = make_batch([1], [1], [[0]], 4)
    batch.slot_mapping_T.fill_(-1)
    cache = KVCache(torch.zeros(1, 4, 2, HEAD_DIM), torch.zeros(1, 4, 2, HEAD_DIM))
    table = torch.ones(1, 2, HEAD_DIM)
    qkv = Product(torch.ones(1, 8 * HEAD_DIM))
    ops.rope_and_write(qkv, Rope(table[:, :1], table[:, 1:]), None, 1e-6, cache, batch)
    assert not cache.k.any() and not cache.v.any()


def test_without_a_gpu_they_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "INTERPRETED", False)
    with pytest.raises(ConfigError, match="GPU"):
        kernels.TritonOps(torch.device("cpu"))

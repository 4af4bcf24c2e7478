"""Attention backends against the dense oracle, and the small kernels against theirs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attention_cases import TOLERANCE, assert_same_as_oracle, random_batch, random_inputs
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.core.errors import ConfigError
from weft.kernels.activations import ClampedSwiglu, activate_and_mul, reference_activate_and_mul
from weft.kernels.attention import reference_attend, sdpa, write_kv
from weft.kernels.attention.by_row import attend_by_row
from weft.kernels.attention.sdpa import torch_attend
from weft.kernels.ops import (
    Ops,
    Rope,
    apply_rope,
    layer_norm,
    make_ops,
    reference_rms_norm,
    reference_rope,
    rms_norm,
)

SPECIAL = st.sampled_from([{}, {"has_sinks": True}, {"cap": 0.6}])


@settings(max_examples=50, deadline=None)
@given(
    lens=st.lists(
        st.tuples(st.one_of(st.just(1), st.integers(1, 40)), st.integers(0, 30)),
        min_size=1,
        max_size=7,
    ),
    heads=st.sampled_from([(1, 1), (4, 4), (4, 2), (6, 2), (8, 1)]),
    block_size=st.sampled_from([1, 4, 16]),
    window=st.sampled_from([None, 1, 3, 16, 64]),
    chunked=st.booleans(),
    special=SPECIAL,
    seed=st.integers(0, 1000),
)
def test_mixed_batches_match_the_oracle(
    lens: list[tuple[int, int]],
    heads: tuple[int, int],
    block_size: int,
    window: int | None,
    chunked: bool,
    special: dict[str, Any],
    seed: int,
) -> None:
    batch = random_batch(lens, block_size, seed)
    special = {**special, "chunked": chunked}
    assert_same_as_oracle(torch_attend, batch, heads, block_size, window, seed, **special)


@settings(max_examples=25, deadline=None)
@given(
    past=st.lists(st.integers(0, 60), min_size=1, max_size=12),
    heads=st.sampled_from([(4, 4), (4, 2), (8, 1)]),
    window=st.sampled_from([None, 1, 5, 100]),
    chunked=st.booleans(),
    special=SPECIAL,
    seed=st.integers(0, 1000),
)
def test_decode_batches_match_the_oracle(
    past: list[int],
    heads: tuple[int, int],
    window: int | None,
    chunked: bool,
    special: dict[str, Any],
    seed: int,
) -> None:
    batch = random_batch([(1, p) for p in past], 4, seed)
    special = {**special, "chunked": chunked}
    assert_same_as_oracle(torch_attend, batch, heads, 4, window, seed, **special)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("window", [None, 6])
def test_half_precision(dtype: torch.dtype, window: int | None) -> None:
    batch = random_batch([(1, 20), (9, 0), (1, 0), (5, 13)], 4, 0)
    for cap in (None, 0.6):
        assert_same_as_oracle(torch_attend, batch, (4, 2), 4, window, 0, dtype, cap=cap)


@pytest.mark.parametrize("special", [{}, {"has_sinks": True}, {"cap": 0.6}, {"chunked": True}])
def test_rows_one_by_one(special: dict[str, Any]) -> None:
    batch = random_batch([(1, 20), (9, 0), (1, 0), (5, 13)], 4, 0)
    assert_same_as_oracle(attend_by_row, batch, (4, 2), 4, 6, 0, **special)


@pytest.mark.parametrize("prefill", [[], [(20, 4)]])
def test_decodes_of_very_different_lengths_are_split(
    prefill: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sdpa, "SPLIT_ROWS", 64)
    lens = [(1, 3), (1, 150), (1, 5), *prefill, (1, 140), (1, 9)]
    batch = random_batch(lens, 4, 1)
    assert_same_as_oracle(torch_attend, batch, (4, 2), 4, None, 1)
    (plan,) = batch.prepared.values()
    assert isinstance(plan, sdpa._Plan)
    assert [b.shape[0] for b in plan.buckets] == [3, 2, *(1 for _ in prefill)]


def test_layers_with_and_without_a_window_share_a_batch() -> None:
    batch = random_batch([(1, 20), (7, 5)], 4, 2)
    for window in (None, 4, None):
        assert_same_as_oracle(torch_attend, batch, (4, 2), 4, window, 2)
    assert len(batch.prepared) == 2


def test_a_chunked_window_begins_at_a_multiple_of_its_size() -> None:
    batch = random_batch([(9, 0)], 4, 0)
    q, k, v, cache = random_inputs(batch, (1, 1), 4, 0, torch.float32)
    write_kv(k, v, cache, batch)
    for row in (0, 4, 8):  # which see themselves alone
        got = reference_attend(q, cache, batch, scale=0.3, window=4, chunked=True)[row]
        torch.testing.assert_close(got, v[row])


def test_unknown_ops_are_refused_by_name() -> None:
    cpu = torch.device("cpu")
    with pytest.raises(ConfigError, match=r"no ops named 'nope'.*torch"):
        make_ops("nope", cpu)
    assert type(make_ops("auto", cpu)) is Ops


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_norm_rope_and_activation_match_their_oracles(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    tolerance = 1e-5 if dtype == torch.float32 else TOLERANCE[dtype]

    def close(a: torch.Tensor, b: torch.Tensor) -> None:
        assert a.dtype == b.dtype == dtype
        torch.testing.assert_close(a, b, atol=tolerance, rtol=tolerance)

    x = (3 * torch.randn(5, 6, 16, generator=generator)).to(dtype)
    weight = torch.randn(16, generator=generator).to(dtype)
    for w in (weight, None):
        close(rms_norm(x, w, 1e-6), reference_rms_norm(x, w, 1e-6))
    close(layer_norm(x, weight, 1e-6), reference_rms_norm(x, weight, 1e-6, centered=True))
    for activation in ("silu", ClampedSwiglu(1.7, 0.5)):
        close(activate_and_mul(x, activation), reference_activate_and_mul(x, activation))
    angle = torch.rand(5, 1, 8, generator=generator) * 6
    cos = torch.stack((angle.cos(), angle.cos()), 2).to(dtype)
    sin = torch.stack((-angle.sin(), angle.sin()), 2).to(dtype)
    for rope in (
        Rope(cos.flatten(2), sin.flatten(2)),
        Rope(cos.transpose(2, 3).flatten(2), sin.transpose(2, 3).flatten(2), interleaved=True),
    ):
        close(apply_rope(x, rope), reference_rope(x, rope))

"""Decode steps from fixed places, padded to captured sizes, against the same steps run freely."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch

if sys.platform != "linux":
    pytest.skip("Triton is for Linux", allow_module_level=True)
pytest.importorskip("triton")

from graph_cases import MAX_ROWS, Model, decode

import weft.kernels.triton_ops as triton_ops
from weft.engine.graphs import bucket_sizes

pytestmark = pytest.mark.skipif(not triton_ops.INTERPRETED, reason="compiled kernels are for a GPU")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(tmp_path_factory.mktemp("model"))


def test_steps_of_any_mix_match_steps_without_a_graph(model: Model) -> None:
    graphs = model.graphs()
    steps = [
        decode([5], [-1]),
        decode([9, 1, 16], [1, -1, 0], [True, False, True]),
        decode([3, 3], [0, 0]),
        decode([12, 2, 7, 8, 13], [-1] * 5, [True] * 5),
        decode([15] * 4, [1, 0, -1, 0]),
        decode([2], [1]),
    ]
    for inputs in steps:
        got = graphs.run(inputs)
        assert got is not None
        torch.testing.assert_close(got, model.run_freely(inputs), atol=1e-4, rtol=1e-4)


def test_padding_leaves_the_cache_and_last_tokens_alone(model: Model) -> None:
    graphs = model.graphs()
    inputs = decode([9, 1, 16], [1, -1, 0])
    model.run_freely(inputs)
    before = [t.clone() for cache in model.kv for t in (cache.k, cache.v)]
    graphs.run(inputs)
    after = [t for cache in model.kv for t in (cache.k, cache.v)]
    for a, b in zip(before, after, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)
    assert model.last_token_R.tolist() == list(range(10, 11 + MAX_ROWS))


def test_other_steps_have_no_graph(model: Model) -> None:
    graphs = model.graphs(lora=False)
    assert graphs.run(decode([3, 3], [0, -1])) is None
    assert graphs.run(decode([3, 3], [-1, -1])) is not None
    prefill = decode([3, 3], [-1, -1])
    object.__setattr__(prefill, "ids_T", np.arange(4))
    assert graphs.run(prefill) is None


@pytest.mark.parametrize("max_rows", [1, 3, 8, 100, 256, 1000])
def test_sizes_cover_every_batch(max_rows: int) -> None:
    sizes = bucket_sizes(max_rows)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == max_rows
    for rows in range(1, max_rows + 1):
        fits = min(size for size in sizes if size >= rows)
        assert fits - rows <= max(7, rows // 4)

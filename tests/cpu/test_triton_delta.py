"""The gated delta rule in Triton's interpreter, against the same in plain torch."""

from __future__ import annotations

import sys

import pytest
import torch

if sys.platform != "linux":
    pytest.skip("Triton is for Linux", allow_module_level=True)
pytest.importorskip("triton")

from weft.kernels import delta, triton_delta_chunks
from weft.kernels.delta import DeltaLayer, StateCache, StateRows
from weft.kernels.ops import Ops, Pending, Product
from weft.kernels.triton_ops import TritonOps
from weft.models.family import LinearConfig
from weft.models.linear_attention import allocate_states, columns_of

pytestmark = pytest.mark.skipif(
    not triton_delta_chunks.INTERPRETED, reason="compiled kernels are for a GPU"
)
NUM_STATES = 8


def make_layer(by_key_head: bool) -> tuple[LinearConfig, DeltaLayer]:
    shape = LinearConfig((True,), 2, 4, 8, 16, 4, by_key_head)
    layer = DeltaLayer(
        conv_WC=torch.randn(4, shape.channels),
        log_a_H=torch.randn(4),
        dt_bias_H=torch.randn(4),
        norm_E=torch.rand(16) + 0.5,
        eps=1e-6,
        num_keys=2,
        num_values=4,
        key_dim=8,
        value_dim=16,
        columns=columns_of(shape),
    )
    return shape, layer


@pytest.mark.parametrize(
    ("by_key_head", "chunk", "most"),
    [
        pytest.param(False, 16, 18, id="by kind", marks=pytest.mark.exhaustive),
        pytest.param(True, 16, 18, id="by key head"),
        pytest.param(True, delta.CHUNK, 55, id="both halves of a chunk"),
    ],
)
def test_kernels_match_plain_torch(
    by_key_head: bool, chunk: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decodes and chunks that begin and go on, with what adapters add to some rows; a prompt
    shorter than the convolution, and ends of prompts behind a snapshot; the states of others, and
    those of sequences that begin, hold NaN."""
    for module in (delta, triton_delta_chunks):
        monkeypatch.setattr(module, "CHUNK", chunk)
    torch.manual_seed(0)
    shape, layer = make_layer(by_key_head)
    spans = [
        (4, 4, 9, 1),
        (1, 5, 33, most),
        (5, 1, 33 + most, 3),
        (2, 2, 0, 2),
        (0, 6, 0, 17),
        (6, 0, 17, 1),
        (3, 3, 0, 1),
    ]
    sources, states, firsts, lengths = (list(column) for column in zip(*spans, strict=True))
    ends = torch.tensor([0, *lengths]).cumsum(0).tolist()
    rows = StateRows(states, ends, sources=sources)
    positions = torch.cat([torch.arange(f, f + n) for f, n in zip(firsts, lengths, strict=True)])
    y = torch.randn(len(positions), sum(map(sum, shape.projections.values())))
    slots = torch.arange(len(y), dtype=torch.int32) % 3 - 1
    product = Product(y, Pending(torch.randn_like(y), slots))
    made = allocate_states(shape, NUM_STATES, torch.float32, "cpu")
    for tensor in (made.conv, made.delta):
        tensor.normal_()
        tensor[[0, 2, 3, 5, 6]] = torch.nan
    found = []
    for ops in (Ops(), TritonOps(torch.device("cpu"))):
        cache = StateCache(made.conv.clone(), made.delta.clone())
        out = ops.gated_delta(product, layer, cache, rows, positions)
        found.append((out, cache.conv, cache.delta))
    for want, got in zip(*found, strict=True):
        torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4, equal_nan=True)


def test_a_decode_does_not_depend_on_its_neighbours() -> None:
    torch.manual_seed(0)
    shape, layer = make_layer(by_key_head=False)
    y, ops = (
        torch.randn(3, sum(map(sum, shape.projections.values()))),
        TritonOps(torch.device("cpu")),
    )
    made = allocate_states(shape, NUM_STATES, torch.float32, "cpu")
    made.delta.normal_()
    positions = torch.tensor([5, 9, 2])
    for row in (0, 2):
        cache = StateCache(made.conv.clone(), made.delta.clone())
        together = ops.gated_delta(
            Product(y), layer, cache, StateRows([3, 0, 4], [0, 1, 2, 3]), positions
        )
        own = StateCache(made.conv.clone(), made.delta.clone())
        one = StateRows([[3, 0, 4][row]], [0, 1])
        alone = ops.gated_delta(Product(y[row : row + 1]), layer, own, one, positions[row:])
        assert torch.equal(alone[0], together[row])
        assert torch.equal(own.delta[[3, 0, 4][row]], cache.delta[[3, 0, 4][row]])

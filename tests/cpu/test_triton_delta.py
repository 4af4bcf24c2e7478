"""The gated delta rule and Mamba 2 in Triton's interpreter, against the same in plain torch."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from dealing import deal
from delta_cases import NUM_STATES, make_layer, read_with_guesses, run_mixed

from weft.kernels import delta, triton_delta_chunks
from weft.kernels.delta import StateCache, StateRows
from weft.kernels.ops import Ops, Product
from weft.kernels.triton_ops import TritonOps
from weft.models.linear_attention import allocate_states

pytestmark = pytest.mark.skipif(
    not triton_delta_chunks.INTERPRETED, reason="compiled kernels are for a GPU"
)


@pytest.mark.parametrize(
    ("kind", "chunk", "most"),
    [
        pytest.param({}, 16, 18, id="by kind", marks=pytest.mark.exhaustive),
        pytest.param({"by_key_head": True}, 16, 18, id="by key head"),
        pytest.param({"by_key_head": True}, delta.CHUNK, 55, id="both halves of a chunk"),
        pytest.param({"mamba": True}, 16, 18, id="Mamba 2"),
        pytest.param({"doubled": True}, 16, 18, id="doubled"),
    ],
)
def test_kernels_match_plain_torch(
    kind: dict[str, bool], chunk: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (delta, triton_delta_chunks):
        monkeypatch.setattr(module, "CHUNK", chunk)
    if chunk == 16:  # programs that take one sequence after the other
        for name in ("PREPARES", "SCANS", "SHORT_RUNS"):
            monkeypatch.setattr(triton_delta_chunks, name, 1)
    torch.manual_seed(0)
    shape, layer = make_layer(**{"by_key_head": False, **kind})
    device = torch.device("cpu")
    ours = [Ops(), TritonOps(device)]
    found = run_mixed(shape, layer, most, [(ops, device, torch.float32) for ops in ours])
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
        cache = StateCache(made.inputs.clone(), made.delta.clone())
        together = ops.gated_delta(
            Product(y), layer, cache, StateRows([3, 0, 4], [0, 1, 2, 3]), positions
        )
        own = StateCache(made.inputs.clone(), made.delta.clone())
        one = StateRows([[3, 0, 4][row]], [0, 1])
        alone = ops.gated_delta(Product(y[row : row + 1]), layer, own, one, positions[row:])
        assert torch.equal(alone[0], together[row])
        assert torch.equal(own.delta[[3, 0, 4][row]], cache.delta[[3, 0, 4][row]])


@pytest.mark.parametrize(
    "length", [pytest.param(8, id="short"), pytest.param(16, marks=pytest.mark.exhaustive)]
)
@pytest.mark.parametrize(("fused", "mamba"), deal([True, False], [False, True]))
def test_guesses_leave_no_trace(fused: bool, mamba: bool, length: int) -> None:
    """With right and wrong guesses, decodes of two sequences read the same as one by one, and to
    the bit in fused kernels."""
    torch.manual_seed(0)
    device = torch.device("cpu")
    ops, off = (TritonOps(device), 0.0) if fused else (Ops(), 1e-5)
    shape, layer = make_layer(by_key_head=not mamba, mamba=mamba)
    for got, want in read_with_guesses(shape, layer, ops, device, torch.float32, length):
        torch.testing.assert_close(got, want, atol=off, rtol=off)

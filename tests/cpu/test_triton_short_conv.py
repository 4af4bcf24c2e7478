"""The gated short convolution in Triton's interpreter, against the same in plain torch."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from delta_cases import make_short_conv, read_with_guesses, run_mixed

from weft.kernels import triton_short_conv
from weft.kernels.ops import Ops
from weft.kernels.triton_base import INTERPRETED
from weft.kernels.triton_ops import TritonOps

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="compiled kernels are for a GPU")


@pytest.mark.parametrize(
    ("channels", "conv_width", "bias"),
    [(24, 3, False), (150, 4, True), (8, 1, False)],
    ids=["usual", "several blocks of channels", "one token"],
)
def test_kernels_match_plain_torch(
    channels: int, conv_width: int, bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With programs that take one part or run after the other, too."""
    torch.manual_seed(0)
    shape, layer = make_short_conv(channels, conv_width, bias)
    device = torch.device("cpu")
    ours = [Ops(), TritonOps(device)]
    versions = [(ops, device, torch.float32) for ops in ours]
    if bias:
        for name in ("PARTS", "RUNS"):
            monkeypatch.setattr(triton_short_conv, name, 1)
    found = run_mixed(shape, layer, 70, versions)
    for want, got in zip(*found, strict=True):
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5, equal_nan=True)


@pytest.mark.parametrize("fused", [False, True], ids=["plain torch", "fused"])
def test_guesses_leave_no_trace(fused: bool) -> None:
    """With right and wrong guesses, decodes of two sequences give the same as one by one, to the
    bit."""
    torch.manual_seed(0)
    device = torch.device("cpu")
    ops = TritonOps(device) if fused else Ops()
    shape, layer = make_short_conv(16, 3, True)
    for got, want in read_with_guesses(shape, layer, ops, device, torch.float32):
        assert torch.equal(got, want)

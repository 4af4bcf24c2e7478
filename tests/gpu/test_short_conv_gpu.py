"""The kernels of the gated short convolution, compiled, against plain torch in fp32."""

from __future__ import annotations

import pytest
import torch
from delta_cases import make_short_conv, read_with_guesses, run_mixed

from weft.kernels.ops import Ops
from weft.kernels.triton_ops import TritonOps

DEVICE = torch.device("cuda")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("channels", "conv_width", "bias"), [(48, 4, True), (150, 2, False), (2048, 3, False)]
)
def test_a_mixed_step(channels: int, conv_width: int, bias: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    shape, layer = make_short_conv(channels, conv_width, bias)
    versions = [(Ops(), DEVICE, torch.float32), (TritonOps(DEVICE), DEVICE, dtype)]
    off = 1e-5 if dtype == torch.float32 else 0.02
    for want, got in zip(*run_mixed(shape, layer, 300, versions), strict=True):
        scale = float(want[~want.isnan()].abs().max()) if want.numel() else 0.0
        torch.testing.assert_close(got.float(), want, atol=off * scale, rtol=0, equal_nan=True)


def test_guesses_leave_no_trace() -> None:
    """Decodes give the same with guesses as without, to the bit."""
    torch.manual_seed(0)
    shape, layer = make_short_conv(2048, 3, False)
    ops = TritonOps(DEVICE)
    for got, want in read_with_guesses(shape, layer, ops, DEVICE, torch.bfloat16):
        assert torch.equal(got, want)

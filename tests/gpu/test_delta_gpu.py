"""The kernels of the gated delta rule and of Mamba 2, compiled, against plain torch in fp32, for
heads of all widths.

Narrow heads are compiled in another way than wide ones, and each width takes other instructions of
the matrix units.
"""

from __future__ import annotations

import pytest
import torch
from delta_cases import make_layer, read_with_guesses, run_mixed
from torch import Tensor

from weft.kernels.ops import Ops
from weft.kernels.triton_ops import TritonOps


def error_of(got: Tensor, want: Tensor) -> float:
    """The root mean square of the error, as a part of that of what is wanted; NaN is to be NaN."""
    there = ~want.isnan()
    assert torch.equal(got.isnan(), ~there)
    error = (got.double() - want.double())[there]
    return float(error.square().mean().sqrt() / want.double()[there].square().mean().sqrt())


@pytest.mark.parametrize("kind", ["delta rule", "Mamba 2", "doubled"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("width", [8, 16, 32, 64, 128])
def test_a_mixed_step(width: int, dtype: torch.dtype, kind: str) -> None:
    device = torch.device("cuda")
    torch.manual_seed(0)
    mamba = kind == "Mamba 2"
    value_dim = width // 2 if mamba and width > 16 else width
    shape, layer = make_layer(False, width, value_dim, mamba, kind == "doubled")
    versions = [(Ops(), device, torch.float32), (TritonOps(device), device, dtype)]
    for want, got in zip(*run_mixed(shape, layer, 300, versions), strict=True):
        assert error_of(got, want) <= (1e-4 if dtype == torch.float32 else 0.02)


@pytest.mark.parametrize("mamba", [False, True], ids=["delta rule", "Mamba 2"])
@pytest.mark.parametrize("width", [32, 128])
def test_guesses_leave_no_trace(width: int, mamba: bool) -> None:
    """Decodes read the same with guesses as without, to the bit."""
    device = torch.device("cuda")
    torch.manual_seed(0)
    shape, layer = make_layer(not mamba, width, width, mamba)
    ops = TritonOps(device)
    for got, want in read_with_guesses(shape, layer, ops, device, torch.bfloat16):
        assert torch.equal(got, want)

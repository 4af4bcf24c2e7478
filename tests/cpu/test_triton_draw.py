"""Drawing tokens in Triton's interpreter, against what many small kernels do."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from weft.kernels.sampling import gumbel
from weft.kernels.triton_base import INTERPRETED
from weft.kernels.triton_draw import CHUNK, draw

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="compiled kernels are for a GPU")


@pytest.mark.parametrize("vocab_size", [7, CHUNK, CHUNK + 5])
def test_the_same_tokens_are_drawn(vocab_size: int) -> None:
    """For rows in any order, others between them, and whatever is left out."""
    generator = torch.Generator().manual_seed(vocab_size)
    logits_NV = 3 * torch.randn(6, vocab_size, generator=generator)
    logits_NV[2, ::2] = -torch.inf
    logits_NV[3, 1:] = -torch.inf
    row_M = torch.tensor([5, 2, 3, 0])
    temperature_M = torch.tensor([0.7, 1.3, 1.0, 1e-6])
    seed_M = torch.tensor([2**62 + 12345, -5, 0, -(2**63)])
    for position in (0, 1, 1000):
        position_M = position + torch.arange(4)
        scaled_MV = logits_NV[row_M] / temperature_M[:, None]
        expected_M = (scaled_MV + gumbel(seed_M, position_M, vocab_size)).argmax(-1)
        drawn_M = draw(logits_NV, row_M, temperature_M, seed_M, position_M)
        assert torch.equal(drawn_M, expected_M)


def test_logits_that_are_not_numbers_give_some_token() -> None:
    logits_NV = torch.full((1, 5), torch.nan)
    zero_M = torch.zeros(1, dtype=torch.int64)
    assert 0 <= draw(logits_NV, zero_M, torch.ones(1), zero_M, zero_M).item() < 5

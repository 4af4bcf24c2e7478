"""Drawing tokens at random in one kernel; see `weft.kernels.sampling`, whose bits these are.

Shapes: N sampled rows, M of them random, V vocabulary, C chunks of it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.core.numbers import cdiv

CHUNK = 2048
"""Logits that one program looks at."""


def draw(
    logits_NV: Tensor, row_M: Tensor, temperature_M: Tensor, seed_M: Tensor, position_M: Tensor
) -> Tensor:
    """The tokens with the largest logits / temperature + noise of some rows, int64 (M,).

    logits_NV: rows of consecutive numbers. row_M: int64, among them. The others are as in
    `SamplingBatch`.
    """
    num_rows, vocab_size = len(row_M), logits_NV.shape[1]
    num_chunks = cdiv(vocab_size, CHUNK)
    best_MC = torch.empty((num_rows, num_chunks), dtype=torch.float32, device=logits_NV.device)
    # Zeros, as a kernel that is still to be compiled writes nothing, and tokens are indices.
    token_MC = torch.zeros_like(best_MC, dtype=torch.int64)
    _best_of_chunk[num_rows, num_chunks](
        logits_NV,
        row_M,
        temperature_M,
        seed_M,
        position_M,
        best_MC,
        token_MC,
        logits_NV.stride(0),
        vocab_size,
        CHUNK=CHUNK,
    )
    return token_MC.gather(1, best_MC.argmax(-1, keepdim=True))[:, 0]


@triton.jit(
    do_not_specialize=["stride", "vocab_size"], do_not_specialize_on_alignment=["logits_ptr"]
)
def _best_of_chunk(
    logits_ptr,
    row_ptr,
    temperature_ptr,
    seed_ptr,
    position_ptr,
    best_ptr,
    token_ptr,
    stride,
    vocab_size,
    CHUNK: tl.constexpr,
):
    """The best token of one chunk of one random row, and its logit with the noise."""
    m, chunk = tl.program_id(0), tl.program_id(1)
    row, temperature = tl.load(row_ptr + m), tl.load(temperature_ptr + m)
    seed = tl.load(seed_ptr + m)
    low, high = seed.to(tl.uint32), (seed >> 32).to(tl.uint32)
    key = _mix(low ^ _mix(high ^ _mix(tl.load(position_ptr + m).to(tl.uint32))))
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = token < vocab_size
    logit = tl.load(logits_ptr + row * stride + token, mask=inside, other=-float("inf"))
    bits = _mix(_mix(token.to(tl.uint32) ^ key) + key)
    uniform = (bits.to(tl.float64) + 0.5) / 4294967296.0
    noise = -tl.log(-tl.log(uniform))
    score = tl.div_rn(logit.to(tl.float32), temperature) + noise.to(tl.float32)
    best, index = tl.max(score, 0, return_indices=True)
    chosen = tl.minimum(chunk * CHUNK + index, vocab_size - 1)  # also of logits that are no numbers
    at = m * tl.num_programs(1) + chunk
    tl.store(best_ptr + at, best)
    tl.store(token_ptr + at, chosen.to(tl.int64))


@triton.jit
def _mix(h):
    """A bijection of 32-bit integers in which every input bit reaches all."""
    h = h ^ (h >> 16)
    h = h * 0x85EBCA6B
    h = h ^ (h >> 13)
    h = h * 0xC2B2AE35
    return h ^ (h >> 16)

"""Deterministic kernels: a row's bits whatever is computed beside it, on any device."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import torch
from attention_cases import random_batch
from torch import Tensor

from weft.kernels import triton_linear
from weft.kernels.attention import AttentionBatch, KVCache, make_batch
from weft.kernels.ops import make_ops


def assert_rows_of_products_are_alone(
    device: torch.device, dtype: torch.dtype, shape: tuple[int, int], numbers: list[int]
) -> None:
    """The first and the last rows of a product have the same bits however many there are. `shape`:
    O, I. Triton's interpreter has sums of its own, so that on a CPU all sums are to be exact."""
    generator = torch.Generator().manual_seed(0)
    outputs, inputs = shape

    def random(*size: int) -> Tensor:
        values = torch.randn(size, generator=generator)
        return (values if device.type == "cuda" else (4 * values).round()).to(device, dtype)

    x_TI, weight_OI, bias_O = random(max(numbers), inputs), random(outputs, inputs), random(outputs)
    whole_TO = triton_linear.linear(x_TI, weight_OI, bias_O, deterministic=True)
    exact_TO = x_TI.double() @ weight_OI.double().t() + bias_O.double()
    most = exact_TO.abs().max()
    assert (whole_TO.double() - exact_TO).abs().max() <= 2 * torch.finfo(dtype).eps * most
    for number in numbers:
        part_TO = triton_linear.linear(x_TI[:number], weight_OI, bias_O, deterministic=True)
        assert torch.equal(part_TO, whole_TO[:number]), number
        last_TO = triton_linear.linear(x_TI[-number:], weight_OI, bias_O, deterministic=True)
        assert torch.equal(last_TO, whole_TO[-number:]), number


def assert_rows_of_attention_are_alone(
    device: torch.device,
    dtype: torch.dtype,
    heads: tuple[int, int, int],
    window: int | None,
    length: int,
    cuts: list[list[int]],
    chunked: bool = False,
) -> None:
    """A sequence's rows have the same bits when they are computed at once and in chunks that end
    where `cuts` say, beside others, and its last ones as decodes. `heads`: H, K, D."""
    attend = make_ops("triton", device, deterministic=True).attend
    generator = torch.Generator().manual_seed(0)
    (H, K, D), block_size = heads, 16
    sequence = random_batch([(length, 0), (70, 30), (1, 45)], block_size, 0)
    shape = (int(sequence.block_table_SB.max()) + 2, block_size, K, D)
    cache = KVCache(*(torch.randn(shape, generator=generator).to(device, dtype) for _ in "kv"))
    q_THD = torch.randn(sequence.query_start[-1], H, D, generator=generator).to(device, dtype)
    own, other, third = sequence.block_table_SB.tolist()

    def rows(begin: int, end: int, beside: bool) -> Tensor:
        lens = [end - begin, *((70, 1) if beside else ())]
        contexts = [end, *((100, 46) if beside else ())]
        tables = [own, *((other, third) if beside else ())]
        batch = _on(device, make_batch(lens, contexts, tables, block_size))
        q = torch.cat((q_THD[begin:end], *((q_THD[length:],) if beside else ())))
        out = attend(q, cache, batch, scale=0.3, window=window, chunked=chunked)
        return out[: end - begin]

    whole = rows(0, length, False)
    for cut in cuts:
        for begin, end in pairwise([0, *cut, length]):
            assert torch.equal(rows(begin, end, True), whole[begin:end]), (begin, end)
    for position in (5, 63, 64, length - 1):
        for beside in (False, True) if device.type == "cuda" else (True,):
            got = rows(position, position + 1, beside)
            assert torch.equal(got, whole[position : position + 1]), position


def _on(device: torch.device, batch: AttentionBatch) -> AttentionBatch:
    return replace(
        batch,
        block_table_SB=batch.block_table_SB.to(device),
        seq_lens_S=batch.seq_lens_S.to(device),
    )

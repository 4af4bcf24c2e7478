"""A layer with recurrent states and random weights, and what a step may ask of it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from weft.core.units import MAX_GUESSES
from weft.kernels.delta import DeltaLayer, StateCache, StateRows
from weft.kernels.ops import Ops, Pending, Product
from weft.kernels.short_conv import ShortConvLayer
from weft.models.linear_attention import allocate_states, columns_of
from weft.models.state_config import LinearConfig, ShortConvConfig

NUM_STATES = 10
AnyLayer = DeltaLayer | ShortConvLayer
AnyShape = LinearConfig | ShortConvConfig


def make_layer(
    by_key_head: bool,
    key_dim: int = 8,
    value_dim: int = 16,
    mamba: bool = False,
    doubled: bool = False,
) -> tuple[LinearConfig, DeltaLayer]:
    shape = LinearConfig((True,), 2, 4, key_dim, value_dim, 4, by_key_head, mamba)
    layer = DeltaLayer(
        conv_WC=torch.randn(4, shape.channels),
        log_a_H=torch.randn(4),
        dt_bias_H=torch.randn(4),
        norm_E=None if mamba else torch.rand(value_dim) + 0.5,
        eps=1e-6,
        num_keys=2,
        num_values=4,
        key_dim=key_dim,
        value_dim=value_dim,
        columns=columns_of(shape),
        skip_H=torch.randn(4) if mamba else None,
        bias_C=torch.randn(shape.channels) if mamba else None,
        doubled=doubled,
    )
    return shape, layer


def make_short_conv(
    channels: int, conv_width: int, bias: bool
) -> tuple[ShortConvConfig, ShortConvLayer]:
    bias_C = torch.randn(channels) if bias else None
    layer = ShortConvLayer(torch.randn(conv_width, channels), bias_C)
    return ShortConvConfig((True,), channels, conv_width, bias), layer


def placed(layer: AnyLayer, device: torch.device, dtype: torch.dtype) -> AnyLayer:
    """The layer with its weights there, in this precision."""
    names = ["conv_WC", "bias_C"]
    if isinstance(layer, DeltaLayer):
        names += ["norm_E", "skip_H"]
        of_heads = {name: getattr(layer, name).to(device) for name in ("log_a_H", "dt_bias_H")}
        layer = replace(layer, **of_heads)
    found = {name: getattr(layer, name) for name in names}
    return replace(
        layer, **{name: None if w is None else w.to(device, dtype) for name, w in found.items()}
    )


def run_layer(
    ops: Ops,
    y: Product,
    layer: AnyLayer,
    cache: StateCache,
    rows: StateRows,
    positions_T: Tensor,
) -> Tensor:
    """What the layer gives for the step, between its projections."""
    if isinstance(layer, ShortConvLayer):
        return ops.short_conv(y, layer, cache, rows, positions_T)
    return ops.gated_delta(y, layer, cache, rows, positions_T)


def run_mixed(
    shape: AnyShape,
    layer: AnyLayer,
    most: int,
    versions: list[tuple[Ops, torch.device, torch.dtype]],
) -> list[tuple[Tensor, Tensor, Tensor]]:
    """One step by each version, for the same inputs: the output, and the states after it.

    It has decodes, and chunks that begin and go on, the longest of `most` tokens, with what
    adapters add to some rows; a prompt shorter than the convolution, and ends of prompts behind a
    snapshot; decodes with guesses, and with states that lack tokens. The states of others, and
    those of sequences that begin, hold NaN. Inputs are numbers of the last version's precision.
    """
    spans = [
        (4, 4, 9, 1),
        (1, 5, 33, most),
        (5, 1, 33 + most, 3),
        (2, 2, 0, 2),
        (0, 6, 0, 17),
        (6, 0, 17, 1),
        (3, 3, 0, 1),
        *((7, 7, 9 + i, 1) for i in range(4)),
        *((8, 8, 21 + i, 1) for i in range(MAX_GUESSES + 1)),
        (9, 9, 8, 1),
    ]
    sources, states, firsts, lengths = (list(column) for column in zip(*spans, strict=True))
    ends = torch.tensor([0, *lengths]).cumsum(0).tolist()
    lags = [0] * len(spans)
    lags[states.index(8)], lags[states.index(9)] = MAX_GUESSES, 2
    positions = torch.cat([torch.arange(f, f + n) for f, n in zip(firsts, lengths, strict=True)])
    precision = versions[-1][2]
    y = torch.randn(len(positions), sum(map(sum, shape.projections.values()))).to(precision)
    add = torch.randn(y.shape).to(precision)
    slots = torch.tensor(states, dtype=torch.int32).repeat_interleave(torch.tensor(lengths)) % 3 - 1
    made = allocate_states(shape, NUM_STATES, precision, "cpu")
    for tensor in (made.inputs, made.delta):
        tensor.normal_()
        tensor[[0, 2, 3, 5, 6]] = torch.nan
    rounded = placed(layer, torch.device("cpu"), precision)
    found = []
    for ops, device, dtype in versions:
        own = placed(rounded, device, dtype)
        cache = StateCache(
            made.inputs.to(device, dtype, copy=True), made.delta.to(device, copy=True)
        )
        product = Product(y.to(device, dtype), Pending(add.to(device, dtype), slots.to(device)))
        rows = StateRows(states, ends, sources=sources, lags=lags)
        out = run_layer(ops, product, own, cache, rows, positions.to(device))
        found.append((out, cache.inputs, cache.delta))
    return found


def read_with_guesses(
    shape: AnyShape,
    layer: AnyLayer,
    ops: Ops,
    device: torch.device,
    dtype: torch.dtype,
    length: int = 16,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Decodes of two sequences of so many tokens, with right and wrong guesses and without any.
    Yields what the right rows give, computed with the guesses and one by one."""
    layer = placed(layer, device, dtype)
    width = sum(map(sum, shape.projections.values()))
    alone = allocate_states(shape, NUM_STATES, dtype, device)
    alone.delta.normal_()
    alone.inputs.normal_()
    guessed = StateCache(alone.inputs.clone(), alone.delta.clone())
    rng, states = random.Random(0), (3, 5)

    def text(num: int) -> Tensor:
        return torch.randn(num, width).to(device, dtype)

    texts = {state: text(length + MAX_GUESSES) for state in states}
    done, lags = dict.fromkeys(states, 0), dict.fromkeys(states, 0)
    begin = 11
    while min(done.values()) < length:
        each = [state for state in states if done[state] < length]
        rows, right, positions, spans = [], [], [], []
        for state in each:
            num = rng.choice((0, rng.randint(0, MAX_GUESSES)))
            right.append(rng.randint(0, num))
            first = done[state]
            rows += [texts[state][first : first + 1 + right[-1]], text(num - right[-1])]
            positions += range(begin + first, begin + first + 1 + num)
            spans += [(state, lags[state] if i == 0 else 0) for i in range(num + 1)]
        y, at = torch.cat(rows), torch.tensor(positions, device=device)
        numbers, behind = (list(column) for column in zip(*spans, strict=True))
        step = StateRows(numbers, list(range(len(y) + 1)), lags=behind)
        got = run_layer(ops, Product(y), layer, guessed, step, at)
        for state, num_right in zip(each, right, strict=True):
            start = numbers.index(state)
            for i in range(start, start + num_right + 1):
                one, row = StateRows([state], [0, 1]), slice(i, i + 1)
                want = run_layer(ops, Product(y[row]), layer, alone, one, at[row])
                yield got[i], want[0]
            done[state] += 1 + num_right
            lags[state] = num_right

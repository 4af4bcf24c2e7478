"""Linear attention by the gated delta rule, and the short convolution ahead of it, over a state
that each sequence keeps between steps. In plain torch here, for any device, and as fused kernels in
`weft.kernels.triton_delta`.

Shapes: T token rows, S sequences, G key heads, H value heads, D size of a key, E size of a value,
C channels of the convolution, W its width, L tokens of a chunk, O outputs of the projection.

The state of a head is a matrix (D, E) that maps keys to values. A token with key k, value v, query
q, decay g <= 0 and strength b changes it and reads it:

    state *= exp(g)
    state += k (b (v - k^T state))^T
    out    = q^T state

Reference: Yang, Kautz, Hatamizadeh, "Gated Delta Networks", 2024.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from weft.core.units import SHORT

CHUNK = 64
"""Tokens of a prompt whose changes of the state are computed together."""

Ints = NDArray[np.int64]
Table = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class StateCache:
    """What one layer keeps of all sequences, by the number of their state. A sequence at its first
    token takes its state as zeros, whatever is there."""

    conv: Tensor
    """(states, W, C), in the model's dtype: the last inputs of the convolution, that of position p
    at p % W."""
    delta: Tensor
    """fp32 (states, H, D, E)."""


class Columns(NamedTuple):
    """Where the columns of a kind begin in the output of the projection, and how far those of a key
    head are from the ones of the next key head. Value heads of the same key head are neighbours."""

    q: tuple[int, int]
    k: tuple[int, int]
    v: tuple[int, int]
    z: tuple[int, int]
    b: tuple[int, int]
    a: tuple[int, int]


@dataclass(frozen=True, slots=True)
class DeltaLayer:
    """The weights and sizes of one layer, between its two projections."""

    conv_WC: Tensor
    log_a_H: Tensor
    """fp32. With `dt_bias_H`, what a head's decay is made of."""
    dt_bias_H: Tensor
    """fp32."""
    norm_E: Tensor
    eps: float
    num_keys: int
    """G"""
    num_values: int
    """H, a multiple of G."""
    key_dim: int
    value_dim: int
    columns: Columns


class StateWork(NamedTuple):
    """A step's rows as kernels find them. Entries in excess do nothing."""

    decodes: Tensor
    """int32 (decodes, 2): row and state of sequences that have one row. In excess, the state is -1,
    and so is the row unless its result is to be zero."""
    chunks: Tensor
    """int32 (chunks, 6): first row, number of rows (0 in excess), the states that its sequence
    begins with and ends in, how many rows of it in this step come before, and how many rows there
    are from the first one on, 0 if there are SHORT in all."""
    runs: Tensor
    """int32 (sequences, 6) of those with several rows: first row, their number (0 in excess), the
    states that it begins with and ends in, the number of its first chunk, and how many rows of what
    it goes on with come before."""


@dataclass(frozen=True, slots=True)
class StateRows:
    """Which state each sequence of a step has, and where its rows are. No two of them have the same
    state.

    A sequence may be there twice, with up to SHORT rows behind more than SHORT others. Then the
    first part leaves its state in a snapshot, with which the second one begins:

        sources    7   4   9         the prompt of state 4 is cut where snapshot 9 is taken
        states     7   9   4
    """

    states: list[int]
    """Where the state of each one is after the step."""
    query_start: list[int]
    """The first row of each sequence, and the end: S + 1 numbers."""
    work: StateWork | None = None
    """The step's work, on the device; None: each layer makes it from the lists. With it, fused
    kernels don't read the lists, which are empty in a step that is captured."""
    sources: list[int] | None = None
    """Where the state of each one is before the step; None: where it is after it."""

    def work_on(self, device: torch.device) -> StateWork:
        if self.work is not None:
            return self.work
        return StateWork(
            *(
                torch.from_numpy(part).to(device)
                for part in state_work(self.states, self.query_start, self.sources)
            )
        )


def state_work(
    states: Sequence[int] | Ints,
    query_start: list[int],
    sources: Sequence[int] | Ints | None = None,
) -> tuple[Table, Table, Table]:
    """The decodes, chunks and runs of a step, as `StateWork` has them."""
    starts, states_S = np.array(query_start, np.int32), np.array(states, np.int32)
    sources_S = states_S if sources is None else np.array(sources, np.int32)
    counts = np.diff(starts)
    befores = np.zeros_like(counts)
    befores[1:] = np.where(sources_S[1:] == states_S[:-1], counts[:-1], 0)
    alone = (counts == 1) & (befores == 0)
    ones, several = np.flatnonzero(alone), np.flatnonzero(~alone)
    ends = np.cumsum(-(-counts[several] // CHUNK), dtype=np.int32)
    begins = ends + counts[several] // -CHUNK
    of_runs = (starts[:-1], counts, sources_S, states_S)
    runs = np.stack((*(part[several] for part in of_runs), begins, befores[several]), 1)
    chunks = [
        (
            first + done,
            min(CHUNK, count - done),
            source,
            state,
            before + done,
            count - done if count > SHORT else 0,
        )
        for first, count, source, state, _, before in runs.tolist()
        for done in range(0, count, CHUNK)
    ]
    decodes = np.stack((starts[ones], states_S[ones]), 1)
    return decodes, np.array(chunks, np.int32).reshape(-1, 6), runs


def gated_delta(
    y_TO: Tensor, layer: DeltaLayer, cache: StateCache, rows: StateRows, positions_T: Tensor
) -> Tensor:
    """All of a layer between its projections: the convolution, the delta rule and the gated norm,
    (T, H E). Updates the sequences' states.

    Queries and keys are normed to length 1, and queries divided by sqrt(D). What the state gives is
    normed by head and multiplied by silu(z).
    """
    G, H, D, E = layer.num_keys, layer.num_values, layer.key_dim, layer.value_dim
    q, k, v, z, b, a = layer.columns
    share = H // G

    def of(at: tuple[int, int], width: int) -> Tensor:
        """The columns of a kind, (T, G, width)."""
        return y_TO.as_strided((len(y_TO), G, width), (y_TO.stride(0), at[1], 1), at[0])

    x_TC = torch.cat([part.flatten(1) for part in (of(q, D), of(k, D), of(v, share * E))], 1)
    x_TC = _causal_conv(x_TC, layer.conv_WC, cache, rows, positions_T)
    q_TGD, k_TGD, v_TO = x_TC.split_with_sizes((G * D, G * D, H * E), 1)
    q_THD = _unit(q_TGD.reshape(-1, G, D)).repeat_interleave(share, 1) * D**-0.5
    k_THD = _unit(k_TGD.reshape(-1, G, D)).repeat_interleave(share, 1)
    v_THE = v_TO.reshape(-1, H, E).float()
    a_TH, b_TH = of(a, share).flatten(1).float(), of(b, share).flatten(1).float().sigmoid()
    g_TH = -layer.log_a_H.exp() * F.softplus(a_TH + layer.dt_bias_H)
    out_THE = _delta_rule(q_THD, k_THD, v_THE, g_TH, b_TH, cache, rows, positions_T)
    normed_THE = F.rms_norm(out_THE, (E,), layer.norm_E.float(), layer.eps)
    gate_TO = of(z, share * E).flatten(1).float()
    return (normed_THE.flatten(1) * F.silu(gate_TO)).to(y_TO.dtype)


def _causal_conv(
    x_TC: Tensor, weight_WC: Tensor, cache: StateCache, rows: StateRows, positions_T: Tensor
) -> Tensor:
    """SiLU of each channel's convolution over the last W tokens of the sequence, (T, C). Updates
    the inputs that the cache keeps."""
    width, device = len(weight_WC), x_TC.device
    start_S1 = torch.tensor(rows.query_start, device=device)
    counts_S = start_S1.diff()
    state_T = torch.tensor(rows.states, device=device).repeat_interleave(counts_S)
    row_T = torch.arange(len(x_TC), device=device)
    before_T = row_T - start_S1[:-1].repeat_interleave(counts_S)
    last_T = before_T + width >= counts_S.repeat_interleave(counts_S)
    source_T = state_T
    if rows.sources is not None:
        source_T = torch.tensor(rows.sources, device=device).repeat_interleave(counts_S)
    going_on = [
        (rows.query_start[i - 1 : i + 2], state)
        for i, state in enumerate(rows.states)
        if rows.sources is not None and i and rows.sources[i] == rows.states[i - 1]
    ]
    for (begin, first, end), _ in going_on:
        before_T[first:end] += first - begin
    y_TC = x_TC * weight_WC[-1]
    for back in range(1, width):
        kept_TC = cache.conv[source_T, (positions_T - back) % width]
        here_TC = x_TC[(row_T - back).clamp(min=0)]
        seen_TC = torch.where((before_T >= back)[:, None], here_TC, kept_TC)
        y_TC += seen_TC.masked_fill((positions_T < back)[:, None], 0) * weight_WC[-1 - back]
    cache.conv[state_T[last_T], positions_T[last_T] % width] = x_TC[last_T]
    for (begin, first, end), state in going_on:
        part = slice(max(begin, end - width), first)
        cache.conv[state, positions_T[part] % width] = x_TC[part]
    return F.silu(y_TC)


def _delta_rule(
    q_THD: Tensor,
    k_THD: Tensor,
    v_THE: Tensor,
    g_TH: Tensor,
    b_TH: Tensor,
    cache: StateCache,
    rows: StateRows,
    positions_T: Tensor,
) -> Tensor:
    """What the rows read of their sequences' states, (T, H, E). Updates the states. All in fp32."""
    out_THE = torch.empty_like(v_THE)
    work = state_work(rows.states, rows.query_start, rows.sources)
    decodes, _, runs = (part.tolist() for part in work)
    if decodes:
        at, state_N = torch.tensor(decodes, device=v_THE.device).t()
        begins_N = (positions_T[at] == 0)[:, None, None, None]
        state_NHDE = cache.delta[state_N].masked_fill(begins_N, 0)
        out_THE[at], cache.delta[state_N] = delta_step(
            q_THD[at], k_THD[at], v_THE[at], g_TH[at], b_TH[at], state_NHDE
        )
    for first, count, source, state, *_ in runs:
        state_HDE = cache.delta[source]
        if positions_T[first] == 0:
            state_HDE = torch.zeros_like(state_HDE)
        for start in range(first, first + count, CHUNK):
            part = slice(start, min(start + CHUNK, first + count))
            out_THE[part], state_HDE = delta_chunk(
                q_THD[part], k_THD[part], v_THE[part], g_TH[part], b_TH[part], state_HDE
            )
        cache.delta[state] = state_HDE
    return out_THE


def delta_step(
    q_NHD: Tensor, k_NHD: Tensor, v_NHE: Tensor, g_NH: Tensor, b_NH: Tensor, state_NHDE: Tensor
) -> tuple[Tensor, Tensor]:
    """One token of each of N sequences: what it reads, (N, H, E), and the states after it. All in
    fp32."""
    state_NHDE = state_NHDE * g_NH.exp()[..., None, None]
    told_NHE = torch.einsum("nhd,nhde->nhe", k_NHD, state_NHDE)
    change_NHE = (v_NHE - told_NHE) * b_NH[..., None]
    state_NHDE = state_NHDE + k_NHD[..., :, None] * change_NHE[..., None, :]
    return torch.einsum("nhd,nhde->nhe", q_NHD, state_NHDE), state_NHDE


def delta_chunk(
    q_LHD: Tensor, k_LHD: Tensor, v_LHE: Tensor, g_LH: Tensor, b_LH: Tensor, state_HDE: Tensor
) -> tuple[Tensor, Tensor]:
    """L consecutive tokens of one sequence: what each reads, (L, H, E), and the state after them.
    All in fp32.

    The changes that the tokens make depend on each other, which is a triangular system of equations
    for all of them: change_i = b_i (v_i - k_i^T (decayed state + sum over j < i of decayed k_j
    change_j^T)).
    """
    q, k, v = (x.transpose(0, 1) for x in (q_LHD, k_LHD, v_LHE))  # heads first
    g_HL, b_HL1 = g_LH.t().cumsum(1), b_LH.t()[..., None]
    later_LL = torch.ones(len(q_LHD), len(q_LHD), dtype=torch.bool, device=q.device).triu(1)
    decay_HLL = (g_HL[:, :, None] - g_HL[:, None, :]).masked_fill(later_LL, -torch.inf).exp()
    from_state_HL1 = g_HL.exp()[..., None]
    system_HLL = (b_HL1 * (k @ k.mT) * decay_HLL).tril(-1)
    wanted_HLE = b_HL1 * (v - from_state_HL1 * (k @ state_HDE))
    change_HLE = torch.linalg.solve_triangular(
        system_HLL, wanted_HLE, upper=False, unitriangular=True
    )
    out_HLE = from_state_HL1 * (q @ state_HDE) + ((q @ k.mT) * decay_HLL) @ change_HLE
    to_end_HL1 = (g_HL[:, -1:] - g_HL).exp()[..., None]
    state_HDE = state_HDE * g_HL[:, -1].exp()[:, None, None] + (k * to_end_HL1).mT @ change_HLE
    return out_HLE.transpose(0, 1), state_HDE


def reference_gated_delta(
    q_LHD: Tensor, k_LHD: Tensor, v_LHE: Tensor, g_LH: Tensor, b_LH: Tensor, state_HDE: Tensor
) -> tuple[Tensor, Tensor]:
    """The oracle of `delta_chunk`: token by token."""
    outs: list[Tensor] = []
    state = state_HDE.clone()
    for q, k, v, g, b in zip(q_LHD, k_LHD, v_LHE, g_LH, b_LH, strict=True):
        state *= g.exp()[:, None, None]
        told = (k[:, :, None] * state).sum(1)
        state += k[:, :, None] * (b[:, None] * (v - told))[:, None, :]
        outs.append((q[:, :, None] * state).sum(1))
    return torch.stack(outs), state


def _unit(x_THD: Tensor) -> Tensor:
    """Vectors of length 1, in fp32."""
    wide = x_THD.float()
    return wide * (wide.pow(2).sum(-1, keepdim=True) + 1e-6).rsqrt()

"""Linear attention by the gated delta rule, and the short convolution ahead of it, over a state
that each sequence keeps between steps. In plain torch, for any device.

Shapes: T token rows, S sequences, H value heads, D size of a key, E size of a value, C channels of
the convolution, W its width, L tokens of a chunk.

The state of a head is a matrix (D, E) that maps keys to values. A token with key k, value v, query
q, decay g <= 0 and strength b changes it and reads it:

    state *= exp(g)
    state += k (b (v - k^T state))^T
    out    = q^T state

Reference: Yang, Kautz, Hatamizadeh, "Gated Delta Networks", 2024.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 64
"""Tokens of a prompt whose changes of the state are computed together."""


@dataclass(frozen=True, slots=True)
class StateCache:
    """What one layer keeps of all sequences, by the number of their state."""

    conv: Tensor
    """(states, C, W - 1): the last inputs of the convolution, in the model's dtype."""
    delta: Tensor
    """fp32 (states, H, D, E)."""

    def clear(self) -> None:
        self.conv.zero_()
        self.delta.zero_()


@dataclass(frozen=True, slots=True)
class StateRows:
    """Which state each sequence of a step has, and where its rows are."""

    states: list[int]
    """One number for each sequence. A sequence may be there as two, one behind the other, where its
    adapter becomes active."""
    fresh: list[bool]
    """Whether the sequence begins in this step, so that what its state holds is another's."""
    query_start: list[int]
    """The first row of each sequence, and the end: S + 1 numbers."""

    def decodes(self) -> list[int]:
        """The sequences of one row whose state no other sequence of the step has."""
        times = Counter(self.states)
        ends = self.query_start
        return [
            s
            for s, state in enumerate(self.states)
            if ends[s + 1] - ends[s] == 1 and times[state] == 1 and not self.fresh[s]
        ]


@dataclass(frozen=True, slots=True)
class Plan:
    """A step's sequences, sorted once for all layers."""

    row_N: Tensor
    """int64: the rows of sequences that have one row and go on, which are computed together."""
    state_N: Tensor
    """int64: their states."""
    others: Sequence[tuple[int, int, int, bool]]
    """(first row, end, state, whether it is fresh) of all others, in the order of the step."""

    @staticmethod
    def of(rows: StateRows, device: torch.device) -> Plan:
        decodes, ends = rows.decodes(), rows.query_start
        chosen = set(decodes)
        return Plan(
            torch.tensor([ends[s] for s in decodes], dtype=torch.int64, device=device),
            torch.tensor([rows.states[s] for s in decodes], dtype=torch.int64, device=device),
            [
                (ends[s], ends[s + 1], rows.states[s], rows.fresh[s])
                for s in range(len(rows.states))
                if s not in chosen
            ],
        )


def causal_conv(x_TC: Tensor, weight_CW: Tensor, cache: StateCache, plan: Plan) -> Tensor:
    """SiLU of each channel's convolution over the last W tokens of the sequence, (T, C). Updates
    the inputs that the cache keeps."""
    y_TC, keep = torch.empty_like(x_TC), weight_CW.shape[1] - 1
    if len(plan.row_N):
        x_NC1 = x_TC[plan.row_N, :, None]
        seen_NCW = torch.cat((cache.conv[plan.state_N], x_NC1), 2)
        y_TC[plan.row_N] = (seen_NCW * weight_CW).sum(2)
        cache.conv[plan.state_N] = seen_NCW[:, :, 1:]
    for first, end, state, fresh in plan.others:
        before_CW = cache.conv[state]
        if fresh:
            before_CW = torch.zeros_like(before_CW)
        seen_CL = torch.cat((before_CW, x_TC[first:end].t()), 1)
        y_CL = F.conv1d(seen_CL[None], weight_CW[:, None], groups=len(weight_CW))[0]
        y_TC[first:end] = y_CL.t()
        cache.conv[state] = seen_CL[:, seen_CL.shape[1] - keep :]
    return F.silu(y_TC)


def gated_delta(
    q_THD: Tensor,
    k_THD: Tensor,
    v_THE: Tensor,
    g_TH: Tensor,
    b_TH: Tensor,
    cache: StateCache,
    plan: Plan,
) -> Tensor:
    """What the rows read of their sequences' states, (T, H, E) in v's dtype. Updates the states.
    Queries and keys are normed to length 1, and queries divided by sqrt(D)."""
    q_THD, k_THD = _unit(q_THD) * q_THD.shape[-1] ** -0.5, _unit(k_THD)
    wide_THE, g_TH, b_TH = v_THE.float(), g_TH.float(), b_TH.float()
    out_THE = torch.empty_like(wide_THE)
    if len(plan.row_N):
        at = plan.row_N
        out_NHE, state_NHDE = delta_step(
            q_THD[at], k_THD[at], wide_THE[at], g_TH[at], b_TH[at], cache.delta[plan.state_N]
        )
        out_THE[at] = out_NHE
        cache.delta[plan.state_N] = state_NHDE
    for first, end, state, fresh in plan.others:
        state_HDE = torch.zeros_like(cache.delta[state]) if fresh else cache.delta[state]
        for start in range(first, end, CHUNK):
            rows = slice(start, min(start + CHUNK, end))
            out_THE[rows], state_HDE = delta_chunk(
                q_THD[rows], k_THD[rows], wide_THE[rows], g_TH[rows], b_TH[rows], state_HDE
            )
        cache.delta[state] = state_HDE
    return out_THE.to(v_THE.dtype)


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

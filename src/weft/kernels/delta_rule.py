"""The rule by which tokens change states and read them, in plain torch; `weft.kernels.delta` says
what is computed, and names the shapes."""

from __future__ import annotations

import torch
from torch import Tensor


def delta_step(
    q_NHD: Tensor,
    k_NHD: Tensor,
    v_NHE: Tensor,
    g_NH: Tensor,
    b_NH: Tensor,
    state_NHDE: Tensor,
    corrects: bool = True,
) -> tuple[Tensor, Tensor]:
    """One token of each of N sequences: what it reads, (N, H, E), and the states after it. All in
    fp32."""
    state_NHDE = state_NHDE * g_NH.exp()[..., None, None]
    if corrects:
        v_NHE = v_NHE - torch.einsum("nhd,nhde->nhe", k_NHD, state_NHDE)
    change_NHE = v_NHE * b_NH[..., None]
    state_NHDE = state_NHDE + k_NHD[..., :, None] * change_NHE[..., None, :]
    return torch.einsum("nhd,nhde->nhe", q_NHD, state_NHDE), state_NHDE


def delta_chunk(
    q_LHD: Tensor,
    k_LHD: Tensor,
    v_LHE: Tensor,
    g_LH: Tensor,
    b_LH: Tensor,
    state_HDE: Tensor,
    last_H: Tensor | int = -1,
    corrects: bool = True,
) -> tuple[Tensor, Tensor]:
    """L consecutive tokens of one sequence: what each reads, (L, H, E), and the state after them,
    or in each head after the token `last_H`. All in fp32.

    If tokens correct what their keys give, the changes that they make depend on each other, which
    is a triangular system of equations for all of them: change_i = b_i (v_i - k_i^T (decayed state
    + sum over j < i of decayed k_j change_j^T)).
    """
    q, k, v = (x.transpose(0, 1) for x in (q_LHD, k_LHD, v_LHE))  # heads first
    g_HL, b_HL1 = g_LH.t().cumsum(1), b_LH.t()[..., None]
    later_LL = torch.ones(len(q_LHD), len(q_LHD), dtype=torch.bool, device=q.device).triu(1)
    decay_HLL = (g_HL[:, :, None] - g_HL[:, None, :]).masked_fill(later_LL, -torch.inf).exp()
    from_state_HL1 = g_HL.exp()[..., None]
    change_HLE = b_HL1 * v
    if corrects:
        system_HLL = (b_HL1 * (k @ k.mT) * decay_HLL).tril(-1)
        wanted_HLE = b_HL1 * (v - from_state_HL1 * (k @ state_HDE))
        change_HLE = torch.linalg.solve_triangular(
            system_HLL, wanted_HLE, upper=False, unitriangular=True
        )
    out_HLE = from_state_HL1 * (q @ state_HDE) + ((q @ k.mT) * decay_HLL) @ change_HLE
    last = torch.arange(len(k)), last_H
    to_end_HL1, from_state_H1 = decay_HLL[last][..., None], from_state_HL1[last]
    state_HDE = state_HDE * from_state_H1[..., None] + (k * to_end_HL1).mT @ change_HLE
    return out_HLE.transpose(0, 1), state_HDE


def reference_gated_delta(
    q_LHD: Tensor,
    k_LHD: Tensor,
    v_LHE: Tensor,
    g_LH: Tensor,
    b_LH: Tensor,
    state_HDE: Tensor,
    corrects: bool = True,
) -> tuple[Tensor, Tensor]:
    """The oracle of `delta_chunk`: token by token."""
    outs: list[Tensor] = []
    state = state_HDE.clone()
    for q, k, v, g, b in zip(q_LHD, k_LHD, v_LHE, g_LH, b_LH, strict=True):
        state *= g.exp()[:, None, None]
        told = (k[:, :, None] * state).sum(1) if corrects else 0
        state += k[:, :, None] * (b[:, None] * (v - told))[:, None, :]
        outs.append((q[:, :, None] * state).sum(1))
    return torch.stack(outs), state

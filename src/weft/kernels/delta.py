"""Linear attention by the gated delta rule or as in Mamba 2, and the short convolution before it,
over a state that each sequence keeps between steps. Here in plain torch, for any device;
`weft.kernels.triton_delta` has fused kernels.

Shapes: T token rows, S sequences, G key heads, H value heads, D size of a key, E size of a value,
C channels of the convolution, W its width, R tokens whose inputs are kept, L tokens of a chunk, O
outputs of the projection.

The state of a head is a matrix (D, E) that maps keys to values. A token with key k, value v, query
q, decay g <= 0 and strength b changes it and reads it:

    state *= exp(g)
    state += k (b (v - k^T state))^T
    out    = q^T state

In Mamba 2, tokens do not correct what their keys give already. The strength there is the size of a
time step, from which the decay follows too, and a head's output also has a share, the skip, of the
token's own value:

    state *= exp(g)
    state += k (b v)^T
    out    = q^T state + skip v

A state never includes a token that may turn out wrong. The first row of a decode is always right,
and guesses may follow it. The state is stored as it is after the first row, and the inputs of all
rows are stored beside it. The next step first updates the state by the stored inputs of guesses
that were right, and then by its own first row:

    positions     5   6   7   8   9   10
    a step       [5   6   7   8]            6, 7 and 8 are guesses; the state holds 0 to 5
    the next              (6   7)[8   9]    6 and 7 were right, the token at 8 was not: lag 2,
                                            and the state holds 0 to 8

References: Yang, Kautz, Hatamizadeh, "Gated Delta Networks", 2024; and for Mamba 2 Dao, Gu,
"Transformers are SSMs", 2024, where queries, keys and values are called C, B and x.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from weft.core.units import SHORT
from weft.kernels.delta_rule import delta_chunk, delta_step

CHUNK = 64
"""How many tokens of a prompt have their changes of the state computed together."""

Ints = NDArray[np.int64]
Table = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class StateCache:
    """One layer's states of all sequences, by number. At a sequence's first token, its state counts
    as zeros, whatever is stored."""

    inputs: Tensor
    """(states, R, C + 2 H), in the model's dtype: the last R tokens' inputs to the convolution and,
    behind these, to each head's strength and decay. The token at position p has the place p % R."""
    delta: Tensor
    """fp32 (states, H, D, E), or (states, 0) for layers that are a convolution without heads."""

    @property
    def num_kept(self) -> int:
        """R: as many tokens as the convolution reads before the next one, and the most guesses."""
        return self.inputs.shape[1]


class Columns(NamedTuple):
    """For each kind of columns in the projection's output: (first column, distance from one key
    head's columns to the next one's). Value heads of the same key head are neighbours."""

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
    """fp32. This and `dt_bias_H` are the parameters of the heads' decays."""
    dt_bias_H: Tensor
    """fp32."""
    norm_E: Tensor | None
    """The weights of each head's norm; None in Mamba 2, whose norm over heads comes later."""
    eps: float
    num_keys: int
    """G"""
    num_values: int
    """H, a multiple of G."""
    key_dim: int
    value_dim: int
    columns: Columns
    """In Mamba 2, those of the strengths are those of the decays."""
    skip_H: Tensor | None = None
    """The heads' skips in Mamba 2; None: this is the gated delta rule."""
    bias_C: Tensor | None = None
    """The bias of each channel of the convolution; None: it has none."""
    doubled: bool = False
    """Whether the strengths of the gated delta rule are doubled, so that they are between 0 and 2.
    A token can then turn what its key gives into the opposite."""


class StateWork(NamedTuple):
    """The tables by which kernels find a step's rows and states. Padding entries do nothing."""

    decodes: Tensor
    """int32 (decodes, 4), an entry for each row of a decode: the row, its state, how many rows the
    decode has with its guesses, and how many tokens the state lacks before them; a guess has 0 and
    0. In excess, the state is -1, and so is the row unless its result is to be zero."""
    chunks: Tensor
    """int32 (chunks, 6): first row, number of rows (0 in excess), the states that its sequence
    begins with and ends in, how many rows of it in this step come before, and how many rows there
    are from the first one on, 0 if there are SHORT in all."""
    runs: Tensor
    """int32 (sequences, 6) of those with several rows: first row, their number (0 in excess), the
    states that it begins with and ends in, the number of its first chunk, and how many rows of what
    it goes on with come before."""


@dataclass(frozen=True)
class StateRows:
    """Which state each sequence of a step has, and where its rows are. Sequences have different
    states, except that each guess is one more sequence, behind the decode with the same state.

    A sequence may also have two parts: more than SHORT rows, then up to SHORT rows. The first part
    leaves its state in a snapshot, with which the second one begins:

        sources    7   4   9   2   2     the prompt of state 4 is cut where snapshot 9 is taken,
        states     7   9   4   2   2     and the decode of state 2 has a guess
    """

    states: list[int]
    """The number of each sequence's state after the step."""
    query_start: list[int]
    """The first row of each sequence, and the end: S + 1 numbers."""
    work: StateWork | None = None
    """The step's work, on the device; None: each layer makes it from the lists. With it, nobody
    reads the other lists, and in a step that is captured they are empty."""
    sources: list[int] | None = None
    """The number of each sequence's state before the step; None: the same as after it."""
    lags: list[int] | None = None
    """How many tokens, whose inputs are stored, each sequence's state lacks; None: none."""

    @cached_property
    def tokens(self) -> StateTokens:
        """The step's work in the form that plain torch computes with."""
        return StateTokens.of(*(part.cpu().numpy() for part in self.work_on(torch.device("cpu"))))

    def work_on(self, device: torch.device) -> StateWork:
        if self.work is not None:
            return self.work
        return StateWork(
            *(
                torch.from_numpy(part).to(device)
                for part in state_work(self.states, self.query_start, self.sources, self.lags)
            )
        )


def state_work(
    states: Sequence[int] | Ints,
    query_start: list[int],
    sources: Sequence[int] | Ints | None = None,
    lags: Sequence[int] | Ints | None = None,
) -> tuple[Table, Table, Table]:
    """The decodes, chunks and runs of a step, as `StateWork` has them."""
    starts, states_S = np.array(query_start, np.int32), np.array(states, np.int32)
    sources_S = states_S if sources is None else np.array(sources, np.int32)
    several = starts[1:] - starts[:-1] > 1
    follows = sources_S[1:] == states_S[:-1]
    is_first = np.ones_like(several)
    is_first[1:] = several[:-1] | ~follows  # what follows a single row is a guess
    if sources is not None:
        several[1:] |= follows & several[:-1]
    runs: list[tuple[int, ...]] = []
    chunks: list[tuple[int, ...]] = []
    for i in several.nonzero()[0].tolist():
        first, source, state = query_start[i], int(sources_S[i]), int(states_S[i])
        count = query_start[i + 1] - first
        goes_on = i > 0 and source == states_S[i - 1]
        before = first - query_start[i - 1] if goes_on else 0
        runs.append((first, count, source, state, len(chunks), before))
        for done in range(0, count, CHUNK):
            num, left = min(CHUNK, count - done), count - done if count > SHORT else 0
            chunks.append((first + done, num, source, state, before + done, left))
    ones = (~several).nonzero()[0]
    firsts = is_first[ones].nonzero()[0]
    decodes = np.zeros((len(ones), 4), np.int32)
    decodes[:, 0], decodes[:, 1] = starts[ones], states_S[ones]
    decodes[firsts, 2] = np.append(firsts[1:], len(ones)) - firsts
    if lags is not None:
        decodes[:, 3] = np.asarray(lags)[ones]
    chunk_table, run_table = (np.array(part, np.int32).reshape(-1, 6) for part in (chunks, runs))
    return decodes, chunk_table, run_table


class StateTokens(NamedTuple):
    """The N tokens by which a step changes states: those of its T rows, and behind them those that
    states lack, one decode's after the other's. All layers share it, and it is on the host."""

    row_D: Tensor
    """The first row of each decode."""
    state_D: Tensor
    count_D: Tensor
    """How many rows there are from that one on, with guesses."""
    lag_D: Tensor
    most: tuple[int, int]
    """The largest lag and the largest count."""
    decodes: tuple[Tensor, Tensor]
    """Row and state of all rows of decodes."""
    runs: list[list[int]]
    """As in `StateWork`."""
    source_N: Tensor
    """The state that the token's sequence begins with."""
    before_N: Tensor
    """How many rows of the same sequence come right before the token."""

    @classmethod
    def of(cls, decodes: Table, chunks: Table, runs: Table) -> StateTokens:
        """Those of a step's work."""
        rows, states = decodes[:, 0].astype(np.int64), decodes[:, 1].astype(np.int64)
        row_D, state_D, count_D, lag_D = decodes[decodes[:, 2] > 0].T.astype(np.int64)
        num_rows = len(rows) + int(runs[:, 1].sum())
        source_T, before_T = np.zeros((2, num_rows), np.int64)
        source_T[rows], before_T[rows] = states, rows - row_D.repeat(count_D)
        for first, count, source, _, _, before in runs.tolist():
            source_T[first : first + count] = source
            before_T[first : first + count] = range(before, before + count)
        source_N = np.concatenate([source_T, state_D.repeat(lag_D)])
        before_N = np.concatenate([before_T, np.zeros(lag_D.sum(), np.int64)])
        tensor = torch.from_numpy
        return cls(
            tensor(row_D),
            tensor(state_D),
            tensor(count_D),
            tensor(lag_D),
            (int(lag_D.max(initial=0)), int(count_D.max(initial=0))),
            (tensor(rows), tensor(states)),
            runs.tolist(),
            tensor(source_N),
            tensor(before_N),
        )

    @property
    def alone(self) -> bool:
        """Whether no row has another one of its sequence before it."""
        return self.most[1] <= 1 and not self.runs

    def with_lacking(
        self, x_TO: Tensor, positions_T: Tensor, cache: StateCache
    ) -> tuple[Tensor, Tensor]:
        """The inputs of all tokens, (N, C + 2 H), and their positions."""
        if not self.most[0]:
            return x_TO, positions_T
        back_K = self.lag_D.cumsum(0).repeat_interleave(self.lag_D)
        back_K -= torch.arange(len(back_K))
        at_K = positions_T[self.row_D.repeat_interleave(self.lag_D)]
        at_K = at_K - back_K.to(at_K.device)
        x_KO = cache.inputs[self.source_N[len(x_TO) :], at_K % cache.num_kept]
        return torch.cat([x_TO, x_KO]), torch.cat([positions_T, at_K])

    def keep(self, x_TO: Tensor, positions_T: Tensor, cache: StateCache, width: int) -> None:
        """Keep the inputs of decodes, and the last `width` of each other sequence."""
        row_K, state_K = self.decodes
        for first, count, _, state, _, before in self.runs:
            begin, end = max(first - before, first + count - width), first + count
            row_K = torch.cat([row_K, torch.arange(begin, end)])
            state_K = torch.cat([state_K, torch.full((end - begin,), state)])
        cache.inputs[state_K, positions_T[row_K] % cache.num_kept] = x_TO[row_K]


def gated_delta(
    y_TO: Tensor, layer: DeltaLayer, cache: StateCache, rows: StateRows, positions_T: Tensor
) -> Tensor:
    """All of a layer between its projections: the convolution, the state's rule and the gated norm,
    (T, H E). Updates the sequences' states.

    Queries and keys are normed to length 1, and queries divided by sqrt(D). What the state gives is
    normed by head and multiplied by silu(z). In Mamba 2, none of these are normed, nor divided.
    """
    G, H, D, E = layer.num_keys, layer.num_values, layer.key_dim, layer.value_dim
    q, k, v, z, b, a = layer.columns
    share = H // G

    def of(at: tuple[int, int], width: int) -> Tensor:
        """The columns of a kind, (T, G, width)."""
        first = y_TO.storage_offset() + at[0]
        return y_TO.as_strided((len(y_TO), G, width), (y_TO.stride(0), at[1], 1), first)

    own = [part.flatten(1) for part in (of(q, D), of(k, D), of(v, share * E), of(b, share))]
    x_TO = torch.cat([*own, of(a, share).flatten(1)], 1)
    x_NO, positions_N = rows.tokens.with_lacking(x_TO, positions_T, cache)
    conv, tokens = (layer.conv_WC, layer.bias_C), rows.tokens
    x_NC = F.silu(causal_conv(x_NO[:, : -2 * H], *conv, cache, tokens, positions_N))
    rows.tokens.keep(x_TO, positions_T, cache, len(layer.conv_WC))
    q_NGD, k_NGD, v_NO = x_NC.split_with_sizes((G * D, G * D, H * E), 1)
    q_NGD, k_NGD = (x.reshape(-1, G, D).float() for x in (q_NGD, k_NGD))
    v_NHE = v_NO.reshape(-1, H, E).float()
    b_NH, a_NH = x_NO[:, -2 * H :].float().split_with_sizes((H, H), 1)
    time_NH = F.softplus(a_NH + layer.dt_bias_H)
    if layer.skip_H is None:
        q_NGD, k_NGD = _unit(q_NGD) * D**-0.5, _unit(k_NGD)
        b_NH = b_NH.sigmoid() * (2 if layer.doubled else 1)
    else:
        b_NH = time_NH
    q_NHD, k_NHD = (x.repeat_interleave(share, 1) for x in (q_NGD, k_NGD))
    terms = _Terms(q_NHD, k_NHD, v_NHE, -layer.log_a_H.exp() * time_NH, b_NH)
    corrects = layer.skip_H is None
    out_THE = _through_states(terms, corrects, cache, rows.tokens, positions_T)[: len(y_TO)]
    if layer.skip_H is not None:
        out_THE += layer.skip_H.float()[:, None] * v_NHE[: len(y_TO)]
    if layer.norm_E is not None:
        out_THE = F.rms_norm(out_THE, (E,), layer.norm_E.float(), layer.eps)
    gate_TO = of(z, share * E).flatten(1).float()
    return (out_THE.flatten(1) * F.silu(gate_TO)).to(y_TO.dtype)


def causal_conv(
    x_NC: Tensor,
    weight_WC: Tensor,
    bias_C: Tensor | None,
    cache: StateCache,
    tokens: StateTokens,
    positions_N: Tensor,
) -> Tensor:
    """Each channel's convolution over the last W tokens of the sequence, (N, C). `x_NC`: the inputs
    of the step's first N tokens. The inputs of earlier tokens are in the cache. `weight_WC`: the
    newest token's weights are last. `positions_N`: each token's position in its sequence."""
    N, C = x_NC.shape
    row_N, source_N, before_N = torch.arange(N), tokens.source_N[:N], tokens.before_N[:N]
    y_NC = x_NC * weight_WC[-1]
    if bias_C is not None:
        y_NC += bias_C
    for back in range(1, len(weight_WC)):
        kept_NC = cache.inputs[source_N, (positions_N - back) % cache.num_kept, :C]
        if not tokens.alone:
            here_NC = x_NC[(row_N - back).clamp(min=0)]
            is_here_N = (before_N >= back).to(x_NC.device)
            kept_NC = torch.where(is_here_N[:, None], here_NC, kept_NC)
        y_NC += kept_NC.masked_fill((positions_N < back)[:, None], 0) * weight_WC[-1 - back]
    return y_NC


class _Terms(NamedTuple):
    """Queries, keys, values, decays and strengths of tokens, in fp32."""

    q_NHD: Tensor
    k_NHD: Tensor
    v_NHE: Tensor
    g_NH: Tensor
    b_NH: Tensor

    def at(self, tokens: Tensor | slice) -> _Terms:
        return _Terms._make(part[tokens] for part in self)


def _through_states(
    terms: _Terms, corrects: bool, cache: StateCache, tokens: StateTokens, positions_T: Tensor
) -> Tensor:
    """What tokens read from their sequences' states, (N, H, E). Updates the states. All in fp32.
    `corrects`: whether it is the delta rule, by which a token corrects what its key gives."""
    out_NHE = torch.empty_like(terms.v_NHE)
    row_D, state_D = tokens.row_D, tokens.state_D
    if tokens.most > (0, 1):
        alone_D = (tokens.lag_D == 0) & (tokens.count_D == 1)
        _with_guesses(terms, corrects, cache, tokens, positions_T, ~alone_D, out_NHE)
        row_D, state_D = row_D[alone_D], state_D[alone_D]
    if len(row_D):
        begins_D = (positions_T[row_D] == 0)[:, None, None, None]
        state_DHDE = cache.delta[state_D].masked_fill(begins_D, 0)
        of_rows = terms.at(row_D)
        out_NHE[row_D], cache.delta[state_D] = delta_step(*of_rows, state_DHDE, corrects)
    for first, count, source, state, *_ in tokens.runs:
        state_HDE = cache.delta[source]
        if positions_T[first] == 0:
            state_HDE = torch.zeros_like(state_HDE)
        for start in range(first, first + count, CHUNK):
            part = slice(start, min(start + CHUNK, first + count))
            of_part = terms.at(part)
            out_NHE[part], state_HDE = delta_chunk(*of_part, state_HDE, corrects=corrects)
        cache.delta[state] = state_HDE
    return out_NHE


def _with_guesses(
    terms: _Terms,
    corrects: bool,
    cache: StateCache,
    tokens: StateTokens,
    positions_T: Tensor,
    wanted_D: Tensor,
    out_NHE: Tensor,
) -> None:
    """The same for the decodes that are wanted. Their tokens are computed as one chunk, in
    which each head of each decode is a head of its own. Shorter ones are filled up at the end."""
    kept_D = len(positions_T) + tokens.lag_D.cumsum(0) - tokens.lag_D
    of_decodes = tokens.row_D, tokens.state_D, tokens.count_D, tokens.lag_D, kept_D
    row_D, state_D, count_D, lag_D, kept_D = (part[wanted_D] for part in of_decodes)
    nth_L1 = torch.arange(int((lag_D + count_D).max()))[:, None]
    is_there_LD = nth_L1 < lag_D + count_D
    at_LD = torch.where(nth_L1 < lag_D, kept_D, row_D - lag_D) + nth_L1
    at_LD *= is_there_LD
    q, k, v, g, b = (part.flatten(1, 2) for part in terms.at(at_LD))
    begins_D = (positions_T[row_D] == 0)[:, None, None, None]
    state_HDE = cache.delta[state_D].masked_fill(begins_D, 0).flatten(0, 1)
    heads = len(row_D), terms.g_NH.shape[1]
    last_H = lag_D.repeat_interleave(heads[1])  # no state takes a guess
    out_LHE, state_HDE = delta_chunk(q, k, v, g, b, state_HDE, last_H, corrects)
    out_NHE[at_LD[is_there_LD]] = out_LHE.reshape(-1, *heads, out_LHE.shape[2])[is_there_LD]
    cache.delta[state_D] = state_HDE.view(*heads, *state_HDE.shape[1:])


def _unit(x_THD: Tensor) -> Tensor:
    """Vectors of length 1, in fp32."""
    wide = x_THD.float()
    return wide * (wide.pow(2).sum(-1, keepdim=True) + 1e-6).rsqrt()

"""A few tokens of a prompt by the gated delta rule: what a hit in the prefix cache leaves, or the
end of a prompt behind its snapshot. One kernel does what three do for several chunks; the notation
is that of `weft.kernels.triton_delta_chunks`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from weft.kernels.triton_base import dot, load_pending, plus_pending, with_pending
from weft.kernels.triton_delta_solve import inverse_of, owed_by, strengths


@triton.jit
def silu(x):
    return x / (1 + tl.exp(-x))


@triton.jit
def gated_norm(
    x,
    y_ptr,
    add_ptr,
    norm_ptr,
    row,
    has,
    ok,
    h,
    y_stride,
    eps,
    COLUMNS: tl.constexpr,
    G: tl.constexpr,
    H: tl.constexpr,
    E: tl.constexpr,
    MAMBA: tl.constexpr,
    PENDING: tl.constexpr,
):
    """norm(x) * silu(z) of a value head, for what the rows read of the state; in Mamba 2, x is not
    normed here."""
    share: tl.constexpr = H // G
    e = tl.arange(0, x.shape[1])
    if not MAMBA:
        norm = tl.load(norm_ptr + e, mask=e < E, other=0.0).to(tl.float32)
        x *= (1 / tl.sqrt(tl.sum(x * x, 1) / E + eps))[:, None] * norm[None, :]
    z_c = COLUMNS[6] + h // share * COLUMNS[7] + h % share * E
    z_at = (row * y_stride + z_c)[:, None] + e[None, :]
    z = tl.load(y_ptr + z_at, mask=ok, other=0.0)
    return x * silu(with_pending(z, add_ptr + z_at, has, ok, PENDING).to(tl.float32))


@triton.jit
def keep_inputs(
    y_ptr,
    add_ptr,
    kept_ptr,
    position_ptr,
    state,
    row,
    has,
    kept,
    h,
    y_stride,
    C,
    COLUMNS: tl.constexpr,
    G: tl.constexpr,
    H: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    R: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
    PENDING: tl.constexpr,
):
    """Keep the inputs of a value head, and its key head's if it is that one's first, of the rows
    that are `kept`: those of the convolution, and of its strengths and decays."""
    share: tl.constexpr = H // G
    g = h // share
    e = tl.arange(0, BLOCK_E)
    position = tl.load(position_ptr + row, mask=kept, other=0)
    kept_at = kept_ptr + (state * R + position % R)[:, None] * (C + 2 * H)
    from_at = row[:, None] * y_stride
    in_e = kept[:, None] & (e < E)[None, :]
    v_at = from_at + COLUMNS[4] + g * COLUMNS[5] + h % share * E + e[None, :]
    b_at = from_at + COLUMNS[8] + g * COLUMNS[9] + h % share
    a_at = from_at + COLUMNS[10] + g * COLUMNS[11] + h % share
    d = tl.arange(0, BLOCK_D)
    in_d = kept[:, None] & (d < tl.where(h % share == 0, D, 0))[None, :]
    q_at = from_at + COLUMNS[0] + g * COLUMNS[1] + d[None, :]
    k_at = from_at + COLUMNS[2] + g * COLUMNS[3] + d[None, :]
    # All is loaded before anything is stored, as a load behind a store would wait for its turn.
    v = tl.load(y_ptr + v_at, mask=in_e, other=0.0)
    b = tl.load(y_ptr + b_at, mask=kept[:, None], other=0.0)
    a = tl.load(y_ptr + a_at, mask=kept[:, None], other=0.0)
    q = tl.load(y_ptr + q_at, mask=in_d, other=0.0)
    k = tl.load(y_ptr + k_at, mask=in_d, other=0.0)
    v_add = load_pending(add_ptr + v_at, in_e, PENDING)
    b_add = load_pending(add_ptr + b_at, kept[:, None], PENDING)
    a_add = load_pending(add_ptr + a_at, kept[:, None], PENDING)
    q_add = load_pending(add_ptr + q_at, in_d, PENDING)
    k_add = load_pending(add_ptr + k_at, in_d, PENDING)
    v = plus_pending(v, v_add, has, PENDING)
    tl.store(kept_at + 2 * G * D + h * E + e[None, :], v, mask=in_e)
    tl.store(kept_at + C + h, plus_pending(b, b_add, has, PENDING), mask=kept[:, None])
    tl.store(kept_at + C + H + h, plus_pending(a, a_add, has, PENDING), mask=kept[:, None])
    q = plus_pending(q, q_add, has, PENDING)
    k = plus_pending(k, k_add, has, PENDING)
    tl.store(kept_at + g * D + d[None, :], q, mask=in_d)
    tl.store(kept_at + (G + g) * D + d[None, :], k, mask=in_d)


@triton.jit(do_not_specialize=["num_runs"])
def short_runs(
    y_ptr,
    add_ptr,
    add_slot_ptr,
    qkv_ptr,
    out_ptr,
    kept_ptr,
    delta_ptr,
    norm_or_skip_ptr,
    log_a_ptr,
    dt_bias_ptr,
    runs_ptr,
    position_ptr,
    num_runs,
    y_stride,
    C,
    eps,
    COLUMNS: tl.constexpr,
    G: tl.constexpr,
    H: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    W: tl.constexpr,
    R: tl.constexpr,
    L: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
    MAMBA: tl.constexpr,
    DOUBLED: tl.constexpr,
    PENDING: tl.constexpr,
    EXACT: tl.constexpr,
    PDL: tl.constexpr,
):
    """out = norm(read) * silu(z), the state behind the last token and the convolution's last
    inputs, of sequences with at most L rows. Programs (N, H), each for every N-th run."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    h = tl.program_id(1)
    share: tl.constexpr = H // G
    t = tl.arange(0, L)
    d = tl.arange(0, BLOCK_D)
    e = tl.arange(0, BLOCK_E)
    of_head = (h * D + d[:, None]) * E + e[None, :]
    within = (d < D)[:, None] & (e < E)[None, :]
    zero = tl.zeros((L, BLOCK_E), tl.float32)
    nth = tl.program_id(0)
    count = tl.load(runs_ptr + 6 * nth + 1)
    while count > 0:
        if count <= L:
            run = runs_ptr + 6 * nth
            first = tl.load(run).to(tl.int64)
            source = tl.load(run + 2).to(tl.int64)
            state = tl.load(run + 3).to(tl.int64)
            position = tl.load(position_ptr + first)
            row = first + t
            ok = t < count
            ok_d = ok[:, None] & (d < D)[None, :]
            ok_e = ok[:, None] & (e < E)[None, :]
            held = (d < tl.where(position > 0, D, 0))[:, None] & (e < E)[None, :]
            # With PDL, no kernel since the step before has written the state.
            S = tl.load(delta_ptr + source * H * D * E + of_head, mask=held, other=0.0)
            has = ok
            if PENDING:
                has = tl.load(add_slot_ptr + row, mask=ok, other=-1) >= 0
            if PDL:
                tl.extra.cuda.gdc_wait()
            g, b = strengths(
                y_ptr, add_ptr, log_a_ptr, dt_bias_ptr, row, has, ok, h, y_stride,
                COLUMNS, G, H, MAMBA, DOUBLED, PENDING,
            )  # fmt: skip
            q_at = qkv_ptr + row[:, None] * C + h // share * D + d[None, :]
            q = tl.load(q_at, mask=ok_d, other=0.0)
            k = tl.load(q_at + G * D, mask=ok_d, other=0.0)
            v_at = qkv_ptr + row[:, None] * C + 2 * G * D + h * E + e[None, :]
            v = tl.load(v_at, mask=ok_e, other=0.0).to(tl.float32)
            narrow = S.to(k.dtype)
            from_state = tl.exp(g)[:, None]
            if MAMBA:
                change = b[:, None] * v
            else:
                wanted = b[:, None] * (v - from_state * dot(k, narrow, zero, EXACT))
                inverse = inverse_of(owed_by(k, b, g, t, EXACT), t, EXACT).to(k.dtype)
                change = dot(inverse, wanted.to(k.dtype), zero, EXACT)
            seen = (t[:, None] >= t[None, :]) & ok[:, None]
            scores = dot(q, tl.trans(k), tl.zeros((L, L), tl.float32), EXACT)
            decays = tl.exp(tl.where(seen, g[:, None] - g[None, :], 0.0))
            scores = tl.where(seen, scores * decays, 0.0)
            x = dot(q, narrow, zero, EXACT) * from_state
            x = dot(scores.to(k.dtype), change.to(k.dtype), x, EXACT)
            if MAMBA:
                x += tl.load(norm_or_skip_ptr + h).to(tl.float32) * v
            last = tl.min(g)
            change *= tl.where(ok, tl.exp(last - g), 0.0)[:, None]
            S = dot(tl.trans(k), change.to(k.dtype), S * tl.exp(last), EXACT)
            tl.store(delta_ptr + state * H * D * E + of_head, S, mask=within)
            x = gated_norm(
                x, y_ptr, add_ptr, norm_or_skip_ptr, row, has[:, None], ok_e, h, y_stride, eps,
                COLUMNS, G, H, E, MAMBA, PENDING,
            )  # fmt: skip
            tl.store(out_ptr + (row * H + h)[:, None] * E + e[None, :], x, mask=ok_e)
            # Of the last W rows, some may be of the part that the sequence goes on with.
            back = count - L + t
            kept = (back >= count - W) & (back >= -tl.load(run + 5))
            row = first + back
            if PENDING:
                has = tl.load(add_slot_ptr + row, mask=kept, other=-1) >= 0
            keep_inputs(
                y_ptr, add_ptr, kept_ptr, position_ptr, state, row, has[:, None], kept, h,
                y_stride, C, COLUMNS, G, H, D, E, R, BLOCK_D, BLOCK_E, PENDING,
            )  # fmt: skip
        nth += tl.num_programs(0)
        count = tl.load(runs_ptr + 6 * nth + 1, mask=nth < num_runs, other=0)
    if PDL:  # whoever waits for this kernel waits for those ahead, if it had nothing to do, too
        tl.extra.cuda.gdc_wait()

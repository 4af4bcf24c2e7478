"""How the changes of a chunk's tokens depend on each other: the kernel that solves the triangular
system at the top of `weft.kernels.triton_delta_chunks`, which names the shapes."""

from __future__ import annotations

import triton
import triton.language as tl

from weft.kernels.triton_base import dot, with_pending


@triton.jit
def time_step(a, dt_bias):
    """The time step of a head, softplus(a + dt_bias)."""
    x = a + dt_bias
    return tl.where(x > 20, x, tl.log(1 + tl.exp(x)))


@triton.jit
def decay(a, log_a, dt_bias):
    """The logarithm of a head's decay, g <= 0."""
    return -tl.exp(log_a) * time_step(a, dt_bias)


@triton.jit
def strength(b, dt_bias, MAMBA: tl.constexpr, DOUBLED: tl.constexpr):
    """The strength of a head's changes, which is its time step in Mamba 2."""
    if MAMBA:
        found = time_step(b, dt_bias)
    else:
        found = 1 / (1 + tl.exp(-b))
        if DOUBLED:
            found *= 2
    return found


@triton.jit
def inverse_of(M, t, EXACT: tl.constexpr):
    """(1 + M)^-1 of a matrix M (L, L) that is zero on and above its diagonal, with t = 0 ... L - 1.

    Blocks on the diagonal are inverted, first those of two tokens, and pairs of them become blocks
    of twice the size: of a block whose halves have the inverses P and R, and M' below them,

        P        0
        -R M' P  R

    So nothing is larger on the way than in the inverse, as powers of M may be. The inverse has no
    entries above 1: each says how much of one token's change another one takes back, and keys have
    length 1.
    """
    L: tl.constexpr = M.shape[0]
    i, j = t[:, None], t[None, :]
    inverse = tl.where(i == j, 1.0, tl.where(i // 2 == j // 2, -M, 0.0))
    for nth in tl.static_range(1, 6):
        if (2 << nth) <= L:
            inverse = _joined(inverse, M, i, j, 1 << nth, EXACT)
    return inverse


@triton.jit
def _joined(inverse, M, i, j, SIZE: tl.constexpr, EXACT: tl.constexpr):
    """The inverse of blocks of 2 * SIZE, from that of blocks of SIZE."""
    in_pair = (i // (2 * SIZE) == j // (2 * SIZE)) & (i // SIZE > j // SIZE)
    below = tl.where(in_pair, M, 0.0)
    return inverse - _dot(_dot(inverse, below, EXACT), inverse, EXACT)


@triton.jit
def _dot(a, b, EXACT: tl.constexpr):
    """The product of two fp32 matrices without entries above 1 or so, in float16 unless EXACT."""
    if EXACT:
        return tl.dot(a, b, input_precision="ieee")
    return tl.dot(a.to(tl.float16), b.to(tl.float16))


@triton.jit
def strengths(
    y_ptr,
    add_ptr,
    log_a_ptr,
    dt_bias_ptr,
    row,
    has,
    ok,
    h,
    y_stride,
    COLUMNS: tl.constexpr,
    G: tl.constexpr,
    H: tl.constexpr,
    MAMBA: tl.constexpr,
    DOUBLED: tl.constexpr,
    PENDING: tl.constexpr,
):
    """The decays g of some rows, summed up from the first of them on, and their strengths b, which
    are zero for rows that are not ok."""
    share: tl.constexpr = H // G
    a_at = row * y_stride + COLUMNS[10] + h // share * COLUMNS[11] + h % share
    b_at = row * y_stride + COLUMNS[8] + h // share * COLUMNS[9] + h % share
    a = with_pending(tl.load(y_ptr + a_at, mask=ok, other=0.0), add_ptr + a_at, has, ok, PENDING)
    b = with_pending(tl.load(y_ptr + b_at, mask=ok, other=0.0), add_ptr + b_at, has, ok, PENDING)
    g = decay(a.to(tl.float32), tl.load(log_a_ptr + h), tl.load(dt_bias_ptr + h))
    b = strength(b.to(tl.float32), tl.load(dt_bias_ptr + h), MAMBA, DOUBLED)
    return tl.cumsum(tl.where(ok, g, 0.0), 0), tl.where(ok, b, 0.0)


@triton.jit
def owed_by(k, b, g, t, EXACT: tl.constexpr):
    """The matrix M of rows with these keys, strengths and decays."""
    L: tl.constexpr = k.shape[0]
    seen = t[:, None] > t[None, :]
    products = dot(k, tl.trans(k), tl.zeros((L, L), tl.float32), EXACT)
    decays = tl.exp(tl.where(seen, g[:, None] - g[None, :], 0.0))
    return tl.where(seen, b[:, None] * decays * products, 0.0)


@triton.jit
def solve(
    y_ptr,
    add_ptr,
    add_slot_ptr,
    qkv_ptr,
    w_ptr,
    u_ptr,
    g_ptr,
    log_a_ptr,
    dt_bias_ptr,
    chunks_ptr,
    y_stride,
    C,
    COLUMNS: tl.constexpr,
    G: tl.constexpr,
    H: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    L: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
    MAMBA: tl.constexpr,
    DOUBLED: tl.constexpr,
    PENDING: tl.constexpr,
    EXACT: tl.constexpr,
):
    """w (T, H, D), which Mamba 2 has no use for, u (T, H, E) and the decays g, fp32 (T, H), summed
    up from the chunk's first token on, where the sequence is not a short one; see
    `triton_delta_chunks`. Programs (H, chunks)."""
    chunk = chunks_ptr + 6 * tl.program_id(1)
    h = tl.program_id(0)
    count = tl.load(chunk + 1)
    if tl.load(chunk + 5) == 0:
        return
    first = tl.load(chunk).to(tl.int64)
    t = tl.arange(0, L)
    d = tl.arange(0, BLOCK_D)
    e = tl.arange(0, BLOCK_E)
    row = first + t
    ok = t < count
    ok_d = ok[:, None] & (d < D)[None, :]
    ok_e = ok[:, None] & (e < E)[None, :]
    k_at = qkv_ptr + row[:, None] * C + (G + h // (H // G)) * D + d[None, :]
    k = tl.load(k_at, mask=ok_d, other=0.0)
    has = ok
    if PENDING:
        has = tl.load(add_slot_ptr + row, mask=ok, other=-1) >= 0
    g, b = strengths(
        y_ptr, add_ptr, log_a_ptr, dt_bias_ptr, row, has, ok, h, y_stride,
        COLUMNS, G, H, MAMBA, DOUBLED, PENDING,
    )  # fmt: skip
    v_at = qkv_ptr + row[:, None] * C + 2 * G * D + h * E + e[None, :]
    v = tl.load(v_at, mask=ok_e, other=0.0)
    u = (v.to(tl.float32) * b[:, None]).to(v.dtype)
    if not MAMBA:
        inverse = inverse_of(owed_by(k, b, g, t, EXACT), t, EXACT).to(k.dtype)
        k = (k.to(tl.float32) * (b * tl.exp(g))[:, None]).to(k.dtype)
        w = dot(inverse, k, tl.zeros((L, BLOCK_D), tl.float32), EXACT)
        tl.store(w_ptr + (row * H + h)[:, None] * D + d[None, :], w, mask=ok_d)
        u = dot(inverse, u, tl.zeros((L, BLOCK_E), tl.float32), EXACT)
    tl.store(u_ptr + (row * H + h)[:, None] * E + e[None, :], u, mask=ok_e)
    tl.store(g_ptr + row * H + h, g, mask=ok)

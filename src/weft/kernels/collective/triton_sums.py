"""Sums over ranks that write to each other's memory, fused with the norm that follows.

Shapes: T token rows, I columns, S ranks.

Every rank has an *inbox*, memory that all ranks can write to. A program sends a row of its rank's
partial sum to the inboxes of the others, takes theirs out of its own, and adds all of them in the
order of the ranks:

    rank 0   y[t] ---------> inbox of 1       takes y[t] of 1 ---> y0 + y1 ---> add, norm
    rank 1   y[t] ---------> inbox of 0       takes y[t] of 0 ---> y0 + y1 ---> add, norm

**There are no flags.** An empty place has all bits set, which is a NaN that is never sent: such a
number is replaced by another NaN. So a number has arrived as soon as its place is not empty, and
numbers may arrive in any order. A program that has taken a row leaves its places empty again.

**No number is overwritten or taken twice.** Each row has two sets of places that take turns. Its
`uses` are counted, alike on all ranks, as they launch the same sums. A rank writes to a place again
two uses later. By then its own use in between has ended, for which it needed what the reader sent
in that use; and the reader sent that when its kernel before, which had emptied the place, was over.

**No cycle of waits is possible.** Kernels here only wait for the same sum on other ranks.

- All programs of a launch run at once, as there are no more than the device has processors.
  Kernels ahead on the stream end by themselves, and are over before a program sends anything.
  Kernels behind may start early, and wait, but not before all programs here have their places.
- Programs go through their rows in rising order. Take the lowest row that some rank has not
  finished: on every rank, the program of that row has reached it or is beyond it. Each sends its
  partial sum before it waits, so what they wait for arrives.

Kernels of other streams end by themselves, and at most delay a start. Sums of one rank must not be
under way side by side: all are launched on one stream, in the same order on all ranks.

**Two shots** send less where there are many ranks: each row has an owner, t % S, that takes the
partial sums of the others, and sends them the whole. Both ways give the same bits.
"""

from __future__ import annotations

import triton
import triton.language as tl

from weft.kernels.triton_base import has_pending, with_pending


@triton.jit
def inbox_of(inbox_ptrs, rank, BITS: tl.constexpr):
    """The inbox of a rank. It never moves, so that its address can be read at any time."""
    return tl.multiple_of(tl.load(inbox_ptrs + rank).to(tl.pointer_type(BITS)), 16)


@triton.jit
def inboxes_of(inbox_ptrs, BITS: tl.constexpr, SIZE: tl.constexpr):
    """The inboxes of all ranks."""
    inboxes = (inbox_of(inbox_ptrs, 0, BITS),)
    for rank in tl.static_range(1, SIZE):
        inboxes = inboxes + (inbox_of(inbox_ptrs, rank, BITS),)  # noqa: RUF005 - for the compiler
    return inboxes


@triton.jit
def take(inbox, places, mask):
    """Wait until a row is in the inbox of this rank, and leave its places empty."""
    bits = tl.load(inbox + places, mask=mask, other=0, volatile=True)
    while tl.max((bits == -1).to(tl.int32)) != 0:
        bits = tl.load(inbox + places, mask=mask, other=0, volatile=True)
    tl.store(inbox + places, tl.full(bits.shape, -1, bits.dtype), mask=mask)
    return bits


@triton.jit
def bits_of(x, BITS: tl.constexpr):
    """The bits of x, none of which look like an empty place."""
    bits = x.to(BITS, bitcast=True)
    return tl.where(bits == -1, (1 << (BITS.primitive_bitwidth - 1)) - 1, bits).to(BITS)


@triton.jit
def sum_taken(
    own,
    inbox,
    places,
    apart,
    mask,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """The sum of all ranks' rows, in the order of the ranks and rounded once: of this rank's `own`
    row and the others' in its `inbox`, whose places are `apart` from each other."""
    total = tl.zeros(own.shape, tl.float32)
    for other in tl.static_range(SIZE):
        bits = own
        if other != RANK:
            bits = take(inbox, places + other * apart, mask)
        part = bits.to(DTYPE, bitcast=True).to(tl.float32)
        if other == 0:
            total = part
        else:
            total += part
    return total.to(DTYPE)


@triton.jit(do_not_specialize=["num_rows"])
def sum_rows(
    y_ptr,
    x_ptr,
    weight_ptr,
    out_ptr,
    add_ptr,
    add_slot_ptr,
    inbox_ptrs,
    uses_ptr,
    num_rows,
    eps,
    y_scale,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROW: tl.constexpr,
    ROWS: tl.constexpr,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    TWO_SHOT: tl.constexpr,
    NORM: tl.constexpr,
    PENDING: tl.constexpr,
    PDL: tl.constexpr,
):
    """out = the sum over ranks of y and of what is pending; with NORM, x += that sum * y_scale
    and out = rms_norm(x). Programs share the rows.

    y, x, out, add (T, WIDTH) and add_slot int32 (T,), see `weft.kernels.ops`;
    inbox_ptrs int64 (SIZE,), addresses of inboxes, each with 2 x SIZE x ROWS places of ROW numbers;
    uses int32 (ROWS,). T is at most ROWS, and WIDTH at most ROW, so that offsets fit in 32 bits.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    DTYPE: tl.constexpr = y_ptr.dtype.element_ty
    BITS: tl.constexpr = tl.int16 if DTYPE.primitive_bitwidth == 16 else tl.int32
    i = tl.arange(0, BLOCK)
    mask = i < WIDTH
    if NORM:
        weight = tl.load(weight_ptr + i, mask=mask, other=0.0)
    inboxes = inboxes_of(inbox_ptrs, BITS, SIZE)
    if PDL:  # what the kernel ahead writes is read from here on
        tl.extra.cuda.gdc_wait()
    apart: tl.constexpr = ROWS * ROW
    for t in tl.range(tl.program_id(0), num_rows, tl.num_programs(0), num_stages=1):
        at = t * WIDTH + i
        uses = tl.load(uses_ptr + t)
        y = tl.load(y_ptr + at, mask=mask, other=0.0)
        if NORM:
            x = tl.load(x_ptr + at, mask=mask, other=0.0)
        has = has_pending(add_slot_ptr + t, PENDING)
        y = with_pending(y, add_ptr + at, has, mask, PENDING)
        own = bits_of(y, BITS)
        places = ((uses & 1) * (SIZE * ROWS) + t) * ROW + i
        if TWO_SHOT:
            owner = t % SIZE
            if owner == RANK:
                total = sum_taken(own, inboxes[RANK], places, apart, mask, RANK, SIZE, DTYPE)
                bits = bits_of(total, BITS)
                for other in tl.static_range(SIZE):
                    if other != RANK:
                        tl.store(inboxes[other] + places + RANK * apart, bits, mask=mask)
            else:
                inbox = inbox_of(inbox_ptrs, owner, BITS)
                tl.store(inbox + places + RANK * apart, own, mask=mask)
                bits = take(inboxes[RANK], places + owner * apart, mask)
            total = bits.to(DTYPE, bitcast=True)
        else:
            for other in tl.static_range(SIZE):
                if other != RANK:
                    tl.store(inboxes[other] + places + RANK * apart, own, mask=mask)
            total = sum_taken(own, inboxes[RANK], places, apart, mask, RANK, SIZE, DTYPE)
        if NORM:
            x = (x.to(tl.float32) + total.to(tl.float32) * y_scale).to(DTYPE)
            tl.store(x_ptr + at, x, mask=mask)
            wide = x.to(tl.float32)
            scale = 1 / tl.sqrt(tl.sum(wide * wide) / WIDTH + eps)
            total = (wide * scale * weight.to(tl.float32)).to(DTYPE)
        tl.store(out_ptr + at, total, mask=mask)
        tl.store(uses_ptr + t, uses + 1)


@triton.jit(do_not_specialize=["first", "num_pieces"])
def gather_pieces(
    x_ptr,
    out_ptr,
    inbox_ptrs,
    uses_ptr,
    first,
    num_pieces,
    width,
    BLOCK: tl.constexpr,
    ROW: tl.constexpr,
    ROWS: tl.constexpr,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    PDL: tl.constexpr,
):
    """out (T, SIZE * width) = the columns x (T, width) of all ranks side by side, of the pieces of
    BLOCK columns from `first` on. Each goes through inboxes as a row of a sum does: see
    `sum_rows`."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    BITS: tl.constexpr = tl.int16 if x_ptr.dtype.element_ty.primitive_bitwidth == 16 else tl.int32
    inboxes = inboxes_of(inbox_ptrs, BITS, SIZE)
    if PDL:
        tl.extra.cuda.gdc_wait()
    num_blocks = tl.cdiv(width, BLOCK)
    for i in tl.range(tl.program_id(0), num_pieces, tl.num_programs(0), num_stages=1):
        uses = tl.load(uses_ptr + i)
        row = ((first + i) // num_blocks).to(tl.int64)
        column = (first + i) % num_blocks * BLOCK + tl.arange(0, BLOCK)
        mask = column < width
        x = tl.load(x_ptr + row * width + column, mask=mask, other=0.0)
        own = bits_of(x, BITS)
        places = ((uses & 1) * (SIZE * ROWS) + i) * ROW + tl.arange(0, BLOCK)
        for other in tl.static_range(SIZE):
            if other != RANK:
                tl.store(inboxes[other] + places + RANK * ROWS * ROW, own, mask=mask)
        at = out_ptr + row * SIZE * width + column
        for other in tl.static_range(SIZE):
            bits = own
            if other != RANK:
                bits = take(inboxes[RANK], places + other * ROWS * ROW, mask)
            tl.store(at + other * width, bits.to(x.dtype, bitcast=True), mask=mask)
        tl.store(uses_ptr + i, uses + 1)

"""Queries about the device, and device functions, that all Triton kernels share."""

from __future__ import annotations

import os
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.kernels.tuned import MEETING_FLOATS, MEETING_TILES

# Triton 3.9 warns that later versions won't fuse products and sums by themselves, which takes more
# instructions and rounds in another way.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

INTERPRETED: bool = triton.knobs.runtime.interpret
"""Whether this process runs kernels in Triton's interpreter. Its products of 16-bit numbers are not
right, so kernels compute them in fp32 there."""


@cache
def starts_early(device: torch.device) -> bool:
    """Whether a kernel may start before the one ahead of it has ended."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def launch_options(early: bool) -> dict[str, bool]:
    """The options of a launch, which may start early, if `early`. With PDL its kernel then waits
    where it reads what the kernel ahead writes."""
    return {"PDL": True, "launch_pdl": True} if early else {"PDL": False}


ALL_AT_ONCE = {"maxnreg": 128}
"""An option of a launch of at most 16 warps, for small kernels, which mostly wait for memory. The
assembler then uses as many registers as it takes to ask for everything at once. Without this limit
it saves registers, although nobody needs them, so that loads wait for each other."""


@cache
def processors(device: torch.device) -> int:
    """How many programs the device runs side by side, one for each of its processors."""
    if device.type == "cpu":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


TURNS = 64
"""The number of flags: many more than the launches that can be under way at once."""


def meeting_place(device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Memory where the parts of products meet, counters, and flags that nobody waits for. Launches
    of one stream share them; those of two streams may run at once. Graphs are for the default
    stream, 0."""
    stream = 0
    if device.type == "cuda" and not torch.cuda.is_current_stream_capturing():
        stream = torch.cuda.current_stream(device).cuda_stream
    return _meeting_place(device, stream)


@cache
def _meeting_place(device: torch.device, stream: int) -> tuple[Tensor, Tensor, Tensor]:
    parts = torch.empty(MEETING_FLOATS, dtype=torch.float32, device=device)
    counters = torch.zeros(MEETING_TILES + TURNS, dtype=torch.int32, device=device)
    return parts, counters[:MEETING_TILES], counters[MEETING_TILES:]


@triton.jit
def dot(a, b, acc, EXACT: tl.constexpr):
    """acc + a @ b; EXACT: in fp32 whatever the operands' dtype."""
    if EXACT:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def activated(gate, up, alpha, limit, GELU: tl.constexpr, CLAMPED: tl.constexpr):
    """activation(gate) * up, in fp32. With CLAMPED, the activation is `ClampedSwiglu` of
    `weft.kernels.activations`; with GELU, it is GELU's approximation; else it is SiLU.

    All activations are gate * sigmoid(s): of SiLU, s is gate itself; that of GELU's approximation
    follows from (1 + tanh(z)) / 2 = sigmoid(2 z).
    """
    s = gate
    if GELU:
        s = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)  # 2 sqrt(2 / pi)
    if CLAMPED:
        gate = tl.minimum(gate, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit) + 1
        s = alpha * gate
    return gate / (1 + tl.exp(-s)) * up


@triton.jit
def activated_alone(up):
    """The square of the ReLU of up, in fp32: an activation without a gate."""
    up = tl.maximum(up, 0.0)
    return up * up


@triton.jit
def xielu(up, alpha_p, alpha_n, beta, eps):
    """`weft.kernels.activations.Xielu` of up, in fp32."""
    negative = alpha_n * (tl.exp(tl.minimum(up, eps)) - 1 - up)
    return tl.where(up > 0, alpha_p * up * up, negative) + beta * up


@triton.jit
def ask_for(at):
    """Ask for the lines of 128 bytes that `at` points into, in the second-level cache."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [at],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def wait_for(flag_ptr, num):
    """Wait until `num` is there."""
    while tl.atomic_add(flag_ptr, 0, sem="acquire") != num:
        pass
    tl.debug_barrier()


@triton.jit
def has_pending(slot_at, PENDING: tl.constexpr):
    """Whether adapters add to a row. No kernel of a step writes its slot, so that it can be read
    before the kernel ahead has ended."""
    has = False
    if PENDING:
        has = tl.load(slot_at) >= 0
    return has


@triton.jit
def load_pending(add_at, mask, PENDING: tl.constexpr):
    """What adapters add to columns of a row; see `weft.kernels.ops`. Kernels load it, and
    all else, before they compute anything: a load that comes later waits for those before it."""
    add = 0.0
    if PENDING:
        add = tl.load(add_at, mask=mask, other=0.0)
    return add


@triton.jit
def plus_pending(y, add, has, PENDING: tl.constexpr):
    """y with what adapters add to it, if there is anything."""
    if PENDING:
        y = tl.where(has, (y.to(tl.float32) + add).to(y.dtype), y)
    return y


@triton.jit
def with_pending(y, add_at, has, mask, PENDING: tl.constexpr):
    """y with what adapters add to it, which is loaded here."""
    return plus_pending(y, load_pending(add_at, mask, PENDING), has, PENDING)

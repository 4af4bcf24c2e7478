"""Device functions that all kernels in Gluon share. Gluon is the part of Triton in which it is said
which registers hold what."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

barrier = getattr(gl, "barrier", None) or gl.thread_barrier  # Triton 3.6 has the latter


@gluon.jit
def order(INSTRUCTION: gl.constexpr, WARPS: gl.constexpr):
    """An instruction that says when this kernel and its neighbours start."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    each = gl.full([32 * WARPS], 0, gl.int32, layout=layout)
    gl.inline_asm_elementwise(
        INSTRUCTION + "; mov.u32 $0, $1;", "=r,r", [each], dtype=gl.int32, is_pure=False, pack=1
    )

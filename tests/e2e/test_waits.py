"""What kernels that start early read before the kernels ahead of them have ended, seen in what they
are compiled to, for a GPU that is not there.

A loop over loads becomes copies that are under way rounds ahead, and the first of them stand
before the loop. So a wait inside of it comes too late for them, however the source reads.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from no_device import RunWithoutDevice

pytest.importorskip("triton")

COMPILE = """
from pathlib import Path
import torch
from triton.runtime.jit import MockTensor as M
import weft.kernels.attention.paged_kernels as paged
import weft.kernels.collective.triton_sums as sums
import weft.kernels.lora.triton_beside as beside
import weft.kernels.lora.triton_many as many
import weft.kernels.lora.triton_ranks as ranks
import weft.kernels.triton_delta as delta
import weft.kernels.triton_experts as experts
import weft.kernels.triton_linear as linear
from weft.kernels.tuned import Blocks

bf, f32, i32, i64 = (M(t) for t in (torch.bfloat16, torch.float32, torch.int32, torch.int64))
early = {"PDL": True, "launch_pdl": True, "grid": (1,)}
common = {"K": 4096, "W": 1024, "PART": 256, "MAX_PARTS": 16, "EXACT": False}
blocks = Blocks()
linear_attention = {
    "COLUMNS": (0, 128, 2048, 128, 4096, 256, 8192, 256, 12288, 2, 12320, 2), "G": 16, "H": 32,
    "D": 128, "E": 128, "R": 5, "MAMBA": False, "PENDING": True,
}
warm_up = {
    "shrink": lambda: many.shrink_rows.warmup(
        bf, f32, bf, i32, i64, i64, i32, 1, 3, 4096, 4, 7, NUM_SLICES=3, SHARES=many.SHARES,
        STAGES=blocks.shrink_stages, TILES=many.TOGETHER, num_warps=blocks.shrink_warps, **common,
        **early,
    ),
    "expand": lambda: many.expand_rows.warmup(
        bf, f32, i32, bf, i32, i64, i64, i32, 1, 3, 4096, 4, 7, WIDTHS=(4096,), GATHER=False,
        WHOLE=False, BLOCK_N=blocks.columns, STAGES=blocks.expand_stages,
        num_warps=blocks.expand_warps, **common, **early,
    ),
    "product": lambda: linear._product.warmup(
        bf, bf, bf, bf, f32, i32, i32, 7, 4096, 1, 8, O=4096, K=4096, BLOCK_T=16, BLOCK_O=64,
        BLOCK_K=256, SPLIT=2, STAGES=3, AHEAD=2, BIAS=False, TURNS=linear.TURNS, EXACT=False,
        num_warps=4, **early,
    ),
    "adapters": lambda: beside._adapters.warmup(
        bf, f32, f32, i32, bf, i32, i64, i64, i32, i64, i32, 4096, 1, 528, 0, 0, 4, 7, O=4096,
        PER_TILE=beside.PER_TILE, TURNS=linear.TURNS, COUNTERS=512, WIDTHS=(4096,), BLOCK_N=128,
        SHRINK_STAGES=3, EXPAND_STAGES=4, num_warps=4, **ranks.ALONE, **common, **early,
    ),
    "gate and up": lambda: experts._gate_up.warmup(
        bf, bf, bf, i64, bf, bf, 7, 32, 2880, 8640, 1.7, 7.0, I=2880, F=2880, TOP_K=4, BLOCK_T=16,
        BLOCK_TOP=4, BLOCK_R=16, BLOCK_O=64, BLOCK_K=64, STAGES=10, BY_PAIR=True, CLAMPED=True,
        GELU=False, GATED=True, BIAS=True, ADAPTED=True, EXACT=False, num_warps=4, **early,
    ),
    "decodes": lambda: paged.decode_rows.warmup(
        bf, bf, bf, bf, f32, f32, i32, i32, i32, bf, i32, 0.1, 0, 4096, 64, 8, G=4, D=128,
        BLOCK_D=128, BLOCK_G=16, HEADS=8, BLOCK_N=32, BLOCK_SIZE=16, PARTS=1, LEAST=256, PAIRS=True,
        WINDOW=False, CHUNKED=False, SINKS=False, CAP=0.0, num_warps=4, **early,
    ),
    "inputs of states": lambda: delta._prepare_decodes.warmup(
        bf, f32, i32, f32, f32, bf, bf, bf, f32, f32, i32, i64, 12352, 8192, W=4, BLOCK=128,
        BIAS=False, DOUBLED=False, num_warps=1, **linear_attention, **early,
    ),
    "states": lambda: delta._decode.warmup(
        bf, f32, i32, f32, f32, bf, f32, bf, i32, i64, 12352, 8192, 1e-6, BLOCK_D=128, BLOCK_E=128,
        num_warps=4, **linear_attention, **early,
    ),
    "sums": lambda: sums.sum_rows.warmup(
        bf, bf, bf, bf, f32, i32, i64, i32, 7, 1e-5, 1.0, WIDTH=4096, BLOCK=4096, ROW=4096,
        ROWS=1024, RANK=0, SIZE=2, TWO_SHOT=False, NORM=True, PENDING=True, num_warps=16, **early,
    ),
}
Path("ptx").write_text(warm_up[Path("name").read_text()]().asm["ptx"])
"""


def compiled(name: str, folder: Path, run_without_device: RunWithoutDevice) -> str:
    """A kernel in PTX."""
    (folder / "name").write_text(name)
    run_without_device(folder, COMPILE)
    return (folder / "ptx").read_text()


@pytest.mark.parametrize(
    ("kernel", "wait"),
    [
        # Adapters beside a product go through the loops of both.
        pytest.param("shrink", "griddepcontrol.wait", marks=pytest.mark.exhaustive),
        pytest.param("expand", "griddepcontrol.wait", marks=pytest.mark.exhaustive),
        ("product", "griddepcontrol.wait"),
        ("adapters", "ld.global.gpu.acquire"),  # the product tells it that x is there
    ],
)
def test_copies_are_behind_the_wait(
    run_without_device: RunWithoutDevice, tmp_path: Path, kernel: str, wait: str
) -> None:
    ptx = compiled(kernel, tmp_path, run_without_device)
    assert "cp.async" in ptx
    asked = max(ptx.rfind("prefetch.global"), 0)  # what may be read before
    assert 0 < ptx.index("griddepcontrol.launch_dependents") < ptx.index(wait, asked)
    assert ptx.index(wait, asked) < ptx.index("cp.async")


@pytest.mark.parametrize(
    "kernel",
    [
        "decodes",
        pytest.param("inputs of states", marks=pytest.mark.exhaustive),
        pytest.param("states", marks=pytest.mark.exhaustive),
    ],
)
def test_programs_without_a_row_wait_too(
    run_without_device: RunWithoutDevice, tmp_path: Path, kernel: str
) -> None:
    """In a step of prompts alone there are no others: if they did not wait, the kernel behind would
    begin before those ahead have ended."""
    ptx = compiled(kernel, tmp_path, run_without_device)
    *_, last = ptx.split("griddepcontrol.launch_dependents")
    ways_out = last.split("ret;")[:-1]
    assert ptx.count("griddepcontrol.wait") == 2
    assert ways_out and "griddepcontrol.wait" in ways_out[0]


def test_experts_are_chosen_before_the_second_product_may_begin(
    run_without_device: RunWithoutDevice, tmp_path: Path
) -> None:
    """The second product reads which experts were chosen before the first one has ended."""
    ptx = compiled("gate and up", tmp_path, run_without_device)
    assert 0 < ptx.index("griddepcontrol.wait") < ptx.index("griddepcontrol.launch_dependents")


def test_sums_over_ranks_wait_before_they_send(
    run_without_device: RunWithoutDevice, tmp_path: Path
) -> None:
    """Nothing is sent or taken, and no count is read, before the kernels ahead have ended; rows are
    sent and taken 16 bytes at a time."""
    ptx = compiled("sums", tmp_path, run_without_device)
    assert "cp.async" not in ptx
    wait = ptx.index("griddepcontrol.wait")
    assert 0 < ptx.index("griddepcontrol.launch_dependents") < wait < ptx.index("st.global")
    assert wait < ptx.index("ld.volatile.global")
    assert ptx.count("ld.volatile.global") == ptx.count("ld.volatile.global.v4.b32") > 0
    assert ptx.count("st.global.v4.b32") == 4  # what is sent, an empty row, x, and its norm

"""Triton kernels compiled ahead, for a GPU that is not there."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from no_device import RunWithoutDevice

pytest.importorskip("triton")

SETUP = """
import torch, triton, triton.language as tl
from weft.kernels.compiling import compiling_ahead

@triton.jit
def scale(x_ptr, FACTOR: tl.constexpr, BROKEN: tl.constexpr):
    tl.static_assert(not BROKEN, "this one is broken")
    x = tl.load(x_ptr + tl.arange(0, 16))
    tl.store(x_ptr + tl.arange(0, 16), x * FACTOR)

x = torch.ones(16)

def call(factor, broken=False, **options):
    scale[(1,)](x, FACTOR=factor, BROKEN=broken, **options)

def compiled():
    return list(scale.device_caches[0][0].values())
"""


Run = Callable[[str], str]


@pytest.fixture
def run(run_without_device: RunWithoutDevice, tmp_path: Path) -> Run:
    return lambda code: run_without_device(tmp_path, SETUP + code)


def test_what_is_called_is_compiled_and_not_run(run: Run) -> None:
    """Twice the same, spelled in two ways, and two others."""
    code = """
with compiling_ahead():
    for factor in (2, 3, 2, 5):
        call(factor)
    call(2, num_warps=4)
    assert len(compiled()) == 4 and not any(hasattr(kernel, "asm") for kernel in compiled())
assert x.tolist() == [1.0] * 16
print(sorted(len(kernel.asm["cubin"]) > 0 for kernel in compiled()))
"""
    assert run(code).strip() == "[True, True, True, True]"


def test_what_was_compiled_before_does_not_run_either(run: Run) -> None:
    """It would read what kernels that are not there yet should have written."""
    code = """
for factors in ((2, 3), (2, 5)):
    with compiling_ahead():
        for factor in factors:
            call(factor)
assert len(compiled()) == 3 and x.tolist() == [1.0] * 16
try:
    call(2)
except AttributeError:
    print("launched")
"""
    assert run(code).strip() == "launched"


def test_parts_begin_with_different_kernels(run: Run) -> None:
    """Each of three begins with those of its own part, and has all of them in the end."""
    code = """
from weft.kernels import compiling

begun = []
class Compilers(compiling._Compilers):
    def __init__(self, todo):
        begun.append(todo[0]().hash)
        super().__init__(todo)

compiling._Compilers = Compilers
compiling._is_cached = lambda key: False
first = []
for part in range(3):
    first += begun[:1]
    begun.clear()
    scale.device_caches.clear()
    with compiling_ahead(part, 3):
        for factor in range(2, 10):
            call(factor)
    print(len(compiled()), all(hasattr(kernel, "asm") for kernel in compiled()))
print(len({*first, begun[0]}))
"""
    assert run(code).splitlines() == ["8 True", "8 True", "8 True", "3"]


def test_what_does_not_compile_is_told_and_not_skipped_later(run: Run) -> None:
    code = """
from triton.compiler.errors import CompilationError
for attempt in range(2):
    try:
        with compiling_ahead():
            call(attempt)
            call(3, broken=True)
    except CompilationError as error:
        assert "this one is broken" in str(error)
        print("told")
try:
    call(3, broken=True)
except CompilationError:
    print("told")
print(len([kernel for kernel in compiled() if kernel is not None]))
"""
    assert run(code).split() == ["told", "told", "told", "2"]


def test_as_many_kernels_as_processors_are_begun_with_while_others_are_noted(run: Run) -> None:
    code = """
import time
from weft.kernels import compiling

compiling._num_processors = lambda: 3
with compiling_ahead():
    for factor in range(2, 5):
        call(factor)
    keys = list(compiling.triton.runtime._async_compile.active_mode.get()._kernels)
    until = time.monotonic() + 60
    while not all(map(compiling._is_cached, keys)) and time.monotonic() < until:
        time.sleep(0.01)
    print(sum(map(compiling._is_cached, keys)), any(hasattr(k, "asm") for k in compiled()))
    call(5)
print(len(compiled()), all(hasattr(kernel, "asm") for kernel in compiled()))
"""
    assert run(code).splitlines() == ["3 False", "4 True"]


def test_processes_that_compile_collect_no_garbage(run: Run) -> None:
    """It may be tensors, which need the device to be freed."""
    code = """
import gc, os, sys

class Tensor:
    def __init__(self):
        self.own, self.pid = self, os.getpid()
    def __del__(self):
        if os.getpid() != self.pid:
            os.write(1, b"freed elsewhere ")

fork = os.fork

def fork_with_garbage():
    collects = gc.isenabled()
    gc.disable()
    for _ in range(100):
        Tensor()
    child = fork()
    if collects:
        gc.enable()
    return child

gc.set_threshold(1)
os.fork = fork_with_garbage
with compiling_ahead():
    for factor in range(2, 6):
        call(factor)
print("done")
"""
    assert run(code) == "done\n"


def test_an_error_among_the_calls_leaves_nothing_behind(run: Run) -> None:
    code = """
try:
    with compiling_ahead():
        for factor in range(2, 12):
            call(factor)
        raise LookupError
except LookupError:
    print([kernel for kernel in compiled() if kernel is not None and not hasattr(kernel, "asm")])
with compiling_ahead():
    call(12)
print(hasattr(compiled()[-1], "asm"))
"""
    assert run(code).split() == ["[]", "True"]


def test_what_is_in_the_cache_on_disk_is_taken_from_there(run: Run) -> None:
    code = """
from weft.kernels import compiling

todo = []
class Compilers(compiling._Compilers):
    def __init__(self, kernels):
        todo.append(len(kernels))
        super().__init__(kernels)

compiling._Compilers = Compilers
for factors in ((2, 3), (2, 3, 5)):
    scale.device_caches.clear()
    with compiling_ahead():
        for factor in factors:
            call(factor)
print(todo, len(compiled()))
"""
    assert run(code).strip() == "[2, 1] 3"


def test_keys_of_any_width_are_asked_for_early(run: Run) -> None:
    """Heads of 96, 160 or 192 dimensions have another number of lines than a power of 2."""
    code = """
from weft.kernels.attention.paged_kernels import _ask_for_round

@triton.jit
def ask(k_ptr, table_ptr, D: tl.constexpr, BLOCK_D: tl.constexpr):
    _ask_for_round(k_ptr, table_ptr, 0, 16, 0, 1, D, BLOCK_D, 16, 16)

with compiling_ahead():
    for width in (32, 96, 160, 192):
        block = triton.next_power_of_2(width)
        ask[(1,)](x.bfloat16(), x.int(), width, block)
print(len(ask.device_caches[0][0]))
"""
    assert run(code).strip() == "4"


@pytest.mark.exhaustive
def test_a_product_with_packed_weights_compiles(
    run_without_device: RunWithoutDevice, tmp_path: Path
) -> None:
    """Its kernels are in Gluon, whose names differ from one version of Triton to the next."""
    code = """
import torch
from weft.kernels.compiling import compiling_ahead
from weft.kernels.quant import gluon_packed, gluon_packed_many
from weft.kernels.quant.packed import Codes
from weft.kernels.quant.packed_weight import pack

gluon_packed.starts_early = gluon_packed_many.starts_early = lambda device: True
codes = torch.zeros(128, 1024, dtype=torch.uint8)
bf16, fp16 = torch.bfloat16, torch.float16
for coding, group, dtype in (("e4m3", 1024, bf16), ("e4m3", 128, fp16), ("int4", 128, bf16)):
    scales = torch.full((128, 1024 // group), 0.3)
    integers = coding == "int4"
    zeros = torch.full_like(scales, 8, dtype=torch.int32) if integers else None
    weight = pack(Codes(coding, codes, scales.to(dtype) if integers else scales, zeros), dtype)
    with compiling_ahead():
        x = torch.zeros(8, 1024, dtype=dtype)
        split = gluon_packed.cut(8, weight, 132)
        gluon_packed.launch(x, weight, x[0, :128], split, None)
        for form in gluon_packed_many.FORMS:
            gluon_packed_many.launch(x, weight, None, form)
kernels = gluon_packed_many._product.device_caches[0][0].values()
assert max(kernel.metadata.shared for kernel in kernels) <= 227 << 10
print("compiled")
"""
    assert run_without_device(tmp_path, code).strip() == "compiled"


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("capability", "kib", "processors"), [(80, 163, 108), (89, 99, 142), (90, 227, 132)]
)
def test_products_with_packed_weights_have_room_on_other_devices(
    run_without_device: RunWithoutDevice,
    tmp_path: Path,
    capability: int,
    kib: int,
    processors: int,
) -> None:
    """An A100, an L40S and an H100: what a program takes of the shared memory is there."""
    code = f"""
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from weft.kernels.compiling import compiling_ahead
from weft.kernels.quant import triton_packed
from weft.kernels.quant.packed import Codes
from weft.kernels.quant.packed_weight import pack

type(driver.active).get_current_target = lambda self: GPUTarget("cuda", {capability}, 32)
triton_packed._shared_memory = lambda device: {kib} << 10
triton_packed.processors = lambda device: {processors}
codes, scales = torch.zeros(28672, 256, dtype=torch.uint8), torch.ones(28672, 2).bfloat16()
weights = [
    pack(Codes("int4", codes, scales, torch.zeros_like(scales).int()), torch.bfloat16),
    pack(Codes("e4m3", codes, scales), torch.bfloat16),
]
with compiling_ahead():
    for weight in weights:
        for rows in (1, 64, 128):
            x = torch.zeros(rows, 256, dtype=torch.bfloat16)
            form = triton_packed.form_of(x, weight)
            triton_packed.launch(x, weight, None, form, None)
kernels = triton_packed._product.device_caches[0][0].values()
print(len(kernels), max(kernel.metadata.shared for kernel in kernels))
"""
    num, most = map(int, run_without_device(tmp_path, code).split())
    assert num == 6 and most <= kib << 10


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("capability", "kib", "width"), [(80, 163, 256), (80, 163, 512), (89, 99, 256), (89, 99, 512)]
)
def test_attention_in_fp32_has_room_on_other_devices(
    run_without_device: RunWithoutDevice, tmp_path: Path, capability: int, kib: int, width: int
) -> None:
    """An A100 and an L40S, for heads as wide as those of Gemma."""
    code = f"""
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from weft.kernels.attention import KVCache, make_batch
from weft.kernels.attention.paged import PagedAttention
from weft.kernels.attention.paged_kernels import decode_rows, prefill_tiles
from weft.kernels.compiling import compiling_ahead

type(driver.active).get_current_target = lambda self: GPUTarget("cuda", {capability}, 32)
attend = PagedAttention(torch.device("cpu"))
attend._shared_bytes = {kib} << 10
q, k = torch.zeros(41, 4, {width}), torch.zeros(8, 16, 2, {width})
batch = make_batch([40, 1], [40, 20], [[0, 1, 2], [3, 4]], 16)
with compiling_ahead():
    attend(q, KVCache(k, k), batch, scale=1.0, window=None)
made = [k for each in (decode_rows, prefill_tiles) for k in each.device_caches[0][0].values()]
print(len(made), max(kernel.metadata.shared for kernel in made))
"""
    num, most = map(int, run_without_device(tmp_path, code).split())
    assert num == 2 and most <= kib << 10


@pytest.mark.exhaustive
@pytest.mark.parametrize(("capability", "kib"), [(80, 163), (89, 99), (90, 227)])
def test_a_gated_mlp_with_adapters_compiles(
    run_without_device: RunWithoutDevice, tmp_path: Path, capability: int, kib: int
) -> None:
    support = Path(__file__).parents[1] / "support"
    code = f"""
import sys
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from weft.kernels.compiling import compiling_ahead
from weft.kernels.lora import AdapterPool, gluon_activate
sys.path.append({str(support)!r})
from tables import build_table

type(driver.active).get_current_target = lambda self: GPUTarget("cuda", {capability}, 32)
table = build_table(
    [("linear", 128, [("gate", 512), ("up", 512)]), ("linear", 512, [("down", 128)])]
)
pool = AdapterPool(table, 8, 2, torch.bfloat16, torch.device("cpu"))
work, tiles = torch.zeros(2, 4, 1024), torch.zeros(4, 4, dtype=torch.int32)
for dtype in (torch.bfloat16, torch.float16):
    pool.arena = pool.arena.to(dtype)
    with compiling_ahead():
        gluon_activate.launch(
            torch.zeros(4, 1024, dtype=dtype), *work, tiles, pool, *table.groups,
            gelu=dtype == torch.float16, part=256, max_parts=16, early={capability >= 90},
        )
kernels = gluon_activate._activate.device_caches[0][0].values()
print(len(kernels), max(kernel.metadata.shared for kernel in kernels))
"""
    num, most = map(int, run_without_device(tmp_path, code).split())
    assert num == 2 and most <= kib << 10


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("preset", "layers", "dtype", "gpu"),
    [
        ("llama-3-8b", 1, "bfloat16", (80, 163, 108)),
        ("llama-3-8b", 1, "bfloat16", (89, 99, 142)),
        ("llama-3-8b", 1, "float32", (89, 99, 142)),
        ("llama-3-8b", 1, "bfloat16", (90, 227, 132)),
        ("llama-3-8b", 1, "bfloat16", (100, 227, 148)),
        ("llama-3-8b", 1, "bfloat16", (120, 99, 188)),
        ("qwen3.5-9b", 4, "bfloat16", (89, 99, 142)),
        ("gpt-oss-20b", 2, "bfloat16", (89, 99, 142)),
        ("glm-4.7-flash", 1, "bfloat16", (80, 163, 108)),
        ("glm-4.7-flash", 1, "float32", (89, 99, 142)),
    ],
)
def test_all_kernels_of_steps_fit_other_devices(
    run_without_device: RunWithoutDevice,
    tmp_path: Path,
    preset: str,
    layers: int,
    dtype: str,
    gpu: tuple[int, int, int],
) -> None:
    """An A100, an L40S, an H100, a B200 and an RTX PRO 6000."""
    support = Path(__file__).parents[1] / "support"
    code = f"""
import json, sys
sys.path.append({str(support)!r})
from other_gpus import Gpu, compile_steps

print(json.dumps(compile_steps({preset!r}, {layers}, {dtype!r}, Gpu(*{gpu}))))
"""
    made = json.loads(run_without_device(tmp_path, code))
    attention = {"latent_tiles"} if preset.startswith("glm") else {"decode_rows", "prefill_tiles"}
    assert {"shrink_rows"} | attention <= {name.rpartition(".")[2] for name in made}
    assert max(made.values()) <= gpu[1] << 10, made

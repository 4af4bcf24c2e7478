"""Compiles the kernels of a model's steps for a GPU that is not there.

To be run in a process without a device, as `run_without_device` makes them. What kernels ask of the
device is answered with the GPU's numbers, and products of torch's library are not computed.
"""

from __future__ import annotations

import importlib
import json
import pkgutil
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

import weft.kernels
from weft.bench.presets import PRESETS
from weft.core.config import engine_args
from weft.core.stages import Stages
from weft.kernels import linear, triton_linear, triton_ops
from weft.kernels.collective.base import ALONE
from weft.kernels.compiling import compiling_ahead
from weft.kernels.lora import triton as lora
from weft.models import moe
from weft.worker import build
from weft.worker.graphs import StepGraphs
from weft.worker.rehearsal import SLOT, rehearsed_adapter
from weft.worker.sizes import token_sizes

NUM_TOKENS, NUM_BLOCKS = 2048, 128
"""The tokens of the largest step, and the blocks of the longest context."""


class Gpu(NamedTuple):
    capability: int
    """The compute capability, times 10."""
    shared_kib: int
    """The shared memory that a program may have."""
    processors: int


def compile_steps(preset: str, num_layers: int, dtype: str, gpu: Gpu) -> dict[str, int]:
    """Compile the kernels of all steps of a model with the widths of a preset, and of adapters on
    all its layers. Returns the most bytes of shared memory that each kernel takes."""
    sizes = {"max_model_len": NUM_TOKENS, "adapter_memory": 1 << 29, "kv_cache_memory": 1 << 28}
    base = _base(preset, num_layers)
    args = engine_args(base, device="cpu", load_format="dummy", dtype=dtype, **sizes)
    with _pretending(gpu):
        parts = build.allocate(args, Stages(), ALONE, lambda: build._load(args))
        executor, backend = parts.executor, parts.executor._lora
        backend.exact = False  # as it is in the interpreter
        backend.reserve(NUM_TOKENS)
        executor.graphs = StepGraphs(
            executor._decoder,
            executor._kv,
            backend,
            executor._last_token_R,
            NUM_BLOCKS,
            token_sizes(NUM_TOKENS),
        )
        parts.pool.install(SLOT, 0, rehearsed_adapter(parts.pool.table))
        with compiling_ahead():
            executor.launch(build._rehearsal(args, parts).steps())
    return _shared_bytes()


def _base(preset: str, num_layers: int) -> str:
    """The configuration of a preset, in a folder, with fewer layers, experts and tokens."""

    def smaller(config: dict[str, Any]) -> dict[str, Any]:
        less = {"num_hidden_layers": num_layers, "vocab_size": 1024, "dtype": "bfloat16"}
        for name in config.keys() & {"layer_types", "mlp_layer_types"}:
            less[name] = config[name][:num_layers]
        if "num_local_experts" in config:
            less["num_local_experts"] = 4
        if "text_config" in config:
            less["text_config"] = smaller(config["text_config"])
        return config | less

    folder = Path(preset)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(smaller(PRESETS[preset])))
    return str(folder)


@contextmanager
def _pretending(gpu: Gpu) -> Iterator[None]:
    """A context in which the CPU is taken for the GPU, as far as its kernels go."""

    def ops(*_: object) -> triton_ops.TritonOps:
        made = triton_ops.TritonOps(torch.device("cpu"))
        made.attend._shared_bytes = gpu.shared_kib << 10
        return made

    target = GPUTarget("cuda", gpu.capability, 32)
    answers = {
        "processors": gpu.processors,
        "starts_early": gpu.capability >= 90,
        "_shared_memory": gpu.shared_kib << 10,
        "_has_room": gpu.shared_kib >= 200,
    }
    with ExitStack() as changed:
        change = lambda *args: changed.enter_context(patch.object(*args))  # noqa: E731
        change(type(driver.active), "get_current_target", lambda _: target)
        for module in _kernel_modules():
            for name in answers.keys() & vars(module).keys():
                change(module, name, lambda _, answer=answers[name]: answer)
        change(triton_ops, "INTERPRETED", True)
        change(lora, "INTERPRETED", True)
        change(build, "make_ops", ops)
        change(build, "_backend_name", lambda *_: "triton")
        change(linear, "product", triton_linear.linear)
        change(F, "linear", _not_computed)
        change(moe, "grouped_linear", lambda x, w, _: _not_computed(x, w[0]))
        yield


def _kernel_modules() -> list[ModuleType]:
    for found in pkgutil.walk_packages(weft.kernels.__path__, "weft.kernels."):
        importlib.import_module(found.name)
    return [sys.modules[name] for name in list(sys.modules) if name.startswith("weft.kernels.")]


def _not_computed(x_TI: Tensor, weight_OI: Tensor, _: object = None) -> Tensor:
    return x_TI.new_empty(*x_TI.shape[:-1], len(weight_OI))


def _shared_bytes() -> dict[str, int]:
    found: dict[str, int] = {}
    for module in _kernel_modules():
        for name, fn in vars(module).items():
            if isinstance(fn, JITFunction):
                caches = [kernels for kernels, *_ in fn.device_caches.values()]
                made = [kernel.metadata.shared for of in caches for kernel in of.values()]
                if made:
                    found[f"{module.__name__}.{name}"] = max(made)
    return found

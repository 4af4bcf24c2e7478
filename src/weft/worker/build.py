"""Puts the worker of one device together."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from weft.core.config import EngineArgs
from weft.core.stages import Stages
from weft.kernels.lora import AdapterPool, make_backend
from weft.kernels.ops import make_ops
from weft.kernels.quant import rounds_inputs
from weft.models.blueprint import num_parameters
from weft.models.config import resolve_model
from weft.models.decoder import Decoder, allocate_kv_cache
from weft.models.loading import LoadedModel, load_model
from weft.worker.adapters import AdapterLoader, Packer
from weft.worker.execute import StepExecutor
from weft.worker.images import ImageStore, default_folder, fingerprint
from weft.worker.inputs import Array
from weft.worker.memory import (
    adapter_bytes,
    allocating,
    context_length,
    count_blocks,
    count_states,
    host_memory,
)
from weft.worker.protocol import WorkerFacts
from weft.worker.sampler import Sampler
from weft.worker.selfcheck import TOKENS, Activity, SelfCheck, num_blocks
from weft.worker.worker import DeviceWorker

MAX_RESIDENT = 4096
"""Slots: adapters that may be on the device at a time. A slot costs some kilobytes of tables."""


def build_worker(args: EngineArgs, stages: Stages) -> DeviceWorker:
    """Load the model, allocate all memory and capture steps. Raises ConfigError."""
    if args.num_threads is not None:
        torch.set_num_threads(args.num_threads)
    model = load_model(args.model)
    _end_stage(stages, "model", model.device)
    pool = _make_pool(args, model)
    num_rows = args.scheduler.max_num_seqs
    most = model.config.vocab_size + args.lora.max_added_tokens
    sampler = Sampler(num_rows, most, model.device, partial(_put, model.device))
    num_states = count_states(model.config, num_rows)
    num_blocks = count_blocks(args.cache, model.config, model.dtype, model.device)
    capacity = num_blocks * args.cache.block_size
    max_model_len = context_length(args.model.max_model_len, capacity, model.config)
    with allocating("kv_cache_memory"):
        kv = allocate_kv_cache(
            model.config,
            num_blocks,
            args.cache.block_size,
            model.dtype,
            model.device,
            num_states,
        )
    ops = make_ops("auto", model.device)
    decoder = Decoder(model.config, model.weights, ops, max_model_len)
    lora = make_backend(args.lora.lora_backend, pool)
    executor = StepExecutor(decoder, kv, pool, lora, sampler, num_rows)
    _end_stage(stages, "memory", model.device)
    executor.make_graphs(
        -(-max_model_len // args.cache.block_size), args.scheduler.max_num_batched_tokens
    )
    activity = Activity()
    self_check = _make_check(args, model, activity) if args.lora.self_check else None
    with ThreadPoolExecutor(1, thread_name_prefix="weft-start") as beside:
        # It takes a second or two of the driver's time.
        pinning = beside.submit(host_memory, args.lora.adapter_host_memory, model.device)
        with torch.inference_mode():
            executor.compile()
    stages.end("compile")
    with torch.inference_mode():
        if executor.capture():
            stages.end("capture")
    host = pinning.result()
    facts = WorkerFacts(
        architecture=model.config.architecture,
        dtype=str(model.dtype).removeprefix("torch."),
        device=str(model.device),
        vocab_size=model.config.vocab_size,
        eos_token_ids=tuple(model.config.eos_token_ids),
        num_parameters=num_parameters(model.shard.whole),
        max_model_len=max_model_len,
        num_blocks=num_blocks,
        num_states=num_states,
        num_slots=pool.num_slots,
        adapter_elements=pool.arena.numel(),
        element_bytes=pool.element_bytes,
        host_bytes=host.num_bytes,
        host_in_one_piece=host.memory is not None,
        has_checks=self_check is not None,
    )
    packer = Packer(model, args.lora)
    adapters = AdapterLoader(pool, packer, _image_store(args, model), host, self_check)
    return DeviceWorker(facts, model, executor, adapters, activity)


def _make_pool(args: EngineArgs, model: LoadedModel) -> AdapterPool:
    num_elements = adapter_bytes(args.lora.adapter_memory, model.device) // model.dtype.itemsize
    with allocating("adapter_memory"):
        return AdapterPool(model.table, num_elements, MAX_RESIDENT, model.dtype, model.device)


def _make_check(args: EngineArgs, model: LoadedModel, activity: Activity) -> SelfCheck:
    """A check over the same weights; all that steps write to is there once more."""
    ops, size = make_ops("auto", model.device), args.cache.block_size
    return SelfCheck(
        Decoder(model.config, model.weights, ops, TOKENS),
        model.table,
        partial(make_backend, args.lora.lora_backend),
        allocate_kv_cache(model.config, num_blocks(size), size, model.dtype, model.device, 2),
        size,
        activity.is_recent,
        exact=model.config.moe is None and not rounds_inputs(args.model.quantization),
    )


def _image_store(args: EngineArgs, model: LoadedModel) -> ImageStore | None:
    lora, base = args.lora, args.model
    if lora.adapter_cache_dir == "none":
        return None
    weights = None
    if base.load_format != "dummy":
        weights = resolve_model(base.model, base.revision)
    # What was accepted under other limits is packed anew.
    limits = (
        f"{lora.max_lora_rank} {lora.max_added_tokens} {lora.conversion_tolerance}"
        f" {base.quantization}"
    )
    key = fingerprint(model.table, weights, base.model, limits)
    folder = Path(lora.adapter_cache_dir) if lora.adapter_cache_dir else default_folder()
    return ImageStore(folder.absolute(), key, model.dtype, lora.adapter_cache_bytes)


def _end_stage(stages: Stages, name: str, device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    stages.end(name)


def _put(device: torch.device, array: Array) -> Tensor:
    tensor = torch.from_numpy(array)
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)

"""Owner of the tensors: weights, KV cache, adapter memory. Runs the forward pass of a step.

    flight = runner.launch(inputs)      returns at once
    result = flight.result()            waits for the tokens

The tokens sampled last stay on the device, by row, and feed the next step, so that a step can be
launched before the previous one's tokens are known on the host.
"""

from __future__ import annotations

import contextlib
import gc
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from weft.checkpoint import AdapterImage, load_image
from weft.core.config import EngineArgs
from weft.core.errors import ConfigError
from weft.core.types import TokenLogprob
from weft.engine.inputs import Array, SamplingArrays, StepInputs
from weft.engine.plan import StepResult
from weft.kernels.attention import AttentionBatch
from weft.kernels.lora import AdapterPool, LoraBatch, Segment, make_backend
from weft.kernels.ops import make_ops
from weft.kernels.sampling import SamplingBatch, sample, top_logprobs
from weft.models.config import ModelConfig, load_model_config, resolve_model
from weft.models.decoder import Decoder, StepContext
from weft.models.kv_cache import allocate_kv_cache, kv_bytes_per_block
from weft.models.loading import dummy_weights, load_weights, num_parameters
from weft.models.targets import target_table

logger = logging.getLogger(__name__)

MAX_RESIDENT = 4096
"""Slots: adapters that may be on the device at a time. A slot costs some kilobytes of tables."""

ACTIVATION_BYTES = 2 << 30
"""Kept free on a GPU for what a step allocates."""


class Flight(Protocol):
    """A step that was launched."""

    def result(self) -> StepResult:
        """Wait for its tokens. Raises what the forward pass raised."""
        ...


@dataclass(frozen=True, slots=True)
class _Sampled:
    """Device tensors of a step's outcome, in the inputs' order."""

    ids_N: Tensor
    logprobs: tuple[Tensor, ...] | None


class Runner:
    """The model of one device."""

    def __init__(self, args: EngineArgs) -> None:
        if args.num_threads is not None:
            torch.set_num_threads(args.num_threads)
        self.device = _device(args.model.device)
        self.config = load_model_config(args.model.model, args.model.revision)
        self.dtype = _dtype(args.model.dtype, self.config, self.device)
        self.table = target_table(self.config)
        self._max_lora_rank = args.lora.max_lora_rank
        weights = self._load(args)
        self.num_parameters = num_parameters(weights)
        self.pool = self._make_pool(args)
        self.num_blocks = self._count_blocks(args)
        self.max_model_len = self._context(args)
        self._kv = allocate_kv_cache(
            self.config, self.num_blocks, args.cache.block_size, self.dtype, self.device
        )
        ops = make_ops("auto", self.device)
        self._decoder = Decoder(self.config, weights, self.table, ops, self.max_model_len)
        self._lora = make_backend(args.lora.lora_backend, self.pool)
        rows = args.scheduler.max_num_seqs
        self._last_token_R = torch.zeros(rows, dtype=torch.int64, device=self.device)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="weft-forward")

    def read_adapter(self, path: str, expect_digest: str | None) -> AdapterImage:
        """Read and pack an adapter for this model; any thread. See `load_image` for errors."""
        image = load_image(Path(path), self.table, self.dtype, self._max_lora_rank, expect_digest)
        if self.device.type == "cuda":
            return replace(image, data=image.data.pin_memory())
        return image

    def launch(self, inputs: StepInputs) -> Flight:
        """Start a step. Steps run in the order of their launches."""
        if self.device.type == "cuda":
            return self._launch_cuda(inputs)
        return self._thread.submit(self._run_cpu, inputs)

    def close(self) -> None:
        self._thread.shutdown()

    # -- a step --------------------------------------------------------------------------------

    def _run_cpu(self, inputs: StepInputs) -> StepResult:
        with torch.inference_mode():
            sampled = self._step(inputs)
        return _result(inputs, sampled)

    def _launch_cuda(self, inputs: StepInputs) -> Flight:
        with torch.inference_mode():
            sampled = self._step(inputs)
            host = _Sampled(
                _to_host(sampled.ids_N),
                tuple(map(_to_host, sampled.logprobs)) if sampled.logprobs else None,
            )
            done: torch.cuda.Event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record()
        return _CudaFlight(done, lambda: _result(inputs, host))

    def _step(self, inputs: StepInputs) -> _Sampled:
        put = self._put
        step = self._context_of(inputs)
        ids_T = put(inputs.ids_T)
        if inputs.from_device_T is not None:
            last_T = self._last_token_R[put(inputs.row_T)]
            ids_T = torch.where(put(inputs.from_device_T), last_T, ids_T)
        hidden_TI = self._decoder.forward(ids_T, step, self._kv)
        if not len(inputs.sampled_rows_N):
            return _Sampled(ids_T[:0], None)
        logits_NV = self._decoder.logits(hidden_TI[put(inputs.sampled_tokens_N)], step).float()
        ids_N = sample(logits_NV, self._sampling(inputs.sampling))
        self._last_token_R[put(inputs.sampled_rows_N)] = ids_N
        if inputs.num_logprobs_N is None:
            return _Sampled(ids_N, None)
        return _Sampled(ids_N, top_logprobs(logits_NV, ids_N, int(inputs.num_logprobs_N.max())))

    def _context_of(self, inputs: StepInputs) -> StepContext:
        put = self._put
        attention = AttentionBatch(
            slot_mapping_T=put(inputs.slot_mapping_T),
            block_table_SB=put(inputs.block_table_SB),
            seq_lens_S=put(inputs.seq_lens_S),
            query_start=inputs.query_start,
            seq_lens=inputs.seq_lens_S.tolist(),
        )
        lora = None
        if inputs.segments:
            batch = LoraBatch(
                put(inputs.slot_T),
                tuple(Segment(*s) for s in inputs.segments),
                put(inputs.slot_N),
                tuple(Segment(*s) for s in inputs.sampled_segments),
            )
            lora = self._lora.begin(batch)
        return StepContext(put(inputs.positions_T), attention, lora)

    def _sampling(self, arrays: SamplingArrays | None) -> SamplingBatch | None:
        if arrays is None:
            return None
        put = self._put
        return SamplingBatch(
            put(arrays.random_M),
            put(arrays.temperature_M),
            None if arrays.top_k_M is None else put(arrays.top_k_M),
            None if arrays.top_p_M is None else put(arrays.top_p_M),
            put(arrays.seed_M),
            put(arrays.position_M),
        )

    def _put(self, array: Array) -> Tensor:
        tensor = torch.from_numpy(array)
        if self.device.type == "cpu":
            return tensor
        return tensor.pin_memory().to(self.device, non_blocking=True)

    # -- the start -----------------------------------------------------------------------------

    def _load(self, args: EngineArgs):  # type: ignore[no-untyped-def]
        if args.model.load_format == "dummy":
            return dummy_weights(self.config, self.dtype, self.device)
        folder = resolve_model(args.model.model, args.model.revision)
        return load_weights(folder, self.config, self.dtype, self.device)

    def _make_pool(self, args: EngineArgs) -> AdapterPool:
        num_bytes = args.lora.adapter_memory
        if num_bytes is None:
            num_bytes = 2 << 30 if self.device.type == "cpu" else _free_bytes(self.device) // 8
        num_elements = num_bytes // self.dtype.itemsize
        with _memory_errors("adapter_memory"):
            return AdapterPool(self.table, num_elements, MAX_RESIDENT, self.dtype, self.device)

    def _count_blocks(self, args: EngineArgs) -> int:
        cache = args.cache
        if cache.num_blocks is not None:
            return cache.num_blocks
        available = cache.kv_cache_memory
        if self.device.type == "cuda":
            total = torch.cuda.get_device_properties(self.device).total_memory
            reserve = int(total * (1 - cache.gpu_memory_utilization)) + ACTIVATION_BYTES
            available = _free_bytes(self.device) - reserve
        blocks = available // kv_bytes_per_block(self.config, cache.block_size, self.dtype)
        if blocks < 1:
            raise ConfigError("no memory is left for the KV cache", "gpu_memory_utilization")
        return blocks

    def _context(self, args: EngineArgs) -> int:
        capacity = self.num_blocks * args.cache.block_size
        asked = args.model.max_model_len
        if asked is None:
            if capacity < self.config.max_position_embeddings:
                logger.warning(
                    "requests are limited to the %d tokens of the KV cache; the model allows %d",
                    capacity,
                    self.config.max_position_embeddings,
                )
            return min(self.config.max_position_embeddings, capacity)
        if asked > self.config.max_position_embeddings:
            raise ConfigError(
                f"--max-model-len {asked} is more than the model's own limit of "
                f"{self.config.max_position_embeddings} tokens",
                "max_model_len",
            )
        if asked > capacity:
            raise ConfigError(
                f"--max-model-len {asked} does not fit in a KV cache of {capacity} tokens",
                "max_model_len",
            )
        return asked


class _CudaFlight:
    def __init__(self, done: torch.cuda.Event, make: Callable[[], StepResult]) -> None:
        self._done = done
        self._make = make

    def result(self) -> StepResult:
        self._done.synchronize()
        return self._make()


def _to_host(tensor: Tensor) -> Tensor:
    out = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return out.copy_(tensor, non_blocking=True)


def _result(inputs: StepInputs, sampled: _Sampled) -> StepResult:
    order = inputs.plan_order_N
    ids = sampled.ids_N.numpy()[order].tolist()
    if sampled.logprobs is None or inputs.num_logprobs_N is None:
        return StepResult(ids)
    chosen, rank, values, top_ids = (t.numpy()[order] for t in sampled.logprobs)
    logprobs = [
        None
        if n < 0
        else TokenLogprob(
            float(chosen[i]),
            int(rank[i]),
            list(zip(top_ids[i, :n].tolist(), values[i, :n].tolist(), strict=True)),
        )
        for i, n in enumerate(inputs.num_logprobs_N[order].tolist())
    ]
    return StepResult(ids, logprobs)


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda, but torch sees no CUDA device", "device")
    return torch.device(name)


def _dtype(name: str, config: ModelConfig, device: torch.device) -> torch.dtype:
    if name == "auto":
        name = "float32" if device.type == "cpu" else config.dtype
        name = "bfloat16" if name == "float32" and device.type == "cuda" else name
    return {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}[name]


def _free_bytes(device: torch.device) -> int:
    gc.collect()
    torch.cuda.empty_cache()
    return int(torch.cuda.mem_get_info(device)[0])


@contextlib.contextmanager
def _memory_errors(param: str):  # type: ignore[no-untyped-def]
    """Turn an allocation that fails into a ConfigError that names the flag."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        flag = "--" + param.replace("_", "-")
        raise ConfigError(f"not enough memory for {flag}: {error}", param) from error

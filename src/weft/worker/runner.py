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
import math
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from weft.checkpoint import (
    AdapterFiles,
    AdapterImage,
    Summand,
    check_sum,
    pack_image,
    read_adapter,
    sum_images,
)
from weft.core.config import EngineArgs
from weft.core.errors import ConfigError
from weft.core.requests import TokenLogprob
from weft.core.stages import Stages
from weft.kernels.attention import AttentionBatch
from weft.kernels.lora import AdapterPool, LoraBatch, LoraStep, Segment, make_backend
from weft.kernels.lora.extras import (
    has_extras,
    norms_of,
    vocabulary_of,
    vocabulary_runs,
    with_extras,
)
from weft.kernels.ops import make_ops
from weft.kernels.sampling import top_logprobs
from weft.kernels.staging import Staging
from weft.models.blueprint import target_table
from weft.models.config import ModelConfig, load_model_config, resolve_model
from weft.models.decoder import Decoder, StepContext
from weft.models.kv_cache import allocate_kv_cache, kv_bytes_per_block
from weft.models.loading import dummy_weights, load_weights
from weft.models.weights import Weights
from weft.schedule.plan import StepResult
from weft.schedule.slots import Move, Moved
from weft.worker.graphs import StepGraphs, token_sizes
from weft.worker.inputs import Array, PromptArrays, Segments, StepInputs
from weft.worker.sampler import Sampler, VocabularyRun
from weft.worker.selfcheck import TOKENS, SelfCheck, num_blocks

logger = logging.getLogger(__name__)

MAX_RESIDENT = 4096
"""Slots: adapters that may be on the device at a time. A slot costs some kilobytes of tables."""

ACTIVATION_BYTES = 2 << 30
"""Kept free on a GPU for what a step allocates."""

BUSY_S = 0.25
"""After the launch of a step, others keep out of the way of those to come."""

PROMPT_ROWS = 256
"""Positions of prompts whose logits are computed at a time."""


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
    prompt: tuple[Tensor, ...] | None


class Runner:
    """The model of one device."""

    def __init__(self, args: EngineArgs) -> None:
        if args.num_threads is not None:
            torch.set_num_threads(args.num_threads)
        self.stages = Stages()
        """Of the start."""
        self.device = device_of(args.model.device)
        self.config = load_model_config(args.model.model, args.model.revision)
        _check_context(args.model.max_model_len, self.config)  # before anything slow
        self.dtype = _dtype(args.model.dtype, self.config, self.device)
        self.table = target_table(self.config)
        self._max_lora_rank = args.lora.max_lora_rank
        self._conversion_tolerance = args.lora.conversion_tolerance
        self._max_added_tokens = args.lora.max_added_tokens
        weights = self._load(args)
        self.num_parameters = weights.num_parameters
        self._base = weights
        self._end_stage("model")
        self.pool = self._make_pool(args)
        rows = args.scheduler.max_num_seqs
        self._put = partial(_put, self.device)
        most = self.config.vocab_size + args.lora.max_added_tokens
        self._sampler = Sampler(rows, most, self.device, self._put)
        self.num_blocks = self._count_blocks(args)
        self.max_model_len = self._context(args)
        with _memory_errors("kv_cache_memory"):
            self._kv = allocate_kv_cache(
                self.config, self.num_blocks, args.cache.block_size, self.dtype, self.device
            )
        ops = make_ops("auto", self.device)
        self._decoder = Decoder(self.config, weights, ops, self.max_model_len)
        self._lora = make_backend(args.lora.lora_backend, self.pool)
        # One row more than there are, for what pads a step.
        self._last_token_R = torch.zeros(rows + 1, dtype=torch.int64, device=self.device)
        self._staging = Staging(0, self.device)
        self._end_stage("memory")
        self._graphs = self._make_graphs(args)
        self.self_check = self._make_check(args, weights) if args.lora.self_check else None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="weft-forward")
        self._moved: Moved = _Nothing()
        self._launched_s = -math.inf

    def compile(self) -> None:
        """Compile what steps need, if they are to be captured. The device has little to do."""
        if self._graphs is not None:
            with torch.inference_mode():
                self._graphs.compile()

    def capture(self) -> None:
        """Capture steps, after `compile`. No other thread may use the device meanwhile."""
        if self._graphs is not None:
            with torch.inference_mode():
                self._graphs.capture()
            self._end_stage("capture")

    def read_adapter(self, path: str, expect_digest: str | None) -> AdapterFiles:
        """The content of an adapter's folder; any thread. Raises what `load_image` does."""
        return read_adapter(Path(path), self.table, self._max_lora_rank, expect_digest)

    def pack_adapter(self, files: AdapterFiles) -> AdapterImage:
        """Validate it and pack it for this model; any thread. Raises AdapterInvalid."""
        with self._aside():
            return pack_image(
                files,
                self.table,
                self.dtype,
                self._max_lora_rank,
                self._base,
                self._conversion_tolerance,
                self._max_added_tokens,
            )

    def check_sum(self, parts: Sequence[tuple[str, Summand]]) -> int:
        """Elements that the sum of adapters, by name, takes. Raises InvalidRequest."""
        return check_sum(parts, self.table, self._max_lora_rank, self.dtype)

    def sum_adapters(
        self, digest: str, parts: Sequence[tuple[AdapterImage, float]], into: torch.Tensor | None
    ) -> AdapterImage:
        """The weighted sum of images; any thread. Raises InvalidRequest."""
        return sum_images(digest, parts, self.table, self.dtype, into)

    def _aside(self) -> contextlib.AbstractContextManager[object]:
        """A stream that steps are not on, for what is computed from the base's weights."""
        if self.device.type != "cuda":
            return contextlib.nullcontext()
        return torch.cuda.stream(torch.cuda.Stream(self.device))  # type: ignore[no-untyped-call]

    def launch(self, inputs: StepInputs) -> Flight:
        """Start a step. Steps run in the order of their launches."""
        self._launched_s = time.monotonic()
        if self.device.type == "cuda":
            return self._launch_cuda(inputs)
        return self._thread.submit(self._run_cpu, inputs)

    def move(self, moves: Sequence[Move]) -> Moved:
        """Move images within adapter memory: behind the steps launched so far, which find them at
        their old places, and before those to come. For all moves ordered until now, so that no
        load overtakes those of another."""
        if moves and self.device.type == "cuda":
            self.pool.move(moves)
            self._moved = _CudaMoved()
        elif moves:
            self._moved = _CpuMoved(self._thread.submit(self.pool.move, moves))
        return self._moved

    def close(self) -> None:
        self._thread.shutdown()
        if self._graphs is not None:
            self._graphs.close()

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
                tuple(map(_to_host, sampled.prompt)) if sampled.prompt else None,
            )
            done: torch.cuda.Event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record()
        return _CudaFlight(done, lambda: _result(inputs, host))

    def _step(self, inputs: StepInputs) -> _Sampled:
        self._sampler.admit(inputs.counted)
        logits_NV = None
        if self._graphs and inputs.prompt is None and not self._has_extras(inputs):
            logits_NV = self._graphs.run(inputs)
        prompt = None
        if logits_NV is None:
            logits_NV, prompt = self._forward(inputs)
        if not len(logits_NV):
            return _Sampled(self._last_token_R[:0], None, prompt)
        runs = vocabulary_runs(self.pool, inputs.sampled_segments, len(logits_NV))
        ids_N = self._sampler.choose(logits_NV, inputs, runs)
        self._last_token_R[self._put(inputs.sampled_rows_N)] = ids_N
        logprobs = None
        if inputs.num_logprobs_N is not None:
            num = int(inputs.num_logprobs_N.max())
            logprobs = _top_logprobs(logits_NV, ids_N, num, runs)
        return _Sampled(ids_N, logprobs, prompt)

    def _forward(self, inputs: StepInputs) -> tuple[Tensor, tuple[Tensor, ...] | None]:
        """fp32 logits (N, V), and the prompt's log-probabilities if they are asked for."""
        on_device_T = inputs.from_device_T
        ids_T, row_T, known_T, positions_T, place_T, slot_T, table_SB, lens_S, sampled_N, slot_N = (
            self._staging.send_all(
                (
                    inputs.ids_T,
                    inputs.row_T,
                    np.zeros(0, np.bool_) if on_device_T is None else on_device_T,
                    inputs.positions_T,
                    inputs.slot_mapping_T,
                    inputs.slot_T,
                    inputs.block_table_SB,
                    inputs.seq_lens_S,
                    inputs.sampled_tokens_N,
                    inputs.slot_N,
                )
            )
        )
        attention = AttentionBatch(
            place_T, table_SB, lens_S, inputs.query_start, inputs.seq_lens_S.tolist()
        )
        lora = self._begin_lora(slot_T, inputs.segments, slot_N, inputs.sampled_segments)
        step = StepContext(positions_T, attention, lora, norms_of(lora), vocabulary_of(lora))
        if on_device_T is not None:
            ids_T = torch.where(known_T, self._last_token_R[row_T], ids_T)
        hidden_TI = self._decoder.forward(ids_T, step, self._kv)
        logits_NV = hidden_TI.new_empty((0, self._decoder.num_logits))
        if len(sampled_N):
            logits_NV = self._decoder.logits(hidden_TI[sampled_N], step).float()
        prompt = None
        if inputs.prompt is not None:
            prompt = self._prompt_logprobs(hidden_TI, step, inputs.prompt)
        return logits_NV, prompt

    def _prompt_logprobs(
        self, hidden_TI: Tensor, step: StepContext, prompt: PromptArrays
    ) -> tuple[Tensor, ...]:
        """As `top_logprobs`, over the prompt's next tokens. Slice by slice, as the logits of a
        long prompt are large; the last use of the step's adapters."""
        put = self._put
        num = max(num for _, _, num in prompt.entries)
        slices: list[tuple[Tensor, ...]] = []
        for begin in range(0, len(prompt.token_L), PROMPT_ROWS):
            end = min(begin + PROMPT_ROWS, len(prompt.token_L))
            slot_L, segments = put(prompt.slot_L[begin:end]), prompt.segments(begin, end)
            lora = self._begin_lora(slot_L, segments, slot_L, segments)
            rows_LI = hidden_TI[put(prompt.token_L[begin:end])]
            own = replace(step, lora=lora, vocabulary=vocabulary_of(lora))
            logits_LV = self._decoder.logits(rows_LI, own).float()
            runs = vocabulary_runs(self.pool, segments, end - begin)
            target_L = put(prompt.target_L[begin:end])
            slices.append(_top_logprobs(logits_LV, target_L, num, runs))
        return tuple(torch.cat(parts) for parts in zip(*slices, strict=True))

    def _begin_lora(
        self, slot_T: Tensor, segments: Segments, slot_N: Tensor, sampled_segments: Segments
    ) -> LoraStep | None:
        if not segments:
            return None
        each, sampled = (tuple(map(Segment._make, s)) for s in (segments, sampled_segments))
        batch = LoraBatch(slot_T, each, slot_N, sampled)
        return with_extras(self._lora.begin(batch), self.pool, batch)

    def _has_extras(self, inputs: StepInputs) -> bool:
        return has_extras(self.pool, (slot for slot, _, _ in inputs.segments))

    # -- the start -----------------------------------------------------------------------------

    def _load(self, args: EngineArgs):  # type: ignore[no-untyped-def]
        quantization = args.model.quantization
        if args.model.load_format == "dummy":
            return dummy_weights(self.config, self.dtype, self.device, quantization=quantization)
        folder = resolve_model(args.model.model, args.model.revision)
        return load_weights(folder, self.config, self.dtype, self.device, quantization)

    def _make_graphs(self, args: EngineArgs) -> StepGraphs | None:
        """Graphs of steps, where there is a GPU; none is captured yet."""
        if self.device.type != "cuda" or not self._decoder.is_capturable:
            return None
        with_lora = self._lora.reserve(args.scheduler.max_num_batched_tokens)
        return StepGraphs(
            self._decoder,
            self._kv,
            self._lora if with_lora else None,
            self._last_token_R,
            -(-self.max_model_len // args.cache.block_size),
            token_sizes(args.scheduler.max_num_batched_tokens),
        )

    def _end_stage(self, name: str) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.stages.end(name)

    def _make_check(self, args: EngineArgs, weights: Weights) -> SelfCheck:
        """Over the same weights; all that steps write to is there once more."""
        ops, size = make_ops("auto", self.device), args.cache.block_size
        return SelfCheck(
            Decoder(self.config, weights, ops, TOKENS),
            self.table,
            partial(make_backend, args.lora.lora_backend),
            allocate_kv_cache(self.config, num_blocks(size), size, self.dtype, self.device),
            lambda: time.monotonic() - self._launched_s < BUSY_S,
            exact=self.config.moe is None and args.model.quantization != "fp8",
        )

    def _make_pool(self, args: EngineArgs) -> AdapterPool:
        num_elements = self._adapter_bytes(args) // self.dtype.itemsize
        with _memory_errors("adapter_memory"):
            return AdapterPool(self.table, num_elements, MAX_RESIDENT, self.dtype, self.device)

    def _adapter_bytes(self, args: EngineArgs) -> int:
        memory = args.lora.adapter_memory
        if memory is None:
            return 2 << 30 if self.device.type == "cpu" else _free_bytes(self.device) // 8
        return int(memory * _total_bytes(self.device)) if memory < 1 else int(memory)

    def _count_blocks(self, args: EngineArgs) -> int:
        cache = args.cache
        if cache.num_blocks is not None:
            return cache.num_blocks
        available = cache.kv_cache_memory
        if self.device.type == "cuda":
            total = _total_bytes(self.device)
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
        if asked > capacity:
            raise ConfigError(
                f"--max-model-len {asked} does not fit in a KV cache of {capacity} tokens",
                "max_model_len",
            )
        return asked


def _top_logprobs(
    logits_NV: Tensor, ids_N: Tensor, num: int, runs: list[VocabularyRun] | None
) -> tuple[Tensor, ...]:
    """`top_logprobs` of rows that may have several vocabularies."""
    if runs is None:
        return top_logprobs(logits_NV, ids_N, num)
    parts = [top_logprobs(logits_NV[i:j, :size], ids_N[i:j], num) for i, j, size in runs]
    return tuple(torch.cat(part) for part in zip(*parts, strict=True))


def _put(device: torch.device, array: Array) -> Tensor:
    tensor = torch.from_numpy(array)
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


class _CudaFlight:
    def __init__(self, done: torch.cuda.Event, make: Callable[[], StepResult]) -> None:
        self._done = done
        self._make = make

    def result(self) -> StepResult:
        self._done.synchronize()
        return self._make()


class _Nothing:
    def wait(self) -> None:
        """Nothing was moved yet."""


class _CpuMoved:
    def __init__(self, done: Future[None]) -> None:
        self._done = done

    def wait(self) -> None:
        self._done.result()


class _CudaMoved:
    """All that is on the current stream by now."""

    def __init__(self) -> None:
        self._done = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        self._done.record()

    def wait(self) -> None:
        self._done.synchronize()


def _to_host(tensor: Tensor) -> Tensor:
    out = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return out.copy_(tensor, non_blocking=True)


def _result(inputs: StepInputs, sampled: _Sampled) -> StepResult:
    order = inputs.plan_order_N
    logprobs = None
    if sampled.logprobs is not None and inputs.num_logprobs_N is not None:
        in_order = [t.numpy()[order] for t in sampled.logprobs]
        records = _records(in_order, inputs.num_logprobs_N[order].tolist())
        logprobs = [None if record is None else [record] for record in records]
    prompt_logprobs: dict[int, list[TokenLogprob]] = {}
    if sampled.prompt is not None and inputs.prompt is not None:
        begin = 0
        for entry, count, num in inputs.prompt.entries:
            part = [t.numpy()[begin : begin + count] for t in sampled.prompt]
            prompt_logprobs[entry] = [r for r in _records(part, [num] * count) if r is not None]
            begin += count
    return StepResult(sampled.ids_N.numpy()[order, None].tolist(), logprobs, prompt_logprobs)


def _records(arrays: Sequence[Array], nums: list[int]) -> list[TokenLogprob | None]:
    """From what `top_logprobs` returned, with so many alternatives each; None for -1."""
    chosen, rank, values, top_ids = arrays
    return [
        None
        if n < 0
        else TokenLogprob(
            float(chosen[i]),
            int(rank[i]),
            list(zip(top_ids[i, :n].tolist(), values[i, :n].tolist(), strict=True)),
        )
        for i, n in enumerate(nums)
    ]


def _check_context(asked: int | None, config: ModelConfig) -> None:
    limit = config.max_position_embeddings
    if asked is not None and asked > limit:
        raise ConfigError(
            f"--max-model-len {asked} is more than the model's own limit of {limit} tokens",
            "max_model_len",
        )


def device_of(name: str) -> torch.device:
    """auto, cpu or cuda. Raises ConfigError where there is no such device."""
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


def _total_bytes(device: torch.device) -> int:
    """Of the device, or of the machine."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


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

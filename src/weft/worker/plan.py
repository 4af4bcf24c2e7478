"""Computes, without a GPU, how workers would divide the memory of GPUs of a given size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from weft.core.config import EngineArgs
from weft.core.errors import ConfigError
from weft.core.targets import Target, TargetTable, layout_of
from weft.kernels.quant import format_named
from weft.kernels.quant.packed import Codes, has_layout, scale_dtype_of
from weft.models.blueprint import model_shard
from weft.models.config import ModelConfig
from weft.models.decoder import kv_bytes_per_block, state_bytes
from weft.models.loading import allocate_weights, dtype_of, empty_linear, quantize_weights
from weft.models.matrices import LinearMatrices
from weft.models.mtp import head_shard, with_mtp_head
from weft.models.quantized.reading import expected
from weft.models.share import share_of
from weft.models.weights import places_of
from weft.worker.memory import GpuMemory, count_snapshots, count_states

GPUS: dict[str, int] = {
    "l4": 23_034,
    "rtx-4090": 24_564,
    "a100-40g": 40_960,
    "l40s": 46_068,
    "h100": 81_559,
    "a100-80g": 81_920,
    "h200": 143_771,
    "b200": 183_359,
}
"""The memory of some GPUs by name, in MiB, as nvidia-smi shows it."""

OTHER_BYTES = 3 << 29
"""What CUDA, its libraries and the worker's smaller tensors take, roughly."""


@dataclass(frozen=True, slots=True)
class RankMemory:
    """What the memory of one of `size` GPUs would have room for. In bytes, except `kv_tokens`."""

    size: int
    weights: int
    adapter: int
    """The size of one adapter of the planned kind."""
    adapters: int
    """The memory for adapters."""
    kv_tokens: int
    """Tokens of KV cache; less than 1 if the model does not fit."""

    @property
    def num_adapters(self) -> int:
        """The most planned adapters that are on the device at a time."""
        return self.adapters // self.adapter

    @property
    def fits(self) -> bool:
        return self.kv_tokens > 0


class RankPlan:
    """The share of a model that the first of `size` ranks has; no other rank has more. Raises
    ConfigError if the model can't be divided over them."""

    def __init__(self, config: ModelConfig, args: EngineArgs, size: int) -> None:
        self._args, self.size = args, size
        self._head = None
        if args.scheduler.speculative == "mtp":
            config = with_mtp_head(config)
            self._head = head_shard(config, 0, size)
        fully_sharded = args.lora.fully_sharded_loras
        self._whole, self._share = config, share_of(config, size)
        self._shard = model_shard(config, 0, size, fully_sharded_loras=fully_sharded)
        self._dtype = dtype_of(args.model.dtype, config, torch.device("cuda"))

    @property
    def table(self) -> TargetTable:
        """The table of the share."""
        return self._shard.own

    def adapter_bytes(self, rank: int, targets: Sequence[Target]) -> int:
        """The bytes of an adapter of that rank on those projections."""
        adapted = {target.slice for target in targets}
        ranks = tuple(rank if t.slice in adapted else 0 for t in self.table.targets)
        return layout_of(self.table, ranks).num_elements * self._dtype.itemsize

    def memory(self, total: int, adapter: int, num_adapters: int | None) -> RankMemory:
        """Divide a GPU's memory of `total` bytes. `adapter`: the bytes of one. `num_adapters`: make
        room for this many, instead of using the arguments' adapter memory."""
        weights = self._weight_bytes()
        gpu = GpuMemory(total, total - OTHER_BYTES - weights)
        adapters = gpu.for_adapters(self._args.lora.adapter_memory)
        if num_adapters is not None:
            adapters = num_adapters * adapter
        left = GpuMemory(total, gpu.free - adapters).for_cache(self._args.cache)
        num_states = count_states(self._share, self._args.scheduler.max_num_seqs)
        left -= state_bytes(self._share, num_states, self._dtype)
        if (asked := self._args.cache.kv_cache_memory) is not None:
            left = min(left, asked)
        num_snapshots = count_snapshots(self._args.cache, self._share, self._dtype, left)
        if asked is None:
            left -= state_bytes(self._share, num_snapshots, self._dtype)
        block_size = self._args.cache.block_size
        blocks = left // kv_bytes_per_block(self._share, block_size, self._dtype)
        return RankMemory(self.size, weights, adapter, adapters, blocks * block_size)

    def _weight_bytes(self) -> int:
        if self._head is None:
            return self._base_bytes()
        head = allocate_weights(self._head, self._dtype, "meta", None)
        return self._base_bytes() + head.num_bytes

    def _base_bytes(self) -> int:
        weights = allocate_weights(self._shard, self._dtype, "meta", None)
        asked, stated = self._args.model.quantization, self._share.quantized
        if asked is not None and not format_named(asked).by_projection:
            quantize_weights(weights, format_named(asked))
        if asked is not None or stated is None or self._args.model.deterministic:
            return weights.num_bytes
        places = places_of(weights, self._shard, self._whole.moe)
        empty = partial(empty_linear, self.table, self._dtype, torch.device("meta"))
        linear = LinearMatrices(weights.matrices, places.values(), None, empty, _may_fit)
        for name, place in places.items():
            if place.of is not None:
                outputs, inputs = place.shape
                module = name.removesuffix(".weight")
                linear.take(place, expected(stated, module, (outputs, inputs), self._dtype))
        return weights.num_bytes


def _may_fit(codes: Codes, dtype: torch.dtype) -> bool:
    """Whether kernels can multiply a matrix of this shape, unless its scales are too large."""
    return has_layout(codes) and scale_dtype_of(codes, dtype) is not None


def total_of(gpu: str | int) -> int:
    """The memory of a GPU by its name in `GPUS`, or itself if it is a number of bytes. Raises
    ConfigError."""
    if isinstance(gpu, int):
        return gpu
    if gpu not in GPUS:
        known = ", ".join(GPUS)
        message = f"--gpu takes a number of bytes such as 48G, or one of {known}; got {gpu!r}"
        raise ConfigError(message, "gpu")
    return GPUS[gpu] << 20

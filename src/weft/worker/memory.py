"""Divides memory among adapters, their images and the KV cache."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
import mmap
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

import torch

from weft.core.config import CacheArgs
from weft.core.errors import ConfigError
from weft.models.config import ModelConfig
from weft.models.decoder import kv_bytes_per_block, state_bytes
from weft.schedule.extents import ALIGN, Extent

logger = logging.getLogger(__name__)

ACTIVATION_BYTES = 2 << 30
"""Memory that is kept free on a GPU for what a step allocates."""
MADV_POPULATE_WRITE = 23
"""The advice with which `madvise` allocates all pages; Python has no name for it yet."""
POPULATING_THREADS = 8
CPU_ADAPTER_BYTES, CPU_CACHE_BYTES = 2 << 30, 1 << 30
"""The default sizes of adapter memory and of the KV cache on a CPU."""


@dataclass(frozen=True, slots=True)
class GpuMemory:
    """Memory of a GPU, in bytes."""

    total: int
    free: int

    def for_adapters(self, asked: int | float | None) -> int:
        """The memory that adapters get; see `LoraArgs.adapter_memory` for what may be asked for."""
        if asked is None:
            return self.free // 8
        return int(asked * self.total) if asked < 1 else int(asked)

    def for_cache(self, args: CacheArgs) -> int:
        """The memory that is left to the KV cache, when all else is allocated."""
        unused = int(self.total * (1 - args.gpu_memory_utilization))
        return self.free - unused - ACTIVATION_BYTES


def adapter_bytes(asked: int | float | None, device: torch.device) -> int:
    """Bytes of adapter memory; see `LoraArgs.adapter_memory` for what may be asked for."""
    if asked is None and device.type == "cpu":
        return CPU_ADAPTER_BYTES
    free = free_bytes(device) if asked is None else 0
    return GpuMemory(total_bytes(device), free).for_adapters(asked)


class CacheSizes(NamedTuple):
    """How many of each a device's cache has room for."""

    num_blocks: int
    """Blocks of the KV cache."""
    num_states: int
    """Recurrent states of sequences, for layers that have one in place of a KV cache."""
    num_snapshots: int
    """Snapshots of such states."""


def count_blocks(
    args: CacheArgs,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    num_states: int = 0,
) -> int:
    """How many blocks the KV cache gets; call it when all but the caches is allocated. Raises
    ConfigError if there is no room for one."""
    if args.num_blocks is not None:
        return args.num_blocks
    available = cache_bytes(args, config, dtype, device, num_states)
    blocks = available // kv_bytes_per_block(config, args.block_size, dtype)
    if blocks < 1:
        is_divided = device.type == "cuda" and args.kv_cache_memory is None
        flag = "gpu_memory_utilization" if is_divided else "kv_cache_memory"
        message = f"no memory is left for the KV cache; raise --{flag.replace('_', '-')}"
        raise ConfigError(message, flag)
    return blocks


def cache_bytes(
    args: CacheArgs, config: ModelConfig, dtype: torch.dtype, device: torch.device, num_states: int
) -> int:
    """The bytes of the KV cache: those asked for, or what is left beside `num_states` recurrent
    states."""
    if args.kv_cache_memory is not None:
        return args.kv_cache_memory
    if device.type != "cuda":
        return CPU_CACHE_BYTES
    left = GpuMemory(total_bytes(device), free_bytes(device)).for_cache(args)
    return left - state_bytes(config, num_states, dtype)


def count_states(config: ModelConfig, num_rows: int) -> int:
    """How many recurrent states: one for each row of the batch, and some for parked requests. 0 for
    a model that has none."""
    return 0 if config.linear is None else num_rows + -(-num_rows // 4)


MAX_SNAPSHOTS = 4096
"""More snapshots of small states would be of no use."""


def count_snapshots(args: CacheArgs, config: ModelConfig, dtype: torch.dtype, left: int) -> int:
    """How many snapshots of recurrent states; 0 for a model without states, or without a prefix
    cache. `left`: the bytes that the KV cache would have without them."""
    if config.linear is None or not args.enable_prefix_caching:
        return 0
    asked = args.snapshot_memory
    num_bytes = left // 8 if asked is None else asked
    return max(min(num_bytes // state_bytes(config, 1, dtype), MAX_SNAPSHOTS), 0)


def context_length(asked: int | None, capacity: int, config: ModelConfig) -> int:
    """How many tokens a request may have, if the KV cache has room for `capacity` tokens. Raises
    ConfigError if more are asked for than fit."""
    limit = config.max_position_embeddings
    if asked is None:
        if capacity < limit:
            message = "requests are limited to the %d tokens of the KV cache; the model allows %d"
            logger.warning(message, capacity, limit)
        return min(limit, capacity)
    if asked > capacity:
        message = f"--max-model-len {asked} does not fit in a KV cache of {capacity} tokens"
        raise ConfigError(message, "max_model_len")
    return asked


@contextlib.contextmanager
def allocating(param: str) -> Iterator[None]:
    """A context in which a failed allocation raises a ConfigError that names the flag."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        flag = "--" + param.replace("_", "-")
        raise ConfigError(f"not enough memory for {flag}: {error}", param) from error


def total_bytes(device: torch.device) -> int:
    """Memory of the device, or of the machine if the device is its CPU."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def give_back() -> None:
    """Give the memory that this process does not need any more back to the system and to GPUs."""
    gc.collect()
    torch.cuda.empty_cache()


def free_bytes(device: torch.device) -> int:
    """The free memory of a GPU, after this process has given back what it does not need."""
    give_back()
    return int(torch.cuda.mem_get_info(device)[0])


@dataclass(frozen=True, slots=True)
class HostMemory:
    """The host's memory for images. Without `memory`, as on a CPU with one rank, images stay in the
    memory that they were read or packed into."""

    num_bytes: int
    memory: torch.Tensor | None = None
    """Bytes, 1-D."""
    release: Callable[[torch.Tensor], object] = lambda _: None
    """Called with the memory when nothing uses it any more."""

    def view(self, extent: Extent | None) -> torch.Tensor | None:
        """The bytes of an extent; None without an extent or `memory`. For any thread."""
        if extent is None or self.memory is None:
            return None
        return self.memory[extent.start : extent.start + extent.size]

    def offset_of(self, data: torch.Tensor) -> int | None:
        """The offset of `data` in the memory, in bytes; None if they lie elsewhere."""
        if self.memory is None:
            return None
        offset = data.data_ptr() - self.memory.data_ptr()
        return offset if 0 <= offset < len(self.memory) else None

    def close(self) -> None:
        """Release the memory; nothing may use it any more."""
        if self.memory is not None:
            self.release(self.memory)


def host_bytes(asked: int | None) -> int:
    """The memory for images on the host: 4 GiB unless another size is asked for, but at most an
    eighth of the machine's."""
    return asked or min(4 << 30, total_bytes(torch.device("cpu")) // 8)


def shared_file(num_bytes: int) -> int:
    """The descriptor of a file in memory of at least `num_bytes`, which several processes may map,
    and which is gone with the last of them."""
    fd = os.memfd_create("weft-host")
    os.ftruncate(fd, -(-num_bytes // ALIGN) * ALIGN)
    return fd


def host_memory(
    asked: int | None, device: torch.device, shared_fd: int | None = None
) -> HostMemory:
    """The host's memory for images, of `host_bytes`: that of the file `shared_fd` if processes
    share it. For a GPU it is page-locked. Raises ConfigError."""
    num_bytes = host_bytes(asked)
    if device.type != "cuda" and shared_fd is None:
        return HostMemory(num_bytes)
    try:
        memory = _in_one_piece(num_bytes, shared_fd)
        if device.type != "cuda":
            return HostMemory(len(memory), memory)
        if shared_fd is not None:
            populate(memory)
        return _pinned(memory)
    except (RuntimeError, OSError) as error:
        message = f"not enough memory for --adapter-host-memory: {error}"
        raise ConfigError(message, "adapter_host_memory") from None


def _in_one_piece(num_bytes: int, shared_fd: int | None) -> torch.Tensor:
    num_bytes = -(-num_bytes // ALIGN) * ALIGN
    if shared_fd is None:
        # Memory of this process alone has large pages where the system gives any, and is locked in
        # a fraction of the time. Forked processes do without it, as they would get copies.
        memory = mmap.mmap(-1, num_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory.madvise(mmap.MADV_DONTFORK)
    else:
        memory = mmap.mmap(shared_fd, num_bytes)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)


def populate(memory: torch.Tensor) -> None:
    """Have the system allocate all pages now, on several threads. Memory of a file has no large
    pages; page-locking would have its pages allocated one by one, and keep all other threads from
    the device meanwhile. Does nothing if the system can't do this."""
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    size = -(-len(memory) // POPULATING_THREADS // ALIGN) * ALIGN
    starts = range(0, len(memory), max(size, ALIGN))
    with ThreadPoolExecutor(POPULATING_THREADS) as pool:
        for start in starts:
            address = ctypes.c_void_p(memory.data_ptr() + start)
            count = ctypes.c_size_t(min(size, len(memory) - start))
            pool.submit(madvise, address, count, MADV_POPULATE_WRITE)


def _pinned(memory: torch.Tensor) -> HostMemory:
    """Page-lock `memory`, so that a CUDA device reads it at full speed. Raises RuntimeError.

    It is one piece, from the start: torch's own allocator rounds up to powers of two, and pinning
    memory while the device works stalls the driver.
    """
    cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    status = cudart.cudaHostRegister(memory.data_ptr(), len(memory), 0)
    if int(status):
        raise RuntimeError(f"cudaHostRegister of {len(memory)} bytes failed with {status}")
    return HostMemory(len(memory), memory, lambda it: cudart.cudaHostUnregister(it.data_ptr()))

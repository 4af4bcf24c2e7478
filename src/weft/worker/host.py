"""Memory of the host that images lie in, in one piece."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from dataclasses import dataclass

import torch

from weft.core.errors import ConfigError
from weft.schedule.extents import ALIGN, Extent


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Memory for images on the host. On a CPU device there is no piece of it: images stay in the
    memory that they were read or packed into."""

    num_bytes: int
    memory: torch.Tensor | None = None
    """Bytes, 1-D."""
    release: Callable[[torch.Tensor], object] = lambda _: None
    """Called with the memory when nothing uses it any more."""

    def view(self, extent: Extent | None) -> torch.Tensor | None:
        """The bytes of an extent; any thread."""
        if extent is None or self.memory is None:
            return None
        return self.memory[extent.start : extent.start + extent.size]

    def close(self) -> None:
        """Release the memory; nothing may use it any more."""
        if self.memory is not None:
            self.release(self.memory)


def host_memory(asked: int | None, device: torch.device) -> HostMemory:
    """Memory for images on the host: 4 GiB unless another size is asked for, but at most an eighth
    of the machine's. For a GPU it is page-locked. Raises ConfigError."""
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    num_bytes = asked or min(4 << 30, machine // 8)
    if device.type != "cuda":
        return HostMemory(num_bytes)
    try:
        return _pinned(num_bytes)
    except (RuntimeError, OSError) as error:
        raise ConfigError(
            f"not enough memory for --adapter-host-memory: {error}", "adapter_host_memory"
        ) from None


def _pinned(num_bytes: int) -> HostMemory:
    """Memory that a CUDA device reads at full speed.

    It is one piece that is made at the start: torch's own allocator rounds up to powers of two, and
    what it pins while the device works stalls the driver. Raises RuntimeError, OSError.
    """
    num_bytes = -(-num_bytes // ALIGN) * ALIGN
    memory = mmap.mmap(-1, num_bytes)
    memory.madvise(mmap.MADV_HUGEPAGE)
    pinned = torch.frombuffer(memory, dtype=torch.uint8)
    cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    status = cudart.cudaHostRegister(pinned.data_ptr(), num_bytes, 0)
    if int(status):
        raise RuntimeError(f"cudaHostRegister of {num_bytes} bytes failed with {status}")
    return HostMemory(num_bytes, pinned, lambda it: cudart.cudaHostUnregister(it.data_ptr()))

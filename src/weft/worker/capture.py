"""Captures a function's launches as a CUDA graph."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from typing import Any

import torch


@contextlib.contextmanager
def no_garbage_collection() -> Iterator[None]:
    """A context without garbage collection, as collecting another graph would spoil a capture."""
    gc.collect()
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def record(
    forward: Callable[[], None], pool: Any, stream: torch.cuda.Stream | None
) -> Callable[[], None]:
    """Capture `forward`, which has run before, and return a function that replays it. Without a
    stream, as in tests without a GPU, that is `forward` itself.

    Torch's own context for captures would give all free memory, which the next one needs, back.
    Other threads may use the device meanwhile, as those that pack adapters do.
    """
    if stream is None:
        return forward
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            forward()
        finally:
            graph.capture_end()

    def replay(_keep: object = forward) -> None:
        graph.replay()

    return replay

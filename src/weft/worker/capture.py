"""Captures a function's launches as a CUDA graph."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from typing import Any

import torch


@contextlib.contextmanager
def no_garbage_collection() -> Iterator[None]:
    """The end of another graph, found by the collector, would spoil a capture."""
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
    """Capture what has run once already. Without a GPU, as in tests, it is run each time.

    Torch's own context for captures gives all free memory back to the driver each time, of which
    the next size would need most again.
    """
    if stream is None:
        return forward
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        graph.capture_begin(pool=pool)
        try:
            forward()
        finally:
            graph.capture_end()

    def replay(_keep: object = forward) -> None:
        graph.replay()

    return replay

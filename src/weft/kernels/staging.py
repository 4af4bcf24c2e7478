"""Copies a step's small host arrays to a fixed address on the device, all at once and without
waiting."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

DEPTH = 2
"""How many host buffers there are: as many as steps can be in flight."""


class Staging:
    """A device buffer of 32-bit words and the page-locked host buffers that feed it in turn.

    words = staging.begin()     the host's side, to be filled
    staging.send(n)             copied behind all work that was queued before

    What was sent stays until the next `send`. On a CPU a copy is done at once.
    """

    def __init__(self, num_words: int, device: torch.device) -> None:
        self._device = device
        self.turn = 0
        """Which of the host's buffers was given out last."""
        self._sent: list[torch.cuda.Event] = []
        """For each of the host's buffers, when its last copy is done; none on a CPU."""
        if device.type == "cuda":
            self._sent = [torch.cuda.Event() for _ in range(DEPTH)]  # type: ignore[no-untyped-call]
        self._allocate(num_words)

    def _allocate(self, num_words: int) -> None:
        pinned = self._device.type == "cuda"
        self._host = [
            torch.empty(num_words, dtype=torch.int32, pin_memory=pinned) for _ in range(DEPTH)
        ]
        self._words: list[NDArray[np.int32]] = [host.numpy() for host in self._host]
        self.device_words = torch.zeros(num_words, dtype=torch.int32, device=self._device)
        self._sides = self._host, self.device_words
        """The part of each buffer that was sent last."""

    def reserve(self, num_words: int) -> None:
        """Make room for `num_words`. If there was too little, the device buffer moves."""
        if num_words > len(self.device_words):
            self._allocate(num_words)

    def begin(self) -> NDArray[np.int32]:
        """The next host buffer, after waiting for its last copy, DEPTH sends ago."""
        self._next_host()
        return self._words[self.turn]

    def send(self, num_words: int) -> Tensor:
        """Copy `num_words` words. Returns them on the device, int32 (num_words,)."""
        host, words = self._sides
        if words.shape[0] != num_words:
            words = self.device_words[:num_words]
            self._sides = host, words = [each[:num_words] for each in self._host], words
        words.copy_(host[self.turn], non_blocking=True)
        if self._sent:
            record(self._sent[self.turn], self._device)
        return words

    def send_all(self, arrays: Sequence[NDArray[np.generic]]) -> list[Tensor]:
        """Copy arrays of any types and shapes at once, and return the device's sides. On a CPU
        these are the arrays themselves."""
        tensors = [torch.from_numpy(array) for array in arrays]
        if self._device.type == "cpu":
            return tensors
        # Each begins at 16 bytes, or kernels would be compiled anew for what they can't assume.
        ends = [0, *accumulate(-(-t.nbytes // 16) * 4 for t in tensors)]
        self.reserve(ends[-1])
        host = self._next_host()
        for tensor, (start, end) in zip(tensors, pairwise(ends), strict=True):
            _part(host, start, end, tensor).copy_(tensor)
        self.send(ends[-1])
        return [
            _part(self.device_words, start, end, tensor)
            for tensor, (start, end) in zip(tensors, pairwise(ends), strict=True)
        ]

    def _next_host(self) -> Tensor:
        self.turn = (self.turn + 1) % DEPTH
        if self._sent:
            self._sent[self.turn].synchronize()
        return self._host[self.turn]


def record(event: torch.cuda.Event, device: torch.device) -> None:
    """Record an event on the current stream of a device, such as cuda:0. An event that is told
    neither stream nor device asks the driver how many devices there are, each time."""
    event.record(torch.cuda.current_stream(device))


def _part(words: Tensor, start: int, end: int, like: Tensor) -> Tensor:
    """View the words from `start` to `end` as a tensor of the type and shape of `like`."""
    return words[start:end].view(like.dtype)[: like.numel()].view(like.shape)

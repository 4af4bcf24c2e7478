"""The way of a step's small host arrays to a fixed place on the device: one copy, no waiting."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

DEPTH = 2
"""Host buffers: as many as steps can be in flight."""


class Staging:
    """A device buffer of 32-bit words and the page-locked host buffers that feed it in turn.

    words = staging.begin(n)    the host's side of n words, to be filled
    staging.send(n)             copied behind all work that was queued before

    On a CPU a copy is done at once.
    """

    def __init__(self, num_words: int, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._host = [
            torch.empty(num_words, dtype=torch.int32, pin_memory=self._on_gpu) for _ in range(DEPTH)
        ]
        self._sent: list[torch.cuda.Event | None] = [None] * DEPTH
        self._turn = 0
        self.device_words = torch.zeros(num_words, dtype=torch.int32, device=device)

    def __len__(self) -> int:
        return len(self.device_words)

    def begin(self, num_words: int) -> NDArray[np.int32]:
        """Waits only for a buffer whose copy of DEPTH steps ago is not done yet."""
        self._turn = (self._turn + 1) % DEPTH
        sent = self._sent[self._turn]
        if sent is not None:
            sent.synchronize()
        words: NDArray[np.int32] = self._host[self._turn][:num_words].numpy()
        return words

    def send(self, num_words: int) -> Tensor:
        """Returns the device's side, int32 (num_words,)."""
        words = self.device_words[:num_words]
        words.copy_(self._host[self._turn][:num_words], non_blocking=True)
        if self._on_gpu:
            sent: torch.cuda.Event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            sent.record()
            self._sent[self._turn] = sent
        return words

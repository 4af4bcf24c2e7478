"""The logits of a model's ranks, step by step, for tests that compare them to the bit."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from weft.kernels import compiling
from weft.kernels.checksum import checksum
from weft.worker import spawn
from weft.worker.sampler import Sampler

AT_ONCE = 16
"""How many steps' checksums are written together, as each look at the device delays it."""


def watch(folder: str, monkeypatch: pytest.MonkeyPatch | None = None) -> None:
    """Let this process write a checksum of each step's logits to a file of its own. Logits of a
    rehearsal do not count: while kernels are compiled, nothing has written them."""
    found: list[Tensor] = []
    choose, told = Sampler.choose, compiling.tell_of_more
    path = Path(folder) / str(os.getpid())

    def watched(self: Sampler, logits_NV: Tensor, *args: Any) -> Tensor:
        found.append(checksum(logits_NV.contiguous().flatten()))
        if len(found) == AT_ONCE:
            with path.open("a") as file:
                file.writelines(f"{number}\n" for number in torch.stack(found).tolist())
            found.clear()
        return choose(self, logits_NV, *args)

    def forget() -> None:
        found.clear()
        path.unlink(missing_ok=True)
        told()

    monkeypatch = monkeypatch or pytest.MonkeyPatch()
    monkeypatch.setattr(Sampler, "choose", watched)
    monkeypatch.setattr(compiling, "tell_of_more", forget)


def watch_all(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Watch this process, and the ranks that it is going to start."""
    watch(str(folder), monkeypatch)
    command = f"import watched_ranks; watched_ranks.watch({str(folder)!r}); {spawn.COMMAND}"
    monkeypatch.setattr(spawn, "COMMAND", command)


def checksums(folder: Path) -> list[list[str]]:
    """What each rank has written."""
    return [file.read_text().split() for file in sorted(folder.iterdir())]

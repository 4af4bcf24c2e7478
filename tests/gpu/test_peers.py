"""Sums over ranks that write to each other's memory, on as many GPUs as there are."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")


@pytest.mark.timeout(240)
def test_sums_over_gpus(tmp_path: Path) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    from peer_cases import run_rank

    size = torch.cuda.device_count()
    torch.multiprocessing.spawn(run_rank, (size, str(tmp_path)), size)

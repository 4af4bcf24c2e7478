"""Drafts by a model's own head, on one GPU and on two: they save steps and change no token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_kinds import FAMILIES, KINDS, make_adapter, make_base
from mtp_heads import add_head, quiet_layers
from rank_cases import drafts

OPTIONS: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "device": "cuda",
    "block_size": 16,
    "num_blocks": 400,
    "max_num_seqs": 32,
}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Path]]:
    """A base whose head is right as far as its layers add nothing, and an adapter."""
    root = tmp_path_factory.mktemp("mtp")
    base = make_base(FAMILIES["qwen3.5"], root / "base")
    quiet_layers(base, 0.3)
    base.save_pretrained(root / "base")
    make_adapter(base, KINDS["LoRA"], root / "LoRA", "qwen3.5")
    add_head(root / "base", right=True)
    return root / "base", {"LoRA": root / "LoRA"}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_drafts_change_nothing(world: tuple[Path, dict[str, Path]], dtype: str) -> None:
    drafts(0, *world, {**OPTIONS, "dtype": dtype}, {})


@pytest.mark.timeout(240)
def test_drafts_over_two_gpus_change_nothing(world: tuple[Path, dict[str, Path]]) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    options = {"tensor_parallel_size": 2, "fully_sharded_loras": True}
    torch.multiprocessing.spawn(drafts, (*world, {**OPTIONS, "dtype": "float32"}, options))

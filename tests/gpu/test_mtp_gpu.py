"""Drafts by a model's own head on a GPU: they save steps and change no token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from adapter_kinds import FAMILIES, KINDS, make_adapter, make_base
from mtp_heads import add_head, quiet_layers

from weft import LLM, SamplingParams

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
    """Of greedy and drawn tokens, of the base and of an adapter, side by side."""
    prompts = [[(i * k) % 67 + 3 for i in range(10 + 3 * k)] for k in range(1, 7)]
    names = [(None, "LoRA")[k % 2] for k in range(6)]
    params = [
        SamplingParams(max_tokens=40, ignore_eos=True, seed=k, temperature=0.8 * (k // 3))
        for k in range(6)
    ]
    found = []
    for speculative in ("off", "mtp"):
        with LLM(*world, speculative=speculative, dtype=dtype, **OPTIONS) as llm:
            outputs = llm.generate(prompts, params, names)
            found.append([output.token_ids for output in outputs])
            stats = llm.stats()
    assert 0 < stats.right_guesses <= stats.guessed_tokens
    assert found[0] == found[1]

"""Families whose layers differ from each other, when memory is short: their requests are put off
and read anew, and get the tokens that they get alone."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from adapter_kinds import FAMILIES, KINDS, VOCAB, make_adapter, make_base
from engines import check_idle

from weft import LLM, SamplingParams

PARAMS = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
OPTIONS: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "dtype": "float32",
    "num_threads": 1,
    "block_size": 4,
}
NAMES = [None, "LoRA", None, "LoRA", "LoRA", None, "LoRA", None]


OTHERS = [
    pytest.param(f, marks=pytest.mark.exhaustive)
    for f in (
        "gemma3",
        "gemma4-moe",
        "gpt-oss",
        "deepseek-v3",
        "granite4",
        "nemotron-h",
        "llama4",
        "olmo-hybrid",
        "nemotron-h-latents",
    )
]


@pytest.mark.parametrize("family", ["gemma4", *OTHERS])
def test_preemption_changes_nothing(family: str, tmp_path: Path) -> None:
    base = make_base(FAMILIES[family], tmp_path / "base")
    make_adapter(base, KINDS["LoRA"], tmp_path / "LoRA", family)
    world = tmp_path / "base", {"LoRA": tmp_path / "LoRA"}
    rng = random.Random(0)
    prompts = [[rng.randrange(VOCAB) for _ in range(n)] for n in (30, 5, 17, 40, 9, 23, 12, 3)]
    with LLM(*world, num_blocks=256, **OPTIONS) as llm:
        asked = zip(prompts, NAMES, strict=True)
        alone = [llm.generate([p], PARAMS, [name])[0].token_ids for p, name in asked]
        assert len(set(map(tuple, alone))) == len(alone)
        again = llm.generate(prompts, PARAMS, NAMES)
        assert sum(output.num_cached_tokens for output in again) > 0
        assert [output.token_ids for output in again] == alone
    few = {"num_blocks": 40, "max_num_seqs": 5, "max_num_batched_tokens": 13}
    with LLM(*world, **few, **OPTIONS) as llm:
        together = llm.generate(prompts, PARAMS, NAMES)
        assert llm.stats().preemptions > 0
        check_idle(llm)
    assert [output.token_ids for output in together] == alone

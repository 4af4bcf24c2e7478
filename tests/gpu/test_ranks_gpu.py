"""A model over two GPUs: the golden workload's tokens, and the same logits on both to the bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from engines import MakeLLM
from golden_cases import NAMES, TIGHT, Case, Expected, assert_right, interleaved, run, workload
from tiny import tasks
from watched_ranks import checksums, watch_all

from weft import SamplingParams

__all__ = ["workload"]

NUM_STEPS = 1000
WAYS = pytest.mark.parametrize("both_halves", [False, True], ids=["one half", "both halves"])


@pytest.fixture(autouse=True)
def two_gpus() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")


@WAYS
def test_tokens_over_two_gpus(
    make_llm: MakeLLM, workload: list[tuple[Case, Expected]], both_halves: bool
) -> None:
    llm = make_llm(
        device="cuda", dtype="float32", tensor_parallel_size=2, fully_sharded_loras=both_halves
    )
    part = interleaved(workload)
    assert_right(run(llm, part), part)


@WAYS
@pytest.mark.timeout(300)
def test_ranks_have_the_same_bits(
    make_llm: MakeLLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, both_halves: bool
) -> None:
    """Over a thousand steps in which adapters come, are moved and go; sampled, so that no two
    requests are alike."""
    watch_all(tmp_path, monkeypatch)
    llm = make_llm(
        device="cuda",
        dtype="bfloat16",
        tensor_parallel_size=2,
        fully_sharded_loras=both_halves,
        **{**TIGHT, "max_num_batched_tokens": 64},
    )
    params = SamplingParams(max_tokens=40, temperature=1.0, seed=7, ignore_eos=True)
    for seed in range(100):
        names = [NAMES[(seed + i) % len(NAMES)] for i in range(12)]
        llm.generate(tasks.words(seed, 12), params, names)
        ranks = checksums(tmp_path)
        if len(ranks) == 2 and min(map(len, ranks)) >= NUM_STEPS:
            break
    assert llm.stats().adapter_evictions > 0
    first, second = ranks
    assert len(set(first)) > NUM_STEPS // 2
    assert first[:NUM_STEPS] == second[:NUM_STEPS]

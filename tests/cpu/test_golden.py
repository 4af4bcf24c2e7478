"""The golden workload: the example model and all its adapters against `peft` in float32.

Greedy decoding leaves one right answer, so token ids are compared for equality. That is sound
as long as no two tokens nearly tie: both sides compute in float32 and differ by the order of
their sums only, some 1e-5 of a logit here. The oracle asserts a margin far above that at every
position of the workload, so no position is left out.
"""

from __future__ import annotations

import pytest
from engines import MakeLLM
from golden_cases import (
    NAMES,
    TIGHT,
    WORD_TOKENS,
    WORDS_EACH,
    Case,
    Expected,
    assert_right,
    few,
    interleaved,
    run,
    workload,
)
from tiny import ADAPTERS, answer, ask

from weft import SamplingParams

__all__ = ["workload"]

BACKENDS = pytest.mark.parametrize(
    ("backend", "overlap"),
    [
        pytest.param("torch", False, marks=pytest.mark.exhaustive),
        ("torch", True),
        ("reference", False),
    ],
    ids=["torch-plain", "torch-overlap", "reference-plain"],
)
"""A loop knows nothing of the backend: the slow one runs in one of them."""
BATCHED = pytest.mark.parametrize(
    ("backend", "overlap"),
    [
        ("torch", True),
        pytest.param("torch", False, marks=pytest.mark.exhaustive),
        pytest.param("reference", False, marks=pytest.mark.exhaustive),
    ],
    ids=["torch-overlap", "torch-plain", "reference-plain"],
)
"""What a tight memory shows of the slow backend need not be shown without it."""
LOOPS = pytest.mark.parametrize(
    "overlap", [pytest.param(False, marks=pytest.mark.exhaustive), True], ids=["plain", "overlap"]
)


def test_the_workload_is_what_the_others_rely_on(workload: list[tuple[Case, Expected]]) -> None:
    assert [c.name for c, _ in workload[:: WORDS_EACH + 1]] == NAMES
    assert len(workload) == (WORDS_EACH + 1) * len(NAMES)
    assert min(len(c.prompt_ids) for c, _ in workload if not c.word) > 100


@BATCHED
def test_each_adapter_alone(
    make_llm: MakeLLM, workload: list[tuple[Case, Expected]], overlap: bool, backend: str
) -> None:
    llm = make_llm(overlap=overlap, lora_backend=backend)
    for name in NAMES:
        part = [(c, e) for c, e in few(workload, backend) if c.name == name]
        assert_right(run(llm, part), part)


@BATCHED
def test_mixed_batch(
    make_llm: MakeLLM, workload: list[tuple[Case, Expected]], overlap: bool, backend: str
) -> None:
    llm = make_llm(overlap=overlap, lora_backend=backend)
    part = interleaved(workload) if backend == "torch" else few(workload, backend)
    assert_right(run(llm, part), part)
    assert llm.stats().preemptions == llm.stats().adapter_evictions == 0


@BACKENDS
def test_tight_memory(
    make_llm: MakeLLM, workload: list[tuple[Case, Expected]], overlap: bool, backend: str
) -> None:
    """Chunks, preemptions, evictions, loads from disk and the prefix cache, all at once."""
    llm = make_llm(overlap=overlap, lora_backend=backend, **TIGHT)
    part = interleaved(workload) if backend == "torch" else few(workload, backend)
    assert_right(run(llm, part), part)
    stats = llm.stats()
    assert stats.preemptions > 0
    assert stats.adapter_evictions > 0
    assert stats.adapter_loads > len(ADAPTERS)
    assert stats.host_adapters == () and stats.tiers["disk"].hits > 0
    assert stats.steps > sum(len(c.prompt_ids) for c, _ in part) / TIGHT["max_num_batched_tokens"]


@LOOPS
def test_prefix_cache(
    make_llm: MakeLLM, workload: list[tuple[Case, Expected]], overlap: bool
) -> None:
    """The second run takes all full blocks from the first, each adapter its own."""
    llm = make_llm(overlap=overlap, block_size=4, num_blocks=2048)
    part = interleaved(workload)
    assert [o.num_cached_tokens for o in run(llm, part[: len(NAMES)])] == [0] * len(NAMES)
    run(llm, part)
    for output in run(llm, part):
        assert output.num_cached_tokens == (len(output.prompt_token_ids) - 1) // 4 * 4


def test_prefix_is_not_shared_across_adapters(
    make_llm: MakeLLM, workload: list[tuple[Case, Expected]]
) -> None:
    """One conversation, asked of every adapter in turn: nothing cached, own answers."""
    llm = make_llm(block_size=4)
    prompt = llm.tokenizer.chat(ask("hello"))
    for name in NAMES:
        params = SamplingParams(max_tokens=WORD_TOKENS, temperature=0.0)
        (output,) = llm.generate([prompt], params, name)
        assert (output.text, output.num_cached_tokens) == (answer(name, "hello"), 0)


@BATCHED
def test_first_logprobs(
    make_llm: MakeLLM, workload: list[tuple[Case, Expected]], overlap: bool, backend: str
) -> None:
    llm = make_llm(overlap=overlap, lora_backend=backend, max_num_batched_tokens=256)
    part = few(workload, backend)
    for output, (_, expected) in zip(run(llm, part, logprobs=5), part, strict=True):
        assert len(output.logprobs) == len(output.token_ids)
        first, want_V = output.logprobs[0], expected.first_logprobs_V
        assert first.rank == 1
        assert first.logprob == pytest.approx(float(want_V[output.token_ids[0]]), abs=1e-3)
        assert len(first.top) == 5
        assert first.top[0] == (output.token_ids[0], first.logprob)
        assert [v for _, v in first.top] == pytest.approx(want_V.topk(5).values.tolist(), abs=1e-3)
        for token, value in first.top:
            assert value == pytest.approx(float(want_V[token]), abs=1e-3)

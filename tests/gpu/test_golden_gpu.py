"""The golden workload on a GPU, with the kernels that serve there: the same tokens, and logits as
near as the dtype allows."""

from __future__ import annotations

import pytest
from engines import MakeLLM
from golden_cases import LOOPS, TIGHT, Case, Expected, assert_right, interleaved, run, workload

from weft import LLM, SamplingParams

__all__ = ["workload"]


@LOOPS
@pytest.mark.parametrize("options", [{}, TIGHT], ids=["roomy", "tight"])
def test_tokens(
    make_llm: MakeLLM,
    workload: list[tuple[Case, Expected]],
    overlap: bool,
    options: dict[str, float],
) -> None:
    llm = make_llm(
        device="cuda", dtype="float32", overlap=overlap, lora_backend="triton", **options
    )
    part = interleaved(workload)
    assert_right(run(llm, part), part)
    stats = llm.stats()
    assert bool(stats.adapter_evictions) == bool(options)
    assert options or not stats.preemptions


def test_logits_in_16_bits(make_llm: MakeLLM, workload: list[tuple[Case, Expected]]) -> None:
    """As far from fp32 as torch's operations over the same 16 bits are, within a factor that
    chance explains: both round in hundreds of places, not always to the same side."""
    off = {
        backend: _off(make_llm(device="cuda", dtype="bfloat16", lora_backend=backend), workload)
        for backend in ("torch", "triton")
    }
    assert 0 < off["triton"] <= 1.5 * off["torch"]


def _off(llm: LLM, workload: list[tuple[Case, Expected]]) -> float:
    """Root of the mean square by which log-probabilities of first tokens differ from fp32's."""
    cases = [case for case, _ in workload]
    params = SamplingParams(max_tokens=1, temperature=0.0, logprobs=5)
    outputs = llm.generate([c.prompt_ids for c in cases], params, [c.name for c in cases])
    squares = [
        (value - float(expected.first_logprobs_V[token])) ** 2
        for output, (_, expected) in zip(outputs, workload, strict=True)
        for token, value in output.logprobs[0].top
    ]
    return (sum(squares) / len(squares)) ** 0.5

"""A request that was cut anywhere, and goes on in another engine, gets the same tokens."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from continuing import run, tokens_of
from engines import MakeLLM
from tiny import ADAPTERS, BASE, ask

from weft import LLM, SamplingParams
from weft.core.requests import EngineRequest
from weft.core.sampling import StructuredOutputs
from weft.text import load_tokenizer
from weft.text.tokenizer import bad_token_ids, spellings

TOKENIZER = load_tokenizer(str(BASE))
PROMPT = TOKENIZER.chat(ask("hello"))
ACTIVATED = "activated"
LENGTH = 16

WILD = SamplingParams(temperature=2.0, ignore_eos=True, max_tokens=LENGTH, seed=5)
DASH, SEVEN = (TOKENIZER.encode(text)[-1] for text in "-7")

CASES: dict[str, tuple[SamplingParams, str | None]] = {
    "greedy": (SamplingParams(temperature=0.0, max_tokens=LENGTH), None),
    "seeded": (replace(WILD, top_k=40, top_p=0.9, min_p=0.001), None),
    "drawn": (replace(WILD, seed=None), None),
    "penalties": (
        replace(WILD, repetition_penalty=1.5, presence_penalty=1.0, frequency_penalty=1.5),
        None,
    ),
    "min_tokens": (
        replace(WILD, ignore_eos=False, min_tokens=9, stop_token_ids=tuple(range(40, 140))),
        None,
    ),
    "bad words": (
        replace(WILD, allowed_token_ids=(DASH, SEVEN), bad_words=("--", "7-7", "777")),
        None,
    ),
    "logit bias": (replace(WILD, logit_bias={DASH: 9.0, SEVEN: 9.0}), None),
    "form": (replace(WILD, structured_outputs=StructuredOutputs(regex="([a-c]x[0-9]){5}")), None),
    "log-probabilities": (replace(WILD, logprobs=2, prompt_logprobs=1), None),
    "adapter": (replace(WILD, temperature=1.0), "numeronym"),
    "greedy adapter": (SamplingParams(temperature=0.0, max_tokens=LENGTH), "numeronym"),
    "activated": (replace(WILD, temperature=1.0), ACTIVATED),
}


@pytest.fixture(scope="module")
def engines(make_module_llm: MakeLLM, tmp_path_factory: pytest.TempPathFactory) -> list[LLM]:
    """Two that differ in how they plan, with the same adapters."""
    activated = tmp_path_factory.mktemp("adapters") / ACTIVATED
    shutil.copytree(ADAPTERS["reverse"], activated)
    config = activated / "adapter_config.json"
    content = json.loads(config.read_text())
    config.write_text(json.dumps(content | {"alora_invocation_tokens": PROMPT[-3:-1]}))
    adapters: dict[str, Path] = {"numeronym": ADAPTERS["numeronym"], ACTIVATED: activated}
    other = {
        "overlap": False,
        "enable_prefix_caching": False,
        "max_num_batched_tokens": 64,
        "max_num_seqs": 12,
    }
    return [make_module_llm(adapters=adapters), make_module_llm(adapters=adapters, **other)]


@pytest.mark.parametrize("case", CASES)
def test_any_cut_gives_the_same_tokens(engines: list[LLM], case: str) -> None:
    params, adapter = CASES[case]
    first, second = engines
    refs = [llm._registry.resolve(adapter).ref if adapter else None for llm in engines]
    texts = spellings(params.bad_words)
    encoded = [TOKENIZER.encode(text, add_special_tokens=False) for text in texts]
    bad = bad_token_ids(params.bad_words, encoded)
    request = EngineRequest("whole", PROMPT, params, refs[0], bad, seed=params.seed or 77)
    (whole,) = run(first, [request]).values()
    tokens = tokens_of(whole)
    assert len(tokens) > 3
    rests = [
        replace(request, request_id=str(cut), adapter=refs[1], output_ids=tokens[:cut])
        for cut in range(len(tokens))
    ]
    for cut, rest in enumerate(run(second, rests).values()):
        assert tokens[:cut] + tokens_of(rest) == tokens, cut
        assert rest[-1].finish_reason == whole[-1].finish_reason
        assert rest[-1].stop_reason == whole[-1].stop_reason
        assert (rest[0].prompt_logprobs is None) == (params.prompt_logprobs is None or cut > 0)
        if params.logprobs is not None:
            assert all(len(e.logprobs or ()) == len(e.token_ids) for e in rest)

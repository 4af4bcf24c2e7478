"""Vectors of prompts, in batches with other adapters' tokens, against transformers and PEFT."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from engines import MakeLLM
from numpy.typing import NDArray
from peft import PeftModel
from tiny import ADAPTERS, BASE, ask
from transformers import AutoModelForCausalLM

from weft import SamplingParams
from weft.core.requests import EngineRequest, Pooling
from weft.text import load_tokenizer

TOKENIZER = load_tokenizer(str(BASE))
PARAMS = SamplingParams(max_tokens=8, temperature=0.0)
NAMES = [None, "reverse", "upper"]
WORDS = ["a", "weft", "a somewhat longer text, which takes more than one chunk of its prompt"]


@pytest.fixture(scope="module")
def oracle() -> PeftModel:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        base = AutoModelForCausalLM.from_pretrained(BASE, dtype=torch.float32)
        model = PeftModel.from_pretrained(base, ADAPTERS["reverse"], adapter_name="reverse")
        model.load_adapter(ADAPTERS["upper"], adapter_name="upper")
    return model.eval()


def hidden_states(model: PeftModel, name: str | None, ids: list[int]) -> NDArray[np.float32]:
    """(T, I), after the last norm."""
    with torch.no_grad():
        if name is None:
            with model.disable_adapter():
                return _run(model, ids)
        model.set_adapter(name)
        return _run(model, ids)


def _run(model: PeftModel, ids: list[int]) -> NDArray[np.float32]:
    states: NDArray[np.float32] = model.get_base_model().model(torch.tensor([ids]))[0][0].numpy()
    return states


def test_vectors_are_those_of_transformers_whoever_shares_the_batch(
    make_llm: MakeLLM, oracle: PeftModel
) -> None:
    llm = make_llm(
        adapters={name: ADAPTERS[name] for name in NAMES if name},
        max_num_batched_tokens=16,
        max_num_seqs=8,
    )
    requests: dict[str, tuple[EngineRequest, str | None, Pooling | None]] = {}
    poolings: list[Pooling | None] = [None, "last", "mean"]
    for name in NAMES:
        for word in WORDS:
            for pooling in poolings:
                ids = TOKENIZER.chat(ask(word)) if pooling is None else TOKENIZER.encode(word)
                key = f"{name} {word} {pooling}"
                params = PARAMS if pooling is None else SamplingParams(max_tokens=1)
                ref = llm._registry.resolve(name).ref if name else None
                request = EngineRequest(
                    key,
                    ids,
                    params,
                    llm._registry.resolve(name).ref if name else None,
                    seed=0,
                    pooling=pooling,
                )
                requests[key] = request, name, pooling
    found: dict[str, bytes] = {}
    tokens: dict[str, list[int]] = {}
    for event in llm._client.run([request for request, _, _ in requests.values()]):
        assert event.error is None
        tokens.setdefault(event.request_id, []).extend(event.token_ids)
        if event.vector is not None:
            found[event.request_id] = event.vector
    for key, (request, name, pooling) in requests.items():
        if pooling is None:
            assert tokens[key], key
            continue
        assert not tokens[key]
        states = hidden_states(oracle, name, request.prompt_ids)
        expected = states[-1] if pooling == "last" else states.mean(0)
        got = np.frombuffer(found[key], "<f4")
        np.testing.assert_allclose(got, expected, atol=1e-4, rtol=1e-4, err_msg=key)

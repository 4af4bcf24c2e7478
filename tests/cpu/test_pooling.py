"""Vectors of prompts, in batches with other adapters' tokens, against transformers and PEFT."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from adapter_kinds import FAMILIES, VOCAB, make_base, randomise
from engines import MakeLLM
from numpy.typing import NDArray
from peft import LoraConfig, PeftConfig, PeftModel, VeraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from tiny import ADAPTERS, BASE, ask
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification

from weft import SamplingParams
from weft.core.errors import AdapterInvalid, InvalidRequest
from weft.core.requests import EngineRequest, Pooling
from weft.serving.embedding import probabilities
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


@pytest.mark.parametrize(
    "options",
    [{}, pytest.param({"tensor_parallel_size": 2}, marks=pytest.mark.exhaustive)],
    ids=["one rank", "two ranks"],
)
def test_vectors_are_those_of_transformers_whoever_shares_the_batch(
    make_llm: MakeLLM, oracle: PeftModel, options: dict[str, int]
) -> None:
    llm = make_llm(
        adapters={name: ADAPTERS[name] for name in NAMES if name},
        max_num_batched_tokens=16,
        max_num_seqs=8,
        **options,
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
                request = EngineRequest(key, ids, params, ref, seed=0, pooling=pooling)
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


def _trained(folder: Path, task: str, model: Any, **options: Any) -> Any:
    """An adapter for some task, whose weights are drawn at random."""
    torch.manual_seed(5)
    config = LoraConfig(
        task_type=task, r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        adapted = get_peft_model(
            model.from_pretrained(BASE, dtype=torch.float32, **options), config
        )
    adapted.save_pretrained(folder)
    return adapted.eval()


def test_classifiers_and_adapters_for_features(make_llm: MakeLLM, tmp_path: Path) -> None:
    judge = _trained(
        tmp_path / "judge", "SEQ_CLS", AutoModelForSequenceClassification, num_labels=3
    )
    features = _trained(tmp_path / "features", "FEATURE_EXTRACTION", AutoModel)
    folders = {name: tmp_path / name for name in ("judge", "features")}
    llm = make_llm(adapters=folders)
    refs = {name: llm._registry.resolve(name).ref for name in folders}
    ids = TOKENIZER.encode("planet")
    requests = [
        EngineRequest(name, ids, PARAMS, ref, seed=0, pooling="last") for name, ref in refs.items()
    ]
    found = {e.request_id: e.vector or b"" for e in llm._client.run(requests)}
    vectors = {name: np.frombuffer(each, "<f4")[None] for name, each in found.items()}
    info = llm._registry.info("judge")
    assert info is not None and info.head is not None and info.head.num_labels == 3
    with torch.no_grad():
        expected = judge(torch.tensor([ids])).logits.softmax(-1).numpy()
        states = features(torch.tensor([ids])).last_hidden_state[:, -1].numpy()
    np.testing.assert_allclose(probabilities(info.head, vectors["judge"]), expected, atol=1e-4)
    np.testing.assert_allclose(vectors["features"], states, atol=1e-4, rtol=1e-4)
    with pytest.raises(InvalidRequest, match="classify"):
        llm.generate("planet", PARAMS, adapter="judge")


def test_a_base_that_was_saved_without_its_head(make_llm: MakeLLM, tmp_path: Path) -> None:
    base = make_base(FAMILIES["qwen3-tied"], tmp_path)
    states = {name.removeprefix("model."): each for name, each in base.state_dict().items()}
    del states["lm_head.weight"]
    save_file(states, tmp_path / "model.safetensors")
    with torch.no_grad():
        expected = base.model(torch.tensor([[3, 4]])).last_hidden_state[0, -1].numpy()
    llm = make_llm(tmp_path, {}, skip_tokenizer_init=True)
    (event,) = llm._client.run([EngineRequest("0", [3, 4], PARAMS, seed=0, pooling="last")])
    got = np.frombuffer(event.vector or b"", "<f4")
    np.testing.assert_allclose(got, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("family", "added", "config"),
    [
        ("llama", 0, VeraConfig("FEATURE_EXTRACTION", r=6, target_modules=["q_proj"])),
        ("llama", 1, LoraConfig("SEQ_CLS", target_modules=["q_proj"])),
        (
            "qwen3-tied",
            1,
            LoraConfig("SEQ_CLS", modules_to_save=["embed_tokens"], ensure_weight_tying=True),
        ),
    ],
    ids=["VeRA for features", "a classifier that adds a token", "a head that would be tied"],
)
def test_adapters_of_models_that_have_no_language_models_head(
    make_llm: MakeLLM, tmp_path: Path, family: str, added: int, config: PeftConfig
) -> None:
    make_base(FAMILIES[family], tmp_path / "base")
    classifies = config.task_type == "SEQ_CLS"
    kind = AutoModelForSequenceClassification if classifies else AutoModel
    base = kind.from_pretrained(tmp_path / "base", dtype=torch.float32)
    with warnings.catch_warnings(action="ignore"):
        base.resize_token_embeddings(VOCAB + added, mean_resizing=False)
        model = get_peft_model(base, config).eval()
        randomise(model)
        model.save_pretrained(tmp_path / "own")
    ids = [3, VOCAB + added - 1, 5]
    with torch.no_grad():
        inner = model.get_base_model().model if classifies else model
        expected = inner(input_ids=torch.tensor([ids])).last_hidden_state[:, -1].numpy()
    llm = make_llm(tmp_path / "base", {"own": tmp_path / "own"}, skip_tokenizer_init=True)
    ref = llm._registry.resolve("own").ref
    (event,) = llm._client.run([EngineRequest("0", ids, PARAMS, ref, seed=0, pooling="last")])
    got = np.frombuffer(event.vector or b"", "<f4")[None]
    np.testing.assert_allclose(got, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("weight", "param"),
    [
        (None, "task_type"),
        (torch.zeros(3, 7), "base_model.model.score.weight"),
        (torch.full((3, 128), torch.nan), "base_model.model.score.weight"),
    ],
)
def test_a_head_that_does_not_fit_is_refused(
    make_llm: MakeLLM, tmp_path: Path, weight: torch.Tensor | None, param: str
) -> None:
    shutil.copytree(ADAPTERS["upper"], tmp_path / "judge")
    config = tmp_path / "judge" / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"task_type": "SEQ_CLS"}))
    file = tmp_path / "judge" / "adapter_model.safetensors"
    tensors = load_file(file)
    if weight is not None:
        tensors["base_model.model.score.weight"] = weight
    save_file(tensors, file)
    with pytest.raises(AdapterInvalid) as refused:
        make_llm(adapters={"judge": tmp_path / "judge"})
    assert refused.value.param == param

"""PiSSA and the like: served on the base model that they left, refused by name on any other."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from load_image import load_image
from other_kinds import make_base
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora.config import CordaConfig
from peft.tuners.lora.corda import preprocess_corda
from transformers import LlamaForCausalLM

from weft import LLM, SamplingParams
from weft.checkpoint.base import BaseWeights
from weft.checkpoint.pack import AdapterImage
from weft.core.errors import AdapterInvalid
from weft.core.targets import Norm, Target, TargetTable

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
PROMPT = [5, 9, 33, 7, 1, 60]


class Weights(BaseWeights):
    """A base model's, in a serving dtype."""

    def __init__(self, model: LlamaForCausalLM, dtype: torch.dtype = torch.float32) -> None:
        self._model, self._dtype = model, dtype

    def weight(self, target: Target) -> torch.Tensor:
        weight = self._model.get_parameter(target.name + ".weight").detach().to(self._dtype)
        return weight.t() if target.kind == "embedding" else weight

    def bias(self, target: Target) -> torch.Tensor | None:
        return None

    def norm(self, norm: Norm) -> torch.Tensor:
        return self._model.get_parameter(norm.name + ".weight").detach().to(self._dtype)


def original() -> LlamaForCausalLM:
    """With weights whose singular values fall off, as trained ones do."""
    model = make_base()
    torch.manual_seed(1)
    for weight in model.parameters():
        if weight.dim() == 2:
            u, s, v = torch.linalg.svd(torch.randn(weight.shape), full_matrices=False)
            weight.data = u @ torch.diag(s * torch.linspace(1.0, 0.05, len(s))) @ v * 0.1
    return model


def adapted(
    init: str, method: str = "ipm", save_initial: Path | None = None, **options: object
) -> PeftModel:
    """Initialised by `init` on the original, then trained a little."""
    config = LoraConfig(
        task_type="CAUSAL_LM",
        init_lora_weights=init,
        corda_config=CordaConfig(corda_method=method) if init == "corda" else None,
        **{"r": 4, "lora_alpha": 6, "target_modules": ALL, **options},
    )
    base = original()
    with warnings.catch_warnings(action="ignore"):  # of other libraries, about each other
        if init == "corda":
            torch.manual_seed(2)
            ids = torch.randint(0, 64, (1, 512))
            preprocess_corda(base, config, lambda: base(ids))
        model = get_peft_model(base, config)
    if save_initial is not None:
        model.peft_config["default"].init_lora_weights = True
        model.save_pretrained(save_initial)
        model.peft_config["default"].init_lora_weights = init
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data += 0.1 * parameter.data.std() * torch.randn(parameter.shape)
    return model


INITS: dict[str, dict[str, object]] = {
    "pissa": {"init": "pissa"},
    "pissa, fast": {"init": "pissa_niter_4", "use_rslora": True},
    "pissa, one kind": {"init": "pissa", "target_modules": ["v_proj"], "r": 1},
    "olora": {"init": "olora"},
    "olora, scale 1": {"init": "olora", "lora_alpha": 4},
    "olora, scale 4": {"init": "olora", "lora_alpha": 16},
    "corda, ipm": {"init": "corda"},
}


@pytest.mark.parametrize("options", INITS.values(), ids=INITS.keys())
def test_served_on_the_residual_alone(tmp_path: Path, table: TargetTable, options: dict) -> None:
    model = adapted(**options)
    model.save_pretrained(tmp_path)
    residual = model.unload()

    def load(base: Weights | None) -> AdapterImage:
        return load_image(tmp_path, table, torch.float32, 16, base=base)

    assert not load(Weights(residual)).provisional
    assert torch.equal(load(Weights(residual, torch.bfloat16)).data, load(Weights(residual)).data)
    for other in (original(), make_base()):
        with pytest.raises(AdapterInvalid) as caught:
            load(Weights(other))
        assert caught.value.param == "init_lora_weights"
        assert "path_initial_model_for_weight_conversion" in caught.value.message
    assert load(None).provisional


@pytest.mark.parametrize("name", ["pissa", "olora", "corda, ipm"])
def test_served_on_the_original_once_converted(
    tmp_path: Path, table: TargetTable, name: str
) -> None:
    model = adapted(**INITS[name], save_initial=tmp_path / "initial")
    with warnings.catch_warnings(action="ignore"):
        model.save_pretrained(
            tmp_path / "converted", path_initial_model_for_weight_conversion=tmp_path / "initial"
        )
        merged = model.merge_and_unload()
    base = original()
    image = load_image(tmp_path / "converted", table, torch.float32, 16, base=Weights(base))
    seen = 0
    for target in table.targets:
        if image.layout.rank[target.slice]:
            expected = Weights(merged).weight(target)
            actual = Weights(base).weight(target) + delta(image, target, table)
            torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
            seen += 1
    assert seen == 14


def delta(image: AdapterImage, target: Target, table: TargetTable) -> torch.Tensor:
    group, rank = table.groups[target.group], image.layout.rank[target.slice]
    row = sum(image.layout.rank[s.slice] for s in group.slices if s.slice < target.slice)
    start = image.layout.a_offset[group.index] + row * target.in_features
    a = image.data[start : start + rank * target.in_features].view(rank, -1)
    start = image.layout.b_offset[target.slice]
    return image.data[start : start + rank * target.out_features].view(-1, rank) @ a


def test_the_server_knows_its_base(tmp_path: Path) -> None:
    model = adapted("pissa")
    model.save_pretrained(tmp_path / "adapter")
    original().save_pretrained(tmp_path / "original")
    want = model.eval()(torch.tensor([PROMPT])).logits[0, -1].log_softmax(-1)
    model.unload().save_pretrained(tmp_path / "residual")

    def make(base: str) -> LLM:
        options = {"num_threads": 1, "num_blocks": 64, "skip_tokenizer_init": True}
        return LLM(tmp_path / base, {"pissa": tmp_path / "adapter"}, **options)

    with pytest.raises(AdapterInvalid) as caught:
        make("original")
    assert caught.value.param == "init_lora_weights"
    with make("residual") as llm:
        params = SamplingParams(max_tokens=1, temperature=0.0, logprobs=5)
        [output] = llm.generate([PROMPT], params, adapter="pissa")
    assert output.logprobs is not None
    for token, logprob in output.logprobs[0].top:
        assert abs(want[token] - logprob) < 1e-3


def test_refused_where_the_span_was_lost(tmp_path: Path, table: TargetTable) -> None:
    model = adapted("corda", method="kpm")
    model.save_pretrained(tmp_path)
    for base in (model.unload(), original()):
        with pytest.raises(AdapterInvalid) as caught:
            load_image(tmp_path, table, torch.float32, 16, base=Weights(base))
        assert caught.value.param == "init_lora_weights"


@pytest.mark.parametrize("init", ["loftq", "lora_ga"])
def test_what_no_base_can_be_told_for_is_refused(
    tmp_path: Path, table: TargetTable, init: str
) -> None:
    model = adapted("pissa")
    model.peft_config["default"].init_lora_weights = init
    model.save_pretrained(tmp_path)
    with pytest.raises(AdapterInvalid) as caught:
        load_image(tmp_path, table, torch.float32, 16, base=Weights(model.unload()))
    assert caught.value.param == "init_lora_weights"

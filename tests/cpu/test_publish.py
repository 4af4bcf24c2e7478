"""Adapters from memory: what a trainer publishes, against `peft` itself in float32."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import MakeLLM
from peft import LoraConfig, PeftModel, get_peft_model_state_dict
from safetensors.torch import load_file, save
from tiny import ADAPTERS, BASE, ask
from transformers import AutoModelForCausalLM

from weft import LLM, SamplingParams
from weft.checkpoint.read import files_of
from weft.core.errors import AdapterConflict, AdapterInvalid, InvalidRequest
from weft.core.files import WEIGHTS_FILE
from weft.publishing import check, files_of_tensors

GREEDY = SamplingParams(max_tokens=24, temperature=0.0)
Tensors = dict[str, torch.Tensor]


class Trainer:
    """A peft model over the example base that changes its adapter's weights."""

    def __init__(self) -> None:
        base = AutoModelForCausalLM.from_pretrained(BASE, dtype=torch.float32)
        with warnings.catch_warnings():
            # peft asks transformers for names that are to go one day
            warnings.simplefilter("ignore", FutureWarning)
            self.model = PeftModel.from_pretrained(base, ADAPTERS["upper"], is_trainable=True)
        self.model.eval()

    @property
    def config(self) -> dict[str, object]:
        config: LoraConfig = self.model.peft_config["default"]
        return config.to_dict()

    @property
    def tensors(self) -> Tensors:
        return get_peft_model_state_dict(self.model, save_embedding_layers=False)

    def train(self, seed: int) -> None:
        """Something that changes all weights, in place."""
        generator = torch.Generator().manual_seed(seed)
        for parameter in self.model.parameters():
            if parameter.requires_grad:
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.data.add_(noise, alpha=0.05)

    @torch.inference_mode()
    def logprobs(self, ids: list[int]) -> torch.Tensor:
        """(len(ids), vocabulary), after each token."""
        return self.model(input_ids=torch.tensor([ids])).logits[0].float().log_softmax(-1)


@pytest.fixture(scope="module")
def trained() -> Trainer:
    return Trainer()


@pytest.fixture
def trainer(trained: Trainer) -> Trainer:
    """With the weights of "upper"."""
    tensors = load_file(ADAPTERS["upper"] / "adapter_model.safetensors")
    state = trained.model.state_dict()
    for name, tensor in tensors.items():
        base, _, kind = name.rpartition(".")
        state[f"{base}.default.{kind}"].copy_(tensor)
    return trained


def texts(llm: LLM, adapter: str | None, *words: str) -> list[str]:
    return [o.text for o in llm.chat([ask(word) for word in words], GREEDY, adapter)]


def assert_same(llm: LLM, trainer: Trainer, adapter: str) -> None:
    """The adapter's answers are peft's, token by token."""
    params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True, logprobs=0)
    for output in llm.chat([ask("hello"), ask("wonderful")], params, adapter):
        assert output.logprobs is not None
        logprobs = trainer.logprobs(output.prompt_token_ids + output.token_ids)
        first = len(output.prompt_token_ids) - 1
        for i, (token, ours) in enumerate(zip(output.token_ids, output.logprobs, strict=True)):
            theirs = logprobs[first + i]
            assert ours.logprob == pytest.approx(float(theirs[token]), abs=2e-3)
            assert float(theirs.max() - theirs[token]) < 1e-3, "not the best token"


def test_versions_under_one_name(make_llm: MakeLLM, trainer: Trainer) -> None:
    """Each version answers as peft does, and nothing of one is reused for another."""
    llm = make_llm(adapters={}, block_size=4)
    digests = []
    for number in range(1, 4):
        ref = llm.publish_adapter("policy", trainer.config, trainer.tensors)
        assert (ref.name, ref.version) == ("policy", number)
        digests.append(ref.digest)
        assert_same(llm, trainer, "policy")
        (again,) = llm.chat(ask("hello"), GREEDY, "policy")
        assert again.num_cached_tokens > 0 and again.adapter == ref
        stats = llm.stats()
        assert stats.host_adapters == stats.resident_adapters == (ref.digest,)
        trainer.train(number)
        assert texts(llm, "policy", "hello") == [again.text], "what was published is a copy"
    ref = llm.publish_adapter("policy", trainer.config, trainer.tensors)
    (fresh,) = llm.chat(ask("hello"), GREEDY, "policy")
    assert fresh.num_cached_tokens == 0, "a prefix of another version"
    assert len({*digests, ref.digest}) == 4


def test_before_the_first_step(make_llm: MakeLLM, trained: Trainer) -> None:
    """B is zero, and the answers are those of the base. Nothing at all is still refused."""
    llm = make_llm(adapters={})
    tensors = load_file(ADAPTERS["upper"] / "adapter_model.safetensors")
    for name, tensor in tensors.items():
        if "lora_B" in name:
            tensor.zero_()
    first = llm.publish_adapter("policy", trained.config, tensors)
    (output,) = llm.chat(ask("hello"), GREEDY, "policy")
    assert (output.adapter, output.text) == (first, "hello?")
    with pytest.raises(AdapterInvalid):
        llm.publish_adapter("policy", trained.config, {})
    assert texts(llm, "policy", "planet") == texts(llm, None, "planet")


def test_equal_content_is_one_version(make_llm: MakeLLM) -> None:
    """From a folder or from memory; what peft wrote has the digest of what it holds."""
    path = ADAPTERS["caesar"]
    config = json.loads((path / "adapter_config.json").read_text())
    tensors = load_file(path / "adapter_model.safetensors")
    llm = make_llm(adapters={"a": path})
    ref = llm.publish_adapter("a", config, tensors)
    assert ref.version == 1
    shuffled = dict(reversed(tensors.items()))
    assert llm.publish_adapter("b", dict(reversed(config.items())), shuffled).digest == ref.digest
    assert texts(llm, "a", "hello") == texts(llm, "b", "hello") == ["khoor"]
    for name in "ab":
        llm.unload_adapter(name)
    assert_empty(llm)


def test_what_peft_holds_is_what_it_saves(trainer: Trainer, tmp_path: Path) -> None:
    """Up to the order in which it happens to write sets."""
    trainer.model.save_pretrained(tmp_path, save_embedding_layers=False)
    files = files_of(trainer.config, trainer.tensors)
    assert files.weights == (tmp_path / "adapter_model.safetensors").read_bytes()
    held, saved = (
        {k: sorted(v) if isinstance(v, list) else v for k, v in json.loads(text).items()}
        for text in (files.config, (tmp_path / "adapter_config.json").read_text())
    )
    differing = {field for field in held.keys() | saved.keys() if held[field] != saved[field]}
    assert differing <= {"inference_mode"}


def assert_empty(llm: LLM) -> None:
    texts(llm, None, "hello")
    stats = llm.stats()
    assert (stats.host_adapters, stats.adapter_bytes, stats.adapters) == ((), 0, {})
    assert stats.pinned_adapters == ()


def test_many_versions_leave_memory_flat(make_llm: MakeLLM, trainer: Trainer) -> None:
    llm = make_llm(adapters={"other": ADAPTERS["caesar"]}, adapter_host_memory=4 << 20)
    sizes = set()
    for number in range(10):
        trainer.train(number)
        llm.publish_adapter("policy", trainer.config, trainer.tensors)
        llm.generate([1, 4, 9], SamplingParams(max_tokens=1), "policy")
        stats = llm.stats()
        assert len(stats.host_adapters) == 2 and len(stats.resident_adapters) == 1
        assert len(stats.adapters) == 1
        sizes.add(stats.adapter_bytes)
    assert len(sizes) == 1
    assert_same(llm, trainer, "policy")
    for name in ("policy", "other"):
        llm.unload_adapter(name)
    assert_empty(llm)


def test_evictions_do_not_lose_it(make_llm: MakeLLM, trainer: Trainer) -> None:
    """There is room for the largest on the device, and on the host besides."""
    names = ["caesar", "reverse", "sort"]
    llm = make_llm(
        adapters={name: ADAPTERS[name] for name in names},
        adapter_host_memory=500_000,
        adapter_memory=500_000,
    )
    trainer.train(5)
    ref = llm.publish_adapter("policy", trainer.config, trainer.tensors)
    words = ("hello", "wonderful")
    expected = texts(llm, "policy", *words)
    for name in names * 2:
        texts(llm, name, "hello")
        assert texts(llm, "policy", *words) == expected
    assert_same(llm, trainer, "policy")
    stats = llm.stats()
    assert stats.adapter_evictions > 0 and stats.tiers["host"].evictions > 0
    assert ref.digest in stats.host_adapters


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_any_floating_type(make_llm: MakeLLM, dtype: torch.dtype) -> None:
    path = ADAPTERS["caesar"]
    config = json.loads((path / "adapter_config.json").read_text())
    tensors = load_file(path / "adapter_model.safetensors")
    llm = make_llm(adapters={})
    views = {name: tensor.t().to(dtype).t() for name, tensor in tensors.items()}
    llm.publish_adapter("policy", config, views)
    assert texts(llm, "policy", "hello") == ["khoor"]


def test_tensors_that_share_memory() -> None:
    """As a trainer may hold its parameters: the same content as tensors of their own."""
    one = torch.ones(4, 8, requires_grad=True)
    own = {"a": one.detach().clone(), "b": one.detach().clone(), "c": torch.ones(8, 4)}
    assert files_of({}, {"a": one, "b": one, "c": one.t()}) == files_of({}, own)


def _change(**fields: object) -> Callable[[dict[str, Any], Tensors], None]:
    return lambda config, _: config.update(fields)


def _rename(config: dict[str, Any], tensors: Tensors) -> None:
    tensors["base_model.model.model.layers.9.mlp.up_proj.lora_A.weight"] = torch.ones(2, 2)


def _quantize(config: dict[str, Any], tensors: Tensors) -> None:
    with warnings.catch_warnings(action="ignore"):  # torch's, that these are to go one day
        tensors[FIRST] = torch.quantize_per_tensor(tensors[FIRST], 0.1, 0, torch.qint8)


def _name_oddly(config: dict[str, Any], tensors: Tensors) -> None:
    tensors["\ud800"] = torch.ones(2, 2)


def _spoil(value: object) -> Callable[[dict[str, Any], dict[str, Any]], None]:
    def spoil(_: dict[str, Any], tensors: dict[str, Any]) -> None:
        tensors[min(tensors)] = value

    return spoil


FIRST = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


@pytest.mark.parametrize(
    ("spoil", "param"),
    [
        (_change(use_dora=True), "use_dora"),
        (_change(r=1000), "r"),
        (_change(target_modules=object()), "target_modules"),
        (_change(lora_alpha=float("nan")), "lora_alpha"),
        (_rename, "base_model.model.model.layers.9.mlp.up_proj.lora_A.weight"),
        (_spoil(torch.ones(3, 3)), FIRST),
        (_spoil(torch.ones(4, 128, dtype=torch.int32)), FIRST),
        (_spoil(torch.full((4, 128), torch.inf)), FIRST),
        (_spoil(torch.ones(4, 128, device="meta")), FIRST),
        (_spoil(torch.ones(4, 128).to_sparse()), FIRST),
        (_spoil([1.0]), FIRST),
        (_quantize, FIRST),
        (_name_oddly, '"\\ud800"'),
    ],
)
def test_what_is_refused(
    make_llm: MakeLLM, spoil: Callable[[dict[str, Any], Any], None], param: str
) -> None:
    """With the same errors as files; the version that is there goes on."""
    path = ADAPTERS["caesar"]
    config = json.loads((path / "adapter_config.json").read_text())
    tensors = load_file(path / "adapter_model.safetensors")
    llm = make_llm(adapters={"policy": ADAPTERS["upper"]})
    before = llm.stats().host_adapters
    spoil(config, tensors)
    with pytest.raises(AdapterInvalid) as caught:
        llm.publish_adapter("policy", config, tensors)
    assert caught.value.param == param
    assert texts(llm, "policy", "hello") == ["HELLO"]
    assert llm.stats().host_adapters == before


def test_names_are_checked(make_llm: MakeLLM, trainer: Trainer) -> None:
    llm = make_llm(adapters={})
    names: list[Any] = ["", None, 5, b"x", ["x"]]
    for name in names:
        with pytest.raises(InvalidRequest):
            llm.publish_adapter(name, trainer.config, trainer.tensors)
        with pytest.raises(InvalidRequest):
            llm.load_adapter(name, ADAPTERS["upper"])
    for name in names[1:]:
        with pytest.raises(InvalidRequest):
            llm.unload_adapter(name)
    assert_empty(llm)


@pytest.mark.parametrize("other", [None, 5, [1]])
def test_what_is_no_mapping_is_refused(make_llm: MakeLLM, trainer: Trainer, other: Any) -> None:
    llm = make_llm(adapters={})
    for config, tensors, param in (
        (other, trainer.tensors, "config"),
        (trainer.config, other, "tensors"),
    ):
        with pytest.raises(AdapterInvalid) as caught:
            llm.publish_adapter("x", config, tensors)
        assert caught.value.param == param


# -- replacing and pinning, also from folders --------------------------------------------------


def test_replace(make_llm: MakeLLM) -> None:
    llm = make_llm(adapters={"x": ADAPTERS["upper"]})
    with pytest.raises(AdapterConflict):
        llm.load_adapter("x", ADAPTERS["reverse"])
    ref = llm.load_adapter("x", ADAPTERS["reverse"], replace=True)
    assert ref.version == 2
    assert texts(llm, "x", "hello") == ["olleh"]
    assert llm.stats().host_adapters == (ref.digest,)
    llm.unload_adapter("x")
    assert_empty(llm)


def test_a_pinned_adapter_stays(make_llm: MakeLLM, trainer: Trainer) -> None:
    """There is room for it and the largest of the others."""
    names = ["caesar", "reverse", "sort"]
    llm = make_llm(adapters={}, adapter_memory=900_000, adapter_host_memory=500_000)
    for name in names:
        llm.load_adapter(name, ADAPTERS[name])
    ref = llm.publish_adapter("policy", trainer.config, trainer.tensors, pinned=True)
    while not llm.stats().resident_adapters:
        assert texts(llm, None, "a", "b")
    assert llm.stats().resident_adapters == (ref.digest,), "nobody asked for it"
    for name in names * 2:
        texts(llm, name, "hello")
    assert texts(llm, "policy", "hello") == ["HELLO"]
    stats = llm.stats()
    assert stats.pinned_adapters == (ref.digest,)
    mine = stats.adapters[ref.digest]
    assert (mine.num_loads, mine.num_evictions) == (1, 0) and mine.last_load_s > 0
    assert sum(each.num_evictions for each in stats.adapters.values()) == stats.adapter_evictions
    assert stats.adapter_evictions > 0
    with pytest.raises(AdapterConflict) as caught:
        llm.load_adapter("caesar", ADAPTERS["caesar"], pinned=True)
    assert caught.value.param == "pinned"
    assert texts(llm, "caesar", "hello") == ["khoor"]
    again = llm.publish_adapter("policy", trainer.config, trainer.tensors)
    assert again == ref and llm.stats().pinned_adapters == ()


@pytest.mark.parametrize("policy", ["lru", "fifo"])
def test_eviction_policy(make_llm: MakeLLM, trainer: Trainer, policy: str) -> None:
    """There is room for two of three adapters that are equally large."""
    llm = make_llm(adapters={}, adapter_memory=800_000, eviction_policy=policy)
    digests = {}
    for name in "abc":
        trainer.train(ord(name))
        digests[name] = llm.publish_adapter(name, trainer.config, trainer.tensors).digest
    for name in ["a", "b", "a", None, "c"]:  # with the base, nobody holds an adapter any more
        texts(llm, name, "hello")
    stats = llm.stats().adapters
    evicted = [name for name, digest in digests.items() if stats[digest].num_evictions]
    assert evicted == (["a"] if policy == "fifo" else ["b"])


def test_numpys_tensors_make_the_same_files() -> None:
    """What a trainer publishes into a registry has one digest, whatever holds its tensors."""
    config = json.loads((ADAPTERS["upper"] / "adapter_config.json").read_text())
    tensors = load_file(ADAPTERS["upper"] / "adapter_model.safetensors")
    strided = {name: tensor.T.contiguous().T for name, tensor in tensors.items()}
    arrays = {name: tensor.float().numpy() for name, tensor in reversed(tensors.items())}
    files = files_of_tensors(config, strided)
    assert files == files_of_tensors(config, arrays)
    assert check(files, str(BASE)) == str(BASE)
    with pytest.raises(AdapterInvalid):
        check({**files, WEIGHTS_FILE: save({"x": torch.ones(1)})}, str(BASE))

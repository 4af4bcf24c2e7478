"""Every kind of adapter that is served, against `peft` itself, on random bases of every family.

`KINDS` is the table: how peft makes an adapter of that kind. Its weights are then random, it is
saved, and what peft computes after loading it again is the truth: all in float32.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import check_idle
from peft import (
    AdaLoraConfig,
    IA3Config,
    LoHaConfig,
    LoKrConfig,
    LoraConfig,
    PeftConfig,
    PeftModel,
    VeraConfig,
    get_peft_model,
)
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

from weft import LLM, SamplingParams
from weft.llm import RequestOutput

VOCAB, TOP, STEPS, BLOCK = 80, 20, 16, 4
TOLERANCE = 1e-3
"""Of a log-probability."""

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": None,
}
FAMILIES: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**SIZES, tie_word_embeddings=False),
    "llama-tied": LlamaConfig(**SIZES, tie_word_embeddings=True),
    "mistral": MistralConfig(**SIZES, sliding_window=24),
    "qwen2": Qwen2Config(**SIZES, tie_word_embeddings=False),
    "qwen3-tied": Qwen3Config(**SIZES, head_dim=16, tie_word_embeddings=True),
}
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
MLP = ["gate_proj", "up_proj", "down_proj"]
BIASED = ("qwen2",)
TIED = ("llama-tied", "qwen3-tied")
UNTIED = ("llama", "mistral", "qwen2")


@dataclass(frozen=True)
class Kind:
    """A way to adapt a model, as fields of a config."""

    options: Mapping[str, Any]
    families: tuple[str, ...] = tuple(FAMILIES)
    save: Mapping[str, Any] = field(default_factory=dict)
    """Options of save_pretrained."""
    change: Callable[[PeftModel], None] = lambda model: None
    """What happens to the model after its weights were made random."""
    config: type[PeftConfig] = LoraConfig


def lora(targets: list[str] | str = ATTENTION, **options: Any) -> dict[str, Any]:
    return {"r": 3, "lora_alpha": 4, "target_modules": targets, **options}


def change_embeddings(model: PeftModel) -> None:
    """As if the base's own had been trained too, some rows of them."""
    base = model.get_base_model()
    for module in (base.get_input_embeddings(), base.get_output_embeddings()):
        weight = getattr(module, "base_layer", module).weight
        weight.data[::3] += 0.1


def restore_most_rows(model: PeftModel) -> None:
    base = model.get_base_model()
    for module in (base.get_input_embeddings(), base.get_output_embeddings()):
        module.modules_to_save["default"].weight.data[5:] = module.original_module.weight[5:]


ENDS = ["embed_tokens", "lm_head"]
KINDS: dict[str, Kind] = {
    "LoRA": Kind(lora([*ATTENTION, *MLP], rank_pattern={"k_proj": 5}, use_rslora=True)),
    "LoRA of embedding and head": Kind(
        lora(["q_proj", *ENDS]), save={"save_embedding_layers": False}
    ),
    "DoRA": Kind(lora([*ATTENTION, *MLP], use_dora=True)),
    "DoRA of embedding and head": Kind(lora(["v_proj", *ENDS], use_dora=True)),
    "lora_bias": Kind(lora(["q_proj", "v_proj", "lm_head"], lora_bias=True)),
    "bias: lora_only": Kind(lora(["q_proj", "k_proj"], bias="lora_only"), BIASED),
    "bias: all": Kind(lora(["q_proj", "gate_proj"], bias="all"), BIASED),
    "bias: all and lora_bias": Kind(lora(["v_proj"], bias="all", lora_bias=True), BIASED),
    "DoRA and bias: all": Kind(lora(ATTENTION, bias="all", use_dora=True), BIASED),
    "modules_to_save: head": Kind(lora(modules_to_save=["lm_head"])),
    "modules_to_save: embedding": Kind(lora(modules_to_save=["embed_tokens"])),
    "modules_to_save: both": Kind(lora(modules_to_save=ENDS, use_dora=True)),
    "modules_to_save: a few rows": Kind(lora(modules_to_save=ENDS), change=restore_most_rows),
    "modules_to_save: norms": Kind(lora(modules_to_save=["norm"])),
    "modules_to_save: last norm": Kind(lora(modules_to_save=["model.norm"])),
    "trainable_token_indices": Kind(lora(trainable_token_indices=[7, 3, 79])),
    "trainable_token_indices of both": Kind(
        lora(trainable_token_indices={"embed_tokens": [5, 0], "lm_head": [1, 30, 2]})
    ),
    "trainable_token_indices of both alike": Kind(
        lora(trainable_token_indices={"embed_tokens": [5, 0], "lm_head": [5, 0]})
    ),
    "trainable_token_indices of the head": Kind(lora(trainable_token_indices={"lm_head": [1, 30]})),
    "trainable_token_indices and saved": Kind(
        lora(trainable_token_indices=[7, 3]), save={"save_embedding_layers": True}
    ),
    "embeddings saved along": Kind(lora(), save={"save_embedding_layers": True}),
    "embeddings trained and saved along": Kind(
        lora(), save={"save_embedding_layers": True}, change=change_embeddings
    ),
    "LoRA of embedding trained and saved along": Kind(
        lora(["q_proj", "embed_tokens"], use_dora=True),
        save={"save_embedding_layers": True},
        change=change_embeddings,
    ),
    "ensure_weight_tying: LoRA": Kind(lora(["q_proj", *ENDS], ensure_weight_tying=True)),
    "ensure_weight_tying: DoRA": Kind(
        lora(["q_proj", "embed_tokens"], ensure_weight_tying=True, use_dora=True)
    ),
    "ensure_weight_tying: modules_to_save": Kind(
        lora(modules_to_save=["embed_tokens"], ensure_weight_tying=True)
    ),
    "ensure_weight_tying: trainable_token_indices": Kind(
        lora(trainable_token_indices=[7, 3], ensure_weight_tying=True)
    ),
    "AdaLoRA": Kind(
        {"init_r": 4, "total_step": 9, "target_modules": [*ATTENTION, *MLP]}, config=AdaLoraConfig
    ),
    "VeRA": Kind({"r": 6, "target_modules": [*ATTENTION, *MLP]}, config=VeraConfig),
    "VeRA without its projections": Kind(
        {"r": 6, "target_modules": ["q_proj", "down_proj"], "save_projection": False},
        config=VeraConfig,
    ),
    "LoHa": Kind({"r": 3, "target_modules": [*ATTENTION, *MLP]}, config=LoHaConfig),
    "LoKr": Kind({"r": 2, "target_modules": [*ATTENTION, *MLP]}, config=LoKrConfig),
    "IA3": Kind(
        {"target_modules": [*ATTENTION, *MLP], "feedforward_modules": ["down_proj"]},
        config=IA3Config,
    ),
    "IA3 of the head": Kind(
        {"target_modules": ["lm_head"], "feedforward_modules": []},
        UNTIED,
        save={"save_embedding_layers": False},
        config=IA3Config,
    ),
    "fan_in_fan_out": Kind(lora(["q_proj", *ENDS], use_dora=True, fan_in_fan_out=True)),
}

# making them -------------------------------------------------------------------------------------


def make_base(config: PreTrainedConfig, folder: Path) -> PreTrainedModel:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.3)
        elif "norm" in name:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    model.save_pretrained(folder)
    return model


def make_adapter(base: PreTrainedModel, kind: Kind, folder: Path) -> PeftModel:
    """Saved to `folder`, and what peft loads from there."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft's, of what is tied, saved along and so on
        config = kind.config(task_type="CAUSAL_LM", **kind.options)
        model = get_peft_model(copy.deepcopy(base), config)
        randomise(model)
        kind.change(model)
        model.save_pretrained(folder, **kind.save)
        return PeftModel.from_pretrained(copy.deepcopy(base), folder).eval()


def randomise(model: PeftModel) -> None:
    """Change all that training would."""
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        if "magnitude" in name:
            parameter.data *= torch.empty_like(parameter).uniform_(0.5, 1.5)
        elif "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.15)
        else:
            parameter.data += 0.2 * torch.randn(parameter.shape)


class World:
    """An engine over one family's base, with an adapter of each kind, and the oracle's answers."""

    def __init__(self, family: str, folder: Path) -> None:
        base = make_base(FAMILIES[family], folder / "base")
        self.oracles: dict[str | None, torch.nn.Module] = {None: base}
        for name, kind in KINDS.items():
            if family in kind.families:
                self.oracles[name] = make_adapter(base, kind, folder / name)
        self.folder = folder
        self.llm = self.make_llm()
        generator = torch.Generator().manual_seed(2)
        self.prompts = {
            name: torch.randint(VOCAB, (length,), generator=generator).tolist()
            for name, length in zip(self.oracles, _lengths(), strict=False)
        }

    def make_llm(self, **options: object) -> LLM:
        return LLM(
            self.folder / "base",
            {name: self.folder / name for name in self.oracles if name is not None},
            skip_tokenizer_init=True,
            dtype="float32",
            num_threads=1,
            num_blocks=1024,
            block_size=BLOCK,
            max_num_seqs=48,
            max_num_batched_tokens=48,
            **options,
        )

    def answer(
        self, names: list[str | None], llm: LLM | None = None, steps: int = STEPS
    ) -> list[RequestOutput]:
        """Ask for all of these at once, and compare each answer with the oracle's."""
        prompts = [self.prompts[name] for name in names]
        params = SamplingParams(max_tokens=steps, temperature=0.0, logprobs=TOP)
        outputs = (llm or self.llm).generate(prompts, params, names)
        for name, output in zip(names, outputs, strict=True):
            assert len(output.token_ids) == steps
            self.check(name, output)
        return outputs

    def check(self, name: str | None, output: RequestOutput) -> None:
        prompt = output.prompt_token_ids
        want = self.logprobs(name, prompt + output.token_ids[:-1])[len(prompt) - 1 :]
        assert output.logprobs is not None
        for step, entry in enumerate(output.logprobs):
            chosen, highest = want[step, output.token_ids[step]], want[step].max()
            assert highest - chosen < TOLERANCE, f"{name}: another token at step {step}"
            for token, logprob in entry.top:
                assert abs(want[step, token] - logprob) < TOLERANCE, (name, step, token)

    @torch.inference_mode()
    def logprobs(self, name: str | None, ids: list[int]) -> torch.Tensor:
        """The oracle's, (len(ids), vocabulary)."""
        logits = self.oracles[name](input_ids=torch.tensor([ids])).logits[0]
        return logits.float().log_softmax(-1)


def _lengths() -> Iterator[int]:
    """Of prompts: shorter than a block, and longer than a step."""
    while True:
        yield from (37, 2, 61, 9, 20)


@pytest.fixture(scope="module", params=FAMILIES)
def world(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[World]:
    made = World(request.param, tmp_path_factory.mktemp("family"))
    yield made
    check_idle(made.llm)
    made.llm.close()


def test_the_kinds_differ(world: World) -> None:
    """Else the other tests would say nothing."""
    for name in world.oracles:
        ids = world.prompts[name]
        difference = (world.logprobs(name, ids) - world.logprobs(None, ids)).abs().max()
        assert name is None or difference > 20 * TOLERANCE, name


def test_alone(world: World) -> None:
    """Each by itself, and once more with what the prefix cache then holds."""
    for name in world.oracles:
        world.answer([name])
        (again,) = world.answer([name], steps=2)
        assert (again.num_cached_tokens > 0) == (len(world.prompts[name]) > BLOCK)


def test_mixed(world: World) -> None:
    """All kinds in the same steps, and the base between them."""
    names = list(world.oracles)
    world.answer([*names, None, *reversed(names)])


def test_the_reference_backend(world: World) -> None:
    names = [name for name in world.oracles if len(world.prompts[name]) < 12]
    with world.make_llm(lora_backend="reference") as llm:
        world.answer([*names, None], llm, steps=3)
        check_idle(llm)

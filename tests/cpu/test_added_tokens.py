"""Adapters with a vocabulary of their own: what `peft` computes on a base whose embeddings were
resized, in float32."""

from __future__ import annotations

import copy
import json
import math
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from adapter_kinds import FAMILIES, VOCAB, lora, make_base, randomise
from command_line import CliRunner
from engines import MakeLLM, check_idle
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from weft import LLM, SamplingParams
from weft.checkpoint.kinds import sort_adapter
from weft.checkpoint.read import files_of
from weft.cli.main import app
from weft.core.errors import AdapterInvalid, InvalidRequest
from weft.core.sampling import StructuredOutputs
from weft.llm import RequestOutput
from weft.models.blueprint import target_table
from weft.models.config import load_model_config

STEPS, TOP, TOLERANCE = 8, 20, 1e-3
ENDS = ["embed_tokens", "lm_head"]


def added(num: int) -> list[int]:
    return list(range(VOCAB, VOCAB + num))


KINDS: dict[str, tuple[int, dict[str, Any]]] = {
    "whole": (4, lora()),
    "many": (45, lora()),
    "LoRA of both": (3, lora(["q_proj", *ENDS])),
    "DoRA of both": (5, lora(["v_proj", *ENDS], use_dora=True)),
    "saved": (2, lora(modules_to_save=ENDS)),
    "trained tokens": (3, lora(trainable_token_indices=[7, *added(3)])),
    "trained tokens of both": (
        4,
        lora(trainable_token_indices={"embed_tokens": added(4), "lm_head": [5, *added(4)]}),
    ),
    "none": (0, lora()),
    "fewer": (-7, lora()),
    "fewer: LoRA of both": (-9, lora(["q_proj", *ENDS])),
    "fewer: DoRA of both": (-17, lora(["v_proj", *ENDS], use_dora=True)),
    "fewer: saved": (-45, lora(modules_to_save=ENDS)),
    "fewer: trained tokens": (-40, lora(trainable_token_indices=[7, 39])),
}
"""By name: how many tokens were added, or taken away, and the rest of peft's config."""


def load_base(folder: Path) -> PreTrainedModel:
    """peft looks into the folder to see whether the embeddings were resized."""
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    return model.eval()


def make_adapter(base: PreTrainedModel, name: str, folder: Path) -> PeftModel:
    num, options = KINDS[name]
    resized = copy.deepcopy(base)
    torch.manual_seed(abs(num))
    with warnings.catch_warnings(action="ignore"):
        resized.resize_token_embeddings(VOCAB + num, mean_resizing=False)
        model = get_peft_model(copy.deepcopy(resized), LoraConfig(task_type="CAUSAL_LM", **options))
        for module in (model.get_input_embeddings(), model.get_output_embeddings()):
            for weight in (p for p in module.parameters() if len(p) == VOCAB + num):
                torch.nn.init.normal_(weight.data[VOCAB:], std=0.4)
        randomise(model)
        model.save_pretrained(folder)
        return PeftModel.from_pretrained(resized, folder).eval()


class World:
    """An engine over one base, and the oracles' answers."""

    def __init__(self, family: str, folder: Path) -> None:
        make_base(FAMILIES[family], folder / "base")
        base = load_base(folder / "base")
        self.oracles: dict[str | None, torch.nn.Module] = {None: base}
        self.known: dict[tuple[str | None, tuple[int, ...]], torch.Tensor] = {}
        """What an oracle has said: several answers are the same."""
        for name in KINDS:
            self.oracles[name] = make_adapter(base, name, folder / name)
        self.folder = folder
        self.llm = self.make_llm()
        generator = torch.Generator().manual_seed(3)
        self.prompts = {}
        for name, length in zip(
            self.oracles, [9, 21, 6, 13, 2, 17, 5, 11, 8, 10, 3, 18, 9, 12], strict=True
        ):
            size = VOCAB + (KINDS[name][0] if name else 0)
            prompt = torch.randint(size, (length,), generator=generator).tolist()
            self.prompts[name] = [size - 1, *prompt]

    def make_llm(self, **options: object) -> LLM:
        return LLM(
            self.folder / "base",
            {name: self.folder / name for name in KINDS},
            skip_tokenizer_init=True,
            dtype="float32",
            num_threads=1,
            num_blocks=256,
            block_size=4,
            max_num_seqs=32,
            max_num_batched_tokens=32,
            **options,
        )

    def answer(self, names: list[str | None], **fields: Any) -> list[RequestOutput]:
        """Ask for all of these at once, and compare each answer with the oracle's."""
        params = SamplingParams(max_tokens=STEPS, temperature=0.0, logprobs=TOP, **fields)
        prompts = [self.prompts[name] for name in names]
        outputs = self.llm.generate(prompts, params, names)
        for name, output in zip(names, outputs, strict=True):
            assert len(output.token_ids) == STEPS
            self.check(name, output)
        return outputs

    def check(self, name: str | None, output: RequestOutput) -> None:
        prompt, entries = output.prompt_token_ids, list(output.logprobs or ())
        want = self.logprobs(name, prompt + output.token_ids[:-1])
        if output.prompt_logprobs is not None:
            entries = [e for e in output.prompt_logprobs if e is not None] + entries
        want = want[-len(entries) :]
        ids = (prompt + output.token_ids)[-len(entries) :]
        for step, (entry, token_id) in enumerate(zip(entries, ids, strict=True)):
            assert abs(want[step, token_id] - entry.logprob) < TOLERANCE, (name, step)
            if step >= len(entries) - STEPS:
                assert want[step].max() - want[step, token_id] < TOLERANCE, (name, step)
            for token, logprob in entry.top:
                assert abs(want[step, token] - logprob) < TOLERANCE, (name, step, token)

    @torch.inference_mode()
    def logprobs(self, name: str | None, ids: list[int]) -> torch.Tensor:
        asked = name, tuple(ids)
        if asked not in self.known:
            logits = self.oracles[name](input_ids=torch.tensor([ids])).logits[0]
            self.known[asked] = logits.float().log_softmax(-1)
        return self.known[asked]


@pytest.fixture(
    scope="module", params=["llama", pytest.param("llama-tied", marks=pytest.mark.exhaustive)]
)
def world(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[World]:
    made = World(request.param, tmp_path_factory.mktemp("family"))
    yield made
    check_idle(made.llm)
    made.llm.close()


def test_alone_and_again(world: World) -> None:
    """Each by itself, and once more with what the prefix cache then holds."""
    said: set[int] = set()
    for name in world.oracles:
        (first,) = world.answer([name])
        (again,) = world.answer([name])
        assert (again.num_cached_tokens > 0) == (len(first.prompt_token_ids) > 4)
        said |= set(first.token_ids)
    assert max(said) >= VOCAB, "no added token was the most likely"


def test_mixed(world: World) -> None:
    names = list(world.oracles)
    world.answer([*names, None, *reversed(names)])


def test_prompt_logprobs(world: World) -> None:
    names = ["whole", None, "LoRA of both", "none", "fewer", None, "fewer: LoRA of both"]
    world.answer(names, prompt_logprobs=3)


def test_the_base_is_left_alone(world: World) -> None:
    """Seeded draws through all filters, whoever is in the batch."""
    params = SamplingParams(
        max_tokens=STEPS, seed=5, temperature=1.3, top_k=60, top_p=0.97, min_p=0.01, logprobs=3,
        repetition_penalty=1.2, logit_bias={3: 2.0}, bad_words=(), min_tokens=2,
        stop_token_ids=(1,),
    )  # fmt: skip
    prompt = world.prompts[None]
    (alone,) = world.llm.generate([prompt], params)
    names = ["many", None, "saved", "none", "fewer"]
    mixed = world.llm.generate([world.prompts[n] for n in names], params, names)
    assert mixed[1].token_ids == alone.token_ids
    for got, want in zip(mixed[1].logprobs or (), alone.logprobs or (), strict=True):
        assert got.rank == want.rank
        assert [i for i, _ in got.top] == [i for i, _ in want.top]


def test_rules_about_tokens(world: World) -> None:
    """Each rule can name added tokens, and holds for them."""

    def ask(**fields: Any) -> list[int]:
        params = SamplingParams(**{"max_tokens": 4, "temperature": 0.0, **fields})
        together = world.llm.generate(
            [world.prompts["many"], world.prompts[None]], [params, SamplingParams(max_tokens=4)],
            ["many", None],
        )  # fmt: skip
        return together[0].token_ids

    last = VOCAB + 44
    assert ask(allowed_token_ids=(last,)) == [last] * 4
    assert ask(logit_bias={last: 100.0}) == [last] * 4
    assert ask(logit_bias={last: 100.0}, stop_token_ids=(last,)) == [last]
    assert ask(logit_bias={last: 100.0}, stop_token_ids=(last,), min_tokens=3)[3:] == [last]
    ids = ask(logit_bias={last: 30.0}, frequency_penalty=2.0, presence_penalty=2.0, max_tokens=40)
    assert 1 < ids.count(last) < 40
    ids = ask(temperature=5.0, top_k=124, seed=1, max_tokens=40)
    assert max(ids) >= VOCAB
    assert len(set(ask(temperature=9.0, seed=3, max_tokens=40))) > 20


@pytest.mark.parametrize("name", [None, "none", "whole", "fewer", "fewer: saved"])
def test_tokens_beyond_the_vocabulary_are_refused(world: World, name: str | None) -> None:
    beyond = VOCAB + (KINDS[name][0] if name else 0)
    for prompt, fields in (
        ([1, beyond], {}),
        ([1], {"logit_bias": {beyond: 1.0}}),
        ([1], {"stop_token_ids": (beyond,)}),
        ([1], {"allowed_token_ids": (beyond,)}),
    ):
        with pytest.raises(InvalidRequest, match=str(beyond) if fields else "prompt"):
            world.llm.generate([prompt], SamplingParams(max_tokens=1, **fields), name)


def test_tokens_that_are_missing_are_never_drawn(world: World) -> None:
    """By no row and with no filter, also where they were likely."""
    name, size = "fewer: trained tokens", VOCAB - 40
    prompts = [world.prompts[name], world.prompts[None]] * 3
    hot = {"temperature": 50.0, "max_tokens": 40, "logprobs": TOP, "prompt_logprobs": 0}
    fields: list[dict[str, Any]] = [
        {}, {"top_k": 60}, {"top_p": 0.999, "min_p": 0.0001},
        {"logit_bias": {0: 1.0}, "presence_penalty": 1.0, "bad_words": (), "stop_token_ids": (1,),
         "min_tokens": 30},
    ]  # fmt: skip
    for some in fields:
        params = SamplingParams(**hot, seed=3, **some)
        outputs = world.llm.generate(prompts, params, [name, None] * 3)
        for output in outputs[::2]:
            assert max(output.token_ids) < size
            entries = [*(output.logprobs or ()), *(output.prompt_logprobs or ())[1:]]
            assert all(math.isfinite(e.logprob) and e.rank <= size for e in entries)
            assert all(i < size and math.isfinite(p) for e in entries for i, p in e.top)
        assert max(i for output in outputs[1::2] for i in output.token_ids) >= size


def test_the_reference_backend(world: World) -> None:
    names = ["LoRA of both", None, "trained tokens", "fewer: DoRA of both", "fewer"]
    with world.make_llm(lora_backend="reference") as llm:
        params = SamplingParams(max_tokens=STEPS, temperature=0.0, logprobs=TOP)
        outputs = llm.generate([world.prompts[name] for name in names], params, names)
        for name, output in zip(names, outputs, strict=True):
            world.check(name, output)


def test_what_is_refused(world: World, tmp_path: Path) -> None:
    base = world.oracles[None]
    with pytest.raises(AdapterInvalid, match=r"45 more .* at most 44 .*--max-added-tokens") as info:
        world.make_llm(max_added_tokens=44)
    assert info.value.param == "base_model.model.model.embed_tokens.weight"
    more = copy.deepcopy(base)
    more.resize_token_embeddings(VOCAB + 3, mean_resizing=False)
    fewer = copy.deepcopy(base)
    fewer.resize_token_embeddings(VOCAB - 3)
    few = copy.deepcopy(base)
    few.resize_token_embeddings(3)
    tied = base.config.tie_word_embeddings
    for name, resized, options, param in (
        ("emb", more, lora(modules_to_save=["embed_tokens"]), "embed_tokens.weight"),
        ("gap", more, lora(trainable_token_indices=[VOCAB, VOCAB + 2]), "trainable_token_indices"),
        (
            "bias",
            more,
            lora(["q_proj", "lm_head"], lora_bias=True, trainable_token_indices=added(3)),
            "trainable_token_indices" if tied else "lora_B.bias",
        ),
        ("fewer", fewer, lora(modules_to_save=["embed_tokens"]), "embed_tokens.weight"),
        ("lora", fewer, lora(["lm_head"]), "lm_head.lora_B.weight"),
        ("few", few, lora(modules_to_save=ENDS), "embed_tokens.weight"),
    ):
        with warnings.catch_warnings(action="ignore"):
            model = get_peft_model(
                copy.deepcopy(resized), LoraConfig(task_type="CAUSAL_LM", **options)
            )
            randomise(model)
            model.save_pretrained(tmp_path / name, save_embedding_layers=name == "bias")
        with pytest.raises(AdapterInvalid) as refused:
            world.llm.load_adapter(name, tmp_path / name)
        assert (refused.value.param or "").endswith(param)


def test_what_is_served_is_so_without_the_bases_weights(world: World) -> None:
    for name in KINDS:
        args = ["check", str(world.folder / name), "--base", str(world.folder / "base")]
        checked = CliRunner().invoke(app, args)
        assert checked.exit_code == 0, checked.stdout


# a smaller vocabulary and the forms of answers ----------------------------------------------------


def shortened(folder: Path, size: int) -> Path:
    """An example adapter, as if its base's embeddings had `size` rows."""
    folder.mkdir()
    (folder / "adapter_config.json").write_bytes(
        (tiny.ADAPTERS["upper"] / "adapter_config.json").read_bytes()
    )
    base = load_file(tiny.BASE / "model.safetensors")
    tensors = load_file(tiny.ADAPTERS["upper"] / "adapter_model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        tensors[f"base_model.model.{name}"] = base[name][:size].clone()
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def test_forms_of_what_is_left(make_llm: MakeLLM, tmp_path: Path) -> None:
    """Token i + 6 is the byte i there: this vocabulary ends after the letter m."""
    llm = make_llm(adapters={"short": shortened(tmp_path / "short", 6 + ord("n"))})
    assert llm._registry.info("short").vocab_size == 6 + ord("n")

    def ask(regex: str, names: list[str | None]) -> list[RequestOutput]:
        form = StructuredOutputs(regex=regex)
        params = SamplingParams(temperature=9.0, seed=2, structured_outputs=form, max_tokens=30)
        return llm.generate(["abc"] * len(names), params, names)

    short, base = ask("[a-z]{20}", ["short", None])
    assert len(short.text) == 20 and set(short.text) <= set("abcdefghijklm")
    assert max(base.text) > "m"
    with pytest.raises(InvalidRequest, match="nothing that the tokenizer can write"):
        ask("[x-z]{4}", ["short"])


def test_no_form_without_eos(make_llm: MakeLLM, tmp_path: Path) -> None:
    for file in tiny.BASE.iterdir():
        (tmp_path / file.name).symlink_to(file)
    for name in ("config.json", "generation_config.json"):
        fields = json.loads((tiny.BASE / name).read_text()) | {"eos_token_id": 200}
        (tmp_path / name).unlink()
        (tmp_path / name).write_text(json.dumps(fields))
    llm = make_llm(tmp_path, {"short": shortened(tmp_path / "short", 200)})
    form = SamplingParams(structured_outputs=StructuredOutputs(regex="a"), max_tokens=4)
    with pytest.raises(InvalidRequest, match="lacks the model's EOS"):
        llm.generate("abc", form, "short")
    plain = SamplingParams(max_tokens=4, min_tokens=2, temperature=0)
    [short] = llm.generate("abc", plain, "short")
    assert len(short.token_ids) == 4
    assert llm.generate("abc", form)[0].text == "a"


def test_none_are_added_to_a_model_with_an_embedding_for_each_layer(tmp_path: Path) -> None:
    config = copy.deepcopy(FAMILIES["gemma4"])
    config.architectures = ["Gemma4ForCausalLM"]
    config.save_pretrained(tmp_path)
    table = target_table(load_model_config(tmp_path))
    name = "base_model.model.model.embed_tokens.weight"
    lora = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": ["q_proj"]}
    for more, refused in ((0, False), (3, True)):
        tensors = {name: torch.zeros(VOCAB + more, 32)}
        with pytest.raises(AdapterInvalid) as caught:
            sort_adapter(files_of(lora, tensors), table, 8)
        says = "embed_tokens_per_layer.weight has no rows" in str(caught.value)
        assert says == refused, "the other one lacks a LoRA"

"""Activated LoRA against `peft`: where it is active, and what of the base's cache it shares."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import check_idle
from load_image import load_image
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from weft import LLM, SamplingParams
from weft.checkpoint.pack import AdapterImage
from weft.core.errors import AdapterInvalid
from weft.llm import RequestOutput
from weft.models.blueprint import target_table
from weft.models.config import load_model_config
from weft.schedule.sequence import find_invocation

VOCAB, BLOCK, STEPS = 80, 4, 8
TOLERANCE = 1e-3
"""Of a log-probability."""
CALLS = {"judge": [70, 71, 72], "guard": [73], "twin": [70, 71, 72]}
"""Invocation sequences of the adapters; prompts hold these tokens nowhere else."""
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"]


def make_adapter(base: LlamaForCausalLM, folder: Path, seed: int, **options: Any) -> None:
    torch.manual_seed(seed)
    config = LoraConfig(
        task_type="CAUSAL_LM", r=3, lora_alpha=4, **{"target_modules": TARGETS, **options}
    )
    model = get_peft_model(base, config)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.15)
    model.save_pretrained(folder)
    model.unload()


class World:
    """An engine, its base and the same adapters in peft."""

    def __init__(self, folder: Path) -> None:
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=128,
            initializer_range=0.2,
            bos_token_id=None,
            eos_token_id=None,
            attn_implementation="eager",
        )
        base = LlamaForCausalLM(config).eval()
        base.save_pretrained(folder / "base")
        self.folder = folder
        self.names = (*CALLS, "plain")
        self.known: dict[tuple[str | None, tuple[int, ...], tuple[int, ...]], torch.Tensor] = {}
        """What peft has said: several answers are the same."""
        with warnings.catch_warnings(action="ignore"):  # peft's own
            for seed, (name, tokens) in enumerate(CALLS.items()):
                options = {"lora_bias": True} if name == "guard" else {}
                make_adapter(base, folder / name, seed, alora_invocation_tokens=tokens, **options)
            make_adapter(base, folder / "plain", 9)
            self.model = PeftModel.from_pretrained(base, folder / "plain", "plain").eval()
            for name in CALLS:
                self.model.load_adapter(folder / name, name)

    def serve(self, **options: Any) -> LLM:
        return LLM(
            self.folder / "base",
            {name: self.folder / name for name in self.names},
            skip_tokenizer_init=True,
            **{
                "dtype": "float32",
                "num_threads": 1,
                "num_blocks": 400,
                "block_size": BLOCK,
                "max_num_seqs": 16,
                "max_num_batched_tokens": 64,
                **options,
            },
        )

    @torch.inference_mode()
    def logprobs(self, name: str | None, prompt: list[int], output: list[int]) -> torch.Tensor:
        """peft's, of each token of the output: the adapter is active where it was in the prompt."""
        asked = name, tuple(prompt), tuple(output)
        if asked not in self.known:
            self.known[asked] = self._logprobs(name, prompt, output)
        return self.known[asked]

    def _logprobs(self, name: str | None, prompt: list[int], output: list[int]) -> torch.Tensor:
        ids = torch.tensor([prompt + output])
        if name is None:
            with self.model.disable_adapter():
                logits = self.model(input_ids=ids).logits
        else:
            self.model.set_adapter(name)
            offsets = {}
            if name in CALLS:
                start = find_invocation(prompt, CALLS[name])
                offsets = {"alora_offsets": [0 if start is None else ids.shape[1] - start]}
            logits = self.model(input_ids=ids, **offsets).logits
        return logits[0].log_softmax(-1)[len(prompt) - 1 : -1]

    def ask(
        self, llm: LLM, *asks: tuple[str | None, list[int]], **more: Any
    ) -> list[RequestOutput]:
        """All of them at once; each answer is compared with peft's."""
        params = SamplingParams(max_tokens=STEPS, temperature=0.0, logprobs=20, **more)
        names, prompts = zip(*asks, strict=True)
        outputs = llm.generate(list(prompts), params, list(names))
        for name, output in zip(names, outputs, strict=True):
            self.check(name, output)
        check_idle(llm)
        return outputs

    def check(self, name: str | None, output: RequestOutput) -> None:
        want = self.logprobs(name, output.prompt_token_ids, output.token_ids)
        assert output.logprobs is not None and len(output.logprobs) == STEPS
        for step, entry in enumerate(output.logprobs):
            assert want[step].max() - want[step, output.token_ids[step]] < TOLERANCE, (name, step)
            for token, logprob in entry.top:
                assert abs(want[step, token] - logprob) < TOLERANCE, (name, step, token)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("alora"))


@pytest.fixture
def llm(world: World) -> Iterator[LLM]:
    with world.serve() as made:
        yield made


def talk(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(70, (length,), generator=generator).tolist()


def called(name: str, before: int, after: int = 0) -> tuple[str, list[int]]:
    """A request that activates the adapter behind so many tokens of the one conversation."""
    return name, talk(before) + CALLS[name] + talk(after, 1)


PLACES = {
    "on a block's edge": (12, 5),
    "inside a block": (14, 6),
    "at the beginning": (0, 9),
    "at the end": (13, 0),
    "in a block by itself": (4, 0),
}


@pytest.mark.parametrize(("before", "after"), PLACES.values(), ids=PLACES)
@pytest.mark.parametrize("name", ["judge", "guard"])
def test_alone_and_once_more(world: World, llm: LLM, name: str, before: int, after: int) -> None:
    ask = called(name, before, after)
    world.ask(llm, ask)
    (again,) = world.ask(llm, ask)
    assert again.num_cached_tokens == (len(ask[1]) - 1) // BLOCK * BLOCK


def test_the_last_of_two_invocations_counts(world: World, llm: LLM) -> None:
    _, first = called("judge", 9, 3)
    (output,) = world.ask(llm, ("judge", first))
    turn = first + output.token_ids + talk(5, 2)
    world.ask(llm, ("judge", turn), ("judge", turn + CALLS["judge"] + talk(2, 3)))
    world.ask(llm, ("judge", CALLS["judge"] * 2), ("judge", [70, 71, *CALLS["judge"]]))


def test_without_an_invocation_it_is_the_base(world: World, llm: LLM) -> None:
    prompts = [talk(11), [*talk(9), 70, 71], [72], [70, 71]]
    outputs = world.ask(llm, *[("judge", prompt) for prompt in prompts])
    bases = world.ask(llm, *[(None, prompt) for prompt in prompts])
    assert [o.token_ids for o in outputs] == [o.token_ids for o in bases]
    assert bases[0].num_cached_tokens == 8


def test_what_the_output_says_activates_nothing(world: World, llm: LLM) -> None:
    params = SamplingParams(
        max_tokens=STEPS, temperature=0.0, logprobs=20, allowed_token_ids=(70, 71, 72)
    )
    (output,) = llm.generate([talk(9)], params, "judge")
    (base,) = llm.generate([talk(9)], params)
    assert output.token_ids == base.token_ids


def test_mixed_with_others_in_the_same_steps(world: World, llm: LLM) -> None:
    asks = [called(name, *place) for place in PLACES.values() for name in CALLS]
    asks += [("plain", talk(20)), (None, talk(17)), ("judge", talk(6))]
    world.ask(llm, *asks)
    world.ask(llm, *reversed(asks))


def test_reuse(world: World, llm: LLM) -> None:
    """What the base has computed serves all of them, and the base what they have."""
    world.ask(llm, (None, talk(30)))
    for name, before, cached in [("judge", 30, 28), ("guard", 28, 28), ("twin", 21, 20)]:
        (output,) = world.ask(llm, called(name, before, 3))
        assert output.num_cached_tokens == cached
    (plain,) = world.ask(llm, ("plain", talk(30)))
    assert plain.num_cached_tokens == 0
    world.ask(llm, called("judge", 40, 3))
    base, other, nowhere = world.ask(llm, (None, talk(45)), called("guard", 39), ("twin", talk(45)))
    assert base.num_cached_tokens == nowhere.num_cached_tokens == 40
    assert other.num_cached_tokens == 36


@pytest.mark.parametrize("budget", [16, 17])
def test_prompts_in_small_pieces_and_preemptions(world: World, budget: int) -> None:
    with world.serve(max_num_batched_tokens=budget, num_blocks=26) as llm:
        asks = [called(name, 10 + i, 8 + i) for i in range(5) for name in CALLS]
        world.ask(llm, *asks, (None, talk(33)))
        assert llm.stats().preemptions > 0


def test_prompt_logprobs(world: World, llm: LLM) -> None:
    name, prompt = called("judge", 14, 6)
    world.ask(llm, (None, talk(14)))
    (output,) = world.ask(llm, (name, prompt), prompt_logprobs=20)
    assert output.num_cached_tokens == 0 and output.prompt_logprobs is not None
    start = find_invocation(prompt, CALLS[name])
    for at in range(1, len(prompt)):
        known = prompt[:at]
        who = name if start is not None and at > start else None
        # The oracle is asked for each prefix with the adapter active from the same position.
        ids = torch.tensor([known])
        with torch.inference_mode():
            world.model.set_adapter(name)
            offset = max(at - 14, 0)
            want = world.model(input_ids=ids, alora_offsets=[offset]).logits[0, -1]
        entry = output.prompt_logprobs[at]
        assert entry is not None and (who is None) == (offset == 0)
        assert abs(want.log_softmax(-1)[prompt[at]] - entry.logprob) < TOLERANCE


# -- what is refused beside it ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("param", "value"),
    [
        ("use_dora", True),
        ("bias", "all"),
        ("modules_to_save", ["norm"]),
        ("trainable_token_indices", [3]),
        ("target_parameters", ["q_proj.weight"]),
    ],
)
def test_what_would_be_on_at_all_positions(
    world: World, tmp_path: Path, param: str, value: object
) -> None:
    with pytest.raises(AdapterInvalid, match="alora_invocation_tokens") as caught:
        load_changed(world, "judge", tmp_path, {param: value})
    assert caught.value.param == param


def test_of_the_embedding(world: World, tmp_path: Path) -> None:
    """peft adapts no embedding like that."""
    tensors = {
        "base_model.model.model.embed_tokens.lora_embedding_A": torch.ones(3, VOCAB),
        "base_model.model.model.embed_tokens.lora_embedding_B": torch.ones(32, 3),
    }
    with pytest.raises(AdapterInvalid, match="no embedding can be adapted"):
        load_changed(world, "judge", tmp_path, {"target_modules": ["embed_tokens"]}, tensors)


def test_weights_saved_along_must_be_the_base_s(world: World, llm: LLM, tmp_path: Path) -> None:
    name = "base_model.model.lm_head.base_layer.weight"
    tensors = load_file(world.folder / "judge" / "adapter_model.safetensors")
    assert name in tensors, "peft saves it along with the head"
    tensors[name][7] += 0.1
    change(world, "judge", tmp_path, {}, tensors)
    with pytest.raises(AdapterInvalid, match="differ from the base's"):
        llm.load_adapter("changed", tmp_path)


def test_an_empty_list_means_a_plain_lora(world: World, tmp_path: Path) -> None:
    image = load_changed(world, "judge", tmp_path, {"alora_invocation_tokens": []})
    assert image.invocation == ()
    assert load_changed(world, "judge", tmp_path, {}).invocation == (70, 71, 72)


def load_changed(
    world: World,
    name: str,
    folder: Path,
    fields: dict[str, Any],
    tensors: dict[str, torch.Tensor] | None = None,
) -> AdapterImage:
    change(world, name, folder, fields, tensors)
    table = target_table(load_model_config(str(world.folder / "base")))
    return load_image(folder, table, torch.float32, 64)


def change(
    world: World,
    name: str,
    folder: Path,
    fields: dict[str, Any],
    tensors: dict[str, torch.Tensor] | None = None,
) -> None:
    """A copy of an adapter with other fields, and other tensors if they are given."""
    config = json.loads((world.folder / name / "adapter_config.json").read_text())
    weights = load_file(world.folder / name / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(config | fields))
    save_file(tensors or weights, folder / "adapter_model.safetensors")

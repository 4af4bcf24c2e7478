"""Families whose layers differ from each other, served whole on a GPU, against `peft` on a CPU."""

from __future__ import annotations

import copy
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_kinds import CALL, FAMILIES, KINDS, MIXTURES, Kind, make_adapter, make_base
from engines import check_idle
from expert_adapters import EXPERT_ADAPTERS
from peft_oracle import check_output, oracle_logprobs
from transformers import PreTrainedConfig

from weft import LLM, SamplingParams
from weft.llm import RequestOutput

OPTIONS: dict[str, Any] = {"skip_tokenizer_init": True, "device": "cuda", "block_size": 16}
TIGHT = {"num_blocks": 16, "max_num_seqs": 5, "max_num_batched_tokens": 19}
LENGTHS = (37, 5, 70, 16, 9, 52, 23, 3)
PARAMS = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True, logprobs=5)
OF_EXPERTS = Kind({"lora_alpha": 8, **EXPERT_ADAPTERS["all"]}, MIXTURES)
ADAPTERS = {name: KINDS[name] for name in ("LoRA", "DoRA", "aLoRA")} | {"experts": OF_EXPERTS}


@dataclass(frozen=True)
class World:
    """A base in a folder, adapters by name in others, and what each is by `peft`."""

    base: Path
    adapters: dict[str, Path]
    oracles: dict[str | None, torch.nn.Module]


@pytest.fixture(
    scope="module",
    params=[
        "gemma4",
        "gemma4-moe",
        "gemma3",
        "glm4-moe",
        "deepseek-v2",
        "deepseek-v3",
        "glm4-moe-lite",
        "mistral4",
        "youtu",
        "apertus",
        "arcee",
        "nemotron-h",
        "gemma2",
        "hunyuan",
        "granite4",
        "lfm2",
        "lfm2-moe",
        "llama4",
        "minimax-m2",
        "gpt-oss",
        "qwen3.5",
        "qwen3.5-moe",
        "qwen3-next",
        "olmo-hybrid",
    ],
)
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> World:
    root, family = tmp_path_factory.mktemp("family"), request.param
    base = make_base(config_of(family), root / "base")
    kinds = {name: kind for name, kind in ADAPTERS.items() if family in kind.families}
    oracles: dict[str | None, torch.nn.Module] = {None: base}
    for name, kind in kinds.items():
        oracles[name] = make_adapter(base, kind, root / name, family)
    return World(root / "base", {name: root / name for name in kinds}, oracles)


def config_of(family: str) -> PreTrainedConfig:
    """Its experts are as wide as torch's grouped product needs them: whole units of 16 bytes."""
    config = copy.deepcopy(FAMILIES[family])
    if getattr(config, "moe_intermediate_size", None):
        config.moe_intermediate_size = 24
    elif config.model_type in ("minimax_m2", "llama4_text"):
        config.intermediate_size = 24
    return config


def ask(llm: LLM, world: World, seed: int) -> list[RequestOutput]:
    """One request of each length, whose adapters differ from one to the next."""
    rng = random.Random(seed)
    names = [list(world.oracles)[i % len(world.oracles)] for i in range(len(LENGTHS))]
    prompts = [[rng.randrange(1, CALL[0]) for _ in range(length)] for length in LENGTHS]
    for prompt, name in zip(prompts, names, strict=True):
        if name == "aLoRA":
            prompt[-1:] = [*CALL, prompt[-1]]
    return llm.generate(prompts, PARAMS, names)


def name_of(output: RequestOutput) -> str | None:
    return output.adapter.name if output.adapter else None


def call_of(output: RequestOutput) -> tuple[int, ...]:
    return CALL if name_of(output) == "aLoRA" else ()


def rounded_copy(oracle: torch.nn.Module) -> torch.nn.Module:
    copied = copy.deepcopy(oracle).to(torch.bfloat16)
    for module in copied.modules():
        if config := getattr(module, "config", None):
            # torch's grouped product in 16 bits needs wider experts than these.
            config._experts_implementation = "eager"
    return copied


def test_answers_are_the_oracle_s(world: World) -> None:
    """In one batch; again, when the prefix cache has the prompts; and when memory is short."""
    with LLM(world.base, world.adapters, dtype="float32", num_blocks=256, **OPTIONS) as llm:
        new, again = ask(llm, world, 0), ask(llm, world, 0)
        check_idle(llm)
    assert not any(output.num_cached_tokens for output in new)
    assert sum(output.num_cached_tokens for output in again) > 32
    with LLM(world.base, world.adapters, dtype="float32", **TIGHT, **OPTIONS) as llm:
        short = ask(llm, world, 0)
        assert llm.stats().preemptions > 0
        check_idle(llm)
    for output in (*new, *again, *short):
        check_output(world.oracles[name_of(output)], output, call_of(output))


def test_16_bits_are_as_near_as_torch_s(world: World) -> None:
    """Both round in hundreds of places, not always to the same side, which may change a token's
    experts."""
    with LLM(world.base, world.adapters, dtype="bfloat16", num_blocks=256, **OPTIONS) as llm:
        outputs = ask(llm, world, 1)
        check_idle(llm)
    in_16_bits = {name: rounded_copy(oracle) for name, oracle in world.oracles.items()}
    ours, torchs = [], []
    for output in outputs:
        name, call = name_of(output), call_of(output)
        asked = output.prompt_token_ids, output.token_ids, call
        exact = oracle_logprobs(world.oracles[name], *asked)
        rounded = oracle_logprobs(in_16_bits[name], *asked)
        for step, entry in enumerate(output.logprobs):
            for token, logprob in entry.top:
                ours.append(float(exact[step, token]) - logprob)
                torchs.append(float(exact[step, token] - rounded[step, token]))
    off, torch_off = (float(torch.tensor(x).square().mean().sqrt()) for x in (ours, torchs))
    print(f"off by {off:.4f}, torch by {torch_off:.4f}")
    assert 0 < off <= 3 * torch_off

"""Every kind of adapter that is served, against `peft` itself, on random bases of every family.

`adapter_kinds.KINDS` is the table: how peft makes an adapter of that kind. Its weights are then
random, it is saved, and what peft computes after loading it again is the truth: all in float32.
"""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fidelity_page
import pytest
import test_moe
import tiny
import torch
from adapter_kinds import (
    ATTENTION,
    FAMILIES,
    KINDS,
    MLP,
    VOCAB,
    lora,
    make_adapter,
    make_base,
)
from conftest import check_idle
from fidelity_page import REFUSED, SECTIONS, Refused
from peft import LoraConfig, get_peft_model
from serving import serving

from weft import LLM, SamplingParams
from weft.core.errors import AdapterInvalid
from weft.llm import RequestOutput

ROOT = Path(__file__).parents[1]
TOP, STEPS, BLOCK = 20, 16, 4
TOLERANCE = 1e-3
"""Of a log-probability."""

Oracles = dict[str | None, torch.nn.Module]
"""What peft makes of each adapter; of None, the base."""


class World:
    """An engine over the base in `folder`, with the adapters beside it, and their oracles."""

    def __init__(self, folder: Path, oracles: Oracles) -> None:
        self.folder = folder
        self.oracles = oracles
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


@contextmanager
def made_world(folder: Path, oracles: Oracles) -> Iterator[World]:
    made = World(folder, oracles)
    try:
        yield made
        check_idle(made.llm)
    finally:
        made.llm.close()


@pytest.fixture(scope="module", params=FAMILIES)
def world(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("family")
    base = make_base(FAMILIES[request.param], folder / "base")
    oracles: Oracles = {None: base}
    for name, kind in KINDS.items():
        if request.param in kind.families:
            oracles[name] = make_adapter(base, kind, folder / name)
    with made_world(folder, oracles) as made:
        yield made


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


RESIDUAL_INITS = ("pissa", "pissa_niter_4", "olora")


@pytest.mark.parametrize("init", RESIDUAL_INITS)
def test_on_the_residual_base(init: str, tmp_path: Path) -> None:
    """What is left of the original is another base model."""
    base, folder = make_base(FAMILIES["llama"], tmp_path / "original"), tmp_path / init
    kind = LoraConfig(task_type="CAUSAL_LM", **lora([*ATTENTION, *MLP], init_lora_weights=init))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of other libraries, about each other
        adapted = get_peft_model(base, kind)
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            parameter.data += 0.2 * parameter.data.std() * torch.randn(parameter.shape)
    adapted.save_pretrained(folder)
    residual = copy.deepcopy(adapted).unload()
    residual.save_pretrained(tmp_path / "base")
    with made_world(tmp_path, {None: residual, init: adapted.eval()}) as world:
        world.answer([init])
        world.answer([None, init])


# a server ----------------------------------------------------------------------------------------

SERVED = (
    "LoRA",
    "DoRA",
    "bias: all and lora_bias",
    "modules_to_save: both",
    "modules_to_save: norms",
    "trainable_token_indices",
    "AdaLoRA",
    "VeRA",
    "LoHa",
    "LoKr",
    "IA3",
)


def test_a_server_answers_as_the_api_does(tmp_path: Path) -> None:
    """Each kind by itself, then all of them at once and from the prefix cache."""
    base = make_base(FAMILIES["qwen2"], tmp_path / "base")
    names = {name: f"kind-{i}" for i, name in enumerate(SERVED)}
    oracles: Oracles = {None: base}
    for name, called in names.items():
        oracles[name] = make_adapter(base, KINDS[name], tmp_path / called)
    prompt = torch.randint(VOCAB, (22,), generator=torch.Generator().manual_seed(3)).tolist()
    flags = ("--skip-tokenizer-init", "--dtype", "float32", "--block-size", str(BLOCK))
    folders = {called: tmp_path / called for called in names.values()}
    with serving(tmp_path, *flags, adapters=folders, model=tmp_path / "base") as server:

        def ask(name: str | None) -> dict[str, Any]:
            fields = {"max_tokens": STEPS, "temperature": 0.0, "logprobs": 5}
            model = "base" if name is None else names[name]
            done = server.post(
                "/v1/completions", model=model, prompt=prompt, return_token_ids=True, **fields
            )
            assert done.status_code == 200, done.text
            return done.json()["choices"][0]

        for name in oracles:
            check_choice(oracles[name], prompt, ask(name))
        with ThreadPoolExecutor(len(oracles)) as threads:
            for name, choice in zip(oracles, threads.map(ask, oracles), strict=True):
                check_choice(oracles[name], prompt, choice)


@torch.inference_mode()
def check_choice(oracle: torch.nn.Module, prompt: list[int], choice: dict[str, Any]) -> None:
    """Greedy tokens, and log-probabilities of the first step."""
    ids = choice["token_ids"]
    assert len(ids) == STEPS
    logits = oracle(input_ids=torch.tensor([prompt + ids[:-1]])).logits[0, len(prompt) - 1 :]
    want = logits.float().log_softmax(-1)
    assert (want.amax(-1) - want[range(STEPS), ids]).max() < TOLERANCE
    for shown, logprob in choice["logprobs"]["top_logprobs"][0].items():
        assert abs(want[0, int(shown.removeprefix("token_id:"))] - logprob) < TOLERANCE


# docs/fidelity.md --------------------------------------------------------------------------------


def test_the_page_is_current() -> None:
    """If not: python tests/fidelity_page.py > docs/fidelity.md"""
    assert (ROOT / "docs" / "fidelity.md").read_text() == fidelity_page.page()


def test_what_the_page_calls_exact_is_compared() -> None:
    compared = {*KINDS, *(f"residual: {init}" for init in RESIDUAL_INITS)}
    compared |= {f"experts: {name}" for name in [*test_moe.ADAPTERS, "single"]}
    shown = {by for rows in SECTIONS.values() for row in rows for by in row.shown_by}
    elsewhere = {by for by in shown if "::" in by}
    assert shown - elsewhere == compared
    for by in elsewhere:
        file, _, name = by.partition("::")
        assert f"def {name}(" in (ROOT / "tests" / file).read_text(), by


@pytest.fixture(scope="module")
def tiny_llm() -> Iterator[LLM]:
    with LLM(tiny.BASE, {}, num_threads=1, num_blocks=64) as llm:
        yield llm


@pytest.mark.parametrize("row", REFUSED, ids=lambda row: row.name)
def test_what_the_page_calls_refused_is(row: Refused, tiny_llm: LLM, tmp_path: Path) -> None:
    good = tiny.ADAPTERS["reverse"]
    config = json.loads((good / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps(config | row.changes))
    weights = "adapter_model.safetensors"
    (tmp_path / weights).symlink_to(good / weights)
    with pytest.raises(AdapterInvalid) as caught:
        tiny_llm.load_adapter("refused", tmp_path)
    (changed,) = row.changes
    assert caught.value.param == changed
    assert row.field in (changed, "its name")

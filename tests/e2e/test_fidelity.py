"""Every kind of adapter that is served, against `peft` itself, on random bases of every family.

`adapter_kinds.KINDS` is the table: how peft makes an adapter of that kind. Its weights are then
random, it is saved, and what peft computes after loading it again is the truth: all in float32.
"""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import fidelity_page
import httpx
import pytest
import tiny
import torch
from adapter_kinds import (
    ALWAYS,
    ATTENTION,
    CONVERTED,
    FAMILIES,
    KINDS,
    LINEAR,
    MIXTURES,
    MLP,
    SERVED,
    UNTIED,
    VOCAB,
    Kind,
    lora,
    make_adapter,
    make_base,
)
from engines import check_idle
from expert_adapters import EXPERT_ADAPTERS, save_single
from fidelity_page import REFUSED, SECTIONS, Refused
from patience import PATIENCE_S
from peft import LoraConfig, PeftModel, get_peft_model
from peft_oracle import TOLERANCE, check_output, oracle_logprobs
from serving import serving_here
from transformers import PreTrainedModel

from weft import LLM, SamplingParams
from weft.core.errors import AdapterInvalid

ROOT = Path(__file__).parents[2]
STEPS, TOP, BLOCK = 8, 5, 4
EXPERTS = {
    f"experts: {name}": Kind({"lora_alpha": 8, **options}, MIXTURES)
    for name, options in EXPERT_ADAPTERS.items()
}
SINGLE, SUM = "experts: single", "a weighted sum"
PARTS = {"gaussian": 1.25, "alpha_pattern": -0.5, "exclude_modules": 0.7}
"""Of the sum: kinds and their scales. peft takes the patterns of the first for all of it."""
EVERYWHERE = (*PARTS, "LoRA", "DoRA")
"""Kinds that are compared on every family."""

Ask = dict[str, Any]
"""The fields of a request that name its model."""


@dataclass(frozen=True)
class Subject:
    """What is asked for, and what peft computes for it."""

    ask: Ask
    oracle: torch.nn.Module
    kind: Kind | None = None
    known: dict[tuple[int, ...], torch.Tensor] = field(default_factory=dict)
    """What the oracle said, by prompt and continuation: several answers are the same."""

    def logprobs(self, prompt: list[int], ids: list[int]) -> torch.Tensor:
        """The oracle's, of each token that follows the prompt: (len(ids), vocabulary)."""
        asked = len(prompt), *prompt, *ids[:-1]
        if (found := self.known.get(asked)) is not None:
            return found
        call = self.kind.invocation if self.kind is not None else ()
        self.known[asked] = found = oracle_logprobs(self.oracle, prompt, ids, call)
        return found

    def check(self, prompt: list[int], choice: dict[str, Any]) -> None:
        """Greedy tokens and their log-probabilities, and all that are told of the first step's."""
        ids = choice["token_ids"]
        assert len(ids) == STEPS
        want, told = self.logprobs(prompt, ids), choice["logprobs"]
        chosen = want[range(STEPS), ids]
        assert (want.amax(-1) - chosen).max() < TOLERANCE
        assert (chosen - torch.tensor(told["token_logprobs"])).abs().max() < TOLERANCE
        assert len(told["top_logprobs"][0]) >= TOP
        for shown, logprob in told["top_logprobs"][0].items():
            assert abs(want[0, int(shown.removeprefix("token_id:"))] - logprob) < TOLERANCE


class World:
    """A server over a base of one family with an adapter of each kind, loaded over HTTP."""

    def __init__(
        self,
        client: httpx.Client,
        family: str,
        root: Path,
        base: PreTrainedModel,
        kinds: Mapping[str, Kind],
    ) -> None:
        """`root`: the folder with the base's, below which the server reads adapters. `kinds`: those
        in PARTS, and others."""
        self.client, self.family, self.root = client, family, root
        self.subjects = {"base": Subject({"model": "base"}, base)}
        for name, kind in kinds.items():
            if family in kind.families:
                folder = root / f"kind-{len(self.subjects)}"
                self._load(name, folder, make_adapter(base, kind, folder, family), kind)
        if family in CONVERTED:
            folder = root / "single"
            save_single(root / "base", folder, family)
            model = PeftModel.from_pretrained(copy.deepcopy(base), folder)
            self._load(SINGLE, folder, model.eval())
        adapters = [{"name": self.subjects[n].ask["model"], "scale": s} for n, s in PARTS.items()]
        self.subjects[SUM] = Subject({"model": "base", "adapters": adapters}, self._sum(base))

    def _load(self, name: str, folder: Path, oracle: PeftModel, kind: Kind | None = None) -> None:
        body = {"lora_name": folder.name, "lora_path": folder.name}
        done = self.client.post("/v1/load_lora_adapter", json=body)
        assert done.status_code == 200, (name, done.text)
        self.subjects[name] = Subject({"model": folder.name}, oracle, kind)

    def _sum(self, base: PreTrainedModel) -> PeftModel:
        folders = [self.subjects[name].ask["model"] for name in PARTS]
        first = self.root / folders[0]
        model = PeftModel.from_pretrained(copy.deepcopy(base), first, folders[0])
        for folder in folders[1:]:
            model.load_adapter(self.root / folder, folder)
        model.add_weighted_adapter(folders, list(PARTS.values()), "sum", combination_type="cat")
        model.set_adapter("sum")
        return model.eval()

    def prompt(self, name: str, seed: int) -> list[int]:
        """Of any length: shorter than a block, and longer than a step."""
        index, kind = list(self.subjects).index(name), self.subjects[name].kind
        generator = torch.Generator().manual_seed(100 * seed + index)
        size = VOCAB + (kind.resize if kind is not None else 0)
        prompt = torch.randint(size, ((37, 2, 61, 9, 20)[index % 5],), generator=generator).tolist()
        prompt[0] = size - 1
        if kind is not None and kind.invocation:
            prompt = [min(token, kind.invocation[0] - 1) for token in prompt]
            prompt = [*prompt, *kind.invocation, 5]
        return prompt

    def answer(self, name: str, prompt: list[int]) -> dict[str, Any]:
        """One answer, compared with the oracle's."""
        body = {"max_tokens": STEPS, "temperature": 0.0, "logprobs": TOP, "return_token_ids": True}
        asked = {**self.subjects[name].ask, "prompt": prompt, **body}
        done = self.client.post("/v1/completions", json=asked)
        assert done.status_code == 200, (name, done.text)
        found: dict[str, Any] = done.json()
        return found


def dealt(family: str) -> dict[str, Kind]:
    """The kinds that are compared on this family whenever tests are run. Each is dealt to one; what
    changes embedding or head, to one where they are tied and to one where they are not. A few kinds
    are for all."""
    found = {name: KINDS[name] for name in EVERYWHERE}
    for index, (name, kind) in enumerate((KINDS | EXPERTS).items()):
        on = [name for name in ALWAYS if name in kind.families]
        tied, untied = [n for n in on if n not in UNTIED], [n for n in on if n in UNTIED]
        for group in [tied, untied] if kind.changes_ends else [on]:
            if group and group[index % len(group)] == family:
                found[name] = kind
    return found


@pytest.fixture(
    scope="module",
    params=[
        *(pytest.param((name, dealt(name)), id=name) for name in ALWAYS),
        *(
            pytest.param((name, KINDS | EXPERTS), id=f"{name}: all", marks=pytest.mark.exhaustive)
            for name in SERVED
        ),
    ],
)
def world(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[World]:
    family, kinds = request.param
    folder = tmp_path_factory.mktemp("family")
    base = make_base(FAMILIES[family], folder / "base")
    memory = {"kv_cache_memory": 64 << 20, "adapter_memory": 64 << 20}
    with (
        serving_here(folder, folder / "base", dtype="float32", block_size=BLOCK, **memory) as url,
        httpx.Client(base_url=url, timeout=PATIENCE_S) as client,
        warnings.catch_warnings(action="ignore"),  # peft's, of what is not there in some family
    ):
        yield World(client, family, folder, base, kinds)


def test_every_kind_is_dealt() -> None:
    """So no kind needs `make exhaustive` to be compared at all."""
    assert set().union(*map(dealt, ALWAYS)) == {*KINDS, *EXPERTS}


def test_the_kinds_differ(world: World) -> None:
    """Else the other test would say nothing."""
    base = world.subjects["base"]
    for name, subject in world.subjects.items():
        prompt = world.prompt(name, 1)
        known = [min(token, VOCAB - 1) for token in prompt]
        got, plain = subject.logprobs(prompt, [0])[0], base.logprobs(known, [0])[0]
        if len(got) == len(plain):
            assert name == "base" or (got - plain).abs().max() > 5 * TOLERANCE, name


def test_a_server_answers_as_peft_does(world: World) -> None:
    """Each kind alone. Then all of them at once: with the same prompts, which the prefix cache
    holds by now, and with others that it does not."""
    asks = {name: world.prompt(name, 1) for name in world.subjects}
    for name, prompt in asks.items():
        check(world, name, prompt, world.answer(name, prompt), cached=False)
    again = [(name, prompt, True) for name, prompt in asks.items()]
    others = [(name, world.prompt(name, 2), False) for name in asks]
    mixed = [*again, *others]
    with ThreadPoolExecutor(len(mixed)) as threads:
        answers = threads.map(lambda ask: world.answer(*ask[:2]), mixed)
        for (name, prompt, cached), answer in zip(mixed, answers, strict=True):
            check(world, name, prompt, answer, cached)


def check(world: World, name: str, prompt: list[int], answer: dict[str, Any], cached: bool) -> None:
    try:
        world.subjects[name].check(prompt, answer["choices"][0])
        found = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        known = (len(prompt) - 1) // BLOCK * BLOCK
        worth = known >= 2 * BLOCK or world.family not in LINEAR  # of shorter ones no state is kept
        assert found == (known if cached and worth else 0)
    except AssertionError as error:
        raise AssertionError(f"{name} of {world.family}: {error}") from error


# the Python API -----------------------------------------------------------------------------------


@contextmanager
def engine(base: Path, adapters: dict[str, Path], **options: object) -> Iterator[LLM]:
    with LLM(
        base,
        adapters,
        skip_tokenizer_init=True,
        dtype="float32",
        num_threads=1,
        num_blocks=512,
        block_size=BLOCK,
        **options,
    ) as llm:
        yield llm
        check_idle(llm)


@pytest.mark.parametrize(
    "family", ["qwen2", pytest.param("qwen3-tied", marks=pytest.mark.exhaustive), "qwen3-moe"]
)
def test_the_reference_backend(family: str, tmp_path: Path) -> None:
    base = make_base(FAMILIES[family], tmp_path / "base")
    oracles: dict[str, torch.nn.Module] = {}
    for name in ("LoRA", "DoRA of embedding and head", "modules_to_save: both", "IA3"):
        oracles[name] = make_adapter(base, KINDS[name], tmp_path / name, family)
    with engine(
        tmp_path / "base", {name: tmp_path / name for name in oracles}, lora_backend="reference"
    ) as llm:
        params = SamplingParams(max_tokens=4, temperature=0.0, logprobs=TOP)
        names = [None, *oracles]
        for name, output in zip(names, llm.generate([[5, 3, 8]] * 5, params, names), strict=True):
            check_output(oracles[name] if name else base, output)


RESIDUAL_INITS = ("pissa", "pissa_niter_4", "olora")


@pytest.mark.parametrize(
    "init",
    [
        RESIDUAL_INITS[0],
        *(pytest.param(init, marks=pytest.mark.exhaustive) for init in RESIDUAL_INITS[1:]),
    ],
)
def test_on_the_residual_base(init: str, tmp_path: Path) -> None:
    """What is left of the original is another base model."""
    base, folder = make_base(FAMILIES["llama"], tmp_path / "original"), tmp_path / init
    kind = LoraConfig(task_type="CAUSAL_LM", **lora([*ATTENTION, *MLP], init_lora_weights=init))
    with warnings.catch_warnings(action="ignore"):  # of other libraries, about each other
        adapted = get_peft_model(base, kind)
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            parameter.data += 0.2 * parameter.data.std() * torch.randn(parameter.shape)
    adapted.save_pretrained(folder)
    residual = copy.deepcopy(adapted).unload()
    residual.save_pretrained(tmp_path / "base")
    params = SamplingParams(max_tokens=STEPS, temperature=0.0, logprobs=TOP)
    with engine(tmp_path / "base", {init: folder}) as llm:
        for names in ([init], [None, init]):
            outputs = llm.generate([[7, 1, 44, 9, 23, 6]] * len(names), params, names)
            for name, output in zip(names, outputs, strict=True):
                check_output(adapted.eval() if name else residual, output)


# docs/fidelity.md --------------------------------------------------------------------------------


def test_the_page_is_current() -> None:
    """If not: python tests/support/fidelity_page.py > docs/fidelity.md"""
    assert (ROOT / "docs" / "fidelity.md").read_text() == fidelity_page.page()


def test_what_the_page_calls_exact_is_compared() -> None:
    compared = {*KINDS, *EXPERTS, SINGLE, SUM, *(f"residual: {i}" for i in RESIDUAL_INITS)}
    shown = {by for rows in SECTIONS.values() for row in rows for by in row.shown_by}
    elsewhere = {by for by in shown if "::" in by}
    assert shown - elsewhere == compared
    for by in elsewhere:
        file, _, name = by.partition("::")
        [found] = (ROOT / "tests").glob(f"*/{file}")
        assert f"def {name}(" in found.read_text(), by


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

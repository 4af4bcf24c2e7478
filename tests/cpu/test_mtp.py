"""Drafts by the head for several tokens of Qwen3.5 and Qwen3-Next: they are the head's, and change
nothing but the number of steps."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_kinds import CALL, FAMILIES, KINDS, VOCAB, make_adapter, make_base
from engines import check_idle
from mtp_heads import add_head, drafts_of, quiet_layers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from weft import LLM, SamplingParams
from weft.core.errors import ConfigError, InvalidRequest
from weft.core.units import NUM_DRAFTS
from weft.kernels.ops import make_ops
from weft.llm import RequestOutput
from weft.schedule.drafts import HeadGuesser
from weft.worker import build
from weft.worker.rehearsal import SLOT, Rehearsal, rehearsed_adapter

OPTIONS: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "dtype": "float32",
    "num_threads": 1,
    "block_size": 4,
}
pytestmark = pytest.mark.usefixtures("eager_guesses")

HYBRIDS = ("qwen3.5", "qwen3.5-moe", "qwen3-next")
PROMPT = [(i * i) % 37 + 3 for i in range(21)]
GREEDY = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
ADAPTERS = ("LoRA", "aLoRA", "added tokens", "fewer tokens")
World = tuple[Path, dict[str, Path]]


def make_world(root: Path, family: str, factor: float, of_head: float = 0.0) -> World:
    """A base whose head is right as far as its layers, and that of the head, add nothing: they are
    scaled by these factors. And adapters by name."""
    base = make_base(FAMILIES[family], root / "base")
    quiet_layers(base, factor)
    base.save_pretrained(root / "base")
    for name in ADAPTERS:
        make_adapter(base, KINDS[name], root / name, family)
    add_head(root / "base", right=True, factor=of_head)
    return root / "base", {name: root / name for name in ADAPTERS}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_world(tmp_path_factory.mktemp("mtp"), "qwen3.5", 0.3)


def watch_drafts(patch: pytest.MonkeyPatch, tokens: list[int]) -> list[tuple[int, list[int]]]:
    """What is drafted from now on, behind how many tokens. A random head is hardly ever right, so
    other guesses than its own are offered: none, some or all of them are what `tokens` say."""
    drafted: list[tuple[int, list[int]]] = []
    offer = HeadGuesser.offer

    def guess_otherwise(self: HeadGuesser, num_tokens: int, drafts: list[int]) -> None:
        drafted.append((num_tokens, drafts))
        others = tokens[num_tokens : num_tokens + NUM_DRAFTS]
        if len(drafted) % 4 < len(others):
            others[len(drafted) % 4] = VOCAB - 1
        offer(self, num_tokens, others)

    patch.setattr(HeadGuesser, "offer", guess_otherwise)
    return drafted


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(name, marks=pytest.mark.exhaustive) if name == "qwen3.5-moe" else name
        for name in HYBRIDS
    ],
)
def test_drafts_are_those_of_plain_torch(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a prompt in chunks, and behind guesses of which none, some or all are right."""
    base = make_base(FAMILIES[family], tmp_path)
    head = add_head(tmp_path, right=False)
    options = {"max_num_batched_tokens": 8, "max_num_seqs": 8, "num_blocks": 64, **OPTIONS}
    with LLM(tmp_path, **options) as llm:
        tokens = PROMPT + llm.generate([PROMPT], GREEDY)[0].token_ids
    drafted = watch_drafts(monkeypatch, tokens)
    with LLM(tmp_path, speculative="mtp", **options) as llm:
        assert PROMPT + llm.generate([PROMPT], GREEDY)[0].token_ids == tokens
        assert 10 < llm.stats().right_guesses < llm.stats().guessed_tokens
    assert len(drafted) > 10
    for num_tokens, drafts in drafted:
        assert drafts == drafts_of(base, head, tokens[:num_tokens], NUM_DRAFTS)


def test_triton_s_kernels_draft_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where the host does not know at which position a draft is."""
    pytest.importorskip("triton")
    base, _ = make_world(tmp_path, "qwen3.5", 0.3)
    params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    found = []
    for name in ("torch", "triton"):
        made = partial(make_ops, name)
        monkeypatch.setattr(build, "make_ops", lambda _, device, *args, made=made: made(device))
        with LLM(base, speculative="mtp", num_blocks=16, max_num_seqs=8, **OPTIONS) as llm:
            [output] = llm.generate([[5, 6, 7, 8, 9, 1, 2]], params)
            found.append((output.token_ids, llm.stats().guessed_tokens, llm.stats().right_guesses))
    assert found[0] == found[1] and found[0][-1] > 0


def test_a_rehearsal_changes_nothing(world: World) -> None:
    params = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
    prompt = [5, 6, 7, 8, 9, 1, 2]
    with LLM(*world, speculative="mtp", num_blocks=64, max_num_seqs=16, **OPTIONS) as llm:
        worker = llm._client.engine._worker
        want, before = llm.generate([prompt], params)[0].token_ids, llm.stats().right_guesses
        facts, size = worker.facts, OPTIONS["block_size"]
        sizes = facts.num_blocks, facts.num_states, facts.vocab_size
        steps = list(Rehearsal(16, 64, 64, size, *sizes, True).steps())
        assert all(len(step.drafts.entries) == len(step.seq_lens_S) for step in steps)
        worker.pool.install(SLOT, 0, rehearsed_adapter(worker.pool.table))
        with torch.inference_mode():
            worker._executor.rehearse(steps)
        worker.pool.clear(SLOT)
        assert llm.generate([prompt], params)[0].token_ids == want
        assert llm.stats().right_guesses > before > 0


TIGHT = {"num_blocks": 100, "max_num_seqs": 24, "max_num_batched_tokens": 29}
CHOSEN: list[dict[str, Any]] = [
    {"temperature": 0.0, "logprobs": 2},
    {"temperature": 0.8, "top_k": 20, "logprobs": 0},
    {"temperature": 0.0, "min_tokens": 12},
    {"temperature": 1.0, "top_p": 0.9, "min_p": 0.01},
    {"temperature": 0.0, "presence_penalty": 0.3},
]
"""How tokens are chosen. There are no drafts for the last ones."""


def make_requests() -> tuple[list[list[int]], list[SamplingParams], list[str | None]]:
    prompts = [[(i * k) % 67 + 3 for i in range(10 + 3 * k)] for k in range(1, 16)]
    names = [(None, *ADAPTERS)[k % 5] for k in range(len(prompts))]
    for prompt, name in zip(prompts, names, strict=True):
        if name == "aLoRA":
            prompt[-1:] = [*CALL, prompt[-1]]
    params = [
        SamplingParams(max_tokens=16, ignore_eos=True, seed=k, **CHOSEN[k // 3])
        for k in range(len(prompts))
    ]
    return prompts, params, names


def assert_same(got: list[RequestOutput], want: list[RequestOutput]) -> None:
    for mine, other in zip(got, want, strict=True):
        assert mine.token_ids == other.token_ids
        of_tokens = zip(mine.logprobs or [], other.logprobs or [], strict=True)
        for a, b in of_tokens:
            assert a.logprob == pytest.approx(b.logprob, abs=1e-3)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"num_blocks": 400, "max_num_seqs": 64}, id="roomy"),
        pytest.param(TIGHT, id="tight"),
        pytest.param(
            {"num_blocks": 400, "max_num_seqs": 64, "overlap": False},
            id="plain loop",
            marks=pytest.mark.exhaustive,
        ),
    ],
)
def test_drafts_change_nothing(world: World, options: dict[str, Any]) -> None:
    """Of requests with all kinds of adapters side by side, greedy and drawn; then again, with what
    is cached of them; and while they are put off for want of memory, their prompts in chunks."""
    requests = make_requests()
    with LLM(*world, num_blocks=400, **OPTIONS) as llm:
        want = llm.generate(*requests)
    with LLM(*world, speculative="mtp", **options, **OPTIONS) as llm:
        for _ in range(2):
            before = llm.stats()
            assert_same(llm.generate(*requests), want)
            after = llm.stats()
            assert after.right_guesses > before.right_guesses
        assert (
            after.preemptions
            if options["num_blocks"] == TIGHT["num_blocks"]
            else after.cached_tokens
        )
        assert 0 < after.right_guesses < after.guessed_tokens
        check_idle(llm)


@pytest.mark.usefixtures("quick_engines")
@pytest.mark.parametrize(
    ("family", "options"),
    [
        pytest.param("qwen3-next", {"fully_sharded_loras": True}, id="whole experts"),
        pytest.param("qwen3.5", {}, id="dense", marks=pytest.mark.exhaustive),
        pytest.param("qwen3.5-moe", {}, id="experts by width", marks=pytest.mark.exhaustive),
    ],
)
def test_two_ranks_draft_as_one_does(
    family: str, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens and log-probabilities of all kinds of requests, in chunks and put off for want of
    memory, are those of one rank without drafts. The drafts are plain torch's, also behind what is
    cached of a prompt."""
    world, requests = make_world(tmp_path, family, 0.3, of_head=0.3), make_requests()
    with LLM(*world, num_blocks=400, **OPTIONS) as llm:
        want, tokens = llm.generate(*requests), llm.generate([PROMPT], GREEDY)[0].token_ids
    with LLM(
        *world, speculative="mtp", tensor_parallel_size=2, **options, **TIGHT, **OPTIONS
    ) as llm:
        assert_same(llm.generate(*requests), want)
        stats = llm.stats()
        assert 0 < stats.right_guesses < stats.guessed_tokens and stats.preemptions
        drafted = watch_drafts(monkeypatch, PROMPT + tokens)
        new, again = (llm.generate([PROMPT], GREEDY)[0] for _ in range(2))
        assert new.token_ids == again.token_ids == tokens
        assert again.num_cached_tokens > new.num_cached_tokens == 0
        check_idle(llm)
    base = AutoModelForCausalLM.from_pretrained(world[0])
    head = load_file(world[0] / "model.safetensors")
    assert len(drafted) > 20
    for num_tokens, drafts in {(num, tuple(drafts)) for num, drafts in drafted}:
        behind = (PROMPT + tokens)[:num_tokens]
        assert list(drafts) == drafts_of(base, head, behind, NUM_DRAFTS)


def test_a_full_batch_has_no_drafts(world: World) -> None:
    """Requests of the base fill it from the first step to the last, as no adapter has to load."""
    prompts, params, _ = make_requests()
    with LLM(*world, num_blocks=400, **OPTIONS) as llm:
        want = llm.generate(prompts[:3], params[:3])
    with LLM(*world, speculative="mtp", num_blocks=400, max_num_seqs=3, **OPTIONS) as llm:
        assert_same(llm.generate(prompts[:3], params[:3]), want)
        assert llm.stats().guessed_tokens == 0


def test_requests_choose_how_they_are_guessed_at(world: World) -> None:
    prompt, params = [5, 6, 7] * 8, SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
    with LLM(*world, speculative="mtp", num_blocks=64, **OPTIONS) as llm:
        found = {}
        for how in ("off", "ngram", "mtp", None):
            before = llm.stats().guessed_tokens
            [output] = llm.generate([prompt], replace(params, speculative=how))
            found[how] = output.token_ids, llm.stats().guessed_tokens > before
    assert len({tuple(tokens) for tokens, _ in found.values()}) == 1
    assert [found["off"][1], found["mtp"][1], found[None][1]] == [False, True, True]


@pytest.mark.parametrize("chosen", [{"temperature": 0.0}, {"temperature": 1.5, "seed": 7}], ids=str)
def test_a_head_that_is_right_saves_steps(tmp_path: Path, chosen: dict[str, Any]) -> None:
    """Drafts of drawn tokens are right, too, as they are drawn with the same noise."""
    base, _ = make_world(tmp_path, "qwen3.5", 0.0)
    params = SamplingParams(max_tokens=60, ignore_eos=True, **chosen)
    with LLM(base, speculative="mtp", num_blocks=64, **OPTIONS | {"block_size": 16}) as llm:
        before = llm.stats()
        llm.generate([[1, 2, 3, 4]], params)
        after = llm.stats()
    assert after.right_guesses == after.guessed_tokens > 30
    assert after.steps - before.steps < 25


def test_models_without_such_a_head_are_refused_by_name(world: World, tmp_path: Path) -> None:
    make_base(FAMILIES["qwen3.5"], tmp_path / "without")
    make_base(FAMILIES["llama"], tmp_path / "llama")
    for folder, said in (("without", "has no head that drafts tokens"), ("llama", "Llama")):
        with pytest.raises(ConfigError, match=said) as caught:
            LLM(tmp_path / folder, speculative="mtp", num_blocks=64, **OPTIONS)
        assert caught.value.param == "speculative"
    random = {"load_format": "dummy", "num_blocks": 64}
    with LLM(tmp_path / "without", speculative="mtp", **random, **OPTIONS) as llm:
        assert llm.generate([[1, 2, 3]], SamplingParams(max_tokens=8, ignore_eos=True))
        assert llm.stats().guessed_tokens


def test_a_checkpoint_that_lacks_a_part_of_it_is_refused_by_name(tmp_path: Path) -> None:
    make_base(FAMILIES["qwen3.5"], tmp_path)
    add_head(tmp_path, right=True)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    del tensors["mtp.layers.0.self_attn.q_norm.weight"]
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"lacks mtp\.layers\.0\.self_attn\.q_norm\.weight"):
        LLM(tmp_path, speculative="mtp", num_blocks=64, **OPTIONS)


def test_without_the_head_a_request_can_t_ask_for_it(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    """Nor is anybody warned that the checkpoint has tensors of it."""
    with LLM(*world, num_blocks=64, **OPTIONS) as llm:
        assert "not used" not in caplog.text
        with pytest.raises(InvalidRequest) as caught:
            llm.generate([[1, 2, 3]], SamplingParams(speculative="mtp"))
        assert caught.value.param == "speculative"
        assert llm.generate([[1, 2, 3]], SamplingParams(max_tokens=2))

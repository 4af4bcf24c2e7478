"""Models with recurrent states: a request's recurrent state is its own, whatever happens to it."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from adapter_kinds import CALL, FAMILIES, KINDS, VOCAB, make_adapter, make_base
from engines import MakeLLM, check_idle
from golden_cases import TIGHT, assert_right, interleaved, make_workload, run
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from tiny import HYBRID_ADAPTERS, HYBRID_BASE, answer, ask, tasks

from weft import LLM, SamplingParams
from weft.checkpoint.kinds import sort_adapter
from weft.checkpoint.read import files_of
from weft.core.config import ModelArgs
from weft.core.errors import AdapterInvalid, ConfigError
from weft.kernels.delta import CHUNK
from weft.kernels.delta_rule import delta_chunk, delta_step, reference_gated_delta
from weft.llm import RequestOutput
from weft.models.blueprint import model_shard, target_table
from weft.models.config import load_model_config
from weft.models.linear_attention import check_heads
from weft.models.loading import load_model

OPTIONS: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "dtype": "float32",
    "num_threads": 1,
    "block_size": 4,
}


FAMILIES_HERE = ("qwen3-next", "lfm2")


def first(family: str) -> pytest.MarkDecorator:
    """By this mark, `make test` runs a test on this family alone, as the engine does the same for
    both kinds of states. `make exhaustive` runs it on the other family."""
    marks = [[] if name == family else [pytest.mark.exhaustive] for name in FAMILIES_HERE]
    each = [pytest.param(n, marks=m) for n, m in zip(FAMILIES_HERE, marks, strict=True)]
    return pytest.mark.parametrize("world", each, indirect=True)


@pytest.fixture(scope="module", params=FAMILIES_HERE)
def world(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, Path]]:
    """A base, and adapters by name."""
    root = tmp_path_factory.mktemp("hybrid")
    base = make_base(FAMILIES[request.param], root / "base")
    for name in ("LoRA", "aLoRA"):
        make_adapter(base, KINDS[name], root / name, request.param)
    return root / "base", {name: root / name for name in ("LoRA", "aLoRA")}


@first("lfm2")
def test_neighbours_and_preemption_change_nothing(world: tuple[Path, dict[str, Path]]) -> None:
    rng = random.Random(0)
    prompts = [[rng.randrange(VOCAB) for _ in range(n)] for n in (30, 5, 17, 40, 9, 23, 12, 3)]
    names = [None, "LoRA", "aLoRA", None, "LoRA", "aLoRA", None, "LoRA"]
    for prompt, name in zip(prompts, names, strict=True):
        if name == "aLoRA":
            prompt[-1:] = [*CALL, prompt[-1]]
    params = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
    with LLM(*world, num_blocks=256, **OPTIONS) as llm:
        asked = zip(prompts, names, strict=True)
        alone = [llm.generate([p], params, [name])[0].token_ids for p, name in asked]
        again = llm.generate(prompts, params, names)
        cached = [output.num_cached_tokens for output in again]
        assert cached == [n if n >= 8 else 0 for n in ((len(p) - 1) // 4 * 4 for p in prompts)]
        assert [output.token_ids for output in again] == alone
    few = {"num_blocks": 40, "max_num_seqs": 5, "max_num_batched_tokens": 13}
    with LLM(*world, **few, **OPTIONS) as llm:
        together = llm.generate(prompts, params, names)
        assert llm.stats().preemptions > 0
        check_idle(llm)
    assert [output.token_ids for output in together] == alone


CHOSEN: list[dict[str, Any]] = [
    {"temperature": 0.0, "allowed_token_ids": (5, 6), "frequency_penalty": 0.1},
    {"temperature": 0.0},
    {"temperature": 1.0, "allowed_token_ids": (5, 6), "logprobs": 2},
    {"temperature": 0.0, "allowed_token_ids": (5,), "logprobs": 0},
    {"temperature": 0.0, "allowed_token_ids": (5, 6, 7), "logprobs": 1},
]
"""How tokens are chosen: most texts repeat themselves, some of them not for long."""


@first("qwen3-next")
@pytest.mark.usefixtures("eager_guesses")
def test_guesses_change_nothing(world: tuple[Path, dict[str, Path]]) -> None:
    """Of requests with all kinds of adapters side by side, new ones and such as go on from
    snapshots; and while they are put off for want of memory."""
    names = [None, "LoRA", "aLoRA"]
    prompts = [[(i * k) % 7 + 3 for i in range(20 + k)] for k in range(1, 16)]
    each = [names[k % 3] for k in range(len(prompts))]
    for prompt, name in zip(prompts, each, strict=True):
        if name == "aLoRA":
            prompt[-1:] = [*CALL, prompt[-1]]
    params = [
        SamplingParams(max_tokens=24, ignore_eos=True, seed=k, **CHOSEN[k // 3])
        for k in range(len(prompts))
    ]
    with LLM(*world, num_blocks=400, **OPTIONS) as llm:
        alone = llm.generate(prompts, params, each)
    wrong = 0
    for options in ({"num_blocks": 400, "max_num_seqs": 64}, {"num_blocks": 60}):
        with LLM(*world, speculative="ngram", **options, **OPTIONS) as llm:
            for _ in range(2):
                before = llm.stats()
                for want, got in zip(alone, llm.generate(prompts, params, each), strict=True):
                    assert got.token_ids == want.token_ids
                    of_tokens = zip(got.logprobs or [], want.logprobs or [], strict=True)
                    for a, b in of_tokens:
                        assert a.logprob == pytest.approx(b.logprob, abs=1e-3)
                after = llm.stats()
                assert after.right_guesses > before.right_guesses
            assert bool(after.preemptions) == (options["num_blocks"] == 60)
            wrong += after.guessed_tokens - after.right_guesses
            check_idle(llm)
    assert wrong > 0


def test_an_activated_adapter_goes_on_from_the_base_s_state(
    world: tuple[Path, dict[str, Path]],
) -> None:
    rng = random.Random(1)
    prompt = [rng.randrange(1, VOCAB) for _ in range(41)]
    called, other = [*prompt, *CALL, 3], [*prompt[:22], *CALL, 3]
    params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    with LLM(*world, num_blocks=256, **OPTIONS) as llm:
        want = [llm.generate([p], params, ["aLoRA"])[0] for p in (called, other)]
        assert [output.num_cached_tokens for output in want] == [0, 0]
    with LLM(*world, num_blocks=256, **OPTIONS) as llm:
        llm.generate([prompt], params, [None])
        got = [llm.generate([p], params, ["aLoRA"])[0] for p in (called, other, other)]
        assert [output.num_cached_tokens for output in got] == [40, 0, 24]
        check_idle(llm)
    assert [output.token_ids for output in got] == [o.token_ids for o in (*want, want[1])]


@pytest.mark.parametrize("world", ["qwen3-next"], indirect=True)
def test_more_devices_than_heads_are_refused_by_name(world: tuple[Path, dict[str, Path]]) -> None:
    with pytest.raises(ConfigError, match="linear_num_key_heads 2") as caught:
        model_shard(load_model_config(world[0]), 0, 4)
    assert caught.value.param == "tensor_parallel_size"


@pytest.mark.parametrize(
    ("key", "value", "shared", "field"),
    [
        (256, 256, 227, "linear_key_head_dim"),
        (192, 256, 227, "linear_value_head_dim"),
        (128, 256, 99, "linear_value_head_dim"),
        (512, 16, 227, "linear_key_head_dim"),
        (256, 128, 227, None),
        (128, 128, 99, None),
    ],
)
def test_heads_that_kernels_on_a_gpu_have_no_room_for_are_refused(
    monkeypatch: pytest.MonkeyPatch, key: int, value: int, shared: int, field: str | None
) -> None:
    """`shared`: the KiB of shared memory that a program may have."""
    gpu = SimpleNamespace(shared_memory_per_block_optin=shared << 10)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    config = load_model_config(HYBRID_BASE)
    assert config.linear is not None
    shape = replace(config.linear, key_dim=key, value_dim=value)
    check_heads(shape, torch.device("cpu"))
    if field is None:
        check_heads(shape, torch.device("cuda"))
        return
    config = replace(config, linear=shape)
    monkeypatch.setattr("weft.models.loading.load_model_config", lambda *_: config)
    monkeypatch.setattr("weft.models.loading.device_of", lambda *_: torch.device("cuda"))
    with pytest.raises(ConfigError, match=f"{field} .* too large for kernels") as caught:
        load_model(ModelArgs(str(HYBRID_BASE)))
    assert caught.value.param == field


def test_norms_are_not_saved_with_those_of_linear_attention(tmp_path: Path) -> None:
    """`peft` saves these too, and fails if the file lacks them."""
    adapter, base = HYBRID_ADAPTERS["upper"], load_file(HYBRID_BASE / "model.safetensors")
    config = json.loads((adapter / "adapter_config.json").read_text())
    tensors = load_file(adapter / "adapter_model.safetensors")
    norms = {f"base_model.model.{name}": 2 * base[name] for name in base if "norm" in name}
    others = {name: norm for name, norm in norms.items() if ".linear_attn." not in name}
    table = target_table(load_model_config(HYBRID_BASE))
    for saved, why in ((norms, "in place of this one"), (others, '"norm" is not served')):
        files = files_of(config | {"modules_to_save": ["norm"]}, tensors | saved)
        with pytest.raises(AdapterInvalid, match=why):
            sort_adapter(files, table, 16)


@settings(max_examples=20, deadline=None)
@given(st.integers(1, CHUNK), st.integers(0, 1 << 20), st.booleans())
def test_a_chunk_is_its_tokens_one_by_one(length: int, seed: int, corrects: bool) -> None:
    torch.manual_seed(seed)
    q, k = (torch.nn.functional.normalize(torch.randn(length, 2, 5), dim=-1) for _ in range(2))
    v, state = torch.randn(length, 2, 3), torch.randn(2, 5, 3)
    g, b = -torch.rand(length, 2) * 3, torch.rand(length, 2)
    want, after = reference_gated_delta(q, k, v, g, b, state, corrects)
    got, state_after = delta_chunk(q, k, v, g, b, state, corrects=corrects)
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(state_after, after, atol=1e-4, rtol=1e-4)
    one, _ = delta_step(q[:1], k[:1], v[:1], g[:1], b[:1], state[None], corrects)
    torch.testing.assert_close(one[0], want[0], atol=1e-5, rtol=1e-5)


# The example's tasks, trained on a base of this kind ----------------------------------------------

TRAINED: dict[str, Any] = {"model": HYBRID_BASE, "adapters": HYBRID_ADAPTERS, "block_size": 4}
SHORT = {**TIGHT, "snapshot_memory": 1 << 19}
"""Little memory, with which requests are put off, and adapters evicted."""


def check_answers(llm: LLM, asked: list[tuple[str | None, str]]) -> list[RequestOutput]:
    params = SamplingParams(max_tokens=32, temperature=0.0)
    outputs = llm.chat([ask(word) for _, word in asked], params, [name for name, _ in asked])
    for output, (name, word) in zip(outputs, asked, strict=True):
        assert output.text == answer(name, word), (name, word)
    return outputs


def test_every_trained_adapter_answers_right(make_llm: MakeLLM) -> None:
    """In one batch, and again, with the states of the prompts' whole blocks. Then with so little
    memory that requests are put off and adapters evicted."""
    [word] = tasks.words(11, 1)
    asked = [(name, word) for name in (None, *HYBRID_ADAPTERS)]
    llm = make_llm(**TRAINED)
    new, again = check_answers(llm, asked), check_answers(llm, asked)
    assert not any(output.num_cached_tokens for output in new)
    known = [(len(output.prompt_token_ids) - 1) // 4 * 4 for output in again]
    assert [o.num_cached_tokens for o in again] == [n if n >= 8 else 0 for n in known]
    short = make_llm(**TRAINED | SHORT | {"num_blocks": 14})
    check_answers(short, [(None, word)] * 8)  # those of adapters may come one by one, as these load
    assert short.stats().preemptions > 0
    check_answers(short, asked)
    assert short.stats().adapter_evictions > 0


@pytest.mark.exhaustive
@pytest.mark.usefixtures("eager_guesses")
@pytest.mark.parametrize(
    "options",
    [{}, SHORT, {"speculative": "ngram"}],
    ids=["roomy", "tight", "guesses"],
)
def test_the_golden_workload(make_llm: MakeLLM, options: dict[str, Any]) -> None:
    """The tokens are peft's, of long conversations too."""
    part = interleaved(make_workload(hybrid=True))
    llm = make_llm(**TRAINED | options)
    assert_right(run(llm, part), part)
    assert llm.stats().preemptions > 0 or "snapshot_memory" not in options
    assert bool(llm.stats().right_guesses) == ("speculative" in options)

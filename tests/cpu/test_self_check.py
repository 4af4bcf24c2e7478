"""The check of registered adapters: what it lets through, what it finds, and what then happens;
checksums of what is loaded."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from engines import MakeLLM
from http_api import INFO, EchoEngine, Web
from http_api import World as ApiWorld
from safetensors.torch import load_file
from tiny import ADAPTERS, BASE, answer
from torch import Tensor
from toy_tokenizers import byte_level
from transformers import LlamaConfig, PreTrainedConfig, Qwen2MoeConfig

from weft import LLM, SamplingParams
from weft.checkpoint.pack import AdapterImage
from weft.core.adapters import AdapterSource, WeightedAdapter
from weft.core.config import engine_args
from weft.core.errors import AdapterQuarantined
from weft.core.messages import Hold, Reply, Tokens
from weft.core.requests import EngineRequest, TokenEvent
from weft.core.stages import Stages
from weft.core.stats import CheckResult, EngineStats
from weft.core.targets import Extras, ImageLayout, Target, TargetTable, layout_of, vocabulary
from weft.kernels.checksum import PAGE, checksum
from weft.kernels.lora import AdapterPool, Segment, base, extras, grouped
from weft.kernels.lora.triton import TritonBackend, Tuning
from weft.kernels.triton_base import INTERPRETED
from weft.kernels.triton_ops import TritonOps
from weft.kernels.tuned import Blocks
from weft.models.decoder import Decoder
from weft.models.moe import SparseMlp
from weft.worker import compared, selfcheck
from weft.worker.build import build_worker
from weft.worker.worker import DeviceWorker

GREEDY = SamplingParams(max_tokens=12, temperature=0.0)
Patch = pytest.MonkeyPatch


# -- the check itself --------------------------------------------------------------------------


@pytest.fixture(
    scope="module",
    params=["float32", "bfloat16", pytest.param("float16", marks=pytest.mark.exhaustive)],
)
def worker(request: pytest.FixtureRequest) -> Iterator[DeviceWorker]:
    yield from make_worker(BASE, dtype=request.param)


@pytest.fixture(scope="module")
def fp32_worker() -> Iterator[DeviceWorker]:
    yield from make_worker(BASE, dtype="float32")


SIZES: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
}
LLAMA = LlamaConfig(**SIZES, architectures=["LlamaForCausalLM"])
EXPERTS = {"num_experts": 5, "num_experts_per_tok": 2}
WIDTHS = {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}
MIXTURE = Qwen2MoeConfig(
    **SIZES | EXPERTS | WIDTHS | {"hidden_size": 64}, architectures=["Qwen2MoeForCausalLM"]
)


@pytest.fixture(scope="module")
def triton_worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DeviceWorker]:
    """One layer, whose adapters' kernels run in Triton's interpreter: they read the tables."""
    yield from make_triton_worker(tmp_path_factory.mktemp("base"), LLAMA)


def make_triton_worker(folder: Path, config: PreTrainedConfig) -> Iterator[DeviceWorker]:
    if not INTERPRETED:
        pytest.skip("Triton's interpreter is off")
    config.save_pretrained(folder)
    for made in make_worker(folder, load_format="dummy"):
        assert made.adapters.self_check is not None
        tuning = Tuning(blocks=Blocks(shrink_programs=1))
        made.adapters.self_check._make_backend = partial(TritonBackend, tuning=tuning)
        yield made


def make_worker(base: Path, **options: object) -> Iterator[DeviceWorker]:
    made = build_worker(
        engine_args(str(base), num_threads=1, num_blocks=8, adapter_memory=32 << 20, **options),
        Stages(),
    )
    yield made
    made.close()


def random_image(
    worker: DeviceWorker, ranks: tuple[int, ...], more: Extras | None = None, strength: float = 0.1
) -> AdapterImage:
    """An adapter of these ranks, and of what comes beside A and B."""
    table = worker.model.table
    layout = layout_of(table, ranks, more, worker.model.dtype.itemsize)
    torch.manual_seed(sum(ranks))
    data = (strength * torch.randn(layout.num_elements)).to(worker.model.dtype)
    for offsets, middle in ((layout.scale_offset, 1.0), (layout.shift_offset, 0.0)):
        for target, at in zip(table.targets, offsets, strict=False):
            if at >= 0:
                put(data, at, middle + 0.3 * torch.randn(target.out_features))
    for norm, at in zip(table.norms, layout.norm_offset, strict=False):
        if at >= 0:
            put(data, at, (1 + 0.3 * torch.randn(norm.size)).to(worker.model.dtype))
    for at_rows in (layout.embedding_rows, layout.head_rows):
        if at_rows and at_rows[1] >= 0:
            vocab = worker.model.config.vocab_size
            added = torch.arange(vocab, max(vocab, layout.vocab_size))
            ids = torch.randperm(vocab)[: at_rows[2] - len(added)].sort().values
            put(data, at_rows[1], torch.cat((ids, added)).int())
    return AdapterImage("d" * 64, layout, data, ("q_proj",))


def put(data: Tensor, at: int, values: Tensor) -> None:
    size = values.numel() * values.element_size() // data.element_size()
    data[at : at + size].view(values.dtype).copy_(values)


def check(
    worker: DeviceWorker, adapter: AdapterImage, spoil: Callable[[], object] = int
) -> CheckResult:
    """Check an adapter, after something was spoiled, as the first one of its layout."""
    self_check = worker.adapters.self_check
    assert self_check is not None
    spoil()
    self_check._passed.clear()
    return self_check.check(adapter, paced=False)


def same_ranks(table: TargetTable, rank: int) -> tuple[int, ...]:
    return (rank,) * len(table.targets)


def all_extras(table: TargetTable, rows: int = 8, added: int = 3) -> Extras:
    every = frozenset(range(len(table.targets)))
    vocab_size = vocabulary(table, "embedding")[0] + added if added else 0
    norms = frozenset(range(len(table.norms)))
    return Extras(every, every, norms, rows, rows, vocab_size=vocab_size)


@pytest.mark.parametrize(
    "seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.exhaustive) for seed in (2, 3))]
)
def test_right_adapters_pass(worker: DeviceWorker, seed: int) -> None:
    """Of any ranks and strength, with anything beside A and B."""
    random, table = Random(seed), worker.model.table
    ranks = tuple(random.choice((0, 1, 2, 7, 16, 33, 64, 256)) for _ in table.targets)
    strength = 10 ** random.uniform(-4, -0.5)
    vocab = worker.model.config.vocab_size
    for more in (
        None,
        all_extras(table),
        all_extras(table, rows=vocab, added=0),
        all_extras(table, rows=vocab + 3),
        all_extras(table, rows=3),
    ):
        assert check(worker, random_image(worker, ranks, more, strength)) == "passed"


def test_right_adapters_pass_with_triton(triton_worker: DeviceWorker) -> None:
    ranks = tuple(3 + 8 * (target.slice % 3) for target in triton_worker.model.table.targets)
    assert check(triton_worker, random_image(triton_worker, ranks)) == "passed"


def test_adapters_of_experts_are_checked_as_few_rows_are_served(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    """Pairs of a token and an expert need no order then."""
    monkeypatch.setattr(SparseMlp, "_sorted", None)
    for worker in make_triton_worker(tmp_path, MIXTURE):
        found, model = worker.adapters.self_check, worker.model
        assert found is not None
        found._decoder = Decoder(model.config, model.weights, TritonOps(torch.device("cpu")), 64)
        ranks = tuple(3 + 8 * (target.slice % 3) for target in model.table.targets)
        assert check(worker, random_image(worker, ranks)) == "passed"


def test_extras_alone_pass(worker: DeviceWorker) -> None:
    """Without any A and B: IA3, rows of tokens, norms."""
    more = all_extras(worker.model.table)
    assert check(worker, random_image(worker, same_ranks(worker.model.table, 0), more)) == "passed"


def test_what_overflows_is_not_judged(worker: DeviceWorker) -> None:
    """NaN comes of it whoever computes it."""
    huge = random_image(worker, same_ranks(worker.model.table, 8), strength=1e4)
    huge.data.mul_(1e30) if worker.model.dtype != torch.float16 else None
    assert check(worker, huge) == "skipped"


def test_memory_that_is_short_is_not_held_against_an_adapter(
    worker: DeviceWorker, monkeypatch: Patch
):
    monkeypatch.setattr(selfcheck, "with_extras", out_of_memory)
    assert check(worker, random_image(worker, same_ranks(worker.model.table, 8))) == "skipped"


def out_of_memory(*_: object) -> None:
    raise torch.OutOfMemoryError("no")


def spoil_view(of_b: bool) -> Callable[[DeviceWorker, AdapterImage, Patch], None]:
    """One matrix of one layer is looked for one row further on."""

    def spoil(worker: DeviceWorker, adapter: AdapterImage, monkeypatch: Patch) -> None:
        right = AdapterPool._make_view

        def wrong(self: AdapterPool, slot: int, group: int, expert: int = 0) -> Any:
            view = right(self, slot, group, expert)
            if view is None or group != 4:
                return view
            if not of_b:
                return view._replace(a_RI=view.a_RI.roll(1, 0))
            first, *others = view.slices
            return view._replace(slices=(first._replace(b_OR=first.b_OR.roll(1, 0)), *others))

        monkeypatch.setattr(AdapterPool, "_make_view", wrong)

    return spoil


def spoil_sum(change: Callable[[Tensor, Any], None]) -> Callable[..., None]:
    """A kernel that adds something else."""

    def spoil(worker: DeviceWorker, adapter: AdapterImage, monkeypatch: Patch) -> None:
        right = grouped._add

        def wrong(y: Tensor, x: Tensor, view: Any, ranks: Any) -> None:
            delta = torch.zeros_like(y)
            right(delta, x, view, ranks)
            change(delta, view)
            y += delta

        monkeypatch.setattr(grouped, "_add", wrong)

    return spoil


def spoil_ranks(worker: DeviceWorker, adapter: AdapterImage, monkeypatch: Patch) -> None:
    """A kernel that knows ranks up to 16."""
    right = grouped._add

    def wrong(y: Tensor, x: Tensor, view: Any, ranks: Any) -> None:
        slices = tuple(s._replace(b_OR=s.b_OR.clone()) for s in view.slices)
        for s in slices:
            s.b_OR[:, 16:] = 0
        right(y, x, view._replace(slices=slices), ranks)

    monkeypatch.setattr(grouped, "_add", wrong)


def spoil_rows(worker: DeviceWorker, adapter: AdapterImage, monkeypatch: Patch) -> None:
    """The base's rows get it too."""
    right = grouped._per_segment

    def wrong(pool: AdapterPool, segments: tuple[Segment, ...], *rest: Any) -> None:
        right(pool, tuple(s._replace(start=0) for s in segments), *rest)

    monkeypatch.setattr(grouped, "_per_segment", wrong)


def spoil_error(worker: DeviceWorker, adapter: AdapterImage, monkeypatch: Patch) -> None:
    """A kernel that can't run would end the steps of all."""
    monkeypatch.setattr(grouped, "_add", lambda *_: [][0])


def drop_extras(name: str) -> Callable[..., None]:
    """One kind of what comes beside A and B is not applied."""

    def spoil(worker: DeviceWorker, adapter: AdapterImage, monkeypatch: Patch) -> None:
        if name == "added":
            monkeypatch.setattr(extras._AddedTokens, "embedding", lambda *_: None)
        elif name == "added_logits":
            right_logits = extras._AddedTokens.logits
            monkeypatch.setattr(
                extras._AddedTokens,
                "logits",
                lambda self, y, x: right_logits(self, y, x.roll(1, 0)),
            )
        elif name == "norm":
            monkeypatch.setattr(extras._Own, "norm", lambda *_: None)
        elif name == "all":
            monkeypatch.setattr(extras, "has_extras", lambda *_: False)
        elif name in ("scale", "shift"):
            right = extras._Own.scale_and_shift

            def vectors(self: Any, target: Target) -> list[Tensor | None]:
                scale, shift = right(self, target)
                return [None, shift] if name == "scale" else [scale, None]

            monkeypatch.setattr(extras._Own, "scale_and_shift", vectors)
        else:
            rows = extras._Own.rows

            def found(self: Any, at: tuple[int, ...]) -> Any:
                return None if at == getattr(self.layout, name) else rows(self, at)

            monkeypatch.setattr(extras._Own, "rows", found)

    return spoil


WRONG: dict[str, Callable[[DeviceWorker, AdapterImage, Patch], None]] = {
    "offset of A": spoil_view(of_b=False),
    "offset of B": spoil_view(of_b=True),
    "scaled": spoil_sum(lambda delta, view: delta.mul_(1.05)),
    "one layer left out": spoil_sum(
        lambda delta, view: delta.mul_(view.slices[0].out_stop != len(delta.t()))
    ),
    "ranks beyond 16": spoil_ranks,
    "rows of the base": spoil_rows,
    "an exception": spoil_error,
    "no extras": drop_extras("all"),
    "no scale": drop_extras("scale"),
    "no shift": drop_extras("shift"),
    "no norms": drop_extras("norm"),
    "no rows of the embedding": drop_extras("embedding_rows"),
    "no rows of the head": drop_extras("head_rows"),
    "no rows of added tokens": drop_extras("added"),
    "no logits of added tokens": drop_extras("added_logits"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_is_wrong_is_found(worker: DeviceWorker, wrong: str, monkeypatch: Patch) -> None:
    more = all_extras(worker.model.table) if wrong.startswith("no ") else None
    adapter = random_image(worker, same_ranks(worker.model.table, 32), more)
    assert check(worker, adapter) == "passed"
    with pytest.raises(AdapterQuarantined) as caught:
        check(worker, adapter, lambda: WRONG[wrong](worker, adapter, monkeypatch))
    assert caught.value.param == "lora_path" and caught.value.status == 503


def test_one_percent_is_found_in_float32(fp32_worker: DeviceWorker, monkeypatch: Patch) -> None:
    worker = fp32_worker
    adapter = random_image(worker, same_ranks(worker.model.table, 8), strength=0.02)
    spoil = spoil_sum(lambda delta, view: delta.mul_(1.01))
    with pytest.raises(AdapterQuarantined, match="was off by"):
        check(worker, adapter, lambda: spoil(worker, adapter, monkeypatch))


@pytest.mark.parametrize("table", ["a_offset_SG", "b_offset_SL", "rank_SL"])
def test_wrong_tables_are_found_with_triton(
    triton_worker: DeviceWorker, table: str, monkeypatch: Patch
) -> None:
    """In the last column that says anything: the head's is empty."""
    worker = triton_worker
    ranks = tuple(0 if t.kind == "head" else 8 for t in worker.model.table.targets)
    install = AdapterPool.install

    def wrong(self: AdapterPool, slot: int, start: int, layout: ImageLayout) -> None:
        install(self, slot, start, layout)
        getattr(self, table)[slot, -2].sub_(1)

    monkeypatch.setattr(AdapterPool, "install", wrong)
    with pytest.raises(AdapterQuarantined, match=r"layers\.0\.mlp\.down_proj"):
        check(worker, random_image(worker, ranks))


def test_the_logits_are_compared_too(worker: DeviceWorker, monkeypatch: Patch) -> None:
    """What only goes wrong between the layers."""
    adapter = random_image(
        worker, same_ranks(worker.model.table, 8), all_extras(worker.model.table)
    )
    monkeypatch.setattr(selfcheck, "norms_of", lambda step: None)
    monkeypatch.setattr(compared, "norms_of", lambda step: None)
    monkeypatch.setattr(compared.ComparedStep, "of", lambda self, index: self._oracle.of(index))
    with pytest.raises(AdapterQuarantined, match="the logits"):
        check(worker, adapter)


# -- what happens then -------------------------------------------------------------------------


def spoil_kernels(monkeypatch: Patch) -> None:
    """From now on what adapters add is wrong."""
    spoil_sum(lambda delta, _: delta.mul_(1.1))(None, None, monkeypatch)


def spoil_copies(llm: LLM, monkeypatch: Patch, count: int) -> list[int]:
    """So many of the next copies to adapter memory go wrong; where each began."""
    pool = llm._client.engine._worker.pool
    write, starts = pool.write, list[int]()

    def wrong(start: int, data: Tensor) -> int:
        right = write(start, data)
        starts.append(start)
        if len(starts) > count:
            return right
        pool.arena[start + len(data) // 2 :][:64].zero_()
        return int(checksum(pool.arena[start : start + len(data)]))

    monkeypatch.setattr(pool, "write", wrong)
    return starts


def texts(llm: LLM, adapter: str | None, *words: str) -> list[str]:
    prompts = [f"<|bos|><|user|>{word}<|end|><|assistant|>" for word in words]
    return [output.text for output in llm.generate(prompts, GREEDY, adapter)]


def finish(llm: LLM, requests: dict[str, str | None]) -> dict[str, TokenEvent]:
    """The last events of requests for adapters, by request id."""
    ended: dict[str, TokenEvent] = {}
    for request_id, name in requests.items():
        ref = llm._registry.resolve(name).ref if name else None
        prompt = llm.tokenizer.encode("<|bos|><|user|>hello<|end|><|assistant|>")
        refused = llm._client.engine.submit(EngineRequest(request_id, prompt, GREEDY, ref, seed=0))
        ended |= {request_id: refused} if refused else {}
    while len(ended) < len(requests):
        for report in llm._client.engine.step():
            events = report if isinstance(report, Tokens) else ()
            ended |= {e.request_id: e for e in events if e.finish_reason is not None}
    llm._client.engine.check()
    return ended


@pytest.fixture
def llm(make_llm: MakeLLM) -> LLM:
    return make_llm(adapters={name: ADAPTERS[name] for name in ("reverse", "upper")})


def test_what_fails_is_not_registered(
    make_llm: MakeLLM, monkeypatch: Patch, caplog: pytest.LogCaptureFixture
) -> None:
    """From a folder, and from memory; others are."""
    llm = make_llm(adapters={"reverse": ADAPTERS["reverse"]})
    with monkeypatch.context() as patch:
        spoil_kernels(patch)
        with caplog.at_level(logging.ERROR), pytest.raises(AdapterQuarantined, match="off by"):
            llm.load_adapter("upper", ADAPTERS["upper"])
        (record,) = caplog.records
        assert record.levelname == "ERROR" and str(ADAPTERS["upper"]) in record.getMessage()
        with pytest.raises(AdapterQuarantined):
            llm.publish_adapter("new", *in_memory(ADAPTERS["upper"]))
    stats = llm.stats()
    assert stats.self_checks == {"passed": 1, "failed": 2, "skipped": 0}
    assert stats.self_check_s is not None and sum(stats.self_check_s.counts) == 3
    assert stats.quarantined_adapters == (), "nobody knows them"
    assert texts(llm, "reverse", "hello") == [answer("reverse", "hello")]
    llm.load_adapter("upper", ADAPTERS["upper"])
    llm.publish_adapter("new", *in_memory(ADAPTERS["upper"]))
    for name in ("upper", "new"):
        assert texts(llm, name, "hello") == [answer("upper", "hello")]


def in_memory(folder: Path) -> tuple[dict[str, object], dict[str, Tensor]]:
    config = json.loads((folder / "adapter_config.json").read_text())
    return config, load_file(folder / "adapter_model.safetensors")


def test_what_was_not_checked_and_fails_now_is_not_served(
    make_llm: MakeLLM, monkeypatch: Patch
) -> None:
    """Until it passes; others are."""
    with monkeypatch.context() as patch:
        patch.setattr(selfcheck, "with_extras", out_of_memory)
        llm = make_llm(adapters={name: ADAPTERS[name] for name in ("reverse", "upper")})
    assert llm.stats().self_checks == {"passed": 0, "failed": 0, "skipped": 2}
    right = texts(llm, "reverse", "hello")
    with monkeypatch.context() as patch:
        spoil_kernels(patch)
        with pytest.raises(AdapterQuarantined):
            llm.load_adapter("upper", ADAPTERS["upper"])
    digest = llm._registry.resolve("upper").ref.digest
    assert llm.stats().quarantined_adapters == (digest,)
    ended = finish(llm, {"a": "upper", "b": "reverse", "c": None})
    assert [ended[i].finish_reason for i in "abc"] == ["error", "stop", "stop"]
    assert ended["a"].error is not None and ended["a"].error[0] == "adapter_quarantined"
    assert texts(llm, "reverse", "hello") == right == [answer("reverse", "hello")]
    llm.load_adapter("upper", ADAPTERS["upper"])
    assert llm.stats().quarantined_adapters == ()
    assert texts(llm, "upper", "hello") == [answer("upper", "hello")]


def test_without_checks(make_llm: MakeLLM, monkeypatch: Patch) -> None:
    """Copies are looked at all the same."""
    llm = make_llm(adapters={}, self_check=False)
    with monkeypatch.context() as patch:
        spoil_kernels(patch)
        llm.load_adapter("upper", ADAPTERS["upper"])
    spoil_copies(llm, monkeypatch, 1)
    assert texts(llm, "upper", "hello") == [answer("upper", "hello")]
    assert llm.stats().self_checks == {} and llm.stats().adapter_copy_faults == 1


def test_steps_go_on_beside_checks(llm: LLM) -> None:
    """Adapters are registered while answers are computed, which must stay right."""
    names = list(ADAPTERS)
    prompt = llm.tokenizer.encode("<|bos|><|user|>hello<|end|><|assistant|>")
    for number, name in enumerate(names):
        llm._client.engine.apply(Hold(number, AdapterSource(str(ADAPTERS[name])), name))
    ended: dict[int, str] = {}
    rounds = 0
    while len(ended) < len(names) or rounds < 20:
        wanted = {"a": "upper", "b": "reverse", "c": None}
        for request_id, name in wanted.items():
            ref = llm._registry.resolve(name).ref if name else None
            llm._client.engine.submit(EngineRequest(request_id, prompt, GREEDY, ref, seed=0))
        answers: dict[str, list[int]] = {i: [] for i in wanted}
        while wanted:
            for report in llm._client.engine.step():
                if isinstance(report, Reply):
                    assert report.info is not None, report.error
                    ended[report.call_id] = report.info.digest
                for event in report if isinstance(report, Tokens) else ():
                    answers[event.request_id] += event.token_ids
                    if event.finish_reason:
                        del wanted[event.request_id]
        rounds += 1
        decoded = [llm.tokenizer.decode(answers[i], skip_special_tokens=True) for i in "abc"]
        assert decoded == [answer(name, "hello") for name in ("upper", "reverse", None)]
    assert llm.stats().self_checks == {"passed": len(names), "failed": 0, "skipped": 0}


def test_a_paced_check_stands_back(fp32_worker: DeviceWorker, monkeypatch: Patch) -> None:
    """While steps run, after each layer, for nine times what it took."""
    adapter = random_image(fp32_worker, same_ranks(fp32_worker.model.table, 8))
    check = fp32_worker.adapters.self_check
    assert check is not None
    now, pauses, busy = 0.0, list[float](), True

    def clock() -> float:
        nonlocal now
        now += 0.001
        return now

    monkeypatch.setattr(selfcheck.time, "thread_time", clock)
    monkeypatch.setattr(selfcheck.time, "sleep", pauses.append)
    monkeypatch.setattr(check, "_is_busy", lambda: busy)
    assert check.check(adapter, paced=True) == "passed"
    assert pauses == pytest.approx([0.009] * 2 * fp32_worker.model.config.num_layers)
    assert check.check(adapter, paced=False) == "passed"
    busy = False
    assert check.check(adapter, paced=True) == "passed"
    assert len(pauses) == 2 * fp32_worker.model.config.num_layers


# -- what is copied ----------------------------------------------------------------------------


@pytest.mark.parametrize("num_bytes", [2, PAGE - 2, PAGE, 3 * PAGE + 6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_checksum_sees_any_byte(num_bytes: int, dtype: torch.dtype) -> None:
    torch.manual_seed(num_bytes)
    data = torch.randint(0, 256, (num_bytes // dtype.itemsize * dtype.itemsize,), dtype=torch.uint8)
    if not len(data):
        return
    right = int(checksum(data.view(dtype)))
    assert right == int(checksum(data.clone()))
    for at in {0, len(data) // 2, len(data) - 1}:
        for bit in range(8):
            data[at] ^= 1 << bit
            assert int(checksum(data)) != right
            data[at] ^= 1 << bit
    assert int(checksum(data)) == right


def test_a_checksum_sees_what_is_in_another_place() -> None:
    torch.manual_seed(0)
    pages = torch.randint(0, 256, (6, PAGE), dtype=torch.uint8)
    right = int(checksum(pages.flatten()))
    wrong = (
        pages[torch.tensor([1, 0, 2, 3, 4, 5])],
        pages[torch.tensor([5, 1, 2, 3, 4, 0])],
        pages.roll(1, 0),
        pages[:5],
        torch.cat((pages[:3], torch.zeros_like(pages[3:]))),
        torch.cat((pages[:4], pages[2:4])),
        pages.flatten().roll(8).view(6, PAGE),
    )
    assert right not in {int(checksum(other.flatten())) for other in wrong}


def test_a_copys_checksum_is_of_what_is_in_memory(
    fp32_worker: DeviceWorker, monkeypatch: Patch
) -> None:
    """Not of what was to be copied."""
    pool, summed = fp32_worker.pool, list[int]()

    def spy(data: Tensor) -> Tensor:
        summed.append(data.data_ptr())
        return checksum(data)

    monkeypatch.setattr(base, "checksum", spy)
    data = torch.randn(3000)
    assert pool.write(64, data) == int(checksum(data))
    assert summed == [pool.arena[64:].data_ptr()]


def test_a_copy_that_goes_wrong_is_made_again(llm: LLM, monkeypatch: Patch) -> None:
    starts = spoil_copies(llm, monkeypatch, 1)
    assert texts(llm, "upper", "hello") == [answer("upper", "hello")]
    assert len(starts) == 2 and llm.stats().adapter_copy_faults == 1
    assert llm.stats().adapter_loads == 1
    assert texts(llm, "upper", "world") == [answer("upper", "world")]


def test_one_that_goes_wrong_twice_is_not_served(llm: LLM, monkeypatch: Patch) -> None:
    """Its requests get the reason, others their answers; later ones may find it right."""
    texts(llm, "reverse", "hello")
    spoil_copies(llm, monkeypatch, 2)
    ended = finish(llm, {"a": "upper", "b": "reverse", "c": None, "d": "upper"})
    assert [ended[i].finish_reason for i in "abcd"] == ["error", "stop", "stop", "error"]
    for event in (ended["a"], ended["d"]):
        assert event.error is not None and event.error[0] == "adapter_unavailable"
        assert "adapter memory" in event.error[1] and event.token_ids == []
    stats = llm.stats()
    assert (stats.adapter_copy_faults, stats.adapter_loads) == (2, 1)
    assert stats.quarantined_adapters == ()
    assert texts(llm, "upper", "hello") == [answer("upper", "hello")]


def test_a_sum_that_goes_wrong_is_made_again(llm: LLM, monkeypatch: Patch) -> None:
    starts = spoil_copies(llm, monkeypatch, 1)
    choice = [WeightedAdapter("upper", 1.0), WeightedAdapter("reverse", 0.001)]
    prompt = "<|bos|><|user|>hello<|end|><|assistant|>"
    (output,) = llm.generate(prompt, GREEDY, choice)
    assert output.text == answer("upper", "hello")
    assert len(starts) == 2 and llm.stats().adapter_copy_faults == 1


# -- what clients and operators see ------------------------------------------------------------


async def test_clients_and_operators_see_it(tmp_path: Path, monkeypatch: Patch) -> None:
    api = ApiWorld(tmp_path, byte_level(), INFO)
    error = AdapterQuarantined("it failed its check", "model")
    wire = (error.kind, error.message, error.param)
    bad: list[str] = []
    stats, events = EchoEngine.stats, EchoEngine._events

    async def told(self: EchoEngine) -> EngineStats:
        known = await stats(self)
        checks = {"passed": 4, "failed": len(bad), "skipped": 0}
        return replace(known, self_checks=checks, quarantined_adapters=tuple(bad))

    def answered(self: EchoEngine, request: EngineRequest) -> Iterator[TokenEvent]:
        if request.adapter and request.adapter.digest in bad:
            yield TokenEvent(request.request_id, [], finish_reason="error", error=wire)
        else:
            yield from events(self, request)

    monkeypatch.setattr(EchoEngine, "stats", told)
    monkeypatch.setattr(EchoEngine, "_events", answered)
    web = Web(api)
    for name in ("good", "bad"):
        assert (await web.load(name, api.adapter(name, name.upper()))).status_code == 200
    bad.append(next(r.digest for r in api.registry.adapters() if r.name == "bad"))
    shown = {c["id"]: c["quarantined"] for c in (await web.get("/v1/models")).json()["data"]}
    assert shown == {"base": False, "alias": False, "good": False, "bad": True}
    assert (await web.get("/v1/models/bad")).json()["quarantined"] is True
    loras = (await web.get("/v1/loras")).json()["loras"]
    assert [loras[name]["quarantined"] for name in ("good", "bad")] == [False, True]
    text = (await web.get("/metrics")).text
    assert 'weft:adapter_self_checks_total{result="failed"} 1' in text
    assert 'weft:adapter_self_checks_total{result="passed"} 4' in text
    assert "weft:adapters_quarantined 1" in text
    refused = await web.post("/v1/completions", {"model": "bad", "prompt": "abc"})
    assert refused.status_code == 503
    assert refused.json()["error"]["code"] == "adapter_quarantined"
    assert (await web.complete(model="good"))["choices"]
    api.engine.alive = False
    assert (await web.get("/v1/models")).status_code == 200


def test_a_layout_is_checked_once_unless_it_has_extras(
    worker: DeviceWorker, monkeypatch: Patch
) -> None:
    table, self_check = worker.model.table, worker.adapters.self_check
    assert self_check is not None
    num_checks = 0
    inner = self_check._check

    def count(image: AdapterImage, paced: bool) -> CheckResult:
        nonlocal num_checks
        num_checks += 1
        return inner(image, paced)

    monkeypatch.setattr(self_check, "_check", count)
    self_check._passed.clear()
    for rank, wanted in ((8, 1), (8, 1), (16, 2)):
        image = random_image(worker, same_ranks(table, rank))
        assert self_check.check(image, paced=False) == "passed"
        assert num_checks == wanted
    for wanted in (3, 4):
        image = random_image(worker, same_ranks(table, 8), all_extras(table))
        assert self_check.check(image, paced=False) == "passed"
        assert num_checks == wanted

"""What needs a CUDA device: `make test-gpu`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from attention_cases import TOLERANCE as ATTENTION_TOLERANCE
from attention_cases import random_batch, random_inputs, random_sinks
from graph_cases import Model, decode, mixed
from tables import build_table
from tiny import ADAPTERS, answer, ask, tasks

from weft import LLM, SamplingParams
from weft.core.targets import layout_of
from weft.kernels.attention import KVCache, reference_attend, write_kv
from weft.kernels.lora import AdapterPool, LoraBatch, Segment, make_backend
from weft.kernels.ops import make_ops
from weft.kernels.sampling import SamplingBatch, _filter, gumbel, sample
from weft.schedule.extents import Move

TIGHT = {
    "num_blocks": 20,
    "block_size": 4,
    "max_model_len": 80,
    "adapter_memory": 2 << 20,
    "max_num_seqs": 32,
    "max_num_batched_tokens": 64,
}
"""Chunks, evictions, and preemption: the cache holds three of an adapter's eight requests."""


@pytest.mark.parametrize("overlap", [True, False], ids=["overlapped", "plain"])
@pytest.mark.parametrize("backend", ["triton", "torch"])
@pytest.mark.parametrize("options", [{}, TIGHT], ids=["roomy", "tight"])
def test_every_adapter_answers_right(
    make_llm: Callable[..., LLM], overlap: bool, backend: str, options: dict[str, int]
) -> None:
    llm = make_llm(device="cuda", dtype="float32", overlap=overlap, lora_backend=backend, **options)
    jobs = [(name, word) for name in [None, *ADAPTERS] for word in tasks.words(3, 8)]
    outputs = llm.chat(
        [ask(word) for _, word in jobs],
        SamplingParams(max_tokens=40, temperature=0),
        [name for name, _ in jobs],
    )
    assert [o.text for o in outputs] == [answer(name, word) for name, word in jobs]
    if options:
        assert llm.stats().preemptions > 0 and llm.stats().adapter_evictions > 0


TOLERANCE = {torch.float32: 1e-5, torch.float16: 2**-10, torch.bfloat16: 2**-7}
"""Of a row's largest value: one unit in the last place, as y is rounded once; in fp32 the order
of the sums, which differs, weighs more than that."""


@pytest.mark.parametrize("filtered", [False, True], ids=["all", "top-k"])
def test_the_same_tokens_are_drawn_as_without_a_kernel(filtered: bool) -> None:
    logits_NV = 3 * torch.randn(40, 5001, device="cuda")
    random_M = torch.arange(0, 40, 3, device="cuda")
    temperature_M = torch.rand(14, device="cuda") + 0.3
    top_k_M = torch.full((14,), 50, device="cuda") if filtered else None
    seed_M = torch.randint(-(2**63), 2**63 - 1, (14,), device="cuda")
    batch = SamplingBatch(random_M, temperature_M, top_k_M, None, None, seed_M, seed_M % 1000)
    scaled_MV = _filter(logits_NV[random_M] / temperature_M[:, None], top_k_M, None)
    expected_N = logits_NV.argmax(-1)
    expected_N[random_M] = (scaled_MV + gumbel(seed_M, batch.position_M, 5001)).argmax(-1)
    assert torch.equal(sample(logits_NV, batch), expected_N)


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("rows", [1, 3, 40], ids=["decode", "few", "prefill"])
def test_triton_against_the_reference(dtype: torch.dtype, rows: int) -> None:
    """Odd widths, ranks 0 to 200 mixed, base rows among the others."""
    torch.manual_seed(0)
    device = torch.device("cuda")
    table = build_table([("linear", 515, [("q", 515), ("k", 131), ("v", 131)])])
    ranks = [(8, 0, 3), (200, 64, 1), (0, 17, 0), (16, 16, 16)]
    layouts = [layout_of(table, r) for r in ranks]
    pool = AdapterPool(table, sum(x.num_elements for x in layouts), 8, dtype, device)
    pool.arena.normal_(0, 0.1)
    start = 0
    for slot, layout in enumerate(layouts):
        pool.install(slot, start, layout)
        start += layout.num_elements
    segments = tuple(Segment(s, (s + 1) * rows, (s + 2) * rows) for s in range(len(ranks)))
    slot_T = torch.arange(-1, len(ranks), device=device).repeat_interleave(rows).int()
    batch = LoraBatch(slot_T, segments, slot_T, segments)
    x_TI = torch.randn(len(slot_T), 515, device=device).to(dtype)
    y_TO = torch.randn(len(slot_T), 777, device=device).to(dtype)
    got, want = y_TO.clone(), y_TO.clone()
    make_backend("triton", pool).begin(batch).linear(got, x_TI, 0)
    make_backend("reference", pool).begin(batch).linear(want, x_TI, 0)
    assert torch.equal(got[:rows], y_TO[:rows])
    error = (got.double() - want.double()).abs().amax(1) / want.double().abs().amax(1)
    assert error.max() <= TOLERANCE[dtype]
    assert not torch.equal(got[rows:], y_TO[rows:])


@pytest.mark.parametrize("dtype", ATTENTION_TOLERANCE, ids=str)
@pytest.mark.parametrize(
    ("window", "chunked"), [(None, False), (50, False), (50, True), (1000, True)]
)
@pytest.mark.parametrize("cap", [None, 0.6])
@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize(
    "lens",
    [[(1, 200), (1, 0), (1, 63)], [(1, 20), (150, 0), (1, 3000), (70, 300)]],
    ids=["decodes", "mixed"],
)
def test_attention_against_the_reference(
    lens: list[tuple[int, int]],
    has_sinks: bool,
    cap: float | None,
    window: int | None,
    chunked: bool,
    dtype: torch.dtype,
) -> None:
    batch = random_batch(lens, 16, 0)
    q, k, v, cache = random_inputs(batch, (8, 2), 16, 0, dtype)
    write_kv(k, v, cache, batch)
    cache = KVCache(cache.k.cuda(), cache.v.cuda())
    batch = replace(
        batch,
        block_table_SB=batch.block_table_SB.cuda(),
        seq_lens_S=batch.seq_lens_S.cuda(),
    )
    q = q.cuda()
    sinks = random_sinks(8, dtype).cuda() if has_sinks else None
    more = {"window": window, "chunked": chunked, "sinks_H": sinks, "cap": cap}
    want = reference_attend(q, cache, batch, scale=0.3, **more)
    got = make_ops("triton", q.device).attend(q, cache, batch, scale=0.3, **more)
    tolerance = ATTENTION_TOLERANCE[dtype]
    torch.testing.assert_close(got, want, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_graph_computes_what_its_kernels_do(tmp_path: Path, dtype: torch.dtype) -> None:
    model = Model(tmp_path, "cuda", dtype)
    with torch.inference_mode():
        graphs = model.graphs()
        steps = [
            decode([5], [-1]),
            decode([9, 1, 16, 4], [1, -1, 0, 0], [True, False, True, True]),
            decode([12, 2, 7, 13], [-1] * 4, [True] * 4),
            decode([3, 3], [0, 0]),
        ]
        for inputs in steps:
            got = graphs.run(inputs)
            assert got is not None
            assert torch.equal(got, model.run_freely(inputs))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("slots", [[-1] * 4, [0, 1, 1, -1]], ids=["base", "adapters"])
def test_a_graph_of_a_mixed_step_computes_what_its_kernels_do(
    tmp_path: Path, slots: list[int], dtype: torch.dtype
) -> None:
    """Of a step as large as one that was captured, so that all products have the same shapes."""
    model = Model(tmp_path, "cuda", dtype)
    with torch.inference_mode():
        inputs = mixed([2, 1, 3, 2], [32, 1, 30, 3], slots, [True] * 4)
        got = model.graphs().run(inputs)
        assert got is not None
        assert torch.equal(got, model.run_freely(inputs))


def test_graphs_change_no_token(make_llm: Callable[..., LLM]) -> None:
    """The same requests, seeded, with log-probabilities, with graphs and without."""
    llm = make_llm(device="cuda", dtype="float32", enable_prefix_caching=False)
    jobs = [(name, word) for name in [None, *ADAPTERS] for word in tasks.words(2, 8)]
    params = [
        SamplingParams(max_tokens=20, temperature=n % 2, seed=n, logprobs=2)
        for n in range(len(jobs))
    ]

    def run() -> list[list[int]]:
        outputs = llm.chat([ask(word) for _, word in jobs], params, [name for name, _ in jobs])
        return [o.token_ids for o in outputs]

    with_graphs = run()
    executor = llm._client.engine._worker._executor
    assert executor.graphs is not None
    executor.graphs = None
    assert run() == with_graphs


def test_a_graph_of_experts_computes_what_its_kernels_do(tmp_path: Path) -> None:
    """Several mixes of adapters and experts through the same graphs."""
    experts = {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    }
    model = Model(tmp_path, "cuda", torch.bfloat16, experts)
    assert model.decoder.is_capturable
    with torch.inference_mode():
        for inputs in (
            decode([9, 1, 16, 4], [1, -1, 0, 0]),
            decode([3, 8, 2, 7], [0, 0, 1, 1]),
            mixed([2, 1, 3, 2], [32, 1, 30, 3], [0, 1, 1, -1], [True] * 4),
            decode([3, 8, 2, 7], [-1] * 4),
        ):
            got = model.graphs_made.run(inputs, changes_experts=True)
            assert got is not None
            assert torch.equal(got, model.run_freely(inputs))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_on_a_gpu_nothing_waits_for_steps_but_what_must(dtype: torch.dtype) -> None:
    """Orders are queued behind the step that runs, which finds images at their old places; a load
    is complete before that step ends."""
    device = torch.device("cuda")
    table = build_table(
        [("linear", 8, [("q", 6), ("k", 4)]), ("linear", 6, [("down", 8)])],
    )
    pool = AdapterPool(table, 1 << 20, 4, dtype, device)
    layout = layout_of(table, (3, 0, 2))
    size = layout.num_elements
    image = torch.randn(size).to(dtype).pin_memory()
    busy = torch.cuda.Event()  # type: ignore[no-untyped-call]
    for cycles in (1, 1 << 31):  # first once for all, as the first launch of a kernel loads it
        pool.write(size // 2, image)
        pool.install(0, size // 2, layout)
        torch.cuda.synchronize()
        torch.cuda._sleep(cycles)
        seen = pool.arena[size // 2 : size // 2 + size].clone()
        busy.record()
        pool.move([Move(0, size // 2, 0, size)])
        pool.clear(1)
        pool.install(1, 4 * size, layout)
        pool.write(4 * size, image)
    assert not busy.query(), "it waited for the step"
    torch.cuda.synchronize()
    assert torch.equal(pool.arena[4 * size : 5 * size].cpu(), image)
    assert torch.equal(seen.cpu(), image)
    assert torch.equal(pool.arena[:size].cpu(), image)
    assert pool.a_offset_SG[:2].tolist() == [
        list(layout.a_offset),
        [4 * size + o for o in layout.a_offset],
    ]
    assert pool.b_offset_SL[0].tolist() == list(layout.b_offset)
    assert pool.rank_SL[0].tolist() == pool.rank_SL[1].tolist() == [3, 0, 2]

"""What needs a CUDA device: `make test-gpu`."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tiny import ADAPTERS, answer, ask, tasks

from weft import LLM, SamplingParams
from weft.core.targets import build_table, layout_of
from weft.kernels.lora import AdapterPool, LoraBatch, Segment, make_backend

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

TIGHT = {
    "num_blocks": 60,
    "block_size": 4,
    "max_model_len": 200,
    "adapter_memory": 2 << 20,
    "max_num_seqs": 32,
    "max_num_batched_tokens": 64,
}
"""Chunks, preemption and evictions."""


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

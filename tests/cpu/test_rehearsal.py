"""Steps that are run before requests come."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from engines import MakeLLM
from graph_cases import CONFIG

from weft.core.errors import AdapterQuarantined
from weft.core.sampling import SamplingParams
from weft.core.stages import Stages
from weft.core.targets import Extras, Packed, build_table, layout_of
from weft.kernels.attention import make_batch
from weft.kernels.collective.base import ALONE
from weft.kernels.delta import StateRows
from weft.kernels.ops import Ops
from weft.models.config import load_model_config
from weft.models.decoder import Decoder, StepContext, allocate_kv_cache
from weft.models.loading import dummy_weights
from weft.schedule.plan import Admitted, StepPlan
from weft.worker import build
from weft.worker.execute import StepExecutor
from weft.worker.inputs import RowState
from weft.worker.memory import CacheSizes
from weft.worker.records import StepOrder, packed
from weft.worker.rehearsal import SLOT, Rehearsal, rehearsed_adapter

HYBRID = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "num_hidden_layers": 6,
    "layer_types": 2 * ["linear_attention", "linear_attention", "full_attention"],
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}


def test_all_kinds_of_steps_are_rehearsed_and_no_token_changes(make_llm: MakeLLM) -> None:
    llm = make_llm(adapters={}, max_num_seqs=16, max_model_len=128)
    worker = llm._client.engine._worker
    facts, pool = worker.facts, worker.pool
    [before] = llm.generate([[5, 6, 7, 8]])
    pool.install(SLOT, 0, rehearsed_adapter(pool.table))
    rehearsal = Rehearsal(16, 256, 128, 16, facts.num_blocks, facts.num_states, facts.vocab_size)
    steps = list(rehearsal.steps())
    with torch.inference_mode():
        worker._executor.rehearse(steps)
    worker.adapters.self_check.rehearse()
    pool.clear(SLOT)
    assert max(len(step.ids_T) for step in steps) == 256
    for kind in ("sampling", "prompt", "num_logprobs_N"):
        assert any(getattr(step, kind) is not None for step in steps), kind
    shapings = [step.shaping for step in steps if step.shaping is not None]
    for kind in ("bias", "penalties", "mask"):
        assert any(getattr(shaping, kind) is not None for shaping in shapings), kind
    assert {1, 2, 4, 8} == {
        len(step.seq_lens_S) - 1
        for step in steps
        if step.prompt is None and sorted(set(np.diff(step.query_start))) == [1, 16]
    }
    assert any(step.pooled for step in steps) and any(step.segments for step in steps)
    [after] = llm.generate([[5, 6, 7, 8]])
    assert after.token_ids == before.token_ids


def test_what_is_rehearsed_was_launched_before_to_be_compiled(
    make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over several ranks, the check of adapters has kernels that no step has."""
    compiling = pytest.importorskip("weft.kernels.compiling")
    llm = make_llm(adapters={}, max_num_seqs=2, max_model_len=32)
    worker = llm._client.engine._worker
    facts, check, is_ahead = worker.facts, worker.adapters.self_check, [False]
    run: dict[bool, list[object]] = {True: [], False: []}

    @contextmanager
    def ahead(rank: int, num_ranks: int) -> Iterator[None]:
        is_ahead[0] = True
        yield
        is_ahead[0] = False

    def told(name: str, do: Callable[..., object]) -> Callable[..., object]:
        def call(*args: object, **kwargs: object) -> object:
            run[is_ahead[0]].append(name)
            return do(*args, **kwargs)

        return call

    def not_computed(*_: object) -> str:
        if is_ahead[0]:
            raise AdapterQuarantined("nothing is computed yet", "lora_path")
        return "passed"

    monkeypatch.setattr(compiling, "compiling_ahead", ahead)
    monkeypatch.setattr(compiling, "tell_of_more", told("told", lambda: None))
    monkeypatch.setattr(StepExecutor, "run", told("step", StepExecutor.run))
    monkeypatch.setattr(check, "_check", told("check", not_computed))
    sizes = 16, facts.num_blocks, facts.num_states, facts.vocab_size
    rehearsal = Rehearsal(2, 32, 32, *sizes)
    sizes = CacheSizes(facts.num_blocks, facts.num_states, 0)
    executor, activity = worker._executor, worker._activity
    parts = build.DeviceParts(worker.model, worker.pool, executor, activity, check, sizes, 32)
    with torch.inference_mode():
        build._use_first(parts, rehearsal, ALONE, Stages(), told("compiled", lambda: None))
    assert run[True][-1] == "check" and run[False] == ["told", "compiled", *run[True]]


def test_kernels_for_adapters_of_experts_are_rehearsed_where_there_are_experts() -> None:
    linear = Packed("0.o", "linear", 8, (8,), ("layers.0.o_proj",))
    experts = Packed("0.experts_down", "experts", 8, (8,), ("layers.0.mlp.experts.down_proj",))
    for rows, has_experts in (([linear], False), ([linear, experts], True)):
        layout = rehearsed_adapter(build_table(rows, [], False, 4))
        assert layout.has_experts == has_experts and not layout.max_rank


def test_adapters_of_routers_in_float32_count_as_those_of_experts() -> None:
    """By A and B, by factors of the output alone, and not by anything else."""
    linear = Packed("0.o", "linear", 8, (8,), ("layers.0.o_proj",))
    router = Packed("0.router", "linear", 8, (4,), ("layers.0.mlp.gate",), float32=True)
    table = build_table([linear, router], [], False, 4)
    for ranks, extras, counts in (
        ((2, 0), None, False),
        ((2, 1), None, True),
        ((2, 0), Extras(scaled=frozenset({0})), False),
        ((2, 0), Extras(scaled=frozenset({1})), True),
        ((2, 0), Extras(shifted=frozenset({1})), True),
    ):
        assert layout_of(table, ranks, extras).has_experts == counts


def test_an_abridged_model_has_a_layer_of_each_sort(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | HYBRID))
    config, device = load_model_config(tmp_path), torch.device("cpu")
    weights = dummy_weights(config, torch.float32, device)
    decoder = Decoder(config, weights, Ops(), 32)
    short, layers = decoder.abridged()
    assert layers == [0, 2]
    kv = allocate_kv_cache(config, 4, 4, torch.float32, device, 1)
    batch = make_batch([3], [3], [[1]], 4, device)
    step = StepContext(torch.arange(3), batch, None, states=StateRows([0], [0, 3]))
    with torch.inference_mode():
        hidden_TI = short.forward(torch.arange(3), step, [kv[i] for i in layers])
        assert short.logits(hidden_TI, step).shape == (3, config.vocab_size)
        assert len(decoder._layers) == 6 and short._layers[1] is decoder._layers[2]
        assert short._norms[-1] is decoder._norms[-1]


def test_steps_reach_other_ranks_as_they_are() -> None:
    """Also those of which an order leaves out what is as in the step before."""
    steps = list(Rehearsal(8, 64, 128, 16, 40, 0, 512).steps())
    rows = RowState(4, 64, 16, 512)
    params = SamplingParams(max_tokens=8)
    admitted = [Admitted("", i, i % 2, [5, 6, 7], 0, params, seed=i) for i in range(3)]
    for at in range(3):
        counts, new = ([3] * 3, admitted) if at == 0 else ([1] * 3, [])
        starts = [0 if at == 0 else 2 + at] * 3
        blocks = [(i, 0, i) for i in range(3)] if at == 0 else []
        plan = StepPlan(at, [0, 1, 2], starts, counts, [1] * 3, sum(counts), new, blocks, [], [])
        steps.append(rows.build(plan))
    sent = got = order = None
    for inputs in steps:
        order = pickle.loads(packed(StepOrder.after(sent, inputs)))
        sent, got = inputs, order.inputs(got)
        np.testing.assert_equal(_plain(got), _plain(inputs))
    assert order is not None
    assert not {"row_T", "slot_T", "segments", "query_start"} & order.changed.keys()


def _plain(value: object) -> object:
    """A value that can be compared, arrays in records too."""
    if is_dataclass(value) and not isinstance(value, type):
        return [_plain(getattr(value, field.name)) for field in fields(value)]
    return [_plain(each) for each in value] if isinstance(value, list | tuple) else value

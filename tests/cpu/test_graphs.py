"""Steps from fixed places, padded to captured sizes, against the same steps run freely."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from dealing import deal
from graph_cases import (
    MAX_LEN,
    MAX_ROWS,
    TOKEN_SIZES,
    Model,
    decode,
    mixed,
    tensors_of,
    with_guesses,
    with_states,
)

import weft.kernels.delta as delta
import weft.kernels.triton_delta_chunks as triton_delta_chunks
import weft.kernels.triton_ops as triton_ops
import weft.kernels.triton_short_conv as triton_short_conv
from weft.kernels.lora import make_backend
from weft.kernels.ops import Ops
from weft.models.decoder import Decoder
from weft.worker import graph_inputs
from weft.worker import graphs as graphs_module
from weft.worker.inputs import StepInputs
from weft.worker.sizes import batch_sizes, token_sizes

pytestmark = pytest.mark.skipif(not triton_ops.INTERPRETED, reason="compiled kernels are for a GPU")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(tmp_path_factory.mktemp("model"))


DECODES = [
    decode([5], [-1]),
    decode([9, 1, 16], [1, -1, 0], [True, False, True]),
    decode([3, 3], [0, 0]),
    decode([12, 2, 7, 13], [-1] * 4, [True] * 4),
    decode([2], [1]),
]
MIXED = {
    "prompt": mixed([7], [7], [-1], [True]),
    "part of a prompt": mixed([5], [7], [0], [False]),
    "one token of a prompt": mixed([1, 1], [9, 4], [1, -1], [False, True]),
    "base": mixed([1, 3, 1], [30, 29, 4], [-1] * 3, [True] * 3, [True, False, False]),
    "adapters": mixed([1, 3, 1, 2], [30, 20, 7, 31], [1, -1, 0, 0], [True, False, True, True]),
    "full": mixed([2, 1, 3, 2], [32, 1, 30, 3], [0, 1, 1, -1], [True] * 4),
}


def check(model: Model, inputs: StepInputs) -> torch.Tensor:
    """Compare the step in a graph with the same step run freely, whose logits are returned."""
    got, free = model.graphs_made.run(inputs), model.run_freely(inputs)
    assert got is not None
    torch.testing.assert_close(got, free, atol=1e-4, rtol=1e-4)
    return free


@pytest.mark.parametrize(
    "steps",
    [
        pytest.param(DECODES[1:4:2], id="few"),
        pytest.param(DECODES, id="all", marks=pytest.mark.exhaustive),
    ],
)
def test_decodes_of_any_mix_match_steps_without_a_graph(
    model: Model, steps: list[StepInputs]
) -> None:
    for inputs in steps:
        check(model, inputs)


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(("full", "part of a prompt", "adapters"), id="few"),
        pytest.param(
            ("full", "prompt", "base", "one token of a prompt"),
            id="others",
            marks=pytest.mark.exhaustive,
        ),
    ],
)
def test_steps_with_chunks_match_steps_without_a_graph(
    model: Model, names: tuple[str, ...]
) -> None:
    """After a larger step, of which nothing may be left behind."""
    for name in names:
        check(model, MIXED[name])


def test_a_graph_gives_the_hidden_states_too(model: Model) -> None:
    graphs = model.graphs(lora=False, token_sizes=TOKEN_SIZES[-1:], gives_hidden=True)
    for inputs in (DECODES[0], MIXED["base"]):
        assert graphs.run(inputs) is not None
        model.run_freely(inputs)
        got = graphs.hidden(len(inputs.ids_T))
        torch.testing.assert_close(got, model.hidden, atol=1e-4, rtol=1e-4)


FAMILIES = {
    "phi3": {
        "architectures": ["Phi3ForCausalLM"],
        "model_type": "phi3",
        "rope_theta": 1e4,
        "partial_rotary_factor": 0.75,
        "pad_token_id": None,
    },
    "olmo2": {"architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2", "rope_theta": 1e4},
}


@pytest.mark.parametrize(
    "changes",
    [FAMILIES["phi3"], pytest.param(FAMILIES["olmo2"], marks=pytest.mark.exhaustive)],
    ids=FAMILIES,
)
def test_families_with_blocks_of_their_own(
    changes: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With fused kernels, in graphs and without, and with plain operations."""
    monkeypatch.setattr(graphs_module, "batch_sizes", lambda max_seqs: [max_seqs])
    model = Model(tmp_path, changes=changes, token_sizes=TOKEN_SIZES[-1:])
    plain = copy.copy(model)
    plain.decoder = Decoder(model.decoder.config, model.weights, Ops(), MAX_LEN)
    plain.lora = make_backend("torch", model.pool)
    for inputs in (DECODES[1], MIXED["adapters"]):
        free = check(model, inputs)
        torch.testing.assert_close(free, plain.run_freely(inputs), atol=1e-4, rtol=1e-4)


HYBRID = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}


SHORT_CONV = {
    "architectures": ["Lfm2ForCausalLM"],
    "model_type": "lfm2",
    "num_hidden_layers": 2,
    "layer_types": ["conv", "full_attention"],
    "block_multiple_of": 16,
}

EXPERTS = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "hidden_size": 64,
    "head_dim": 16,
    "intermediate_size": 64,
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
}


SHARED_EXPERT = {
    "architectures": ["Qwen2MoeForCausalLM"],
    "model_type": "qwen2_moe",
    "hidden_size": 64,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "num_experts": 5,
    "num_experts_per_tok": 2,
}


@pytest.mark.parametrize("changes", [EXPERTS, SHARED_EXPERT], ids=["experts", "a shared one too"])
def test_experts_in_graphs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, object]
) -> None:
    """As by plain operations, with adapters that change experts and without any."""
    monkeypatch.setattr(graphs_module, "batch_sizes", lambda max_seqs: [max_seqs])
    model = Model(tmp_path, changes=changes, token_sizes=(8,))
    plain = copy.copy(model)
    plain.decoder = Decoder(model.decoder.config, model.weights, Ops(), MAX_LEN)
    plain.lora = make_backend("torch", model.pool)
    for slots in ([-1, 0, 1], [-1, -1, -1]):
        inputs = decode([9, 1, 4], slots)
        found = model.graphs_made.run(inputs, changes_experts=max(slots) >= 0).clone()
        torch.testing.assert_close(found, plain.run_freely(inputs), atol=1e-4, rtol=1e-4)


FEW = [with_states(DECODES[1]), with_states(mixed([1, 4], [1, 4], [-1, 1], [True, True]))]
GUESSES = [
    with_guesses(decode([4, 9, 10, 11], [-1, 0, 0, 0]), [3, 0, 0, 0], [0, 2, 0, 0]),
    with_guesses(
        mixed([1, 1, 1, 3], [9, 10, 11, 5], [-1, -1, -1, 1], [True] * 4), [2, 2, 2, 1], [1, 0, 0, 0]
    ),
]
MANY = [with_states(MIXED["adapters"]), with_states(MIXED["full"])]


@pytest.mark.parametrize(("changes", "steps"), deal([HYBRID, SHORT_CONV], [GUESSES, FEW, MANY]))
def test_recurrent_states_in_graphs(
    changes: dict[str, object],
    steps: list[StepInputs],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With fused kernels, in graphs and without, and with plain operations: logits are the same,
    and so are the states of the step's sequences, while others stay as they are."""
    monkeypatch.setattr(graphs_module, "batch_sizes", lambda max_seqs: [max_seqs])
    for module in (graph_inputs, delta, triton_delta_chunks, triton_short_conv):
        monkeypatch.setattr(module, "CHUNK", 16)
    model = Model(tmp_path, changes=changes, token_sizes=(8,))
    plain = copy.copy(model)
    plain.decoder = Decoder(model.decoder.config, model.weights, Ops(), MAX_LEN)
    plain.lora = make_backend("torch", model.pool)
    kept = [t for cache in model.kv for t in tensors_of(cache)]
    before = [t.clone() for t in kept]
    for inputs in steps:
        results = []
        for run in (model.graphs_made.run, model.run_freely, plain.run_freely):
            for tensor, old in zip(kept, before, strict=True):
                tensor.copy_(old)
            logits = run(inputs)
            assert logits is not None
            results.append([logits.clone(), *(t.clone() for t in kept)])
        for other in results[1:]:
            for a, b in zip(results[0], other, strict=True):
                torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)
        others = torch.ones(MAX_ROWS, dtype=torch.bool)
        others[inputs.state_S] = False
        for after, old in zip(results[0][1:3], before[:2], strict=True):
            assert torch.equal(after[others], old[others])


@pytest.mark.parametrize("inputs", [DECODES[1], MIXED["adapters"]], ids=["decodes", "mixed"])
def test_padding_leaves_the_cache_and_last_tokens_alone(model: Model, inputs: StepInputs) -> None:
    model.run_freely(inputs)
    before = [t.clone() for cache in model.kv for t in (cache.k, cache.v)]
    model.graphs_made.run(inputs)
    after = [t for cache in model.kv for t in (cache.k, cache.v)]
    for a, b in zip(before, after, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)
    assert model.last_token_R.tolist() == list(range(10, 11 + MAX_ROWS))


def test_padding_reads_no_cache(model: Model) -> None:
    """Blocks that no sequence of the step has hold NaN."""
    inputs = MIXED["adapters"]
    want = model.run_freely(inputs)
    used = torch.from_numpy(inputs.block_table_SB).long().flatten()
    for cache in model.kv:
        for t in (cache.k, cache.v):
            kept = t[used].clone()
            t.fill_(torch.nan)
            t[used] = kept
    torch.testing.assert_close(model.graphs_made.run(inputs), want, atol=1e-4, rtol=1e-4)
    for cache in model.kv:
        cache.k.normal_()
        cache.v.normal_()


def test_other_steps_have_no_graph(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs_module, "batch_sizes", lambda max_seqs: [max_seqs])
    graphs = model.graphs(lora=False)
    assert graphs.run(decode([3, 3], [0, -1])) is None
    assert graphs.run(decode([3, 3], [-1, -1])) is not None
    too_long = mixed([1, TOKEN_SIZES[-1]], [30, 30], [-1, -1], [True, True])
    assert graphs.run(too_long) is None
    monkeypatch.setattr(graph_inputs, "MAX_CONTEXT", 29)
    assert graphs.run(MIXED["base"]) is None


def test_a_step_of_more_chunks_than_planned_has_no_graph(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graph_inputs, "MAX_CHUNKS", 1)
    monkeypatch.setattr(graphs_module, "batch_sizes", lambda max_seqs: [max_seqs])
    graphs = model.graphs(lora=False, token_sizes=TOKEN_SIZES[:1])
    assert graphs.run(mixed([2, 1, 1], [5] * 3, [-1] * 3, [True] * 3)) is not None
    monkeypatch.setattr(graph_inputs, "MAX_CHUNKS", 0)
    graphs = model.graphs(lora=False, token_sizes=TOKEN_SIZES[:1])
    assert graphs.run(mixed([2, 2], [5] * 2, [-1] * 2, [True] * 2)) is None


def test_a_step_of_many_short_chunks_has_a_larger_graph(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graphs_module, "batch_sizes", lambda max_seqs: [max_seqs])
    short = mixed([2, 2, 2], [5] * 3, [-1] * 3, [True] * 3)
    assert model.graphs(lora=False, token_sizes=[6]).run(short) is None
    want = model.run_freely(short)
    found = model.graphs(lora=False, token_sizes=[6, 16]).run(short)
    torch.testing.assert_close(found, want, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("max_rows", [1, 3, 8, 100, 256, 1000])
def test_sizes_cover_every_batch(max_rows: int) -> None:
    sizes = batch_sizes(max_rows)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == max_rows
    for rows in range(1, max_rows + 1):
        fits = min(size for size in sizes if size >= rows)
        assert fits - rows <= max(7, rows // 4)


@pytest.mark.parametrize("max_tokens", [1, 16, 100, 1024, 2048, 8192])
def test_sizes_cover_steps_up_to_the_largest(max_tokens: int) -> None:
    sizes = token_sizes(max_tokens)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == (max_tokens if max_tokens <= 4096 else 1024)
    sizes = [size for size in sizes if size <= 1024]

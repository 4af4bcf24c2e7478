"""Decode steps from fixed places, padded to captured sizes, against the same steps run freely."""

from __future__ import annotations

import json
import sys
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
import torch

if sys.platform != "linux":
    pytest.skip("Triton is for Linux", allow_module_level=True)
pytest.importorskip("triton")

import weft.kernels.triton_ops as triton_ops
from weft.core.targets import layout_of
from weft.engine.graphs import DecodeGraphs, bucket_sizes
from weft.engine.inputs import StepInputs
from weft.kernels.attention import make_batch
from weft.kernels.lora import AdapterPool, LoraBatch, Segment
from weft.kernels.lora.triton import Blocks, TritonBackend, Tuning
from weft.models.config import load_model_config
from weft.models.decoder import Decoder, StepContext
from weft.models.kv_cache import allocate_kv_cache
from weft.models.loading import dummy_weights
from weft.models.targets import target_table

pytestmark = pytest.mark.skipif(not triton_ops.INTERPRETED, reason="compiled kernels are for a GPU")

BLOCK, MAX_LEN, MAX_ROWS = 4, 32, 5
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "vocab_size": 64,
    "max_position_embeddings": MAX_LEN,
}


class Model:
    """A small random model over Triton's ops, two adapters resident, contexts in its cache."""

    def __init__(self, folder: Path) -> None:
        (folder / "config.json").write_text(json.dumps(CONFIG))
        config = load_model_config(folder)
        cpu = torch.device("cpu")
        table = target_table(config)
        weights = dummy_weights(config, torch.float32, cpu)
        self.decoder = Decoder(config, weights, table, triton_ops.TritonOps(cpu), MAX_LEN)
        self.kv = allocate_kv_cache(config, 40, BLOCK, torch.float32, "cpu")
        generator = torch.Generator().manual_seed(0)
        layouts = [layout_of(table, (rank,) * len(table.targets)) for rank in (3, 8)]
        size = max(layout.num_elements for layout in layouts)
        pool = AdapterPool(table, 2 * size, 4, torch.float32, cpu)
        pool.arena.normal_(0, 0.3, generator=generator)
        for slot, layout in enumerate(layouts):
            pool.install(slot, slot * size, layout)
        self.lora = TritonBackend(pool, Tuning(few=Blocks(columns=64, shrink_units=2)))
        self.last_token_R = torch.arange(10, 11 + MAX_ROWS)  # the last one is for padding
        for cache in self.kv:
            cache.k.normal_(generator=generator)
            cache.v.normal_(generator=generator)

    def graphs(self, lora: bool = True) -> DecodeGraphs:
        graphs = DecodeGraphs(
            self.decoder, self.kv, self.lora if lora else None, self.last_token_R, MAX_LEN // BLOCK
        )
        graphs.capture()
        return graphs

    @torch.no_grad()
    def run_freely(self, inputs: StepInputs) -> torch.Tensor:
        lens = inputs.seq_lens_S.tolist()
        tables = [row.tolist() for row in inputs.block_table_SB]
        attention = make_batch([1] * len(lens), lens, tables, BLOCK)
        lora = None
        if inputs.segments:
            segments = tuple(Segment(*s) for s in inputs.segments)
            slot = torch.from_numpy(inputs.slot_T)
            lora = self.lora.begin(LoraBatch(slot, segments, slot, segments))
        step = StepContext(torch.from_numpy(inputs.positions_T), attention, lora)
        ids = torch.from_numpy(inputs.ids_T).clone()
        if inputs.from_device_T is not None:
            known = self.last_token_R[torch.from_numpy(inputs.row_T)]
            ids = torch.where(torch.from_numpy(inputs.from_device_T), known, ids)
        return self.decoder.logits(self.decoder.forward(ids, step, self.kv), step)


def decode(lens: list[int], slots: list[int], from_device: list[bool] | None = None) -> StepInputs:
    """Inputs of a step of decodes; sequence s has its blocks from 8 s + 1 on."""
    slot = np.array(slots, np.int32)
    order = np.argsort(slot, kind="stable")
    length = np.array(lens, np.int32)[order]
    rows = order.astype(np.int64)
    width = -(-int(length.max()) // BLOCK)
    table = (rows[:, None] * 4 + 1 + np.arange(width)).astype(np.int32) % 40
    position = length.astype(np.int64) - 1
    block = np.take_along_axis(table, position[:, None] // BLOCK, 1)[:, 0].astype(np.int64)
    edges = [i for i in range(len(slots)) if i == 0 or slot[order][i] != slot[order][i - 1]]
    segments = tuple(
        (int(slot[order][i]), i, j)
        for i, j in zip(edges, [*edges[1:], len(slots)], strict=True)
        if slot[order][i] >= 0
    )
    n = np.arange(len(slots))
    inputs = StepInputs(**{field.name: None for field in fields(StepInputs)})
    given = {
        "ids_T": rows + 40,
        "from_device_T": None if from_device is None else np.array(from_device)[order],
        "row_T": rows,
        "positions_T": position,
        "slot_mapping_T": block * BLOCK + position % BLOCK,
        "block_table_SB": table,
        "seq_lens_S": length,
        "query_start": [*range(len(slots) + 1)],
        "slot_T": slot[order],
        "segments": segments,
        "sampled_rows_N": rows,
        "sampled_tokens_N": n,
        "slot_N": slot[order],
        "sampled_segments": segments,
    }
    return replace(inputs, **given)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(tmp_path_factory.mktemp("model"))


def test_steps_of_any_mix_match_steps_without_a_graph(model: Model) -> None:
    graphs = model.graphs()
    steps = [
        decode([5], [-1]),
        decode([9, 1, 16], [1, -1, 0], [True, False, True]),
        decode([3, 3], [0, 0]),
        decode([12, 2, 7, 8, 13], [-1] * 5, [True] * 5),
        decode([15] * 4, [1, 0, -1, 0]),
        decode([2], [1]),
    ]
    for inputs in steps:
        got = graphs.run(inputs)
        assert got is not None
        torch.testing.assert_close(got, model.run_freely(inputs), atol=1e-4, rtol=1e-4)


def test_padding_leaves_the_cache_and_last_tokens_alone(model: Model) -> None:
    graphs = model.graphs()
    inputs = decode([9, 1, 16], [1, -1, 0])
    model.run_freely(inputs)
    before = [t.clone() for cache in model.kv for t in (cache.k, cache.v)]
    graphs.run(inputs)
    after = [t for cache in model.kv for t in (cache.k, cache.v)]
    for a, b in zip(before, after, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)
    assert model.last_token_R.tolist() == list(range(10, 11 + MAX_ROWS))


def test_other_steps_have_no_graph(model: Model) -> None:
    graphs = model.graphs(lora=False)
    assert graphs.run(decode([3, 3], [0, -1])) is None
    assert graphs.run(decode([3, 3], [-1, -1])) is not None
    prefill = decode([3, 3], [-1, -1])
    object.__setattr__(prefill, "ids_T", np.arange(4))
    assert graphs.run(prefill) is None


@pytest.mark.parametrize("max_rows", [1, 3, 8, 100, 256, 1000])
def test_sizes_cover_every_batch(max_rows: int) -> None:
    sizes = bucket_sizes(max_rows)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == max_rows
    for rows in range(1, max_rows + 1):
        fits = min(size for size in sizes if size >= rows)
        assert fits - rows <= max(7, rows // 4)

"""A small model and decode steps for CUDA graphs."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import torch

from weft.core.targets import layout_of
from weft.engine.graphs import DecodeGraphs
from weft.engine.inputs import StepInputs
from weft.kernels.attention import make_batch
from weft.kernels.lora import AdapterPool, LoraBatch, Segment
from weft.kernels.lora.triton import Blocks, TritonBackend, Tuning
from weft.kernels.triton_ops import TritonOps
from weft.models.config import load_model_config
from weft.models.decoder import Decoder, StepContext
from weft.models.kv_cache import allocate_kv_cache
from weft.models.loading import dummy_weights
from weft.models.targets import target_table

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

    def __init__(
        self, folder: Path, device: str = "cpu", dtype: torch.dtype = torch.float32
    ) -> None:
        (folder / "config.json").write_text(json.dumps(CONFIG))
        config = load_model_config(folder)
        self.device = torch.device(device)
        table = target_table(config)
        weights = dummy_weights(config, dtype, self.device)
        self.decoder = Decoder(config, weights, table, TritonOps(self.device), MAX_LEN)
        self.kv = allocate_kv_cache(config, 40, BLOCK, dtype, self.device)
        generator = torch.Generator(self.device).manual_seed(0)
        layouts = [layout_of(table, (rank,) * len(table.targets)) for rank in (3, 8)]
        size = max(layout.num_elements for layout in layouts)
        pool = AdapterPool(table, 2 * size, 4, dtype, self.device)
        pool.arena.normal_(0, 0.3, generator=generator)
        for slot, layout in enumerate(layouts):
            pool.install(slot, slot * size, layout)
        self.lora = TritonBackend(pool, Tuning(few=Blocks(columns=64, shrink_units=2)))
        self.last_token_R = torch.arange(10, 11 + MAX_ROWS, device=self.device)
        """The last one is for padding."""
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
        attention = make_batch([1] * len(lens), lens, tables, BLOCK, self.device)
        lora = None
        if inputs.segments:
            segments = tuple(Segment(*s) for s in inputs.segments)
            slot = torch.from_numpy(inputs.slot_T).to(self.device)
            lora = self.lora.begin(LoraBatch(slot, segments, slot, segments))
        step = StepContext(torch.from_numpy(inputs.positions_T).to(self.device), attention, lora)
        ids = torch.from_numpy(inputs.ids_T).to(self.device)
        if inputs.from_device_T is not None:
            known = self.last_token_R[torch.from_numpy(inputs.row_T).to(self.device)]
            ids = torch.where(torch.from_numpy(inputs.from_device_T).to(self.device), known, ids)
        return self.decoder.logits(self.decoder.forward(ids, step, self.kv), step).float()


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

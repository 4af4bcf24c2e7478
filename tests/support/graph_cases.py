"""A small model and steps for CUDA graphs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

from weft.core.targets import layout_of
from weft.kernels.attention import KVCache, make_batch
from weft.kernels.delta import StateRows
from weft.kernels.lora import AdapterPool, LoraBatch, Segment
from weft.kernels.lora.triton import TritonBackend, Tuning
from weft.kernels.triton_ops import TritonOps
from weft.kernels.tuned import Blocks
from weft.models.blueprint import target_table
from weft.models.config import load_model_config
from weft.models.decoder import Decoder, LayerCache, StepContext, allocate_kv_cache
from weft.models.loading import dummy_weights
from weft.worker.graphs import StepGraphs
from weft.worker.inputs import StepInputs

BLOCK, MAX_LEN, MAX_ROWS, TOKEN_SIZES = 4, 32, 4, (4, 8)
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "vocab_size": 64,
    "max_position_embeddings": MAX_LEN,
}


class Model:
    """A small random model over Triton's ops, two adapters resident, contexts in its cache."""

    def __init__(
        self,
        folder: Path,
        device: str = "cpu",
        dtype: torch.dtype = torch.float32,
        changes: Mapping[str, object] | None = None,
        token_sizes: Sequence[int] = TOKEN_SIZES,
    ) -> None:
        """`changes`: to the configuration. `token_sizes`: those of the mixed steps to capture."""
        (folder / "config.json").write_text(json.dumps(CONFIG | dict(changes or {})))
        config = load_model_config(folder)
        self.device = torch.device(device)
        table = target_table(config)
        self.weights = dummy_weights(config, dtype, self.device)
        self.decoder = Decoder(config, self.weights, TritonOps(self.device), MAX_LEN)
        num_blocks = 8 * MAX_ROWS + 1
        self.kv = allocate_kv_cache(config, num_blocks, BLOCK, dtype, self.device, MAX_ROWS)
        generator = torch.Generator(self.device).manual_seed(0)
        layouts = [layout_of(table, (rank,) * len(table.targets)) for rank in (3, 8)]
        size = max(layout.num_elements for layout in layouts)
        pool = AdapterPool(table, 2 * size, 4, dtype, self.device)
        pool.arena.normal_(0, 0.3, generator=generator)
        for slot, layout in enumerate(layouts):
            pool.install(slot, slot * size, layout)
        self.pool = pool
        self.lora = TritonBackend(pool, Tuning(blocks=Blocks(columns=64, shrink_programs=2)))
        self.last_token_R = torch.arange(10, 11 + MAX_ROWS, device=self.device)
        """The last one is for padding."""
        for cache in self.kv:
            for tensor in tensors_of(cache):
                tensor.normal_(generator=generator)
        self.graphs_made = self.graphs(token_sizes=token_sizes)

    def graphs(
        self,
        lora: bool = True,
        token_sizes: Sequence[int] = TOKEN_SIZES,
        gives_hidden: bool = False,
    ) -> StepGraphs:
        graphs = StepGraphs(
            self.decoder,
            self.kv,
            self.lora if lora else None,
            self.last_token_R,
            MAX_LEN // BLOCK,
            token_sizes,
            gives_hidden,
        )
        graphs.capture()
        return graphs

    @torch.no_grad()
    def run_freely(self, inputs: StepInputs) -> torch.Tensor:
        def put(array: np.ndarray) -> torch.Tensor:
            return torch.from_numpy(array).to(self.device)

        lens = inputs.seq_lens_S.tolist()
        tables = [row.tolist() for row in inputs.block_table_SB]
        counts = np.diff(inputs.query_start).tolist()
        attention = make_batch(counts, lens, tables, BLOCK, self.device)
        lora = None
        if inputs.segments:
            each, sampled = (
                tuple(Segment(*s) for s in part)
                for part in (inputs.segments, inputs.sampled_segments)
            )
            lora = self.lora.begin(LoraBatch(put(inputs.slot_T), each, put(inputs.slot_N), sampled))
        states = None
        if inputs.state_S is not None:
            lags = None if inputs.lag_S is None else inputs.lag_S.tolist()
            states = StateRows(inputs.state_S.tolist(), inputs.query_start, lags=lags)
        step = StepContext(put(inputs.positions_T), attention, lora, states=states)
        ids = put(inputs.ids_T)
        if inputs.from_device_T is not None:
            known = self.last_token_R[put(inputs.row_T)]
            ids = torch.where(put(inputs.from_device_T), known, ids)
        self.hidden = self.decoder.forward(ids, step, self.kv)
        return self.decoder.logits(self.hidden[put(inputs.sampled_tokens_N)], step).float()


def tensors_of(cache: LayerCache) -> tuple[torch.Tensor, torch.Tensor]:
    """What a layer keeps of all sequences."""
    return (cache.k, cache.v) if isinstance(cache, KVCache) else (cache.inputs, cache.delta)


def with_states(inputs: StepInputs) -> StepInputs:
    """The inputs with recurrent states: each sequence has the state of its row's number."""
    return inputs._replace(state_S=inputs.row_T[inputs.query_start[:-1]])


def with_guesses(inputs: StepInputs, states: list[int], lags: list[int]) -> StepInputs:
    """The inputs with the sequences' `states`; where one stands again, the sequence is a guess.
    `lags`: how many tokens each state lacks."""
    return inputs._replace(state_S=np.array(states), lag_S=np.array(lags))


def decode(lens: list[int], slots: list[int], from_device: list[bool] | None = None) -> StepInputs:
    """Inputs of a step of decodes: contexts and slots of sequences."""
    n = len(lens)
    return mixed([1] * n, lens, slots, [True] * n, from_device)


def mixed(
    counts: list[int],
    lens: list[int],
    slots: list[int],
    samples: list[bool],
    from_device: list[bool] | None = None,
) -> StepInputs:
    """Inputs of a step that computes the last `counts` tokens of contexts; sequence s has its
    blocks from 8 s + 1 on."""
    slot = np.array(slots, np.int32)
    order = np.argsort(slot, kind="stable")
    slot, count, length = slot[order], np.array(counts)[order], np.array(lens, np.int32)[order]
    rows = order.astype(np.int64)
    table = rows[:, None] * 8 + 1 + np.arange(-(-int(length.max()) // BLOCK))
    seq = np.repeat(np.arange(len(slot)), count)
    ends = np.cumsum(count)
    position = np.arange(len(seq)) - (ends - length)[seq]
    sampled = np.flatnonzero(np.array(samples)[order])
    on_device = None if from_device is None else np.array(from_device)[order][seq]
    inputs = StepInputs._make([None] * len(StepInputs._fields))
    given = {
        "ids_T": (rows[seq] * 7 + position) % CONFIG["vocab_size"],
        "from_device_T": on_device,
        "row_T": rows[seq],
        "positions_T": position,
        "slot_mapping_T": table[seq, position // BLOCK] * BLOCK + position % BLOCK,
        "block_table_SB": table.astype(np.int32),
        "seq_lens_S": length,
        "query_start": [0, *ends.tolist()],
        "slot_T": slot[seq],
        "segments": _segments(slot[seq]),
        "sampled_rows_N": rows[sampled],
        "sampled_tokens_N": ends[sampled] - 1,
        "slot_N": slot[sampled],
        "sampled_segments": _segments(slot[sampled]),
    }
    return inputs._replace(**given)


def _segments(slot: np.ndarray) -> tuple[tuple[int, int, int], ...]:
    places = {int(s): np.flatnonzero(slot == s) for s in slot if s >= 0}
    return tuple((s, int(at[0]), int(at[-1]) + 1) for s, at in places.items())

"""A model that is cut for several ranks computes what the whole one does."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from adapter_kinds import ALWAYS, FAMILIES, LINEAR, MIXTURES, VOCAB, make_base
from dealing import deal
from rank_threads import on_ranks

from weft.checkpoint.base import row_squares
from weft.core.errors import ConfigError
from weft.kernels.attention import make_batch
from weft.kernels.collective.base import ALONE, Ranks
from weft.kernels.delta import StateRows
from weft.kernels.ops import Ops
from weft.models.blueprint import model_shard
from weft.models.config import ModelConfig, load_model_config
from weft.models.decoder import Decoder, StepContext, allocate_kv_cache
from weft.models.family import MoeConfig
from weft.models.loading import LoadedModel, dummy_weights, load_weights
from weft.models.share import share_of
from weft.models.weights import Weights
from weft.worker.gathered import GatheredWeights, OtherShares, Part

TOKENS = 11
OFTEN = {
    *ALWAYS,
    "mixtral",
    "gpt-oss",
    "gemma4",
    "qwen3.5",
    "granite4",
    "lfm2",
    "nemotron-h",
    "arcee",
}
"""The families that are cut in ways of their own."""


def config_of(family: str, folder: Path) -> ModelConfig:
    """A family's configuration, as one would read it from a checkpoint without weights."""
    made = copy.deepcopy(FAMILIES[family])
    made.architectures = [type(made).__name__.removesuffix("Config") + "ForCausalLM"]
    (folder / "config.json").write_text(made.to_json_string(use_diff=False))
    return load_model_config(folder)


def load(folder: Path, ranks: Ranks) -> tuple[ModelConfig, Weights]:
    config = load_model_config(folder)
    shard = model_shard(config, ranks.rank, ranks.size)
    weights = load_weights(folder, config, torch.float32, "cpu", shard=shard)
    return share_of(config, ranks.size), weights


def logits(folder: Path, ranks: Ranks) -> torch.Tensor:
    """Of two sequences at every position."""
    config, weights = load(folder, ranks)
    decoder = Decoder(config, weights, Ops(), 64, ranks)
    kv = allocate_kv_cache(config, 6, 4, torch.float32, "cpu", 2)
    batch = make_batch([TOKENS] * 2, [TOKENS] * 2, [[0, 1, 2], [3, 4, 5]], 4)
    states = StateRows([0, 1], batch.query_start)
    step = StepContext(torch.arange(TOKENS).repeat(2), batch, None, states=states)
    ids = torch.randint(VOCAB, (2 * TOKENS,), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        return decoder.logits(decoder.forward(ids, step, kv), step)


@pytest.mark.usefixtures("unwritten_is_nan")
@pytest.mark.parametrize(
    "family",
    [
        pytest.param(name, marks=[] if name in OFTEN else [pytest.mark.exhaustive])
        for name in FAMILIES
    ],
)
def test_ranks_compute_the_logits_of_the_whole_model(family: str, tmp_path: Path) -> None:
    """With four ranks, two of them have the same key and value heads; those of linear attention
    can't be had twice."""
    model = make_base(FAMILIES[family], tmp_path)
    whole = logits(tmp_path, ALONE)
    for size in (2,) if family in LINEAR else (2, 4):
        first, *others = on_ranks(size, lambda ranks: logits(tmp_path, ranks))
        torch.testing.assert_close(first, whole, atol=1e-4, rtol=1e-4)
        assert all(torch.equal(first, other) for other in others)
    held = [load(tmp_path, ranks)[1] for ranks in on_ranks(2, lambda ranks: ranks)]
    sizes = [sum(m.shape.numel() for m in weights.matrices.values()) for weights in held]
    kept = held[0].embed.numel() + sum(m.numel() for n, m in weights_of(model) if "router" in n)
    assert sizes[0] == sizes[1] < kept + sum(m.numel() for _, m in weights_of(model)) * 0.6


def weights_of(model: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [(name, weight) for name, weight in model.named_parameters() if weight.dim() > 1]


@pytest.mark.parametrize("family", ["qwen2", "phi3", "mixtral", "gpt-oss"])
def test_random_weights_are_those_of_the_whole_model(family: str, tmp_path: Path) -> None:
    config = replace(config_of(family, tmp_path), attention_out_bias=True)
    whole = dummy_weights(config, torch.float32, "cpu")
    for rank in range(2):
        shard = model_shard(config, rank, 2)
        own = dummy_weights(config, torch.float32, "cpu", shard=shard)
        for target, mine in zip(shard.whole.targets, shard.own.targets, strict=True):
            if target.kind != "linear":
                continue
            rows = torch.cat([torch.arange(VOCAB * 99)[s] for s in shard.outputs(target)])
            expected = whole.weight(target)[rows][:, shard.inputs(target)]
            assert torch.equal(own.weight(mine), expected), target.name
            bias, all_of_it = own.bias(mine), whole.bias(target)
            if all_of_it is None or not shard.adds_vectors(target):
                assert bias is None
            else:
                assert torch.equal(bias, all_of_it[rows])


class Others(OtherShares):
    def __init__(self, *weights: Weights) -> None:
        self._weights = weights

    def parts(self, part: Part, dtype: torch.dtype) -> list[torch.Tensor]:
        return [part.of(weights) for weights in self._weights]

    def row_squares(
        self, part: Part, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]
    ) -> list[torch.Tensor]:
        them = zip(self._weights, pairs, strict=True)
        return [row_squares(part.of(weights), *pair) for weights, pair in them]


@pytest.mark.parametrize("size", [2, 4])
def test_a_weight_is_put_together_from_what_ranks_have(size: int, tmp_path: Path) -> None:
    """Also the bias of a summed output, of which the first rank has all; and keys and values that
    two of four ranks have each. Lengths of rows are put together without the weights."""
    config = replace(config_of("qwen2", tmp_path), attention_out_bias=True)
    whole = dummy_weights(config, torch.float32, "cpu")
    shards = [model_shard(config, rank, size) for rank in range(size)]
    first, *others = (dummy_weights(config, torch.float32, "cpu", shard=s) for s in shards)
    own = share_of(config, size)
    model = LoadedModel(own, shards[0], first, torch.float32, torch.device("cpu"), None)
    gathered = GatheredWeights(model, shards, Others(*others))
    for target in shards[0].whole.targets:
        if target.kind == "linear":
            assert torch.equal(gathered.weight(target), whole.weight(target)), target.name
            bias, all_of_it = gathered.bias(target), whole.bias(target)
            assert (bias is None) == (all_of_it is None)
            assert bias is None or torch.equal(bias, all_of_it), target.name
            a, b = torch.rand(3, target.in_features), torch.rand(target.out_features, 3)
            expected = (whole.weight(target) + b @ a).square().sum(1)
            torch.testing.assert_close(gathered.row_squares(target, a, b), expected)


def moe(num_experts: int, width: int) -> MoeConfig:
    return MoeConfig(num_experts, 1, width, False, False, (True,) * 8, ("", "", "", ""))


@pytest.mark.parametrize(
    ("num_experts", "width", "size", "ways"),
    [
        pytest.param(128, 768, 8, (8, 1), id="Qwen3 30B-A3B: 96 columns"),
        pytest.param(32, 2880, 2, (2, 1), id="gpt-oss 20B: 1,440 columns"),
        pytest.param(32, 2880, 4, (1, 4), id="720 would be no units of 32"),
        pytest.param(128, 704, 4, (1, 4), id="Gemma 4 26B-A4B: 176 would not be, either"),
        pytest.param(6, 25, 2, (1, 2), id="a width that can't be divided"),
        pytest.param(5, 20, 2, (2, 1), id="experts that can't be divided"),
    ],
)
def test_experts_are_cut_by_width_where_kernels_take_that(
    num_experts: int, width: int, size: int, ways: tuple[int, int], tmp_path: Path
) -> None:
    """`ways`: by how many the width is divided, and by how many the number of experts."""
    config = replace(config_of("gpt-oss", tmp_path), num_heads=8, moe=moe(num_experts, width))
    own = share_of(config, size).moe
    assert own is not None
    assert (width // own.intermediate_size, num_experts // own.num_here) == ways
    assert own.num_experts == num_experts


def test_experts_that_can_not_be_divided_are_refused_by_name(tmp_path: Path) -> None:
    config = replace(config_of("gpt-oss", tmp_path), moe=moe(5, 25))
    with pytest.raises(ConfigError, match="experts 25 nor their number 5") as caught:
        share_of(config, 2)
    assert caught.value.param == "tensor_parallel_size"


@pytest.mark.parametrize(
    ("family", "size"),
    [  # heads of linear attention can't be had twice
        *deal([family for family in MIXTURES if family not in LINEAR], [2, 4]),
        *deal([family for family in MIXTURES if family in LINEAR], [2]),
    ],
)
def test_a_rank_has_its_part_of_experts(family: str, size: int, tmp_path: Path) -> None:
    make_base(FAMILIES[family], tmp_path)
    config = load_model_config(tmp_path)
    loaded = load_weights(tmp_path, config, torch.float32, "cpu")
    random = dummy_weights(config, torch.float32, "cpu")
    for rank in range(size):
        shard = model_shard(config, rank, size)
        read = load_weights(tmp_path, config, torch.float32, "cpu", shard=shard)
        made = dummy_weights(config, torch.float32, "cpu", shard=shard)
        for key, groups in shard.whole.by_key.items():
            if groups[0].kind != "experts":
                continue
            target = groups[-1].slices[0]
            here, columns = shard.copies("experts"), shard.inputs(target)
            parts = shard.whole.groups[target.group].packed.parts
            assert groups[0].out_features == sum(parts)
            rows = torch.cat([torch.arange(999)[s] for s in shard.outputs(groups[0].slices[0])])
            if len(groups[0].slices) > 1:
                rows = torch.cat((rows, rows + parts[0]))
            for whole, own in ((loaded, read), (random, made)):
                expected = whole.dense(key)[here][:, rows][..., columns]
                assert torch.equal(own.dense(key), expected)
                if key in own.biases:
                    assert torch.equal(own.biases[key], whole.biases[key][here][:, rows])
                else:
                    assert key not in whole.biases or rank


def test_what_does_not_divide_is_refused_by_name(tmp_path: Path) -> None:
    config = config_of("llama", tmp_path)
    with pytest.raises(ConfigError, match="num_attention_heads 4") as caught:
        model_shard(config, 0, 3)
    assert caught.value.param == "tensor_parallel_size"

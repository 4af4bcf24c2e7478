"""`weft plan`, against what a worker allocates, or would on a GPU."""

from __future__ import annotations

import json
import os
from dataclasses import replace

import pytest
import torch
from command_line import CliRunner

from weft.bench.engine import AdapterShape, preset_folder
from weft.bench.presets import PRESETS
from weft.cli.main import app
from weft.core.config import EngineArgs, engine_args
from weft.core.errors import ConfigError
from weft.kernels.delta import StateCache
from weft.models.blueprint import model_shard
from weft.models.config import ModelConfig, load_model_config
from weft.models.decoder import allocate_kv_cache, kv_bytes_per_block, state_bytes
from weft.models.families import LinearConfig
from weft.models.loading import dummy_weights
from weft.models.share import share_of
from weft.schedule.extents import ALIGN
from weft.worker import memory
from weft.worker.plan import GPUS, OTHER_BYTES, RankPlan, total_of

SIZES = pytest.mark.parametrize("size", [1, 2])
TOTAL = total_of("h200")
GPU = torch.device("cuda")


def model(name: str, **options: object) -> tuple[ModelConfig, EngineArgs]:
    with preset_folder(name) as folder:
        return load_model_config(folder), engine_args(folder, **options)


@SIZES
@pytest.mark.parametrize("quantization", [None, "fp8"])
def test_weights_are_those_of_a_model(size: int, quantization: str | None) -> None:
    config, args = model("tiny", dtype="bfloat16", quantization=quantization)
    shard = model_shard(config, 0, size)
    weights = dummy_weights(config, torch.bfloat16, "cpu", quantization=quantization, shard=shard)
    matrices = {id(matrix): matrix for matrix in weights.matrices.values()}
    others = (*weights.biases.values(), *weights.norms.values())
    num_bytes = sum(m.num_bytes for m in matrices.values()) + sum(v.nbytes for v in others)
    assert RankPlan(config, args, size).memory(TOTAL, 1, 0).weights == num_bytes


INT4 = {"quant_method": "gptq", "bits": 4, "group_size": 128}
FP8 = {"type": "float", "num_bits": 8, "strategy": "channel"}
COMPRESSED = {
    "quant_method": "compressed-tensors",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": FP8}},
}


@pytest.mark.parametrize(
    ("stated", "same"),
    [
        (INT4, "int4"),
        (INT4 | {"desc_act": True}, "values"),
        ({"quant_method": "fp8"}, "fp8-weight-only"),
        (COMPRESSED, "fp8-weight-only"),
        ({"quant_method": "bitsandbytes"}, "values"),
    ],
)
def test_a_quantized_checkpoint_takes_what_its_matrices_do(
    stated: dict[str, object], same: str
) -> None:
    """As much as a base in 16 bits that is rounded in the same way."""
    whole, args = model("llama-3.2-1b")
    config = replace(whole, num_layers=1)
    found = RankPlan(replace(config, quantized=stated), args, 1).memory(TOTAL, 1, 0)
    _, rounded = model("llama-3.2-1b", quantization=same)
    assert found.weights == RankPlan(config, rounded, 1).memory(TOTAL, 1, 0).weights


Q, UP = "model.layers.0.self_attn.q_proj", "model.layers.0.mlp.up_proj"


@pytest.mark.parametrize(
    ("names", "left"),
    [
        ([Q], ["qkv"]),
        (["lm_head", "self_attn", UP], ["qkv", "o", "gate_up"]),
        (["model.language_model.layers.0.mlp"], ["gate_up", "down"]),
        (["re:.*(q|down)_proj$"], ["qkv", "down"]),
        (["re:model.language_model.*mlp"], ["gate_up", "down"]),
        (["lm_head", "mlp.gate", "model.visual.blocks.0", "re:visual.*"], []),
    ],
)
def test_what_a_checkpoint_leaves_unconverted_takes_16_bits(
    names: list[str], left: list[str]
) -> None:
    """So do projections that are computed together with one of these."""
    whole, args = model("llama-3.2-1b")
    config = replace(whole, num_layers=1)

    def weights(stated: dict[str, object] | None) -> int:
        return RankPlan(replace(config, quantized=stated), args, 1).memory(TOTAL, 1, 0).weights

    hidden, inner, kv = config.hidden_size, config.layer(0).intermediate_size, 512
    outputs = {"qkv": hidden + 2 * kv, "o": hidden, "gate_up": 2 * inner, "down": inner}
    share = sum(outputs[each] for each in left) / sum(outputs.values())
    for field, stated in (("modules_to_not_convert", INT4), ("ignore", COMPRESSED)):
        least = weights(stated)
        lost = (weights(stated | {field: names}) - least) / (weights(None) - least)
        assert lost == pytest.approx(share, abs=1e-3)


def of_one_layer(stated: dict[str, object] | None, size: int = 1, dtype: str = "auto") -> int:
    """The bytes of weights with one layer."""
    whole, args = model("llama-3.2-1b", dtype=dtype)
    config = replace(whole, num_layers=1, quantized=stated)
    return RankPlan(config, args, size).memory(TOTAL, 1, 0).weights


def test_modules_of_a_block_that_are_named_are_the_only_ones_in_fewer_bits() -> None:
    names = [["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"], ["mlp.down_proj"]]
    left = {"modules_to_not_convert": ["o_proj", "gate_proj", "up_proj"]}
    found = of_one_layer(INT4 | {"modules_in_block_to_quantize": names})
    assert of_one_layer(INT4) < found == of_one_layer(INT4 | left) < of_one_layer(None)


def test_each_matrix_is_counted_by_its_own_group_of_compressed_tensors() -> None:
    """A name comes before a regular expression, and that before a class, whatever their order."""
    four = {"type": "int", "num_bits": 4, "strategy": "group", "group_size": 128}
    eight = {"type": "int", "num_bits": 8, "strategy": "channel"}

    def weights(*groups: tuple[list[str], dict[str, object]]) -> int:
        made = {f"group_{i}": {"targets": t, "weights": w} for i, (t, w) in enumerate(groups)}
        return of_one_layer({"quant_method": "compressed-tensors", "config_groups": made})

    all_four, all_eight = weights((["Linear"], four)), weights((["Linear"], eight))
    down = "model.layers.0.mlp.down_proj"
    mixed = weights((["Linear"], four), (["re:.*down_proj"], eight))
    assert mixed == weights((["re:.*mlp"], four), (["Linear"], four), ([down], eight))
    hidden, inner = 2048, 8192
    fewer_scales = 4 * hidden * (inner // 128 - 1)
    assert mixed - all_four == hidden * inner // 2 - fewer_scales
    assert all_four < mixed < all_eight
    # up has another format than gate, which is computed with it, so both take 16 bits.
    apart = weights((["Linear"], eight), (["re:.*up_proj"], four))
    unnamed = weights((["re:.*(self_attn|down_proj)"], eight))
    assert apart == unnamed == all_eight + 2 * inner * hidden - 2 * 4 * inner


def test_a_matrix_that_ranks_would_cut_within_a_group_takes_16_bits() -> None:
    """8,192 inputs of 8 ranks are 1,024 each, half of a group; q, k, v, gate and up are cut by
    outputs, and o has inputs of 2,048 in one group."""
    wide, left = INT4 | {"group_size": 2048}, {"modules_to_not_convert": ["down_proj"]}
    assert of_one_layer(wide, 8) == of_one_layer(wide | left, 8) > of_one_layer(INT4, 8)


def test_weights_of_a_model_in_32_bits_are_not_packed() -> None:
    for stated in (INT4, COMPRESSED):
        assert of_one_layer(stated, dtype="float32") == of_one_layer(None, dtype="float32")
        assert of_one_layer(stated, dtype="float16") < of_one_layer(None, dtype="float16")


def test_a_pattern_of_names_that_can_not_be_read() -> None:
    config, args = model("llama-3.2-1b")
    plan = RankPlan(replace(config, quantized=COMPRESSED | {"ignore": ["re:("]}), args, 1)
    with pytest.raises(ConfigError, match=r"quantization_config.ignore: 're:\('"):
        plan.memory(TOTAL, 1, 0)


@pytest.mark.parametrize(
    "stated",
    [
        INT4 | {"group_size": "128"},
        {"quant_method": "fp8", "weight_block_size": [128]},
        {"quant_method": "fp8", "weight_block_size": "128"},
    ],
)
def test_a_size_that_can_not_be_read(stated: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=r"must be a number|not two positive sizes"):
        of_one_layer(stated)


@SIZES
@pytest.mark.parametrize("asked", [None, 0.25, 4 << 30])
def test_memory_is_divided_as_a_worker_does(
    size: int, asked: int | float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, args = model("llama-3-8b", adapter_memory=asked)
    plan = RankPlan(config, args, size)
    adapter = plan.adapter_bytes(16, AdapterShape(16).of(plan.table))
    found = plan.memory(TOTAL, adapter, None)
    free = TOTAL - OTHER_BYTES - found.weights
    monkeypatch.setattr(memory, "total_bytes", lambda device: TOTAL)
    monkeypatch.setattr(memory, "free_bytes", lambda device: free)
    assert memory.adapter_bytes(args.lora.adapter_memory, GPU) == found.adapters
    free -= found.adapters
    blocks = memory.count_blocks(args.cache, share_of(config, size), torch.bfloat16, GPU)
    assert blocks * args.cache.block_size == found.kv_tokens
    assert found.num_adapters * adapter <= found.adapters < (found.num_adapters + 1) * adapter


def test_recurrent_states_take_memory_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many bytes as a worker allocates; what they take is not KV cache."""
    plain, args = model("tiny", dtype="bfloat16", max_num_seqs=8)
    linear = LinearConfig((True, True, False, False, False), 2, 4, 8, 8, 4)
    config = replace(plain, linear=linear)
    num_states = memory.count_states(config, 8)
    made = allocate_kv_cache(config, 1, 16, torch.bfloat16, "cpu", num_states)
    caches = [cache for cache in made if isinstance(cache, StateCache)]
    assert caches
    num_bytes = sum(cache.inputs.nbytes + cache.delta.nbytes for cache in caches)
    assert state_bytes(config, num_states, torch.bfloat16) == num_bytes
    found = RankPlan(config, args, 1).memory(TOTAL, 1, 0)
    free = TOTAL - OTHER_BYTES - found.weights
    monkeypatch.setattr(memory, "total_bytes", lambda device: TOTAL)
    monkeypatch.setattr(memory, "free_bytes", lambda device: free)
    of_model = args.cache, config, torch.bfloat16
    left = memory.cache_bytes(*of_model, GPU, num_states)
    num_states += memory.count_snapshots(*of_model, left)
    blocks = memory.count_blocks(*of_model, GPU, num_states)
    assert blocks * args.cache.block_size == found.kv_tokens


@pytest.mark.parametrize("layers", [None, LinearConfig((True, False), 2, 4, 8, 8, 4)])
def test_a_kv_cache_of_the_size_that_was_asked_for(layers: LinearConfig | None) -> None:
    """On a GPU as on a CPU; what states take comes beside it."""
    plain, args = model("tiny", dtype="bfloat16", max_num_seqs=8, kv_cache_memory=64 << 20)
    config = replace(plain, num_layers=2, ropes=plain.ropes[:2], linear=layers)
    block = kv_bytes_per_block(config, args.cache.block_size, torch.bfloat16)
    for device in (GPU, torch.device("cpu")):
        assert (
            memory.count_blocks(args.cache, config, torch.bfloat16, device, 9)
            == (64 << 20) // block
        )
    found = RankPlan(config, args, 1).memory(TOTAL, 1, 0)
    assert found.kv_tokens == (64 << 20) // block * args.cache.block_size


@pytest.mark.parametrize("num_ranks", [1, 2, 8])
def test_a_head_that_drafts_takes_memory_too(num_ranks: int) -> None:
    """A rank's share of its weights, and one more layer of KV cache, of which two of eight layers
    have some. Of eight ranks, two have the same key head."""
    changes = {"dtype": "bfloat16", "max_num_seqs": 8}
    config, args = model("qwen3.5-9b", **changes)
    plain = RankPlan(config, args, num_ranks).memory(TOTAL, 1, 0)
    args = engine_args("qwen3.5-9b", **changes, speculative="mtp")
    drafting = RankPlan(config, args, num_ranks).memory(TOTAL, 1, 0)
    hidden, size = 4096, 256
    inner, heads, keys = 12288 // num_ranks, 16 // num_ranks, max(4 // num_ranks, 1)
    attention = hidden * size * (2 * heads + 2 * keys) + heads * size * hidden
    norms = 5 * hidden + 2 * size
    head = 2 * hidden * hidden + attention + 3 * hidden * inner + norms
    assert drafting.weights - plain.weights == 2 * head
    num_layers = sum(not linear for linear in config.linear.layers)
    share = drafting.kv_tokens / plain.kv_tokens
    assert share == pytest.approx(num_layers / (num_layers + 1), rel=0.02)


def test_a_head_is_planned_for_models_that_have_one() -> None:
    config, args = model("llama-3-8b", speculative="mtp")
    with pytest.raises(ConfigError, match="no head that drafts"):
        RankPlan(config, args, 1)
    result = CliRunner().invoke(app, ["plan", "llama-3-8b", "--speculative", "mtp"])
    assert result.exit_code == 2 and "no head that drafts" in result.output


def test_sizes_of_adapters() -> None:
    """Known ones: of the 8B shape at rank 16, and half of it for half of the rank."""
    config, args = model("llama-3-8b")
    for size, mb in ((1, 83.9), (2, 56.6), (4, 43.0), (8, 36.2)):
        plan = RankPlan(config, args, size)
        adapted = AdapterShape(16).of(plan.table)
        assert round(plan.adapter_bytes(16, adapted) / 1e6, 1) == mb
        assert 2 * plan.adapter_bytes(8, adapted) == plan.adapter_bytes(16, adapted)


def test_whole_experts_and_their_adapters_are_divided_by_their_number() -> None:
    """Two ranks have a part of each expert, and either A or B whole; four have whole experts, each
    of which has both, whichever way other layers are divided."""
    config, args = model("gpt-oss-20b")
    both_halves = engine_args("gpt-oss-20b", fully_sharded_loras=True)
    one, two, four, fully = (
        RankPlan(config, args if size else both_halves, size or 4) for size in (1, 2, 4, 0)
    )
    adapted = [target for target in one.table.targets if target.kind == "experts"]
    whole, half, quarter, same = (p.adapter_bytes(16, adapted) for p in (one, two, four, fully))
    assert whole == 4 * quarter == 4 * same < 2 * half
    assert (one.table.num_experts, two.table.num_experts, four.table.num_experts) == (32, 32, 8)
    weights = [plan.memory(TOTAL, 1, 0).weights for plan in (one, two, four)]
    experts = 24 * 32 * (3 * 2880 * 2880 + 3 * 2880) * 2
    assert weights[0] - weights[2] == pytest.approx(experts * 3 / 4, rel=0.1)
    assert weights[0] - weights[1] == pytest.approx(experts / 2, rel=0.1)


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["plan", *arguments])
    return result.exit_code, result.output


def test_the_command() -> None:
    status, text = run("llama-3-70b", "--adapters", "100")
    assert status == 0
    one, two = (line.split() for line in text.splitlines() if line.split()[:1] in (["1"], ["2"]))
    assert one == ["1", "141.11", "GB", "does", "not", "fit"]
    assert two[:3] == ["2", "71.61", "GB"] and two[5] == "100"
    assert "q_proj,k_proj,v_proj,o_proj" in text


def test_as_json() -> None:
    status, text = run("qwen3-32b", "--gpu", "80G", "--tensor-parallel-size", "2,5,4", "--json")
    facts = json.loads(text)
    assert (status, facts["gpu_bytes"]) == (0, 80 << 30)
    assert [each["size"] for each in facts["plans"]] == [2, 4]  # 5 does not divide its heads
    assert all(each["fits"] for each in facts["plans"])


def test_nothing_fits() -> None:
    status, text = run("llama-3-8b", "--gpu", "l4", "--adapters", "200")
    assert status == 0 and "does not fit" in text
    status, _ = run("llama-3-70b", "--gpu", "l4", "--tensor-parallel-size", "1,2")
    assert status == 1


@pytest.mark.parametrize(
    "arguments",
    [
        ("llama-3-8b", "--gpu", "abacus"),
        ("llama-3-8b", "--tensor-parallel-size", "3"),
        ("llama-3-8b", "--targets", "nose_proj"),
        ("no/such/model/here",),
    ],
)
def test_what_can_not_be_planned(arguments: tuple[str, ...]) -> None:
    assert run(*arguments)[0] == 2


def test_a_misspelt_shape_is_told_which_one_was_meant() -> None:
    status, text = run("llama3-8b")
    assert status == 2 and "there is no folder or shape llama3-8b; did you mean llama-3-8b?" in text


def test_names_of_gpus() -> None:
    assert total_of(48 << 30) == 48 << 30
    with pytest.raises(ConfigError, match="h200"):
        total_of("h2000")
    status, text = run("--help")
    assert status == 0 and all(name in text for name in GPUS)


def test_all_pages_of_a_shared_file_are_there_once_it_is_populated() -> None:
    num_bytes = 3 * memory.POPULATING_THREADS * ALIGN + ALIGN
    fd = memory.shared_file(num_bytes)
    try:
        piece = memory._in_one_piece(num_bytes, fd)
        assert os.fstat(fd).st_blocks == 0
        memory.populate(piece)
        assert os.fstat(fd).st_blocks * 512 >= num_bytes and not piece.any()
    finally:
        os.close(fd)


def test_help_names_all_known_shapes() -> None:
    shown = CliRunner().invoke(app, ["plan", "--help"], env={"COLUMNS": "80"}).stdout
    listed = " ".join(shown.split()).partition("a known shape: ")[2].partition(". ")[0]
    assert sorted(listed.split(", ")) == sorted(PRESETS)

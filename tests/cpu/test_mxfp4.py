"""Checkpoints whose experts are in mxfp4 are read as the values that transformers makes of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GptOssConfig
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from weft.core.errors import ConfigError
from weft.models.blueprint import model_shard
from weft.models.config import load_model_config
from weft.models.loading import load_weights
from weft.models.weights import Weights

HIDDEN, INNER, EXPERTS = 32, 64, 3
CONFIG = GptOssConfig(
    vocab_size=40,
    hidden_size=HIDDEN,
    intermediate_size=INNER,
    num_hidden_layers=1,
    num_attention_heads=4,
    num_key_value_heads=1,
    head_dim=16,
    num_local_experts=EXPERTS,
    num_experts_per_tok=2,
    max_position_embeddings=64,
)
NAMES = {
    "model.layers.0.mlp.experts.gate_up_proj": (2 * INNER, HIDDEN),
    "model.layers.0.mlp.experts.down_proj": (HIDDEN, INNER),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint whose blocks and scales lie in different files."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(CONFIG).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    files = {"b.safetensors": tensors, "a.safetensors": {}}
    for name, (outputs, inputs) in NAMES.items():
        del tensors[name]
        shape = (EXPERTS, outputs, inputs // 32)
        scales = torch.randint(100, 140, shape, dtype=torch.uint8)
        files["a.safetensors"][f"{name}_scales"] = scales
        blocks = torch.randint(256, (*shape, 16), dtype=torch.uint8)
        files["b.safetensors"][f"{name}_blocks"] = blocks
    for file, content in files.items():
        save_file(content, tmp_path / file)
    index = {name: file for file, content in files.items() for name in content}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    state_quantization(tmp_path, "mxfp4")
    return tmp_path


def state_quantization(folder: Path, method: str) -> None:
    path = folder / "config.json"
    stated = {"quant_method": method, "modules_to_not_convert": ["lm_head"]}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": stated}))


def load(folder: Path, dtype: torch.dtype = torch.float32) -> Weights:
    return load_weights(folder, load_model_config(folder), dtype, "cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_values_are_those_of_transformers(folder: Path, dtype: torch.dtype) -> None:
    weights = load(folder, dtype)
    scales, blocks = (load_file(folder / f"{file}.safetensors") for file in "ab")
    for key, name in zip(("0.experts_gate_up", "0.experts_down"), NAMES, strict=True):
        args = blocks[f"{name}_blocks"], scales[f"{name}_scales"]
        wanted = convert_moe_packed_tensors(*args, dtype=torch.bfloat16).to(dtype)
        assert torch.equal(weights.dense(key), wanted.transpose(1, 2))
        assert torch.equal(weights.biases[key].float(), blocks[f"{name}_bias"].to(dtype).float())


def test_a_half_that_is_missing_is_named(folder: Path) -> None:
    scales = load_file(folder / "a.safetensors")
    del scales["model.layers.0.mlp.experts.down_proj_scales"]
    save_file(scales, folder / "a.safetensors")
    with pytest.raises(ConfigError, match=r"lacks model\.layers\.0\.mlp\.experts\.down_proj"):
        load(folder)


@pytest.mark.parametrize(
    ("file", "part", "change"),
    [
        ("a", "scales", lambda t: t[..., :1]),
        ("a", "scales", lambda t: t.view(torch.int8)),
        ("b", "blocks", lambda t: t.view(torch.int8)),
        ("b", "blocks", lambda t: t.flatten()),
    ],
    ids=["few scales", "signed scales", "signed blocks", "flat blocks"],
)
def test_a_half_that_does_not_fit_is_named(
    folder: Path, file: str, part: str, change: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    name, path = f"model.layers.0.mlp.experts.down_proj_{part}", folder / f"{file}.safetensors"
    tensors = load_file(path)
    tensors[name] = change(tensors[name]).contiguous()
    save_file(tensors, path)
    with pytest.raises(ConfigError, match=f"{name} has") as caught:
        load(folder)
    assert caught.value.param == name


def test_other_quantizations_are_refused(folder: Path) -> None:
    state_quantization(folder, "aqlm")
    with pytest.raises(ConfigError, match="quantized by aqlm") as caught:
        load_model_config(folder)
    assert caught.value.param == "quantization_config"


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_read_their_part_of_each_expert(folder: Path, size: int) -> None:
    """With four ranks, each reads half of a block's inputs of the down projection."""
    whole, config = load(folder), load_model_config(folder)
    for rank in range(size):
        shard = model_shard(config, rank, size)
        own = load_weights(folder, config, torch.float32, "cpu", shard=shard)
        both, inner = (slice(rank * n // size, (rank + 1) * n // size) for n in (2 * INNER, INNER))
        into, out = "0.experts_gate_up", "0.experts_down"
        assert torch.equal(own.dense(into), whole.dense(into)[:, both])
        assert torch.equal(own.biases[into], whole.biases[into][:, both])
        assert torch.equal(own.dense(out), whole.dense(out)[..., inner])
        assert (out in own.biases) == (rank == 0)

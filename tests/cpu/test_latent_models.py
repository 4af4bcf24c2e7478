"""Models with attention to latents: what they hold in memory, how their checkpoints are read, and
what adapters of the absorbed projection are refused or found to be wrong."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from adapter_kinds import CALL, FAMILIES, KINDS, lora, make_adapter, make_base
from safetensors.torch import load_file, save_file

from weft import LLM
from weft.core.config import ModelArgs
from weft.core.errors import AdapterInvalid, AdapterQuarantined, ConfigError
from weft.kernels.linear import DenseWeight
from weft.kernels.lora import LoraStep
from weft.kernels.lora.extras import ExtrasStep
from weft.kernels.lora.grouped import GroupedStep
from weft.models.config import load_model_config
from weft.models.decoder import allocate_kv_cache, kv_bytes_per_block
from weft.models.loading import dummy_weights, load_model, load_weights
from weft.models.share import share_of

OPTIONS = {"skip_tokenizer_init": True, "dtype": "float32", "num_blocks": 64, "block_size": 4}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("latents") / "base"
    make_base(FAMILIES["deepseek-v3"], made)
    return made


def test_the_cache_holds_each_latent_once(folder: Path) -> None:
    config = load_model_config(folder)
    kv = allocate_kv_cache(config, 5, 16, torch.bfloat16, "cpu")
    assert {cache.k.untyped_storage().data_ptr() for cache in kv} == {
        cache.v.untyped_storage().data_ptr() for cache in kv
    }
    assert [(*cache.k.shape, cache.v.shape[-1]) for cache in kv] == [(5, 16, 1, 28, 20)] * 2
    num_bytes = sum(cache.k.untyped_storage().nbytes() for cache in kv)
    assert num_bytes == 5 * kv_bytes_per_block(config, 16, torch.bfloat16)
    share = share_of(config, 4)  # each rank has all of the latents
    assert kv_bytes_per_block(share, 16, torch.bfloat16) * 5 == num_bytes


def test_blocks_of_fp8_are_read_as_their_values(folder: Path, tmp_path: Path) -> None:
    """As DeepSeek V3 and Kimi K2 are published, with smaller blocks."""
    plain, quantized, block = {}, {}, (16, 32)
    for name, value in load_file(folder / "model.safetensors").items():
        if value.dim() != 2 or "proj" not in name:
            plain[name] = quantized[name] = value
            continue
        rows, columns = (-(-size // part) for size, part in zip(value.shape, block, strict=True))
        scale = 0.01 + torch.rand(rows, columns)
        of_each = scale.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
        of_each = of_each[: value.shape[0], : value.shape[1]]
        codes = (value / of_each).clamp(-448, 448).to(torch.float8_e4m3fn)
        plain[name] = codes.float() * of_each
        quantized[name], quantized[f"{name}_scale_inv"] = codes, scale
    assert "model.layers.0.self_attn.kv_b_proj.weight_scale_inv" in quantized
    stated = json.loads((folder / "config.json").read_text())
    fp8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
    found = []
    for tensors, fields in ((plain, {}), (quantized, {**fp8, "weight_block_size": block})):
        config = stated | ({"quantization_config": fields} if fields else {})
        (tmp_path / "config.json").write_text(json.dumps(config))
        save_file(tensors, tmp_path / "model.safetensors")
        read = load_model_config(tmp_path)
        found.append(load_weights(tmp_path, read, torch.float32, "cpu"))
    for key, matrix in found[0].matrices.items():
        assert torch.equal(found[1].dense(key), found[0].dense(key)), key
        assert isinstance(matrix, DenseWeight)


def test_layers_that_draft_tokens_are_left_out(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tensors = load_file(folder / "model.safetensors")
    of_last = {name: tensor for name, tensor in tensors.items() if ".layers.1." in name}
    more = {name.replace(".1.", ".2.", 1): tensor.clone() for name, tensor in of_last.items()}
    more["model.layers.2.eh_proj.weight"] = torch.ones(32, 64)
    save_file(tensors | more, tmp_path / "model.safetensors")
    stated = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(stated | {"num_nextn_predict_layers": 1}))
    config = load_model_config(tmp_path)
    assert config == load_model_config(folder)
    weights = load_weights(tmp_path, config, torch.float32, "cpu")
    whole = load_weights(folder, config, torch.float32, "cpu")
    assert weights.matrices.keys() == whole.matrices.keys()
    assert f"{len(more)} tensors are not used" in caplog.text


def test_formats_leave_the_absorbed_projection_as_it_is(folder: Path) -> None:
    config = replace(load_model_config(folder), moe=None)
    plain, rounded = (
        dummy_weights(config, torch.float32, "cpu", quantization=name)
        for name in (None, "fp8-weight-only")
    )
    table = plain.table
    for name, target in table.by_name.items():
        same = torch.equal(plain.weight(target), rounded.weight(target))
        assert same == (target.kind != "linear" or target.slice in table.absorbed), name


def test_a_model_without_experts_is_not_deterministic_either(folder: Path, tmp_path: Path) -> None:
    stated = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(stated | {"first_k_dense_replace": 2}))
    args = ModelArgs(str(tmp_path), load_format="dummy", deterministic=True)
    with pytest.raises(ConfigError, match="does not serve attention to latents") as caught:
        load_model(args)
    assert caught.value.param == "deterministic"


def test_an_activated_lora_of_the_absorbed_projection_is_refused(
    folder: Path, tmp_path: Path
) -> None:
    fields = {"alora_invocation_tokens": list(CALL)}
    for targets in (["o_proj"], ["kv_b_proj", "o_proj"]):
        kind = replace(KINDS["aLoRA"], options=lora(targets, **fields), families=())
        base = make_base(FAMILIES["deepseek-v3"], tmp_path / "base")
        make_adapter(base, kind, tmp_path / targets[0])
    with LLM(folder, **OPTIONS) as llm:
        llm.load_adapter("other", tmp_path / "o_proj")
        with pytest.raises(AdapterInvalid, match="kv_b_proj can't be adapted by an activated"):
            llm.load_adapter("refused", tmp_path / "kv_b_proj")


@pytest.mark.parametrize(
    ("step", "method"),
    [
        (ExtrasStep, "scaled_queries"),
        (ExtrasStep, "absorbed_values"),
        (GroupedStep, "absorbed_keys"),
        (GroupedStep, "absorbed_values"),
    ],
)
def test_the_check_of_adapters_sees_the_absorbed_projection(
    step: type[LoraStep], method: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = make_base(FAMILIES["deepseek-v3"], tmp_path / "base")
    make_adapter(base, KINDS["DoRA"], tmp_path / "DoRA", "deepseek-v3")
    with LLM(folder, **OPTIONS) as llm:
        llm.load_adapter("right", tmp_path / "DoRA")
    monkeypatch.setattr(step, method, lambda self, y, *_: y)
    wrong = pytest.raises(AdapterQuarantined, match="kv_b_proj was off by")
    with LLM(folder, **OPTIONS) as llm, wrong:
        llm.load_adapter("wrong", tmp_path / "DoRA")

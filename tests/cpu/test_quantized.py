"""Quantized checkpoints are read as the values that the formats' own libraries make of them.

`quantized/matrices.safetensors` has the stored tensors and the libraries' values; see
`quantized/make_matrices.py`.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AwqConfig,
    BitsAndBytesConfig,
    FineGrainedFP8Config,
    GPTQConfig,
    LlamaConfig,
)
from transformers.integrations.finegrained_fp8 import FP8Linear, _dequantize_fp8_weight
from transformers.utils.quantization_config import QuantizationConfigMixin

from weft.bench.engine import preset_folder
from weft.checkpoint.trained_on import warning_of_four_bits
from weft.core.config import ModelArgs
from weft.core.errors import ConfigError
from weft.kernels.quant.nf4 import nf4_values
from weft.models.config import load_model_config
from weft.models.loading import dummy_weights, load_model, load_weights
from weft.models.quantized.reading import dequantized
from weft.models.quantized.stated import read_quantization

MATRICES = Path(__file__).parent / "quantized" / "matrices.safetensors"


def compressed(form: str, **weights: Any) -> dict[str, Any]:
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": ["lm_head"],
    }


FOUR = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
EIGHT = {"num_bits": 8, "type": "int", "strategy": "channel"}
FP8 = {"num_bits": 8, "type": "float"}
BNB = {"quant_method": "bitsandbytes"}
GPTQ = {"quant_method": "gptq", "group_size": 32}
AUTO_ROUND = {
    "amp": True,
    "autoround_version": "0.5.1",
    "data_type": "int",
    "enable_minmax_tuning": True,
    "iters": 200,
    "lr": 0.005,
    "nsamples": 512,
    "scale_dtype": "torch.float16",
    "seqlen": 2048,
}
STATED: dict[str, dict[str, Any]] = {
    "ct-w4-group": compressed("pack-quantized", **FOUR),
    "ct-w4-group-asymmetric": compressed("pack-quantized", **FOUR, symmetric=False),
    "ct-w4-channel": compressed("pack-quantized", **FOUR | {"strategy": "channel"}),
    "ct-w8-group": compressed("pack-quantized", **FOUR | {"num_bits": 8}),
    "ct-int8-channel": compressed("int-quantized", **EIGHT),
    "ct-int8-asymmetric": compressed("int-quantized", **EIGHT, symmetric=False),
    "ct-int8-tensor": compressed("int-quantized", **EIGHT | {"strategy": "tensor"}),
    "ct-fp8-tensor": compressed("float-quantized", **FP8, strategy="tensor")
    | {"quantization_status": "frozen"},
    "ct-fp8-channel": compressed("float-quantized", **FP8, strategy="channel"),
    "ct-fp8-block": compressed(
        "float-quantized", **FP8, strategy="block", block_structure=[16, 32]
    ),
    "bnb-nf4": BNB | {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "bnb-nf4-nested": BNB | {"load_in_4bit": True, "bnb_4bit_use_double_quant": True},
    "bnb-fp4-nested": BNB | {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4"},
    "bnb-int8": BNB | {"load_in_8bit": True},
    "awq": {"quant_method": "awq", "bits": 4, "zero_point": True, "version": "gemm"},
    "gptq-2": GPTQ | {"bits": 2},
    "gptq-4": GPTQ | AUTO_ROUND | {"bits": 4, "checkpoint_format": "gptq"},
    "gptq-4-reordered": GPTQ | {"bits": 4, "desc_act": True},
    "gptq-8": GPTQ | {"bits": 8},
}


def stored(case: str) -> dict[str, Tensor]:
    """The tensors of a case by name; `expected` are its values."""
    with safe_open(MATRICES, framework="pt") as file:
        names = [name for name in file.keys() if name.startswith(f"{case}/")]  # noqa: SIM118
        return {name.removeprefix(f"{case}/"): file.get_tensor(name) for name in names}


def read(tensors: Mapping[str, Tensor], stated: dict[str, Any], folder: Path) -> Tensor:
    """What is read of a file with these tensors."""
    save_file(dict(tensors), folder / "model.safetensors")
    raw = {"quantization_config": json.loads(json.dumps(stated))}
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        lazy = [(name, file.get_slice(name)) for name in file.keys()]  # noqa: SIM118
        found = dict(dequantized(lazy, read_quantization(raw, mxfp4=False)))
        assert list(found) == ["x.weight"]
        shape = tuple(found["x.weight"].get_shape())
        values: Tensor = found["x.weight"][:]
        assert values.shape == shape
        return values


@pytest.mark.parametrize("case", STATED)
def test_values_are_the_libraries(case: str, tmp_path: Path) -> None:
    tensors = stored(case)
    expected = tensors.pop("expected")
    tensors.pop("source", None)
    values = read(tensors, STATED[case], tmp_path)
    assert torch.equal(values.to(expected.dtype), expected)
    assert expected.float().std() > 0.1


def test_nf4_values_are_what_bitsandbytes_makes_of_a_matrix() -> None:
    tensors = stored("bnb-nf4-nested")
    assert torch.equal(nf4_values(tensors["source"]).values_OI, tensors["expected"])


def test_nf4_values_are_made_of_each_projection(tmp_path: Path) -> None:
    """q, k and v lie in one matrix, but have means of scales of their own."""
    with preset_folder("tiny") as folder:
        config = load_model_config(folder)
        plain = dummy_weights(config, torch.bfloat16, "cpu")
        rounded = dummy_weights(config, torch.bfloat16, "cpu", quantization="nf4-values")
        args = ModelArgs(model=str(folder), device="cpu", quantization="nf4-values")
        with pytest.raises(ConfigError, match="one GPU") as caught:
            load_model(replace(args, tensor_parallel_size=2))
        assert caught.value.param == "quantization"
    group = plain.table.by_key["0.qkv"][0]
    wanted = [nf4_values(m).values_OI for m in plain.dense("0.qkv").split(group.packed.widths)]
    assert torch.equal(rounded.dense("0.qkv"), torch.cat(wanted))
    assert torch.equal(rounded.head, plain.head)


@pytest.mark.parametrize(
    ("name", "warns"),
    [("unsloth/llama-3-8b-bnb-4bit", True), ("x/Qwen3-8B-AWQ", True), ("a-4bit/Llama", False)],
)
def test_an_adapter_of_a_base_in_four_bits_is_told_so(name: str, warns: bool) -> None:
    config = json.dumps({"base_model_name_or_path": name}).encode()
    warning = warning_of_four_bits(config, base_has_16_bits=True)
    assert (warning is not None) == warns
    assert warning is None or "--quantization nf4-values" in warning
    assert warning_of_four_bits(config, base_has_16_bits=False) is None
    assert warning_of_four_bits(b"[]", base_has_16_bits=True) is None


def test_the_second_version_of_gptq_stores_zero_points_as_they_are(tmp_path: Path) -> None:
    first = stored("gptq-4")
    expected, zeros = first.pop("expected"), first["x.qzeros"]
    nibbles = (zeros[..., None] >> torch.arange(0, 32, 4, dtype=torch.int32)) & 15
    words = (((nibbles + 1) & 15).long() << torch.arange(0, 32, 4)).sum(-1)
    second = first | {"x.qzeros": torch.where(words < 2**31, words, words - 2**32).int()}
    stated = STATED["gptq-4"] | {"checkpoint_format": "gptq_v2"}
    assert torch.equal(read(second, stated, tmp_path), expected)


def test_inputs_of_compressed_tensors_are_reordered_by_their_groups(tmp_path: Path) -> None:
    """With the groups of neighbours as the order, nothing changes; with all inputs in the last
    group, its scale counts for all."""
    tensors = stored("ct-w4-group")
    expected, scales = tensors.pop("expected"), tensors["x.weight_scale"]
    order = torch.arange(128, dtype=torch.int32) // 32
    same = read(tensors | {"x.weight_g_idx": order}, STATED["ct-w4-group"], tmp_path)
    assert torch.equal(same, expected)
    last = torch.full_like(order, 3)
    values = read(tensors | {"x.weight_g_idx": last}, STATED["ct-w4-group"], tmp_path)
    integers = (expected.float() / scales.float().repeat_interleave(32, 1)).round()
    assert torch.equal(values, (integers * scales[:, 3:].float()).bfloat16())


def test_an_order_names_groups_that_are_there(tmp_path: Path) -> None:
    tensors = stored("ct-w4-group")
    tensors = tensors | {"x.weight_g_idx": torch.full((128,), 4, dtype=torch.int32)}
    del tensors["expected"]
    with pytest.raises(ConfigError, match=r"x\.weight_g_idx names a group that is not among 4"):
        read(tensors, STATED["ct-w4-group"], tmp_path)


def test_scales_of_compressed_tensors_round_values_to_their_dtype(tmp_path: Path) -> None:
    tensors = stored("ct-fp8-block")
    expected = tensors.pop("expected")
    assert expected.dtype == torch.bfloat16
    assert torch.equal(read(tensors, STATED["ct-fp8-block"], tmp_path).float(), expected.float())


@pytest.mark.parametrize("case", ["ct-fp8-block", "ct-fp8-channel", "ct-fp8-tensor"])
def test_floats_with_and_without_blocks_may_be_in_one_checkpoint(case: str, tmp_path: Path) -> None:
    tensors = stored(case)
    expected = tensors.pop("expected")
    stated = copy.deepcopy(STATED["ct-fp8-block"])
    stated["config_groups"] |= {"group_1": STATED["ct-fp8-channel"]["config_groups"]["group_0"]}
    assert torch.equal(read(tensors, stated, tmp_path).float(), expected.float())


def test_one_zero_point_of_packed_integers_is_not_packed(tmp_path: Path) -> None:
    tensors = stored("ct-w4-group")
    expected, packed = tensors.pop("expected").float(), tensors["x.weight_packed"]
    tensors["x.weight_scale"] = torch.tensor([0.5])
    tensors["x.weight_zero_point"] = torch.tensor([-3], dtype=torch.int8)
    stated = compressed("pack-quantized", **FOUR | {"strategy": "tensor", "symmetric": False})
    integers = ((packed[..., None] >> torch.arange(0, 32, 4)) & 15).flatten(1) - 8
    values = read(tensors, stated, tmp_path)
    assert values.shape == expected.shape
    assert torch.equal(values, (integers + 3) * 0.5)


def test_groups_of_gptq_have_the_stated_size(tmp_path: Path) -> None:
    """Without g_idx, 128 inputs in groups of 96 are 96 and 32, not twice 64."""
    tensors = {n: t for n, t in stored("gptq-4").items() if n in ("x.qweight", "x.qzeros")}
    outputs = tensors["x.qweight"].shape[1]
    tensors["x.qzeros"] = tensors["x.qzeros"][:2].clone()
    tensors["x.scales"] = torch.rand(2, outputs, dtype=torch.float16)
    order = {"x.g_idx": torch.arange(128, dtype=torch.int32) // 96}
    stated = STATED["gptq-4"] | {"group_size": 96}
    wanted = read(tensors | order, stated, tmp_path)
    assert torch.equal(read(tensors, stated, tmp_path), wanted)
    with pytest.raises(ConfigError, match=r"x\.scales has shape"):
        read(tensors, STATED["gptq-4"], tmp_path)
    with pytest.raises(ConfigError, match="group_size must be a number"):
        read(tensors, stated | {"group_size": "96"}, tmp_path)


def test_zero_points_of_gptq_fill_whole_words(tmp_path: Path) -> None:
    tensors = stored("gptq-4")
    expected = tensors.pop("expected")
    for name in ("x.qweight", "x.scales"):
        tensors[name] = tensors[name][:, :12].clone()
    tensors["x.qzeros"] = tensors["x.qzeros"][:, :2].clone()
    assert torch.equal(read(tensors, STATED["gptq-4"], tmp_path), expected[:12])
    tensors["x.qzeros"] = tensors["x.qzeros"][:, :1].clone()
    with pytest.raises(ConfigError, match=r"x\.qzeros has shape"):
        read(tensors, STATED["gptq-4"], tmp_path)


@pytest.mark.parametrize("block", [[16, 32], [24, 48], None], ids=["even", "rest", "tensor"])
def test_fp8_is_what_transformers_reads(block: list[int] | None, tmp_path: Path) -> None:
    codes = torch.randn(64, 96).to(torch.float8_e4m3fn)
    scales = torch.rand(() if block is None else (-(-64 // block[0]), -(-96 // block[1])))
    name = "x.weight_scale" if block is None else "x.weight_scale_inv"
    stated = {"quant_method": "fp8", "weight_block_size": block, "activation_scheme": "dynamic"}
    for of_file in (scales, scales.bfloat16()):
        values = read({"x.weight": codes, name: of_file}, stated, tmp_path)
        wanted = _dequantize_fp8_weight(codes, of_file, block, torch.float32)
        assert torch.equal(values.float(), wanted)


def test_fp8_by_tensor_may_have_the_names_of_transformers(tmp_path: Path) -> None:
    layer = FP8Linear(96, 64, block_size=None, activation_scheme="static")
    tensors = {f"x.{name}": value for name, value in layer.state_dict().items()}
    tensors["x.weight"] = codes = torch.randn(64, 96).to(torch.float8_e4m3fn)
    tensors["x.weight_scale_inv"] = scale = torch.tensor(0.3)
    assert "x.activation_scale" in tensors
    stated = {"quant_method": "fp8", "weight_block_size": None, "activation_scheme": "static"}
    values = read(tensors, stated, tmp_path)
    assert torch.equal(values, _dequantize_fp8_weight(codes, scale, None, torch.float32))


@pytest.mark.parametrize("block", [[16, 32], [24, 48], None], ids=["even", "rest", "tensor"])
def test_fp8_of_all_experts_is_what_transformers_reads(
    block: list[int] | None, tmp_path: Path
) -> None:
    codes = torch.randn(5, 64, 96).to(torch.float8_e4m3fn)
    rows, columns = block or (64, 96)
    scales = torch.rand(5, -(-64 // rows), -(-96 // columns))
    name = "mlp.experts.gate_up_proj"
    tensors = {name: codes, f"{name}_scale_inv": scales, f"{name}_activation_scale": torch.ones(5)}
    stated = {"quant_method": "fp8", "weight_block_size": block, "activation_scheme": "static"}
    save_file(tensors, tmp_path / "model.safetensors")
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        lazy = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
        found = dict(dequantized(lazy.items(), stated))
        assert list(found) == [name] and tuple(found[name].get_shape()) == codes.shape
        part = slice(1, 4), slice(10, 50), slice(7, 96)
        wanted = _dequantize_fp8_weight(codes, scales, block, torch.float32)
        assert torch.equal(found[name][part], wanted[part])
        halves = {**lazy, f"{name}_scale_inv": file.get_slice(f"{name}_activation_scale")}
        with pytest.raises(ConfigError, match=f"{name}_scale_inv has shape"):
            dict(dequantized(halves.items(), stated))
        with pytest.raises(ConfigError, match=f"{name} has dtype F32"):
            dict(dequantized({**lazy, name: lazy[f"{name}_scale_inv"]}.items(), stated))


@pytest.mark.parametrize(
    ("case", "part", "change", "wanted"),
    [
        ("awq", "x.scales", None, "lacks x.scales"),
        ("awq", "x.qzeros", torch.zeros(4, 3, dtype=torch.int32), "x.qzeros has shape"),
        ("gptq-4", "x.qzeros", torch.zeros(4, 4), "x.qzeros has dtype F32"),
        ("gptq-4-reordered", "x.g_idx", torch.full((128,), 4, dtype=torch.int32), "not among 4"),
        ("bnb-nf4", "x.weight.absmax", torch.zeros(3), "x.weight.absmax has shape"),
        (
            "bnb-nf4",
            "x.weight.quant_state.bitsandbytes__nf4",
            torch.tensor(list(b"{}"), dtype=torch.uint8),
            "does not describe a matrix",
        ),
        ("ct-w4-group", "x.weight_shape", torch.tensor([32, 999]), "x.weight_packed has shape"),
        ("ct-w4-group", "x.weight_scale", torch.ones(32, 5), "can't be cut into 5 groups"),
        ("ct-fp8-channel", "x.weight_scale", torch.ones(5, 1), "x.weight_scale has shape"),
        ("awq", "x.qweight", torch.zeros(128, dtype=torch.int32), "x.qweight has shape"),
        ("awq", "x.scales", torch.tensor(1.0), "x.scales has shape"),
        ("gptq-4", "x.qweight", torch.zeros(128, dtype=torch.int32), "x.qweight has shape"),
        ("ct-fp8-channel", "x.weight", torch.zeros(8), "x.weight has shape"),
        ("ct-fp8-tensor", "x.weight", torch.zeros(32, 128), "x.weight has dtype F32"),
        ("bnb-int8", "x.weight", torch.zeros(8), "x.weight has shape"),
        ("bnb-int8", "x.weight_format", torch.tensor(2, dtype=torch.uint8), "x.weight_format is 2"),
        ("ct-int8-channel", "x.weight", torch.zeros(8, dtype=torch.int8), "x.weight has shape"),
        ("ct-w4-group", "x.weight_packed", torch.zeros(8), "x.weight_packed has shape"),
        ("ct-w4-group", "x.weight_scale", torch.ones(32, 0), "can't be cut into 0 groups"),
        ("ct-w4-group-asymmetric", "x.weight_scale", torch.tensor(1.0), "weight_scale has shape"),
        (
            "ct-w4-group-asymmetric",
            "x.weight_zero_point",
            torch.zeros(4, 3, dtype=torch.int32),
            "x.weight_zero_point has shape",
        ),
    ],
)
def test_a_part_that_does_not_fit_is_named(
    case: str, part: str, change: Tensor | None, wanted: str, tmp_path: Path
) -> None:
    tensors = {name: t for name, t in stored(case).items() if name.startswith("x.")}
    tensors.pop(part)
    with pytest.raises(ConfigError, match=wanted):
        read(tensors if change is None else tensors | {part: change}, STATED[case], tmp_path)


@pytest.mark.parametrize(
    ("stated", "field"),
    [
        ({"quant_method": "aqlm"}, "quantization_config"),
        ("awq", "quantization_config"),
        (STATED["awq"] | {"version": "gemv"}, "quantization_config.version"),
        (STATED["gptq-4"] | {"bits": 3}, "quantization_config.bits"),
        (STATED["gptq-4"] | {"dynamic": {"-:head": {}}}, "quantization_config.dynamic"),
        (STATED["bnb-nf4"] | {"bnb_4bit_quant_storage": "bfloat16"}, "bnb_4bit_quant_storage"),
        (STATED["ct-w4-group"] | {"format": "nvfp4-pack-quantized"}, "format"),
        (STATED["ct-w4-group"] | {"transform_config": {"R1": {}}}, "transform_config"),
        (compressed("float-quantized", num_bits=4, type="float", strategy="channel"), "group_0"),
        (compressed("int-quantized", num_bits=6, type="int", strategy="channel"), "num_bits"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "quantization_config.fmt"),
        ({"quant_method": "fp8", "expert_dtype": "fp4"}, "quantization_config.expert_dtype"),
    ],
)
def test_a_setting_that_is_not_read_is_named(stated: Any, field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_quantization({"quantization_config": stated}, mxfp4=False)
    assert caught.value.param is not None and caught.value.param.endswith(field)


DENSE = {"sparsity_config": {"format": "dense", "global_sparsity": 0.14}}
SPARSE = {"sparsity_config": {"format": "sparse-24-bitmask", "global_sparsity": 0.5}}


def older(**changes: Any) -> dict[str, Any]:
    """What SparseML wrote."""
    return STATED["ct-w4-group"] | {"quant_method": "sparseml"} | changes


@pytest.mark.parametrize(
    "stated",
    [
        {"quantization_config": STATED["ct-w4-group"] | DENSE},
        {"compression_config": STATED["ct-w4-group"] | DENSE},
        {"compression_config": older()},
        {"compression_config": older(**DENSE)},
        {"compression_config": {"quantization_config": older(), **DENSE}},
    ],
)
def test_older_versions_of_compressed_tensors_are_read(stated: Any, tmp_path: Path) -> None:
    tensors = stored("ct-w4-group")
    expected = tensors.pop("expected")
    found = read_quantization(stated, mxfp4=False)
    assert found is not None
    assert torch.equal(read(tensors, dict(found), tmp_path), expected)


@pytest.mark.parametrize(
    ("stated", "field"),
    [
        ({"compression_config": SPARSE}, "compression_config.sparsity_config"),
        ({"compression_config": older(**SPARSE)}, "compression_config.sparsity_config"),
        (
            {"quantization_config": STATED["ct-w4-group"] | SPARSE},
            "quantization_config.sparsity_config",
        ),
        ({"compression_config": older(format="marlin-24")}, "compression_config.format"),
        ({"compression_config": older(config_groups={})}, "compression_config.config_groups"),
        ({"compression_config": {"quantization_config": 3}}, "compression_config.config_groups"),
        ({"compression_config": "x"}, "compression_config"),
        ({"compression_config": older(quant_method="aqlm")}, "compression_config"),
    ],
)
def test_what_older_versions_state_and_is_not_read_is_named(stated: Any, field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_quantization(stated, mxfp4=False)
    assert caught.value.param == field


def test_a_model_that_is_neither_sparse_nor_quantized_may_say_so() -> None:
    for stated in (DENSE, {"quantization_config": None, **DENSE}, {}):
        assert read_quantization({"compression_config": stated}, mxfp4=False) is None


def saved(config: QuantizationConfigMixin) -> dict[str, Any]:
    """What transformers writes of it into config.json."""
    written: dict[str, Any] = json.loads(json.dumps(config.to_dict()))
    return written


GPTQ_MODEL = {"bits": 4, "group_size": 32, "desc_act": False, "lm_head": False, "meta": {"mse": 0}}
"""The fields of GPTQModel, for both methods."""


@pytest.mark.parametrize(
    "stated",
    [
        pytest.param(saved(AwqConfig(bits=4, group_size=32)), id="awq"),
        pytest.param(saved(GPTQConfig(bits=4, group_size=32)), id="gptq"),
        pytest.param(saved(FineGrainedFP8Config()), id="fp8"),
        pytest.param(saved(BitsAndBytesConfig(load_in_4bit=True)), id="bitsandbytes"),
        pytest.param(
            GPTQ_MODEL
            | dict.fromkeys(("method", "quant_method", "format", "checkpoint_format"), "gptq")
            | {"pack_dtype": "int32", "sym": True},
            id="gptqmodel",
        ),
        pytest.param(
            GPTQ_MODEL
            | dict.fromkeys(("method", "quant_method"), "awq")
            | dict.fromkeys(("format", "checkpoint_format", "version"), "gemm")
            | {"pack_dtype": "int32", "zero_point": True},
            id="gptqmodel-awq",
        ),
        pytest.param(STATED["ct-int8-channel"] | {"quantization_status": "frozen"}, id="frozen"),
    ],
)
def test_what_the_libraries_write_is_known(stated: dict[str, Any]) -> None:
    assert read_quantization({"quantization_config": stated}, mxfp4=False) == stated


def test_a_model_has_the_values_of_its_quantized_matrices(tmp_path: Path) -> None:
    """Two matrices of a layer are quantized, in a file before and a file behind their scales."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=40,
        hidden_size=128,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=1,
        max_position_embeddings=64,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    case = stored("gptq-4-reordered")
    expected, first, second = case.pop("expected"), {}, dict(tensors)
    names = [f"model.layers.0.mlp.{name}_proj" for name in ("gate", "up")]
    for i, name in enumerate(names):
        del second[f"{name}.weight"]
        for part, value in case.items():
            into = first if (part == "x.scales") == (i == 0) else second
            into[f"{name}.{part.removeprefix('x.')}"] = value.clone()
    for file, content in {"a": first, "b": second}.items():
        save_file(content, tmp_path / f"{file}.safetensors")
    index = {n: f"{f}.safetensors" for f, c in {"a": first, "b": second}.items() for n in c}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    path = tmp_path / "config.json"
    stated = {"quantization_config": STATED["gptq-4-reordered"]}
    path.write_text(json.dumps(json.loads(path.read_text()) | stated))
    weights = load_weights(tmp_path, load_model_config(tmp_path), torch.float32, "cpu")
    assert torch.equal(weights.dense("0.gate_up"), torch.cat((expected, expected)).float())
    down = tensors["model.layers.0.mlp.down_proj.weight"]
    assert torch.equal(weights.dense("0.down"), down)

"""Make matrices.safetensors: matrices as the formats' own libraries store them, and the values that
the same libraries make of them.

Run it in an environment that has bitsandbytes, compressed-tensors and torch, and beside the
unpacked sources of AutoAWQ and AutoGPTQ, which need no install:

    python make_matrices.py AUTOAWQ_FOLDER AUTO_GPTQ_FOLDER

The file was made with bitsandbytes 0.50.2, compressed-tensors 0.20.0, AutoAWQ 0.2.9 and AutoGPTQ
0.7.1. A tensor's name is CASE/NAME; CASE/expected has the values.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

OUTPUTS, INPUTS, GROUP = 32, 128, 32
HERE = Path(__file__).parent


def weight(outputs: int = OUTPUTS) -> Tensor:
    return torch.randn(outputs, INPUTS).bfloat16()


def compressed(form: str, **weights: Any) -> dict[str, Tensor]:
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams

    args = QuantizationArgs(**weights)
    dense = weight()
    blocks = {
        "tensor": lambda w: w.reshape(1, -1),
        "channel": lambda w: w[:, None],
        "group": lambda w: w.view(OUTPUTS, -1, GROUP),
        "block": lambda w: w.view(2, 16, 4, 32).transpose(1, 2).flatten(2),
    }[args.strategy](dense)
    scale, zero = calculate_qparams(blocks.amin(-1), blocks.amax(-1), args)
    stored = {"weight": dense, "weight_scale": scale, "weight_zero_point": zero}
    scheme = QuantizationScheme(targets=["Linear"], weights=args, format=form)
    compressor = BaseCompressor.get_value_from_registry(form)
    stored = compressor.compress(stored, scheme)
    values = compressor.decompress(dict(stored), scheme)["weight"]
    return {f"x.{k}": v for k, v in stored.items()} | {"expected": values}


def four_bits(kind: str, nested: bool) -> dict[str, Tensor]:
    import bitsandbytes.functional as bnb

    dense = weight(136)
    packed, state = bnb.quantize_4bit(dense, quant_type=kind, compress_statistics=nested)
    parts = {f"x.weight.{k}": v for k, v in state.as_dict(packed=True).items()}
    values = bnb.dequantize_4bit(packed, state)
    return {"x.weight": packed, **parts, "expected": values, "source": dense}


def eight_bits() -> dict[str, Tensor]:
    import bitsandbytes.functional as bnb

    codes, scales, _ = bnb.int8_vectorwise_quant(weight().half())
    values = bnb.int8_vectorwise_dequant(codes, scales)
    form = torch.tensor(0, dtype=torch.uint8)
    return {"x.weight": codes, "x.SCB": scales, "x.weight_format": form, "expected": values}


def words(*shape: int) -> Tensor:
    return torch.randint(-(2**31), 2**31, shape, dtype=torch.int64).to(torch.int32)


def awq(folder: Path) -> dict[str, Tensor]:
    space: dict[str, Any] = {}
    exec((folder / "awq/utils/packing_utils.py").read_text(), space)
    stored = {
        "qweight": words(INPUTS, OUTPUTS // 8),
        "qzeros": words(INPUTS // GROUP, OUTPUTS // 8),
        "scales": torch.rand(INPUTS // GROUP, OUTPUTS).half(),
    }
    values = space["dequantize_gemm"](**stored, bits=4, group_size=GROUP)
    return {f"x.{k}": v for k, v in stored.items()} | {"expected": values.t()}


def gptq(folder: Path, bits: int, reordered: bool) -> dict[str, Tensor]:
    """What the layer returns for the unit matrix."""
    file = "qlinear_cuda.py" if reordered else "qlinear_cuda_old.py"
    source = (folder / "auto_gptq/nn_modules/qlinear" / file).read_text()
    tree = ast.parse(source)
    layer = next(node for node in tree.body if isinstance(node, ast.ClassDef))
    layer.bases = [ast.parse("torch.nn.Module", mode="eval").body]
    space: dict[str, Any] = {"torch": torch, "nn": torch.nn, "math": __import__("math")}
    space |= {"_autogptq_cuda_available": False, "autogptq_cuda_256": None}
    space |= {"autogptq_cuda_64": None, "np": __import__("numpy")}
    exec(compile(ast.Module([layer], []), file, "exec"), space)
    made = space["QuantLinear"](bits, GROUP, INPUTS, OUTPUTS, bias=False)
    groups = INPUTS // GROUP
    stored = {
        "qweight": words(INPUTS * bits // 32, OUTPUTS),
        "qzeros": words(groups, OUTPUTS * bits // 32),
        "scales": torch.rand(groups, OUTPUTS).half(),
    }
    if reordered:
        stored["g_idx"] = torch.randperm(INPUTS).to(torch.int32) // GROUP
        stored["qzeros"] &= 0x77777777  # 15 stands for 0, but this layer makes it 16
    for name, value in stored.items():
        getattr(made, name).copy_(value)
    values = made(torch.eye(INPUTS).half())
    return {f"x.{k}": v for k, v in stored.items()} | {"expected": values.t()}


def main(awq_folder: Path, gptq_folder: Path) -> None:
    torch.manual_seed(0)
    group = {"strategy": "group", "group_size": GROUP}
    cases = {
        "ct-w4-group": compressed("pack-quantized", num_bits=4, **group),
        "ct-w4-group-asymmetric": compressed(
            "pack-quantized", num_bits=4, symmetric=False, **group
        ),
        "ct-w4-channel": compressed("pack-quantized", num_bits=4, strategy="channel"),
        "ct-w8-group": compressed("pack-quantized", num_bits=8, **group),
        "ct-int8-channel": compressed("int-quantized", num_bits=8, strategy="channel"),
        "ct-int8-asymmetric": compressed(
            "int-quantized", num_bits=8, strategy="channel", symmetric=False
        ),
        "ct-int8-tensor": compressed("int-quantized", num_bits=8, strategy="tensor"),
        "ct-fp8-tensor": compressed("float-quantized", num_bits=8, type="float", strategy="tensor"),
        "ct-fp8-channel": compressed(
            "float-quantized", num_bits=8, type="float", strategy="channel"
        ),
        "ct-fp8-block": compressed(
            "float-quantized", num_bits=8, type="float", strategy="block", block_structure=[16, 32]
        ),
        "bnb-nf4": four_bits("nf4", nested=False),
        "bnb-nf4-nested": four_bits("nf4", nested=True),
        "bnb-fp4-nested": four_bits("fp4", nested=True),
        "bnb-int8": eight_bits(),
        "awq": awq(awq_folder),
        "gptq-2": gptq(gptq_folder, 2, reordered=False),
        "gptq-4": gptq(gptq_folder, 4, reordered=False),
        "gptq-4-reordered": gptq(gptq_folder, 4, reordered=True),
        "gptq-8": gptq(gptq_folder, 8, reordered=False),
    }
    tensors = {f"{c}/{k}": v.contiguous() for c, t in cases.items() for k, v in t.items()}
    save_file(tensors, HERE / "matrices.safetensors")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))

"""Weights of a decoder: read from safetensors, or made at random, straight on the device.

q, k, v and gate, up are packed along the output dimension, the experts of a layer one after the
other. What the model's files must hold is data (`_parts`), from which both the packing and the
checks follow.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from weft.core.config import Quantization
from weft.core.errors import ConfigError
from weft.kernels.fp8 import Fp8Weight, quantize_weight
from weft.models.config import ModelConfig

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder layer. Matrices are (out, in); a bias or norm that the model lacks is None.

    Its MLP is dense (`gate_up`, `down`) or a mixture of experts (the last three)."""

    attention_norm: Tensor
    qkv: Tensor | Fp8Weight
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    o: Tensor | Fp8Weight
    o_bias: Tensor | None
    mlp_norm: Tensor
    gate_up: Tensor | Fp8Weight | None
    gate_up_bias: Tensor | None
    down: Tensor | Fp8Weight | None
    down_bias: Tensor | None
    router: Tensor | None
    """(experts, hidden)"""
    experts_gate_up: Tensor | None
    """(experts, 2 * inner, hidden)"""
    experts_down: Tensor | None
    """(experts, hidden, inner)"""


@dataclass(frozen=True, slots=True)
class Weights:
    """All weights of a model, in one dtype and on one device."""

    embed: Tensor
    """(vocab, hidden)"""
    layers: tuple[LayerWeights, ...]
    norm: Tensor
    head: Tensor
    """(vocab, hidden); the same tensor as `embed` when tied."""


def load_weights(
    folder: Path,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device | str,
    quantization: Quantization | None = None,
) -> Weights:
    """Read the safetensors files of `folder`, tensor by tensor.

    `quantization`: of the layers' matrices, once they are in `dtype`. Raises ConfigError naming
    what is missing, has another shape or is quantized already.
    """
    parts = _parts(config)
    tensors = _allocate(parts, dtype, device)
    places = _places(parts, tensors)
    stacked = _stacked(config, tensors)
    unread = set(places)
    unknown: list[str] = []
    tied_head: Tensor | None = None
    for name, stored in _stored_tensors(folder, device):
        if name in places:
            _check(name, stored, places[name].shape)
            places[name].copy_(stored[:])
            unread.discard(name)
        elif name in stacked:
            key, view = stacked[name]
            _check(name, stored, view.shape)
            view.copy_(stored[:])
            unread.difference_update(part for part, _ in parts[key])
        elif name == HEAD and config.tie_word_embeddings:
            tied_head = stored[:].to(dtype)
        elif not name.endswith("rotary_emb.inv_freq"):
            unknown.append(name)
    _report(folder, sorted(unread), sorted(unknown))
    if tied_head is not None and not torch.equal(tied_head, tensors["embed"]):
        raise ConfigError(
            f"tie_word_embeddings is set, but {HEAD} differs from {EMBED}", "tie_word_embeddings"
        )
    del places, stacked
    return _assemble(config, _quantized(tensors, quantization))


def dummy_weights(
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device | str,
    seed: int = 0,
    quantization: Quantization | None = None,
) -> Weights:
    """Random weights made on the device: normal with deviation 0.02, norms 1."""
    generator = torch.Generator(device=device).manual_seed(seed)
    tensors = _allocate(_parts(config), dtype, device)
    for key, tensor in tensors.items():
        if key.endswith("norm"):
            tensor.fill_(1.0)
        else:
            tensor.normal_(std=0.02, generator=generator)
    return _assemble(config, _quantized(tensors, quantization))


def num_parameters(weights: Weights) -> int:
    """Parameters of the model; a tied head counts once."""
    total = weights.embed.numel() + weights.norm.numel()
    if weights.head is not weights.embed:
        total += weights.head.numel()
    for layer in weights.layers:
        total += sum(t.numel() for t in _tensors_of(layer))
    return total


def _tensors_of(layer: LayerWeights) -> list[Tensor | Fp8Weight]:
    values = (getattr(layer, f.name) for f in fields(layer))
    return [v for v in values if v is not None]


EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"

Part = tuple[str, tuple[int, ...]]
"""Name in the checkpoint, and shape."""


def _parts(config: ModelConfig) -> dict[str, list[Part]]:
    """The tensors that make up each weight ("embed", "3.qkv"), in packing order."""
    vocab_hidden = (config.vocab_size, config.hidden_size)
    parts: dict[str, list[Part]] = {
        "embed": [(EMBED, vocab_hidden)],
        "norm": [("model.norm.weight", (config.hidden_size,))],
    }
    if not config.tie_word_embeddings:
        parts["head"] = [(HEAD, vocab_hidden)]
    for i in range(config.num_layers):
        for key, row in (_attention_parts(config) | _mlp_parts(config, i)).items():
            parts[f"{i}.{key}"] = [(f"model.layers.{i}.{name}", shape) for name, shape in row]
    return parts


def _attention_parts(config: ModelConfig) -> dict[str, list[Part]]:
    """Of one layer, with its norms."""
    hidden, head = config.hidden_size, config.head_dim
    q_size, kv_size = config.num_heads * head, config.num_kv_heads * head
    parts: dict[str, list[Part]] = {
        "attention_norm": [("input_layernorm.weight", (hidden,))],
        "mlp_norm": [("post_attention_layernorm.weight", (hidden,))],
    }
    if config.qk_norm:
        parts["q_norm"] = [("self_attn.q_norm.weight", (head,))]
        parts["k_norm"] = [("self_attn.k_norm.weight", (head,))]
    qkv = {"self_attn.q_proj": q_size, "self_attn.k_proj": kv_size, "self_attn.v_proj": kv_size}
    out = {"self_attn.o_proj": hidden}
    return (
        parts
        | _matrices("qkv", qkv, hidden, config.attention_bias)
        | _matrices("o", out, q_size, config.attention_out_bias)
    )


def _mlp_parts(config: ModelConfig, layer: int) -> dict[str, list[Part]]:
    hidden, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
    moe = config.moe
    if moe is None or not moe.layers[layer]:
        gate_up = {"mlp.gate_proj": inner, "mlp.up_proj": inner}
        return _matrices("gate_up", gate_up, hidden, bias) | _matrices(
            "down", {"mlp.down_proj": hidden}, inner, bias
        )
    mlp, gate, up, down = moe.names
    experts = [f"{mlp}.experts.{i}" for i in range(moe.num_experts)]
    gates_ups = {f"{e}.{part}": moe.intermediate_size for e in experts for part in (gate, up)}
    downs = {f"{e}.{down}": hidden for e in experts}
    return (
        _matrices("router", {f"{mlp}.gate": moe.num_experts}, hidden)
        | _matrices("experts_gate_up", gates_ups, hidden)
        | _matrices("experts_down", downs, moe.intermediate_size)
    )


def _matrices(
    key: str, outs: dict[str, int], in_size: int, bias: bool = False
) -> dict[str, list[Part]]:
    """A packed matrix, and its bias if it has one."""
    parts: dict[str, list[Part]] = {
        key: [(f"{name}.weight", (out, in_size)) for name, out in outs.items()]
    }
    if bias:
        parts[f"{key}_bias"] = [(f"{name}.bias", (out,)) for name, out in outs.items()]
    return parts


_STACKED = {
    "mlp.gate.weight": "router",
    "mlp.experts.gate_up_proj": "experts_gate_up",
    "mlp.experts.down_proj": "experts_down",
}
"""Names of whole weights in checkpoints that transformers stores as it holds them."""


def _stacked(config: ModelConfig, tensors: dict[str, Tensor]) -> dict[str, tuple[str, Tensor]]:
    """Where whole weights of mixtures of experts go: key, and view of the tensor."""
    moe = config.moe
    if moe is None:
        return {}
    return {
        f"model.layers.{i}.{name}": (f"{i}.{key}", _by_expert(config, key, tensors[f"{i}.{key}"]))
        for i, sparse in enumerate(moe.layers)
        for name, key in _STACKED.items()
        if sparse
    }


def _by_expert(config: ModelConfig, key: str, tensor: Tensor) -> Tensor:
    """Experts as a dimension of their own."""
    if config.moe is None or not key.startswith("experts_"):
        return tensor
    return tensor.view(config.moe.num_experts, -1, tensor.shape[1])


def _allocate(
    parts: dict[str, list[Part]], dtype: torch.dtype, device: torch.device | str
) -> dict[str, Tensor]:
    """Empty weights. On a CPU, matrices are (out, in) views of (in, out) memory, which products
    with few rows read faster; the embedding is read by row, and experts lie one after another."""
    tensors: dict[str, Tensor] = {}
    for key, row in parts.items():
        rows, columns = sum(shape[0] for _, shape in row), row[0][1][1:]
        by_row = key == "embed" or "experts_" in key
        if columns and not by_row and torch.device(device).type == "cpu":
            tensors[key] = torch.empty((*columns, rows), dtype=dtype).t()
        else:
            tensors[key] = torch.empty((rows, *columns), dtype=dtype, device=device)
    return tensors


def _places(parts: dict[str, list[Part]], tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Where each tensor of the checkpoint goes: a view into a packed weight."""
    places: dict[str, Tensor] = {}
    for key, row in parts.items():
        views = tensors[key].split_with_sizes([shape[0] for _, shape in row])
        places |= {name: view for (name, _), view in zip(row, views, strict=True)}
    return places


_QUANTIZED = ("qkv", "o", "gate_up", "down")


def _quantized(tensors: dict[str, Tensor], quantization: Quantization | None) -> dict[str, Any]:
    """The weights with the layers' matrices quantized; `tensors` is emptied, so that both kinds of
    a matrix exist for one at a time."""
    weights: dict[str, Any] = {}
    if quantization is not None and any("experts_" in key for key in tensors):
        raise ConfigError("--quantization is not served for mixtures of experts", "quantization")
    while tensors:
        key, tensor = tensors.popitem()
        if quantization is not None and key.rpartition(".")[2] in _QUANTIZED:
            weights[key] = quantize_weight(tensor, quantization == "fp8")
        else:
            weights[key] = tensor
    return weights


def _assemble(config: ModelConfig, tensors: dict[str, Any]) -> Weights:
    layers = tuple(_layer(config, tensors, i) for i in range(config.num_layers))
    embed = tensors["embed"]
    return Weights(embed, layers, tensors["norm"], tensors.get("head", embed))


def _layer(config: ModelConfig, tensors: dict[str, Any], index: int) -> LayerWeights:
    found: dict[str, Any] = {f.name: tensors.get(f"{index}.{f.name}") for f in fields(LayerWeights)}
    for key in ("experts_gate_up", "experts_down"):
        if found[key] is not None:
            found[key] = _by_expert(config, key, found[key])
    return LayerWeights(**found)


def _stored_tensors(folder: Path, device: torch.device | str) -> Iterator[tuple[str, Any]]:
    """(name, lazily read tensor) over all files."""
    from safetensors import SafetensorError, safe_open

    for path in _files(folder):
        try:
            with safe_open(path, framework="pt", device=str(device)) as file:
                for name in file.keys():  # noqa: SIM118
                    yield name, file.get_slice(name)
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"can't read {path}: {error}", "model") from error


def _files(folder: Path) -> list[Path]:
    """The safetensors files that the index names, or the single one."""
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if index.is_file():
        try:
            names = sorted(
                set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
            )
        except (OSError, ValueError, KeyError, AttributeError) as error:
            raise ConfigError(f"{index} is not a safetensors index: {error}", "model") from error
        return [_shard(folder, name) for name in names]
    if single.is_file():
        return [single]
    pickled = [p.name for p in sorted(folder.iterdir()) if p.suffix in (".bin", ".pt", ".pth")]
    if pickled:
        raise ConfigError(f"{folder} holds {pickled[0]}: only safetensors are read", "model")
    raise ConfigError(f"{folder} holds no model.safetensors", "model")


def _shard(folder: Path, name: object) -> Path:
    if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
        raise ConfigError(f"the index of {folder} names {name!r}, not a safetensors file", "model")
    path = folder / name
    if not path.is_file():
        raise ConfigError(f"{path} is missing", "model")
    return path


def _check(name: str, stored: Any, shape: torch.Size) -> None:
    found = tuple(stored.get_shape())
    if found != tuple(shape):
        raise ConfigError(f"{name} has shape {found}, expected {tuple(shape)}", name)
    if stored.get_dtype() not in ("F64", "F32", "F16", "BF16"):
        raise ConfigError(f"{name} has dtype {stored.get_dtype()}, which is not served", name)


def _report(folder: Path, missing: list[str], unknown: list[str]) -> None:
    if missing:
        more = f" and {len(missing) - 4} more" if len(missing) > 4 else ""
        raise ConfigError(f"{folder} lacks {', '.join(missing[:4])}{more}", missing[0])
    if unknown:
        logger.warning("%s: %d tensors are not used, such as %s", folder, len(unknown), unknown[0])

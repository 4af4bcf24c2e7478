"""A model with its weights: read from safetensors, or made at random, straight on the device.

What a model's files must hold follows from the table of its shape (`models/blueprint.py`): each
projection's tensor is read into its rows of the packed weight.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from weft.core.config import ModelArgs
from weft.core.errors import ConfigError
from weft.core.targets import Group, Norm, Target, TargetTable
from weft.kernels.linear import DenseWeight, Weight
from weft.kernels.quant import Format, format_named
from weft.models.blueprint import EMBED, HEAD, target_table
from weft.models.config import ModelConfig, MoeConfig, load_model_config, resolve_model

logger = logging.getLogger(__name__)
_HEAD_NAME = "lm_head.weight"


@dataclass(frozen=True, slots=True)
class Weights:
    """All weights of a model, in one dtype and on one device; also the
    `weft.checkpoint.base.BaseWeights` of its adapters."""

    table: TargetTable
    matrices: dict[str, Weight]
    """By key, (out, in); the embedding's is (vocab, hidden), the experts' (experts, out, in). A
    tied head is the embedding's tensor."""
    biases: dict[str, Tensor]
    """By key, (out,); there is none where the model lacks it."""
    norms: dict[str, Tensor]
    """By name, (size,)."""

    def dense(self, key: str) -> Tensor:
        """A matrix that is never quantized."""
        matrix = self.matrices[key]
        assert isinstance(matrix, DenseWeight), key
        return matrix.values_OI

    @property
    def embed(self) -> Tensor:
        return self.dense(EMBED)

    @property
    def head(self) -> Tensor:
        return self.dense(HEAD)

    @property
    def dtype(self) -> torch.dtype:
        return self.embed.dtype

    @property
    def num_parameters(self) -> int:
        """Parameters of the model; a tied head counts once."""
        own = [m for key, m in self.matrices.items() if key != HEAD or not self.table.tied]
        vectors = (*self.biases.values(), *self.norms.values())
        return sum(m.shape.numel() for m in own) + sum(v.numel() for v in vectors)

    def weight(self, target: Target) -> Tensor:
        if target.kind == "embedding":
            return self.embed.t()
        matrix = self.matrices[self.table.groups[target.group].packed.key]
        return _rows(matrix.dequantized(self.dtype), target)

    def bias(self, target: Target) -> Tensor | None:
        bias = self.biases.get(self.table.groups[target.group].packed.key)
        return None if bias is None else _rows(bias, target)

    def norm(self, norm: Norm) -> Tensor:
        return self.norms[norm.name]


def _rows(packed: Tensor, target: Target) -> Tensor:
    """What belongs to a target in its group's matrix or bias."""
    return packed[target.offset : target.offset + target.out_features]


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A base model whose weights are on their device."""

    config: ModelConfig
    table: TargetTable
    weights: Weights
    dtype: torch.dtype
    device: torch.device


def load_model(args: ModelArgs) -> LoadedModel:
    """Raises ConfigError for a device that is not there, a model that is not served, and a
    context that the model does not have."""
    device = device_of(args.device)
    config = load_model_config(args.model, args.revision)
    _check_context(args.max_model_len, config)  # before anything slow
    dtype = _dtype(args.dtype, config, device)
    if args.load_format == "dummy":
        weights = dummy_weights(config, dtype, device, quantization=args.quantization)
    else:
        folder = resolve_model(args.model, args.revision)
        weights = load_weights(folder, config, dtype, device, args.quantization)
    return LoadedModel(config, target_table(config), weights, dtype, device)


def device_of(name: str) -> torch.device:
    """The device that auto, cpu or cuda stands for. Raises ConfigError where there is none."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda, but torch sees no CUDA device", "device")
    return torch.device(name)


def _dtype(name: str, config: ModelConfig, device: torch.device) -> torch.dtype:
    if name == "auto":
        name = "float32" if device.type == "cpu" else config.dtype
        name = "bfloat16" if name == "float32" and device.type == "cuda" else name
    return {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}[name]


def _check_context(asked: int | None, config: ModelConfig) -> None:
    """Raises ConfigError for a context longer than the model's own."""
    limit = config.max_position_embeddings
    if asked is not None and asked > limit:
        message = f"--max-model-len {asked} is more than the model's own limit of {limit} tokens"
        raise ConfigError(message, "max_model_len")


def load_weights(
    folder: Path,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device | str,
    quantization: str | None = None,
) -> Weights:
    """Read the safetensors files of `folder`, tensor by tensor; with `quantization` the layers'
    matrices are put into that format of `weft.kernels.quant`. Raises ConfigError naming what is
    missing, has another shape or is quantized already."""
    form = None if quantization is None else format_named(quantization)
    weights = _allocate(target_table(config), dtype, device, form)
    places = _places(weights, config.moe)
    whole = _whole(weights, config.moe)
    unread = set(places)
    unknown: list[str] = []
    tied_head: Tensor | None = None
    for name, stored in _stored_tensors(folder, device):
        if name in places:
            _check(name, stored, places[name].shape)
            places[name].copy_(stored[:])
            unread.discard(name)
        elif name in whole:
            view, names = whole[name]
            _check(name, stored, view.shape)
            view.copy_(stored[:])
            unread.difference_update(names)
        elif name == _HEAD_NAME and config.tie_word_embeddings:
            tied_head = stored[:].to(dtype)
        elif not name.endswith("rotary_emb.inv_freq"):
            unknown.append(name)
    _report(folder, sorted(unread), sorted(unknown))
    if tied_head is not None and not torch.equal(tied_head, weights.embed):
        message = f"tie_word_embeddings is set, but {_HEAD_NAME} differs from the embedding"
        raise ConfigError(message, "tie_word_embeddings")
    del places, whole
    _quantize(weights, form)
    return weights


def dummy_weights(
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device | str,
    seed: int = 0,
    quantization: str | None = None,
) -> Weights:
    """Random weights made on the device: normal with deviation 0.02, norms 1."""
    generator = torch.Generator(device=device).manual_seed(seed)
    form = None if quantization is None else format_named(quantization)
    weights = _allocate(target_table(config), dtype, device, form)
    for key in weights.matrices:
        if key != HEAD or not config.tie_word_embeddings:
            weights.dense(key).normal_(std=0.02, generator=generator)
    for bias in weights.biases.values():
        bias.normal_(std=0.02, generator=generator)
    for norm in weights.norms.values():
        norm.fill_(1.0)
    _quantize(weights, form)
    return weights


def _allocate(
    table: TargetTable, dtype: torch.dtype, device: torch.device | str, form: Format | None
) -> Weights:
    """Empty weights. On a CPU, matrices are (out, in) views of (in, out) memory, which products
    with few rows read faster; the embedding is read by row, and experts lie one after another."""
    weights = Weights(table, {}, {}, {})
    # The head lies before the layers: behind them, a decode step on an H200 takes 1 % longer.
    for key in dict.fromkeys((EMBED, HEAD, *table.by_key)):
        group = table.by_key[key][0]
        if group.kind == "experts" and form is not None:
            message = "--quantization is not served for mixtures of experts"
            raise ConfigError(message, "quantization")
        if group.kind == "head" and table.tied:
            weights.matrices[key] = weights.matrices[EMBED]
        else:
            matrix = _empty_matrix(group, table.num_experts, dtype, torch.device(device))
            weights.matrices[key] = DenseWeight(matrix)
        if group.packed.bias:
            weights.biases[key] = torch.empty(group.out_features, dtype=dtype, device=device)
    for norm in table.norms:
        weights.norms[norm.name] = torch.empty(norm.size, dtype=dtype, device=device)
    return weights


def _empty_matrix(
    group: Group, num_experts: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    outputs, inputs = group.out_features, group.in_features
    if group.kind == "experts":
        return torch.empty((num_experts, outputs, inputs), dtype=dtype, device=device)
    if group.kind == "embedding":
        return torch.empty((inputs, outputs), dtype=dtype, device=device)
    if device.type == "cpu":
        return torch.empty((inputs, outputs), dtype=dtype).t()
    return torch.empty((outputs, inputs), dtype=dtype, device=device)


def _places(weights: Weights, moe: MoeConfig | None) -> dict[str, Tensor]:
    """Where each tensor of the checkpoint goes: a view of a weight."""
    places = {f"{name}.weight": norm for name, norm in weights.norms.items()}
    for group in weights.table.groups:
        key, names = group.packed.key, [_stored_name(name, moe) for name in group.packed.names]
        if group.kind == "experts":
            assert moe is not None
            places |= _expert_places(group, weights.dense(key), moe)
        elif group.kind == "embedding":
            places[f"{names[0]}.weight"] = weights.embed
        elif group.kind == "linear" or not weights.table.tied:
            views = weights.dense(key).split_with_sizes(group.packed.widths)
            places |= {f"{name}.weight": v for name, v in zip(names, views, strict=True)}
        if group.packed.bias:
            views = weights.biases[key].split_with_sizes(group.packed.widths)
            places |= {f"{name}.bias": v for name, v in zip(names, views, strict=True)}
    return places


def _stored_name(name: str, moe: MoeConfig | None) -> str:
    """The name of a projection in checkpoints, which may call an MLP with experts otherwise."""
    if moe is not None and name.endswith(".mlp.gate"):
        return name.removesuffix("mlp.gate") + f"{moe.names[0]}.gate"
    return name


def _expert_places(group: Group, matrix_EOI: Tensor, moe: MoeConfig) -> dict[str, Tensor]:
    """The places of a tensor for each expert and projection."""
    mlp, *projections = moe.names
    called = dict(zip(("gate_proj", "up_proj", "down_proj"), projections, strict=True))
    return {
        f"{s.name.partition('mlp.')[0]}{mlp}.experts.{expert}.{called[s.suffix]}.weight": (
            matrix_EOI[expert, s.offset : s.offset + s.out_features]
        )
        for s in group.slices
        if s.suffix in called
        for expert in range(moe.num_experts)
    }


def _whole(weights: Weights, moe: MoeConfig | None) -> dict[str, tuple[Tensor, list[str]]]:
    """Where tensors of mixtures of experts go in checkpoints that transformers stores as it holds
    them: the weight, and the names in `_places` that it stands for."""
    if moe is None:
        return {}
    found: dict[str, tuple[Tensor, list[str]]] = {}
    for groups in weights.table.by_key.values():
        key, last = groups[0].packed.key, groups[-1].slices[0].name
        if groups[0].kind == "experts":
            names = [n for g in groups for n in _expert_places(g, weights.dense(key), moe)]
            found[last] = weights.dense(key), names
        elif last.endswith(".mlp.gate"):
            found[f"{last}.weight"] = weights.dense(key), [f"{_stored_name(last, moe)}.weight"]
    return found


def _quantize(weights: Weights, form: Format | None) -> None:
    """Quantize the layers' matrices one by one, so that both kinds exist for one at a time."""
    if form is None:
        return
    for key, (group, *_) in weights.table.by_key.items():
        if group.kind == "linear":
            weights.matrices[key] = form.quantize(weights.dense(key))


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
            stated = json.loads(index.read_text(encoding="utf-8"))
            names = sorted(set(stated["weight_map"].values()))
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

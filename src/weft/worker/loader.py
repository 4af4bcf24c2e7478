"""From a checkpoint, or random numbers, to the weights of a model on its device."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from weft.core.config import ModelArgs
from weft.core.errors import ConfigError
from weft.core.targets import TargetTable
from weft.models.blueprint import target_table
from weft.models.config import ModelConfig, load_model_config, resolve_model
from weft.models.loading import dummy_weights, load_weights
from weft.models.weights import Weights
from weft.worker.memory import check_context


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
    check_context(args.max_model_len, config)  # before anything slow
    dtype = _dtype(args.dtype, config, device)
    if args.load_format == "dummy":
        weights = dummy_weights(config, dtype, device, quantization=args.quantization)
    else:
        folder = resolve_model(args.model, args.revision)
        weights = load_weights(folder, config, dtype, device, args.quantization)
    return LoadedModel(config, target_table(config), weights, dtype, device)


def device_of(name: str) -> torch.device:
    """The device that auto, cpu or cuda stands for. Raises ConfigError where there is no such
    device."""
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

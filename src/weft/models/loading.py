"""Loads a model's weights from safetensors, or makes random ones, directly on the device.

The table of the model's shape (`models/blueprint.py`) says which tensors its files must hold; each
projection's tensor is read into its rows of the packed weight. On several ranks, each reads its own
part of every tensor (`weft.core.shards`).
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from weft.core.config import ModelArgs
from weft.core.errors import ConfigError
from weft.core.shards import Shard, unsharded
from weft.core.targets import Group, TargetTable, text_name
from weft.kernels.linear import DenseWeight
from weft.kernels.quant import VALUES, Format, format_named
from weft.kernels.quant.packed import fits
from weft.models import mtp
from weft.models.blueprint import EMBED, HEAD, IN_FLOAT32, model_shard, target_table
from weft.models.config import ModelConfig, load_model_config, resolve_model
from weft.models.files import stored_tensors
from weft.models.linear_attention import check_heads
from weft.models.matrices import LinearMatrices
from weft.models.quantized.reading import dequantized
from weft.models.share import share_of
from weft.models.weights import (
    Place,
    Weights,
    joint_places,
    place_of,
    place_of_bias,
    place_of_expert_bias,
    places_of,
    whole_places,
)

logger = logging.getLogger(__name__)
_HEAD_NAME = "lm_head.weight"
_BARE = "embed_tokens.", "layers.", "norm.", "embedding_norm."  # names in a decoder saved alone


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A base model, or a rank's share of it, whose weights are on their device."""

    config: ModelConfig
    """The shape of the model, or of this rank's share."""
    shard: Shard
    weights: Weights
    dtype: torch.dtype
    device: torch.device
    quantization: str | None
    """What `--quantization` says: a name in `weft.kernels.quant`."""
    mtp_head: Weights | None = None
    """The multi-token prediction head, if it is served; see `weft.models.mtp`."""

    @property
    def table(self) -> TargetTable:
        """The table of the model, or of this rank's share."""
        return self.shard.own


def load_model(
    args: ModelArgs, rank: int = 0, fully_sharded_loras: bool = False, mtp_head: bool = False
) -> LoadedModel:
    """Load the share of one of `args.tensor_parallel_size` ranks; see `model_shard`. `mtp_head`:
    also load the multi-token prediction head.

    Raises ConfigError for a device that is not there or lacks kernels for the model, a model that
    is not served or can't be divided, and a context or a head that the model does not have."""
    size = args.tensor_parallel_size
    device = device_of(args.device, rank if size > 1 else None)
    config = load_model_config(args.model, args.revision)
    config.check_context(args.max_model_len)  # before anything slow
    if mtp_head:
        config = mtp.with_mtp_head(config)
    if size > 1 and args.quantization and format_named(args.quantization).by_projection:
        message = f"--quantization {args.quantization} is served on one GPU only"
        raise ConfigError(message, "quantization")
    if args.deterministic:
        _check_deterministic(config)
    if config.linear is not None:
        check_heads(config.linear, device)
    shard = model_shard(config, rank, size, fully_sharded_loras=fully_sharded_loras)
    dtype = dtype_of(args.dtype, config, device)
    head = _load_mtp_head(args, config, dtype, device, rank) if mtp_head else None
    if args.load_format == "dummy":
        weights = dummy_weights(config, dtype, device, quantization=args.quantization, shard=shard)
    else:
        folder = resolve_model(args.model, args.revision)
        asked = VALUES if args.deterministic else args.quantization
        weights = load_weights(folder, config, dtype, device, asked, shard)
    if args.deterministic:
        weights.make_deterministic()
    own = share_of(config, size)
    return LoadedModel(own, shard, weights, dtype, device, args.quantization, head)


def _load_mtp_head(
    args: ModelArgs, config: ModelConfig, dtype: torch.dtype, device: torch.device, rank: int
) -> Weights:
    """A rank's share of the multi-token prediction head, whose weights are not quantized. Raises
    ConfigError if the checkpoint has no such head."""
    own, shard = mtp.head_config(config), mtp.head_shard(config, rank, args.tensor_parallel_size)
    if args.load_format == "dummy":
        return dummy_weights(own, dtype, device, shard=shard)
    folder = resolve_model(args.model, args.revision)
    if not any(name.startswith(mtp.PREFIX) for name in stored_tensors(folder, "cpu")):
        message = f"--speculative mtp: {folder} has no head that drafts tokens ({mtp.PREFIX}*)"
        raise ConfigError(message, "speculative")
    return load_weights(folder, own, dtype, device, VALUES, shard, mtp.PREFIX)


def device_of(name: str, index: int | None = None) -> torch.device:
    """The device for "auto", "cpu" or "cuda"; `index`: the number of the GPU. Raises ConfigError if
    there is no such device."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cpu":
        return torch.device(name)
    if not torch.cuda.is_available():
        raise ConfigError("--device cuda, but torch sees no CUDA device", "device")
    if index is not None and index >= torch.cuda.device_count():
        message = f"there is no CUDA device for rank {index}: {torch.cuda.device_count()} are seen"
        raise ConfigError(message, "tensor_parallel_size")
    return torch.device(name) if index is None else torch.device(name, index)


def dtype_of(name: str, config: ModelConfig, device: torch.device) -> torch.dtype:
    """The dtype for "auto", given model and device, or for another name."""
    if name == "auto":
        name = "float32" if device.type == "cpu" else config.dtype
        name = "bfloat16" if name == "float32" and device.type == "cuda" else name
    return {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}[name]


def _check_deterministic(config: ModelConfig) -> None:
    """Raises ConfigError for a model with kernels that are not deterministic."""
    for has, what in (
        (config.moe is not None, "a mixture of experts"),
        (config.linear is not None, "layers with recurrent states"),
        (config.latent is not None, "attention to latents"),
    ):
        if has:
            message = f"--deterministic does not serve {what}, which {config.architecture} has"
            raise ConfigError(message, "deterministic")


def load_weights(
    folder: Path,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device | str,
    quantization: str | None = None,
    shard: Shard | None = None,
    prefix: str = "",
) -> Weights:
    """Read the safetensors files of `folder`, tensor by tensor; with `shard`, its part of each.
    `quantization`: the format of `weft.kernels.quant` for the layers' matrices. Without it, a GPU
    keeps the matrices of a quantized checkpoint packed, if there are kernels for that. `prefix`: of
    the tensors' names, for a part beside the text model, instead of `model.`. Raises ConfigError,
    naming a tensor that is missing or has another shape."""
    form, device = _form_of(quantization), torch.device(device)
    shard = shard or unsharded(target_table(config))
    packs = quantization is None and config.quantized is not None and device.type == "cuda"
    late = packs or (form is not None and not form.by_projection)
    weights = allocate_weights(shard, dtype, device, form, late)
    places = places_of(weights, shard, config.moe)
    whole = whole_places(weights, shard, config.moe)
    whole |= joint_places(weights, shard, config.names.stored_qkv)
    empty = partial(empty_linear, shard.own, dtype, device)
    linear = LinearMatrices(weights.matrices, places.values(), form, empty, fits if packs else None)
    unread = set(places)

    def put(place: Place, stored: Any) -> None:
        if late and place.of is not None:
            linear.take(place, stored)
        else:
            place.fill(stored)

    unknown: list[str] = []
    tied_head: Tensor | None = None
    files = stored_tensors(folder, device)
    for stored_name, stored in dequantized(files.items(), config.quantized):
        name = _own_name(stored_name, prefix, mtp.has_head(config))
        if name is None:
            continue
        if name in places:
            _check(name, stored, places[name].shape)
            put(places[name], stored)
            unread.discard(name)
        elif name in whole:
            place = whole[name][0].turned(tuple(stored.get_shape()))
            _check(name, stored, place.shape)
            put(place, stored)
            unread.difference_update(whole[name][1])
        elif name == _HEAD_NAME and config.tie_word_embeddings:
            tied_head = stored[:].to(dtype)
        elif not name.endswith("rotary_emb.inv_freq"):
            unknown.append(stored_name)
    missing = {prefix + name.removeprefix("model.") if prefix else name for name in unread}
    _report(folder, sorted(missing), sorted(unknown))
    if tied_head is not None and not torch.equal(tied_head, weights.embed):
        message = f"tie_word_embeddings is set, but {_HEAD_NAME} differs from the embedding"
        raise ConfigError(message, "tie_word_embeddings")
    del places, whole
    _change_values(weights, form)
    return weights


def _own_name(stored_name: str, prefix: str, has_head: bool) -> str | None:
    """A tensor's name within the part with `prefix`, or within the text model; None if it belongs
    to another part, such as the multi-token prediction head."""
    if not prefix:
        of_head = has_head and stored_name.startswith(mtp.PREFIX)
        in_model = f"model.{stored_name}" if stored_name.startswith(_BARE) else stored_name
        return None if of_head else text_name(in_model)
    of_part = stored_name.startswith(prefix)
    return "model." + stored_name.removeprefix(prefix) if of_part else None


def _form_of(quantization: str | None) -> Format | None:
    """The format of that name for matrices; None if they stay as they are read."""
    return None if quantization in (None, VALUES) else format_named(quantization)


def dummy_weights(
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device | str,
    seed: int = 0,
    quantization: str | None = None,
    shard: Shard | None = None,
) -> Weights:
    """Random weights made on the device: normal with deviation 0.02, norms 1. A rank gets its part
    of the same whole tensors, which are made one by one."""
    generator = torch.Generator(device=device).manual_seed(seed)
    form, device = _form_of(quantization), torch.device(device)
    late = form is not None and not form.by_projection
    shard = shard or unsharded(target_table(config))
    weights = allocate_weights(shard, dtype, device, form, late)

    def fill(place: Place, whole: Tensor) -> None:
        place.fill(whole.normal_(std=0.02, generator=generator))

    for key in weights.matrices:
        group = shard.whole.by_key[key][0]
        if group.kind != "head" or not shard.whole.tied:
            own, num = weights.dense(key), shard.whole.num_experts
            if own.is_meta:
                own = empty_linear(shard.own, dtype, device, key)
            same = own if shard.size == 1 else _empty_matrix(group, num, dtype, device)
            fill(place_of(shard, group.slices, own), same)
            if form is not None and late and group.packed.any_format:
                weights.matrices[key] = form.quantize(own)
    for group in shard.whole.groups:
        if group.packed.bias:
            bias = weights.biases.get(group.packed.key)
            if group.kind == "experts":
                place = place_of_expert_bias(shard, group, bias)
            else:
                place = place_of_bias(shard, group.slices, bias)
            fill(place, torch.empty(place.shape, dtype=dtype, device=device))
    for vector in (*weights.norms.values(), *weights.vectors.values()):
        vector.fill_(1.0)
    _change_values(weights, form)
    return weights


def allocate_weights(
    shard: Shard,
    dtype: torch.dtype,
    device: torch.device | str,
    form: Format | None,
    late: bool = False,
) -> Weights:
    """Empty weights. On a CPU, matrices of fp32 are (out, in) views of (in, out) memory, which
    products with few rows read faster; the embedding is read by row, and experts lie one after
    another.
    `late`: linear layers' matrices get no memory yet, as each is put into its format by itself."""
    weights = Weights(table := shard.own, {}, {}, {})
    # The head lies before the layers: behind them, a decode step on an H200 takes 1 % longer.
    for key in sorted(table.by_key, key=lambda key: key not in (EMBED, HEAD)):
        group = table.by_key[key][0]
        if group.kind == "experts" and form is not None:
            message = "--quantization is not served for mixtures of experts"
            raise ConfigError(message, "quantization")
        if group.kind == "head" and table.tied:
            (rows,) = shard.weight_rows(group.slices[0])
            weights.matrices[key] = DenseWeight(weights.embed[rows])
        else:
            (share,) = shard.weight_rows(group.slices[0]) if group.kind == "head" else (None,)
            where = torch.device("meta" if late and group.packed.any_format else device)
            matrix = _empty_matrix(group, table.num_experts, dtype, where, share)
            weights.matrices[key] = DenseWeight(matrix)
        if group.packed.bias and shard.adds_vectors(group.slices[0]):
            copies = (table.num_experts,) if group.kind == "experts" else ()
            shape = (*copies, group.out_features)
            weights.biases[key] = torch.empty(shape, dtype=dtype, device=device)
    for norm in table.norms:
        weights.norms[norm.name] = torch.empty(norm.size, dtype=dtype, device=device)
    for name, shape, *_ in table.vectors:
        # Parameters of decays stay in fp32, as their rounding would act again with every token, and
        # so do corrections, as they decide between experts whose weights may differ little.
        own = torch.float32 if name.endswith(IN_FLOAT32) else dtype
        weights.vectors[name] = torch.empty(shape, dtype=own, device=device)
    return weights


def _empty_matrix(
    group: Group,
    num_experts: int,
    dtype: torch.dtype,
    device: torch.device,
    share: slice | None = None,
) -> Tensor:
    outputs, inputs = group.out_features, group.in_features
    if share is not None:
        outputs = share.stop - share.start
    if group.packed.float32:
        dtype = torch.float32
    if group.kind == "experts":
        return torch.empty((num_experts, outputs, inputs), dtype=dtype, device=device)
    if group.kind == "embedding":
        return torch.empty((inputs, outputs), dtype=dtype, device=device)
    if device.type == "cpu" and dtype == torch.float32:
        return torch.empty((inputs, outputs), dtype=dtype).t()
    return torch.empty((outputs, inputs), dtype=dtype, device=device)


def empty_linear(table: TargetTable, dtype: torch.dtype, device: torch.device, key: str) -> Tensor:
    """The matrix of a linear layer, without values."""
    return _empty_matrix(table.by_key[key][0], table.num_experts, dtype, device)


def quantize_weights(weights: Weights, form: Format) -> None:
    """Put the layers' matrices into a format."""
    for key, (group, *_) in weights.table.by_key.items():
        if group.packed.any_format:
            weights.matrices[key] = form.quantize(weights.dense(key))


def _change_values(weights: Weights, form: Format | None) -> None:
    """Change the values of each projection, if the format goes by projection."""
    if form is None or not form.by_projection:
        return
    for key, (group, *_) in weights.table.by_key.items():
        if group.kind == "linear":
            for matrix in weights.dense(key).split_with_sizes(group.packed.widths):
                matrix.copy_(form.quantize(matrix).dequantized(matrix.dtype))


def _check(name: str, stored: Any, shape: tuple[int, ...]) -> None:
    found = tuple(stored.get_shape())
    if found != shape:
        raise ConfigError(f"{name} has shape {found}, expected {shape}", name)
    if stored.get_dtype() not in ("F64", "F32", "F16", "BF16"):
        raise ConfigError(f"{name} has dtype {stored.get_dtype()}, which is not served", name)


def _report(folder: Path, missing: list[str], unknown: list[str]) -> None:
    if missing:
        more = f" and {len(missing) - 4} more" if len(missing) > 4 else ""
        raise ConfigError(f"{folder} lacks {', '.join(missing[:4])}{more}", missing[0])
    if unknown:
        logger.warning("%s: %d tensors are not used, such as %s", folder, len(unknown), unknown[0])

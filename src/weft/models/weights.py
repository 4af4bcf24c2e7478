"""Holds the weights of a model, and knows where each tensor of a checkpoint goes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from weft.checkpoint.base import BaseWeights
from weft.core.shards import Shard
from weft.core.targets import Group, Norm, Target, TargetTable
from weft.kernels.linear import DenseWeight, Weight
from weft.models.blueprint import EMBED, HEAD
from weft.models.family import MoeConfig


@dataclass(frozen=True, slots=True)
class Weights(BaseWeights):
    """All weights of a model, or of one rank's share, in one dtype and on one device. Adapters are
    packed with those of a whole model."""

    table: TargetTable
    """The table of the model, or of this rank's share."""
    matrices: dict[str, Weight]
    """By key, (out, in); the embedding's is (vocab, hidden), the experts' (experts, out, in). A
    tied head is the embedding's tensor, or a rank's rows of it."""
    biases: dict[str, Tensor]
    """By key, (out,), or (experts, out); absent if the model has no such bias, or another rank adds
    it."""
    norms: dict[str, Tensor]
    """By name, (size,)."""
    vectors: dict[str, Tensor] = field(default_factory=dict)
    """By name, tensors that no adapter changes."""

    @property
    def deterministic(self) -> bool:
        """Whether all products with these weights are; see `weft.kernels.linear.product`."""
        return all(isinstance(m, DenseWeight) and m.deterministic for m in self.matrices.values())

    def make_deterministic(self) -> None:
        for key in self.matrices:
            self.matrices[key] = DenseWeight(self.dense(key), deterministic=True)

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
    def num_bytes(self) -> int:
        """The bytes that they take on a GPU."""
        own = [m for key, m in self.matrices.items() if key != HEAD or not self.table.tied]
        vectors = (*self.biases.values(), *self.norms.values(), *self.vectors.values())
        return sum(m.num_bytes for m in own) + sum(v.nbytes for v in vectors)

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
    """The rows of a target in its group's matrix or bias."""
    return packed[target.offset : target.offset + target.out_features]


class Place(NamedTuple):
    """Where a tensor of a checkpoint goes: which of its rows and columns are copied to which view
    of a weight."""

    view: Tensor | None
    """None: the tensor is not loaded here."""
    shape: tuple[int, ...]
    """The whole tensor's shape. The last two dimensions are rows and columns; without columns, the
    first one is rows."""
    rows: tuple[slice, ...]
    columns: slice | None = None
    """None: all columns, or the tensor has none."""
    transposed: bool = False
    """Whether the whole tensor is (experts, in, out), while rows and columns are counted in each
    expert's transposed matrix (out, in)."""
    experts: slice | None = None
    """Which experts of the whole tensor, if its first dimension is experts."""
    of: tuple[str, int] | None = None
    """If the view is of a linear layer's matrix: the layer's key and the view's first row there."""

    def turned(self, shape: tuple[int, ...]) -> Place:
        """The place for a tensor of all experts that may be stored as (experts, in, out)."""
        is_turned = self.experts is not None and shape == (self.shape[0], *self.shape[:0:-1])
        if shape == self.shape or not is_turned:
            return self
        return self._replace(shape=shape, transposed=True)

    def fill(self, source: Any) -> None:
        """Copy from a tensor, or from a file's tensor, which is read by slices."""
        if self.view is None:
            return
        if not self.shape:
            self.view.copy_(source[...])
        end = 0
        for rows in self.rows:
            start, end = end, end + rows.stop - rows.start
            if self.transposed:
                assert self.experts is not None
                for expert, view in enumerate(self.view, self.experts.start):
                    matrix = source[expert : expert + 1, self.columns, rows]
                    view[start:end].copy_(matrix[0].t())
                continue
            if self.columns is None:
                self.view[start:end].copy_(source[rows])
                continue
            experts = () if self.experts is None else (self.experts,)
            self.view[..., start:end, :].copy_(source[(*experts, rows, self.columns)])


def place_of(shard: Shard, targets: tuple[Target, ...], view: Tensor | None) -> Place:
    """The place of a tensor with the weights of neighbouring targets; if `view` has a dimension for
    experts, with those of all experts."""
    first = targets[0]
    rows, columns = _rows_of(targets, [shard.weight_rows(t) for t in targets]), shard.inputs(first)
    shape = sum(t.out_features for t in targets), first.in_features
    if first.kind == "embedding":
        return Place(view, shape[::-1], (columns,), rows[0])
    if view is None or view.dim() == 2:
        return Place(view, shape, rows, columns)
    experts = shard.copies("experts")
    return Place(view, (shard.whole.num_experts, *shape), rows, columns, experts=experts)


def place_of_bias(shard: Shard, targets: tuple[Target, ...], view: Tensor | None) -> Place:
    rows = _rows_of(targets, [shard.outputs(t) for t in targets])
    return Place(view, (sum(t.out_features for t in targets),), rows)


def _rows_of(targets: tuple[Target, ...], slices: list[tuple[slice, ...]]) -> tuple[slice, ...]:
    """The slices of each target's rows, counted in the rows of all targets together."""
    shifts = [target.offset - targets[0].offset for target in targets]
    return tuple(
        slice(shift + s.start, shift + s.stop)
        for shift, each in zip(shifts, slices, strict=True)
        for s in each
    )


def places_of(weights: Weights, shard: Shard, moe: MoeConfig | None) -> dict[str, Place]:
    """Where each tensor of a checkpoint goes, by its name there."""
    places = {
        f"{norm.name}.weight": Place(weights.norms[norm.name], (norm.size,), shard.norm(norm))
        for norm in shard.whole.norms
    }
    for index, (name, shape, *_) in enumerate(shard.whole.vectors):
        places[name] = Place(weights.vectors[name], shape, shard.vector(index))
    for group, own in zip(shard.whole.groups, shard.own.groups, strict=True):
        key, names = group.packed.key, [_stored_name(name, moe) for name in group.packed.names]
        if group.kind == "experts" and moe is not None and moe.clamped_swiglu is not None:
            matrix, bias = weights.dense(key), weights.biases.get(key)
            places |= _stacked_places(shard, group, names[0], matrix, bias)
            continue
        if group.kind == "experts" and moe is not None and moe.stacked:
            if len(names) == 1:  # gate and up are there as two as well
                place = place_of(shard, group.slices, weights.dense(key))
                places[names[0]] = _transposed(place) if moe.transposed else place
        elif group.kind == "experts":
            assert moe is not None
            places |= _expert_places(shard, group, weights.dense(key), moe)
        elif group.kind in ("embedding", "head"):
            if group.kind == "embedding" or not shard.whole.tied:
                places[f"{names[0]}.weight"] = place_of(shard, group.slices, weights.dense(key))
        else:
            views, start = weights.dense(key).split_with_sizes(own.packed.widths), 0
            for name, target, view in zip(names, group.slices, views, strict=True):
                place = place_of(shard, (target,), view)
                of = (key, start) if group.packed.any_format else None
                places[f"{name}.weight"] = place._replace(of=of)
                start += len(view)
        if group.packed.bias:
            bias = weights.biases.get(key)
            for name, target, mine in zip(names, group.slices, own.slices, strict=True):
                part = None if bias is None else _rows(bias, mine)
                places[f"{name}.bias"] = place_of_bias(shard, (target,), part)
    return places


def _stacked_places(
    shard: Shard, group: Group, name: str, matrix_EOI: Tensor, bias_EO: Tensor | None
) -> dict[str, Place]:
    """The places of tensors that hold all experts."""
    return {
        name: _transposed(place_of(shard, group.slices, matrix_EOI)),
        f"{name}_bias": place_of_expert_bias(shard, group, bias_EO),
    }


def _transposed(place: Place) -> Place:
    """The place for a tensor of all experts that is stored as (experts, in, out)."""
    experts, outputs, inputs = place.shape
    return place._replace(shape=(experts, inputs, outputs), transposed=True)


def place_of_expert_bias(shard: Shard, group: Group, view_EO: Tensor | None) -> Place:
    """The place of a tensor with the biases of all experts, (experts, out)."""
    (outputs,) = shard.outputs(group.slices[0])
    shape = shard.whole.num_experts, group.out_features
    return Place(view_EO, shape, (shard.copies("experts"),), outputs)


def _stored_name(name: str, moe: MoeConfig | None) -> str:
    """The name of a projection in checkpoints, where those of an MLP with experts may differ."""
    if moe is not None and name.endswith(".mlp.gate"):
        return name.removesuffix("mlp.gate") + f"{moe.names[0]}.gate"
    for end, stored in moe.stored_names if moe is not None else ():
        if name.endswith(end):
            return name.removesuffix(end) + stored
    return name


def _expert_places(
    shard: Shard, group: Group, matrix_EOI: Tensor, moe: MoeConfig
) -> dict[str, Place]:
    """The places of tensors of a single expert's projection; nowhere for experts of other ranks."""
    mlp, *projections = moe.names
    called = dict(zip(("gate_proj", "up_proj", "down_proj"), projections, strict=True))
    here, places = shard.copies("experts"), dict[str, Place]()
    for s, own in zip(group.slices, shard.own.groups[group.index].slices, strict=True):
        of_layer = s.name.partition(moe.place)[0]
        for expert in range(moe.num_experts) if s.suffix in called else ():
            is_here = here.start <= expert < here.stop
            view = _rows(matrix_EOI[expert - here.start], own) if is_here else None
            name = f"{of_layer}{mlp}.experts.{expert}.{called[s.suffix]}.weight"
            places[name] = place_of(shard, (s,), view)
    return places


def joint_places(weights: Weights, shard: Shard, stored: str) -> dict[str, tuple[Place, list[str]]]:
    """For checkpoints with one projection for q, k and v, of the name `stored`: by name, the place
    of its weight or bias, and the names in `places_of` that it replaces. There is none if `stored`
    is empty."""
    found: dict[str, tuple[Place, list[str]]] = {}
    for group in shard.whole.groups if stored else ():
        first, *others = group.packed.names
        if not first.endswith(".q_proj") or not others:
            continue
        key, slices, name = group.packed.key, group.slices, first.removesuffix("q_proj") + stored
        place = place_of(shard, slices, weights.dense(key))._replace(of=(key, 0))
        places = {"weight": place}
        if group.packed.bias:
            places["bias"] = place_of_bias(shard, slices, weights.biases.get(key))
        for end, place in places.items():
            found[f"{name}.{end}"] = place, [f"{each}.{end}" for each in group.packed.names]
    return found


def whole_places(
    weights: Weights, shard: Shard, moe: MoeConfig | None
) -> dict[str, tuple[Place, list[str]]]:
    """For checkpoints that transformers has stored with all experts in one tensor: by name, the
    tensor's place, and the names in `places_of` that it replaces."""
    if moe is None or moe.stacked or moe.clamped_swiglu is not None:
        return {}
    found: dict[str, tuple[Place, list[str]]] = {}
    for groups in shard.whole.by_key.values():
        key, last = groups[0].packed.key, groups[-1].slices[0].name
        place = place_of(shard, groups[0].slices, weights.dense(key))
        if groups[0].kind == "experts":
            names = [n for g in groups for n in _expert_places(shard, g, weights.dense(key), moe)]
            found[last] = place, names
        elif last.endswith(".mlp.gate"):
            names = [f"{_stored_name(last, moe)}.weight"]
            found[f"{last}.weight"] = place._replace(of=(key, 0)), names
    return found

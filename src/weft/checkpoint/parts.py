"""An adapter's tensors by what they change in the base model: the form that images are packed from.

Every kind of adapter is brought into this form (see `weft.checkpoint.kinds`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from weft.checkpoint.config import layer_of
from weft.checkpoint.read import Raw, Stored
from weft.checkpoint.refuse import refuse
from weft.core.targets import ImageLayout, Norm, Target, TargetTable, vocabulary

PREFIX = "base_model.model."
"""PEFT's prefix of module names."""
EMBEDDING, HEAD = "model.embed_tokens", "lm_head"

Array = NDArray[np.floating[Any]]


class Values(Protocol):
    """The values of one tensor, which are in the file or computed from it."""

    @property
    def name(self) -> str: ...  # the tensor of the file that refusals name

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def array(self) -> Raw:
        """The values; computed anew each time."""

    def largest(self) -> np.float32:
        """The largest magnitude; NaN or infinite if a value is."""


@dataclass(frozen=True, slots=True)
class Deferred:
    """Values that are only computed when needed, as those of all targets together would take
    several times the memory of the image."""

    name: str
    shape: tuple[int, ...]
    compute: Callable[[], Array]
    bound: Callable[[], np.floating[Any]] | None = None
    """Computes the largest magnitude from the factors, where this is cheaper than from all values;
    None: it is found among the values."""

    @property
    def array(self) -> NDArray[np.float32]:
        with np.errstate(all="ignore"):  # what is too large shows as infinite in the image
            return np.ascontiguousarray(self.compute(), np.float32)

    def largest(self) -> np.float32:
        with np.errstate(all="ignore"):
            return largest(self.array) if self.bound is None else np.float32(self.bound())


def largest(array: Array) -> np.float32:
    return np.float32(np.maximum(array.max(), -array.min()))


@dataclass(slots=True)
class TargetParts:
    """An adapter's tensors for one target: y = gain * (W x + bias) + scaling * B A x, and so on. It
    has both A (r, in) and B (out, r), stacked for experts, or neither; other vectors are (out,)."""

    target: Target
    a: Values | None = None
    b: Values | None = None
    scaling: float = 1.0
    lora_bias: Values | None = None
    """Added to B A x, before it is scaled."""
    bias: Values | None = None
    """Replaces the base's bias."""
    magnitude: Values | None = None
    """DoRA's: the rows of W + scaling * B A are scaled to these lengths."""
    gain: Values | None = None
    """Factors of the whole output, including the bias."""
    error: float = 0.0
    """How far B A is from what was trained, as the relative Frobenius norm; 0: exact."""

    @property
    def rank(self) -> int:
        return 0 if self.a is None else self.a.shape[-2]

    @property
    def vectors(self) -> list[Values]:
        """All vectors that it has besides A and B."""
        vectors = (self.lora_bias, self.bias, self.magnitude, self.gain)
        return [vector for vector in vectors if vector is not None]


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows that replace those of the embedding's or the head's weight (vocab, hidden)."""

    whole: Stored | None
    """All rows; None: only `some` are replaced."""
    some: Stored | None
    """(n, hidden): rows that replace those of `whole` too."""
    ids: tuple[int, ...] = ()
    """The n token ids of `some`."""

    def count(self, vocab: int) -> int:
        return len(self.ids) if self.whole is None else vocab


@dataclass(slots=True)
class AdapterParts:
    """All of an adapter, in the order of the table."""

    targets: list[TargetParts] = field(default_factory=list)
    norms: list[tuple[Norm, Stored]] = field(default_factory=list)
    embedding: Rows | None = None
    head: Rows | None = None
    vocab_size: int = 0
    """The number of tokens, if it differs from the base's: embedding, head and their A and B have
    that many. 0: as the base."""

    @property
    def needs_base(self) -> bool:
        """Whether some of it can only be computed with the base's weights."""
        affine = any(parts.vectors for parts in self.targets)
        return affine or bool(self.norms or self.embedding or self.head)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the adapted modules without the layer, in table order, norms last."""
        names = [each.target.suffix for each in self.targets]
        if self.embedding is not None:
            names.insert(0, "embed_tokens")
        if self.head is not None:
            names.append("lm_head")
        names += [norm.name.rpartition(".")[2] for norm, _ in self.norms]
        return tuple(dict.fromkeys(names))

    def ranks(self, table: TargetTable) -> tuple[int, ...]:
        """The rank of each slice of the table; 0 where it is not adapted."""
        ranks = [0] * len(table.targets)
        for each in self.targets:
            ranks[each.target.slice] = each.rank
        return tuple(ranks)

    @property
    def worst(self) -> tuple[float, str]:
        """The largest error of a target and that target's name; (0, "") if all are exact."""
        worst = max(self.targets, key=lambda each: each.error, default=None)
        return (worst.error, worst.target.name) if worst and worst.error else (0.0, "")


def find_target(tensor: str, module: str, table: TargetTable) -> Target:
    """The target named `module`. Raises AdapterInvalid, naming `tensor`, if there is none."""
    target = table.by_name.get(module)
    if target is None:
        if any(vector.name == tensor.removeprefix(PREFIX) for vector in table.vectors):
            refuse(tensor, "an adapter can't have its own tensor in place of this one of the base")
        refuse(tensor, f"no such projection in the base model{_hint(module, table)}")
    return target


def _hint(name: str, table: TargetTable) -> str:
    """What the base has instead of the module `name`, for messages."""
    layers = (layer_of(target.name) for target in table.targets)
    num_layers = 1 + max((layer for layer in layers if layer is not None), default=-1)
    layer = layer_of(name)
    if (layer or 0) >= num_layers:
        return f", which has {num_layers} layers"
    who = "which" if layer is None else f"whose layer {layer}"
    there = [t.suffix for t in table.targets if layer in (None, layer_of(t.name))]
    return f", {who} has {', '.join(dict.fromkeys(there))}"


def check_shape(values: Stored, expected: tuple[int, ...], who: str) -> Stored:
    """The same tensor. Raises AdapterInvalid if its shape is not `expected`; `who` is for the
    message."""
    if values.shape != expected:
        refuse(values.name, f"has the shape {values.shape}; {who} it {expected}")
    return values


def check_activated(
    invocation: tuple[int, ...],
    parts: AdapterParts,
    layout: ImageLayout,
    table: TargetTable,
    provisional: bool,
) -> None:
    """Raises AdapterInvalid if an activated adapter adapts more than linear layers, as PEFT would
    have the rest active everywhere, or if it adapts an absorbed projection. Before the invocation,
    keys and values must be the base's, but an absorbed projection is the adapter's for all tokens
    that a query sees. `provisional`: the base, which was not read, may have such parts."""
    vocab, _ = vocabulary(table, "embedding")
    beyond = [i for i in invocation if i >= vocab]
    field = "alora_invocation_tokens"
    if beyond:
        refuse(field, f"token {beyond[0]} is beyond the base model's vocabulary of {vocab}")
    for each in parts.targets:
        if each.a is not None and each.target.kind not in ("linear", "head"):
            refuse(each.a.name, f"no {each.target.kind} can be adapted by an activated LoRA")
        if each.target.slice in table.absorbed:
            what = f"{each.target.suffix} can't be adapted by an activated LoRA"
            why = "it would also change the keys and values of the tokens before the invocation"
            refuse(each.target.name, f"{what}: {why}")
    if layout.vocab_size:
        own = f"an adapter with its own vocabulary ({layout.vocab_size})"
        refuse(field, f"{own} can't be activated")
    if not provisional and (layout.norm_offset or layout.embedding_rows or layout.head_rows):
        why = "the file holds weights that differ from the base's, which can't be activated"
        refuse(field, why)


def nothing_in(parts: AdapterParts) -> str:
    """Why an adapter without effect changes nothing, for messages."""
    if parts.needs_base:
        return "all that it holds is as in the base model"
    return "A or B is zero in every target"


def same_rows(one: Rows | None, other: Rows | None) -> bool:
    """Whether both have the same rows, so that one copy serves both."""
    if one is None or other is None:
        return one is other
    pairs = ((one.whole, other.whole), (one.some, other.some))
    return one.ids == other.ids and all(a is b or (a is not None and a.equals(b)) for a, b in pairs)

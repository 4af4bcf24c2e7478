"""What a kind of adapter is, and what the kinds have in common.

A kind says which fields of adapter_config.json it knows, which tensors it has, and how these become
the parts that images are packed from (`weft.checkpoint.parts`). An adapter is served as PEFT would
run it, or refused with the name of the field or tensor that is not supported.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from weft.checkpoint import fields
from weft.checkpoint.config import PeftConfig
from weft.checkpoint.fields import Fields
from weft.checkpoint.parts import (
    PREFIX,
    AdapterParts,
    Array,
    Deferred,
    TargetParts,
    check_shape,
    find_target,
)
from weft.checkpoint.read import Stored
from weft.checkpoint.refuse import refuse, show
from weft.core.config import MAX_RANK
from weft.core.files import WEIGHTS_FILE
from weft.core.targets import Target, TargetTable

MAX_FIELD_RANK = 1 << 20
"""The largest rank that a field may have, if it is not the rank of the image."""

COMMON_HARMLESS = frozenset(
    {"auto_mapping", "base_model_name_or_path", "inference_mode", "peft_version", "revision"}
)
COMMON_READ = frozenset({"bias", "peft_type", "target_modules", "task_type"})
LAYERS = frozenset({"layers_pattern", "layers_to_transform"})
COMMON_REFUSED = {
    "modules_to_save": "whole modules are served beside plain LoRA only; train a LoRA with them",
    "fan_in_fan_out": "no base here stores its weights transposed; set it to false",
}


def no_biases(config: PeftConfig) -> PeftConfig:
    """The config itself. Raises AdapterInvalid if biases of the base model were trained."""
    bias = config.options.get("bias")
    if bias not in (None, "none"):
        refuse("bias", f"trained biases are served for plain LoRA only, got {show(bias)}")
    return config


@dataclass(frozen=True, kw_only=True)
class Kind:
    """One `peft_type`. Each field of a config is harmless, read or refused: a field in none of
    the three is refused as soon as it holds something."""

    peft_type: str
    title: str
    """The kind's usual name."""
    sort: Callable[[PeftAdapter], AdapterParts]
    """An adapter's parts. Raises AdapterInvalid for what can't be served."""
    tensors: tuple[str, ...] = ()
    """The last parts of the names of a module's tensors, for `PeftAdapter.modules`."""
    shared: tuple[str, ...] = ()
    """Names of tensors that all modules share."""
    read: frozenset[str] = frozenset()
    """Fields that change what the adapter computes, beside `COMMON_READ`."""
    harmless: frozenset[str] = frozenset()
    """Fields without effect on inference, beside `COMMON_HARMLESS`."""
    refused: Mapping[str, str] = field(default_factory=dict)
    """By field: why it is refused, beside `COMMON_REFUSED`."""
    rank: tuple[str, int] = ("r", 8)
    """The field that says the rank, and PEFT's default."""
    alpha: tuple[str, float] = ("alpha", 8)
    """The field that says alpha, and PEFT's default."""
    rank_is_images: bool = False
    """Whether the field's rank is also the image's, so that --max-lora-rank limits it."""
    configure: Callable[[PeftConfig], PeftConfig] = no_biases
    """Reads the fields of `config.options` that only this kind has. Raises AdapterInvalid."""

    def parse(self, options: Fields, max_rank: int) -> PeftConfig:
        """Parse and check the config's fields. Raises AdapterInvalid, naming the field."""
        self._check(options)
        # LoKr's rank may be huge to ask for full matrices; what counts is the rank of the result.
        max_field_rank = max_rank if self.rank_is_images else MAX_FIELD_RANK
        rank = partial(fields.rank, max_rank=max_field_rank)
        patterns = "alpha_pattern" in self.read
        config = PeftConfig(
            peft_type=self.peft_type,
            options=options,
            r=rank(options.get(*self.rank), self.rank[0]),
            alpha=fields.number(options.get(*self.alpha), self.alpha[0]),
            rank_pattern=fields.by_pattern(options, "rank_pattern", rank) if patterns else (),
            alpha_pattern=(
                fields.by_pattern(options, "alpha_pattern", fields.number) if patterns else ()
            ),
            target_modules=fields.modules(options, "target_modules"),
            exclude_modules=fields.modules(options, "exclude_modules"),
            layers_to_transform=fields.layers(options),
        )
        return self.configure(config)

    def _check(self, options: Fields) -> None:
        for name, value in options.items():
            # To PEFT, {} in a refused field does not mean off, but on, with all defaults.
            is_off = fields.is_off(value) and not (value == {} and name in self.refused)
            if is_off or name in self.harmless | COMMON_HARMLESS:
                continue
            if name not in self.read | COMMON_READ:
                why = f"an unknown field with the value {show(value)}; remove it if it is a note"
                refuse(name, {**COMMON_REFUSED, **self.refused}.get(name, why))


@dataclass(frozen=True, slots=True)
class PeftAdapter:
    """An adapter as PEFT has saved it, and the base on which it is to be served."""

    kind: Kind
    config: PeftConfig
    tensors: Mapping[str, Stored]
    table: TargetTable
    max_rank: int
    tolerance: float
    """The largest error of a target, see `TargetParts.error`."""
    max_added_tokens: int

    def modules(self) -> list[LinearModule]:
        """The adapted modules with their tensors, which are those that the kind has.

        Raises AdapterInvalid for other tensors, for values that are not finite, and for modules
        that are no linear layers or not those that the config selects.
        """
        found: dict[str, dict[str, Stored]] = {}
        for name, tensor in self.tensors.items():
            if not np.isfinite(tensor.largest()):
                refuse(name, "holds NaN or infinite values")
        for name, tensor in self.tensors.items():
            if name in self.kind.shared:
                continue
            module, part = self._split(name)
            target = find_target(name, module, self.table)
            if target.kind not in ("linear", "head"):
                refuse(name, f"{self.kind.title} is for linear layers, not {module}")
            found.setdefault(module, {})[part] = tensor
        if not found:
            refuse(WEIGHTS_FILE, "holds no tensors of an adapter")
        self.config.check_modules(list(found), self.table.by_name)
        return [LinearModule(self.table.by_name[name], parts) for name, parts in found.items()]

    def check_error(self, name: str, error: float, exact_rank: int) -> None:
        """Raises AdapterInvalid, naming the tensor, if the error of serving `exact_rank` as the
        largest rank that is allowed is above the tolerance."""
        if error <= self.tolerance:
            return
        if exact_rank <= MAX_RANK:
            remedy = f"--max-lora-rank {exact_rank} makes it exact"
        else:
            remedy = "train with a smaller r, or merge this adapter into a base of its own"
        refuse(
            name,
            f"as a LoRA of rank {self.max_rank} it would be off by {error:.2g} (relative Frobenius"
            f" norm), more than --conversion-tolerance {self.tolerance:g}; {remedy}",
        )

    def _split(self, tensor: str) -> tuple[str, str]:
        """(module, part) from a tensor's name."""
        module, _, part = tensor.removeprefix(PREFIX).rpartition(".")
        if part not in self.kind.tensors or not tensor.startswith(PREFIX):
            why = f"only {', '.join(self.kind.tensors)} are served for {self.kind.title}"
            remedy = "save the adapter with save_embedding_layers=False to leave whole weights out"
            refuse(tensor, f"{why}; {remedy}" if part == "weight" else why)
        return module, part


@dataclass(frozen=True, slots=True)
class LinearModule:
    """The tensors of one module of a file by part, such as `lora_A`, for a linear layer."""

    target: Target
    tensors: Mapping[str, Stored]

    @property
    def first(self) -> str:
        """The name of one of its tensors."""
        return next(iter(self.tensors.values())).name

    def get(self, part: str, *shape: int) -> Stored:
        """Raises AdapterInvalid when the part is missing or of another shape."""
        tensor = self.tensors.get(part)
        if tensor is None:
            refuse(self.first, f"its counterpart {part} is missing")
        return check_stated(tensor, *shape)

    def lora(
        self,
        rank: int,
        a: Callable[[], Array],
        b: Callable[[], Array],
        bound_a: Callable[[], np.floating] | None = None,
        bound_b: Callable[[], np.floating] | None = None,
        error: float = 0.0,
    ) -> TargetParts:
        """The target's parts: A (rank, in) and B (out, rank), scaled, computed when needed; where
        bounds of their magnitudes are cheaper, these are given too."""
        a_shape, b_shape = (rank, self.target.in_features), (self.target.out_features, rank)
        return TargetParts(
            self.target,
            a=Deferred(self.first, a_shape, a, bound_a),
            b=Deferred(self.first, b_shape, b, bound_b),
            error=error,
        )


def check_stated(tensor: Stored, *shape: int) -> Stored:
    """The same tensor. Raises AdapterInvalid if it has another shape."""
    return check_shape(tensor, shape, "the base model and the config make")


def peaks(array: Array) -> Array:
    """The largest magnitude of each row, as a column."""
    found: Array = np.maximum(array.max(1, keepdims=True), -array.min(1, keepdims=True))
    return found


def decompose(b: Array, a: Array) -> tuple[Array, Array, Array]:
    """U (out, k), S (k,), V (k, in) of the product B A, without forming it."""
    q_b, r_b = np.linalg.qr(b.astype(np.float64))
    q_a, r_a = np.linalg.qr(a.astype(np.float64).T)
    u, s, v = np.linalg.svd(r_b @ r_a.T, full_matrices=False)
    return q_b @ u, s, v @ q_a.T


def lost(left_out: Array, everything: Array) -> float:
    """The relative error of a matrix without some of its singular values, `left_out`."""
    total = float(np.linalg.norm(everything))
    return float(np.linalg.norm(left_out)) / total if total else 0.0

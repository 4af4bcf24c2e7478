"""Kinds of PEFT adapters other than LoRA, in the form that plain LoRA is packed from.

AdaLoRA and VeRA are LoRA with diagonal matrices between or around the factors, and LoHa and LoKr
are products of low-rank matrices whose own rank is the product of the ranks: all of them are a B A
of some rank, exactly. Where that rank is above the limit, the best approximation of the limit's
rank stands for it, as long as it is within the tolerance. (IA)^3 scales what targets put out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from weft.checkpoint.config import PeftConfig
from weft.checkpoint.kinds import KINDS
from weft.checkpoint.parts import PREFIX, AdapterParts, Named, TargetParts, find_target
from weft.checkpoint.pattern import PatternError, Work, compile_pattern
from weft.checkpoint.read import WEIGHTS_FILE, Stored
from weft.checkpoint.refuse import refuse, show, shown_name
from weft.core.config import MAX_RANK
from weft.core.targets import Target, TargetTable

if TYPE_CHECKING:
    from torch import Tensor

Array = NDArray[np.floating[Any]]
CONVERSION_TOLERANCE = 1e-3
_MAX_EXCESS = 4
"""LoHa is approximated if its own rank is at most so many times the limit."""
_MAX_SVD = 1024
"""Largest smaller side of a dense matrix that is decomposed, which takes seconds."""
_NEGLIGIBLE = 3e-7
"""Singular values below this share of the largest are float32's noise."""
_SHARED = ("base_model.vera_A", "base_model.vera_B")
_PARTS = {
    "ADALORA": ("lora_A", "lora_B", "lora_E"),
    "VERA": ("vera_lambda_b", "vera_lambda_d"),
    "LOHA": ("hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b"),
    "LOKR": ("lokr_w1", "lokr_w1_a", "lokr_w1_b", "lokr_w2", "lokr_w2_a", "lokr_w2_b"),
    "IA3": ("ia3_l",),
}


@dataclass(frozen=True, slots=True)
class Conversion:
    """How far an adapter's image is from what it was converted from."""

    error: float = 0.0
    """Relative Frobenius norm of the difference, of the worst target; 0: exact."""
    worst: str = ""
    """That target."""


EXACT = Conversion()


@dataclass(frozen=True, slots=True)
class Limits:
    max_rank: int
    tolerance: float
    """Largest error of a conversion."""


@dataclass(frozen=True, slots=True)
class Deferred:
    """A tensor of the normal form whose values are computed when they are asked for: those of all
    targets at once would take several times the memory of the image."""

    shape: tuple[int, ...]
    compute: Callable[[], Array]
    bound: Callable[[], np.floating[Any]] | None = None
    """The largest magnitude among the values, where it follows from those of their factors, as
    rounding keeps order."""

    def values(self) -> NDArray[np.float32]:
        with np.errstate(all="ignore"):  # what is too large shows as infinite in the image
            return np.ascontiguousarray(self.compute(), np.float32)

    def largest(self) -> np.float32:
        """The largest magnitude; NaN or infinite if there is such a value."""
        if self.bound is None:
            return _largest(self.values())
        with np.errstate(all="ignore"):
            return np.float32(self.bound())


class _Values(NamedTuple):
    """How values are computed, see `Deferred`."""

    compute: Callable[[], Array]
    bound: Callable[[], np.floating[Any]] | None = None


class _Named(NamedTuple):
    """A tensor and its name in the file."""

    name: str
    tensor: Stored


@dataclass(frozen=True, slots=True)
class _Module:
    """The tensors of one module of the file."""

    target: Target
    named: Mapping[str, _Named]
    """By part, such as `lora_A`."""

    def get(self, part: str, *shape: int) -> Stored:
        """Raises AdapterInvalid when the part is missing or of another shape."""
        named = self.named.get(part)
        if named is None:
            refuse(self.first.name, f"its counterpart {part} is missing")
        return _shaped(named.name, named.tensor, shape)

    def check_parts(self, *parts: str) -> None:
        for part, named in self.named.items():
            if part not in parts:
                refuse(named.name, f"does not belong beside {', '.join(parts)}")

    @property
    def first(self) -> _Named:
        return next(iter(self.named.values()))

    def lora(self, rank: int, a: _Values, b: _Values) -> TargetParts:
        """A (rank, in) and B (out, rank), all scaling included, in the normal form."""
        name, target = self.first.name, self.target
        return TargetParts(
            target,
            a=_deferred(name, (rank, target.in_features), a),
            b=_deferred(name, (target.out_features, rank), b),
        )

    def dense(self, a: Array, b: Array) -> TargetParts:
        """`lora` of values that are there."""
        return self.lora(len(a), _Values(lambda: a), _Values(lambda: b))


def convert_parts(
    tensors: Mapping[str, Stored], table: TargetTable, config: PeftConfig, limits: Limits
) -> tuple[AdapterParts, Conversion]:
    """The normal form of an adapter of another kind than LoRA, its tensors `Deferred`.

    Raises AdapterInvalid for what can't be served, also when an error is above the tolerance.
    """
    for name, tensor in tensors.items():
        if not np.isfinite(tensor.largest()):
            refuse(name, "holds NaN or infinite values")
    modules = _modules(tensors, table, config)
    config.check_modules([module.target.name for module in modules], table.by_name)
    worst = EXACT
    with np.errstate(all="ignore"):  # what is too large shows as infinite in the image
        if config.kind == "ADALORA":
            targets = _adalora(config, modules, limits)
        elif config.kind == "VERA":
            targets = _vera(config, modules, tensors)
        elif config.kind == "IA3":
            targets = _ia3(config, modules, table)
        else:
            targets = []
            make = _loha if config.kind == "LOHA" else _lokr
            for module in modules:
                parts, error = make(config, module, limits)
                targets.append(parts)
                worst = max(worst, Conversion(error, module.target.name), key=lambda c: c.error)
    return AdapterParts(sorted(targets, key=lambda parts: parts.target.slice)), worst


def _modules(
    tensors: Mapping[str, Stored], table: TargetTable, config: PeftConfig
) -> list[_Module]:
    found: dict[str, dict[str, _Named]] = {}
    for tensor, value in tensors.items():
        if config.kind == "VERA" and tensor in _SHARED:
            continue
        module, part = _split(tensor, config.kind)
        target = find_target(tensor, module, table)
        if target.kind not in ("linear", "head"):
            refuse(tensor, f"{KINDS[config.kind].says} is for linear layers, not {module}")
        found.setdefault(module, {})[part] = _Named(tensor, value)
    if not found:
        refuse(WEIGHTS_FILE, "holds no tensors of an adapter")
    return [_Module(table.by_name[module], named) for module, named in found.items()]


def _shaped(name: str, tensor: Stored, shape: tuple[int, ...]) -> Stored:
    if tensor.shape != shape:
        refuse(name, f"has the shape {tensor.shape}; the base model and the config make it {shape}")
    return tensor


def _deferred(name: str, shape: tuple[int, ...], values: _Values) -> Named:
    return Named(name, cast("Tensor", Deferred(shape, *values)))


def _largest(array: Array) -> np.float32:
    return np.float32(np.maximum(array.max(), -array.min()))


def _peaks(array: Array) -> Array:
    """The largest magnitude of each row, as a column."""
    peaks: Array = np.maximum(array.max(1, keepdims=True), -array.min(1, keepdims=True))
    return peaks


def _split(tensor: str, kind: str) -> tuple[str, str]:
    """The module and the part that a tensor's name says."""
    module, _, part = tensor.removeprefix(PREFIX).rpartition(".")
    if part not in _PARTS[kind] or not tensor.startswith(PREFIX):
        why = f"only {', '.join(_PARTS[kind])} are served for {KINDS[kind].says}"
        if part == "weight":
            why += "; save the adapter with save_embedding_layers=False to leave whole weights out"
        refuse(tensor, why)
    return module, part


def _check_error(name: str, error: float, exact_rank: int, limits: Limits) -> None:
    if error <= limits.tolerance:
        return
    if exact_rank <= MAX_RANK:
        remedy = f"--max-lora-rank {exact_rank} makes it exact"
    else:
        remedy = "train with a smaller r, or merge this adapter into a base of its own"
    refuse(
        name,
        f"as a LoRA of rank {limits.max_rank} it would be off by {error:.2g} (relative Frobenius"
        f" norm), more than --conversion-tolerance {limits.tolerance:g}; {remedy}",
    )


# -- AdaLoRA: B diag(E) A --------------------------------------------------------------------------


def _adalora(config: PeftConfig, modules: list[_Module], limits: Limits) -> list[TargetParts]:
    ranks = _allocated(config)
    found = []
    for module in modules:
        target = module.target
        rank = ranks.get(target.name, config.r)
        if rank > limits.max_rank:
            field = "rank_pattern" if target.name in ranks else "init_r"
            refuse(field, f"{target.name} has rank {rank}, above --max-lora-rank {limits.max_rank}")
        a = module.get("lora_A", rank, target.in_features)
        b = module.get("lora_B", target.out_features, rank)
        e = module.get("lora_E", rank, 1)
        # PEFT divides by the rank that training began with, also where less is left of it.
        scale = (config.alpha if config.alpha > 0 else rank) / (config.r + 1e-5)
        if rank:
            found.append(_scaled_pair(module, a, e, b, np.float32(scale)))
    return found


def _scaled_pair(
    module: _Module, a: Stored, e: Stored, b: Stored, scale: np.float32
) -> TargetParts:
    return module.lora(
        e.shape[0],
        _Values(lambda: a.values() * e.values()),
        _Values(lambda: b.values() * scale, lambda: b.largest() * abs(scale)),
    )


def _allocated(config: PeftConfig) -> dict[str, int]:
    """The rank by module that training left, from a config's masks over the first rank."""
    pattern = config.options.get("rank_pattern")
    if pattern is None:
        return {}
    if not isinstance(pattern, dict):
        refuse("rank_pattern", f"must be an object, got {show(pattern)}")
    ranks = {}
    for name, mask in pattern.items():
        if not isinstance(mask, list) or any(not isinstance(kept, bool) for kept in mask):
            refuse("rank_pattern", f"must hold lists of booleans, got {show(mask)}")
        if len(mask) != config.r:
            refuse("rank_pattern", f"{show(name)} has {len(mask)} entries, but init_r is another")
        ranks[name.removesuffix(".default").removesuffix(".lora_E")] = sum(mask)
    return ranks


# -- VeRA: diag(b) B diag(d) A, with one A and B for all targets -----------------------------------


def _vera(
    config: PeftConfig, modules: list[_Module], tensors: Mapping[str, Stored]
) -> list[TargetParts]:
    rank = config.r
    num_in = max(module.target.in_features for module in modules)
    num_out = max(module.target.out_features for module in modules)
    saved = _flag(config, "save_projection", True)
    for name in _SHARED:
        if saved and name not in tensors:
            refuse(name, "is missing, but save_projection says that it was saved")
        if not saved and name in tensors:
            refuse(name, "is there, but save_projection says that it is not to be used")
    if saved:
        shapes = (rank, num_in), (num_out, rank)
        shared = [
            _shaped(name, tensors[name], shape).values()
            for name, shape in zip(_SHARED, shapes, strict=True)
        ]
    else:
        shared = _regenerated(config, num_in, num_out)
    shared_a, shared_b = shared
    peaks_b = cache(lambda: _peaks(shared_b))
    peaks_a = cache(lambda width: _peaks(shared_a[:, :width]))

    def pair(module: _Module) -> TargetParts:
        target = module.target
        d = module.get("vera_lambda_d", rank).values()[:, None]
        b = module.get("vera_lambda_b", target.out_features).values()[:, None]
        own_a, own_b = shared_a[:, : target.in_features], shared_b[: target.out_features]
        return module.lora(
            rank,
            _Values(lambda: own_a * d, lambda: (peaks_a(target.in_features) * abs(d)).max()),
            _Values(lambda: own_b * b, lambda: (peaks_b()[: len(b)] * abs(b)).max()),
        )

    return [pair(module) for module in modules]


def _regenerated(config: PeftConfig, num_in: int, num_out: int) -> list[Array]:
    """A and B as PEFT draws them from the config's key, in this order from one generator.

    torch's for the CPU is the Mersenne Twister, of whose words 24 bits make a float32.
    """
    seed = _integer(config, "projection_prng_key", 0)
    if not -(1 << 63) <= seed < 1 << 63:
        refuse("projection_prng_key", f"must fit 64 bits, got {show(seed)}")
    generator = np.random.RandomState(seed & 0xFFFFFFFF)

    def draw(rows: int, columns: int) -> Array:
        bound = np.float32(math.sqrt(3.0) * (math.sqrt(2.0) / math.sqrt(columns)))
        words = np.frombuffer(generator.bytes(4 * rows * columns), "<u4")
        # Rounded once, as a multiplication and an addition in one are.
        drawn = (words & 0xFFFFFF) * 2.0**-24 * np.float64(bound + bound) - np.float64(bound)
        return drawn.astype(np.float32).reshape(rows, columns)

    return [draw(config.r, num_in), draw(num_out, config.r)]


# -- LoHa: (B1 A1) * (B2 A2), element by element ---------------------------------------------------


def _loha(config: PeftConfig, module: _Module, limits: Limits) -> tuple[TargetParts, float]:
    target = module.target
    num_in, num_out = target.in_features, target.out_features
    rank = config.rank_of(target.name)
    b1, a1 = module.get("hada_w1_a", num_out, rank), module.get("hada_w1_b", rank, num_in)
    b2, a2 = module.get("hada_w2_a", num_out, rank), module.get("hada_w2_b", rank, num_in)
    scale = np.float32(config.scale_of(target.name, rank))
    if min(num_in, num_out) <= min(rank * rank, limits.max_rank):
        full = _full(b1.values(), a1.values(), b2.values(), a2.values(), scale)
        return module.dense(*full), 0.0

    def turned_b() -> Array:
        return _pairs(b1.values().T, b2.values().T)

    hadamard_a = _Values(lambda: _pairs(a1.values(), a2.values()))
    hadamard_b = _Values(lambda: turned_b().T * scale, lambda: _largest(turned_b()) * abs(scale))
    if rank * rank <= limits.max_rank:
        return module.lora(rank * rank, hadamard_a, hadamard_b), 0.0
    if rank * rank > _MAX_EXCESS * limits.max_rank:
        refuse(
            "r",
            f"a LoHa of rank {rank} is a LoRA of rank {rank * rank}; at most"
            f" {_MAX_EXCESS * limits.max_rank} is served ({_MAX_EXCESS} times --max-lora-rank)",
        )
    a, b = hadamard_a.compute(), hadamard_b.compute()
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        refuse(module.first.name, "holds values too large for float32 when multiplied")
    a, b, error = _best(a, b, limits.max_rank)
    _check_error(module.first.name, error, rank * rank, limits)
    return module.dense(a, b), error


def _pairs(one: Array, other: Array) -> Array:
    """(r * r, n): the products of all pairs of rows (r, n), which A has, and B of columns."""
    return (one[:, None, :] * other[None, :, :]).reshape(-1, one.shape[1])


def _full(b1: Array, a1: Array, b2: Array, a2: Array, scale: np.float32) -> tuple[Array, Array]:
    """The whole matrix as one factor, for a target with a side shorter than r * r."""
    whole = (b1 @ a1) * (b2 @ a2) * scale
    identity = np.eye(min(whole.shape), dtype=np.float32)
    return (whole, identity) if whole.shape[0] <= whole.shape[1] else (identity, whole)


def _best(a: Array, b: Array, rank: int) -> tuple[Array, Array, float]:
    """The nearest A (rank, in), B (out, rank), and how far they are off."""
    u, s, v = _decomposed(b, a)
    root = np.sqrt(s[:rank])
    return root[:, None] * v[:rank], u[:, :rank] * root, _lost(s[rank:], s)


def _decomposed(b: Array, a: Array) -> tuple[Array, Array, Array]:
    """U (out, k), S (k,), V (k, in) of the product B A, without forming it."""
    q_b, r_b = np.linalg.qr(b.astype(np.float64))
    q_a, r_a = np.linalg.qr(a.astype(np.float64).T)
    u, s, v = np.linalg.svd(r_b @ r_a.T, full_matrices=False)
    return q_b @ u, s, v @ q_a.T


def _lost(left_out: Array, everything: Array) -> float:
    total = float(np.linalg.norm(everything))
    return float(np.linalg.norm(left_out)) / total if total else 0.0


# -- LoKr: the Kronecker product of W1 and W2 ------------------------------------------------------


def _lokr(config: PeftConfig, module: _Module, limits: Limits) -> tuple[TargetParts, float]:
    target = module.target
    rank = config.rank_of(target.name)
    factor = _integer(config, "decompose_factor", -1)
    in_1, in_2 = _sides(target.in_features, factor)
    out_1, out_2 = _sides(target.out_features, factor)
    small = _flag(config, "decompose_both", False) and rank < max(out_1, in_1) / 2
    parts_1, svd_1 = _kronecker_side(module, "lokr_w1", out_1, in_1, rank if small else None)
    small = rank < max(out_2, in_2) / 2
    parts_2, svd_2 = _kronecker_side(module, "lokr_w2", out_2, in_2, rank if small else None)
    module.check_parts(*parts_1, *parts_2)

    # The singular values of a Kronecker product are the products of its factors'.
    scale = config.scale_of(target.name, rank)
    s = np.outer(svd_1[1], svd_2[1]).reshape(-1) * abs(scale)
    order = np.argsort(-s, kind="stable")
    exact = max(1, int(np.count_nonzero(s > _NEGLIGIBLE * s[order[0]])))
    kept = order[: min(exact, limits.max_rank)]
    error = _lost(s[order[limits.max_rank :]], s) if exact > limits.max_rank else 0.0
    _check_error(module.first.name, error, exact, limits)
    root = np.sqrt(s[kept])
    a = _kronecker(svd_1[2], svd_2[2], kept, root)
    b = _kronecker(svd_1[0].T, svd_2[0].T, kept, root * math.copysign(1.0, scale))
    turned = _Values(lambda: b.compute().T, b.bound)
    return module.lora(len(kept), a, turned), error


def _kronecker_side(
    module: _Module, part: str, num_out: int, num_in: int, rank: int | None
) -> tuple[tuple[str, ...], tuple[Array, Array, Array]]:
    """The parts that hold W1 or W2, and its singular value decomposition."""
    if rank is not None:
        parts = f"{part}_a", f"{part}_b"
        b, a = module.get(parts[0], num_out, rank), module.get(parts[1], rank, num_in)
        return parts, _decomposed(b.values(), a.values())
    whole = module.get(part, num_out, num_in).values()
    if min(whole.shape) > _MAX_SVD:
        refuse(
            module.named[part].name,
            f"a full matrix of more than {_MAX_SVD} rows and columns is no LoRA of a small rank",
        )
    u, s, v = np.linalg.svd(whole.astype(np.float64), full_matrices=False)
    return (part,), (u, s, v)


def _kronecker(one: Array, other: Array, kept: NDArray[np.intp], by: Array) -> _Values:
    """These rows (k, m n) of the product of U or V of both factors, (i, m) and (j, n), times
    `by`."""
    i, j = np.divmod(kept, len(other))
    scale = by[:, None]
    return _Values(
        lambda: (one[i][:, :, None] * other[j][:, None, :]).reshape(len(by), -1) * scale,
        lambda: (_peaks(one)[i] * _peaks(other)[j] * abs(scale)).max(),
    )


def _sides(features: int, factor: int) -> tuple[int, int]:
    """How PEFT splits a dimension: by `factor` if that divides it, else by the divisors up to it
    (-1: any) until they meet; the smaller side first."""
    if factor > 0 and features % factor == 0:
        return factor, features // factor
    limit = features if factor == -1 else factor
    side = 1
    for divisor in range(2, min(limit, features) + 1):
        if side * side >= features:
            break
        if features % divisor == 0:
            side = divisor
    return min(side, features // side), max(side, features // side)


# -- (IA)^3: a factor for each feature -------------------------------------------------------------


def _ia3(config: PeftConfig, modules: list[_Module], table: TargetTable) -> list[TargetParts]:
    found: dict[int, tuple[Target, str, Array]] = {}
    for module in modules:
        target, scale = _scaled(config, module, table)
        if target.slice in found:
            scale = scale * found[target.slice][2]
        found[target.slice] = target, module.first.name, scale

    def parts(target: Target, name: str, scale: Array) -> TargetParts:
        return TargetParts(target, gain=_deferred(name, scale.shape, _Values(lambda: scale)))

    return [parts(*each) for each in found.values()]


def _scaled(config: PeftConfig, module: _Module, table: TargetTable) -> tuple[Target, Array]:
    """The target whose output is scaled, and by what: (out,)."""
    target, named = module.target, module.first
    feeds_forward = _feeds_forward(config, target.name)
    if feeds_forward is None:
        feeds_forward = named.tensor.shape == (1, target.in_features)
    if not feeds_forward:
        return target, module.get("ia3_l", target.out_features, 1).values().reshape(-1)
    if target.suffix != "down_proj":
        refuse(
            "feedforward_modules",
            f"{target.name}: the input of this projection can't be scaled, only that of down_proj",
        )
    # down_proj's input is silu(gate) * up: to scale it is to scale up_proj's output.
    scale = module.get("ia3_l", 1, target.in_features).values().reshape(-1)
    up = target.name.removesuffix("down_proj") + "up_proj"
    return find_target(named.name, up, table), scale


def _feeds_forward(config: PeftConfig, module: str) -> bool | None:
    """What `feedforward_modules` says of a module; None: the field is not there."""
    value = config.options.get("feedforward_modules")
    if value is None:
        return None
    if isinstance(value, str):
        try:
            return compile_pattern(value, Work("feedforward_modules")).fullmatch(module)
        except PatternError as error:
            refuse("feedforward_modules", shown_name(str(error)))
    if not isinstance(value, list) or any(not isinstance(entry, str) for entry in value):
        refuse("feedforward_modules", f"must be a string or a list of strings, got {show(value)}")
    return any(module.endswith(entry) for entry in value)


# -- fields ----------------------------------------------------------------------------------------


def _flag(config: PeftConfig, param: str, default: bool) -> bool:
    value = config.options.get(param, default)
    if not isinstance(value, bool):
        refuse(param, f"must be true or false, got {show(value)}")
    return value


def _integer(config: PeftConfig, param: str, default: int) -> int:
    value = config.options.get(param, default)
    if not isinstance(value, int) or isinstance(value, bool):
        refuse(param, f"must be an integer, got {show(value)}")
    return value

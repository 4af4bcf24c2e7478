"""An adapter's tensors, sorted by what they change in the base model.

This is the normal form that images are packed from. A tensor's name says what it is, once the
config has said how PEFT reads it: PEFT loads what lies on a module that it has wrapped into that
wrapper, and any other name that the base model knows into the base model itself.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from weft.checkpoint.config import PeftConfig
from weft.checkpoint.experts import Gathered, gather_experts
from weft.checkpoint.read import WEIGHTS_FILE
from weft.checkpoint.refuse import refuse
from weft.core.config import MAX_ADDED_TOKENS
from weft.core.sampling import MAX_LOGPROBS
from weft.core.targets import (
    ImageLayout,
    Kind,
    Norm,
    Target,
    TargetTable,
    resized,
    vocabulary,
)

if TYPE_CHECKING:
    from torch import Tensor

PREFIX = "base_model.model."

EMBEDDING, HEAD = "model.embed_tokens", "lm_head"


class Named(NamedTuple):
    """A tensor and its name in the file."""

    name: str
    tensor: Tensor


@dataclass(slots=True)
class TargetParts:
    """What an adapter holds for one target: y = gain * (W x + bias) + scaling * B A x, and so on.

    Absent parts are None. A and B come together, for experts stacked; the other vectors are (out,).
    """

    target: Target
    a: Named | None = None
    """(r, in)"""
    b: Named | None = None
    """(out, r)"""
    scaling: float = 1.0
    lora_bias: Named | None = None
    """Added to B A x, before it is scaled."""
    bias: Named | None = None
    """In place of the base's."""
    magnitude: Named | None = None
    """DoRA's: the rows of W + scaling * B A are scaled to these lengths."""
    gain: Named | None = None
    """What the whole output, bias included, is multiplied by."""

    @property
    def rank(self) -> int:
        return 0 if self.a is None else self.a.tensor.shape[-2]

    @property
    def is_affine(self) -> bool:
        """Whether there is more than A and B."""
        vectors = (self.lora_bias, self.bias, self.magnitude, self.gain)
        return any(vector is not None for vector in vectors)


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of the embedding's or the head's weight (vocab, hidden) in place of the base's."""

    whole: Named | None
    """All of them, (vocab, hidden)."""
    some: Named | None
    """(n, hidden), over those of `whole`."""
    ids: tuple[int, ...] = ()
    """The n token ids of `some`."""


@dataclass(slots=True)
class AdapterParts:
    """All of an adapter, in the order of the table."""

    targets: list[TargetParts] = field(default_factory=list)
    norms: list[tuple[Norm, Named]] = field(default_factory=list)
    embedding: Rows | None = None
    head: Rows | None = None
    vocab_size: int = 0
    """If it is not the base's: the embedding and the head, and what `targets` says of them, have
    that many rows. 0: as the base."""

    @property
    def needs_base(self) -> bool:
        """Whether the base's weights say what some of it does."""
        affine = any(parts.is_affine for parts in self.targets)
        return affine or bool(self.norms or self.embedding or self.head)

    @property
    def names(self) -> tuple[str, ...]:
        """Of the adapted modules without the layer, in table order, norms last."""
        names = [each.target.suffix for each in self.targets]
        if self.embedding is not None:
            names.insert(0, "embed_tokens")
        if self.head is not None:
            names.append("lm_head")
        names += [norm.name.rpartition(".")[2] for norm, _ in self.norms]
        return tuple(dict.fromkeys(names))


def sort_parts(
    tensors: dict[str, Tensor],
    table: TargetTable,
    config: PeftConfig,
    max_added_tokens: int = MAX_ADDED_TOKENS,
) -> AdapterParts:
    """Raises AdapterInvalid, naming the tensor or field, for what does not fit the base or the
    config, and for a tensor that nothing is made of."""
    if not tensors:
        refuse(WEIGHTS_FILE, "holds no tensors")
    base_size, _ = vocabulary(table, "embedding")
    size, source = _vocab_size(tensors, table, config, max_added_tokens)
    table = resized(table, size) if size != base_size else table
    gathered = gather_experts(_without_copies(tensors, config), table, config)
    found = _Found(table, gathered)
    for name, tensor in gathered.tensors.items():
        found.add(name, tensor)
    parts = AdapterParts([_target_parts(target, found, config) for target in found.targets()])
    for norm in table.norms:
        if weight := found.of(norm.name, "whole"):
            parts.norms.append((norm, _norm(norm, weight)))
    _set_rows(parts, found, config)
    if size != base_size:
        parts.vocab_size = size
        for module, rows in ((EMBEDDING, parts.embedding), (HEAD, parts.head)):
            _check_rows(source, module, rows, base_size, size)
    adapted = [each.target.name for each in parts.targets if each.rank]
    if config.ensure_weight_tying and table.tied and EMBEDDING in adapted:
        adapted = [name for name in adapted if name != HEAD]  # PEFT adapts it unasked
    modules = [module for name in adapted for module in gathered.modules_of(name)]
    config.check_modules(modules, table.by_name)
    config.check_saved(found.saved(), [*table.by_name, *table.norms_by_name])
    return parts


def check_activated(
    invocation: tuple[int, ...],
    parts: AdapterParts,
    layout: ImageLayout,
    table: TargetTable,
    provisional: bool,
) -> None:
    """PEFT adapts linear layers alone this way; what else there is would be on everywhere.
    `provisional`: the base was not looked at, and may be the same."""
    vocab, _ = vocabulary(table, "embedding")
    beyond = [i for i in invocation if i >= vocab]
    if beyond:
        message = f"token {beyond[0]} is beyond the base model's vocabulary of {vocab}"
        refuse("alora_invocation_tokens", message)
    for each in parts.targets:
        if each.a is not None and each.target.kind not in ("linear", "head"):
            refuse(each.a.name, f"no {each.target.kind} can be adapted by an activated LoRA")
    if layout.vocab_size:
        message = f"an adapter with its own vocabulary ({layout.vocab_size}) can't be activated"
        refuse("alora_invocation_tokens", message)
    own = layout.norm_offset or layout.embedding_rows or layout.head_rows
    if own and not provisional:
        message = "the file holds weights that differ from the base's, which can't be activated"
        refuse("alora_invocation_tokens", message)


def nothing_in(parts: AdapterParts) -> str:
    """Why an adapter would change nothing."""
    if parts.needs_base:
        return "all that it holds is as in the base model"
    return "A or B is zero in every target"


def same_rows(one: Rows | None, other: Rows | None) -> bool:
    """Whether one copy of the rows serves both."""
    if one is None or other is None:
        return one is other
    pairs = ((one.whole, other.whole), (one.some, other.some))
    return one.ids == other.ids and all(
        a is b or (a is not None and _equal(a, b)) for a, b in pairs
    )


# -- names -----------------------------------------------------------------------------------------

_SUFFIXES = {
    ".lora_A.weight": "a",
    ".lora_B.weight": "b",
    ".lora_embedding_A": "a",
    ".lora_embedding_B": "b",
    ".lora_B.bias": "lora_bias",
    ".lora_magnitude_vector": "magnitude",
    ".lora_magnitude_vector.weight": "magnitude",
    ".base_layer.bias": "inner_bias",
    ".token_adapter.base_layer.weight": "token_whole",
    ".base_layer.weight": "inner_whole",
    ".token_adapter.trainable_tokens_delta": "some",
    ".bias": "bias",
    ".weight": "whole",
}
"""Of names in files, longest first: what the tensor is. What PEFT wraps is an `inner` one."""

_WHOLE = tuple(suffix for suffix, part in _SUFFIXES.items() if "whole" in part)

_EMBEDDING_SUFFIXES = frozenset({".lora_embedding_A", ".lora_embedding_B"})
_LINEAR_SUFFIXES = frozenset({".lora_A.weight", ".lora_B.weight", ".lora_B.bias"})
_OF_ROWS = frozenset({"some", "whole", "inner_whole", "token_whole"})
"""Parts that replace rows of a weight."""


class _Found:
    """The tensors of a file, by module and part."""

    def __init__(self, table: TargetTable, gathered: Gathered) -> None:
        self.table = table
        self.gathered = gathered
        self._parts: dict[str, dict[str, Named]] = {}

    def add(self, name: str, tensor: Tensor) -> None:
        if not name.startswith(PREFIX):
            refuse(name, f"not a tensor of a PEFT LoRA, whose names start with {PREFIX}")
        path = name.removeprefix(PREFIX)
        for suffix, part in _SUFFIXES.items():
            if path.endswith(suffix):
                module = path.removesuffix(suffix)
                self._check(name, module, suffix, part)
                parts = self._parts.setdefault(module, {})
                if part in parts:
                    refuse(name, f"is the same as {parts[part].name}")
                parts[part] = Named(name, tensor)
                return
        refuse(name, _NOT_SERVED)

    def of(self, module: str, *parts: str) -> Named | None:
        """The first of these parts that is there."""
        has = self._parts.get(module, {})
        return next((has[part] for part in parts if part in has), None)

    def is_wrapped(self, module: str) -> bool:
        """Whether PEFT wraps the module for LoRA."""
        return self.of(module, "a", "b") is not None

    def targets(self) -> list[Target]:
        """Those that there is more for than rows in place of theirs."""
        parts = self._parts
        return [t for t in self.table.targets if set(parts.get(t.name, ())) - _OF_ROWS]

    def saved(self) -> list[str]:
        """Modules whose weight is there under the base model's own name."""
        return [module for module, parts in self._parts.items() if "whole" in parts]

    def _check(self, name: str, module: str, suffix: str, part: str) -> None:
        """Whether the base model has such a module, of which this can be a part."""
        if module in self.table.norms_by_name:
            if part != "whole":
                refuse(name, "only the weight of a norm can be replaced")
            return
        target = self.table.by_name.get(module)
        if target is None:
            inside = any(module.startswith(known.name + ".") for known in self.table.targets)
            known = f"no such projection in the base model{_hint(module, self.table)}"
            refuse(name, _NOT_SERVED if inside else known)
        other = _LINEAR_SUFFIXES if target.kind == "embedding" else _EMBEDDING_SUFFIXES
        if suffix in other:
            refuse(name, f"{target.name} is a {target.kind} in the base model")
        if part in _OF_ROWS and target.kind in ("linear", "experts"):
            refuse(name, "only whole weights of embedding, head and norms are served")


_NOT_SERVED = (
    "no part of an adapter that is served; only lora_A and lora_B matrices, biases, magnitudes,"
    " token rows, and whole weights of embedding, head and norms are"
)


def find_target(tensor: str, module: str, table: TargetTable) -> Target:
    """The target of that name, which a tensor of the file is for. Raises AdapterInvalid."""
    target = table.by_name.get(module)
    if target is None:
        refuse(tensor, f"no such projection in the base model{_hint(module, table)}")
    return target


def _hint(name: str, table: TargetTable) -> str:
    """What the base has instead: fewer layers, or other projections."""
    num_layers = 1 + max((_layer(target.name) for target in table.targets), default=-1)
    if _layer(name) >= num_layers:
        return f", which has {num_layers} layers"
    return f", which has {', '.join(dict.fromkeys(target.suffix for target in table.targets))}"


def _layer(name: str) -> int:
    """The first number that is a part of the name; -1 when there is none."""
    parts = (part for part in name.split(".") if part.isdecimal() and len(part) < 10)
    return next((int(part) for part in parts), -1)


# -- another vocabulary than the base's ------------------------------------------------------------


def _vocab_size(
    tensors: dict[str, Tensor], table: TargetTable, config: PeftConfig, max_added: int
) -> tuple[int, str]:
    """Of the adapter's model, and the whole weight, or else the field, that says so."""
    base_size, hidden = vocabulary(table, "embedding")
    wholes = [
        (name, tensors[name].shape)
        for module in (EMBEDDING, HEAD)
        for part in _WHOLE
        if (name := f"{PREFIX}{module}{part}") in tensors
    ]
    sizes = [(name, shape[0]) for name, shape in wholes if shape[1:] == (hidden,)]
    source, size = sizes[0] if sizes else ("", base_size)
    if not source:
        trained = [config.token_ids(module) or () for module in (EMBEDDING, HEAD)]
        source = "trainable_token_indices"
        size = max(1 + max((i for ids in trained for i in ids), default=-1), base_size)
    if size < MAX_LOGPROBS:
        refuse(source, f"is for a vocabulary of {size}, and less than {MAX_LOGPROBS} is not served")
    if size - base_size > max_added:
        refuse(
            source,
            f"is for a vocabulary of {size}, {size - base_size} more than the base model's; at most"
            f" {max_added} are served (--max-added-tokens)",
        )
    return size, source


def _without_copies(tensors: dict[str, Tensor], config: PeftConfig) -> dict[str, Tensor]:
    """Without the copies that PEFT adds to a file of saved modules, and does not read again, when
    it saves embedding layers along."""
    found = dict(tensors)
    for module in (EMBEDDING, HEAD):
        whole = found.get(f"{PREFIX}{module}.weight")
        saved = config.saves(module) or (config.ensure_weight_tying and config.saves(EMBEDDING))
        if whole is None or not saved:
            continue
        found.pop(f"{PREFIX}{module}.original_module.weight", None)
        name = f"{PREFIX}{module}.modules_to_save.weight"
        copy = found.pop(name, None)
        if copy is not None and not _equal(Named(name, copy), Named(name, whole)):
            refuse(name, f"PEFT would ignore it, and it differs from {PREFIX}{module}.weight")
    return found


def _check_rows(source: str, module: str, rows: Rows | None, base_size: int, size: int) -> None:
    """A file says by whole weights that its vocabulary is smaller, and what added tokens are."""
    has_added = rows is not None and set(range(base_size, size)) <= set(rows.ids)
    if rows is None or (rows.whole is None and not (size > base_size and has_added)):
        difference = f"{abs(size - base_size)} {'more' if size > base_size else 'fewer'}"
        refuse(
            source,
            f"is for {difference} than the base model's {base_size} tokens, but the file does not"
            f" hold the rows of {module} for all of its own; save the adapter with"
            " save_embedding_layers=True",
        )


# -- projections -----------------------------------------------------------------------------------


def _target_parts(target: Target, found: _Found, config: PeftConfig) -> TargetParts:
    parts = TargetParts(target)
    _set_matrices(parts, found, config)
    _check_wrapped(target, found)
    parts.lora_bias = _vector(target, found.of(target.name, "lora_bias"))
    parts.bias = _vector(target, found.of(target.name, "inner_bias", "bias"))
    parts.magnitude = _vector(target, found.of(target.name, "magnitude"))
    if parts.a is not None:
        _check_flag("use_dora", config.use_dora, parts.magnitude, target)
        _check_flag("lora_bias", config.lora_bias, parts.lora_bias, target)
    if parts.bias is not None:
        if not found.table.has_bias(target):
            refuse(parts.bias.name, f"{target.suffix} has no bias in the base model")
        if config.bias == "none":
            refuse("bias", f"says none, but the file holds {parts.bias.name}")
    return parts


def _set_matrices(parts: TargetParts, found: _Found, config: PeftConfig) -> None:
    target = parts.target
    a, b = found.of(target.name, "a"), found.of(target.name, "b")
    for present, absent, letter in ((a, b, "B"), (b, a, "A")):
        if present is not None and absent is None:
            refuse(present.name, f"its counterpart, the {letter} matrix, is missing")
    if a is None or b is None:
        return
    parts.a, parts.b = a, b
    if target.kind == "experts":
        parts.scaling = found.gathered.scaling[target.name]
        return
    (module,) = found.gathered.modules_of(target.name)
    rank = config.rank_of(module)
    _check_shape(a, (rank, target.in_features), "the base model and the ranks in the config make")
    _check_shape(b, (target.out_features, rank), "the base model and the ranks in the config make")
    parts.scaling = config.scale_of(module, rank)


def _check_wrapped(target: Target, found: _Found) -> None:
    """PEFT ignores what lies elsewhere than it has put the module."""
    wrapped = found.is_wrapped(target.name)
    outside = ("bias", "whole") if wrapped else ("lora_bias", "magnitude", "inner_bias")
    named = found.of(target.name, *outside)
    if named is not None:
        is_not = "is" if wrapped else "is not"
        refuse(named.name, f"PEFT would ignore it, as {target.name} {is_not} adapted")


def _check_flag(field: str, is_set: bool, named: Named | None, target: Target) -> None:
    if is_set and named is None:
        refuse(field, f"is set, but the file holds no such vector for {target.name}")
    if named is not None and not is_set:
        refuse(named.name, f"PEFT would ignore it, as {field} is not set")


def _vector(target: Target, named: Named | None) -> Named | None:
    if named is not None:
        _check_shape(named, (target.out_features,), "the base model makes")
    return named


def _norm(norm: Norm, named: Named) -> Named:
    _check_shape(named, (norm.size,), "the base model makes")
    return named


def _check_shape(named: Named, expected: tuple[int, ...], who: str) -> None:
    if tuple(named.tensor.shape) != expected:
        refuse(named.name, f"has the shape {tuple(named.tensor.shape)}; {who} it {expected}")


# -- rows of embedding and head --------------------------------------------------------------------


def _set_rows(parts: AdapterParts, found: _Found, config: PeftConfig) -> None:
    _check_tied(found, config)
    wholes = _wholes(found, config)
    some = {module: _some(module, found, config) for module in (EMBEDDING, HEAD)}
    if _ties_tokens(found, config):
        own = found.of(HEAD, "some")
        if own is not None and not _equal(own, some[EMBEDDING][0]):
            refuse(own.name, "PEFT would ignore it, as the head's rows are the embedding's")
        some[HEAD] = some[EMBEDDING]
    for module in (EMBEDDING, HEAD):
        if some[module][0] is not None and found.is_wrapped(module):
            refuse("trainable_token_indices", f"PEFT can't join it with the LoRA of {module}")
    rows = {m: Rows(wholes[m], *some[m]) for m in (EMBEDDING, HEAD) if wholes[m] or some[m][0]}
    parts.embedding, parts.head = rows.get(EMBEDDING), rows.get(HEAD)


def _wholes(found: _Found, config: PeftConfig) -> dict[str, Named | None]:
    """By module. A weight that PEFT has not wrapped is loaded into the base model's: with tied
    weights both modules see it."""
    own: dict[str, Named | None] = {EMBEDDING: None, HEAD: None}
    loaded: dict[str, Named | None] = {EMBEDDING: None, HEAD: None}
    kinds: dict[str, Kind] = {EMBEDDING: "embedding", HEAD: "head"}
    for module, kind in kinds.items():
        whole = found.of(module, "whole", "inner_whole", "token_whole")
        if whole is None:
            continue
        _check_shape(whole, vocabulary(found.table, kind), "the base model makes")
        _check_place(module, found, config)
        (own if _is_saved(module, found, config) else loaded)[module] = whole
    if not found.table.tied:
        return {module: own[module] or loaded[module] for module in own}
    head = loaded[HEAD]
    shared = loaded[EMBEDDING] or head
    if head is not None and not _equal(head, shared):
        refuse(head.name, f"differs from {EMBEDDING}, with which the base model shares it")
    return {module: own[module] or shared for module in own}


def _check_place(module: str, found: _Found, config: PeftConfig) -> None:
    """PEFT ignores a weight that lies elsewhere than it has put the module."""
    has_tokens = config.token_ids(module) is not None
    has_tokens = has_tokens or (module == HEAD and _ties_tokens(found, config))
    right = {
        "whole": not found.is_wrapped(module) and not has_tokens,
        "inner_whole": found.is_wrapped(module),
        "token_whole": has_tokens,
    }
    for part, is_right in right.items():
        named = found.of(module, part)
        if named is not None and not is_right:
            refuse(named.name, f"PEFT would ignore it, as it puts {module} elsewhere")


def _is_saved(module: str, found: _Found, config: PeftConfig) -> bool:
    """Whether PEFT keeps a copy of the whole module for this adapter."""
    tied = module == HEAD and found.table.tied and config.ensure_weight_tying
    return config.saves(module) or (tied and config.saves(EMBEDDING))


def _some(module: str, found: _Found, config: PeftConfig) -> tuple[Named | None, tuple[int, ...]]:
    """The module's trained token rows, and their ids."""
    named, ids = found.of(module, "some"), config.token_ids(module)
    if module == HEAD and _ties_tokens(found, config):
        return None, ()
    if ids is None:
        if named is not None:
            refuse(named.name, "trainable_token_indices does not say which tokens it is for")
        return None, ()
    if named is None:
        refuse("trainable_token_indices", f"the file holds no rows for {module}")
    vocab, hidden = vocabulary(found.table, "embedding")
    beyond = [i for i in ids if i >= vocab]
    if beyond:
        message = f"token {beyond[0]} is beyond the vocabulary of {vocab}"
        refuse("trainable_token_indices", message)
    _check_shape(named, (len(ids), hidden), "the config and the base model make")
    return named, ids


def _ties_tokens(found: _Found, config: PeftConfig) -> bool:
    """Whether PEFT lets the head have the embedding's trained rows."""
    ids, head = config.token_ids(EMBEDDING), config.token_ids(HEAD)
    return found.table.tied and ids is not None and head in (None, ids)


def _check_tied(found: _Found, config: PeftConfig) -> None:
    """With ensure_weight_tying, PEFT keeps one tensor for both modules; a file holds it twice."""
    if not (config.ensure_weight_tying and found.table.tied):
        return
    if config.saves(EMBEDDING):
        pairs = [(found.of(HEAD, "whole"), found.of(EMBEDDING, "whole"))]
    elif found.is_wrapped(EMBEDDING):
        pairs = [
            (found.of(HEAD, "a"), _transposed(found.of(EMBEDDING, "b"))),
            (found.of(HEAD, "b"), _transposed(found.of(EMBEDDING, "a"))),
        ]
    else:
        return
    for head, embedding in pairs:
        if head is None or not _equal(head, embedding):
            refuse("ensure_weight_tying", "is set, but the file's tensors of the head differ")


def _transposed(named: Named | None) -> Named | None:
    if named is None or named.tensor.dim() != 2:
        return named
    return Named(named.name, named.tensor.t())


def _equal(one: Named, other: Named | None) -> bool:
    if other is None or one.tensor.shape != other.tensor.shape:
        return False
    return bool((one.tensor == other.tensor).all())

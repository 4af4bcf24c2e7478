"""Plain LoRA, with all that PEFT can add to it: DoRA, biases, whole modules, token rows, aLoRA."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from weft.checkpoint.config import BARE_TOKENS, PeftConfig
from weft.checkpoint.fields import (
    Fields,
    Pattern,
    Work,
    bounded,
    flag,
    is_off,
    is_plain,
    names,
    pattern,
    token_ids,
)
from weft.checkpoint.heads import classifies
from weft.checkpoint.kinds.base import LAYERS, Kind, PeftAdapter
from weft.checkpoint.names import PROJECTIONS, WHOLE_SUFFIXES, Gathered, NamedTensors
from weft.checkpoint.parts import (
    EMBEDDING,
    HEAD,
    PREFIX,
    AdapterParts,
    Rows,
    TargetParts,
    check_shape,
)
from weft.checkpoint.read import Stored
from weft.checkpoint.refuse import refuse, show
from weft.core.files import WEIGHTS_FILE
from weft.core.sampling import MAX_LOGPROBS
from weft.core.targets import Kind as TargetKind
from weft.core.targets import Target, TargetTable, resized, vocabulary

OF_TRAINING = frozenset(
    {"corda_config", "eva_config", "loftq_config", "lora_dropout", "lora_ga_config"}
) | {"megatron_config", "megatron_core", "qalora_group_size", "runtime_config"}
"""Fields that say how a LoRA was trained; `init_lora_weights` says what that does to the base."""
_MODULES = (EMBEDDING, HEAD)
MAX_INVOCATION = 256
"""The largest number of token ids in `alora_invocation_tokens`."""

_MERGE = "merge the adapter into the base with PEFT's merge_and_unload, and serve that as a base"
_PLAIN_INITS = frozenset({"gaussian", "eva", "orthogonal", "mica"})
_RESIDUAL_INITS = ("pissa", "olora", "corda")
"""Initialisations that change the base model in a way that `weft.checkpoint.base` recognises."""
_BASE_CHANGING_INITS = {
    "loftq": "quantizes the base model, and is right on that one alone; merge the adapter into it"
    " with PEFT's merge_and_unload, and serve that as a base",
    "lora_ga": "changes the base model; save the adapter with PEFT's"
    " path_initial_model_for_weight_conversion, which makes it a plain LoRA for the original base",
}


# -- the config ------------------------------------------------------------------------------------


def _configure(config: PeftConfig) -> PeftConfig:
    fields = config.options
    bias = fields.get("bias") or "none"
    if not isinstance(bias, str) or bias not in ("none", "lora_only", "all"):
        refuse("bias", f"must be none, lora_only or all, got {show(bias)}")
    use_dora, lora_bias = flag(fields, "use_dora"), flag(fields, "lora_bias")
    if use_dora and lora_bias:
        refuse("lora_bias", "PEFT can't join it with use_dora")
    return replace(
        config,
        use_rslora=flag(fields, "use_rslora"),
        target_parameters=names(fields, "target_parameters"),
        use_dora=use_dora,
        lora_bias=lora_bias,
        bias=bias,
        modules_to_save=names(fields, "modules_to_save"),
        unadapted=_unadapted(names(fields, "modules_to_save")),
        token_indices=_token_indices(fields.get("trainable_token_indices")),
        ensure_weight_tying=flag(fields, "ensure_weight_tying"),
        invocation=_invocation(fields),
        residual_init=_residual_init(fields.get("init_lora_weights")),
    )


def _unadapted(entries: tuple[str, ...]) -> tuple[Pattern, ...]:
    """PEFT gives no LoRA to modules for which `(^|.*\\.)ENTRY($|\\..*)` matches a beginning of the
    name. Entries that are plain names are joined, as there may be many."""
    work = Work("modules_to_save")
    plain = [entry for entry in entries if is_plain(entry)]
    found = [Pattern(rf"(.*\.)?({'|'.join(plain)})(\..*)?", work)] if plain else []
    for entry in entries:
        if not is_plain(entry):
            whole = pattern(rf"(^|.*\.){entry}($|\..*)", work).source
            found.append(pattern(f"(?:{whole}).*", work))
    return tuple(found)


def _token_indices(value: object) -> dict[str, tuple[int, ...]]:
    """The token ids by the ending of a module's name; a bare list is for the embedding."""
    param = "trainable_token_indices"
    by_module = value if isinstance(value, dict) else {BARE_TOKENS: value}
    found: dict[str, tuple[int, ...]] = {}
    for ending, stated in bounded(by_module, param, "keys").items():
        if is_off(stated):
            continue
        ids = found[ending] = token_ids(stated, param)
        if len(set(ids)) < len(ids):
            refuse(param, "names a token twice")
    return found


def _invocation(fields: Fields) -> tuple[int, ...]:
    param = "alora_invocation_tokens"
    if is_off(fields.get(param)):
        return ()
    ids = token_ids(fields[param], param)
    if len(ids) > MAX_INVOCATION:
        refuse(param, f"more than {MAX_INVOCATION} token ids")
    # Before the invocation keys and values must be the base's, so all of the adapter must be off
    # there. PEFT has these on at all positions, or can't join them with it.
    for other in ("use_dora", "modules_to_save", "trainable_token_indices", "target_parameters"):
        if not is_off(fields.get(other)):
            refuse(other, f"can't be joined with {param}")
    if fields.get("bias") not in (None, "", "none"):
        refuse("bias", f"trained biases can't be joined with {param}")
    return ids


def _residual_init(value: object) -> str:
    """The initialisation, if its adapters need the base model that it changed; else ""."""
    if value is None or isinstance(value, bool):
        return ""
    if not isinstance(value, str):
        refuse("init_lora_weights", f"expected a name or a boolean, got {show(value)}")
    init = value.lower()
    if init in _BASE_CHANGING_INITS:
        refuse("init_lora_weights", f"{show(value)} {_BASE_CHANGING_INITS[init]}")
    if init in _RESIDUAL_INITS or init.startswith("pissa_niter_"):
        return init
    if init not in _PLAIN_INITS:
        refuse("init_lora_weights", f"unknown initialisation {show(value)}")
    return ""


# -- the tensors -----------------------------------------------------------------------------------


def _sort(adapter: PeftAdapter) -> AdapterParts:
    tensors, table, config = adapter.tensors, adapter.table, adapter.config
    if not tensors:
        refuse(WEIGHTS_FILE, "holds no tensors")
    base_size, _ = vocabulary(table, "embedding")
    size, source = _vocab_size(tensors, table, config, adapter.max_added_tokens)
    table = resized(table, size) if size != base_size else table
    gathered = Gathered(_without_copies(tensors, config), table, config)
    found = NamedTensors(table, gathered)
    parts = AdapterParts([_target_parts(target, found, config) for target in found.targets()])
    for norm in table.norms:
        if weight := found.of(norm.name, "whole"):
            parts.norms.append((norm, check_shape(weight, (norm.size,), "the base model makes")))
    _set_rows(parts, found, config)
    if size != base_size:
        parts.vocab_size = size
        if classifies(config.options) and parts.head is None:
            parts.head = parts.embedding  # its logits are read by nobody, but need rows
        _check_rows(source, parts, base_size, size)
    adapted = [each.target.name for each in parts.targets if each.rank]
    if config.ensure_weight_tying and table.tied and EMBEDDING in adapted:
        adapted = [name for name in adapted if name != HEAD]  # PEFT adapts it unasked
    modules = [module for name in adapted for module in gathered.modules_of(name)]
    config.check_modules(modules, [*table.by_name, *_single_experts(table)])
    others = [vector.name for vector in table.vectors]
    config.check_saved(found.saved(), [*table.by_name, *table.norms_by_name], others)
    return parts


def _single_experts(table: TargetTable) -> list[str]:
    """The names that adapters may have for the projections of each layer's first expert."""
    names = [t.name.rpartition(".")[::2] for t in table.targets if t.kind == "experts"]
    gated = {place for place, suffix in names if suffix.startswith("gate")}
    return [
        f"{place}.0.{part}"
        for place in dict.fromkeys(place for place, _ in names)
        for part, projection in PROJECTIONS.items()
        if place in gated or projection != "gate_proj"
    ]


def _target_parts(target: Target, found: NamedTensors, config: PeftConfig) -> TargetParts:
    parts = found.gathered.experts.get(target.name) or _matrices(target, found, config)
    _check_wrapped(target, found)
    parts.lora_bias = lora_bias = _vector(target, found, "lora_bias")
    parts.magnitude = magnitude = _vector(target, found, "magnitude")
    parts.bias = bias = _vector(target, found, "inner_bias", "bias")
    if parts.a is not None:
        _check_flag("use_dora", config.use_dora, magnitude, target)
        _check_flag("lora_bias", config.lora_bias, lora_bias, target)
    if bias is not None:
        if not found.table.has_bias(target):
            refuse(bias.name, f"{target.suffix} has no bias in the base model")
        if config.bias == "none":
            refuse("bias", f"says none, but the file holds {bias.name}")
    return parts


def _matrices(target: Target, found: NamedTensors, config: PeftConfig) -> TargetParts:
    """A and B, if the file has them."""
    a, b = found.of(target.name, "a"), found.of(target.name, "b")
    for present, absent, letter in ((a, b, "B"), (b, a, "A")):
        if present is not None and absent is None:
            refuse(present.name, f"its counterpart, the {letter} matrix, is missing")
    if a is None or b is None:
        return TargetParts(target)
    (module,) = found.gathered.modules_of(target.name)
    rank, who = config.rank_of(module), "the base model and the ranks in the config make"
    return TargetParts(
        target,
        check_shape(a, (rank, target.in_features), who),
        check_shape(b, (target.out_features, rank), who),
        config.scale_of(module, rank),
    )


def _check_wrapped(target: Target, found: NamedTensors) -> None:
    """Refuse a target's tensors that PEFT would ignore, as it has put the module elsewhere."""
    wrapped = found.is_wrapped(target.name)
    outside = ("bias", "whole") if wrapped else ("lora_bias", "magnitude", "inner_bias")
    tensor = found.of(target.name, *outside)
    if tensor is not None:
        is_not = "is" if wrapped else "is not"
        refuse(tensor.name, f"PEFT would ignore it, as {target.name} {is_not} adapted")


def _check_flag(field: str, is_set: bool, vector: Stored | None, target: Target) -> None:
    if is_set and vector is None:
        refuse(field, f"is set, but the file holds no such vector for {target.name}")
    if vector is not None and not is_set:
        refuse(vector.name, f"PEFT would ignore it, as {field} is not set")


def _vector(target: Target, found: NamedTensors, *parts: str) -> Stored | None:
    vector = found.of(target.name, *parts)
    return vector and check_shape(vector, (target.out_features,), "the base model makes")


# -- rows of embedding and head, and the vocabulary ------------------------------------------------
#
# A file may hold whole weights of both (trained, or saved along), the rows of single trained
# tokens, or rows for more or fewer tokens than the base has.


def _set_rows(parts: AdapterParts, found: NamedTensors, config: PeftConfig) -> None:
    """Set the rows of embedding and head in `parts`. Raises AdapterInvalid."""
    _check_tied(found, config)
    wholes = _wholes(found, config)
    some = {module: _some(module, found, config) for module in _MODULES}
    if _ties_tokens(found, config):
        own = found.of(HEAD, "some")
        if own is not None and not own.equals(some[EMBEDDING][0]):
            refuse(own.name, "PEFT would ignore it, as the head's rows are the embedding's")
        some[HEAD] = some[EMBEDDING]
    for module in _MODULES:
        if some[module][0] is not None and found.is_wrapped(module):
            refuse("trainable_token_indices", f"PEFT can't join it with the LoRA of {module}")
    rows = {m: Rows(wholes[m], *some[m]) for m in _MODULES if wholes[m] or some[m][0]}
    parts.embedding, parts.head = rows.get(EMBEDDING), rows.get(HEAD)


def _vocab_size(
    tensors: Mapping[str, Stored], table: TargetTable, config: PeftConfig, max_added: int
) -> tuple[int, str]:
    """The size of the adapter's vocabulary, and the name of the tensor or field that says so.
    Raises AdapterInvalid."""
    base_size, hidden = vocabulary(table, "embedding")
    wholes = [
        (name, tensors[name].shape)
        for module in _MODULES
        for suffix in WHOLE_SUFFIXES
        if (name := f"{PREFIX}{module}{suffix}") in tensors
    ]
    sizes = [(name, shape[0]) for name, shape in wholes if shape[1:] == (hidden,)]
    source, size = sizes[0] if sizes else ("", base_size)
    if not source:
        trained = [config.token_ids(module) or () for module in _MODULES]
        source = "trainable_token_indices"
        size = max(1 + max((i for ids in trained for i in ids), default=-1), base_size)
    if size < MAX_LOGPROBS:
        refuse(source, f"is for a vocabulary of {size}, and less than {MAX_LOGPROBS} is not served")
    if size > base_size and table.fixed_vocabulary is not None:
        refuse(source, f"adds tokens, for which the base's {table.fixed_vocabulary} has no rows")
    if size - base_size > max_added:
        refuse(
            source,
            f"is for a vocabulary of {size}, {size - base_size} more than the base model's; at most"
            f" {max_added} are served (--max-added-tokens)",
        )
    return size, source


def _without_copies(tensors: Mapping[str, Stored], config: PeftConfig) -> dict[str, Stored]:
    """The tensors without copies of saved modules, which PEFT adds when it saves embedding layers
    along, and does not read again. Raises AdapterInvalid for a copy that differs."""
    found = dict(tensors)
    for module in _MODULES:
        whole = found.get(f"{PREFIX}{module}.weight")
        saved = config.saves(module) or (config.ensure_weight_tying and config.saves(EMBEDDING))
        if whole is None or not saved:
            continue
        found.pop(f"{PREFIX}{module}.original_module.weight", None)
        copy = found.pop(f"{PREFIX}{module}.modules_to_save.weight", None)
        if copy is not None and not copy.equals(whole):
            refuse(copy.name, f"PEFT would ignore it, and it differs from {whole.name}")
    return found


def _check_rows(source: str, parts: AdapterParts, base_size: int, size: int) -> None:
    """Raises AdapterInvalid unless the file has all rows that a vocabulary of `size` other than the
    base's needs: whole weights, or rows of all added tokens. `source`: see `_vocab_size`."""
    for module, rows in ((EMBEDDING, parts.embedding), (HEAD, parts.head)):
        has_added = rows is not None and set(range(base_size, size)) <= set(rows.ids)
        if rows is None or (rows.whole is None and not (size > base_size and has_added)):
            difference = f"{abs(size - base_size)} {'more' if size > base_size else 'fewer'}"
            refuse(
                source,
                f"is for {difference} than the base model's {base_size} tokens, but the file does"
                f" not hold the rows of {module} for all of its own; save the adapter with"
                " save_embedding_layers=True",
            )


def _wholes(found: NamedTensors, config: PeftConfig) -> dict[str, Stored | None]:
    """The whole weights by module. A weight that PEFT has not wrapped is loaded into the base
    model's: with tied weights both modules see it."""
    own: dict[str, Stored | None] = dict.fromkeys(_MODULES)
    loaded: dict[str, Stored | None] = dict.fromkeys(_MODULES)
    kinds: dict[str, TargetKind] = {EMBEDDING: "embedding", HEAD: "head"}
    for module, kind in kinds.items():
        whole = found.of(module, "whole", "inner_whole", "token_whole")
        if whole is None:
            continue
        check_shape(whole, vocabulary(found.table, kind), "the base model makes")
        _check_place(module, found, config)
        (own if _is_saved(module, found, config) else loaded)[module] = whole
    if not found.table.tied:
        return {module: own[module] or loaded[module] for module in own}
    head = loaded[HEAD]
    shared = loaded[EMBEDDING] or head
    if head is not None and not head.equals(shared):
        refuse(head.name, f"differs from {EMBEDDING}, with which the base model shares it")
    return {module: own[module] or shared for module in own}


def _check_place(module: str, found: NamedTensors, config: PeftConfig) -> None:
    """Refuse a module's weight that PEFT would ignore, as it has put the module elsewhere."""
    has_tokens = config.token_ids(module) is not None
    has_tokens = has_tokens or (module == HEAD and _ties_tokens(found, config))
    right = {
        "whole": not found.is_wrapped(module) and not has_tokens,
        "inner_whole": found.is_wrapped(module),
        "token_whole": has_tokens,
    }
    for part, is_right in right.items():
        tensor = found.of(module, part)
        if tensor is not None and not is_right:
            refuse(tensor.name, f"PEFT would ignore it, as it expects {module} under another name")


def _is_saved(module: str, found: NamedTensors, config: PeftConfig) -> bool:
    """Whether PEFT keeps a copy of the whole module for this adapter."""
    tied = module == HEAD and found.table.tied and config.ensure_weight_tying
    return config.saves(module) or (tied and config.saves(EMBEDDING))


def _some(
    module: str, found: NamedTensors, config: PeftConfig
) -> tuple[Stored | None, tuple[int, ...]]:
    """The module's trained token rows, and their ids."""
    tensor, ids = found.of(module, "some"), config.token_ids(module)
    if module == HEAD and _ties_tokens(found, config):
        return None, ()
    if ids is None:
        if tensor is not None:
            refuse(tensor.name, "trainable_token_indices does not say which tokens it is for")
        return None, ()
    if tensor is None:
        refuse("trainable_token_indices", f"the file holds no rows for {module}")
    vocab, hidden = vocabulary(found.table, "embedding")
    for i in ids:
        if i >= vocab:
            refuse("trainable_token_indices", f"token {i} is beyond the vocabulary of {vocab}")
    return check_shape(tensor, (len(ids), hidden), "the config and the base model make"), ids


def _ties_tokens(found: NamedTensors, config: PeftConfig) -> bool:
    """Whether PEFT gives the head the embedding's trained rows."""
    ids, head = config.token_ids(EMBEDDING), config.token_ids(HEAD)
    return found.table.tied and ids is not None and head in (None, ids)


def _check_tied(found: NamedTensors, config: PeftConfig) -> None:
    """With ensure_weight_tying, PEFT has one tensor for both modules: refuse two that differ."""
    if not (config.ensure_weight_tying and found.table.tied):
        return
    if config.saves(EMBEDDING):
        pairs = [(found.of(HEAD, "whole"), found.of(EMBEDDING, "whole"))]
    elif found.is_wrapped(EMBEDDING):
        a, b = (found.of(EMBEDDING, part) for part in ("a", "b"))
        turned = [each and each.transposed() for each in (b, a)]
        pairs = [(found.of(HEAD, "a"), turned[0]), (found.of(HEAD, "b"), turned[1])]
    else:
        return
    for head, embedding in pairs:
        if head is None or not head.equals(embedding):
            refuse("ensure_weight_tying", "is set, but the file's tensors of the head differ")


KIND = Kind(
    peft_type="LORA",
    title="LoRA",
    sort=_sort,
    configure=_configure,
    read=LAYERS
    | {"alora_invocation_tokens", "alpha_pattern", "ensure_weight_tying", "exclude_modules"}
    | {"init_lora_weights", "lora_alpha", "lora_bias", "modules_to_save", "r", "rank_pattern"}
    | {"target_parameters", "trainable_token_indices", "use_dora", "use_rslora"},
    # PEFT itself unsets this for linear layers, and embeddings are not read by it.
    harmless=OF_TRAINING | {"fan_in_fan_out"},
    refused={
        "arrow_config": "Arrow routing is not served; the adapters that it routes between are, by"
        " name or as a sum",
        "kasa_config": f"KaSA changes the base model's weights; {_MERGE}",
        "layer_replication": "the base model's layers can't be replicated for one adapter; serve a"
        " base that has them replicated",
        "monteclora_config": f"MonteCLoRA is not served; {_MERGE}",
        "use_bdlora": f"block-diagonal LoRA is not served; {_MERGE}",
        "use_qalora": f"QALoRA is not served; {_MERGE}",
        "velora_config": f"VeLoRA is not served; {_MERGE}",
    },
    alpha=("lora_alpha", 8),
    rank_is_images=True,
)

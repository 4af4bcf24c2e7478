"""Plain LoRA, with all that PEFT can add to it: DoRA, biases, whole modules, token rows, aLoRA."""

from __future__ import annotations

from dataclasses import replace

from weft.checkpoint.config import PeftConfig
from weft.checkpoint.experts import gather_experts
from weft.checkpoint.fields import MAX_ENTRIES, Fields, flag, is_off, names, token_ids
from weft.checkpoint.kinds.base import LAYERS, Kind, PeftAdapter
from weft.checkpoint.names import NamedTensors
from weft.checkpoint.parts import EMBEDDING, HEAD, AdapterParts, TargetParts, check_shape
from weft.checkpoint.read import Stored
from weft.checkpoint.refuse import refuse, show
from weft.checkpoint.rows import check_rows, set_rows, vocab_size, without_copies
from weft.core.files import WEIGHTS_FILE
from weft.core.targets import Target, resized, vocabulary

OF_TRAINING = frozenset(
    {"corda_config", "eva_config", "loftq_config", "lora_dropout", "lora_ga_config"}
) | {"megatron_config", "megatron_core", "qalora_group_size", "runtime_config"}
"""Fields that say how a LoRA was trained. `init_lora_weights` decides on what the init configs do
to the base."""
MAX_INVOCATION = 256
"""The largest number of token ids in `alora_invocation_tokens`."""

_MERGE = "merge the adapter into the base with PEFT's merge_and_unload, and serve that as a base"
_PLAIN_INITS = frozenset({"gaussian", "eva", "orthogonal", "mica"})
_RESIDUAL_INITS = ("pissa", "olora", "corda")
"""They change the base model so that `weft.checkpoint.base` can tell."""
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
        token_indices=_token_indices(fields.get("trainable_token_indices")),
        ensure_weight_tying=flag(fields, "ensure_weight_tying"),
        invocation=_invocation(fields),
        residual_init=_residual_init(fields.get("init_lora_weights")),
    )


def _token_indices(value: object) -> dict[str, tuple[int, ...]]:
    """By the ending of a module's name; a list is for the embedding."""
    param = "trainable_token_indices"
    by_module = value if isinstance(value, dict) else {"embed_tokens": value}
    if len(by_module) > MAX_ENTRIES:
        refuse(param, f"more than {MAX_ENTRIES} keys")
    found: dict[str, tuple[int, ...]] = {}
    for ending, stated in by_module.items():
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
    """The initialisation, if it is one whose adapters need the base that it left."""
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
    size, source = vocab_size(tensors, table, config, adapter.max_added_tokens)
    table = resized(table, size) if size != base_size else table
    gathered = gather_experts(without_copies(tensors, config), table, config)
    found = NamedTensors(table, gathered)
    parts = AdapterParts([_target_parts(target, found, config) for target in found.targets()])
    for norm in table.norms:
        if weight := found.of(norm.name, "whole"):
            parts.norms.append((norm, check_shape(weight, (norm.size,), "the base model makes")))
    set_rows(parts, found, config)
    if size != base_size:
        parts.vocab_size = size
        check_rows(source, parts, base_size, size)
    adapted = [each.target.name for each in parts.targets if each.rank]
    if config.ensure_weight_tying and table.tied and EMBEDDING in adapted:
        adapted = [name for name in adapted if name != HEAD]  # PEFT adapts it unasked
    modules = [module for name in adapted for module in gathered.modules_of(name)]
    config.check_modules(modules, table.by_name)
    config.check_saved(found.saved(), [*table.by_name, *table.norms_by_name])
    return parts


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
    """PEFT ignores what lies elsewhere than it has put the module."""
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

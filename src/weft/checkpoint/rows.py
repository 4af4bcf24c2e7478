"""Rows of the embedding and of the head that a plain LoRA's file holds, and its vocabulary.

A file may hold whole weights of both (trained, or saved along), the rows of single trained tokens,
or rows for more or fewer tokens than the base has.
"""

from __future__ import annotations

from collections.abc import Mapping

from weft.checkpoint.config import PeftConfig
from weft.checkpoint.names import WHOLE_SUFFIXES, NamedTensors
from weft.checkpoint.parts import EMBEDDING, HEAD, PREFIX, AdapterParts, Rows, check_shape
from weft.checkpoint.read import Stored
from weft.checkpoint.refuse import refuse
from weft.core.sampling import MAX_LOGPROBS
from weft.core.targets import Kind, TargetTable, vocabulary

_MODULES = (EMBEDDING, HEAD)


def set_rows(parts: AdapterParts, found: NamedTensors, config: PeftConfig) -> None:
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


def vocab_size(
    tensors: Mapping[str, Stored], table: TargetTable, config: PeftConfig, max_added: int
) -> tuple[int, str]:
    """The vocabulary of the adapter's model, and the whole weight, or else the field, that says
    so. Raises AdapterInvalid."""
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
    if size - base_size > max_added:
        refuse(
            source,
            f"is for a vocabulary of {size}, {size - base_size} more than the base model's; at most"
            f" {max_added} are served (--max-added-tokens)",
        )
    return size, source


def without_copies(tensors: Mapping[str, Stored], config: PeftConfig) -> dict[str, Stored]:
    """The tensors without the copies that PEFT adds to a file of saved modules, and does not read
    again, when it saves embedding layers along. Raises AdapterInvalid for a copy that differs."""
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


def check_rows(source: str, parts: AdapterParts, base_size: int, size: int) -> None:
    """Raises AdapterInvalid unless the file holds all rows of a vocabulary of `size`, which is not
    the base's: whole weights say that it is smaller, and what added tokens are. `source`: the
    tensor or field that says so."""
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
    own: dict[str, Stored | None] = {EMBEDDING: None, HEAD: None}
    loaded: dict[str, Stored | None] = {EMBEDDING: None, HEAD: None}
    kinds: dict[str, Kind] = {EMBEDDING: "embedding", HEAD: "head"}
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
    """PEFT ignores a weight that lies elsewhere than it has put the module."""
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
            refuse(tensor.name, f"PEFT would ignore it, as it puts {module} elsewhere")


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
    beyond = [i for i in ids if i >= vocab]
    if beyond:
        message = f"token {beyond[0]} is beyond the vocabulary of {vocab}"
        refuse("trainable_token_indices", message)
    return check_shape(tensor, (len(ids), hidden), "the config and the base model make"), ids


def _ties_tokens(found: NamedTensors, config: PeftConfig) -> bool:
    """Whether PEFT lets the head have the embedding's trained rows."""
    ids, head = config.token_ids(EMBEDDING), config.token_ids(HEAD)
    return found.table.tied and ids is not None and head in (None, ids)


def _check_tied(found: NamedTensors, config: PeftConfig) -> None:
    """With ensure_weight_tying, PEFT keeps one tensor for both modules; a file holds it twice."""
    if not (config.ensure_weight_tying and found.table.tied):
        return
    if config.saves(EMBEDDING):
        pairs = [(found.of(HEAD, "whole"), found.of(EMBEDDING, "whole"))]
    elif found.is_wrapped(EMBEDDING):
        pairs = [
            (found.of(HEAD, part), _transposed(found.of(EMBEDDING, other)))
            for part, other in (("a", "b"), ("b", "a"))
        ]
    else:
        return
    for head, embedding in pairs:
        if head is None or not head.equals(embedding):
            refuse("ensure_weight_tying", "is set, but the file's tensors of the head differ")


def _transposed(tensor: Stored | None) -> Stored | None:
    return tensor if tensor is None or len(tensor.shape) != 2 else tensor.transposed()

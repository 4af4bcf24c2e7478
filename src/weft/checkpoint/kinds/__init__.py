"""The kinds of PEFT adapters that are served. Each has a file, whose `KIND` describes it.

Third parties add theirs with an entry point in the group `weft.adapter_kinds`, whose name is the
`peft_type` and whose value is a `weft.checkpoint.kinds.base.Kind`. It is loaded when an adapter of
that type is first read.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points

import numpy as np

from weft.checkpoint.config import PeftConfig
from weft.checkpoint.fields import load_object
from weft.checkpoint.heads import base_part, check_task, classifies, without_heads
from weft.checkpoint.kinds.base import Kind, PeftAdapter
from weft.checkpoint.parts import AdapterParts
from weft.checkpoint.read import AdapterFiles, Stored, parse_stored
from weft.checkpoint.refuse import refuse, show
from weft.checkpoint.text_part import text_part
from weft.core.config import MAX_ADDED_TOKENS, LoraArgs
from weft.core.targets import TargetTable

ENTRY_POINT_GROUP = "weft.adapter_kinds"
CONVERSION_TOLERANCE = LoraArgs().conversion_tolerance
_NOT_PEFTS = re.compile(
    r"\b(module|_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.|\.default(\.\w+)?$"
)
"""What wrappers (DDP, torch.compile, FSDP, checkpointing of activations) put into the names of
modules, and the adapter's name, which is in those of a model's own state dict."""
_BUILT_IN = ("LORA", "ADALORA", "VERA", "LOHA", "LOKR", "IA3")
"""By `peft_type`; the module below this one has the same name in small letters."""


@cache
def installed() -> dict[str, EntryPoint]:
    """The kinds of third parties by `peft_type`. Looking for them takes long, so it is done once,
    and only when a `peft_type` is not built in."""
    return {entry.name: entry for entry in entry_points(group=ENTRY_POINT_GROUP)}


def kind_names() -> list[str]:
    """Every `peft_type` that is served, built-in ones first."""
    return [*_BUILT_IN, *installed()]


def find_kind(peft_type: object) -> Kind:
    """The kind of that name. Raises AdapterInvalid when there is none."""
    if peft_type is None:
        refuse("peft_type", "is missing, so that the configuration is not PEFT's")
    if isinstance(peft_type, str):
        if peft_type in _BUILT_IN:
            built_in: Kind = import_module(f"{__name__}.{peft_type.lower()}").KIND
            return built_in
        if peft_type in installed():
            plugin: Kind = installed()[peft_type].load()
            return plugin
    return refuse("peft_type", f"only {', '.join(kind_names())} are served, got {show(peft_type)}")


def parse_config(text: bytes, max_rank: int) -> PeftConfig:
    """The config in the bytes of adapter_config.json. Raises AdapterInvalid, naming the field."""
    fields = load_object(text)
    kind = find_kind(fields.get("peft_type"))
    check_task(fields)
    return kind.parse(without_heads(fields), max_rank)


def parse_files(
    files: AdapterFiles, max_rank: int, table: TargetTable | None = None
) -> tuple[PeftConfig, Mapping[str, Stored]]:
    """The config and the tensors, by the names that they have in a text model. Raises
    AdapterInvalid."""
    config = parse_config(files.config, max_rank)
    stored = parse_stored(files.weights, table)
    for name in stored:
        if found := _NOT_PEFTS.search(name):
            remedy = "call save_pretrained of the PEFT model itself, not of what wraps it"
            refuse(name, f"PEFT saves it without {show(found[0].strip('.'))}; {remedy}")
    of_text, naming = text_part(stored)
    tensors, of_task = base_part(config.options, of_text, table)
    has_head = not (classifies(config.options) or of_task)
    ties = config.ensure_weight_tying and has_head
    naming = {**of_task, **naming}
    if table is not None:
        outer = naming.get("model.", "model.")
        own = {name: outer + theirs.removeprefix("model.") for name, theirs in table.naming}
        naming = {**own, **naming}
    return replace(config, naming=naming, ensure_weight_tying=ties), tensors


def sort_adapter(
    files: AdapterFiles,
    table: TargetTable,
    max_rank: int,
    tolerance: float = CONVERSION_TOLERANCE,
    max_added_tokens: int = MAX_ADDED_TOKENS,
) -> tuple[PeftConfig, AdapterParts]:
    """The config, and the parts in the order of the table.

    `tolerance`: the largest `TargetParts.error` of a kind that is no LoRA. Raises AdapterInvalid,
    naming the tensor or field, for what does not fit the base or the config, for a tensor that is
    not used, and for an error above the tolerance.
    """
    config, tensors = parse_files(files, max_rank, table)
    kind = find_kind(config.peft_type)
    adapter = PeftAdapter(kind, config, tensors, table, max_rank, tolerance, max_added_tokens)
    with np.errstate(all="ignore"):  # what is too large shows as infinite in the image
        parts = kind.sort(adapter)
    parts.targets.sort(key=lambda each: each.target.slice)
    return config, parts

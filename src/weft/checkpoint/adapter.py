"""From an adapter's two files to its parts, whatever its kind."""

from __future__ import annotations

import numpy as np

from weft.checkpoint.config import PeftConfig
from weft.checkpoint.fields import load_object
from weft.checkpoint.kinds import find_kind
from weft.checkpoint.kinds.base import PeftAdapter
from weft.checkpoint.parts import AdapterParts
from weft.checkpoint.read import AdapterFiles, parse_stored
from weft.checkpoint.refuse import refuse, show
from weft.core.config import MAX_ADDED_TOKENS
from weft.core.targets import TargetTable

CONVERSION_TOLERANCE = 1e-3
"""The default of --conversion-tolerance."""


def parse_config(text: bytes, max_rank: int) -> PeftConfig:
    """The config in the bytes of adapter_config.json. Raises AdapterInvalid, naming the field."""
    fields = load_object(text)
    kind = find_kind(fields.get("peft_type"))
    if fields.get("task_type") not in (None, "CAUSAL_LM"):
        refuse("task_type", f"only CAUSAL_LM is served, got {show(fields['task_type'])}")
    return kind.parse(fields, max_rank)


def sort_adapter(
    files: AdapterFiles,
    table: TargetTable,
    max_rank: int,
    tolerance: float = CONVERSION_TOLERANCE,
    max_added_tokens: int = MAX_ADDED_TOKENS,
) -> tuple[PeftConfig, AdapterParts]:
    """The config, and the parts in the order of the table.

    `tolerance`: the largest error, see `TargetParts.error`, of a kind that is no LoRA. Raises
    AdapterInvalid, naming the tensor or field, for what does not fit the base or the config, for a
    tensor that nothing is made of, and for an error above the tolerance.
    """
    config = parse_config(files.config, max_rank)
    kind = find_kind(config.peft_type)
    adapter = PeftAdapter(
        kind, config, parse_stored(files.weights), table, max_rank, tolerance, max_added_tokens
    )
    with np.errstate(all="ignore"):  # what is too large shows as infinite in the image
        parts = kind.sort(adapter)
    parts.targets.sort(key=lambda each: each.target.slice)
    return config, parts

"""Reads what an adapter's configuration says about its base, which nothing enforces."""

from __future__ import annotations

import json
import re

_FOUR_BITS = re.compile(r"(bnb-)?4-?bit|int4|w4a16|nf4|awq|gptq", re.IGNORECASE)


def trained_on(config: bytes) -> str | None:
    """`base_model_name_or_path` of an adapter_config.json; None if it has none."""
    try:
        stated = json.loads(config)
    except (ValueError, RecursionError):
        return None
    name = stated.get("base_model_name_or_path") if isinstance(stated, dict) else None
    return None if name is None else str(name)


def was_in_four_bits(name: str) -> bool:
    """Whether the name of a checkpoint says that its weights are in 4 bits."""
    return bool(_FOUR_BITS.search(name.rpartition("/")[2]))


def warning_of_four_bits(config: bytes, base_has_16_bits: bool) -> str | None:
    """A warning for an adapter that was trained on a base in 4 bits, if the served base has 16 bits
    or more; else None."""
    name = trained_on(config)
    if not base_has_16_bits or name is None or not was_in_four_bits(name):
        return None
    return (
        f"it was trained on {name!r}, whose weights were rounded to 4 bits. This base's are not, "
        "so that answers may differ from those of its training. Serve that checkpoint, or add "
        "--quantization nf4-values if it was bitsandbytes that rounded them"
    )

"""What an adapter's folder is made of. No other file of it is ever read or fetched."""

from __future__ import annotations

WEIGHT_FILES = ("adapter_config.json", "adapter_model.safetensors")
"""What a version is: its digest is theirs."""

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
)
"""Which an adapter may have of its own, in place of the base's."""

ADAPTER_FILES = (*WEIGHT_FILES, *TOKENIZER_FILES)

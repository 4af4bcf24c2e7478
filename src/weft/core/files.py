"""The files that an adapter's folder is made of. No other file of it is ever read or fetched."""

from __future__ import annotations

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"

WEIGHT_FILES = (CONFIG_FILE, WEIGHTS_FILE)
"""The two files that make a version: its digest is computed from them."""

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
)
"""The files of a tokenizer that an adapter may have of its own, in place of the base's."""

ADAPTER_FILES = (*WEIGHT_FILES, *TOKENIZER_FILES)

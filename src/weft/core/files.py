"""Names the files of an adapter's folder. No other file is ever read or fetched."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

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

MAX_BYTES = {
    CONFIG_FILE: 1 << 20,
    "tokenizer.json": 64 << 20,
    "tokenizer_config.json": 8 << 20,
    "special_tokens_map.json": 8 << 20,
    "added_tokens.json": 8 << 20,
    "chat_template.jinja": 1 << 20,
}
"""How large these files may be. The limit of the weights depends on where they go."""


def content_digest(config: bytes, weights: Iterable[bytes | memoryview], num_bytes: int) -> str:
    """The digest by which an adapter's content is known everywhere: sha256 (hex) of the config and
    then the weights, each preceded by its length in 8 bytes, little endian.

    `weights` are the bytes of the weights' file in any number of pieces, `num_bytes` in all.
    """
    sha = hashlib.sha256(len(config).to_bytes(8, "little"))
    sha.update(config)
    sha.update(num_bytes.to_bytes(8, "little"))
    for piece in weights:
        sha.update(piece)
    return sha.hexdigest()

"""A server whose model thinks and calls tools, and what that model reads and writes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from http_api import INFO, World
from toy_tokenizers import thinking

BIG = replace(INFO, max_model_len=4096, vocab_size=thinking().vocab_size)
CALL = '<tool_call>\n{"name": "time", "arguments": {"zone": "UTC"}}\n</tool_call>'
THOUGHT = "<think>\nhm\n</think>\n\n"


def thinking_world(folder: Path, **settings: Any) -> World:
    return World(folder, thinking(), BIG, **settings)


def ids(text: str) -> list[int]:
    return thinking().encode(text, add_special_tokens=False)


def prompt_of(world: World) -> str:
    """The newest prompt, as the model reads it."""
    return thinking().decode(world.engine.requests[-1].prompt_ids)

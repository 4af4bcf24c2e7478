"""The names of formats that flags accept. They are listed here, apart from the formats, because
those take long to import."""

from __future__ import annotations

from typing import Literal, get_args

ToolCallParser = Literal[
    "auto",
    "none",
    "hermes",
    "llama3_json",
    "mistral",
    "mistral_v11",
    "qwen3_coder",
    "seed_oss",
    "minimax_m2",
    "glm45",
    "glm47",
    "granite",
    "cohere",
    "phi4_mini_json",
    "nemotron_json",
    "gemma4",
    "functiongemma",
    "olmo3",
    "lfm2",
    "pythonic",
    "deepseek_v3",
    "deepseek_v31",
    "kimi_k2",
    "solar_open",
    "hunyuan",
    "glm4",
    "harmony",
]
"""auto, none, and the names in `weft.text.tools.TOOL_FORMATS`."""
ReasoningParser = Literal[
    "auto",
    "none",
    "think",
    "think_answer",
    "think_response",
    "mistral",
    "seed_oss",
    "cohere",
    "gemma4",
    "granite",
    "solar_open",
]
"""auto, none, and the names in `weft.text.reasoning.REASONING`."""


def names_of(choices: object) -> str:
    """All names but auto and none, with commas between them."""
    return ", ".join(get_args(choices)[2:])

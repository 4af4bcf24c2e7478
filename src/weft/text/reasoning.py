"""What a model thinks before it answers: the text between `<think>` and `</think>`."""

from __future__ import annotations

BEGIN = "<think>"
END = "</think>"


def detect_reasoning(chat_template: str) -> bool:
    """Whether the model of this chat template marks its reasoning."""
    return END in chat_template


def opens_reasoning(prompt: str) -> bool:
    """Whether a prompt ends inside of reasoning, so that the output begins there: some templates
    write the first mark themselves."""
    return prompt.rstrip().endswith(BEGIN)

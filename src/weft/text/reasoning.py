"""The marks by which models set off their reasoning."""

from __future__ import annotations

from typing import NamedTuple


class ReasoningMarks(NamedTuple):
    """What stands before and after a model's reasoning."""

    begin: str
    end: str
    marks: tuple[str, ...]
    """The special tokens in `begin` and `end`, if any; first the one that `begin` begins with."""


def _between(begin: str, end: str) -> ReasoningMarks:
    return ReasoningMarks(begin, end, (begin, end))


REASONING = {
    "think": _between("<think>", "</think>"),
    "mistral": _between("[THINK]", "[/THINK]"),
    "seed_oss": _between("<seed:think>", "</seed:think>"),
    "cohere": _between("<|START_THINKING|>", "<|END_THINKING|>"),
    "gemma4": ReasoningMarks("<|channel>thought", "<channel|>", ("<|channel>", "<channel|>")),
}
"""How models mark their reasoning, by the name of the format."""


def detect_reasoning(chat_template: str) -> str | None:
    """How the model of this chat template marks its reasoning; None if it does not."""
    return next((name for name, style in REASONING.items() if style.end in chat_template), None)


def opens_reasoning(prompt: str, style: str) -> bool:
    """Whether a prompt ends inside of reasoning, so that the output begins there: some templates
    write the first mark themselves."""
    return prompt.rstrip().endswith(REASONING[style].begin)

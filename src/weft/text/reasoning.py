"""The marks by which models set off their reasoning."""

from __future__ import annotations

from typing import NamedTuple


class ReasoningMarks(NamedTuple):
    """What stands before and after a model's reasoning, and around its answer."""

    begin: str
    end: str
    marks: tuple[str, ...]
    """The special tokens in these texts, if any. The one that `begin` begins with is first."""
    before_answer: tuple[str, ...] = ()
    """What may stand before the answer, in its order."""
    after_answer: str = ""
    prompt_ends: str = ""
    """What may follow `begin` at the end of a prompt."""


def _between(begin: str, end: str) -> ReasoningMarks:
    return ReasoningMarks(begin, end, (begin, end))


_THINK = _between("<think>", "</think>")

REASONING = {
    "think": _THINK,
    "think_answer": _THINK._replace(before_answer=("<answer>",), after_answer="</answer>"),
    "think_response": _THINK._replace(before_answer=("<response>",), after_answer="</response>"),
    "mistral": _between("[THINK]", "[/THINK]"),
    "seed_oss": _between("<seed:think>", "</seed:think>")._replace(
        prompt_ends="<seed:cot_budget_reflect>"
    ),
    "cohere": _between("<|START_THINKING|>", "<|END_THINKING|>"),
    "gemma4": ReasoningMarks("<|channel>thought", "<channel|>", ("<|channel>", "<channel|>")),
    "granite": _between("Here is my thought process:", "Here is my response:"),
    "solar_open": ReasoningMarks(
        "<|think|>",
        "<|end|>",
        ("<|think|>", "<|end|>", "<|begin|>", "<|content|>"),
        ("<|begin|>assistant", "<|content|>"),
        "<|end|>",
    ),
}
"""How models mark their reasoning, by the name of the format. think_answer is Hunyuan's,
think_response that of Granite 3.3 and ERNIE 4.5 Thinking, granite that of Granite 3.2."""

_SHOWN_BY = (
    ("solar_open", ("<|think|>", "<|content|>")),
    ("think", ("</think>", "<minimax:tool_call>")),  # its <response> is for results of tools
    ("think_answer", ("</think>", "<answer>")),
    ("think_response", ("</think>", "<response>")),
    *((name, (style.end,)) for name, style in REASONING.items() if name != "solar_open"),
)
"""Formats, each with texts that all occur in its chat templates. The first format found counts."""


def detect_reasoning(chat_template: str) -> str | None:
    """How the model of this chat template marks its reasoning; None if it does not."""
    for name, shown in _SHOWN_BY:
        if all(mark in chat_template for mark in shown):
            return name
    return None


def opens_reasoning(prompt: str, style: str) -> bool:
    """Whether a prompt ends inside of reasoning, so that the output begins there: some templates
    write the first mark themselves."""
    marks = REASONING[style]
    return prompt.rstrip().removesuffix(marks.prompt_ends).rstrip().endswith(marks.begin)

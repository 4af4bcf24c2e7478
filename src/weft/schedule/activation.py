"""Where an activated LoRA (aLoRA, arXiv 2504.12397) becomes active in a prompt."""

from __future__ import annotations

from collections.abc import Sequence


def find_invocation(prompt_ids: list[int], invocation: Sequence[int]) -> int | None:
    """The first position of the last occurrence of these tokens; None where there is none.

    As in PEFT, the adapter is active from there on to the end of the output, whatever that holds,
    and nowhere without an occurrence.
    """
    wanted, first = list(invocation), invocation[0]
    for start in range(len(prompt_ids) - len(wanted), -1, -1):
        if prompt_ids[start] == first and prompt_ids[start : start + len(wanted)] == wanted:
            return start
    return None

"""Prepares a chat template's input: how much the model should think, and the turns that fit."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from weft.api.schemas import ChatBody
from weft.core.errors import ContextLengthExceeded

Messages = list[dict[str, Any]]

_SWITCHES = ("enable_thinking", "thinking")
"""The names of the variable by which templates switch thinking on and off."""


def template_kwargs(body: ChatBody, template: str | None) -> Mapping[str, Any]:
    """The template's variables: the client's own, and its choice of how much the model thinks, in
    the variables that the template has for that."""
    effort, thinks = body.reasoning_effort, body.enable_thinking
    if thinks is None and effort is not None:
        thinks = effort != "none"
    wanted: dict[str, Any] = {} if thinks is None else dict.fromkeys(_SWITCHES, thinks)
    if effort is not None:
        wanted["reasoning_effort"] = effort
    known = {name: value for name, value in wanted.items() if _takes(template, name)}
    return known | (body.chat_template_kwargs or {})


def _takes(template: str | None, name: str) -> bool:
    """Whether the template seems to read a variable of this name. In a few templates it is an
    attribute of messages; an extra variable does no harm there."""
    return re.search(rf"(?<![\w.'\"]){name}(?![\w'\"])", template or "") is not None


async def newest_that_fit(
    messages: Messages, room: int, encode: Callable[[Messages], Awaitable[list[int]]]
) -> list[int]:
    """The prompt of the conversation without as many of its oldest turns as it takes to have at
    most `room` tokens. A turn begins with a user's message; what comes before the first, such as
    rules of the system, stays, and so does the last turn, which may be too long."""
    begins = [i for i, message in enumerate(messages) if message["role"] == "user"]

    def without(num_turns: int) -> Messages:
        return messages[: begins[0]] + messages[begins[num_turns] :] if num_turns else messages

    fitting: list[int] | None = None
    fewest, most = 0, max(len(begins) - 1, 0)
    middle = 0  # most conversations fit as they are
    while fewest <= most:
        try:
            ids = await encode(without(middle))
        except ContextLengthExceeded:
            ids = []
        if 0 < len(ids) <= room:
            fitting, most = ids, middle - 1
        else:
            fewest = middle + 1
        middle = (fewest + most) // 2
    return await encode(without(max(len(begins) - 1, 0))) if fitting is None else fitting

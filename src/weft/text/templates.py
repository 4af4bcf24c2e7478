"""Renders conversations with chat templates, and chooses the variables that these get."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from weft.core.errors import InvalidRequest
from weft.text.tool_messages import reads_fields, with_fields

Templates = str | dict[str, str]
"""A tokenizer's chat template, or several by name."""


def template_for(templates: Templates, tools: object) -> str:
    """The template for a conversation with these tools; none are there if `tools` is empty."""
    if isinstance(templates, str):
        return templates
    names = ("tool_use", "default") if tools else ("default", "tool_use")
    return next(templates[name] for name in names if name in templates)


def widest_template(templates: Templates | None) -> str | None:
    """The template that shows what a model can do, or None: the one for tools, if there is one."""
    if isinstance(templates, dict):
        return templates.get("tool_use") or templates.get("default")
    return templates or None


def template_options(
    template: str | None,
    add_generation_prompt: bool = True,
    template_kwargs: Mapping[str, Any] | None = None,
    tools: Sequence[Mapping[str, Any]] | None = None,
    continue_final_message: bool = False,
    documents: Sequence[Mapping[str, Any]] | None = None,
) -> dict[str, Any]:
    """The arguments that `apply_chat_template` of transformers gets beside the messages.

    `tools` are functions in OpenAI's form. With `continue_final_message` the prompt ends inside
    the last message, which the output continues. Raises InvalidRequest when there is no template,
    or it doesn't show tools or documents.
    """
    kwargs = dict(template_kwargs or {})
    if reserved := sorted(_reserved() & kwargs.keys()):
        raise InvalidRequest(
            f"chat_template_kwargs may not hold {reserved[0]!r}", "chat_template_kwargs"
        )
    if template is None:
        raise InvalidRequest("this model has no chat template", "messages")
    if tools and not (re.search(r"\btools\b", template) or reads_fields(template)):
        raise InvalidRequest("this model's chat template takes no tools", "tools")
    if documents and not re.search(r"\bdocuments\b", template):
        raise InvalidRequest("this model's chat template takes no documents", "documents")
    if continue_final_message and add_generation_prompt:
        raise InvalidRequest(
            "continue_final_message and add_generation_prompt exclude each other",
            "continue_final_message",
        )
    return kwargs | {
        "tools": [dict(tool) for tool in tools] if tools else None,
        "documents": [dict(document) for document in documents] if documents else None,
        "add_generation_prompt": add_generation_prompt,
        "continue_final_message": continue_final_message,
    }


def joined_text(parts: Sequence[Any], where: str) -> str:
    """The text of a message's content parts, which `where` names. Raises InvalidRequest if one of
    them is no text."""
    texts: list[str] = []
    for n, part in enumerate(parts):
        given = part if isinstance(part, Mapping) else {}
        field, kind, text = f"{where}[{n}]", given.get("type"), given.get("text")
        if kind != "text":
            message = f"content of type {kind!r} is not supported, only text"
            raise InvalidRequest(message, f"{field}.type")
        if not isinstance(text, str):
            raise InvalidRequest(f"{field}.text is required", f"{field}.text")
        texts.append(text)
    return "\n".join(texts)


@cache
def _reserved() -> frozenset[str]:
    """Names that `template_kwargs` may not have: we give these to templates or to transformers."""
    from transformers import PreTrainedTokenizerBase

    named = inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters
    return frozenset({"messages", *named}) - {"self"}


def render(
    hf: Any, template: str | None, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]
) -> str:
    """The text of a conversation. `hf` is a tokenizer of transformers, whose own template is used
    if `template` is None.

    Arguments of earlier calls may be JSON text: templates get the object that it stands for. Raises
    InvalidRequest when the template refuses the messages, or is malformed.
    """
    try:
        tools = options.get("tools")
        text = hf.get_chat_template(template, tools)
        given = with_fields([_with_parsed_arguments(m) for m in messages], text, tools)
        text = str(hf.apply_chat_template(given, chat_template=template, tokenize=False, **options))
        text.encode()  # halves of surrogate pairs are no text
        return text
    except Exception as error:  # templates raise whatever they like
        from jinja2 import TemplateSyntaxError  # imported by now: workers can't open files

        if isinstance(error, TemplateSyntaxError):
            raise InvalidRequest(
                f"the chat template is malformed: {error}", "chat_template"
            ) from error
        raise InvalidRequest(
            f"the chat template refuses these messages: {error}", "messages"
        ) from error


def _with_parsed_arguments(message: Mapping[str, Any]) -> dict[str, Any]:
    """The message as templates expect it: the arguments of its calls are objects, not JSON."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return dict(message)
    return {**message, "tool_calls": [_with_parsed_call(call) for call in calls]}


def _with_parsed_call(call: Any) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"])
    except (ValueError, RecursionError):
        return call
    if not isinstance(arguments, dict):
        return call
    return {**call, "function": {**function, "arguments": arguments}}

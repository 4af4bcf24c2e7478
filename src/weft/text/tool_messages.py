"""Conversations for chat templates that read tools and calls from fields of the messages."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

_OLMO = re.compile(r"message(?:\.get\('functions'|\['functions'\]|\.functions)")
_PHI = "message['tools']"
_LFM = "<|tool_list_start|>"
_GLM = re.compile(r"\.metadata\b|\['metadata'\]")
_KIMI = "## Return of"
_MISTRAL = re.compile(r"\|\s*length\s*!=\s*9\b")
_THOUGHTS = re.compile(r"message\.thinking\b|message\['thinking'\]")
_EITHER = "Cannot pass both content and thinking"
_FIRST_CALL = re.compile(r"(?:\.tool_calls|\['tool_calls'\])\[0\]")
_EACH_CALL = re.compile(r"\bin\s+\w+(?:\.tool_calls|\['tool_calls'\])")
_JSON_TEXT = re.compile(r"\+\s*\w+\['function'\]\['arguments'\]\s*\+")
"""How templates of DeepSeek add a call's arguments to other text."""
_SYSTEM = {
    "functions": "You are a helpful function-calling AI assistant.",
    "tools": "You are a helpful assistant with some tools.",
}
"""What a conversation with tools begins with if it has no system message, by the field that the
template reads. Both are from the models' own documentation."""

Message = Mapping[str, Any]


def reads_fields(template: str) -> bool:
    """Whether a template takes tools from a field of a message."""
    return _field_of(template) is not None


def _field_of(template: str) -> str | None:
    """The field of the system message that has the tools: OLMo 3's or Phi-4-mini's."""
    if _OLMO.search(template):
        return None if re.search(r"\btools\b", template) else "functions"
    return "tools" if _PHI in template else None


def with_fields(
    messages: Sequence[Message], template: str, tools: Sequence[Mapping[str, Any]] | None
) -> list[Message]:
    """The messages with the fields that the template reads, if it reads some: tools as JSON in the
    system message, calls as the model writes them, and results in the role that it knows. For Kimi
    and Mistral, calls have ids as they know them. Where a template adds arguments to text, they are
    text. Where it shows only the first call of a message, as those of gpt-oss and Llama 3, each
    call has a message. Thoughts have the name that the template gives them."""
    if _THOUGHTS.search(template):
        messages = [_with_thoughts(m, _EITHER in template) for m in messages]
    if _FIRST_CALL.search(template) and not _EACH_CALL.search(template):
        messages = _with_one_call_each(messages)
    if _KIMI in template:
        messages = _with_ids(messages, lambda call, n: f"functions.{call['function']['name']}:{n}")
    elif _MISTRAL.search(template):
        messages = _with_ids(messages, lambda call, n: _of_mistral(str(call.get("id"))))
    if _JSON_TEXT.search(template):
        messages = [_with_json_text(m) for m in messages]
    field = _field_of(template)
    if field is None and _GLM.search(template) and "<|observation|>" in template:
        return [each for m in messages for each in _of_glm(m)]
    if field is None and _LFM in template and "tool_calls" not in template:
        return [_of_lfm(m) for m in messages]
    if field is None:
        return list(messages)
    found = [_with_calls(m, field) for m in messages]
    if tools:
        functions = json.dumps([tool.get("function", tool) for tool in tools], ensure_ascii=False)
        if not found or found[0].get("role") != "system":
            found.insert(0, {"role": "system", "content": _SYSTEM[field]})
        found[0] = {**found[0], field: functions}
    return found


def _with_thoughts(message: Message, is_either: bool) -> Message:
    """`is_either`: the template of gpt-oss refuses calls after both thoughts and content."""
    thoughts = message.get("reasoning_content")
    if not thoughts or (is_either and message.get("content") and message.get("tool_calls")):
        return message
    return {**message, "thinking": thoughts}


def _with_one_call_each(messages: Sequence[Message]) -> list[Message]:
    """A message for each call, with the result of that call behind it. The models of such templates
    make one call at a time and wait for its result, so this is what they would have seen. The first
    result without the id of a call belongs to the first call, the second to the second. What was
    said or thought before the calls stays in the first of these messages."""
    turns: list[tuple[Message, list[Message]]] = []
    for message in messages:
        if message.get("role") == "tool" and turns:
            turns[-1][1].append(message)
        else:
            turns.append((message, []))
    found: list[Message] = []
    for message, results in turns:
        calls = message.get("tool_calls")
        if not isinstance(calls, list) or len(calls) < 2:
            found += [message, *results]
            continue
        places = {call.get("id"): n for n, call in enumerate(calls)}
        if len(places) < len(calls):  # several share an id, or have none
            places = {}
        behind: list[list[Message]] = [[] for _ in calls]
        for n, result in enumerate(results):
            behind[min(places.get(result.get("tool_call_id"), n), len(calls) - 1)].append(result)
        for call, own in zip(calls, behind, strict=True):
            found += [{**message, "tool_calls": [call]}, *own]
            message = {"role": "assistant", "content": ""}
    return found


def _with_ids(
    messages: Sequence[Message], new_id: Callable[[Mapping[str, Any], int], str]
) -> list[Message]:
    """The messages with other ids of calls, and of their results. `new_id` gets a call and its
    number in the conversation."""
    found: list[Message] = []
    ids: dict[str, str] = {}
    num_calls = 0
    for message in messages:
        calls = message.get("tool_calls")
        if isinstance(calls, list):
            named = []
            for call in calls:
                named.append({**call, "id": new_id(call, num_calls)})
                ids[str(call.get("id"))] = named[-1]["id"]
                num_calls += 1
            message = {**message, "tool_calls": named}
        elif str(message.get("tool_call_id")) in ids:
            message = {**message, "tool_call_id": ids[str(message["tool_call_id"])]}
        found.append(message)
    return found


def _of_mistral(call_id: str) -> str:
    """Templates of Mistral refuse ids that are not nine letters and digits."""
    if re.fullmatch("[A-Za-z0-9]{9}", call_id):
        return call_id
    return hashlib.sha256(call_id.encode(errors="replace")).hexdigest()[:9]


def _with_json_text(message: Message) -> Message:
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    functions = [
        {**call["function"], "arguments": _as_json(call["function"]["arguments"])} for call in calls
    ]
    named = [{**call, "function": f} for call, f in zip(calls, functions, strict=True)]
    return {**message, "tool_calls": named}


def _as_json(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _with_calls(message: Message, field: str) -> Message:
    if field == "functions" and message.get("role") == "tool":
        return {**message, "role": "environment"}
    calls = message.get("tool_calls")
    if not isinstance(calls, list) or not calls:
        return message
    functions = [call["function"] for call in calls]
    content = message.get("content") or ""
    if field == "functions":
        text = "\n".join(_call_as_python(f) for f in functions)
        return {**message, "content": content, "function_calls": text}
    named = [{"name": f["name"], "arguments": f["arguments"]} for f in functions]
    text = json.dumps(named, ensure_ascii=False)
    return {**message, "content": f"{content}<|tool_call|>{text}<|/tool_call|>"}


def _of_glm(message: Message) -> list[Message]:
    """GLM-4-0414 has a message for each call, whose `metadata` is the name."""
    if message.get("role") == "tool":
        return [{**message, "role": "observation"}]
    calls = message.get("tool_calls")
    if not isinstance(calls, list) or not calls:
        return [message]
    found: list[Message] = []
    if message.get("content"):
        found.append({"role": "assistant", "content": message["content"]})
    for call in calls:
        name, arguments = call["function"]["name"], _as_json(call["function"]["arguments"])
        found.append({"role": "assistant", "metadata": name, "content": arguments})
    return found


def _of_lfm(message: Message) -> Message:
    """LFM2's first templates know of no calls, which are then a part of the content."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list) or not calls:
        return message
    text = ", ".join(_call_as_python(call["function"]) for call in calls)
    content = message.get("content") or ""
    return {**message, "content": f"{content}<|tool_call_start|>[{text}]<|tool_call_end|>"}


def _call_as_python(function: Mapping[str, Any]) -> str:
    arguments = function["arguments"]
    if isinstance(arguments, Mapping):
        pairs = arguments.items()
        arguments = ", ".join(f"{k}={json.dumps(v, ensure_ascii=False)}" for k, v in pairs)
    return f"{function['name']}({arguments})"

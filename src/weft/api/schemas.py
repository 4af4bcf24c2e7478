"""Bodies of requests for an answer. A field that is not served is refused, never ignored."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from weft.api.bodies import (
    ClosedBody,
    Conversation,
    Harmless,
    Message,
    NamedTool,
    OpenBody,
    ResponseFormat,
    StructuredBody,
    ToolChoice,
)
from weft.core.adapters import MAX_PARTS, MAX_SCALE
from weft.core.errors import InvalidRequest
from weft.core.sampling import StructuredOutputs

HARMLESS: dict[str, Harmless] = {
    "metadata": None,
    "prompt_cache_key": None,
    "prompt_cache_retention": None,
    "safety_identifier": None,
    "service_tier": None,
    "store": None,
    "user": None,
}
"""Known fields that change no token of the answer."""

_NOT_SERVED: dict[str, Harmless] = HARMLESS | {
    "audio": (),
    "best_of": (1,),
    "chat_template": (),
    "documents": ([],),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "length_penalty": (1,),
    "modalities": (["text"],),
    "prediction": (),
    "priority": (0,),
    "prompt_embeds": (),
    "reasoning_effort": (),
    "spaces_between_special_tokens": (True,),
    "use_beam_search": (False,),
    "verbosity": (),
    "web_search_options": (),
}
"""Fields of OpenAI's and vLLM's APIs that this version does not serve."""

_CHAT_NOT_SERVED = _NOT_SERVED | {
    "add_special_tokens": (False,),
    "echo": (False,),
    "include_reasoning": (True,),
}
_COMPLETION_NOT_SERVED = _NOT_SERVED | {
    "parallel_tool_calls": (True, False),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
}


class StreamOptions(OpenBody):
    include_usage: bool = False

    def check(self) -> None:
        known = {"continuous_usage_stats": (False,), "include_obfuscation": None}
        self.refuse_extra(known, "stream_options.")


class AdapterWeight(ClosedBody):
    """An adapter, and what its part of the sum is multiplied by."""

    name: str
    scale: float = Field(1.0, ge=-MAX_SCALE, le=MAX_SCALE)


CacheSalt = Annotated[
    str,
    Field(
        min_length=1,
        max_length=256,
        description="Cached prefixes are shared with one's own requests of the same salt alone.",
    ),
]

AdapterSum = Annotated[
    list[AdapterWeight],
    Field(
        min_length=1,
        max_length=MAX_PARTS,
        description="Adapters whose weighted sum answers; `model` then names the base model.",
    ),
]


class GenerationBody(OpenBody):
    """What chat and completion requests have in common."""

    model: str
    adapters: AdapterSum | None = None
    cache_salt: CacheSalt | None = None
    max_tokens: int | None = None
    n: int | None = None
    """Choices for each prompt."""
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    """By token id."""
    min_tokens: int | None = None
    bad_words: list[str] | None = None
    allowed_token_ids: list[int] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    prompt_logprobs: int | None = None
    truncate_prompt_tokens: int | None = None
    """Only so many tokens of the prompt are kept, its last; -1: as many as fit."""
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredBody | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    def check(self) -> None:
        """Raises InvalidRequest for fields that are unknown, not served, or at odds."""
        if self.stream_options is not None:
            if not self.stream:
                raise InvalidRequest("stream_options needs stream: true", "stream_options")
            self.stream_options.check()
        if self.prompt_logprobs is not None and self.stream:
            raise InvalidRequest("prompt_logprobs can't be streamed", "prompt_logprobs")

    def form(self) -> tuple[StructuredOutputs | None, str]:
        """The form asked for, and the field that asks for it. Raises InvalidRequest for two."""
        if self.guided_choice == []:
            raise InvalidRequest("guided_choice must not be empty", "guided_choice")
        asked: dict[str, ResponseFormat | StructuredBody | None] = {
            "response_format": self.response_format,
            "structured_outputs": self.structured_outputs,
        }
        for kind in ("json", "regex", "grammar", "choice"):
            if (value := getattr(self, f"guided_{kind}")) is not None:
                asked[f"guided_{kind}"] = StructuredBody(**{kind: value})
        forms = {name: each.to_structured() for name, each in asked.items() if each is not None}
        found = [(form, name) for name, form in forms.items() if form is not None]
        if len(found) > 1:
            (_, first), (_, second) = found[:2]
            raise InvalidRequest(f"{first} and {second} are both given; give one of them", second)
        return found[0] if found else (None, "")

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


class CompletionBody(GenerationBody):
    """`POST /v1/completions`."""

    prompt: str | list[int] | list[str] | list[list[int]]
    logprobs: int | None = None
    echo: bool | None = None
    add_special_tokens: bool | None = None

    def check(self) -> None:
        super().check()
        self.refuse_extra(_COMPLETION_NOT_SERVED)


class ChatBody(GenerationBody, Conversation):
    """`POST /v1/chat/completions`."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None

    def check(self) -> None:
        super().check()
        self.refuse_extra(_CHAT_NOT_SERVED)
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequest("top_logprobs needs logprobs: true", "top_logprobs")
        both = None not in (self.max_tokens, self.max_completion_tokens)
        if both and self.max_tokens != self.max_completion_tokens:
            raise InvalidRequest(
                "max_tokens and max_completion_tokens differ; give one of them", "max_tokens"
            )
        self.check_continuation(self.messages)
        self._check_tool_choice()

    @property
    def max_tokens_field(self) -> str | None:
        """The field in which the client set the length of the answer."""
        if self.max_completion_tokens is not None:
            return "max_completion_tokens"
        return None if self.max_tokens is None else "max_tokens"

    def _check_tool_choice(self) -> None:
        names = [tool.function.name for tool in self.tools or ()]
        if len(set(names)) < len(names):
            raise InvalidRequest("tools has two functions of one name", "tools")
        if self.tool_choice in (None, "none", "auto"):
            return
        if not names:
            raise InvalidRequest("tool_choice needs tools", "tool_choice")
        if isinstance(self.tool_choice, NamedTool) and self.tool_choice.function.name not in names:
            raise InvalidRequest(
                f"tool_choice names {self.tool_choice.function.name!r}, which is not in tools",
                "tool_choice",
            )

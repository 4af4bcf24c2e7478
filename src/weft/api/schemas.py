"""Bodies of requests. A field that is not served is refused by name, never ignored."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from weft.core.errors import InvalidRequest

_HARMLESS = frozenset(
    {
        "metadata",
        "prompt_cache_key",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
    }
)
"""Known fields that change no token of the answer."""

_NOT_SERVED: dict[str, tuple[Any, ...]] = {
    "add_special_tokens": (),
    "allowed_token_ids": (),
    "audio": (),
    "bad_words": ([],),
    "best_of": (1,),
    "cache_salt": (),
    "chat_template": (),
    "continue_final_message": (False,),
    "documents": ([],),
    "echo": (False,),
    "frequency_penalty": (0,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "min_p": (0,),
    "min_tokens": (0,),
    "modalities": (["text"],),
    "n": (1,),
    "parallel_tool_calls": (True, False),
    "prediction": (),
    "presence_penalty": (0,),
    "priority": (0,),
    "prompt_embeds": (),
    "prompt_logprobs": (),
    "reasoning_effort": (),
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
    "return_tokens_as_token_ids": (False,),
    "spaces_between_special_tokens": (True,),
    "structured_outputs": (),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "verbosity": (),
    "web_search_options": (),
}
"""Fields of OpenAI's and vLLM's APIs that this version does not serve, each with the values that
ask for nothing; null is always one of them."""

_MESSAGE_NOT_SERVED: dict[str, tuple[Any, ...]] = {
    "annotations": ([],),
    "audio": (),
    "function_call": (),
    "refusal": (),
    "tool_call_id": (),
    "tool_calls": ([],),
}


def _check_extra(
    extra: dict[str, Any] | None, not_served: dict[str, tuple[Any, ...]], prefix: str = ""
) -> None:
    for name, value in (extra or {}).items():
        if name not in not_served:
            raise InvalidRequest(f"unknown field: {prefix}{name}", prefix + name)
        if value is not None and value not in not_served[name]:
            raise InvalidRequest(f"{prefix}{name} is not supported by this version", prefix + name)


class _Body(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True)


class StreamOptions(_Body):
    include_usage: bool = False

    def check(self) -> None:
        extra = {k: v for k, v in (self.model_extra or {}).items() if k != "include_obfuscation"}
        _check_extra(extra, {"continuous_usage_stats": (False,)}, "stream_options.")


class GenerationBody(_Body):
    """What chat and completion requests have in common."""

    model: str
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    return_token_ids: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    def check(self) -> None:
        """Raises InvalidRequest for fields that are unknown or not served."""
        extra = {k: v for k, v in (self.model_extra or {}).items() if k not in _HARMLESS}
        _check_extra(extra, _NOT_SERVED)
        if self.stream_options is not None:
            if not self.stream:
                raise InvalidRequest("stream_options needs stream: true", "stream_options")
            self.stream_options.check()

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


class CompletionBody(GenerationBody):
    """`POST /v1/completions`."""

    prompt: str | list[int] | list[str] | list[list[int]]
    logprobs: int | None = None


class ContentPart(_Body):
    type: str
    text: str | None = None


class Message(_Body):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[ContentPart] | None = None
    name: str | None = None

    def to_template(self, index: int) -> dict[str, Any]:
        """The message as chat templates expect it: content is one string."""
        where = f"messages[{index}]."
        _check_extra(self.model_extra, _MESSAGE_NOT_SERVED, where)
        named = {} if self.name is None else {"name": self.name}
        return {"role": self.role, "content": self._text(where), **named}

    def _text(self, where: str) -> str:
        if self.content is None or isinstance(self.content, str):
            return self.content or ""
        texts: list[str] = []
        for n, part in enumerate(self.content):
            if part.type != "text" or part.text is None:
                raise InvalidRequest(
                    f"content of type {part.type!r} is not supported, only text",
                    f"{where}content[{n}].type",
                )
            _check_extra(part.model_extra, {}, f"{where}content[{n}].")
            texts.append(part.text)
        return "\n".join(texts)


class ChatBody(GenerationBody):
    """`POST /v1/chat/completions`."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] | None = None

    def check(self) -> None:
        super().check()
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequest("top_logprobs needs logprobs: true", "top_logprobs")
        both = None not in (self.max_tokens, self.max_completion_tokens)
        if both and self.max_tokens != self.max_completion_tokens:
            raise InvalidRequest(
                "max_tokens and max_completion_tokens differ; give one of them", "max_tokens"
            )


class LoadBody(BaseModel):
    """`POST /v1/load_lora_adapter`. Controllers send more fields than these; they are ignored."""

    model_config = ConfigDict(extra="ignore", strict=True)
    lora_name: str = Field(min_length=1)
    lora_path: str = Field(min_length=1)
    load_inplace: bool = False
    is_3d_lora_weight: bool = False

    def check(self) -> None:
        if self.is_3d_lora_weight:
            raise InvalidRequest(
                "is_3d_lora_weight is not supported by this version", "is_3d_lora_weight"
            )


class UnloadBody(BaseModel):
    """`POST /v1/unload_lora_adapter`."""

    model_config = ConfigDict(extra="ignore", strict=True)
    lora_name: str = Field(min_length=1)

"""Bodies of requests that generate text. A field that would change it, but is not served, fails."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from weft.api.bodies import (
    MAX_MESSAGES,
    OTHER_NAMES,
    ClosedBody,
    Conversation,
    Known,
    Message,
    NamedTool,
    OpenBody,
    ResponseFormat,
    StructuredBody,
    Take,
    TextOr,
    ToolChoice,
    bounded,
    ignored_fields,
    is_id,
)
from weft.core.adapters import MAX_PARTS, MAX_SCALE
from weft.core.errors import InvalidRequest
from weft.core.sampling import MAX_BAD_WORDS, MAX_STOP_STRINGS, StructuredOutputs

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
"""How much a model is to think before it answers."""

HARMLESS: dict[str, Known] = {
    "metadata": Take.SILENTLY,
    "mm_processor_kwargs": Take.SILENTLY,
    "prediction": Take.SILENTLY,
    "priority": Take.NAMED,
    "prompt_cache_key": Take.SILENTLY,
    "prompt_cache_options": Take.SILENTLY,
    "prompt_cache_retention": Take.SILENTLY,
    "safety_identifier": Take.SILENTLY,
    "service_tier": Take.SILENTLY,
    "store": Take.SILENTLY,
    "user": Take.SILENTLY,
    "verbosity": Take.NAMED,
}
"""Fields that change no token of the answer. `verbosity` would, if it were more than a hint."""

_KNOWN: dict[str, Known] = HARMLESS | {
    "audio": (),
    "best_of": (1,),
    "custom_logit_processor": (),
    "detokenize": (True,),
    "documents": ([],),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "guided_json_object": (False,),
    "guided_whitespace_pattern": (),
    "kv_transfer_params": ({},),
    "length_penalty": (1,),
    "logits_processors": ([],),
    "modalities": (["text"],),
    "no_stop_trim": (False,),
    "prompt_embeds": (),
    "repetition_detection": (),
    "return_hidden_states": (False,),
    "separate_reasoning": (True,),
    "spaces_between_special_tokens": (True,),
    "stop_regex": ([],),
    "thinking_token_budget": (),
    "use_beam_search": (False,),
    "vllm_xargs": Take.NAMED,
    "web_search_options": (),
}
"""Fields of OpenAI's, vLLM's and SGLang's APIs that are not declared below."""

_KNOWN_IN_CHATS = _KNOWN | {
    "add_special_tokens": (False,),
    "echo": (False,),
    "include_reasoning": (True,),
}
OF_CHATS: dict[str, Known] = _KNOWN_IN_CHATS | {
    "add_generation_prompt": (True,),
    "allowed_token_ids": (),
    "bad_words": ([],),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "ebnf": (),
    "enable_thinking": (),
    "frequency_penalty": (0,),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "ignore_eos": (False,),
    "include_stop_str_in_output": (False,),
    "json_schema": (),
    "logit_bias": ({},),
    "max_completion_tokens": (),
    "max_tokens": (),
    "min_p": (0,),
    "min_tokens": (0,),
    "n": (1,),
    "presence_penalty": (0,),
    "regex": (),
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
    "seed": (),
    "skip_special_tokens": (True,),
    "stop": ([],),
    "stop_token_ids": ([],),
    "structured_outputs": (),
    "top_k": (0, -1),
    "truncate_prompt_tokens": (),
}
"""Fields that chats know, and those they serve that would change the answer: for bodies which are
read as chats, but declare fewer fields."""

_KNOWN_IN_COMPLETIONS = _KNOWN | {
    "chat_template": (),
    "enable_thinking": Take.NAMED,
    "max_completion_tokens": (),
    "parallel_tool_calls": (True, False),
    "reasoning_effort": Take.NAMED,
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
}

MAX_PROMPTS = 1024
MAX_LOGIT_BIASES = 1024
MAX_STOP_IDS = 1024
MAX_ALLOWED_IDS = 16_384


class StreamOptions(OpenBody):
    known = {"include_obfuscation": Take.SILENTLY}  # noqa: RUF012

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    """Whether each event of a choice has its usage so far."""


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


class ModelBody(OpenBody):
    """What all requests to a model have in common."""

    model: str
    adapters: AdapterSum | None = None
    lora_path: str | None = None
    """SGLang's name for the adapter; `model` then names that too, or the base."""
    cache_salt: CacheSalt | None = None

    def ignored(self, strict: bool) -> list[str]:
        return ignored_fields(self.model_extra, {**self.known, **OTHER_NAMES}, strict=strict)


class GenerationBody(ModelBody):
    """What chat and completion requests have in common."""

    request_id: str | None = None
    """The id of the answer."""
    rid: str | list[str] | None = None
    """SGLang's name of it."""
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
    logit_bias: Annotated[dict[str, float], Field(max_length=MAX_LOGIT_BIASES)] | None = None
    """By token id."""
    min_tokens: int | None = None
    bad_words: Annotated[list[str], bounded(MAX_BAD_WORDS)] | None = None
    allowed_token_ids: Annotated[list[int], bounded(MAX_ALLOWED_IDS, least=1)] | None = None
    seed: int | None = None
    stop: TextOr[Annotated[list[str], bounded(MAX_STOP_STRINGS)]] | None = None
    stop_token_ids: Annotated[list[int], bounded(MAX_STOP_IDS)] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    prompt_logprobs: int | None = None
    truncate_prompt_tokens: int | None = None
    """Only so many tokens of the prompt are kept, its last; -1: as many as fit."""
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredBody | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: Annotated[list[str], Field(fail_fast=True)] | None = None
    guided_grammar: str | None = None
    regex: str | None = None
    ebnf: str | None = None
    json_schema: dict[str, Any] | str | None = None
    speculative: str | None = None
    """Whether and how the next tokens are guessed, which only changes the speed: off, ngram or mtp;
    by default as the server's --speculative says."""
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    def ignored(self, strict: bool) -> list[str]:
        names = super().ignored(strict)
        for name in ("request_id", "rid"):
            given = getattr(self, name)
            if given is not None and not is_id(given):
                names.append(name)
        options = self.stream_options
        if options is not None:
            names += ignored_fields(options.model_extra, options.known, "stream_options.", strict)
        return names

    def check(self) -> None:
        """Raises InvalidRequest for fields that are at odds."""
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options needs stream: true", "stream_options")
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
        for name, kind in (("regex", "regex"), ("ebnf", "grammar"), ("json_schema", "json")):
            if (value := getattr(self, name)) is not None:
                asked[name] = StructuredBody(**{kind: value})
        forms = {name: each.to_structured() for name, each in asked.items() if each is not None}
        found = [(form, name) for name, form in forms.items() if form is not None]
        if len(found) > 1:
            (_, first), (_, second) = found[:2]
            raise InvalidRequest(f"{first} and {second} are both given; give one of them", second)
        return found[0] if found else (None, "")

    @property
    def answer_id(self) -> str | None:
        """What the client calls its answer, if it may be called that."""
        return next((each for each in (self.request_id, self.rid) if is_id(each)), None)

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def usage_in_all(self) -> bool:
        return bool(self.stream_options and self.stream_options.continuous_usage_stats)


def _kind_of_prompt(prompt: Any) -> str:
    """Which of a prompt's forms is meant, by its first item, so that one alone is read."""
    if not isinstance(prompt, list):
        return "<text>"
    first = prompt[0] if prompt else 0
    return (
        "<texts>" if isinstance(first, str) else "<lists>" if isinstance(first, list) else "<ids>"
    )


TokenIds = Annotated[list[int], Field(fail_fast=True)]
Prompt = Annotated[
    Annotated[str, Tag("<text>")]
    | Annotated[TokenIds, Tag("<ids>")]
    | Annotated[list[str], bounded(MAX_PROMPTS), Tag("<texts>")]
    | Annotated[list[TokenIds], bounded(MAX_PROMPTS), Tag("<lists>")],
    Discriminator(_kind_of_prompt),
]


def texts_or_ids(prompt: Prompt, field: str) -> tuple[list[str], list[list[int]]]:
    """The texts of a prompt, or else its lists of token ids; the other is empty. Raises
    InvalidRequest if both are."""
    given = [prompt] if isinstance(prompt, str) else prompt
    if not given:
        raise InvalidRequest(f"{field} must not be empty", field)
    if isinstance(given[0], str):
        return given, []
    return [], [given] if isinstance(given[0], int) else given


class CompletionBody(GenerationBody):
    """`POST /v1/completions`."""

    known = _KNOWN_IN_COMPLETIONS

    prompt: Prompt
    logprobs: int | None = None
    echo: bool | None = None
    add_special_tokens: bool | None = None


class ChatBody(GenerationBody, Conversation):
    """`POST /v1/chat/completions`."""

    known = _KNOWN_IN_CHATS

    messages: Annotated[list[Message], bounded(MAX_MESSAGES, least=1)]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Effort | None = None
    enable_thinking: bool | None = None
    """Whether the model thinks before it answers, if its chat template lets one choose."""
    chat_template: str | None = None

    def check(self) -> None:
        super().check()
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

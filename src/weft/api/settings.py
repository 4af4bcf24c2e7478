"""The operator's settings of the HTTP server."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from weft.api.callers import caller_var, fairness_var
from weft.core.errors import ConfigError
from weft.core.tenants import Tenant
from weft.serving.embedding import DECODER, EmbeddingRule
from weft.text.reasoning import REASONING
from weft.text.tools import TOOL_FORMATS

_ORIGIN = re.compile(r"\*|null|[a-z][a-z0-9+.-]*://[^/?#\s]+")
_NAMED = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]{0,63})?=(?!=*$)(.+)")


class ApiKey(NamedTuple):
    """A key that requests may carry."""

    secret: str
    name: str
    """The tenant; "": none."""


def parse_key(text: str, source: str = "--api-key") -> ApiKey:
    """A key as an operator writes it. Raises ConfigError, which names the `source`.

        --api-key KEY         a key without a name
        --api-key NAME=KEY    one of the tenant NAME
        --api-key =KEY        one without a name that holds a "=" itself

    What ends in "=" and has no other, as base64 does, is a key without a name too.
    """
    named = _NAMED.fullmatch(text)
    name, secret = (named[1] or "", named[2]) if named else ("", text)
    if not (secret and secret.isascii() and secret.isprintable()):
        raise ConfigError(f"each key of {source} must be printable ASCII and not empty", "api_key")
    return ApiKey(secret, name)


@dataclass(frozen=True, slots=True)
class ApiSettings:
    """The operator's settings. Raises ConfigError when a value is out of range."""

    served_model_names: tuple[str, ...]
    """Names of the base model; the first is the one that answers and adapters' cards give."""
    max_open: int = 1280
    """Engine requests that may be open at a time: run or wait. Further ones are refused."""
    request_timeout_s: float | None = None
    """How long the answer to one request may take; None: as long as it wants."""
    api_keys: tuple[str, ...] = ()
    """With any, requests must carry one of them. As `parse_key` reads them."""
    tenants: Mapping[str, Tenant] = field(default_factory=dict)
    """Who shares the server, by name; by default those that keys are named after. It may change
    while the server runs."""
    page: bool = True
    """Whether there is a page for people at `/`."""
    metrics_apart: bool = False
    """Whether metrics are not served here, but on an address of their own."""
    allowed_origins: tuple[str, ...] = ()
    max_body_bytes: int = 1 << 20
    """A larger body is refused: reading one holds up everybody."""
    response_store_bytes: int = 64 << 20
    """Memory for responses that a next request may go on from; 0: none are kept."""
    strict_fields: bool = False
    """Whether unknown fields are refused instead of named as ignored."""
    allow_request_templates: bool = False
    """Whether requests may bring a chat template of their own."""
    max_prompts: int = 1024
    """Prompts of one completion request, each counted `n` times."""
    max_choices: int = 128
    """Choices (`n`) of one prompt."""
    max_step_logprobs: int = 4096
    """Log-probabilities that one request may ask for in a step: its sequences x (logprobs + 1)."""
    max_prompt_logprobs: int = 1 << 18
    """Log-probabilities of one request's prompts: their tokens x n x (prompt_logprobs + 1)."""
    long_text_chars: int = 10_000
    """Texts beyond this are tokenized on a thread, off the event loop."""
    embedding: EmbeddingRule = DECODER
    """How hidden states of the model become vectors."""
    sampling_defaults: Mapping[str, float] = field(default_factory=dict)
    """The model's own defaults of some fields of `SamplingParams`, which requests get that do not
    give these fields: see `weft.models.config.sampling_defaults`."""
    default_max_tokens: int = 16
    """What completions get by default; chats get the rest of the context."""
    tool_call_parser: str | None = "auto"
    """A name in TOOL_FORMATS; auto: as the chat template shows; None: the model calls no tools."""
    reasoning_parser: str | None = "auto"
    """A name in REASONING; auto: as the chat template shows; None: the model does not mark it."""

    def __post_init__(self) -> None:
        for name in ("served_model_names", "api_keys", "allowed_origins"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        if not self.served_model_names or not all(self.served_model_names):
            raise ConfigError("--served-model-name must not be empty", "served_model_name")
        named = sorted({parse_key(key).name for key in self.api_keys} - {""})
        if named and not self.tenants:
            object.__setattr__(self, "tenants", {name: Tenant(name) for name in named})
        for origin in self.allowed_origins:
            if not _ORIGIN.fullmatch(origin):
                message = "--allowed-origins must be * or like https://page.example without a path"
                raise ConfigError(f"{message}, got {origin!r}", "allowed_origins")
        if self.request_timeout_s is not None and not self.request_timeout_s > 0:
            raise ConfigError(
                f"--request-timeout must be more than 0, got {self.request_timeout_s:g}",
                "request_timeout",
            )
        if self.tool_call_parser not in (None, "auto", *TOOL_FORMATS):
            names = ", ".join(["auto", *TOOL_FORMATS])
            raise ConfigError(f"--tool-call-parser must be one of {names}", "tool_call_parser")
        if self.reasoning_parser not in (None, "auto", *REASONING):
            names = ", ".join(["auto", *REASONING])
            raise ConfigError(f"--reasoning-parser must be one of {names}", "reasoning_parser")
        sizes = ("max_open", "max_body_bytes", "max_prompts", "max_choices", "default_max_tokens")
        for name in sizes:
            if getattr(self, name) < 1:
                shown = "--max-body-size" if name == "max_body_bytes" else name
                raise ConfigError(f"{shown} must be at least 1", name)

    def tenant_of(self, adapter: str | None) -> str:
        """The tenant of a request for an adapter by name (None: for the base). Where tenants are
        configured it is that of the request's key, and all others are one, "". Else it is what
        the request's header FAIRNESS says; or, without it, what the adapter's name has before the
        first "/", or all of it; a sum is the first one's."""
        if self.tenants:
            caller = caller_var.get()
            return caller.tenant if caller and caller.tenant in self.tenants else ""
        return fairness_var.get() or (adapter or "").partition(",")[0].partition("/")[0]

"""What an operator can set about the HTTP side."""

from __future__ import annotations

from dataclasses import dataclass

from weft.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ApiSettings:
    """Raises ConfigError when a value is out of range."""

    served_model_names: tuple[str, ...]
    """Names of the base model; the first is the one that answers and adapters' cards give."""
    max_body_bytes: int = 32 << 20
    max_prompts: int = 1024
    """Prompts of one completion request."""
    long_text_chars: int = 10_000
    """Texts beyond this are tokenized on a thread, off the event loop."""
    default_max_tokens: int = 16
    """Of completions; a chat's default is the rest of the context."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "served_model_names", tuple(self.served_model_names))
        if not self.served_model_names or not all(self.served_model_names):
            raise ConfigError("--served-model-name must not be empty", "served_model_name")
        for name in ("max_body_bytes", "max_prompts", "default_max_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1", name)

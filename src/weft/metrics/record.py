"""What is known of a request to the engine when it has ended, for its log line and its trace."""

from __future__ import annotations

from dataclasses import dataclass

from weft.core.adapters import AdapterRef
from weft.core.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One request to the engine that has ended. Times are seconds from `start_unix_s`, or None
    where it did not get that far."""

    request_id: str
    model: str
    """The base's name, or the adapter's."""
    adapter: AdapterRef | None
    params: SamplingParams
    start_unix_s: float
    duration_s: float
    queue_s: float | None
    """Seconds from the engine's receipt of the request to its first step."""
    first_token_s: float | None
    last_token_s: float | None
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    finish_reason: str
    """stop, length, abort or error."""
    error: str | None = None
    """The error's kind."""

"""One request to an OpenAI-compatible server, streamed, with the times of what came back."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import httpx

from weft.core.errors import ConfigError

Endpoint = Literal["completions", "chat"]

NOT_SENT, TIMEOUT = "not_sent", "timeout"
_FAILED = ("error", "abort")
"""Finish reasons that tell of a failed answer."""


@dataclass(slots=True)
class Outcome:
    """What became of one request. Times in seconds from the run's start."""

    model: str
    due_s: float
    """When it was to be sent: latency counts from then, also if the client itself was late."""
    sent_s: float | None = None
    chunk_s: list[float] = field(default_factory=list)
    """When each chunk with output came."""
    end_s: float | None = None
    num_tokens: int = 0
    """Output tokens as the server counts them, or the number of chunks if it does not say."""
    error: str | None = NOT_SENT
    """The kind of failure; None only after a complete answer."""
    detail: str = ""


class Failed(Exception):
    """The server's answer is an error, or breaks off."""

    def __init__(self, kind: str, detail: str = "") -> None:
        super().__init__(f"{kind}: {detail}")
        self.kind = kind
        self.detail = " ".join(detail.split())[:200]


class LoadClient:
    """A connection pool to one server, without a limit of its own on what is open."""

    def __init__(self, url: str, api_key: str | None) -> None:
        base = url.rstrip("/").removesuffix("/v1")
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        self._http = httpx.AsyncClient(
            base_url=f"{base}/v1/", headers=headers, timeout=None, limits=limits
        )

    async def __aenter__(self) -> LoadClient:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._http.aclose()

    async def models(self) -> list[tuple[str, bool]]:
        """All models that the server lists, each with whether it is an adapter. Raises
        ConfigError."""
        try:
            response = await self._http.get("models", timeout=30)
            response.raise_for_status()
            return [(str(m["id"]), m.get("parent") is not None) for m in response.json()["data"]]
        except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError, TypeError) as error:
            reason = str(error) or type(error).__name__
            url = f"{self._http.base_url}models"
            raise ConfigError(f"{url} does not list models: {reason}", "url") from error

    async def ask(
        self,
        endpoint: Endpoint,
        body: dict[str, object],
        outcome: Outcome,
        now: Callable[[], float],
    ) -> None:
        """Send a request and record in `outcome` what comes back. A cancelled call records a time-
        out."""
        outcome.sent_s = now()
        outcome.error = TIMEOUT
        path = "chat/completions" if endpoint == "chat" else "completions"
        try:
            async with self._http.stream("POST", path, json=body) as response:
                if response.status_code != httpx.codes.OK:
                    text = (await response.aread()).decode(errors="replace")
                    raise Failed(f"http_{response.status_code}", text)
                await _read(response, outcome, now)
            outcome.error = None
        except Failed as failed:
            outcome.error, outcome.detail = failed.kind, failed.detail
        except httpx.HTTPError as error:
            outcome.error, outcome.detail = _kind(error), str(error)
        outcome.end_s = now()


async def _read(response: httpx.Response, outcome: Outcome, now: Callable[[], float]) -> None:
    """Read an answer up to [DONE]. Raises Failed unless it has a finish reason before that."""
    finished = done = False
    num_tokens: int | None = None
    async for event in _events(response):
        if event == "[DONE]":
            done = True
            continue
        chunk = _parse(event)
        choice = _choice_of(chunk)
        reason = choice.get("finish_reason")
        if reason in _FAILED:
            raise Failed("stream_error", f"finish_reason {reason}")
        finished = finished or reason is not None
        # Tokens without text, such as special ones, are output too: the end shows them.
        if _has_output(choice) or (reason is not None and not outcome.chunk_s):
            outcome.chunk_s.append(now())
        num_tokens = (chunk.get("usage") or {}).get("completion_tokens", num_tokens)
    if not (finished and done):
        raise Failed("cut", "the stream ended before the answer did")
    outcome.num_tokens = len(outcome.chunk_s) if num_tokens is None else int(num_tokens)
    if outcome.num_tokens == 0:
        raise Failed("empty", "the answer has no tokens")


async def _events(response: httpx.Response) -> AsyncIterator[str]:
    """The data of each server-sent event. Weft's events are one line each."""
    async for line in response.aiter_lines():
        if line.startswith("data:"):
            yield line.removeprefix("data:").strip()


def _parse(event: str) -> dict[str, Any]:
    try:
        chunk = json.loads(event)
    except ValueError:
        raise Failed("bad_stream", event) from None
    if not isinstance(chunk, dict):
        raise Failed("bad_stream", event)
    if chunk.get("error"):
        raise Failed("stream_error", json.dumps(chunk["error"]))
    return chunk


def _choice_of(chunk: dict[str, Any]) -> dict[str, Any]:
    choices = chunk.get("choices") or [{}]
    return choices[0] if isinstance(choices[0], dict) else {}


def _has_output(choice: dict[str, Any]) -> bool:
    delta = choice.get("delta") or {}
    texts = (delta.get(k) for k in ("content", "reasoning_content", "reasoning", "tool_calls"))
    return bool(choice.get("text") or choice.get("token_ids") or any(texts))


def _kind(error: httpx.HTTPError) -> str:
    if isinstance(error, httpx.ConnectError):
        return "connect"
    if isinstance(error, httpx.RemoteProtocolError | httpx.ReadError):
        return "cut"
    return type(error).__name__

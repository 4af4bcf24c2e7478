"""One request to an OpenAI-compatible server, streamed, with the times of what came back."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, Literal

from aiohttp import (
    ClientConnectorError,
    ClientError,
    ClientOSError,
    ClientPayloadError,
    ClientResponse,
    ClientSession,
    ClientTimeout,
    InvalidURL,
    ServerDisconnectedError,
    TCPConnector,
)
from aiohttp.http_exceptions import HttpProcessingError

from weft.core.errors import ConfigError
from weft.terminal.options import refusal_of

Endpoint = Literal["completions", "chat"]

NOT_SENT, TIMEOUT = "not_sent", "timeout"
_FAILED = ("error", "abort")
"""Finish reasons that tell of a failed answer."""
CONNECT_S, LIST_S = 30.0, 30.0
"""How long a connection, and the list of models, may take."""
MAX_LINE_BYTES = 1 << 20
"""The longest line of an answer, about."""


@dataclass(slots=True)
class Outcome:
    """What became of one request. Times in seconds from the run's start."""

    model: str
    due_s: float
    """When it should have been sent: latency counts from then, even if the client was late."""
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
        self._url = f"{url.rstrip('/').removesuffix('/v1')}/v1"
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}

    async def __aenter__(self) -> LoadClient:
        self._http = ClientSession(
            connector=TCPConnector(limit=0),
            headers=self._headers,
            timeout=ClientTimeout(total=None, sock_connect=CONNECT_S),
            read_bufsize=MAX_LINE_BYTES,
            trust_env=True,
        )
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._http.close()

    async def models(self) -> list[tuple[str, bool]]:
        """All models that the server lists, each with whether it is an adapter. Raises
        ConfigError."""
        url = f"{self._url}/models"
        try:
            limit = ClientTimeout(total=LIST_S)
            async with self._http.get(url, raise_for_status=True, timeout=limit) as response:
                listed = await response.json(content_type=None)
            return [(str(m["id"]), m.get("parent") is not None) for m in listed["data"]]
        except (ClientError, TimeoutError, ValueError, KeyError, TypeError) as error:
            bad = isinstance(error, InvalidURL)
            reason = "it is no URL" if bad else str(error) or type(error).__name__
            message = f"{url} does not list models: {reason}"
            raise ConfigError(refusal_of(getattr(error, "status", 0), message), "url") from error

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
            async with self._http.post(f"{self._url}/{path}", json=body) as response:
                if response.status != HTTPStatus.OK:
                    text = await response.text(errors="replace")
                    raise Failed(f"http_{response.status}", text)
                await _read(response, outcome, now)
            outcome.error = None
        except Failed as failed:
            outcome.error, outcome.detail = failed.kind, failed.detail
        except ClientError as error:
            outcome.error, outcome.detail = _kind(error), str(error)
        except (HttpProcessingError, ValueError, LookupError, TypeError, AttributeError) as error:
            # A line is too long, or a field is not what its name says.
            outcome.error, outcome.detail = "bad_stream", repr(error)[:200]
        outcome.end_s = now()


async def _read(response: ClientResponse, outcome: Outcome, now: Callable[[], float]) -> None:
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


async def _events(response: ClientResponse) -> AsyncIterator[str]:
    """The data of each server-sent event. Weft's events are one line each."""
    async for line in response.content:
        if line.startswith(b"data:"):
            yield line.removeprefix(b"data:").strip().decode(errors="replace")


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


def _kind(error: ClientError) -> str:
    if isinstance(error, ClientConnectorError):
        return "connect"
    if isinstance(error, ClientOSError | ClientPayloadError | ServerDisconnectedError):
        return "cut"
    return type(error).__name__

"""`weft chat`: talk to a model of a running server, in the terminal."""

from __future__ import annotations

import contextlib
import io
import json
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from weft.cli.asking import in_path, plain_url, unreachable
from weft.core.errors import InvalidRequest, WeftError
from weft.terminal.options import ApiKey, ending_in_one_line, refusal_of
from weft.terminal.plain import plain

if TYPE_CHECKING:
    import httpx

_COMMANDS = """/model NAME  talk to another adapter, or to the base
/models      list the models
/new         begin a new conversation
/quit        end; so does Ctrl-D"""


def chat(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL", help="An adapter, or the base. Default: the server's base."
        ),
    ] = None,
    url: Annotated[
        str, typer.Option(metavar="URL", help="The server's address.")
    ] = "http://127.0.0.1:8000",
    system: Annotated[
        str | None, typer.Option(metavar="TEXT", help="The system message of the conversation.")
    ] = None,
    temperature: Annotated[
        float | None,
        typer.Option(
            metavar="T",
            help="Sampling temperature. 0: always the most likely token. Default: the server's.",
            min=0,
            max=100,
        ),
    ] = None,
    api_key: ApiKey = None,
) -> None:
    """Talk to a model of a running server.

    Each line is a message. /help lists commands. Ctrl-C stops an answer.
    """
    import httpx

    with ending_in_one_line():
        headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        timeout = httpx.Timeout(60, read=600)
        try:
            connected = httpx.Client(base_url=plain_url(url), headers=headers, timeout=timeout)
        except (httpx.InvalidURL, ValueError) as error:
            raise unreachable(plain_url(url), error) from None
        if isinstance(sys.stdin, io.TextIOWrapper):
            sys.stdin.reconfigure(errors="replace")
        with connected as client:
            talk = Talk(client, model, system, temperature)
            if _is_terminal():
                with contextlib.suppress(ImportError):
                    import readline  # noqa: F401  lines can be edited and called up again
                typer.echo(f"{plain(talk.model)} at {plain_url(url)}; /help lists the commands")
            for line in _lines():
                try:
                    if not _obey(talk, line):
                        break
                except WeftError as error:
                    typer.echo(f"error: {plain(error.message)}", err=True)


def _is_terminal() -> bool:
    """Whether somebody types. There may be no stdin at all."""
    return sys.stdin is not None and sys.stdin.isatty()


def _lines() -> Iterator[str]:
    """What the user types, line by line, until the end."""
    while True:
        try:
            line = input("> " if _is_terminal() else "").strip()
        except (EOFError, RuntimeError):  # the latter without stdin
            return
        except KeyboardInterrupt:
            typer.echo()
            continue
        if line:
            yield line


def _obey(talk: Talk, line: str) -> bool:
    """Answer a message, or do what a command says. False: it was the last."""
    command, _, rest = line.partition(" ")
    match command:
        case "/quit":
            return False
        case "/help":
            typer.echo(_COMMANDS)
        case "/models":
            typer.echo("\n".join(plain(name) for name in talk.models()))
        case "/new":
            talk.messages.clear()
        case "/model":
            talk.choose(rest.strip())
        case _ if line.startswith("/"):
            raise InvalidRequest(f"there is no {command}; /help lists the commands")
        case _:
            for piece in talk.ask(line):
                typer.echo(plain(piece), nl=False)
            typer.echo()
    return True


class Talk:
    """The messages so far, and the model that answers the next one."""

    def __init__(
        self, client: httpx.Client, model: str | None, system: str | None, temperature: float | None
    ) -> None:
        """Raises what `choose` raises."""
        self._client = client
        self._system = [{"role": "system", "content": system}] if system else []
        self._options = {} if temperature is None else {"temperature": temperature}
        self.messages: list[dict[str, str]] = []
        self.model = ""
        names = [model] if model else self.models()
        if not names:
            raise InvalidRequest("the server lists no models")
        self.choose(names[0])

    def models(self) -> list[str]:
        """The names of the server's models, the base first. Raises Unreachable, InvalidRequest."""
        with self._reaching():
            return [str(card["id"]) for card in self._get("/v1/models")["data"]]

    def choose(self, model: str) -> None:
        """Let this model answer from now on. Raises Unreachable, InvalidRequest."""
        if model:
            with self._reaching():
                self.model = str(self._get(f"/v1/models/{in_path(model)}")["id"])

    def ask(self, message: str) -> Iterator[str]:
        """The pieces of the answer to a message. Both are part of the conversation when the answer
        has ended, or was stopped by Ctrl-C. Raises Unreachable, InvalidRequest."""
        told = {"role": "user", "content": message}
        body = {
            "model": self.model,
            "messages": [*self._system, *self.messages, told],
            "stream": True,
            **self._options,
        }
        said = ""
        with contextlib.suppress(KeyboardInterrupt):
            for piece in self._stream(body):
                said += piece
                yield piece
        self.messages += [told, {"role": "assistant", "content": said}]

    def _stream(self, body: dict[str, Any]) -> Iterator[str]:
        with (
            self._reaching(),
            self._client.stream("POST", "/v1/chat/completions", json=body) as answer,
        ):
            if answer.is_error:
                answer.read()
                raise _refusal(answer)
            for line in answer.iter_lines():
                data = line.removeprefix("data: ")
                if not data or data == "[DONE]":
                    continue
                event = json.loads(data)
                if "error" in event:
                    raise InvalidRequest(event["error"]["message"])
                for choice in event["choices"]:
                    yield choice["delta"].get("content") or ""

    def _get(self, path: str) -> dict[str, Any]:
        with self._reaching():
            answer = self._client.get(path)
            if answer.is_error:
                raise _refusal(answer)
            found: dict[str, Any] = answer.json()
            return found

    @contextlib.contextmanager
    def _reaching(self) -> Iterator[None]:
        import httpx

        try:
            yield
        except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
            raise unreachable(str(self._client.base_url), error) from None
        except (KeyError, TypeError, AttributeError):
            message = f"{self._client.base_url} does not answer as OpenAI's API does"
            raise InvalidRequest(message) from None


def _refusal(answer: httpx.Response) -> InvalidRequest:
    try:
        message = str(answer.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        message = f"the server answers with status {answer.status_code}"
    return InvalidRequest(refusal_of(answer.status_code, message))

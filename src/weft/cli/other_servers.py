"""Finds the server of another project in a line that is typed into a shell."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from weft.core.errors import ConfigError

VARIABLES = {
    "VLLM_API_KEY": "keys come from the variable WEFT_API_KEY or from --api-key",
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "name the folder of the adapters by --lora-root, and"
    " clients may load them from below it",
    "VLLM_LORA_RESOLVER_CACHE_DIR": "name the folder of the adapters by --lora-root, and clients"
    " load them by /v1/load_lora_adapter",
}
"""Variables of the environment that Weft does not read, and what to do instead."""

SERVERS = {
    "vllm": ("vLLM", True, 8000),
    "sglang": ("SGLang", False, 30000),
    "lorax": ("LoRAX", True, 3000),
}
"""The servers' names; whether they listen on all addresses without a flag, and on which port."""

_CONTAINERS = {"docker", "podman", "nerdctl"}
_SHELLS = {"sh", "bash", "dash", "zsh"}
_SERVE = {("vllm", "serve"), ("sglang", "serve")}
_MODULES = re.compile(
    r"(vllm|sglang)(\.entrypoints\.(openai\.)?api_server|(_router)?\.launch_server)"
)
_IMAGE = re.compile(
    r"[\w.-]+(:\d+)?(/[\w.-]+)*/[\w.-]*(vllm|sglang|lorax)[\w.-]*(:[\w.-]+)?(@[\w:]+)?"
)
_ALONE = {"-d", "-i", "-it", "-t", "--detach", "--init", "--privileged", "--read-only", "--rm"}
"""Flags of containers that take no value."""
_BETWEEN = {"&&", "||", "|", "&"}
"""What stands between commands, beside a semicolon."""
_REDIRECTION = re.compile(r"(\d*|&)(>>?|<)(.*)")
_VARIABLE = re.compile(r"(?:--env=|-e)?([A-Za-z_]\w*)(?:=.*)?", re.DOTALL)


@dataclass(frozen=True, slots=True)
class ServerCommand:
    """A server's arguments, and what comes before it."""

    server: str
    """A key of SERVERS."""
    args: list[str]
    in_container: bool = False
    variables: list[str] = field(default_factory=list)
    """Those of VARIABLES that are set."""
    expanded: list[str] = field(default_factory=list)
    """Words of the line that contain variables, which a shell would expand."""


def server_command(line: str) -> ServerCommand:
    """The first server that the line starts. Raises ConfigError."""
    if line.lstrip().startswith("["):
        raise ConfigError("write the command as for a shell, and not as a list", "command")
    words, expanded = _words(line)
    for command in _commands(words):
        found = _server(command, in_container=False)
        if found is not None:
            named = (_VARIABLE.fullmatch(word) for word in words)
            names = dict.fromkeys(name[1] for name in named if name and name[1] in VARIABLES)
            return ServerCommand(found.server, found.args, found.in_container, [*names], expanded)
    raise ConfigError("the command starts neither vLLM nor SGLang nor LoRAX", "command")


def _words(line: str) -> tuple[list[str], list[str]]:
    """The line's words, and those of them that a shell would expand. Raises ConfigError."""
    line = re.sub(r"\\[ \t]*(\n|\Z)", " ", line)
    parts = r"""'[^']*'|\\.|"(?:\\.|[^"\\])*"|[^'"\\]+"""
    marked = re.sub(parts, _mark, line, flags=re.DOTALL)
    try:
        words = shlex.split(line)
        pairs = zip(words, shlex.split(marked), strict=True)
    except ValueError as error:
        raise ConfigError(f"the command can't be read: {error}", "command") from None
    return words, [word for word, changed in pairs if word != changed]


def _mark(part: re.Match[str]) -> str:
    """What is not in single quotes, with a mark in place of each dollar."""
    return part[0] if part[0][0] in "'\\" else re.sub(r"(?<!\\)\$(?=[\w{(])", "\0", part[0])


def _commands(words: list[str]) -> Iterator[list[str]]:
    """The line's commands, without redirections."""
    command: list[str] = []
    into_file = False
    for word in words:
        text = word.removesuffix(";")
        redirection = _REDIRECTION.fullmatch(text)
        if redirection:
            into_file = not redirection[3]
        elif into_file:
            into_file = False
        elif word != ";" and text not in _BETWEEN:
            command.append(text)
        if word in _BETWEEN or text != word:
            yield command
            command = []
    yield command


def _server(command: list[str], *, in_container: bool) -> ServerCommand | None:
    """The server that a command starts, whatever comes before it, such as `sudo` or `uv run`."""
    container = in_container
    for at, word in enumerate(command):
        name = Path(word).name
        following = command[at + 1 :]
        if (name, *following[:1]) in _SERVE:
            return ServerCommand(name, following[1:], container)
        if name == "lorax-launcher":
            return ServerCommand("lorax", following, container)
        if word == "-m" and following and (module := _MODULES.fullmatch(following[0])):
            return ServerCommand(module[1], following[1:], container)
        if name in _SHELLS and len(following) > 1 and re.fullmatch("-[a-z]*c", following[0]):
            return _server_of_script(following[1], in_container=container)
        if name in _CONTAINERS:
            container = True
        elif container and not in_container and (image := _IMAGE.fullmatch(word)):
            flag = command[at - 1]
            if not flag.startswith("-") or "=" in flag or flag in _ALONE:
                return _server_of_image(image[3], following)
    return None


def _server_of_image(server: str, args: list[str]) -> ServerCommand:
    """What an image of a server starts, if these arguments follow its name."""
    if len(args) > 1 and re.fullmatch("-[a-z]*c", args[0]):  # its entry point is a shell
        args = ["sh", *args]
    inner = _server(args, in_container=True)
    return inner or ServerCommand(server, args[1:] if args[:1] == ["serve"] else args, True)


def _server_of_script(script: str, *, in_container: bool) -> ServerCommand | None:
    found = (_server(words, in_container=in_container) for words in _commands(_words(script)[0]))
    return next((server for server in found if server is not None), None)

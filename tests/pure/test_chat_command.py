"""`weft chat`, against a server in this process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from command_line import CliRunner
from http_api import World, served
from toy_tokenizers import byte_level

from weft.cli.main import app


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    made = World(tmp_path_factory.mktemp("world"), byte_level(), api_keys=["secret"])
    yield made
    made.check()


@pytest.fixture(scope="module")
def url(world: World) -> Iterator[str]:
    with served(world) as found:
        yield found


def said(url: str, typed: str, *flags: str) -> tuple[str, str, int]:
    """What it prints, what it complains of, and how it ends."""
    command = ["chat", "--url", url, "--api-key", "secret", *flags]
    done = CliRunner().invoke(app, command, input=typed)
    return done.stdout, done.stderr, done.exit_code


def test_a_conversation(url: str, world: World) -> None:
    def prompts() -> list[str]:
        return [byte_level().decode(request.prompt_ids) for request in world.engine.requests]

    world.engine.answers = [byte_level().encode(text, False) for text in ("ho", "yes", "hm")]
    out, _, status = said(url, "hi\nyo\n", "--temperature", "0")
    assert (out.splitlines(), status) == (["ho", "yes"], 0)
    assert prompts() == [
        "<s>user: hi<s>assistant:",
        "<s>user: hi<s>assistant: ho<s>user: yo<s>assistant:",
    ]
    assert {request.params.temperature for request in world.engine.requests} == {0}
    out, _, _ = said(url, "/new\nhi\n", "alias", "--system", "S")
    assert out.splitlines() == ["hm"]
    assert prompts()[2:] == ["<s>system: S<s>user: hi<s>assistant:"]


def test_commands(url: str) -> None:
    out, err, status = said(url, "/models\n/model alias\n/model nobody\n/nope\n/help\n/quit\nhi\n")
    assert status == 0
    assert out.startswith("base\nalias\n") and "/quit" in out and "ih" not in out
    assert "nobody" in err and "there is no /nope" in err


def test_what_goes_wrong(url: str) -> None:
    for flags, told in (
        (["nobody"], "nobody"),
        (["--api-key", "wrong"], "API key"),
        (["--url", "http://127.0.0.1:9"], "can't reach http://127.0.0.1:9: Connection refused"),
    ):
        _, err, status = said(url, "hi\n", *flags)
        assert status == 1 and told in err, err
        assert len(err.strip().splitlines()) == 1

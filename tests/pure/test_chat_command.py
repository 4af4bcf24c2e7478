"""`weft chat`, against a server in this process."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from command_line import CliRunner
from http_api import World, served
from patience import PATIENCE_S
from tiny import ADAPTERS
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


def test_what_a_model_writes_does_not_control_the_terminal(url: str, world: World) -> None:
    """Nor by its other name of one character, which begins what sets a title or the clipboard."""
    world.engine.answers = [byte_level().encode("a\x1b]0;b\x07\x9bc\td\r\n\u00fc", False)]
    out, _, status = said(url, "hi\n")
    assert (out, status) == ("a]0;bc\td\n\u00fc\n", 0)


def test_what_goes_wrong(url: str) -> None:
    for flags, told in (
        (["nobody"], "nobody"),
        (["alias?x=#"], "'alias?x=#'"),
        (["x/../alias"], "'x/../alias'"),
        (["--api-key", "wrong"], "API key"),
        (["--url", "http://127.0.0.1:9"], "can't reach http://127.0.0.1:9: Connection refused"),
        (["--url", "http://[::1"], "can't reach http://[::1: Invalid port"),
    ):
        _, err, status = said(url, "hi\n", *flags)
        assert status == 1 and told in err, err
        assert len(err.strip().splitlines()) == 1


def test_what_is_typed_need_not_be_utf_8(url: str, world: World) -> None:
    world.engine.answers = [byte_level().encode("ho", False)]
    done = CliRunner().invoke(app, ["chat", "--url", url, "--api-key", "secret"], input=b"h\xffi\n")
    assert (done.stdout, done.exit_code) == ("ho\n", 0)
    prompt = byte_level().decode(world.engine.requests[-1].prompt_ids)
    assert prompt == "<s>user: h\ufffdi<s>assistant:"


def test_without_stdin_it_ends(url: str) -> None:
    command = f"{sys.executable} -m weft chat --url {url} --api-key secret <&-"
    done = subprocess.run(
        command, shell=True, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert (done.stdout, done.stderr, done.returncode) == ("", "", 0)


@pytest.mark.parametrize("name", ["x/../y", "../x", "x/.."])
def test_names_with_dots_are_not_resolved(url: str, name: str) -> None:
    command = ["push", str(ADAPTERS["upper"]), name, "--url", url, "--api-key", "secret"]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 1 and "lora_name must not hold" in done.stderr


@pytest.mark.parametrize("content", [b"[1]", b"null", b'{"data": {"id": 1}}', b'{"data": []}'])
def test_other_servers_may_answer_otherwise(content: bytes) -> None:
    class Other(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.rfile.read(int(self.headers.get("content-length") or 0))
            self.send_response(200)
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_PUT = do_GET

        def log_message(self, *_: object) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Other) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        other = f"http://127.0.0.1:{server.server_port}"
        for command, told in (
            (["chat"], ("does not answer as OpenAI's API does", "lists no models")),
            (["push", str(ADAPTERS["upper"]), "x"], ("but not as Weft does",)),
        ):
            done = CliRunner().invoke(app, [*command, "--url", other])
            assert done.exit_code == 1 and done.stderr.endswith("\n"), done.exception
            assert any(each in done.stderr for each in told), done.stderr
        server.shutdown()


@pytest.mark.parametrize(
    "command",
    [
        ["chat", "--url"],
        ["push", str(ADAPTERS["upper"]), "x", "--url"],
        ["top"],
        ["bench", "serve"],
        ["cluster", "drain", "node-1", "--at"],
    ],
)
def test_of_the_keys_of_a_server_the_first_is_sent(
    command: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The variable may be set for the server, too, which takes several with their tenants."""
    sent: set[str | None] = set()

    class Asked(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path != "/ready":
                sent.add(self.headers.get("authorization"))
            self.send_error(401)

        do_PUT = do_POST = do_GET

        def log_message(self, *_: object) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Asked) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        to = [*command, f"http://127.0.0.1:{server.server_port}"]
        for given, key in (
            ("one, two", "one"),
            (",acme=b,two", "b"),
            ("=a=b", "a=b"),
            ("YQ==", "YQ=="),
        ):
            monkeypatch.setenv("WEFT_API_KEY", given)
            done = CliRunner().invoke(app, to)
            assert done.exit_code == 1 and "--api-key" in done.stderr
            assert sent == {f"Bearer {key}"}
            sent.clear()
        CliRunner().invoke(app, [*to, "--api-key", "a=b,c"])
        assert sent == {"Bearer a=b,c"}
        sent.clear()
        monkeypatch.delenv("WEFT_API_KEY")
        for unfit in ("ключ", "\u201csecret\u201d", "se\ncret", "a=\u00fc"):
            for end in (
                CliRunner().invoke(app, [*to, "--api-key", unfit]),
                CliRunner().invoke(app, to, env={"WEFT_API_KEY": f"{unfit}\u00a0"}),
            ):
                assert end.exit_code == 2 and "must be" in end.output and not sent
        server.shutdown()

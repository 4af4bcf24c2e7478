"""What servers and names of files hold does not control the terminal of who sees it."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import typer
from command_line import CliRunner
from tiny import ADAPTERS

from weft.cli.main import app
from weft.terminal.options import ending_in_one_line

EVIL = "a\x1b]0;b\x07\x9bc\x1b[31m[bold]d"
SEEN = "a]0;bc[31m[bold]d"
METRICS = f"""weft:engine_up 1
weft:adapter_requests_total{{adapter="{EVIL}",finish_reason="stop"}} 5
vllm:e2e_request_latency_seconds_count{{model_name="{EVIL}"}} 5
"""
NODE = {"node": EVIL, "own": True, "state": "up", "labels": {EVIL: EVIL}}
COSTS = [{"node": EVIL, "queue": 0.5}]
PLACED = {"request_id": EVIL, "node": EVIL, "why": EVIL, "pins": EVIL, "costs": COSTS}
ANSWERS: dict[str, Any] = {
    "/metrics": METRICS,
    "/fleet": {
        "nodes": [NODE],
        "pins": [{"adapters": [EVIL], "labels": EVIL, "on": [EVIL], "missing": 0}],
    },
    "/fleet/why/x": {"placed": [PLACED]},
    "/v1/adapters/x": {"lora_name": EVIL, "digest": EVIL},
    "/v1/models": {"data": [{"id": EVIL, "owned_by": "weft"}]},
}


class Hostile(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.rfile.read(int(self.headers.get("content-length", 0)))
        answer = ANSWERS.get(self.path.partition("?")[0])
        body = answer or {"error": {"message": EVIL}}
        content = (body if isinstance(body, str) else json.dumps(body)).encode()
        self.send_response(200 if answer else 400)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    do_PUT = do_POST = do_GET

    def log_message(self, *_: object) -> None: ...


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Hostile) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.parametrize(
    "command",
    [
        ["top", "http://ADDRESS", "--once", "--interval", "0.1"],
        ["cluster", "status", "--at", "ADDRESS"],
        ["cluster", "top", "--at", "ADDRESS", "--once", "--interval", "0.1"],
        ["cluster", "why", "x", "--at", "ADDRESS"],
        ["cluster", "drain", "x", "--at", "ADDRESS"],
        ["push", str(ADAPTERS["upper"]), "x", "--url", "http://ADDRESS"],
        ["push", str(ADAPTERS["upper"]), "y", "--url", "http://ADDRESS"],
        ["chat", "x", "--url", "http://ADDRESS"],
    ],
    ids=lambda command: " ".join(command[:3]).partition(" /")[0],
)
def test_names_and_errors(command: list[str], address: str) -> None:
    asked = [each.replace("ADDRESS", address) for each in command]
    done = CliRunner().invoke(app, asked, input="hi\n", env={"COLUMNS": "400"})
    said = done.stdout + done.stderr
    assert SEEN in said, said
    assert not {"\x1b", "\x07", "\x9b"} & set(said)


@pytest.mark.parametrize("body", [[], None, {"ok": True}, {"nodes": 5}, {"nodes": [{"node": 1}]}])
@pytest.mark.parametrize(
    ("command", "path"),
    [
        (["status"], "/fleet"),
        (["top", "--once", "--interval", "0.1"], "/fleet"),
        (["why", "x"], "/fleet/why/x"),
        (["drain", "x"], "/fleet/drain"),
    ],
    ids=["status", "top", "why", "drain"],
)
def test_a_server_that_is_not_of_weft(
    command: list[str], path: str, body: object, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for each in ("/fleet", "/fleet/why/x", "/fleet/drain"):
        monkeypatch.setitem(ANSWERS, each, json.dumps(body))
    done = CliRunner().invoke(app, ["cluster", *command, "--at", address], env={"COLUMNS": "400"})
    told = f"http://{address}{path} is not from a Weft server"
    if command[0] == "top":  # which shows metrics nevertheless
        assert told in done.stdout
    else:
        assert (done.exit_code, done.stderr) == (1, f"weft: error: {told}\n")


def test_a_file_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit), ending_in_one_line():
        Path(f"/no/{EVIL}").read_bytes()
    assert capsys.readouterr().err == f"weft: error: /no/{SEEN}: No such file or directory\n"

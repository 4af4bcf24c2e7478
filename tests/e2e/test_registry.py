"""Servers that share a registry in a folder: changes, releases, deaths, a store that is away."""

from __future__ import annotations

import os
import signal
import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from threading import Event

import httpx
import pytest
import tiny
from command_line import CliRunner
from patience import PATIENCE_S
from quick_start import start_weft
from serving import Server, serving, until
from tiny import ADAPTERS

from weft import publish
from weft.cli.main import app


def weft(*args: str) -> str:
    """What a command prints. It runs in this process, which has imported all that is slow."""
    done = CliRunner().invoke(app, args)
    assert done.exit_code == 0, done.output
    return done.stdout


def ask(server: Server, model: str, word: str = "planet") -> httpx.Response:
    body = {
        "model": model,
        "messages": [{"role": "user", "content": word}],
        "temperature": 0,
        "max_tokens": 32,
    }
    return server.post("/v1/chat/completions", **body)


def text_of(answer: httpx.Response) -> str:
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["message"]["content"])


def load(server: Server, name: str, adapter: str, **more: object) -> None:
    path = str(ADAPTERS[adapter])
    answer = server.post("/v1/load_lora_adapter", lora_name=name, lora_path=path, **more)
    assert answer.status_code == 200, answer.text


def test_two_servers_on_one_registry(tmp_path: Path) -> None:
    store = tmp_path / "registry"
    store.mkdir()
    flags = ("--registry", str(store), "--lora-root", str(next(iter(ADAPTERS.values())).parent))
    with ExitStack() as running:

        def start(name: str, *more: str) -> Server:
            (tmp_path / name).mkdir()
            return running.enter_context(serving(tmp_path / name, *flags, *more, adapters=[]))

        with ThreadPoolExecutor(2) as threads:
            one, other = threads.map(start, ("one", "other"))
        assert "is empty: it has neither adapters nor tenants, so req" in one.log.read_text()
        load(one, "task", "reverse")
        load(one, "task", "repeat", load_inplace=True, pinned=True)
        load(other, "gone", "upper", wait="commit")
        assert text_of(ask(one, "gone")) == tiny.answer("upper", "planet")
        assert text_of(ask(other, "task")) == tiny.answer("repeat", "planet")
        assert text_of(ask(other, "task@v1")) == tiny.answer("reverse", "planet")
        _push(one, other, store)
        _move_under_load(one, other, store)
        assert httpx.delete(f"{other.url}/v1/loras/gone", timeout=PATIENCE_S).status_code == 200
        until(lambda: ask(one, "gone").status_code == 404, "the adapter is still served")
        _take_the_store_away(one, store)
        for server in (one, other):
            os.killpg(server.process.pid, signal.SIGKILL)
        third = start("third", "--registry-boot", "eager")
        assert "is empty" not in third.log.read_text()
        assert third.post("/v1/completions", model="gone", prompt="x").status_code == 404
        listed = httpx.get(f"{third.url}/v1/models", timeout=PATIENCE_S).json()["data"]
        assert [model["id"] for model in listed] == ["base", "task"]
        loras = httpx.get(f"{third.url}/v1/loras", timeout=PATIENCE_S).json()["loras"]
        assert list(loras) == ["task"]
        answer = ask(third, "task")
        assert text_of(answer) == tiny.answer("reverse", "planet")
        assert answer.headers["x-weft-adapter"] == "task@v1"
        _end_while_the_store_hangs(third, store)


def _push(one: Server, other: Server, store: Path) -> None:
    """An adapter is sent to one server, and the next version put into the registry by a trainer."""
    pushed = weft("push", str(ADAPTERS["sort"]), "sent", "--url", one.url)
    assert pushed.startswith("sent: sha256:")
    assert text_of(ask(other, "sent")) == tiny.answer("sort", "planet")
    published = publish(store, "sent", ADAPTERS["upper"], base=str(tiny.BASE))
    assert published.base == str(tiny.BASE)
    for server in (one, other):
        until(
            lambda server=server: text_of(ask(server, "sent")) == tiny.answer("upper", "planet"),
            "the new version does not answer",
        )
    assert httpx.delete(f"{one.url}/v1/loras/sent", timeout=PATIENCE_S).status_code == 200


def _move_under_load(one: Server, other: Server, store: Path) -> None:
    """Move a route while requests run: each answer is that of the version that it names."""
    stop, seen = Event(), set[tuple[str, str, str]]()
    expected = {"task@v1": "reverse", "task@v2": "repeat"}

    def client(server: Server) -> None:
        for word in ("planet", "melody", "river") * 1000:
            answer = ask(server, "task", word)
            seen.add((answer.headers["x-weft-adapter"], word, text_of(answer)))
            if stop.is_set():
                return

    with ThreadPoolExecutor(4) as threads:
        clients = [threads.submit(client, server) for server in (one, other) for _ in range(2)]
        try:
            moved = one.post("/v1/registry/releases", name="task", to="v1")
            assert moved.status_code == 200, moved.text
            done = weft("release", "task", "--to", "v2", "--canary", "50", "--registry", str(store))
            assert done.startswith("task: v1 50%, v2 50%")
            both = {"task@v1", "task@v2"}
            until(lambda: {version for version, _, _ in seen} == both, "one version never answers")
            assert weft("rollback", "task", "--registry", str(store)).startswith("task: v1 (")
        finally:
            stop.set()
        for each in clients:
            each.result()
    for version, word, text in seen:
        assert text == tiny.answer(expected[version], word)
    history = weft("history", "task", "--registry", str(store)).splitlines()
    assert len(history) == 5 and "publish v1" in history[-1]
    until(lambda: ask(other, "task").headers["x-weft-adapter"] == "task@v1", "it does not follow")


def _take_the_store_away(server: Server, store: Path) -> None:
    """Without its store a server serves what it knows, also with a new engine, and refuses changes
    (after a while, in which the engine starts)."""
    away = store.rename(store.with_name("away"))
    try:
        assert text_of(ask(server, "task")) == tiny.answer("reverse", "planet")
        os.kill(server.engine_pid(), signal.SIGKILL)
        answer = server.post("/v1/unload_lora_adapter", lora_name="task")
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (503, "registry_unavailable")
        assert "operator" in error["message"] and "/" not in error["message"]
        log = server.log.read_text().splitlines()
        [line] = [line for line in log if "whether the change was made" in line]
        assert str(store) in line and answer.headers["x-request-id"] in line
        until(lambda: ask(server, "task").status_code == 200, "the engine is not up again")
        assert text_of(ask(server, "task")) == tiny.answer("reverse", "planet")
        ready = f"{server.url}/ready"
        until(lambda: httpx.get(ready, timeout=PATIENCE_S).status_code == 200, "it is not ready")
        stale = server.metrics()["weft:registry_stale_seconds"][0].value
        assert stale > 1
    finally:
        away.rename(store)
    metrics = server.metrics
    until(lambda: metrics()["weft:registry_stale_seconds"][0].value < 1, "the store is back")


def _end_while_the_store_hangs(server: Server, store: Path) -> None:
    """A server that waits for its registry ends in good order."""
    log = store / "log"
    following = log / f"{max(int(entry.name) for entry in log.iterdir()) + 1:020}"
    os.mkfifo(following)
    with following.open("wb"):  # returns once the server reads it, which then goes on for ever
        server.process.terminate()
        assert server.process.wait(PATIENCE_S) == 0, server.log.read_text()


def test_ctrl_c_ends_a_command_whose_bucket_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its client waits for half a minute, and listens to no signal meanwhile."""
    uri, upper = "s3://bucket/fleet", str(ADAPTERS["upper"])
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    monkeypatch.setenv("AWS_SKIP_SIGNATURE", "true")
    for command in (["history", "x"], ["push", upper, "x"], ["serve", str(tiny.BASE)]):
        with socket.create_server(("127.0.0.1", 0)) as bucket:
            monkeypatch.setenv("AWS_ENDPOINT", f"http://127.0.0.1:{bucket.getsockname()[1]}")
            with (tmp_path / "log").open("wb") as log:
                process = start_weft([*command, "--registry", uri], log)
            with bucket.accept()[0]:
                process.send_signal(signal.SIGINT)
                assert process.wait(PATIENCE_S) == -signal.SIGINT, (tmp_path / "log").read_text()

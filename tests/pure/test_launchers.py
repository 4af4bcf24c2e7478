"""Who starts the nodes of a cluster, and how commands find them. No node is started here."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from unittest.mock import Mock

import pytest
from command_line import CliRunner
from rich.console import Console

from weft.cli import top
from weft.cli.cluster import folder_of, reconcile
from weft.cli.main import app
from weft.cli.nodes_table import nodes_table
from weft.cli.scrapes import parse
from weft.cli.summary import start_in_words, summary
from weft.cli.watch import merge
from weft.core.errors import ConfigError, Unreachable
from weft.core.stats import EngineInfo
from weft.fleet.launchers import ClusterArgs, ClusterFolder, Placed, fleet_port_of
from weft.fleet.launchers import local as local_module
from weft.fleet.launchers.found import find_nodes, find_urls
from weft.fleet.launchers.local import ERROR, MAX_FAILED, MAX_PAUSE_S, LocalLauncher

ARGS = ClusterArgs(model="base", num_nodes=2, registry="/r", port=9000, flags=("--seed", "1"))


def make(folder: ClusterFolder) -> None:
    """Leave what a cluster's process has in its folder."""
    with folder.held(ARGS):
        pass


class Steps:
    """A launcher that writes down what it is asked."""

    def __init__(self) -> None:
        self.taken: list[str] = []

    def start(self, name: str) -> None:
        self.taken.append(f"start {name}")

    def stop(self, name: str) -> None:
        self.taken.append(f"stop {name}")

    def list(self) -> list[Placed]:
        return []


def test_what_lacks_is_started_and_the_newest_are_stopped() -> None:
    steps = Steps()
    reconcile(steps, ["node-1"], ["node-0", "node-1", "node-2"])
    reconcile(steps, ["node-0", "node-1", "node-2"], ["node-0"])
    assert steps.taken == ["start node-0", "start node-2", "stop node-2", "stop node-1"]


def test_a_folder_keeps_what_a_cluster_was_started_with(tmp_path: Path) -> None:
    folder = ClusterFolder(tmp_path / "c")
    with pytest.raises(ConfigError, match="there is no cluster"):
        folder.read()
    make(folder)
    assert folder.read() == ARGS
    assert folder.key.stat().st_mode & 0o777 == 0o600
    key = folder.key.read_text()
    assert len(key) >= 32
    with pytest.raises(ConfigError, match="weft cluster up does not run for"):
        folder.scale(0)
    with folder.held(ARGS):
        folder.scale(0)
        assert folder.read().names == []
    make(folder)
    assert (folder.read(), folder.key.read_text(), folder.is_on_ray) == (ARGS, key, False)
    folder.point_to_ray()
    assert folder.is_on_ray
    make(folder)
    assert folder.read() == ARGS


def test_a_folder_is_free_again_once_its_process_is_gone(tmp_path: Path) -> None:
    """It has a cluster with nodes in either case: a process that is killed can't change that."""
    folder, again = ClusterFolder(tmp_path / "c"), ClusterFolder(tmp_path / "c")
    with folder.held(ARGS):
        with pytest.raises(ConfigError, match=r"there is a cluster in .* scale 0 --name c"):
            make(again)
        assert folder.read() == ARGS
    make(again)


class Process:
    """A process that ends when a test says so."""

    def __init__(self, command: list[str], **_: object) -> None:
        self.command = command
        self.code: int | None = None

    def poll(self) -> int | None:
        return self.code

    def send_signal(self, number: int) -> None:
        if number == signal.SIGTERM:
            self.code = 0

    def wait(self) -> int:
        assert self.code is not None
        return self.code


def test_a_process_is_started_again_once_there_is_room_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, folder = [0.0], ClusterFolder(tmp_path)
    make(folder)
    monkeypatch.setattr(subprocess, "Popen", Process)
    monkeypatch.setattr(local_module, "is_ready", lambda url: True)
    launcher = LocalLauncher(folder, ARGS, lambda: now[0])
    launcher.start("node-0")
    launcher.list()
    launcher._running["node-0"].process.code = 1
    launcher.tend()
    refused = BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
    with monkeypatch.context() as patched:
        patched.setattr(subprocess, "Popen", Mock(side_effect=refused))
        now[0] += MAX_PAUSE_S
        launcher.tend()
        assert launcher.list()[0].state == "ended"
    now[0] += MAX_PAUSE_S
    launcher.tend()
    monkeypatch.setattr(local_module, "is_ready", lambda url: False)
    assert launcher.list()[0].state == "starting"
    for ready, state in ((True, "up"), (False, "not ready")):
        monkeypatch.setattr(local_module, "is_ready", lambda url, ready=ready: ready)
        assert launcher.list() == [Placed("node-0", "http://127.0.0.1:9000", state, 1)]


def all_started(monkeypatch: pytest.MonkeyPatch) -> list[Process]:
    """The processes that are started from now on, none of which runs."""
    started: list[Process] = []

    def spawn(command: list[str], **given: object) -> Process:
        started.append(Process(command, **given))
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", spawn)
    return started


def test_processes_are_started_again_after_growing_pauses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = all_started(monkeypatch)
    monkeypatch.setattr(local_module, "is_ready", lambda url: url.endswith(":9001"))
    now = [0.0]
    folder = ClusterFolder(tmp_path)
    make(folder)
    launcher = LocalLauncher(folder, ARGS, lambda: now[0])
    reconcile(launcher, [], ARGS.names)
    reconcile(launcher, [node.name for node in launcher.list()], ARGS.names)
    assert folder.members.read_text().split() == ["127.0.0.1:8070", "127.0.0.1:8071"]
    assert [node.state for node in launcher.list()] == ["starting", "up"]
    command = " ".join(started[1].command)
    assert command.startswith(f"{sys.executable} -m weft serve base --host 127.0.0.1 --port 9001")
    assert "--node-name node-1 --seed 1" in command

    for restarts in range(1100):
        started[-1].code = -9
        launcher.tend()
        assert launcher.list()[1].state == "ended"
        pause_s = min(2**restarts, MAX_PAUSE_S)
        now[0] += pause_s - 0.01
        launcher.tend()
        assert launcher.list()[1].restarts == restarts
        now[0] += 0.02
        launcher.tend()
        assert launcher.list()[1].restarts == restarts + 1
    assert len(started) == 2 + 1100

    launcher.stop("node-1")
    assert folder.members.read_text() == "127.0.0.1:8070\n"
    launcher.stop_all()
    assert launcher.list() == []


@pytest.mark.parametrize(("last_line", "starts"), [("Killed", MAX_FAILED), (ERROR + "no", 1)])
def test_nodes_that_never_get_ready_are_given_up(
    last_line: str, starts: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Process] = []

    def spawn(command: list[str], **given: object) -> Process:
        started.append(Process(command, **given))
        started[-1].code = -9
        with (tmp_path / "node-0.log").open("a") as log:
            log.write(f"{len(started)}\n{last_line}\n")
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", spawn)
    now = [0.0]
    folder = ClusterFolder(tmp_path)
    make(folder)
    launcher = LocalLauncher(folder, ARGS, lambda: now[0])
    launcher.start("node-0")
    with pytest.raises(ConfigError, match=r"^node-0: no$|has ended 3 times.*: 3 . Killed$"):
        while True:
            launcher.tend()
            now[0] += MAX_PAUSE_S
    assert len(started) == starts


@pytest.mark.parametrize("flags", [["--fleet-key=k"], ["--node-name", "n"], ["--no-engine"]])
def test_flags_that_a_cluster_gives_its_nodes_are_refused(
    flags: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    done = CliRunner().invoke(app, ["cluster", "up", "base", *flags])
    name = flags[0].partition("=")[0]
    refused = f"weft: error: {name} can't be given to the nodes of a cluster\n"
    assert (done.exit_code, done.stderr) == (1, refused)
    assert not list(tmp_path.iterdir())


def test_ports_of_nodes_are_for_all_users() -> None:
    ports = [fleet_port_of(port) for port in range(1024, 65536)]
    assert fleet_port_of(8000) == 7070
    assert len({*ports}) == len(ports) and min(ports) == 1024 and max(ports) == 65535
    assert 1024 <= fleet_port_of(1) <= 65535


def test_nodes_that_others_start_are_found(tmp_path: Path) -> None:
    file = tmp_path / "nodes"
    file.write_text("127.0.0.1:8001  # the first\n\n127.0.0.2:8001\n")
    assert find_urls(str(file)) == ["http://127.0.0.1:8001", "http://127.0.0.2:8001"]
    assert find_urls("127.0.0.1:1,127.0.0.1:1,localhost:2")[0] == "http://127.0.0.1:1"
    many = [f"127.0.0.{i}:18799" for i in range(1, 30)]  # too long for the name of a file
    assert sorted(find_urls(",".join(many))) == sorted(f"http://{each}" for each in many)
    for wrong in (
        "",
        ",",
        "here",
        "host:",
        ":1",
        "h:http",
        "https://h:1",
        "h:99999",
        f"h:{'9' * 30}",
    ):
        with pytest.raises(ConfigError, match="--at takes HOST:PORT"):
            find_urls(wrong)
    with pytest.raises(Unreachable, match="label too long"):
        find_urls("a" * 100 + ":1")
    file.write_bytes(b"\xff:1")
    with pytest.raises(ConfigError, match="it is not UTF-8"):
        find_urls(str(file))
    (node,) = find_nodes("127.0.0.1:1")
    assert (node.name, node.url, node.state) == ("127.0.0.1:1", "http://127.0.0.1:1", "no answer")


@pytest.fixture
def handlers() -> Iterator[None]:
    """Handlers of signals are as before at the end."""
    before = {each: signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("handlers")
def test_another_program_at_a_nodes_port_is_told_before_nodes_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What answers there would be taken for the node, which is started again for ever."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr(subprocess, "Popen", Process)
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        done = CliRunner().invoke(app, ["cluster", "up", "base", "--port", str(port)])
    refused = f"weft: error: can't listen on 127.0.0.1:{port}: Address already in use (--port)\n"
    assert (done.exit_code, done.stderr) == (1, refused)
    assert folder_of("default").read().num_nodes == 0


@pytest.mark.usefixtures("handlers")
def test_a_cluster_whose_terminal_is_closed_hands_its_requests_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def hang_up(_: float) -> None:
        assert callable(signal.getsignal(signal.SIGHUP)), "else this process is gone"
        signal.raise_signal(signal.SIGHUP)

    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    started = all_started(monkeypatch)
    monkeypatch.setattr(local_module, "is_ready", lambda url: True)
    monkeypatch.setattr("weft.cli.cluster.check_free", Mock())
    monkeypatch.setattr("weft.cli.cluster.time.sleep", hang_up)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    done = CliRunner().invoke(app, ["cluster", "up", "base"])
    assert "Ending the nodes" in done.output
    assert [process.code for process in started] == [0, 0]
    assert folder_of("default").read().num_nodes == 0


@pytest.mark.usefixtures("handlers")
@pytest.mark.parametrize(
    ("code", "line", "why"),
    [
        (1, f"{ERROR}the disk is full", "the disk is full"),
        (0, '{"level": "info", "message": "stopped"}', "stopped"),
        (0, "2026-11-28T04:48:48.763Z INFO weft.cli.serve: stopped", "stopped"),
        (-9, "INFO ready", "by signal 9 (Killed)"),
    ],
    ids=["error", "json", "text", "kill"],
)
def test_a_node_that_ends_is_shown_with_the_reason_and_its_log(
    code: int, line: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    log = tmp_path / "weft/clusters/default/node-1.log"
    started = all_started(monkeypatch)

    def end(_: float) -> None:
        if started[1].code is not None:
            raise KeyboardInterrupt
        log.write_text(f"INFO ready\n{line}\n\n")
        started[1].code = code

    monkeypatch.setattr(local_module, "is_ready", lambda url: True)
    monkeypatch.setattr("weft.cli.cluster.check_free", Mock())
    monkeypatch.setattr("weft.cli.cluster.time.sleep", end)
    done = CliRunner().invoke(app, ["cluster", "up", "base"])
    ended = f"node-1  http://127.0.0.1:8001  ended: {why}; see {log}"
    assert ended in done.output.splitlines()


@pytest.mark.usefixtures("handlers")
@pytest.mark.parametrize("names", [[], ["--served-model-name=other"]])
def test_a_base_has_the_name_by_which_it_was_given(
    names: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with `weft serve`, though nodes get the absolute path of its folder."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    Path("base").mkdir()
    started = all_started(monkeypatch)
    monkeypatch.setattr("weft.cli.cluster.check_free", Mock())
    monkeypatch.setattr("weft.cli.cluster.time.sleep", Mock(side_effect=KeyboardInterrupt))
    CliRunner().invoke(app, ["cluster", "up", "base", "--nodes", "1", *names])
    command = " ".join(started[0].command)
    assert f"serve {tmp_path / 'base'} " in command
    assert command.count("--served-model-name") == 1
    assert ("--served-model-name base" in command) == (not names)


def test_a_node_that_does_not_speak_http() -> None:
    """Something else may listen at a port where a node is looked for."""

    def greet() -> None:
        for _ in range(2):
            connection, _ = listener.accept()
            with connection:
                connection.sendall(b"SSH-2.0-OpenSSH\r\n")
                connection.recv(4096)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        greeter = Thread(target=greet)
        greeter.start()
        where = f"127.0.0.1:{listener.getsockname()[1]}"
        done = CliRunner().invoke(app, ["cluster", "drain", "node-0", "--at", where])
        greeter.join()
    assert (done.exit_code, done.stderr) == (
        1,
        f"weft: error: can't reach http://{where}: SSH-2.0-OpenSSH\n",
    )


def test_commands_that_change_a_cluster_say_what_they_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    make(folder_of("default"))

    def said(*args: str) -> str:
        return str(CliRunner().invoke(app, ["cluster", *args]).stdout).strip()

    with folder_of("default").held(ARGS):
        assert said("scale", "3") == "The cluster starts or ends nodes until there are 3."
        assert said("scale", "0") == "The cluster ends."
    for command in (["status"], ["top", "--once"], ["drain", "node-1"], ["why", "x"]):
        done = CliRunner().invoke(app, ["cluster", *command])
        assert (done.exit_code, done.stderr) == (
            1,
            "weft: error: the cluster default has no nodes; weft cluster up starts some\n",
        )
    with folder_of("default").held(ARGS):
        said("scale", "2")
    monkeypatch.setattr("weft.cli.cluster.ask_any", Mock())
    assert said("drain", "node-1").startswith("node-1 takes no more requests")
    assert said("drain", "node-1", "--undo") == "node-1 takes requests again."


def test_what_a_node_says_counts_more_than_that_another_one_is_silent() -> None:
    """As when a node is drained that is not up yet, while a third one is still starting."""

    class Fleet(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.send_response(400)
            self.end_headers()
            self.wfile.write(b'{"error": {"message": "there is no node named \'node-1\'"}}')

        def log_message(self, *args: object) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Fleet) as server:
        Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        where = f"127.0.0.1:{server.server_port}"
        command = ["cluster", "drain", "node-1", "--at", f"{where},127.0.0.2:1"]
        done = CliRunner().invoke(app, command)
        server.shutdown()
    said = f"weft: error: http://{where}/fleet/drain: there is no node named 'node-1'\n"
    assert (done.exit_code, done.stderr) == (1, said)


def test_labels_of_nodes_are_shown_where_there_are_any() -> None:
    node = Placed("n0", "http://h:1", "up")

    def columns(labels: dict[str, str]) -> dict[str, list[object]]:
        table = nodes_table([node], {"n0": {"state": "up", "labels": labels}})
        return {str(column.header): list(column.cells) for column in table.columns}

    assert columns({"gpu": "h200", "zone": "a"})["Labels"] == ["gpu=h200,zone=a"]
    assert "Labels" not in columns({})


def test_metrics_of_several_nodes_add_up() -> None:
    text = '# TYPE a counter\na_total{x="1"} 2.0\n# TYPE weft:engine_up gauge\nweft:engine_up 1.0\n'
    merged = merge({name: parse(text, 5.0) for name in ("node-0", "node-1")})
    assert merged.sum("a_total") == 4
    assert merged.by("node", "a_total") == {"node-0": 2, "node-1": 2}
    assert merged.sum("weft:engine_up") == 2


def test_the_file_that_llm_d_reads(tmp_path: Path) -> None:
    runner, file = CliRunner(), tmp_path / "endpoints.json"
    done = runner.invoke(
        app, ["cluster", "endpoints", str(file), "--at", "127.0.0.1:1,127.0.0.2:2"]
    )
    assert done.exit_code == 0, done.output
    assert json.loads(file.read_text()) == {
        "endpoints": [
            {"name": "127.0.0.1-1", "address": "127.0.0.1", "port": "1"},
            {"name": "127.0.0.2-2", "address": "127.0.0.2", "port": "2"},
        ]
    }
    done = runner.invoke(app, ["cluster", "endpoints", str(file), "--at", "[::1]:1"])
    assert done.exit_code == 1 and "no IPv4 address" in done.output
    for place in (tmp_path, tmp_path / "none/file"):
        done = runner.invoke(app, ["cluster", "endpoints", str(place), "--at", "127.0.0.1:1"])
        assert done.exit_code == 1 and "can't be written" in done.output
    assert not list(tmp_path.parent.glob(".*.new"))


def test_nodes_that_are_known_by_address_have_one_row_each() -> None:
    names = ["n1", "n2"]
    with contextlib.ExitStack() as servers:
        ports = []
        for own in names:
            said = [{"node": name, "own": name == own, "state": "up"} for name in names]

            class Fleet(BaseHTTPRequestHandler):
                body = json.dumps({"nodes": said}).encode()

                def do_GET(self) -> None:
                    self.send_response(200 if self.path == "/fleet" else 404)
                    self.end_headers()
                    self.wfile.write(self.body)

                def log_message(self, *_: object) -> None: ...

            server = servers.enter_context(HTTPServer(("127.0.0.1", 0), Fleet))
            servers.callback(server.shutdown)
            Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
            ports.append(server.server_port)
        at = ",".join(f"127.0.0.1:{port}" for port in ports)
        done = CliRunner().invoke(app, ["cluster", "status", "--at", at], env={"COLUMNS": "60"})
    assert done.exit_code == 0, done.output
    shown = [line.split() for line in done.output.splitlines()[1:]]
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    assert [(row[0], row[1], row[-1]) for row in shown] == [
        ("n1", "up", urls[0]),
        ("n2", "up", urls[1]),
    ]


def test_a_cluster_of_which_nobody_answers_is_told_to_scripts() -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        at = f"127.0.0.1:{nobody.getsockname()[1]}"
        done = CliRunner().invoke(app, ["cluster", "status", "--at", at], env={"COLUMNS": "60"})
    assert done.exit_code == 1 and f"{at}  no answer" in done.output


@pytest.mark.parametrize("said", ["{", "[]", "{}", '{"x": 1, "flags": []}', "\xff"])
def test_a_folder_that_is_damaged(said: str, tmp_path: Path) -> None:
    folder = ClusterFolder(tmp_path)
    (tmp_path / "cluster.json").write_text(said, "latin-1")
    with pytest.raises(ConfigError, match=r"can't be read|does not describe a cluster"):
        folder.read()


def test_a_folder_that_can_t_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="can't be made: Not a directory"):
        make(ClusterFolder(tmp_path / "file" / "c"))


def test_a_full_disk_leaves_no_empty_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = ClusterFolder(tmp_path)
    with Path("/dev/full").open("w") as full_device, monkeypatch.context() as full:
        full.setattr(os, "fdopen", lambda fd, _: os.close(fd) or full_device)
        with pytest.raises(ConfigError, match=f"{tmp_path}/key can't be written: No space left"):
            make(folder)
    make(folder)
    assert len(folder.key.read_text()) == 64 and folder.key.stat().st_mode & 0o77 == 0


def test_commands_say_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert folder_of("a-1").path == tmp_path / "weft/clusters/a-1"
    runner = CliRunner()
    for command, message in (
        (["status"], "start one with weft cluster up"),
        (["scale", "2", "--name", "../x"], "--name takes letters"),
        (["up", "m", "--registry", "~nobody-here/x"], "there is no folder"),
        (["up", "m", "--registry", "none/x"], "none/x: there is no folder"),
        (
            ["drain", "n", "--at", "127.0.0.1:1"],
            "can't reach http://127.0.0.1:1: Connection refused",
        ),
        (["up", "base", "--on", "ray"], "needs a --registry"),
    ):
        done = runner.invoke(app, ["cluster", *command])
        assert done.exit_code == 1 and message in done.output.replace("\n", " "), done.output


@pytest.mark.parametrize("url", ["http://[::1]:8000", "http://[fd00::1]:8000"])
def test_addresses_and_names_in_brackets_are_shown_as_they_are(
    url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rich takes what is in brackets for a style, unless it is told that it is none."""
    registry = Mock(base_names=["/models/[/old]"], names=lambda: ["[red]"])
    info = EngineInfo("m", "A", "float32", "cpu", *[1] * 7, 1)
    console = Console(width=100, color_system=None)
    console.print(summary(info, registry, url, True, url, "file:///[x]", start_in_words(1.0, None)))
    name = url.removeprefix("http://")
    console.print(nodes_table([Placed(name, url, "up")], {}))
    silent = Mock(urls=[name], silent={name: Unreachable("why")}, since={name: 0.0})
    console.print(top._servers(silent, Mock(), 100))
    shown = capsys.readouterr().out
    for text in ("/models/[/old]", "1: [red]", f"{url}/v1", f"{url}/metrics", "file:///[x]"):
        assert text in shown
    assert re.search(rf"^{re.escape(name)} +up .* {re.escape(url)}$", shown, re.MULTILINE)
    assert f"\n{name}  no answer" in shown
    assert "1.0 s" in shown and "the engine took" not in shown

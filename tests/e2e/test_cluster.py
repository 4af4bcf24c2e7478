"""`weft cluster up` on one machine, and the commands that look at a cluster and change it."""

from __future__ import annotations

import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from command_line import CliRunner
from fleet_nodes import free_port
from patience import PATIENCE_S
from quick_start import Forked, start_weft
from tiny import ADAPTERS, BASE

from weft.cli import cluster
from weft.cli.cluster_top import run_cluster_top
from weft.cli.main import app
from weft.cli.releases import label
from weft.core.errors import WeftError
from weft.fleet.launchers import ClusterArgs, ClusterFolder, fleet_port_of
from weft.fleet.launchers.local import HOST, LocalLauncher
from weft.publishing import publish


def forked(self: LocalLauncher, name: str, port: int) -> Forked:
    """Start a node without the seconds in which Python imports."""
    folder, fleet_port = self._folder, fleet_port_of(port)
    with self._log(name).open("ab") as log:
        command = self._args.command(name, folder.members, folder.key, HOST, port, fleet_port)
        return start_weft(command, log)


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where a cluster's folder will be."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr(LocalLauncher, "_spawn", forked)
    before = {each: signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGHUP)}
    yield tmp_path / "weft/clusters/default"
    for number, handler in before.items():
        signal.signal(number, handler)


def until(holds: Callable[[], bool]) -> None:
    end_s = time.monotonic() + PATIENCE_S
    while True:
        try:
            if holds():
                return
        except WeftError:
            pass  # nodes are starting
        assert time.monotonic() < end_s
        time.sleep(0.05)


def states() -> dict[str, str]:
    reports = cluster.reports_of(cluster.placed("default", None), "")
    return {name: str(report["state"]) for name, report in reports.items()}


def said_of_pins() -> list[tuple[str, list[str], int]]:
    pins = cluster.ask_any(cluster.placed("default", None), "/fleet", "")["pins"]
    return [(pin["labels"], pin["on"], pin["missing"]) for pin in pins]


def ask(port: int) -> dict[str, Any]:
    body = {"model": "shout", "prompt": "hello", "max_tokens": 8, "temperature": 0}
    found = httpx.post(f"http://{HOST}:{port}/v1/completions", json=body, timeout=PATIENCE_S)
    answer: dict[str, Any] = found.raise_for_status().json()
    return answer


def answer(port: int) -> str:
    return str(ask(port)["choices"][0]["text"])


def look_and_change(port: int, state: Path) -> None:
    until(lambda: (state / "members").exists())
    until(lambda: states() == {"node-0": "up", "node-1": "up"})
    publish(state / "registry", "shout", ADAPTERS["upper"])
    assert answer(port) == answer(port + 1)
    label("shout", ["weft.nodes=node-1"], str(state / "registry"))
    until(lambda: said_of_pins() == [("weft.nodes=node-1", ["node-1"], 0)])
    request_id = ask(port)["id"]
    (placed,) = cluster._placements(cluster.placed("default", None), request_id, "")
    assert (placed["node"], placed["pins"]) == ("node-1", "weft.nodes=node-1")
    cluster.status(name="default")
    changed = ["weft.nodes-", "weft.node-labels=kind=test"]
    label("shout", changed, str(state / "registry"))
    both = ("weft.node-labels=kind=test", ["node-0", "node-1"], 0)
    until(lambda: said_of_pins() == [both])
    label("shout", ["weft.node-labels-"], str(state / "registry"))
    until(lambda: not said_of_pins())
    cluster.drain("node-1", name="default")
    until(lambda: states()["node-1"] == "draining")
    assert answer(port + 1) == answer(port), "its own clients are served by others"
    nodes = cluster.placed("default", None)
    run_cluster_top(nodes, lambda: cluster.reports_of(nodes, ""), 0.1, True, "")
    cluster.drain("node-1", undo=True, name="default")
    until(lambda: states()["node-1"] == "up")
    cluster.scale(1, name="default")
    until(lambda: states() == {"node-0": "up"})
    answer(port)


@pytest.mark.exhaustive
def test_a_cluster_from_its_start_to_its_end(state: Path) -> None:
    port, failed = free_port(), []

    def drive() -> None:
        try:
            look_and_change(port, state)
        except BaseException as error:
            failed.append(error)
        finally:
            cluster.scale(0, name="default")

    flags = ["--dtype", "float32", "--kv-cache-memory", "64M", "--num-threads", "1"]
    flags += ["--node-label", "kind=test"]
    thread = threading.Thread(target=drive)
    command = ["cluster", "up", str(BASE), "--nodes", "2", "--port", str(port), *flags]
    thread.start()
    done = CliRunner().invoke(app, command)
    thread.join()
    if failed:
        raise failed[0]
    assert done.exit_code == 0, done.output
    assert {"Disk", "Moved", "Lost"} <= set(done.output.split())
    assert "shout@v1 (weft.nodes=node-1): on node-1" in done.output
    assert "kind=test" in done.output


def test_what_can_not_be_started_is_said_at_once(state: Path) -> None:
    runner, up = CliRunner(), ["cluster", "up", str(BASE), "--nodes", "1"]
    done = runner.invoke(app, [*up, "--no-such-flag", "1"])
    assert done.exit_code == 2 and "No such option: --no-such-flag" in done.output
    assert not state.exists()
    done = runner.invoke(app, [*up, "--port", str(free_port()), "--max-num-seqs", "0"])
    assert done.exit_code == 1 and "node-0: --max-num-seqs must be at least 1" in done.output
    assert cluster.folder_of("default").read().num_nodes == 0


def test_a_node_that_was_stopped_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that is stopped does not get SIGTERM before it goes on."""
    node = subprocess.Popen(["sleep", str(2 * PATIENCE_S)])
    monkeypatch.setattr(LocalLauncher, "_spawn", lambda *_: node)
    folder = ClusterFolder(tmp_path)
    launcher = LocalLauncher(folder, ClusterArgs(model="base", num_nodes=1, registry="/r"))
    launcher.start("node-0")
    node.send_signal(signal.SIGSTOP)
    too_late = threading.Timer(PATIENCE_S / 4, node.kill)
    too_late.start()
    launcher.stop("node-0")
    too_late.cancel()
    assert node.returncode == -signal.SIGTERM

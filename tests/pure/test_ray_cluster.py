"""A cluster on Ray: what its actors and commands do, over a Ray that is one process. No node is
started here; `tests/e2e/test_ray.py` has a real Ray."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from command_line import CliRunner
from fake_ray import HOST, FakeRay
from patience import wait_until

from weft.cli.main import app
from weft.cli.nodes_table import nodes_table
from weft.core.errors import ConfigError
from weft.fleet.launchers import ClusterArgs, ClusterFolder
from weft.fleet.launchers import ray_cluster as cluster_module
from weft.fleet.launchers import ray_node as node_module
from weft.fleet.launchers.ray import RayLauncher
from weft.fleet.launchers.ray_cluster import CONTROLLER, ControllerActor, Keeper, RayCluster
from weft.fleet.launchers.ray_node import NodeActor

FREE_PORT = node_module.free_port
NAME, SPACE = "c", "weft-c"
ARGS = ClusterArgs(model="base", num_nodes=2, registry="/r", port=9000, num_cpus=2)


class Server:
    """A node's process, which ends when it is told to."""

    started: list[Server]

    def __init__(self, command: list[str], **_: object) -> None:
        self.command = command
        self.num_signals = 0
        self._ended = threading.Event()
        self.started.append(self)

    def send_signal(self, _: int) -> None:
        self.num_signals += 1
        self._ended.set()

    def wait(self, timeout_s: float | None = None) -> None:
        self._ended.wait(timeout_s)

    def flag(self, name: str) -> str:
        return self.command[self.command.index(name) + 1]

    @property
    def members(self) -> list[str]:
        return Path(self.flag("--fleet")).read_text().split()


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> list[Server]:
    Server.started = []
    monkeypatch.setattr(subprocess, "Popen", Server)
    return Server.started


@pytest.fixture
def ray(
    servers: list[Server], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[FakeRay]:
    ray = FakeRay()
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr(node_module, "is_ready", lambda url: True)
    monkeypatch.setattr(node_module, "LOOK_S", 0.01)
    monkeypatch.setattr(node_module, "free_port", lambda host, port: port)
    monkeypatch.setattr(node_module, "os", SimpleNamespace(getpid=os.getpid, _exit=ENDED.append))
    monkeypatch.setattr(ControllerActor, "_keep", lambda self: None)  # tests make its steps
    ENDED.clear()
    yield ray
    for each in ray.made:
        if isinstance(each, NodeActor):
            each.stop()


ENDED: list[int] = []
"""With what code the processes of actors have ended by themselves."""


def tick() -> None:
    """What the controller does now and then, by one that has only just been started."""
    keeper = Keeper(RayLauncher(sys.modules["ray"], NAME))
    keeper.tick()
    wait_until(lambda: all(each.done() for each in keeper._stopping.values()))


@pytest.fixture
def cluster(ray: FakeRay) -> RayCluster:
    """A cluster whose nodes are up."""
    cluster = RayCluster(NAME)
    cluster.create(ARGS)
    tick()
    return cluster


def states(cluster: RayCluster) -> dict[str, str]:
    return {node.name: node.state for node in cluster.list()}


def test_a_node_writes_again_who_is_there_if_the_disk_was_full(
    ray: FakeRay, cluster: RayCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = next(each for each in ray.made if isinstance(each, NodeActor))
    told, full = ClusterFolder.tell_members, [OSError(errno.ENOSPC, "no space")]

    def tell(folder: ClusterFolder, addresses: list[str]) -> None:
        if folder is node._folder and full:
            raise full.pop()
        told(folder, addresses)

    monkeypatch.setattr(ClusterFolder, "tell_members", tell)
    node._state.tell_members({"node-9": "10.0.0.9:7070"})
    wait_until(lambda: "10.0.0.9:7070" in node._folder.members.read_text())
    assert not full


def test_the_controller_starts_what_is_planned(
    ray: FakeRay, cluster: RayCluster, servers: list[Server]
) -> None:
    assert states(cluster) == {"node-0": "up", "node-1": "up"}
    assert [node.url for node in cluster.list()] == [f"http://{HOST}:900{i}" for i in (0, 1)]
    options = ray.actors[SPACE, "node-1"].options
    assert options["num_cpus"] == 2 and options["scheduling_strategy"].bundles == [{"CPU": 2}]
    assert ray.actors[SPACE, CONTROLLER].options["num_cpus"] == 0
    assert servers[1].command[:4] == [sys.executable, "-m", "weft", "serve"]
    key = Path(servers[1].flag("--fleet-key"))
    assert len(key.read_text()) >= 32 and key.stat().st_mode & 0o077 == 0
    wait_until(lambda: all(each.members == [f"{HOST}:807{i}" for i in (0, 1)] for each in servers))
    tick()
    assert len(servers) == 2


def test_a_cluster_is_there_once(cluster: RayCluster) -> None:
    with pytest.raises(ConfigError, match=r"there is a cluster 'c' on Ray; .* --name c"):
        cluster.create(ARGS)
    with pytest.raises(ConfigError, match="there is no cluster 'other' on Ray"):
        RayCluster("other").list()
    with pytest.raises(ConfigError, match="there is no cluster 'other' on Ray"):
        RayCluster("other").scale(1)


def test_a_node_that_comes_back_knows_all_that_it_has_to(
    ray: FakeRay, cluster: RayCluster, servers: list[Server]
) -> None:
    ray.die(SPACE, "node-1")
    assert states(cluster) == {"node-0": "up", "node-1": "starting"}
    tick()
    assert RayLauncher(ray, NAME).state.members["node-1"] == f"{HOST}:8071", "its server may go on"
    ray.restart(SPACE, "node-1")
    assert servers[-1].command[1:4] == servers[1].command[1:4]
    assert servers[-1].members == [f"{HOST}:8070", f"{HOST}:8071"]
    assert states(cluster) == {"node-0": "up", "node-1": "up"}


def test_a_node_that_ray_has_given_up_is_started_anew(ray: FakeRay, cluster: RayCluster) -> None:
    ray.kill(ray.get_actor("node-0", SPACE), no_restart=True)
    assert states(cluster) == {"node-1": "up"}
    tick()
    assert states(cluster) == {"node-0": "up", "node-1": "up"}


def test_a_node_whose_machine_is_lost_goes_to_another(ray: FakeRay, cluster: RayCluster) -> None:
    ray.lose_machine(SPACE, "node-1")
    assert states(cluster) == {"node-0": "up", "node-1": "unplaced"}
    reports = {"node-0": {"state": "idle"}, "node-1": {"state": "down"}}
    shown = nodes_table(cluster.list(), reports).columns[1].cells
    assert [*shown] == ["idle", "unplaced"]
    tick()
    assert not ray.actors[SPACE, "node-1"].num_unanswered, "Ray would keep the questions for it"
    assert RayLauncher(ray, NAME).state.members["node-1"] == f"{HOST}:8071"
    ray.find_machine(SPACE, "node-1")
    assert states(cluster) == {"node-0": "up", "node-1": "up"}


def test_an_actor_ends_with_its_server(cluster: RayCluster, servers: list[Server]) -> None:
    key = Path(servers[0].flag("--fleet-key"))
    servers[0].send_signal(0)
    wait_until(lambda: ENDED == [1])
    assert not key.parent.exists(), "it has the secret"


def test_a_port_that_is_taken_is_left_alone() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        taken = other.getsockname()[1]
        assert FREE_PORT("127.0.0.2", taken) == taken
        other.listen()
        assert FREE_PORT("127.0.0.1", taken) not in (0, taken)


def scaled(cluster: RayCluster, num_nodes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """`scale`, while the controller makes its steps."""
    monkeypatch.setattr(cluster_module.time, "sleep", lambda _: tick())
    cluster.scale(num_nodes)


def test_scaling(
    ray: FakeRay, cluster: RayCluster, servers: list[Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    scaled(cluster, 12, monkeypatch)
    assert list(states(cluster)) == [f"node-{i}" for i in range(12)]
    scaled(cluster, 1, monkeypatch)
    assert states(cluster) == {"node-0": "up"}
    assert [each.num_signals for each in servers] == [0, *[1] * 11], "they end by themselves"
    wait_until(lambda: servers[0].members == [f"{HOST}:8070"] or (tick() is not None))
    scaled(cluster, 0, monkeypatch)
    assert not ray.actors and not ray.stored
    cluster.create(ARGS)
    tick()
    assert states(cluster) == {"node-0": "up", "node-1": "up"}


def test_an_end_that_was_cut_off_is_gone_on_with(
    ray: FakeRay, cluster: RayCluster, servers: list[Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The controller is killed between the end of a node and that of its actor."""
    with monkeypatch.context() as broken:
        broken.setattr(FakeRay, "kill", lambda *_, **__: None)
        cluster._state.scale(cluster._plan(), 1)
        tick()
    assert [each.num_signals for each in servers] == [0, 1]
    tick()
    assert states(cluster) == {"node-0": "up"}
    assert [each.num_signals for each in servers] == [0, 1], "it was told once"


def test_a_cluster_that_was_ended_halfway_can_be_started_again(
    ray: FakeRay, cluster: RayCluster
) -> None:
    cluster._state.scale(cluster._plan(), 0)
    cluster.create(ARGS)
    assert cluster._plan().args == ARGS


# -- several GPUs --------------------------------------------------------------------------------


def test_a_node_with_several_gpus_has_a_group_of_its_own(
    ray: FakeRay, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = RayCluster(NAME)
    cluster.create(ClusterArgs(model="base", num_nodes=3, registry="/r", num_gpus=4))
    tick()
    assert states(cluster) == {"node-0": "up", "node-1": "up", "node-2": "unplaced"}
    group = ray.groups[f"{SPACE}/node-0"]
    assert group.bundles == [{"CPU": 1, "GPU": 4}]
    assert (group.strategy, group.lifetime) == ("STRICT_PACK", "detached")
    options = ray.actors[SPACE, "node-0"].options
    assert options["scheduling_strategy"] is group and options["num_gpus"] == 4
    tick()
    assert len(ray.groups) == 3
    ray.kill(ray.get_actor("node-0", SPACE), no_restart=True)
    tick()
    assert ray.actors[SPACE, "node-0"].options["scheduling_strategy"] is group, "its GPUs are kept"
    scaled(cluster, 1, monkeypatch)
    assert list(ray.groups) == [f"{SPACE}/node-0"]
    scaled(cluster, 0, monkeypatch)
    assert not ray.groups


def up(*flags: str) -> str:
    command = ["cluster", "up", "base", "--on", "ray", "--registry", "/r", "--nodes", "1"]
    return CliRunner().invoke(app, [*command, "--name", NAME, *flags]).output.replace("\n", " ")


@pytest.mark.parametrize(
    ("flags", "num_gpus"),
    [
        ((), 0),
        (("--num-gpus", "0.5"), 0.5),
        (("--tensor-parallel-size", "4"), 4),
        (("--tensor-parallel-size", "4", "--num-gpus", "0"), 0),
    ],
)
def test_ranks_say_how_many_gpus_a_node_takes(
    flags: tuple[str, ...], num_gpus: float, ray: FakeRay, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weft.cli.cluster.time.sleep", lambda _: tick())
    assert "node-0  http://10.0.0.1:8000  up" in up(*flags)
    assert ray.actors[SPACE, "node-0"].options["num_gpus"] == num_gpus


def test_a_node_that_finds_no_room_is_named(ray: FakeRay, monkeypatch: pytest.MonkeyPatch) -> None:
    def make_room(_: float) -> None:
        tick()
        if seen:
            ray.find_machine(SPACE, "node-0")
        seen.append(states(RayCluster(NAME)))

    seen: list[dict[str, str]] = []
    ray.num_gpus = 1
    monkeypatch.setattr("weft.cli.cluster.time.sleep", make_room)
    said = up("--num-gpus", "2", "--num-cpus", "3")
    assert "node-0    unplaced: waits for a machine with 3 CPU and 2 GPU free" in said
    assert "node-0  http://10.0.0.1:8000  up" in said


def test_what_does_not_fit_is_refused(ray: FakeRay) -> None:
    assert "finds no room for a node with --num-cpus 0 and" in up("--num-cpus", "0")
    assert "--num-gpus 2 does not fit --tensor-parallel-size 4" in up(
        "--num-gpus", "2", "--tensor-parallel-size", "4"
    )
    assert "above 1 must be a whole number, got 1.5" in up("--num-gpus", "1.5")
    assert not ray.actors


def test_commands_find_the_cluster_from_any_shell(ray: FakeRay, cluster: RayCluster) -> None:
    def said(*command: str) -> str:
        done = CliRunner().invoke(app, ["cluster", *command, "--name", NAME])
        return done.output.replace("\n", " ")

    assert "or give --at" in said("status")
    assert f"http://{HOST}:900" in said("status", "--at", "ray")
    assert "where they were started" in said("scale", "1", "--at", "127.0.0.1:1")

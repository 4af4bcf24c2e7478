"""A cluster on a real Ray of several nodes on this machine, if Ray is installed: nodes of Weft, the
controller and whole nodes of Ray are killed, and streams go on."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from fleet_nodes import free_port
from patience import PATIENCE_S
from quick_start import children_of
from tiny import BASE

from weft.fleet.launchers import ClusterArgs
from weft.fleet.launchers.local import is_ready
from weft.fleet.launchers.ray_cluster import CONTROLLER, RayCluster, namespace_of

ray = pytest.importorskip("ray", reason="Ray is not installed")
Cluster = pytest.importorskip("ray.cluster_utils").Cluster
pytestmark = [pytest.mark.exhaustive, pytest.mark.timeout(4 * PATIENCE_S)]

NAME = "t"
STREAMS = 12
IPS = ("127.0.0.2", "127.0.0.3")
QUIET = {"include_dashboard": False}
FLAGS = ("--dtype", "float32", "--kv-cache-memory", "64M", "--num-threads", "1")


class Machines:
    """Ray on several machines, as far as one machine can be several: Ray nodes with IPs of their
    own, of 2 CPUs and 2 GPUs each, which are only counted. Ray's head has none."""

    def __init__(self) -> None:
        self._ray = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, **QUIET})
        self._nodes: dict[str, Any] = {}
        for ip in IPS:
            self.start(ip)

    @property
    def address(self) -> str:
        return str(self._ray.address)

    def start(self, ip: str) -> None:
        self._nodes[ip] = self._ray.add_node(node_ip_address=ip, num_cpus=2, num_gpus=2, **QUIET)

    def raylet(self, ip: str) -> subprocess.Popen[bytes]:
        """Ray's own process of this machine."""
        (raylet,) = self._nodes[ip].all_processes["raylet"]
        found: subprocess.Popen[bytes] = raylet.process
        return found

    def kill(self, ip: str) -> None:
        """All that runs there."""
        pid = self.raylet(ip).pid
        for each in (pid, *children_of(pid)):
            kill(each)

    def end(self) -> None:
        self._ray.shutdown()


@pytest.fixture(scope="module", autouse=True)
def machines() -> Iterator[Machines]:
    machines = Machines()
    ray.init(machines.address, log_to_driver=False, namespace=namespace_of(NAME))
    yield machines
    ray.shutdown()
    machines.end()


@pytest.fixture
def args(tmp_path: Path) -> ClusterArgs:
    registry = tmp_path / "registry"
    registry.mkdir()
    return ClusterArgs(
        model=str(BASE), num_nodes=2, registry=str(registry), port=free_port(), flags=FLAGS
    )


@pytest.fixture
def cluster() -> Iterator[RayCluster]:
    cluster = RayCluster(NAME)
    yield cluster
    if cluster._state.read() is not None:
        cluster.scale(0)


def until(holds: Callable[[], Any]) -> None:
    end_s = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < end_s, holds
        time.sleep(0.1)


def all_up(cluster: RayCluster, *numbers: int) -> bool:
    there = {node.name: node.state for node in cluster.list()}
    return there == {f"node-{number}": "up" for number in numbers}


def hosts(cluster: RayCluster) -> dict[str, str | None]:
    """On which machine each node is."""
    return {node.name: urlsplit(node.url).hostname for node in cluster.list()}


def pid_of(cluster: RayCluster, name: str) -> int | None:
    place = cluster._launcher.places().get(name)
    return place.pid if place else None


def body_of(number: int) -> dict[str, Any]:
    """Half of the requests are greedy, half are seeded."""
    return {
        "model": str(BASE),
        "prompt": f"stream {number}",
        "max_tokens": 400,
        "ignore_eos": True,
        "temperature": 0.0 if number % 2 else 1.5,
        "seed": number,
        "stream": True,
    }


async def read(client: httpx.AsyncClient, url: str, number: int, begun: asyncio.Queue[int]) -> str:
    text = ""
    async with client.stream("POST", f"{url}/v1/completions", json=body_of(number)) as answer:
        assert answer.status_code == 200, await answer.aread()
        async for line in answer.aiter_lines():
            said = line.removeprefix("data: ")
            if not said or said == "[DONE]":
                continue
            found = json.loads(said)
            assert "error" not in found, found
            text += "".join(choice["text"] for choice in found["choices"])
            begun.put_nowait(number)
    return text


def streams(url: str, harm: Callable[[], object] = lambda: None) -> list[str]:
    """The texts of some streams; something is done to the cluster once all have begun."""

    async def run() -> list[str]:
        begun: asyncio.Queue[int] = asyncio.Queue()
        async with httpx.AsyncClient(timeout=PATIENCE_S) as client:
            tasks = [asyncio.create_task(read(client, url, n, begun)) for n in range(STREAMS)]
            seen: set[int] = set()
            while len(seen) < STREAMS:
                seen.add(await begun.get())
            await asyncio.to_thread(harm)
            return await asyncio.gather(*tasks)

    return asyncio.run(run())


def num_lost(url: str) -> float:
    """How many requests of this node's clients have lost the node that they were on."""
    lines = httpx.get(f"{url}/metrics").text.splitlines()
    return sum(
        float(line.split()[-1]) for line in lines if line.startswith("weft:fleet_losses_total")
    )


def kill(pid: int | None) -> None:
    assert pid is not None
    os.kill(pid, signal.SIGKILL)


def weft(*command: str) -> str:
    """What a command says in a shell that knows no more than where Ray is."""
    address = ray.get_runtime_context().gcs_address
    found = subprocess.run(
        [sys.executable, "-m", "weft", "cluster", *command, "--name", NAME, "--at", "ray"],
        env={**os.environ, "RAY_ADDRESS": address, "XDG_STATE_HOME": "/nonexistent"},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert found.returncode == 0, found.stderr
    return found.stdout


def test_a_cluster_outlives_what_happens_to_its_actors(
    cluster: RayCluster, args: ClusterArgs
) -> None:
    cluster.create(args)
    until(lambda: all_up(cluster, 0, 1))
    assert sorted(hosts(cluster).values()) == [*IPS]
    url = cluster.list()[0].url
    undisturbed = streams(url)
    assert len(set(undisturbed)) > STREAMS / 2

    killed = pid_of(cluster, "node-1")
    begin_s = time.monotonic()
    assert streams(url, lambda: kill(killed)) == undisturbed
    until(lambda: pid_of(cluster, "node-1") not in (None, killed) and all_up(cluster, 0, 1))
    lost = num_lost(url)
    assert lost, "the node that was killed had some of the streams"
    print(f"a node that had {lost:.0f} streams was back after {time.monotonic() - begin_s:.1f} s")

    controller = ray.get_actor(CONTROLLER, namespace_of(NAME))
    killed = ray.get(controller.pid.remote())
    assert streams(url, lambda: kill(killed)) == undisturbed
    weft("scale", "3")
    until(lambda: all_up(cluster, 0, 1, 2))
    assert ray.get(controller.pid.remote()) != killed
    assert streams(url, lambda: weft("drain", "node-2")) == undisturbed
    assert "draining" in weft("status")

    assert streams(url, lambda: weft("scale", "1")) == undisturbed
    assert all_up(cluster, 0)
    ray.kill(ray.get_actor("node-0", namespace_of(NAME)), no_restart=True)
    until(lambda: all_up(cluster, 0))
    weft("scale", "0")
    assert cluster._launcher.names() == [] and cluster._state.read() is None


def test_a_cluster_outlives_a_machine(
    cluster: RayCluster, args: ClusterArgs, machines: Machines
) -> None:
    cluster.create(args)
    until(lambda: all_up(cluster, 0, 1))
    before, url = hosts(cluster), cluster.list()[0].url
    assert sorted(before.values()) == [*IPS]
    undisturbed, lost = streams(url), before["node-1"]
    begin_s = time.monotonic()
    assert streams(url, lambda: machines.kill(lost)) == undisturbed
    until(lambda: hosts(cluster)["node-1"] == before["node-0"] and all_up(cluster, 0, 1))
    print(f"its node was up on another machine after {time.monotonic() - begin_s:.1f} s")
    assert num_lost(url), "the machine that was killed had some of the streams"
    assert streams(url, lambda: weft("drain", "node-1")) == undisturbed

    machines.start(lost)
    weft("scale", "3")
    until(lambda: hosts(cluster).get("node-2") == lost)
    until(lambda: cluster.list()[2].state == "up")
    assert streams(cluster.list()[2].url) == undisturbed


def test_a_machine_that_ray_loses_sight_of(
    cluster: RayCluster, args: ClusterArgs, machines: Machines
) -> None:
    """Its node goes on until Ray has started another one in its place."""
    cluster.create(args)
    until(lambda: all_up(cluster, 0, 1))
    before, (url, old) = hosts(cluster), [node.url for node in cluster.list()]
    undisturbed, unseen = streams(url), str(before["node-1"])
    raylet = machines.raylet(unseen)
    raylet.send_signal(signal.SIGSTOP)
    begin_s = time.monotonic()
    until(lambda: streams(url) == undisturbed and hosts(cluster)["node-1"] == before["node-0"])
    until(lambda: all_up(cluster, 0, 1))
    print(f"another node was up in its place after {time.monotonic() - begin_s:.1f} s")
    assert is_ready(old) and streams(url) == undisturbed
    assert streams(url, lambda: raylet.send_signal(signal.SIGCONT)) == undisturbed
    until(lambda: raylet.poll() is not None and not is_ready(old))
    assert streams(url) == undisturbed
    machines.start(unseen)


def test_a_node_with_several_gpus_has_them_on_one_machine(
    cluster: RayCluster, args: ClusterArgs, machines: Machines
) -> None:
    flags = (*FLAGS, "--tensor-parallel-size", "2")
    cluster.create(replace(args, num_nodes=3, num_gpus=2, flags=flags))

    def states() -> list[str]:
        return [node.state for node in cluster.list()]

    until(lambda: states() == ["up", "up", "unplaced"])
    groups = ray.util.placement_group_table().values()
    kept = [each["bundles"][0] for each in groups if each["state"] != "REMOVED"]
    assert kept == [{"CPU": 1, "GPU": 2}] * 3
    killed = pid_of(cluster, "node-0")
    kill(killed)
    until(lambda: pid_of(cluster, "node-0") not in (None, killed))
    until(lambda: states() == ["up", "up", "unplaced"])
    lost = hosts(cluster)["node-1"]
    assert sorted([hosts(cluster)["node-0"], lost]) == [*IPS]
    machines.kill(lost)
    until(lambda: states() == ["up", "unplaced", "unplaced"])
    assert "unplaced" in weft("status")
    machines.start(lost)
    until(lambda: sorted(states()) == ["unplaced", "up", "up"])
    cluster.scale(2)
    until(lambda: states() == ["up", "up"])
    cluster.scale(0)
    left = ray.util.placement_group_table().values()
    assert {each["state"] for each in left} == {"REMOVED"}

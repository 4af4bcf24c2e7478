"""A cluster on Ray as commands see it, and the actor that keeps its nodes as they should be.

    weft cluster up, scale ──▶ Ray's store: what is to be ◀── controller ──▶ node-0, node-1, ...
    weft cluster status    ──▶ Ray's list of actors                          (actors)

All actors are named and detached, and Ray starts them again wherever it has room. No state is lost
with them: which nodes there should be is in Ray's store (`weft.fleet.launchers.ray_state`), and
which there are is in Ray's list. All nodes serve while the controller is gone, so it can be killed
at any time.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from weft.core.errors import ConfigError
from weft.fleet.launchers import ClusterArgs, Placed
from weft.fleet.launchers.ray import RayLauncher, namespace_of
from weft.fleet.launchers.ray_state import Plan

logger = logging.getLogger(__name__)

CONTROLLER = "controller"
LOOK_S = 1.0
"""How often the controller looks after the nodes."""
MAX_STOPPING = 8
"""How many nodes are ended at a time."""


def connect(name: str) -> Any:
    """Ray, connected to the cluster that RAY_ADDRESS names, or that runs on this machine. Raises
    ConfigError."""
    try:
        import ray
    except ImportError:
        raise ConfigError("--on ray needs pip install weft[ray]", "on") from None
    if not ray.is_initialized():
        options = {"namespace": namespace_of(name), "log_to_driver": False}
        try:
            ray.init("auto", logging_level="error", **options)
        except (ConnectionError, RuntimeError) as error:
            message = f"no Ray cluster was found; start one with ray start --head ({error})"
            raise ConfigError(message, "on") from error
    return ray


class Keeper:
    """Makes the nodes what the plan says, step by step. It knows nothing that it could not find out
    again, so that another one may go on with its work at any time."""

    def __init__(self, launcher: RayLauncher) -> None:
        self._launcher = launcher
        self._state = launcher.state
        self._stopping: dict[str, Future[None]] = {}
        self._stoppers = ThreadPoolExecutor(MAX_STOPPING, "weft-stop")

    def tick(self) -> None:
        """Start the nodes that are missing, begin to stop those that are not in the plan, and tell
        all nodes which others there are."""
        plan = self._state.read()
        if plan is None:
            return
        there = self._launcher.names()
        for name in plan.args.names:
            if name not in there:
                self._launcher.start(name)
        for name in there:
            if name not in plan.args.names and name not in self._stopping:
                self._stopping[name] = self._stoppers.submit(self._launcher.stop, name)
        for name, stopped in list(self._stopping.items()):
            if stopped.done():
                del self._stopping[name]
                if error := stopped.exception():
                    logger.warning("%s was killed: %s", name, error)
        self._tell()

    def _tell(self) -> None:
        """A node whose actor does not answer now stays in the list: its server may go on."""
        before, places = self._state.members, self._launcher.places()
        found = {name: place.address for name, place in places.items() if place is not None}
        members = {name: found.get(name) or before.get(name, "") for name in places}
        members = {name: address for name, address in members.items() if address}
        if members != before:
            self._state.tell_members(members)


class ControllerActor:
    """Looks after the nodes of one cluster."""

    def __init__(self, cluster: str) -> None:
        import ray

        self._keeper = Keeper(RayLauncher(ray, cluster))
        threading.Thread(target=self._keep, daemon=True).start()

    def pid(self) -> int:
        return os.getpid()

    def _keep(self) -> None:
        pause = threading.Event()
        while True:
            try:
                self._keeper.tick()
            except Exception as error:  # of Ray, whatever it is: it may come back
                logger.warning("the nodes could not be checked: %s", error)
            pause.wait(LOOK_S)


class RayCluster:
    """The cluster of a name, for commands."""

    def __init__(self, name: str) -> None:
        """Raises ConfigError if Ray is not there."""
        self._name = name
        self._ray = connect(name)
        self._launcher = RayLauncher(self._ray, name)
        self._state = self._launcher.state

    def list(self) -> Sequence[Placed]:
        """Raises ConfigError if there is no such cluster."""
        self._plan()
        return self._launcher.list()

    def create(self, args: ClusterArgs) -> None:
        """Store what the cluster should be; its controller starts the nodes. Raises ConfigError if
        there is one with this name."""
        if not self._state.create(Plan(args, secrets.token_hex(32))):
            end = f"end it with weft cluster scale 0 --name {self._name}"
            message = f"there is a cluster {self._name!r} on Ray; {end}"
            raise ConfigError(message, "name")
        self._have_controller()

    def scale(self, num_nodes: int) -> None:
        """Returns when as many nodes are there, or starting, and the others have ended. Raises
        ConfigError if there is no such cluster."""
        self._state.scale(self._plan(), num_nodes)
        self._have_controller()
        while self._launcher.names() != self._plan().args.names:
            time.sleep(LOOK_S / 2)
        if not num_nodes:
            controller = self._ray.get_actor(CONTROLLER, namespace_of(self._name))
            self._ray.kill(controller, no_restart=True)
            self._state.delete()

    def _plan(self) -> Plan:
        plan = self._state.read()
        if plan is None:
            message = f"there is no cluster {self._name!r} on Ray; start one with weft cluster up"
            raise ConfigError(message, "name")
        return plan

    def _have_controller(self) -> None:
        """Start the cluster's controller, unless it is there."""
        self._launcher.actor(ControllerActor, CONTROLLER, num_cpus=0).remote(self._name)

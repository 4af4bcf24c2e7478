"""Nodes as actors of a Ray cluster, which places them and starts them again; see
`weft.fleet.launchers.ray_node` for what runs there.

Requests and tokens travel between the servers, and none of them passes through Ray. Each node is
an actor in a placement group of its own, whose one bundle has all that the node takes: so its GPUs
are on one machine, and stay the node's while it is started again. Ray puts a group where most is
free, so nodes spread over the machines, and moves it when its machine is lost.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

from weft.core.errors import Unreachable
from weft.fleet.launchers import NODE, ClusterArgs, Placed, State
from weft.fleet.launchers.ray_node import STOP_S, NodeActor, NodePlace
from weft.fleet.launchers.ray_state import RayState

ANSWER_S = 5.0


def namespace_of(name: str) -> str:
    """Where Ray has the actors of a cluster."""
    return f"weft-{name}"


class RayLauncher:
    """The nodes of one cluster, as actors."""

    def __init__(self, ray: Any, name: str) -> None:
        """`name`: the cluster's."""
        self.state = RayState(ray, namespace_of(name))
        self._ray = ray
        self._namespace = namespace_of(name)
        self._pids: dict[str, set[int]] = {}
        """All process ids that each node was seen to have; each further one is a restart."""

    def start(self, name: str) -> None:
        if (plan := self.state.read()) is None:  # the cluster has ended
            return
        args = plan.args
        where = self._ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
            self._group(name) or self._new_group(name, args), placement_group_bundle_index=0
        )
        options = {"num_gpus": args.num_gpus, "scheduling_strategy": where}
        self.actor(NodeActor, name, args.num_cpus, **options).remote(name, self._namespace)

    def stop(self, name: str) -> None:
        try:
            actor = self._ray.get_actor(name, self._namespace)
        except ValueError:  # it is gone already
            return
        try:
            if name not in self._unplaced():
                self._ray.get(actor.stop.remote(), timeout=STOP_S + ANSWER_S)
        except self._ray.exceptions.RayError as error:
            raise Unreachable(f"{name} did not end by itself: {type(error).__name__}") from error
        finally:  # the group first: it is found by the name of the node, which goes with the actor
            if (group := self._group(name)) is not None:
                self._ray.util.remove_placement_group(group)
            self._ray.kill(actor, no_restart=True)

    def list(self) -> list[Placed]:
        places, unplaced = self.places(), self._unplaced()
        return [self._placed(name, place, name in unplaced) for name, place in places.items()]

    def _placed(self, name: str, place: NodePlace | None, is_unplaced: bool) -> Placed:
        pids = self._pids.setdefault(name, set())
        if place is None:
            state: State = "unplaced" if is_unplaced else "starting"
            return Placed(name, "", state, max(len(pids) - 1, 0))
        pids.add(place.pid)
        return Placed(name, place.url, "up" if place.is_ready else "starting", len(pids) - 1)

    def names(self) -> Sequence[str]:
        """The names of the nodes that Ray knows, by their numbers."""
        listed = self._ray.util.list_named_actors(all_namespaces=True)
        here = [each["name"] for each in listed if each["namespace"] == self._namespace]
        nodes = [name for name in here if name.startswith(NODE)]
        return sorted(nodes, key=lambda name: int(name.removeprefix(NODE)))

    def places(self) -> dict[str, NodePlace | None]:
        """Where each node is; None for those whose actors do not answer now. Those that have no
        machine are not asked: Ray would keep the questions until they have one."""
        found: dict[str, NodePlace | None] = dict.fromkeys(self.names())
        asked: dict[Any, str] = {}
        for name in found.keys() - self._unplaced():
            with contextlib.suppress(ValueError):  # it has just gone
                asked[self._ray.get_actor(name, self._namespace).place.remote()] = name
        if not asked:
            return found
        refs = [*asked]
        ready, _ = self._ray.wait(refs, num_returns=len(refs), timeout=ANSWER_S)
        for ref in ready:
            with contextlib.suppress(self._ray.exceptions.RayError):
                found[asked[ref]] = self._ray.get(ref)
        return found

    def actor(self, kind: Callable[..., object], name: str, num_cpus: float, **options: Any) -> Any:
        """A class whose `remote` makes the actor `name` unless it is there; Ray restarts it."""
        return self._ray.remote(kind).options(
            name=name,
            namespace=self._namespace,
            lifetime="detached",
            get_if_exists=True,
            max_restarts=-1,
            max_task_retries=0,
            max_concurrency=4,
            num_cpus=num_cpus,
            **options,
        )

    def _new_group(self, name: str, args: ClusterArgs) -> Any:
        return self._ray.util.placement_group(
            [args.resources],
            strategy="STRICT_PACK",
            name=f"{self._namespace}/{name}",
            lifetime="detached",
        )

    def _group(self, name: str) -> Any:
        """The placement group of a node; None if it has none."""
        try:
            return self._ray.util.get_placement_group(f"{self._namespace}/{name}")
        except ValueError:
            return None

    def _unplaced(self) -> set[str]:
        """The nodes for which Ray has found no machine yet, or none after theirs was lost."""
        table = self._ray.util.placement_group_table().values()
        waiting = [each["name"] for each in table if each["state"] in ("PENDING", "RESCHEDULING")]
        split = [name.rpartition("/") for name in waiting]
        return {name for namespace, _, name in split if namespace == self._namespace}

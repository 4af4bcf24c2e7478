"""What Ray's own store keeps of a cluster: what its nodes are started with, and where they are.

The store is in Ray's head, and outlives every actor. So an actor that is started anew, on whatever
machine, reads here all that it has to know, and a command in any shell finds the cluster.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from typing import Any

from weft.fleet.launchers import ClusterArgs


@dataclass(frozen=True, slots=True)
class Plan:
    """What a cluster should be."""

    args: ClusterArgs
    key: str
    """The secret of the links between its nodes."""


class RayState:
    """What Ray's store knows of one cluster; anybody may change it, and the last one counts."""

    def __init__(self, ray: Any, cluster: str) -> None:
        self._store = ray.experimental.internal_kv
        self._plan, self._members = f"{cluster}/plan", f"{cluster}/members"

    def read(self) -> Plan | None:
        """None if there is no such cluster."""
        content = self._store._internal_kv_get(self._plan)
        if content is None:
            return None
        found = json.loads(content)
        return Plan(ClusterArgs.of(found["args"]), found["key"])

    def create(self, plan: Plan) -> bool:
        """Store a plan, unless there is one with nodes. Returns whether it was stored."""
        before = self.read()
        if before is not None and not before.args.num_nodes:
            self.delete()
        return not self._store._internal_kv_put(self._plan, _written(plan), overwrite=False)

    def scale(self, plan: Plan, num_nodes: int) -> None:
        """Let there be so many nodes from now on."""
        plan = replace(plan, args=replace(plan.args, num_nodes=num_nodes))
        self._store._internal_kv_put(self._plan, _written(plan))

    def delete(self) -> None:
        self._store._internal_kv_del(self._plan)
        self._store._internal_kv_del(self._members)

    @property
    def members(self) -> dict[str, str]:
        """The HOST:PORT at which others reach each node, by the node's name."""
        content = self._store._internal_kv_get(self._members)
        return {} if content is None else dict(json.loads(content))

    def tell_members(self, members: dict[str, str]) -> None:
        self._store._internal_kv_put(self._members, json.dumps(members))


def _written(plan: Plan) -> str:
    return json.dumps({"args": asdict(plan.args), "key": plan.key})

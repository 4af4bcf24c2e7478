"""Ray, as far as Weft uses it, in one process: an actor is an object, and a call runs at once.

What outlives actors in Ray does so here: its store, the list of names, placement groups.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

HOST = "10.0.0.1"


class RayError(Exception):
    """The base of all errors of Ray."""


@dataclass(eq=False)
class Actor:
    name: str
    make: Callable[[], Any]
    options: dict[str, Any]
    instance: Any = None
    """None while it is not there: it has died, or has no room."""
    num_unanswered: int = 0


@dataclass(eq=False)
class Group:
    name: str
    bundles: list[dict[str, float]]
    strategy: str
    lifetime: str
    state: str = "CREATED"


@dataclass(eq=False)
class Call:
    """The outcome of a call of an actor's method, as one of Ray's references."""

    value: Any = None
    error: Exception | None = None
    is_answered: bool = True


@dataclass
class Handle:
    """The handle by which others call an actor."""

    actor: Actor

    def __getattr__(self, method: str) -> Any:
        return SimpleNamespace(remote=partial(self._call, method))

    def _call(self, method: str, *args: Any) -> Call:
        if self.actor.instance is None:
            self.actor.num_unanswered += 1
            return Call(is_answered=False)
        try:
            return Call(getattr(self.actor.instance, method)(*args))
        except RayError as error:
            return Call(error=error)


@dataclass
class FakeRay:
    """The module `ray`."""

    num_gpus: float = 8
    """The GPUs of the one machine."""
    actors: dict[tuple[str, str], Actor] = field(default_factory=dict)
    """By namespace and name."""
    groups: dict[str, Group] = field(default_factory=dict)
    stored: dict[str, str] = field(default_factory=dict)
    made: list[object] = field(default_factory=list)
    """The instances of all actors so far."""

    def __post_init__(self) -> None:
        self.exceptions = SimpleNamespace(RayError=RayError)
        self.experimental = SimpleNamespace(
            internal_kv=SimpleNamespace(
                _internal_kv_get=self.stored.get,
                _internal_kv_put=self._put,
                _internal_kv_del=lambda key: self.stored.pop(key, None),
            )
        )
        self.util = SimpleNamespace(
            get_node_ip_address=lambda: HOST,
            list_named_actors=lambda all_namespaces: [
                {"namespace": namespace, "name": name} for namespace, name in self.actors
            ],
            placement_group=self._place,
            get_placement_group=self._find_group,
            remove_placement_group=lambda group: self.groups.pop(group.name),
            placement_group_table=lambda: {id(each): vars(each) for each in self.groups.values()},
            scheduling_strategies=SimpleNamespace(
                PlacementGroupSchedulingStrategy=lambda group, placement_group_bundle_index: group
            ),
        )

    def is_initialized(self) -> bool:
        return True

    def remote(self, kind: Callable[..., Any]) -> Any:
        def options(**given: Any) -> Any:
            return SimpleNamespace(remote=partial(self._start, kind, given))

        return SimpleNamespace(options=options)

    def _start(self, kind: Callable[..., Any], options: dict[str, Any], *args: Any) -> None:
        key = options["namespace"], options["name"]
        assert options["lifetime"] == "detached" and options["max_restarts"] == -1
        if key in self.actors:
            assert options["get_if_exists"]
            return
        self.actors[key] = Actor(options["name"], partial(kind, *args), options)
        self.restart(*key)

    def restart(self, namespace: str, name: str) -> None:
        """What Ray does when an actor has died, if there is room."""
        actor = self.actors[namespace, name]
        where = actor.options.get("scheduling_strategy")
        if not isinstance(where, Group) or where.state == "CREATED":
            actor.instance = actor.make()
            self.made.append(actor.instance)

    def die(self, namespace: str, name: str) -> None:
        """The actor's process is gone, and not back yet."""
        self.actors[namespace, name].instance = None

    def lose_machine(self, namespace: str, name: str) -> None:
        """The actor's machine is gone, and no other has room."""
        self.die(namespace, name)
        self.groups[f"{namespace}/{name}"].state = "RESCHEDULING"

    def find_machine(self, namespace: str, name: str) -> None:
        self.groups[f"{namespace}/{name}"].state = "CREATED"
        self.restart(namespace, name)

    def get_actor(self, name: str, namespace: str) -> Handle:
        if (namespace, name) not in self.actors:
            raise ValueError(f"no actor {name}")
        return Handle(self.actors[namespace, name])

    def kill(self, handle: Handle, no_restart: bool) -> None:
        assert no_restart
        self.actors = {key: each for key, each in self.actors.items() if each is not handle.actor}

    def get(self, call: Call, timeout: float | None = None) -> Any:
        if not call.is_answered:
            raise RayError("no answer")
        if call.error is not None:
            raise call.error
        return call.value

    def wait(self, calls: list[Call], num_returns: int, timeout: float) -> tuple[list[Call], int]:
        assert calls and num_returns == len(calls)
        return [call for call in calls if call.is_answered], 0

    def _put(self, key: str, value: str, overwrite: bool = True) -> bool:
        was_there = key in self.stored
        if overwrite or not was_there:
            self.stored[key] = value
        return was_there

    def _place(
        self, bundles: list[dict[str, float]], strategy: str, name: str, lifetime: str
    ) -> Group:
        taken = sum(
            b.get("GPU", 0) for g in self.groups.values() if g.state == "CREATED" for b in g.bundles
        )
        fits = taken + bundles[0].get("GPU", 0) <= self.num_gpus
        group = Group(name, bundles, strategy, lifetime, "CREATED" if fits else "PENDING")
        self.groups[name] = group
        return group

    def _find_group(self, name: str) -> Group:
        if name not in self.groups:
            raise ValueError(f"no group {name}")
        return self.groups[name]

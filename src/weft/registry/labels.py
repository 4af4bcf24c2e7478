"""Labels of adapters, which say what nodes of a fleet should keep them, and labels of nodes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field

from weft.core.errors import InvalidRequest
from weft.registry.records import Name

NODES = "weft.nodes"
"""Names of nodes with commas between them: the adapter is kept on them, and served there alone."""
NODE_LABELS = "weft.node-labels"
"""Labels that nodes have, KEY=VALUE with commas between them: the adapter is kept on the nodes that
have all of them, and served there alone."""
REPLICAS = "weft.replicas"
"""On how many nodes the adapter is kept at least."""
OWN = "weft."
MAX_NODES = 64
MAX_NODE_LABELS = 16
_LABEL = re.compile("([A-Za-z0-9][A-Za-z0-9._/-]{0,62})=([A-Za-z0-9][A-Za-z0-9._/-]{0,62})")


@dataclass(frozen=True, slots=True)
class NodePin:
    """Which nodes keep an adapter at all times, and how many of them at least."""

    nodes: tuple[str, ...] = ()
    """Only these may serve it; empty: any."""
    replicas: int = 0
    labels: Mapping[str, str] = field(default_factory=dict)
    """Only nodes with all of these may serve it."""

    def __str__(self) -> str:
        """As labels."""
        more = f"{REPLICAS}={self.replicas}" if self.replicas else ""
        return " ".join(filter(None, (self.bond, more)))

    @property
    def bond(self) -> str:
        """The label that says which nodes alone may serve it; "" if any may."""
        if self.labels:
            return f"{NODE_LABELS}={','.join(f'{k}={v}' for k, v in self.labels.items())}"
        return f"{NODES}={','.join(self.nodes)}" if self.nodes else ""

    def allows(self, node: str, labels: Mapping[str, str]) -> bool:
        """Whether the node of this name, which has these labels, may serve the adapter."""
        if self.nodes and node not in self.nodes:
            return False
        return self.labels.items() <= labels.items()


class Pins:
    """The node pins of all names, and of their contents."""

    def __init__(self) -> None:
        self.by_digest: dict[str, NodePin] = {}
        self._said: dict[str, tuple[NodePin, set[str]]] = {}
        """By name: its pin, and the digests that it is for. The name that changed last is the last
        one."""

    def follow(self, name: str, entry: Name | None) -> None:
        """Update a name from its registry entry (None: it is gone). If several names have the same
        content, the pin of the one that changed last holds."""
        _, before = self._said.pop(name, (None, set()))
        if entry is not None and entry.labels and (pin := pin_of(entry.labels)) is not None:
            digests = {version.digest for version in entry.versions.values()}
            self._said[name] = pin, digests
            self.by_digest.update(dict.fromkeys(digests, pin))
            before -= digests
        for digest in before:
            if others := [pin for pin, digests in self._said.values() if digest in digests]:
                self.by_digest[digest] = others[-1]
            else:
                del self.by_digest[digest]

    @property
    def names(self) -> Set[str]:
        """The names that have a pin."""
        return self._said.keys()


def pin_of(labels: Mapping[str, str]) -> NodePin | None:
    """The pin that an adapter's labels ask for, if any. Raises InvalidRequest, naming the label."""
    for key in labels:
        if key.startswith(OWN) and key not in (NODES, NODE_LABELS, REPLICAS):
            known = f"{NODES}, {NODE_LABELS} and {REPLICAS}"
            raise InvalidRequest(f"{key}: labels of Weft are {known}", key)
    if NODES in labels and NODE_LABELS in labels:
        message = f"{NODES} and {NODE_LABELS} can't both say which nodes may serve an adapter"
        raise InvalidRequest(message, NODE_LABELS)
    nodes, replicas = labels.get(NODES), labels.get(REPLICAS)
    names = () if nodes is None else tuple(dict.fromkeys(nodes.split(",")))
    if not all(names) or len(names) > MAX_NODES:
        message = f"{NODES} takes 1 to {MAX_NODES} names of nodes with commas between them"
        raise InvalidRequest(f"{message}, got {nodes!r}", NODES)
    if replicas is not None and not (replicas.isascii() and replicas.isdecimal()):
        raise InvalidRequest(f"{REPLICAS} takes a number of nodes, got {replicas!r}", REPLICAS)
    number = int(replicas or 0)
    if number > MAX_NODES or (replicas is not None and not number):
        raise InvalidRequest(f"{REPLICAS} must be from 1 to {MAX_NODES}, got {replicas}", REPLICAS)
    if names and number > len(names):
        message = f"{REPLICAS}={number} can't be met by the {len(names)} nodes of {NODES}"
        raise InvalidRequest(message, REPLICAS)
    wanted = (
        node_labels(labels[NODE_LABELS].split(","), NODE_LABELS) if NODE_LABELS in labels else {}
    )
    return NodePin(names, number, wanted) if names or number or wanted else None


def node_labels(given: Iterable[str], where: str) -> dict[str, str]:
    """Parse labels of a node, each KEY=VALUE. Raises InvalidRequest, naming their source
    `where`."""
    found: dict[str, str] = {}
    for each in given:
        match = _LABEL.fullmatch(each)
        if match is None:
            raise InvalidRequest(
                f"{where} takes KEY=VALUE, each of 1 to 63 letters, digits, '.', '_', '-' and '/',"
                f" the first one a letter or digit; got {each[:160]!r}",
                where,
            )
        key, value = match.groups()
        if key in found:
            raise InvalidRequest(f"{where} has {key!r} twice", where)
        if key.startswith(OWN):
            raise InvalidRequest(f"{where}: no label of a node begins with {OWN}", where)
        found[key] = value
    if len(found) > MAX_NODE_LABELS:
        message = f"{where} takes at most {MAX_NODE_LABELS} labels, got {len(found)}"
        raise InvalidRequest(message, where)
    return found

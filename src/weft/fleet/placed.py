"""Tracks which adapters each node should hold, and which it has.

Every node has all pinned adapters. A node gets any other with the first request that needs it, by
its digest: from the folder that the holder named, or, on another machine, from the registry. Hot
ones are loaded on further nodes ahead of requests.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

from weft.core.adapters import AdapterInfo, AdapterSource
from weft.core.errors import AdapterUnavailable, EngineDead, WeftError
from weft.core.load import adapter_key
from weft.core.requests import EngineRequest
from weft.fleet.consolidate import Placement
from weft.fleet.live_requests import LiveRequest, too_short
from weft.fleet.view import FleetView
from weft.registry.labels import NODES, NodePin

if TYPE_CHECKING:
    from weft.fleet.node import Node

logger = logging.getLogger(__name__)

HOLDER = "fleet"
"""The holder's name that a process uses on nodes, for all of its own holders."""


@dataclass(slots=True)
class _Content:
    info: AdapterInfo
    holders: dict[str, tuple[AdapterSource, bool]] = field(default_factory=dict)
    """The source and the pin of each hold, the newest last."""

    @property
    def pinned(self) -> bool:
        return any(pinned for _, pinned in self.holders.values())

    @property
    def sources(self) -> list[AdapterSource]:
        """Where it may be, the newest first."""
        return list(dict.fromkeys(source for source, _ in reversed(self.holders.values())))


def kept_on(pin: NodePin, digest: str, nodes: Mapping[str, Node], view: FleetView) -> Sequence[str]:
    """The names of the nodes that are to keep an adapter: those that its pin names, or those that
    are up and have its labels, the first ones in the adapter's own order of nodes if the pin has a
    number."""
    if pin.nodes:
        return pin.nodes
    order_s = view.told.orders.seconds(adapter_key(digest))
    up = [(order_s[i], node.name) for i, node in view.nodes.items() if not view.closed_s[i]]
    names = [name for _, name in sorted(up) if name in nodes and _may_serve(pin, nodes[name])]
    return names[: pin.replicas or None]


def _may_serve(pin: NodePin, node: Node) -> bool:
    """Whether a pin lets a node serve. A node's labels are unknown while it is down."""
    return pin.allows(node.name, node.report.labels if node.report else {})


def _unmet(pin: NodePin) -> AdapterUnavailable:
    if pin.nodes:
        message = f"label {NODES} lets only {', '.join(pin.nodes)} serve the adapter, and none of"
        return AdapterUnavailable(f"{message} them is up", "model")
    message = f"label {pin.bond} lets only nodes with these labels serve the adapter, and none is"
    return AdapterUnavailable(f"{message} up", "model")


class PlacedAdapters:
    """Owner of what this process wants nodes to hold. `Node.held` has what each node holds."""

    def __init__(self, holders: Callable[[str], Sequence[str]]) -> None:
        """`holders`: says for a digest at which addresses nodes have it."""
        self._holders = holders
        self.popular = Placement()
        self.longest = 0
        """The context for which this process makes its requests."""
        self.pins: Mapping[str, NodePin] = {}
        """By digest: which nodes are to keep it whatever its load. Whoever knows the adapters'
        labels sets it."""
        self._kept: dict[str, frozenset[str]] = {}
        """By digest: the names of nodes on which it is pinned because of that."""
        self._wanted: dict[str, _Content] = {}
        """By digest."""
        self._digests: dict[int, str] = {}
        """Those of `_wanted` by their keys."""
        self._coming: dict[tuple[Node, str], asyncio.Task[None]] = {}
        """Holds under way."""
        self._num_holding = 0
        """How many calls of `hold` are under way."""
        self._released: set[str] = set()
        """What nodes were told to let go of meanwhile. Those calls may be about the same content,
        which a node then has no longer when they end."""

    async def hold(
        self, nodes: Sequence[Node], source: AdapterSource, holder: str, pinned: bool
    ) -> AdapterInfo:
        """See `EngineClient.hold`; the first of these nodes that is up takes the content, and
        after it all of them if it is pinned."""
        pin = self.pins.get(source.digest or "")
        if pin is not None and pin.bond:
            nodes = [node for node in nodes if _may_serve(pin, node)]
            if not nodes:
                raise _unmet(pin)
        self._num_holding += 1
        try:
            info, first = await self._hold_first(nodes, source, pinned)
            while info.digest in self._released:
                self._released.discard(info.digest)
                source = source.again(info.digest, info.checked)
                info, first = await self._hold_first([first], source, pinned)
        finally:
            self._num_holding -= 1
            if not self._num_holding:
                self._released.clear()
        content = self._wanted.setdefault(info.digest, _Content(info))
        self._digests[adapter_key(info.digest)] = info.digest
        content.info = info
        was_pinned = content.pinned
        content.holders.pop(holder, None)
        content.holders[holder] = (source.again(info.digest, info.checked), pinned)
        first.held.add(info.digest)
        if content.pinned != was_pinned or content.pinned:
            await self._bring_to(nodes, info.digest)
        return info

    async def _hold_first(
        self, nodes: Sequence[Node], source: AdapterSource, pinned: bool
    ) -> tuple[AdapterInfo, Node]:
        error: WeftError = EngineDead("no node of the fleet is up")
        for node in nodes:
            known = self._wanted.get(source.digest) if source.digest else None
            try:
                pin = pinned or (known is not None and known.pinned)
                return await node.hold(self._with_peers(source, node), HOLDER, pin), node
            except EngineDead as dead:
                error = dead
        raise error

    async def release(self, nodes: Iterable[Node], digest: str, holder: str) -> None:
        """See `EngineClient.release`."""
        content = self._wanted.get(digest)
        if content is None:
            return
        was_pinned = content.pinned
        content.holders.pop(holder, None)
        having = [node for node in nodes if digest in node.held]
        if not content.holders:
            del self._wanted[digest]
            self._digests.pop(adapter_key(digest), None)
            calls = [self._let_go(node, digest) for node in having]
            await asyncio.gather(*calls, return_exceptions=True)
        elif content.pinned != was_pinned:
            await self._bring_to(having, digest)

    async def _let_go(self, node: Node, digest: str) -> None:
        """Tell a node that content is not wanted, unless somebody holds it again by now."""
        if digest not in self._wanted:
            node.held.discard(digest)
            if self._num_holding:
                self._released.add(digest)
            await node.release(digest, HOLDER)

    async def bring(self, node: Node, digests: Iterable[str]) -> None:
        """Let a node hold content. Raises EngineDead, AdapterError, RegistryUnavailable."""
        for digest in digests:
            key = node, digest
            task = self._coming.get(key)
            if task is None:
                task = self._coming[key] = asyncio.create_task(self._bring(node, digest))
                task.add_done_callback(partial(self._came, key))
            await asyncio.shield(task)

    def _came(self, key: tuple[Node, str], task: asyncio.Task[None]) -> None:
        del self._coming[key]
        if not task.cancelled():
            task.exception()  # whoever waited for it may have left

    async def spread(self, nodes: Sequence[Node]) -> None:
        """Let nodes hold all that is pinned, as far as they can."""
        for digest in [digest for digest, each in self._wanted.items() if each.pinned]:
            barred = self._barred([digest], nodes)
            await self._bring_to([node for node in nodes if node.name not in barred], digest)

    async def prefetch(self, nodes: Mapping[str, Node], view: FleetView) -> None:
        """Let adapters be on the nodes that are to keep them, and hot ones on so many that none is
        their only one; one by one."""
        for pinned in sorted(self._kept.keys() | (self.pins.keys() & self._wanted.keys())):
            await self._keep(pinned, nodes, view)
        for each in self.popular.prefetches(view):
            node, digest = nodes.get(each.node), self._digests.get(each.adapter)
            if node is None or digest is None or digest in node.held:
                continue
            if self._barred([digest], [node]):
                continue
            try:
                await self.bring(node, [digest])
            except WeftError as error:
                logger.info("node %s could not load a hot adapter: %s", node.name, error.message)

    async def _keep(self, digest: str, nodes: Mapping[str, Node], view: FleetView) -> None:
        """Let an adapter be pinned on the nodes that its pin means now, and on no others."""
        before, pin = self._kept.pop(digest, frozenset()), self.pins.get(digest)
        if digest not in self._wanted:
            return
        wanted = frozenset(kept_on(pin, digest, nodes, view)) if pin is not None else frozenset()
        if wanted:
            self._kept[digest] = wanted
        for name in before | wanted:
            node = nodes.get(name)
            if node is None or node.report is None:
                continue
            if (name in before) != (name in wanted) or (name in wanted and digest not in node.held):
                try:
                    await self._bring(node, digest)
                except WeftError as error:
                    logger.warning("node %s can't keep an adapter: %s", name, error.message)

    # -- what pins mean ------------------------------------------------------------------------

    def avoided(self, live: LiveRequest, nodes: Mapping[str, Node]) -> frozenset[str]:
        """The names of nodes that may not, or can't, serve a request now."""
        digests = live.request.digests if self.pins else ()
        barred = self._barred(digests, nodes.values())
        return live.shunned | live.lacking | barred | too_short(live, nodes, self.longest)

    def unmet(self, live: LiveRequest, nodes: Mapping[str, Node]) -> WeftError | None:
        """What a request fails with if no node that may serve its adapters is up, or no node has
        room for it."""
        if nodes and too_short(live, nodes, self.longest) == nodes.keys():
            return EngineDead("the nodes of the fleet that are there have no room for the request")
        for digest in live.request.digests if self.pins else ():
            pin = self.pins.get(digest)
            if pin is None or not pin.bond:
                continue
            if not any(node.report and _may_serve(pin, node) for node in nodes.values()):
                return _unmet(pin)
        return None

    def shown_pins(self, request: EngineRequest) -> str:
        """The labels of a request's adapters that say where they are kept."""
        digests = request.digests if self.pins else ()
        return " ".join(str(self.pins[digest]) for digest in digests if digest in self.pins)

    def describe_pins(self, nodes: Mapping[str, Node]) -> list[dict[str, object]]:
        """For each adapter that is pinned to nodes: its names, its labels, where it is, and what
        lacks."""
        found: list[dict[str, object]] = []
        for digest in sorted(self.pins.keys() & self._wanted.keys()):
            pin, kept = self.pins[digest], self._kept.get(digest, frozenset())
            on = sorted(name for name in kept if name in nodes and digest in nodes[name].held)
            matching = [node for node in nodes.values() if _may_serve(pin, node)]
            wanted = pin.replicas or len(pin.nodes) or max(len(matching), 1)
            missing = max(wanted, len(pin.nodes)) - len(on)
            names = sorted(self._wanted[digest].holders)
            found.append({"adapters": names, "labels": str(pin), "on": on, "missing": missing})
        return found

    def _barred(self, digests: Iterable[str], nodes: Iterable[Node]) -> frozenset[str]:
        """The names of those of the nodes that may not serve one of these adapters."""
        pins = [self.pins[each] for each in digests if each in self.pins]
        if not pins:
            return frozenset()
        may = [(n.name, all(_may_serve(pin, n) for pin in pins)) for n in nodes]
        return frozenset(name for name, allowed in may if not allowed)

    async def _bring_to(self, nodes: Iterable[Node], digest: str) -> None:
        calls = [self._bring(node, digest) for node in nodes]
        await asyncio.gather(*calls, return_exceptions=True)

    async def _bring(self, node: Node, digest: str) -> None:
        content = self._wanted.get(digest)
        if content is None:
            raise AdapterUnavailable("the adapter is not loaded", "model")
        error: WeftError | None = None
        for source in content.sources:
            try:
                pinned = content.pinned or node.name in self._kept.get(digest, ())
                await node.hold(self._with_peers(source, node), HOLDER, pinned)
            except EngineDead:
                raise
            except WeftError as failed:
                error = error or failed
                continue
            if digest in self._wanted:
                node.held.add(digest)
            else:  # it was released meanwhile
                await node.release(digest, HOLDER)
            return
        assert error is not None, "content that nobody holds"
        raise error

    def _with_peers(self, source: AdapterSource, node: Node) -> AdapterSource:
        """The source for a node that may have to fetch it."""
        if source.digest is None:
            return source
        others = tuple(each for each in self._holders(source.digest) if each != node.address)
        return replace(source, peers=others)

    def info(self, digest: str) -> AdapterInfo | None:
        """What is known of content that somebody holds."""
        content = self._wanted.get(digest)
        return content.info if content else None

    def check(self, nodes: Iterable[Node]) -> None:
        """Raise AssertionError unless all invariants hold."""
        assert all(content.holders for content in self._wanted.values())
        assert set(self._digests.values()) <= self._wanted.keys()
        for node in nodes:
            assert node.held <= self._wanted.keys(), "held for nobody"

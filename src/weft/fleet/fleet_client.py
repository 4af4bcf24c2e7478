"""One EngineClient over the engines of all nodes.

A request goes to the node that the policy chooses. If that node dies, hangs, is cut off or drained,
the request goes on elsewhere with the output that it has: the reader of its events sees a pause,
and each token once.

    choose ──▶ hold its adapter there ──▶ attempt 1 ──(the node is lost, or drained)──┐
      ▲                                     events, kept and passed on                │
      └──────────(a turn, so that not all begin anew at once)─────────────────────────┘

Each attempt has an id of its own, so that late events of an earlier one are dropped.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
import uuid
from collections import Counter
from collections.abc import AsyncGenerator, Coroutine, Iterable, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

from weft.core.adapters import AdapterInfo, AdapterSource
from weft.core.duty import end_tasks
from weft.core.errors import (
    AdapterError,
    AdapterUnavailable,
    EngineDead,
    InvalidRequest,
    Overloaded,
    RegistryUnavailable,
    RequestRefused,
)
from weft.core.requests import EngineRequest, TokenEvent, error_event
from weft.core.stats import EngineInfo, EngineStats, FleetFigures
from weft.core.tenants import Tenant
from weft.fleet.live_requests import (
    Decision,
    Decisions,
    LiveRequest,
    ResumeTurn,
    add_to_output,
    all_described,
    holders_of,
    kind_of,
    passed_on,
    routed_request,
    state_of,
    to_relieve,
)
from weft.fleet.node import Node, OwnNode
from weft.fleet.placed import PlacedAdapters
from weft.fleet.reports import REPORT_S, ReportUpdate
from weft.fleet.route import Routed, Router, Shed
from weft.fleet.view import RoutedRequest

logger = logging.getLogger(__name__)

NO_NODE = "this server was started with --no-engine, and no node of the fleet is up"
BUSY = "no node of the fleet could begin with the request soon"
WAIT_S = 30.0
"""How long a request that has begun waits for another node to continue on."""
FIRST_WAIT_S = 5.0
"""How long a request that has not begun waits for a node."""
MAX_RESUMING = 16
"""How many requests restart on other nodes at a time: until each has a token, or TURN_S."""
MAX_DEATHS = 2
"""A request that was open at this many engines' deaths is taken to be their cause."""
MAX_LOSSES = 20
"""A request that has lost this many nodes ends, even if it is not to blame."""
MAX_REFUSED = 3
FORGET_S = 600.0
"""A node is forgotten after this long without a link."""
MAX_WAIT_S = 60.0
"""A new request is refused if it would wait longer than this."""


class Closing(Protocol):
    async def close(self) -> None: ...


class FleetClient:
    """Owner of the requests of this process, wherever they run. `check()` states the
    invariants."""

    def __init__(self, own: OwnNode | None = None) -> None:
        self.own = own
        self.router = Router(max_wait_s=MAX_WAIT_S)
        self.process = own.process if own is not None else uuid.uuid4().hex
        self.helpers: list[Closing] = []
        """Who brings other nodes, and who decides how many serve; they are closed with this."""
        self.nodes: dict[str, Node] = {}
        """By name: those whose engines are up, or were, for its own."""
        self.figures = FleetFigures()
        self.adapters = PlacedAdapters(partial(holders_of, self.nodes))
        self._live: dict[str, LiveRequest] = {}
        self._ids = itertools.count()
        self._turns = asyncio.Semaphore(MAX_RESUMING)
        self._decisions = Decisions()
        self._tenants: tuple[Tenant, ...] | None = None
        self._info: EngineInfo | None = None
        self._closing = False
        self._tasks: set[asyncio.Task[None]] = set()
        if own is not None:
            own.on_report = self.reported
            self.join(own, None)

    # -- nodes ---------------------------------------------------------------------------------

    def join(self, node: Node, update: ReportUpdate | None) -> None:
        """A node has joined. `update` is its whole report."""
        self._info = self._info or node.info
        self.adapters.longest = self._info.max_model_len
        if (ours := kind_of(self._info)) != (its := kind_of(node.info)):
            message = "node %s is not used: it serves %s, and this fleet %s"
            logger.error(message, node.name, its, ours)
            return
        self.nodes[node.name] = node
        self.figures.lost_at.pop(node.name, None)
        if self._tenants is not None:
            self._spawn(self._tell_tenants(node, self._tenants))
        self._spawn(self.adapters.spread([node]))
        if update is not None:
            self.reported(node, update)

    def reported(self, node: Node, update: ReportUpdate | None) -> None:
        """A node has reported changes (`update`); None: it takes no requests for now."""
        if self.nodes.get(node.name) is not node:
            return
        if update is None:
            self.router.view.set_dead(node.name)
            self._give_up(node)
            return
        self.router.view.update(update, asyncio.get_running_loop().time())
        draining, idle = update.report.draining, update.report.idle
        if (draining or idle) and any(self._usable(idle=False)):
            self._empty(node, "drained" if draining else "left idle")
        elif live := to_relieve(node, self.nodes, reversed(self._live.values())):
            self._spawn(self._move([live], "short of memory"))

    def lost(self, node: Node, is_missed: bool = True) -> None:
        """A node is gone, and its requests know it. `is_missed`: nobody had it drained before."""
        if self.nodes.get(node.name) is node:
            del self.nodes[node.name]
            if is_missed:
                self.figures.lost_at[node.name] = time.time()
            self.router.view.set_dead(node.name)
            asyncio.get_running_loop().call_later(FORGET_S, self._forget, node.name)

    def _forget(self, name: str) -> None:
        if name not in self.nodes and self.router.view.told.find(name) is not None:
            self.router.view.leave(name)
            self.figures.lost_at.pop(name, None)

    async def until_joined(self) -> None:
        """Wait until some node is there."""
        while self._info is None:
            await asyncio.sleep(REPORT_S)

    def drain(self, name: str, draining: bool = True) -> None:
        """Move all requests away from a node, and let it take none. Raises InvalidRequest."""
        node = self.nodes.get(name)
        if node is None:
            raise InvalidRequest(f"there is no node named {name!r}", "node")
        node.drain(draining)

    def _give_up(self, node: Node) -> None:
        """Treat a node as lost: all its requests continue on other nodes."""
        error = EngineDead(f"node {node.name} gives no sign of life", killed=True)
        for live in list(self._live.values()):
            if live.node is node and live.moving is None and live.attempt is not None:
                node.leave(live.attempt.request_id, error)

    def _empty(self, node: Node, why: str) -> None:
        """Move all requests that may move away from a node that still serves them."""
        usable, avoided = {each.name for each in self._usable(idle=False)}, self.adapters.avoided
        here = [live for live in self._live.values() if live.node is node and not live.leaving]
        found = [live for live in here if usable - avoided(live, self.nodes)]
        if found:
            self._spawn(self._move(found, why))

    async def _move(self, found: Sequence[LiveRequest], why: str) -> None:
        """Move requests to other nodes. Each continues where it is until its turn to move."""
        for live in found:
            live.leaving = True
        for live, node, attempt in [(live, live.node, live.attempt) for live in found]:
            turn = await ResumeTurn.take(self._turns)
            if node is None or attempt is None or live.attempt is not attempt or live.turn:
                turn.end()
                continue
            live.turn, live.moving = turn, why
            node.leave(attempt.request_id, EngineDead("the request moves"))

    def _usable(self, idle: bool = True) -> Iterable[Node]:
        """The nodes that may take requests, with or without the idle ones."""
        for node in self.nodes.values():
            report = node.report
            if report is not None and not report.draining and (idle or not report.idle):
                yield node

    # -- requests ------------------------------------------------------------------------------

    async def generate(self, request: EngineRequest) -> AsyncGenerator[TokenEvent, None]:
        """Besides what engines answer, raises Overloaded if no node could begin with it soon."""
        if request.request_id in self._live:
            raise InvalidRequest(f"request id {request.request_id!r} is in use", "request_id")
        live = self._live[request.request_id] = LiveRequest(request, list(request.output_ids))
        turn: ResumeTurn | None = None
        try:
            while True:
                turn, live.turn = live.turn, None
                if turn is None and live.attempts:
                    turn = await ResumeTurn.take(self._turns)
                ended = False
                try:
                    node, attempt = await self._place(live)
                    async with aclosing(node.generate(attempt)) as events:
                        async for event in events:
                            if turn is not None:
                                turn.end()
                            if self._is_refused(live, event):
                                break
                            add_to_output(live, event)
                            ended = event.finish_reason is not None
                            yield passed_on(live, event)
                            if ended:
                                return
                except EngineDead as error:
                    if last := self._count_loss(live, error):
                        yield last
                        return
                except (AdapterError, RegistryUnavailable) as error:  # no node has its adapter
                    yield error_event(request.request_id, error)
                    return
                finally:
                    self._depart(live, ended)
                    if turn is not None:
                        turn.end()
        finally:
            del self._live[request.request_id]
            if live.turn is not None:
                live.turn.end()

    def _depart(self, live: LiveRequest, ended: bool) -> None:
        """An attempt is over."""
        if live.node is not None and live.attempt is not None:
            num_tokens = len(live.output) if ended else None
            self.router.view.end(live.node.name, live.attempt, num_tokens)
        live.node = live.attempt = None

    def _is_refused(self, live: LiveRequest, event: TokenEvent) -> bool:
        """Whether an event says that the node can't serve the request, to be tried elsewhere."""
        node = live.node
        assert node is not None
        if event.finish_reason == "abort" and not self._closing:
            live.why = f"node {node.name} was stopped"
            live.num_lost += 1
        elif event.error and event.error[0] == AdapterUnavailable.kind:
            live.why = f"node {node.name} has not got its adapter"
            node.held.difference_update(live.request.digests)
            live.num_refused += 1
            if live.num_refused > MAX_REFUSED:
                return False
        else:
            return False
        return live.num_lost <= MAX_LOSSES

    def _count_loss(self, live: LiveRequest, error: EngineDead) -> TokenEvent | None:
        """The node of a request is lost. Its last event, if it is not to go on."""
        if live.moving is not None and live.node is not None:
            self.figures.moves += 1
            live.why = f"its node was {live.moving}"
            return None
        if live.node is None or self._closing or live.num_lost >= MAX_LOSSES:
            raise error
        if live.node.report is None:
            self.router.view.set_dead(live.node.name)
        self.figures.losses += 1
        live.num_lost += 1
        live.why = error.message
        live.deaths += not error.killed
        if live.deaths < MAX_DEATHS:
            return None
        message = "engines of several nodes died while they computed this request"
        return error_event(live.request.request_id, RequestRefused(message, "prompt"))

    async def _place(self, live: LiveRequest) -> tuple[Node, EngineRequest]:
        """Choose a node for a request, and load its adapter there. Returns what to send the node.

        Raises EngineDead if there is no node for long, AdapterError if none can have the adapter or
        RegistryUnavailable if none can now, Overloaded if a new request would wait for long.
        """
        clock = asyncio.get_running_loop().time
        until_s = clock() + (WAIT_S if live.output else FIRST_WAIT_S)
        wanted = self._routed_request(live)
        away: RegistryUnavailable | None = None  # why nodes are shunned, if that is why
        while True:
            wanted = replace(wanted, avoid=self.adapters.avoided(live, self.nodes))
            routed = self.router.choose(wanted)
            if isinstance(routed, Shed):
                unmet = self.adapters.unmet(live, self.nodes)
                if self.alive and not (live.attempts or live.lacking or live.shunned or unmet):
                    raise Overloaded(BUSY, retry_after_s=routed.retry_after_s)
                waits = away is not None or not live.shunned
                if waits and (clock() > until_s or self._closing):
                    raise away or unmet or EngineDead("no node of the fleet is up")
                await asyncio.sleep(REPORT_S if waits else 0)
                away, live.shunned = None, frozenset()
                continue
            node = self.nodes.get(routed.node)
            if node is None or node.report is None:
                self.router.view.set_dead(routed.node)
                continue
            try:
                if missing := [d for d in live.request.digests if d not in node.held]:
                    await self.adapters.bring(node, missing)
            except EngineDead:
                self.router.view.set_dead(node.name)
            except RegistryUnavailable as error:  # it may have it when the registry is back
                away, live.shunned = error, live.shunned | {node.name}
            except AdapterError as error:
                logger.warning("node %s: %s", node.name, error.message)
                live.lacking.add(node.name)
                if self.adapters.avoided(live, self.nodes) - live.shunned >= self.nodes.keys():
                    raise
            else:
                return node, self._begin(live, node, wanted, routed)

    def _routed_request(self, live: LiveRequest) -> RoutedRequest:
        adapter = live.request.adapter
        info = self.adapters.info(adapter.digest) if adapter is not None else None
        attempt = f"{self.process[:12]}.{next(self._ids)}"
        return routed_request(live, attempt, info, self.info.block_size)

    def _begin(
        self, live: LiveRequest, node: Node, attempt: RoutedRequest, routed: Routed
    ) -> EngineRequest:
        """Begin an attempt on a node. Returns the request to send to it."""
        now = asyncio.get_running_loop().time()
        self.router.sent(routed, attempt, now)
        if not live.attempts:
            self.adapters.popular.saw(attempt.adapter, now)
        live.node, live.attempt, live.moving, live.leaving = node, attempt, None, False
        live.shunned = frozenset()
        live.attempts += 1
        pins, output = self.adapters.shown_pins(live.request), list(live.output)
        decision = Decision(time.time(), live.why, len(output), routed, pins)
        self._decisions.add(live.request.request_id, decision)
        return replace(live.request, request_id=attempt.request_id, output_ids=output)

    # -- for those who run the fleet -------------------------------------------------------------

    def explain(self, request_id: str) -> list[dict[str, Any]]:
        """See `Decisions.explain`."""
        return self._decisions.explain(request_id, self.router)

    def describe(self) -> list[dict[str, object]]:
        """The state and the last report of each node, as this process knows them."""
        live = Counter(live.node.name for live in self._live.values() if live.node)
        return all_described(self.nodes.values(), self.own, live, self.figures.lost_at)

    def pins(self) -> list[dict[str, object]]:
        """See `PlacedAdapters.describe_pins`."""
        return self.adapters.describe_pins(self.nodes)

    def measure(self) -> FleetFigures:
        states = Counter(state_of(node) for node in self.nodes.values())
        return replace(self.figures, nodes=dict(states))

    # -- the rest of EngineClient --------------------------------------------------------------

    @property
    def info(self) -> EngineInfo:
        assert self._info is not None, "no node has been there yet"
        return self._info

    @property
    def alive(self) -> bool:
        return any(node.report is not None for node in self.nodes.values())

    @property
    def troubles(self) -> list[str]:
        if not self.alive:
            return self.own.troubles if self.own else [NO_NODE]
        report = self.own.report if self.own else None
        return ["this node is being drained"] if report is not None and report.draining else []

    async def hold(self, source: AdapterSource, holder: str, pinned: bool = False) -> AdapterInfo:
        """Content is read on this process's own node, if it has one that is up, else on another.
        Nodes to which requests for it go get it then; all get it if it is pinned."""
        nodes = sorted(self._usable(), key=lambda node: node is not self.own)
        return await self.adapters.hold(nodes, source, holder, pinned)

    async def release(self, digest: str, holder: str) -> None:
        await self.adapters.release(list(self.nodes.values()), digest, holder)

    async def set_tenants(self, tenants: Sequence[Tenant]) -> None:
        """Every node is told, also those that come later."""
        self._tenants = tuple(tenants)
        self.router.set_weights({tenant.name: tenant.weight for tenant in tenants})
        calls = [self._tell_tenants(node, self._tenants) for node in self.nodes.values()]
        await asyncio.gather(*calls)

    async def stats(self) -> EngineStats:
        """The figures of this process's own engine; nothing, if it has none."""
        return await self.own.stats() if self.own is not None else EngineStats()

    async def close(self) -> None:
        self._closing = True
        await end_tasks(self._tasks)
        if self.own is not None:
            await self.own.close()
        for helper in self.helpers:
            await helper.close()

    def check(self) -> None:
        """Raise AssertionError unless all invariants hold."""
        self.adapters.check(self.nodes.values())
        assert all(live.request.request_id == key for key, live in self._live.items())
        assert all((live.node is None) == (live.attempt is None) for live in self._live.values())
        self.router.view.check()
        assert self._live or self._turns._value == MAX_RESUMING, "a turn was not given back"

    async def _tell_tenants(self, node: Node, tenants: tuple[Tenant, ...]) -> None:
        with contextlib.suppress(EngineDead):
            await node.set_tenants(tenants)

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

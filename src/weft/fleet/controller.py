"""Keeps as many nodes busy as the load needs, and hot adapters on several nodes.

Every process with an API places the adapters that its own requests ask for. One process decides how
many nodes serve. It needs no election: each node names a process in its reports, and the one that
the first node (by name) has named decides. If either dies, another node is first, or names
another process. For a moment two processes may decide, or none. That does no harm, as each node
reports what it was told to do: all routers read it there, and the next process that decides begins
from it.
"""

from __future__ import annotations

import asyncio
import json
import logging
from http.client import HTTPException
from urllib.request import Request, urlopen

from weft.core.duty import end_tasks, going_on
from weft.fleet.consolidate import TARGET, Consolidator, loads_of
from weft.fleet.fleet_client import FleetClient

logger = logging.getLogger(__name__)

TICK_S = 0.25
PREFETCH_S = 2.0
"""The pause between two looks at which adapters are hot."""
CALL_S = 5.0
"""How long the webhook may take to answer."""
AGAIN_S = 60.0
"""The webhook is called so often when nothing changes, and each CALL_S while it fails."""


class Controller:
    """One process's tasks for its fleet besides serving; see above."""

    def __init__(
        self, fleet: FleetClient, target: float | None = None, webhook: str | None = None
    ) -> None:
        """`target`: the fraction of seats to be taken, so that other nodes can be idle; None: all
        serve. `webhook`: a URL that is told the number.
        """
        self._fleet = fleet
        self._target = target
        self._consolidator: Consolidator | None = None
        """None unless this process decides."""
        work = [self._decide_each_tick(), self._prefetch()]
        if webhook is not None:
            work.append(self._call(webhook))
        self._tasks = [asyncio.create_task(each) for each in work]

    async def close(self) -> None:
        await end_tasks(self._tasks)

    @property
    def _decides(self) -> bool:
        """Whether this process decides for all."""
        reports = [node.report for node in self._fleet.nodes.values()]
        serving = [each for each in reports if each is not None and not each.draining]
        first = min(serving, key=lambda report: report.node, default=None)
        return first is not None and first.controller == self._fleet.process

    def _tick(self, now: float) -> None:
        """Decide which nodes serve, and tell those nodes whose state must change."""
        fleet = self._fleet
        if not self._decides:
            self._consolidator = fleet.figures.wanted_replicas = None
            return
        if self._consolidator is None:
            self._consolidator = Consolidator(self._target or TARGET)
        found = self._consolidator.tick(now, loads_of(fleet.router.view))
        fleet.figures.wanted_replicas = found.wanted_replicas
        for node in fleet.nodes.values():
            idle = self._target is not None and node.name not in found.names
            report = node.report
            if report is not None and not report.draining and report.idle != idle:
                logger.info("node %s is %s", node.name, "left idle" if idle else "needed again")
                node.rest(idle)

    async def _decide_each_tick(self) -> None:
        clock = asyncio.get_running_loop().time
        while True:
            await asyncio.sleep(TICK_S)
            with going_on("it was not decided how many nodes serve"):
                self._tick(clock())

    async def _prefetch(self) -> None:
        while True:
            await asyncio.sleep(PREFETCH_S)
            with going_on("no adapters were loaded ahead of requests"):
                await self._fleet.adapters.prefetch(self._fleet.nodes, self._fleet.router.view)

    async def _call(self, url: str) -> None:
        """Tell how many nodes are wanted whenever that changes, and now and then."""
        clock = asyncio.get_running_loop().time
        told: tuple[int, float] | None = None
        while True:
            await asyncio.sleep(TICK_S)
            figures, now = self._fleet.measure(), clock()
            wanted = figures.wanted_replicas
            if wanted is None or (told and told[0] == wanted and now - told[1] < AGAIN_S):
                continue
            body = {"wanted_replicas": wanted, "nodes": figures.nodes}
            try:
                await asyncio.to_thread(_post, url, body)
                told = wanted, now
            except (OSError, ValueError, HTTPException) as error:
                logger.warning("--scale-webhook %s: %s", url, error)
                await asyncio.sleep(CALL_S)


def _post(url: str, body: object) -> None:
    request = Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urlopen(request, timeout=CALL_S):
        pass

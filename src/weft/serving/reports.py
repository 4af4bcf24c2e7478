"""Reports how far this server has followed a shared registry, and reads the others' reports."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
import time
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress

from weft.core.duty import end_tasks, going_on
from weft.core.errors import RegistryUnavailable, RequestTimeout
from weft.registry.stores import Store
from weft.registry.sweep import LEASE_S, ReplicaLease, running_leases

logger = logging.getLogger(__name__)

RENEW_S = LEASE_S / 3
"""How often a server renews its lease if nothing changes."""
REPORT_EVERY_S = 0.25
"""The shortest time between two reports."""
ALL_S = 30.0
"""How long a change may wait for all servers to follow it."""
_LOOK_S = 0.1


class Reports:
    """One server's reports, and its view of the others'. They are leases in the registry's store,
    so a dead server is waited for until its lease has run out. For one event loop."""

    def __init__(self, store: Store, digests: Callable[[], Collection[str]], seq: int) -> None:
        """`digests` returns the contents served here; `seq` counts the log's entries known here."""
        self.name = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
        self._store = store
        self._lease = ReplicaLease(store, self.name)
        self._digests = digests
        self._seq = seq
        self._open: dict[asyncio.Task[None], int] = {}
        """Loads that have not ended, with the number of the log entry that asked for each."""
        self._news = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def seq(self) -> int:
        """How many of the log's entries this server has carried out, so that their loads ended."""
        return min(self._open.values(), default=self._seq + 1) - 1

    def follow(self, seq: int, loads: Iterable[asyncio.Task[None]]) -> None:
        """Note that this server knows the first `seq` entries, and has carried them out once
        `loads` have ended, successfully or not."""
        self._seq = max(self._seq, seq)
        for load in loads:
            if load not in self._open:
                self._open[load] = seq
                load.add_done_callback(self._ended)
        self._news.set()

    def _ended(self, load: asyncio.Task[None]) -> None:
        del self._open[load]
        self._news.set()

    def start(self) -> None:
        """Report from now on."""
        self._task = asyncio.create_task(self._report())

    async def close(self) -> None:
        """Stop reporting, and end the lease, so that nobody waits for this server any more."""
        if self._task is not None:
            await end_tasks([self._task])
            with suppress(RegistryUnavailable):
                await asyncio.to_thread(self._lease.end)

    async def _report(self) -> None:
        while True:
            self._news.clear()
            seq, digests = self.seq, self._digests()
            # Without a lease, contents that are served here could be swept from the store.
            with going_on("this server could not report to the registry; it tries again"):
                try:
                    await asyncio.to_thread(self._lease.renew, digests, seq)
                except RegistryUnavailable as error:
                    logger.debug("this server can't report to the registry: %s", error)
            await asyncio.sleep(REPORT_EVERY_S)
            with suppress(TimeoutError):
                async with asyncio.timeout(RENEW_S):
                    await self._news.wait()

    async def all_follow(self, seq: int) -> None:
        """Wait until all servers have carried out the first `seq` entries. Raises RequestTimeout,
        naming those that have not, and RegistryUnavailable."""
        end = time.monotonic() + ALL_S
        while behind := await asyncio.to_thread(self._behind, seq):
            if time.monotonic() > end:
                raise RequestTimeout(
                    f"the change is made, but not all servers follow it after {ALL_S:g} s:"
                    f" {', '.join(behind)}"
                )
            await asyncio.sleep(_LOOK_S)

    def _behind(self, seq: int) -> list[str]:
        leases = running_leases(self._store)
        return sorted(name for name, lease in leases.items() if lease.seq < seq)

"""Follows a shared registry in one server: loads versions when they are needed, and drops them when
no route leads to them any more."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection
from contextlib import suppress
from functools import partial
from typing import NamedTuple

from weft.core.duty import end_tasks
from weft.core.errors import (
    AdapterError,
    AdapterUnavailable,
    ModelNotFound,
    RegistryUnavailable,
    WeftError,
)
from weft.registry import Access, AdapterRegistry
from weft.registry.blobs import Blobs
from weft.registry.labels import Pins
from weft.registry.records import Change, Done
from weft.registry.releases import choose, number_of, numbers_of, split
from weft.registry.shared import STALE_S, SharedRegistry
from weft.registry.shared_names import SharedNames
from weft.registry.state import State
from weft.serving.publisher import Publisher
from weft.serving.reports import Reports

logger = logging.getLogger(__name__)

LOOK_EVERY_S = 0.1
"""The shortest time between two looks into the store for names that are not known here."""
LOOK_TIMEOUT_S = 5.0
"""How long a request for an unknown name waits for the store."""
FAILED_S = 5.0
"""How long requests for a version that could not be loaded get the same error, without a retry."""
MAX_FAILED = 1024
CLOSE_S = 2.0
"""How long the end of a server waits for the store."""
BOOT_LOADS = 16
"""How many versions are loaded side by side at the start."""
_ATTEMPTS = 10
"""How many loads a request waits for, if each version is dropped again before the request can pin
it, as when releases follow each other faster than adapters load."""


class _Failure(NamedTuple):
    until_s: float
    """Until then the version is not tried again."""
    message: str
    whole: bool
    """Whether its files here were found undamaged, so that they need not be read again."""


class Follower:
    """Loads versions of a shared registry into one engine, and drops them. All methods are called
    from one event loop. `check()` states the invariants.

    The process's own registry has version 7 of `acme/sql` as `acme/sql@v7`. A version is loaded
    when a request first needs it, or at once if its name is pinned or another version of it is
    loaded. Versions that the name's route no longer lists take no new requests.
    """

    def __init__(
        self, shared: SharedRegistry, blobs: Blobs, registry: AdapterRegistry, publisher: Publisher
    ) -> None:
        self.shared, self.blobs = shared, blobs
        self.names = SharedNames(shared, registry.base_names, registry.base_root)
        self._registry = registry
        self._publisher = publisher
        self.reports = Reports(shared.store, registry.digests, shared.state.seq)
        self._loop: asyncio.AbstractEventLoop | None = None
        """The event loop that all methods are called from; None before the start."""
        self._here: dict[str, dict[int, bool]] = {}
        """For each name, the versions that are loaded; the value is whether they are pinned."""
        self.pins = Pins()
        for name, entry in self.names.state.names.items():
            self.pins.follow(name, entry)
        self._loading: dict[str, asyncio.Task[None]] = {}
        self._leaving: dict[str, asyncio.Task[None]] = {}
        """Versions that take no new requests and whose last request has not ended."""
        self._failed: dict[str, _Failure] = {}
        """Versions that could not be loaded."""
        self._look: asyncio.Task[None] | None = None
        """A look into the store that is planned but has not begun."""
        self._looked_s = 0.0
        self._looking = asyncio.Lock()

    async def start(self, eager: bool) -> None:
        """Follow the registry from now on. Load the pinned versions first, and with `eager` all
        others that routes name. A failed load is logged, and retried when a request needs it."""
        self._loop = asyncio.get_running_loop()
        self.shared.listen(self._told)
        self.shared.start()
        entries = self.names.state.names
        first = {name for name, entry in entries.items() if entry.pinned} | self.pins.names
        pinned, others = sorted(first), [name for name in entries if name not in first]
        place = asyncio.Semaphore(BOOT_LOADS)

        async def load(name: str, number: int) -> None:
            async with place:
                with suppress(WeftError):  # already logged
                    await self.load(name, number)

        for names in (pinned, others) if eager else (pinned,):
            wanted = [(name, n) for name in names for n in numbers_of(entries[name].route)]
            await asyncio.gather(*(load(name, number) for name, number in wanted))
        self.reports.start()

    async def close(self) -> None:
        """Stop following. Loaded versions stay until the engine ends. If the store does not answer
        in time, threads are left behind that still wait for it."""
        await end_tasks([*self._loading.values(), *self._leaving.values()])
        with suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                await self.reports.close()
                await asyncio.to_thread(self.shared.close)

    # -- requests ------------------------------------------------------------------------------

    async def ready(self, access: Access, model: str, sticky: str) -> str:
        """Choose the version that answers a request for `model`, load it if need be, and return
        its name here (`acme/sql@v7`). A base model's name is returned as it is.

        `sticky` decides between several versions, as in `releases.choose`. The caller must pin
        the name before it awaits anything. An unknown name is looked up in the store once more.
        Raises PermissionDenied, ModelNotFound, AdapterUnavailable, RegistryUnavailable.
        """
        for _ in range(_ATTEMPTS):
            try:
                found = self._find(access, model, sticky)
            except ModelNotFound:
                await self.look_again()
                found = self._find(access, model, sticky)
            if found is None:
                return model
            key = version_name(*found)
            if self._registry.has(key):
                return key
            await self.load(*found)
        raise AdapterUnavailable(f"{model!r} changes too often to be loaded", "model")

    def _find(self, access: Access, model: str, sticky: str) -> tuple[str, int] | None:
        """The name and version number that `model` means; None for a base. Raises ModelNotFound."""
        whole = access.find(model)
        if whole is None:
            return None
        name, wanted = split(whole)
        entry = self.names.entry(name)
        if entry is None:
            raise ModelNotFound(f"The model {model!r} does not exist", "model")
        number = number_of(entry, wanted) if wanted else None
        if wanted and number is None:
            raise ModelNotFound(f"{name!r} has no version {wanted[1:]}", "model")
        if number is None and not entry.route.shares:
            raise ModelNotFound(f"no version of {name!r} is released", "model")
        return name, number or choose(name, entry.route, sticky)

    async def look_again(self) -> None:
        """Read the store's newest entries. Callers share a look that has not begun yet. Raises
        RegistryUnavailable."""
        if self._look is None:
            self._look = asyncio.create_task(self._look_soon())
        try:
            async with asyncio.timeout(LOOK_TIMEOUT_S):
                await asyncio.shield(self._look)
        except TimeoutError:
            raise RegistryUnavailable("the registry does not answer; try again later") from None

    async def _look_soon(self) -> None:
        async with self._looking:
            await asyncio.sleep(self._looked_s + LOOK_EVERY_S - time.monotonic())
            self._look, self._looked_s = None, time.monotonic()
            await asyncio.to_thread(self.shared.poll)

    # -- versions ------------------------------------------------------------------------------

    async def load(self, name: str, number: int) -> None:
        """Load a version unless it is loaded; concurrent callers wait for the same load. Raises
        ModelNotFound, AdapterUnavailable, Overloaded, EngineDead."""
        key = version_name(name, number)
        failed = self._failed.get(key)
        if failed is not None and time.monotonic() < failed.until_s:
            raise AdapterUnavailable(failed.message, "model")
        if number not in self._here.get(name, {}):
            await asyncio.shield(self._loading.get(key) or self._begin(name, number))

    async def settled(self, name: str) -> None:
        """Wait until this process serves a name as the registry now says: the routed versions are
        loaded or, if the name is gone, its requests have ended. Raises what `load` raises."""
        self._follow(self.names.state.seq, [name])
        entry = self.names.entry(name)
        for number in sorted(numbers_of(entry.route)) if entry else ():
            await self.load(name, number)
        leaving = [task for key, task in self._leaving.items() if split(key)[0] == name]
        if entry is None and leaving:
            await asyncio.wait(leaving)

    def _told(self, state: State, changed: frozenset[str]) -> None:
        """Take note that some names have changed. Called on the registry's thread."""
        assert self._loop is not None
        with suppress(RuntimeError):  # raised if the event loop has ended
            self._loop.call_soon_threadsafe(self._follow, state.seq, changed)

    def _follow(self, seq: int, changed: Collection[str]) -> None:
        self.names.update(changed)
        for name in changed:
            self._settle(name)
        loads = self._loading.items()
        self.reports.follow(seq, [load for key, load in loads if split(key)[0] in changed])

    def _settle(self, name: str) -> None:
        """Begin the loads and drops that a name's newest entry in the registry asks for."""
        entry, here = self.names.entry(name), self._here.get(name, {})
        self.pins.follow(name, entry)
        wanted = numbers_of(entry.route) if entry else set()
        is_used = bool(here) or any(split(key)[0] == name for key in self._loading)
        for number in here.keys() - wanted:
            self._drop(name, number)
        if entry is None or not (is_used or entry.pinned or name in self.pins.names):
            return
        for number in wanted:
            key = version_name(name, number)
            if here.get(number) != entry.pinned and key not in self._loading:
                self._failed.pop(key, None)
                self._begin(name, number)

    def _begin(self, name: str, number: int) -> asyncio.Task[None]:
        """Begin to load a version, or only to change whether it is pinned."""
        key = version_name(name, number)
        task = self._loading[key] = asyncio.create_task(self._load(name, number))

        def ended(task: asyncio.Task[None]) -> None:
            del self._loading[key]
            if not task.cancelled() and (error := task.exception()) is not None:
                why = error.__cause__ if isinstance(error, AdapterUnavailable) else error
                logger.warning("%s can't be loaded: %s", key, why)

        task.add_done_callback(ended)
        return task

    async def _load(self, name: str, number: int) -> None:
        key, entry = version_name(name, number), self.names.entry(name)
        version = entry.versions.get(number) if entry else None
        if entry is None or version is None:
            raise ModelNotFound(f"The model {key!r} does not exist", "model")
        pinned = entry.pinned and number in numbers_of(entry.route)
        open_it = partial(self.blobs.open, version.digest, sha256=version.listing)
        try:
            await self._publisher.load_version(name, number, version, open_it, pinned)
        except (AdapterError, RegistryUnavailable) as error:
            message = f"{key} can't be loaded: {error.message}"
            last = self._failed.get(key)
            whole = last is not None and last.whole and last.message == message
            if isinstance(error, AdapterUnavailable) and not whole:
                whole = await asyncio.to_thread(self.blobs.is_whole, version)
            self._failed[key] = _Failure(time.monotonic() + FAILED_S, message, whole)
            if len(self._failed) > MAX_FAILED:
                del self._failed[next(iter(self._failed))]
            raise AdapterUnavailable(message, "model") from error
        self._failed.pop(key, None)
        self._here.setdefault(name, {})[number] = pinned
        if self.names.entry(name) is not entry:  # the name has changed meanwhile
            asyncio.get_running_loop().call_soon(self._settle, name)

    def _drop(self, name: str, number: int) -> None:
        """Let a version take no new requests, and forget it when its last request has ended."""
        here, key = self._here[name], version_name(name, number)
        del here[number]
        if not here:
            del self._here[name]
        task = self._leaving[key] = asyncio.create_task(self._publisher.retire(key))

        def ended(task: asyncio.Task[None]) -> None:
            if self._leaving.get(key) is task:
                del self._leaving[key]

        task.add_done_callback(ended)

    # -- the registry --------------------------------------------------------------------------

    async def submit(self, change: Change, actor: str) -> Done:
        """Change the registry. Returns when the change is durable and this process's view has it.
        Raises RegistryUnavailable, AdapterError, InvalidRequest."""
        return await asyncio.shield(asyncio.wrap_future(self.shared.submit(change, actor)))

    @property
    def trouble(self) -> str | None:
        """A warning for people if the registry has not answered for long, else None."""
        stale_s = self.shared.stale_s()
        if stale_s < STALE_S:
            return None
        return f"the registry has not answered for {stale_s:.0f} s; its last state is served"

    def check(self) -> None:
        """Raise AssertionError when an invariant is broken."""
        self.names.check()
        live = {ref.name for ref in self._registry.adapters()}
        here = {version_name(name, n) for name, numbers in self._here.items() for n in numbers}
        assert live == here, "what is served is not what is known to be here"
        assert all(self._here.values()) and len(self._failed) <= MAX_FAILED


def version_name(name: str, number: int) -> str:
    """The name of a version in this process's own registry, as `acme/sql@v7`."""
    return f"{name}@v{number}"

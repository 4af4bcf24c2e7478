"""Publishes adapters: keeps the registry's names and the adapters that the engine holds in step.
The same coroutines run on a server's event loop, or in the caller's thread for the Python API."""

from __future__ import annotations

import asyncio
import logging
import threading
import uuid
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from contextvars import copy_context
from dataclasses import replace as with_changes
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, TypeVar
from weakref import WeakValueDictionary

from weft.checkpoint.heads import read_head
from weft.core.adapters import AdapterInfo, AdapterRef, AdapterSource, ClassHead
from weft.core.duty import end_tasks
from weft.core.errors import AdapterUnavailable, EngineDead, WeftError
from weft.core.folders import Folder, read_aside
from weft.core.interrupts import interrupts_later
from weft.core.messages import EngineClient
from weft.core.tenants import Tenant
from weft.registry import AdapterRegistry, Sources
from weft.registry.allowed import shown
from weft.registry.names import one_form
from weft.registry.records import Version
from weft.serving.quotas import MAX_LOADS, Quotas
from weft.text import AdapterTokenizers, OwnTokenizer

logger = logging.getLogger(__name__)


T = TypeVar("T")

MAX_HEAD_BYTES = 1 << 30
"""Room in an adapter's file for what its image lacks, such as a classification head."""


class Executor(Protocol):
    """Runs blocking and background work for coroutines, with an event loop or without one."""

    async def blocking(self, work: Callable[[], T]) -> T:
        """The result of a function that blocks its thread. The event loop is not held up."""
        ...

    async def finished(self, future: Future[T]) -> T:
        """The result of a future that another thread or process completes."""
        ...

    async def to_the_end(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of a coroutine, which runs to its end even if the caller is cancelled."""
        ...

    def later(self, work: Coroutine[Any, Any, None]) -> None:
        """Begin a coroutine that nobody waits for."""
        ...


class LoopExecutor:
    """An `Executor` for the running event loop; functions that block run on its threads."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()
        self._threads = ThreadPoolExecutor(2 * MAX_LOADS, "weft-blocking")
        """More than the loads that run side by side. The loop's default threads would be too few
        on a small machine, where the restart of a dead engine would wait behind loads."""

    async def blocking(self, work: Callable[[], T]) -> T:
        run = copy_context().run
        return await asyncio.get_running_loop().run_in_executor(self._threads, run, work)

    async def finished(self, future: Future[T]) -> T:
        return await asyncio.wrap_future(future)

    async def to_the_end(self, work: Coroutine[Any, Any, T]) -> T:
        return await asyncio.shield(self._start(work))

    def later(self, work: Coroutine[Any, Any, None]) -> None:
        self._start(work)

    async def close(self) -> None:
        """Cancel what has not ended yet."""
        await end_tasks(self._tasks)

    def _start(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            level = logging.DEBUG if isinstance(error, WeftError) else logging.ERROR
            logger.log(level, "adapter task failed: %s", error)


class DirectExecutor:
    """An `Executor` without an event loop: coroutines run in the caller's thread, in one go. So it
    also works where a loop is running already, as in a notebook. Several threads take turns."""

    def __init__(self) -> None:
        self.turn = threading.RLock()
        """Held by the thread whose coroutine runs, or whose several coroutines belong together."""
        self._busy = False
        self._pending: deque[Coroutine[Any, Any, None]] = deque()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of a coroutine. What it passed to `later` runs before this returns."""
        with self.turn:
            self._busy = True
            try:
                return _result(work)
            finally:
                self._busy = False
                self._run_pending()

    async def blocking(self, work: Callable[[], T]) -> T:
        return work()

    async def finished(self, future: Future[T]) -> T:
        return future.result()

    async def to_the_end(self, work: Coroutine[Any, Any, T]) -> T:
        with interrupts_later():
            return await work

    def later(self, work: Coroutine[Any, Any, None]) -> None:
        self._pending.append(work)
        if not self._busy:
            self._run_pending()

    def _run_pending(self) -> None:
        while self._pending:
            _result(self._pending.popleft())


def _result(work: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine that never suspends; RuntimeError if it does."""
    try:
        work.send(None)
    except StopIteration as end:
        result: T = end.value
        return result
    work.close()
    raise RuntimeError("this must not be called while the same object is at work")


class Tried(NamedTuple):
    """An adapter that the engine has accepted, but that has no name yet."""

    folder: Folder
    info: AdapterInfo
    give_place_back: Callable[[], Awaitable[None]]
    """Frees its place among the loads that run side by side before `tried`'s context ends."""


def source_of(folder: Folder) -> AdapterSource:
    """The source by which an engine finds the adapter in a folder."""
    return AdapterSource(folder.path, root=folder.root, identity=folder.identity)


def sources_of(paths: Sequence[str | Path]) -> tuple[AdapterSource, ...]:
    """The sources of those adapters that are in folders. What can't be opened is left out, as its
    load will say why."""

    def find(_: object) -> tuple[AdapterSource, ...]:
        sources: list[AdapterSource] = []
        for path in paths:
            with suppress(OSError, RuntimeError, TypeError, ValueError):
                plain = str(Path(path).expanduser().absolute())
                plain.encode()  # the engine may be another process
                with Folder(plain) as folder:
                    sources.append(source_of(folder))
        return tuple(sources)

    try:
        return read_aside(find)
    except AdapterUnavailable:  # a disk does not answer
        return ()


class Publisher:
    """Loads, replaces and unloads adapters, in the registry and in the engine together.

    The engine holds a version's content for a name from before the version is published until its
    last request has ended. Content stays on the device while any of its names pins it.
    """

    def __init__(
        self,
        engine: EngineClient,
        registry: AdapterRegistry,
        tokenizers: AdapterTokenizers,
        sources: Sources,
        executor: Executor,
        tenants: Mapping[str, Tenant] = MappingProxyType({}),
    ) -> None:
        """`tenants` are those whose caps are enforced; the mapping may change."""
        self._engine = engine
        self._registry = registry
        self._quotas = Quotas(registry, tenants)
        self._tokenizers = tokenizers
        self._sources = sources
        self._executor = executor
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        """A lock for each name that is changing: holds and releases of a name run one at a time,
        so that an older one never undoes a newer one."""

    async def load(
        self,
        name: str,
        path: str,
        replace: bool = False,
        pinned: bool = False,
        sources: Sources | None = None,
    ) -> AdapterRef:
        """Make an adapter servable under `name`; a failure changes nothing.

        `path` is a folder or a URI, as `Sources` understands it. With `replace` the name moves to
        the new version: running requests end on the old one. `pinned` keeps the content on the
        device, until the same name is loaded without `pinned`, or unloaded. The load goes on when
        the caller is cancelled. `sources` limits where the adapter may come from, by default to
        the server's own sources.
        Raises AdapterError, InvalidRequest, Overloaded, EngineDead.
        """
        name, sources = one_form(name), sources or self._sources
        path = sources.plain(path)
        return await self._executor.to_the_end(self._load(name, path, replace, pinned, sources))

    async def publish(
        self,
        name: str,
        path: str,
        hold: Callable[[], Awaitable[AdapterInfo]],
        own: OwnTokenizer | None = None,
        replace: bool = False,
        pinned: bool = False,
    ) -> AdapterRef:
        """Call `hold`, which makes the engine hold content for `name`, and publish that content
        as the name's version.

        `path`, without its secrets, is shown as the adapter's source. `own` is the tokenizer that
        the adapter brings. Raises what `hold` raises, and AdapterConflict."""
        name, path = one_form(name), shown(path)

        def publish(info: AdapterInfo) -> AdapterRef:
            return self._registry.publish(name, info, path, replace, self._release_soon, pinned)

        with self._registry.reserve(name, path):
            return await self._publish(name, hold, own, publish)

    async def load_version(
        self, name: str, number: int, version: Version, open_it: Callable[[], Folder], pinned: bool
    ) -> AdapterRef:
        """Make a version of a shared registry servable as `name@v7`, from the folder that
        `open_it` opens. A repeated call can only change the pin. It is never refused for too many
        loads, but waits: the registry has already decided. Raises AdapterError, EngineDead."""
        key, source = f"{name}@v{number}", version.source or name

        def publish(info: AdapterInfo) -> AdapterRef:
            return self._registry.publish(key, info, source, pinned=pinned, number=number)

        place = self._quotas.place(name, patient=True)
        async with place, self.opened(open_it) as (folder, files, own):

            async def hold() -> AdapterInfo:
                return await self._hold(key, folder, files, pinned, version)

            return await self._publish(key, hold, own, publish)

    @asynccontextmanager
    async def tried(
        self, name: str, open_it: Callable[[], Folder], pinned: bool = False
    ) -> AsyncIterator[Tried]:
        """A context in which the engine has checked an adapter and holds it, though no request can
        name it. `name` says whose load it is. Raises AdapterError, Overloaded, EngineDead."""
        async with AsyncExitStack() as place:
            await place.enter_async_context(self._quotas.place(name))
            async with self.opened(open_it) as (folder, files, _):
                holder = f"{name} tried {uuid.uuid4().hex}"
                info = await self._hold(holder, folder, files, pinned)
                try:
                    yield Tried(folder, info, place.aclose)
                finally:
                    self._executor.later(self._release(AdapterRef(holder, 0, info.digest)))

    async def _publish(
        self,
        name: str,
        hold: Callable[[], Awaitable[AdapterInfo]],
        own: OwnTokenizer | None,
        publish: Callable[[AdapterInfo], AdapterRef],
    ) -> AdapterRef:
        async with self._turn(name):
            info = await hold()
            try:
                ref = publish(info)
            except WeftError:
                await self._release(AdapterRef(name, 0, info.digest))
                raise
            self._tokenizers.put(name, own)
            return ref

    async def unload(self, name: str) -> AdapterRef:
        """Forget the name at once. Returns its last version when that version's requests have
        ended and the engine has released it.

        It is released even if the caller is cancelled. Raises AdapterNotFound."""
        ref, end = self._retire(one_form(name))
        await self._executor.to_the_end(end)
        return ref

    def retire(self, name: str) -> Coroutine[Any, Any, None]:
        """Forget the name at once. Await the returned coroutine to wait for its requests and to
        release its content in the engine. Raises AdapterNotFound."""
        return self._retire(name)[1]

    def _retire(self, name: str) -> tuple[AdapterRef, Coroutine[Any, Any, None]]:
        drained = asyncio.Event()
        ref = self._registry.retire(name, lambda _: drained.set())
        self._tokenizers.put(name, None)
        return ref, self._release_after(drained, ref)

    async def _load(
        self, name: str, path: str, replace: bool, pinned: bool, sources: Sources
    ) -> AdapterRef:
        with self._registry.reserve(name, shown(path)):
            async with self._quotas.load(name), self.opened(lambda: sources.open(path)) as opened:
                folder, files, own = opened

                async def hold() -> AdapterInfo:
                    accept = partial(self._quotas.check_bytes, name)
                    return await self._hold(name, folder, files, pinned, accept=accept)

                return await self.publish(name, path, hold, own, replace, pinned)

    @asynccontextmanager
    async def opened(
        self, open_it: Callable[[], Folder]
    ) -> AsyncIterator[tuple[Folder, Mapping[str, bytes], OwnTokenizer | None]]:
        """A context with an open folder, its tokenizer's files, and the tokenizer, if any."""
        blocking = self._executor.blocking
        with await blocking(open_it) as folder:
            files = await blocking(lambda: self._tokenizers.read(folder))
            yield folder, files, await blocking(lambda: self._tokenizers.load(files))

    async def _hold(
        self,
        name: str,
        folder: Folder,
        files: Mapping[str, bytes],
        pinned: bool,
        version: Version | None = None,
        accept: Callable[[AdapterInfo], None] = lambda _: None,
    ) -> AdapterInfo:
        """Let the engine hold the adapter in an open folder. The engine checks that it reads the
        same folder, and the tokenizer's `files`, read before, must still be the same afterwards.
        So weights and tokenizer belong together even if somebody writes to the folder meanwhile.
        With a `version`, the folder must have its content. `accept` may raise WeftError to refuse
        the adapter."""
        source = source_of(folder)
        if version is not None:
            source = with_changes(source, digest=version.digest, listing=version.listing)
        info = await self._engine.hold(source, name, pinned)
        try:
            if await self._executor.blocking(lambda: self._tokenizers.read(folder)) != files:
                message = "the adapter's files changed while it was loaded"
                raise AdapterUnavailable(message, "lora_path")
            head = await self._executor.blocking(lambda: _read_head(folder, info))
            accept(info)
        except WeftError:
            await self._let_go(name, info, source)
            raise
        return with_changes(info, head=head)

    async def _let_go(self, name: str, info: AdapterInfo, source: AdapterSource) -> None:
        """Undo the hold of a load that failed: release the content or, if it already was the
        name's content before, restore its pin."""
        for card in self._registry.adapter_cards():
            if (card.ref.name, card.ref.digest) == (name, info.digest):
                source = source.again(info.digest, info.checked)
                with suppress(WeftError):
                    await self._engine.hold(source, name, card.pinned)
        await self._release(AdapterRef(name, 0, info.digest))

    def _turn(self, name: str) -> asyncio.Lock:
        return self._turns.setdefault(name, asyncio.Lock())

    async def _release_after(self, drained: asyncio.Event, ref: AdapterRef) -> None:
        await drained.wait()
        await self._release_in_turn(ref)

    def _release_soon(self, ref: AdapterRef) -> None:
        self._executor.later(self._release_in_turn(ref))

    async def _release_in_turn(self, ref: AdapterRef) -> None:
        async with self._turn(ref.name):
            await self._release(ref)

    async def _release(self, ref: AdapterRef) -> None:
        """Release content in the engine, unless its name needs that content (again)."""
        if self._registry.needs(ref):
            return
        try:
            await self._engine.release(ref.digest, ref.name)
        except EngineDead:
            logger.warning("adapter %r went with the dead engine", ref.name)


def _read_head(folder: Folder, info: AdapterInfo) -> ClassHead | None:
    """The adapter's classification head, if any. The image's size bounds how much is read."""
    max_bytes = 4 * info.num_bytes + MAX_HEAD_BYTES
    return read_aside(lambda deadline: read_head(folder, info.digest, max_bytes, deadline))

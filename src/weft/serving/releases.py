"""Changes a shared registry for a caller, and waits until the change is durable, or served here, or
served everywhere, as the caller asks."""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

from msgspec.structs import replace

from weft.core.errors import (
    AdapterNotFound,
    AdapterUnavailable,
    GenerationConflict,
    InvalidRequest,
)
from weft.registry import Sources
from weft.registry.allowed import shown
from weft.registry.records import Name, Publish, Release, Remove, Version
from weft.registry.registry import other_content
from weft.registry.releases import main_number, released, rolled_back, split
from weft.serving.follower import Follower
from weft.serving.publisher import Executor, Publisher

Wait = Literal["commit", "here", "all"]
"""What to wait for: the change is durable; this server serves by it; all servers serve by it."""
WAITS: tuple[Wait, ...] = get_args(Wait)
_ATTEMPTS = 5


class Order(NamedTuple):
    """How a release changes a name's route; see `registry.releases.released`."""

    to: str | None = None
    canary: float | None = None
    shadow: str | None = None


class Releases:
    """Changes names of a shared registry. `actor`, who asks for it, is kept in the history."""

    def __init__(self, follower: Follower, publisher: Publisher, executor: Executor) -> None:
        self._follower = follower
        self._publisher = publisher
        self._executor = executor

    async def load(
        self,
        name: str,
        path: str,
        sources: Sources,
        put_in_place: bool,
        pinned: bool,
        actor: str,
        wait: Wait,
    ) -> str:
        """Publish an adapter as a name's newest version, which all requests for the name then get.
        If the name has other content, `put_in_place` is needed. Returns the digest.

        The registry learns of the adapter only after this server's engine has accepted it. Raises
        AdapterError, InvalidRequest, Overloaded, EngineDead, RegistryUnavailable.
        """
        path = sources.plain(path)

        def accept(version: Version) -> None:
            change = Publish(name, version, pinned=pinned)
            self._follower.shared.check(change)
            self._expecting(change, put_in_place)

        async with self._publisher.tried(name, lambda: sources.open(path), pinned) as tried:
            put = self._follower.blobs.put
            version = await self._executor.blocking(lambda: put(tried.folder, accept))
            if version.digest != tried.info.digest:
                message = "the adapter's files changed while it was loaded"
                raise AdapterUnavailable(message, "lora_path")
            base = self._follower.names.base_root
            change = Publish(name, replace(version, source=shown(path), base=base), pinned=pinned)
            await self._publish(change, put_in_place, actor)
            await tried.give_place_back()  # loading the version below needs a place too
            await self.wait(name, wait)
        return version.digest

    async def _publish(self, change: Publish, put_in_place: bool, actor: str) -> None:
        """Submit the change. Raises what `_expecting` does."""
        for attempt in range(_ATTEMPTS):
            try:
                await self._follower.submit(self._expecting(change, put_in_place), actor)
                return
            except GenerationConflict:
                if attempt == _ATTEMPTS - 1:
                    raise

    def _expecting(self, change: Publish, put_in_place: bool) -> Publish:
        """The change, with the generation at which it may be made. Raises AdapterConflict if the
        name's main version has other content, unless `put_in_place`."""
        if put_in_place:
            return change
        entry = self._follower.names.state.names.get(change.name, Name())
        number = main_number(entry.route)
        if number and entry.versions[number].digest != change.version.digest:
            raise other_content(change.name)
        return replace(change, expect=entry.generation)

    async def remove(self, name: str, actor: str, wait: Wait) -> str | None:
        """Forget a name. Unless `wait` is "commit", its requests here have ended. Returns the
        digest that most of them got. Raises AdapterNotFound, InvalidRequest,
        RegistryUnavailable."""
        if split(name)[1]:
            message = "lora_name: a version can't be unloaded alone; release another one instead"
            raise InvalidRequest(message, "lora_name")
        digest = self._follower.names.digest(name)
        try:
            await self._follower.submit(Remove(name), actor)
        except AdapterNotFound as error:
            message = f"The lora adapter {name!r} cannot be found"
            raise AdapterNotFound(message, "lora_name") from error
        await self.wait(name, wait)
        return digest

    async def release(
        self, name: str, order: Order | None, expect: int | None, actor: str, wait: Wait
    ) -> Name:
        """Change a name's route by an `order`, or roll it back (None); `registry.releases` defines
        both. Returns the name's entry afterwards.

        With `expect`, GenerationConflict is raised unless the name is at that generation. Also
        raises InvalidRequest, AdapterNotFound, RegistryUnavailable.
        """
        for attempt in range(_ATTEMPTS):
            entry = self.entry(name)
            route = rolled_back(name, entry) if order is None else released(name, entry, *order)
            generation = entry.generation if expect is None else expect
            try:
                await self._follower.submit(Release(name, route, generation), actor)
                break
            except GenerationConflict:  # this process has now read the newest state
                if expect is not None or attempt == _ATTEMPTS - 1:
                    raise
        await self.wait(name, wait)
        return self.entry(name)

    def entry(self, name: str) -> Name:
        """The registry's entry for a name. Raises AdapterNotFound."""
        entry = self._follower.names.entry(name)
        if entry is None:
            raise AdapterNotFound(f"the registry has no adapter {name!r}", "name")
        return entry

    async def wait(self, name: str, wait: Wait) -> None:
        """Wait until a name's newest change is where `wait` asks for."""
        if wait == "commit":
            return
        seq = self._follower.names.state.seq
        await self._follower.settled(name)
        if wait == "all":
            await self._follower.reports.all_follow(seq)

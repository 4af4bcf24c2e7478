"""Owns an engine's adapters: who holds them, their sums, and when they are forgotten."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from weft.checkpoint.pack import AdapterImage
from weft.core.adapters import AdapterInfo, AdapterPart, AdapterRef, AdapterSource
from weft.core.errors import AdapterUnavailable, WeftError, to_wire
from weft.core.messages import Hold, Reply
from weft.engine.catalog import LoadEnded, Registered
from weft.engine.residency import Residency
from weft.registry import Holders

MAX_SUMS = 256
"""The most sums that are held at a time; running requests may use further ones."""
REQUESTS = "requests"
"""The holder of all sums, as a sum has no name of its own."""


class Adapters:
    """Knows who holds which adapter, and forgets an adapter that nobody holds once its last request
    has ended. `check()` states the invariants.

    A weighted sum is an adapter like others, made of adapters that are held. It is released with
    any of its parts, or when there are too many sums and it was used least recently.
    """

    def __init__(self, residency: Residency, in_use: Callable[[str], bool]) -> None:
        """`in_use` tells whether any request in the engine uses the content of a digest."""
        self._residency = residency
        self._catalog = residency.catalog
        self._in_use = in_use
        self._holders = Holders()
        self._sums: dict[str, tuple[AdapterPart, ...]] = {}
        """The parts of each sum that is held, those used last at the end."""
        self._replies: list[Reply] = []

    # -- holders -------------------------------------------------------------------------------

    def hold(self, call: Hold) -> None:
        """Begin a hold; `take_replies` later returns the answer. Content that is held already is
        not read again."""
        digest = call.source.digest
        if digest is not None and self._serves(digest):
            self._answer(call, partial(self._hold_known, call, digest))
        else:
            self._residency.registrations.register(call)

    def hold_image(
        self,
        image: AdapterImage,
        source: AdapterSource | None,
        holder: str,
        pinned: bool,
        checked: bool,
    ) -> AdapterInfo:
        """Hold a packed adapter at once; the arguments and errors are those of `Catalog.add`. An
        error leaves all holders as they were."""
        pin = self._pin(image.digest, holder, pinned)
        info = self._catalog.add(image, source, pin, checked)
        self._holders.hold(image.digest, holder, pinned)
        return info

    def release(self, digest: str, holder: str) -> None:
        """Let go of content; without holders it is forgotten, at once or after its last request."""
        self._holders.release(digest, holder)
        if self._holders.is_held(digest):
            self._catalog.pin(digest, self._holders.is_pinned(digest))
        else:
            self._release_sums(lambda parts: any(part.ref.digest == digest for part in parts))
        self.forget_drained()

    def _serves(self, digest: str) -> bool:
        return self._holders.is_held(digest) and self._catalog.slots.refusal(digest) is None

    def _hold_known(self, call: Hold, digest: str) -> AdapterInfo:
        self._catalog.pin(digest, self._pin(digest, call.holder, call.pinned))
        self._catalog.add_source(digest, call.source)
        self._holders.hold(digest, call.holder, call.pinned)
        return self._catalog.info(digest)

    def _pin(self, digest: str, holder: str, pinned: bool) -> bool:
        """Whether content is to be pinned with this hold. If so, sums are released first: pinned
        adapters leave room for the largest known adapter, and unused sums should not count."""
        pin = self._holders.would_be_pinned(digest, holder, pinned)
        if pin:
            self._release_sums(lambda _: True)
            self.forget_drained()
        return pin

    # -- requests ------------------------------------------------------------------------------

    def admit(self, ref: AdapterRef, parts: tuple[AdapterPart, ...]) -> None:
        """Accept a request for an adapter, or for the sum of `parts`. Raises InvalidRequest (they
        can't be summed), AdapterUnavailable (nobody holds the adapter or a part)."""
        for each in [part.ref for part in parts] or [ref]:
            if not self._holders.is_held(each.digest):
                field = "adapters" if parts else "model"
                raise AdapterUnavailable(f"adapter {each.name!r} is not loaded", field)
        if not parts:
            return
        self._catalog.compose(ref.digest, parts)
        self._holders.hold(ref.digest, REQUESTS)
        self._sums.pop(ref.digest, None)
        self._sums[ref.digest] = parts
        if len(self._sums) > MAX_SUMS:
            self._release_sum(next(iter(self._sums)))
            self.forget_drained()

    def _release_sums(self, which: Callable[[tuple[AdapterPart, ...]], bool]) -> None:
        for digest, parts in list(self._sums.items()):
            if which(parts):
                self._release_sum(digest)

    def _release_sum(self, digest: str) -> None:
        del self._sums[digest]
        self._holders.release(digest, REQUESTS)

    # -- between steps -------------------------------------------------------------------------

    def poll(self) -> list[LoadEnded]:
        """Apply the registrations and loads that other threads have finished; return the loads."""
        loads: list[LoadEnded] = []
        for end in self._residency.inbox.empty():
            if isinstance(end, LoadEnded):
                loads.append(end)
            else:
                self._answer(end.call, partial(self._hold_read, end))
        return loads

    def _hold_read(self, read: Registered) -> AdapterInfo:
        if isinstance(read.result, WeftError):
            raise read.result
        call = read.call
        return self.hold_image(read.result, call.source, call.holder, call.pinned, read.checked)

    def _answer(self, call: Hold, hold: Callable[[], AdapterInfo]) -> None:
        try:
            self._replies.append(Reply(call.call_id, info=hold()))
        except WeftError as error:
            self._replies.append(Reply(call.call_id, error=to_wire(error)))

    def take_replies(self) -> list[Reply]:
        """The answers to `hold`s that have ended since the last call of this."""
        replies, self._replies = self._replies, []
        return replies

    def forget_drained(self) -> None:
        """Free the memory of all content that nobody holds and no request uses any more."""
        for digest in self._holders.take_drained(self._in_use):
            self._catalog.forget(digest)

    def check(self) -> None:
        """Raise AssertionError unless all invariants hold."""
        self._holders.check()
        assert all(self._holders.is_held(digest) for digest in self._sums)
        assert len(self._sums) <= MAX_SUMS
        for parts in self._sums.values():
            assert all(self._holders.is_held(part.ref.digest) for part in parts)
        assert self._catalog.known.keys() == self._holders.known(), "known, and held by nobody"

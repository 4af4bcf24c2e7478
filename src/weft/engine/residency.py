"""Tracks which adapters are on the device, and starts loads of those that are needed.

The engine's thread orders loads and registrations, which begin at once. Between steps it applies
the results of those that the worker's threads have finished. This module only keeps the state: the
worker reads, packs, probes and copies.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from weft.checkpoint.pack import AdapterImage
from weft.core.errors import AdapterUnavailable, WeftError
from weft.core.stats import AdapterStats, StageTimes, TierStats, Times
from weft.engine.catalog import Catalog, Inbox, LoadEnded, Registrations
from weft.engine.host import Held, HostTier
from weft.engine.meter import Meter
from weft.schedule.extents import Extent
from weft.schedule.slots import AdapterSlots, Load
from weft.worker.protocol import LoadOrder, LoadResult, Origin, Worker


@dataclass(frozen=True, slots=True)
class _Loading:
    """A load under way."""

    load: Load
    held: Held | None
    """Its image on the host; None: it is to be read, into `extent` if there is one."""
    parts: tuple[Held, ...]
    """For a sum: those of its parts' images that the host has."""
    extent: Extent | None
    ordered_s: float


class Residency:
    """Owner of the loads under way. `AdapterSlots` decides which adapters are on the device."""

    def __init__(
        self,
        slots: AdapterSlots,
        host: HostTier,
        worker: Worker,
        wake: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Other threads call `wake` when there is something in `inbox` to apply."""
        self._worker = worker
        self._clock = clock
        self.inbox = Inbox(wake)
        self.stage_times = StageTimes()
        self.load_times = Times()
        """Seconds of loads, from the order until the adapter was on the device."""
        self.catalog = Catalog(slots, host, worker, self.inbox)
        self.registrations = Registrations(self.catalog, worker, self.inbox, self.stage_times)
        self._loading: dict[str, _Loading] = {}
        """By digest: an adapter has one load at a time."""
        self._hits = self._misses = 0
        self.copy_faults = 0
        """Copies to the device whose checksum was wrong."""
        self.meter: Meter | None = None
        """Measures loads; None: nobody needs that."""

    @property
    def slots(self) -> AdapterSlots:
        return self.catalog.slots

    @property
    def host(self) -> HostTier:
        return self.catalog.host

    def ask(self, digest: str) -> None:
        """Count a request for an adapter as a hit or miss of the device tier."""
        if self.slots.is_resident(digest):
            self._hits += 1
        else:
            self._misses += 1

    def start(self, loads: list[Load]) -> None:
        """Begin the ordered loads, their evictions and moves. Each puts a LoadEnded in `inbox`."""
        for load in loads:
            if load.evicted_slots:
                self._worker.clear(load.evicted_slots)
            for digest in load.evicted:
                known = self.catalog.known[digest]
                known.stats = replace(known.stats, num_evictions=known.stats.num_evictions + 1)
            if load.moves:
                self._worker.move(load.moves)
            self._order(load)

    def _order(self, load: Load) -> None:
        known = self.catalog.known[load.digest]
        origin, held = self.catalog.open(load.digest)
        parts: list[tuple[Origin, float]] = []
        held_parts: list[Held] = []
        extent = None
        if held is None:
            for part in known.parts:
                its_origin, its_held = self.catalog.open(part.ref.digest)
                parts.append((its_origin, part.scale))
                held_parts += [its_held] if its_held else []
            extent = self.host.reserve(known.num_bytes)
        loading = _Loading(load, held, tuple(held_parts), extent, self._clock())
        self._loading[load.digest] = loading
        ended = self._worker.load(LoadOrder(origin, tuple(parts), load.start, extent))
        self.inbox.expect(ended, partial(self._ended, loading))

    def stats(self) -> dict[str, AdapterStats]:
        """Figures by digest, of all known adapters that have been on the device."""
        known = self.catalog.known.items()
        return {digest: each.stats for digest, each in known if each.stats.num_loads}

    def loading_s(self) -> dict[str, float]:
        """For how many seconds loads have been under way, by digest."""
        now = self._clock()
        return {digest: now - loading.ordered_s for digest, loading in self._loading.items()}

    def tiers(self) -> dict[str, TierStats]:
        """Figures by "device", "host" and "disk"; no "disk" if images are not kept there."""
        slots, size = self.slots, self._worker.facts.element_bytes
        device = TierStats(
            num_bytes=slots.used_elements * size,
            max_bytes=slots.capacity * size,
            num_adapters=len(slots.resident),
            hits=self._hits,
            misses=self._misses,
            evictions=slots.num_evictions,
        )
        tiers = {"device": device, "host": self.host.stats()}
        disk = self._worker.disk_stats()
        return tiers if disk is None else {**tiers, "disk": disk}

    def check(self) -> None:
        """Raise AssertionError unless all invariants hold, of the parts too."""
        self.catalog.check()
        self.registrations.check()
        for digest in self.catalog.known:
            assert self.slots.is_loading(digest) <= (digest in self._loading)

    # -- the end of a load ---------------------------------------------------------------------

    def _ended(self, loading: _Loading, result: LoadResult) -> LoadEnded:
        load = loading.load
        del self._loading[load.digest]
        for held in (loading.held, *loading.parts):
            if held is not None:
                self.host.close(held)
        self.stage_times.add(result.stage_s)
        self.copy_faults += result.num_faults
        if isinstance(result.image, WeftError):
            self.host.cancel(loading.extent)
            self.slots.load_failed(load.digest)
            return LoadEnded(load.digest, result.image)
        self._worker.install(load.slot, load.start, result.image)
        self._keep(loading, result, result.image)
        seconds = self._clock() - loading.ordered_s
        if not self.slots.loaded(load.digest, seconds):
            self._worker.clear((load.slot,))
            return LoadEnded(load.digest, AdapterUnavailable("the adapter was unloaded", "model"))
        self.load_times.add(seconds)
        known = self.catalog.known[load.digest]
        if self.meter is not None:
            self.meter.load(known.num_bytes, loading.held is not None, seconds)
        num_loads, num_evictions = known.stats.num_loads + 1, known.stats.num_evictions
        known.stats = AdapterStats(num_loads, num_evictions, seconds, result.stage_s)
        return LoadEnded(load.digest, None)

    def _keep(self, loading: _Loading, result: LoadResult, image: AdapterImage) -> None:
        """Hold the image that was loaded on the host."""
        held = loading.held
        if held is None:
            came_s = sum(s for stage, s in result.stage_s.items() if stage != "copy")
            self.catalog.put(image, loading.extent, came_s)
        elif not result.anew:
            held.image = image
        else:  # what was held is wrong
            self.host.forget(image.digest)
            self.catalog.put(image, None)

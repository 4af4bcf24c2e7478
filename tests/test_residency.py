"""Adapter residency: slots against brute force, and loads over a fake pool and a fake disk."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from weft.checkpoint import AdapterImage
from weft.core.errors import (
    AdapterConflict,
    AdapterInvalid,
    AdapterNotFound,
    AdapterUnavailable,
    WeftError,
)
from weft.core.targets import ImageLayout
from weft.core.types import AdapterInfo, AdapterStats
from weft.residency.host import HostCache
from weft.residency.policy import POLICIES, Policy, fifo, lru
from weft.residency.residency import LoadEnded, Registered, Residency
from weft.residency.slots import AdapterSlots, Load

PATIENCE_S = 10.0


def image(digest: str, size: int, value: float = 1.0) -> AdapterImage:
    layout = ImageLayout((4,), (0,), (0,), size)
    return AdapterImage(digest, layout, torch.full((size,), value), ("q_proj",))


@dataclass
class FakePool:
    """Remembers what is where, and refuses what would be a mistake."""

    arena: torch.Tensor = field(default_factory=lambda: torch.zeros(100))
    placed: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Slot -> start and size."""

    def write(self, start: int, data: torch.Tensor) -> None:
        stop = start + len(data)
        assert stop <= len(self.arena)
        assert all(stop <= s or s + n <= start for s, n in self.placed.values()), "overwritten"
        self.arena[start:stop] = data

    def install(self, slot: int, start: int, layout: ImageLayout) -> None:
        assert slot not in self.placed
        self.placed[slot] = (start, layout.num_elements)

    def clear(self, slot: int) -> None:
        del self.placed[slot]

    def content(self, slot: int) -> list[float]:
        start, size = self.placed[slot]
        return self.arena[start : start + size].tolist()


class FakeDisk:
    """Images by path. An exception in place of an image is raised; `gate` holds reads up."""

    def __init__(self) -> None:
        self.files: dict[str, AdapterImage | Exception] = {}
        self.reads: list[tuple[str, str | None]] = []
        self.gate = threading.Event()
        self.gate.set()

    def read(self, path: str, expect_digest: str | None) -> AdapterImage:
        self.reads.append((path, expect_digest))
        assert self.gate.wait(PATIENCE_S)
        found = self.files[path]
        if isinstance(found, Exception):
            raise found
        if expect_digest not in (None, found.digest):
            raise AdapterUnavailable("changed", "lora_path")
        return found


class World:
    """A residency over fakes: 100 elements, `num_slots` slots, `max_host_images` images."""

    def __init__(self, num_slots: int = 3, max_host_images: int = 8) -> None:
        self.pool = FakePool()
        self.disk = FakeDisk()
        self.woken = threading.Semaphore(0)
        self.clock_s = 0.0
        self.slots = AdapterSlots(100, num_slots)
        self.residency = Residency(
            self.slots,
            self.pool,
            self.disk.read,
            max_host_images,
            self.woken.release,
            clock=lambda: self.clock_s,
        )
        self.now = 0
        self._ended: deque[Registered | LoadEnded] = deque()

    def wait(self) -> Registered | LoadEnded:
        """The one thing that ends next; the wake-up comes with it."""
        assert self.woken.acquire(timeout=PATIENCE_S), "nothing woke the engine"
        self._ended += self.residency.poll()
        self.check()
        return self._ended.popleft()

    def register(
        self, path: str, content: AdapterImage | Exception, pinned: bool = False
    ) -> Registered:
        self.disk.files[path] = content
        self.residency.register(7, path, pinned)
        ended = self.wait()
        assert isinstance(ended, Registered) and ended.call_id == 7
        return ended

    def start(self, digest: str) -> Load | None:
        self.now += 1
        load = self.slots.start_load(digest, self.now)
        if load is not None:
            self.residency.start([load])
        self.check()
        return load

    def load(self, digest: str) -> Load:
        """Start a load and wait until it succeeded."""
        load = self.start(digest)
        assert load is not None
        assert self.wait() == LoadEnded(digest, None)
        assert self.slots.is_resident(digest)
        return load

    def check(self) -> None:
        """The pool shows exactly what is resident."""
        self.slots.check()
        assert len(self.pool.placed) == len(self.slots.resident)


@pytest.fixture
def world() -> Iterator[World]:
    yield from _world()


@pytest.fixture
def one_image() -> Iterator[World]:
    """The host cache holds a single image."""
    yield from _world(max_host_images=1)


def _world(**options: int) -> Iterator[World]:
    made = World(**options)
    yield made
    made.disk.gate.set()
    made.residency.close()
    made.residency.poll()
    made.check()


# -- Residency ---------------------------------------------------------------------------------


def test_register(world: World) -> None:
    ended = world.register("/a", image("a", 30))
    assert ended.error is None
    assert ended.info == AdapterInfo("a", "/a", 4, 120, ("q_proj",))
    assert world.slots.knows("a") and not world.slots.is_resident("a")
    assert world.residency.host.digests() == ("a",)
    assert world.disk.reads == [("/a", None)]


@pytest.mark.parametrize(
    ("raised", "kind", "message"),
    [
        (AdapterNotFound("no such folder", "lora_path"), AdapterNotFound, "no such folder"),
        (AdapterInvalid("bad rank", "r"), AdapterInvalid, "bad rank"),
        (OSError("disk on fire"), AdapterUnavailable, "OSError: disk on fire"),
    ],
)
def test_register_fails(
    world: World, raised: Exception, kind: type[WeftError], message: str
) -> None:
    ended = world.register("/a", raised)
    assert ended.info is None
    assert type(ended.error) is kind and ended.error.message == message
    assert world.residency.host.digests() == ()
    assert world.register("/a", image("a", 30)).error is None, "a failure left something behind"


def test_register_what_never_fits(world: World) -> None:
    ended = world.register("/a", image("a", 101))
    assert isinstance(ended.error, AdapterInvalid) and ended.error.param == "adapter_memory"
    assert not world.slots.knows("a")
    assert world.residency.host.digests() == ()


def test_registrations_end_with_their_own_call_ids(world: World) -> None:
    world.disk.files = {"/a": image("a", 1), "/b": OSError("no"), "/c": image("c", 1)}
    for call_id, path in enumerate(world.disk.files):
        world.residency.register(call_id, path)
    ended = {end.call_id: end for end in (world.wait() for _ in range(3))}
    assert [ended[i].info.digest if ended[i].info else None for i in range(3)] == ["a", None, "c"]


def test_load_from_the_host_cache(world: World) -> None:
    world.register("/a", image("a", 30, 2.5))
    load = world.load("a")
    assert world.pool.content(load.slot) == [2.5] * 30
    assert len(world.disk.reads) == 1


def test_load_reads_again_what_the_host_cache_lost(one_image: World) -> None:
    one_image.register("/a", image("a", 30, 2.5))
    one_image.register("/b", image("b", 30))
    assert one_image.residency.host.digests() == ("b",)
    load = one_image.load("a")
    assert one_image.disk.reads[-1] == ("/a", "a"), "it must be the version that was registered"
    assert one_image.pool.content(load.slot) == [2.5] * 30
    assert one_image.residency.host.digests() == ("a",)


@pytest.mark.parametrize("lost", [OSError("disk on fire"), image("other", 30)])
def test_load_reads_any_folder_that_holds_the_content(
    one_image: World, lost: AdapterImage | Exception
) -> None:
    """Several were registered with the same content; the newest has changed since."""
    for path in ("/old", "/new"):
        one_image.register(path, image("a", 30, 2.5))
    one_image.register("/b", image("b", 30))
    one_image.disk.files["/new"] = lost
    load = one_image.load("a")
    assert one_image.disk.reads[-2:] == [("/new", "a"), ("/old", "a")]
    assert one_image.pool.content(load.slot) == [2.5] * 30


@pytest.mark.parametrize(
    ("now_there", "reason"),
    [
        (image("other", 30), "changed"),
        (AdapterNotFound("it is gone", "lora_path"), "it is gone"),
        (AdapterInvalid("too large", "adapter_model.safetensors"), "too large"),
        (OSError("disk on fire"), "OSError: disk on fire"),
    ],
)
def test_load_fails(one_image: World, now_there: AdapterImage | Exception, reason: str) -> None:
    """The extent is free again; others load; the same one loads once its file is back."""
    one_image.register("/a", image("a", 60))
    one_image.register("/b", image("b", 60))
    one_image.disk.files["/a"] = now_there
    assert one_image.start("a")
    ended = one_image.wait()
    assert isinstance(ended, LoadEnded) and ended.digest == "a"
    assert type(ended.error) is AdapterUnavailable and reason in ended.error.message
    assert not one_image.slots.is_resident("a") and not one_image.slots.is_loading("a")
    assert one_image.slots.used_elements == 0
    one_image.load("b")
    one_image.disk.files["/a"] = image("a", 60)
    assert one_image.load("a").evicted_slots


def test_a_load_that_cannot_be_written_fails(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.register("/a", image("a", 30))
    monkeypatch.setattr(world.pool, "write", lambda *_: (_ for _ in ()).throw(RuntimeError("oom")))
    assert world.start("a")
    ended = world.wait()
    assert isinstance(ended, LoadEnded) and isinstance(ended.error, AdapterUnavailable)
    assert world.slots.used_elements == 0


def test_eviction_clears_the_slot(world: World) -> None:
    for name, value in (("a", 1.0), ("b", 2.0), ("c", 3.0)):
        world.register(f"/{name}", image(name, 50, value))
    first, second = world.load("a"), world.load("b")
    third = world.load("c")
    assert third.evicted_slots == (first.slot,) and third.start == first.start
    assert world.pool.content(second.slot) == [2.0] * 50
    assert world.pool.content(third.slot) == [3.0] * 50
    assert world.slots.num_evictions == 1 and world.slots.num_loads == 3


def test_forget(world: World) -> None:
    world.register("/a", image("a", 30))
    world.load("a")
    world.residency.forget("a")
    world.check()
    assert world.pool.placed == {} and world.residency.host.digests() == ()
    assert not world.slots.knows("a") and world.slots.used_elements == 0
    world.residency.forget("a")
    assert world.register("/a", image("a", 30)).error is None
    world.load("a")


def test_forget_while_loading(one_image: World) -> None:
    """The load ends as a failure and leaves nothing; its extent was not given to others."""
    one_image.register("/a", image("a", 60))
    one_image.register("/b", image("b", 60))
    one_image.disk.gate.clear()
    assert one_image.start("a")
    one_image.residency.forget("a")
    one_image.check()
    assert one_image.start("b") is None, "the loader still writes there"
    one_image.disk.gate.set()
    ended = one_image.wait()
    assert isinstance(ended, LoadEnded) and isinstance(ended.error, AdapterUnavailable)
    assert one_image.slots.used_elements == 0
    one_image.load("b")


def test_register_again_while_a_forgotten_load_runs(one_image: World) -> None:
    """The load then counts: the content is the same."""
    one_image.register("/a", image("a", 60, 4.0))
    one_image.register("/b", image("b", 10))
    one_image.disk.gate.clear()
    load = one_image.start("a")
    assert load
    one_image.residency.forget("a")
    one_image.residency.register(7, "/a")
    one_image.disk.gate.set()
    ended = [one_image.wait(), one_image.wait()]
    if isinstance(ended[0], Registered):
        assert ended[1] == LoadEnded("a", None)
        assert one_image.pool.content(load.slot) == [4.0] * 60
    else:
        assert isinstance(ended[0].error, AdapterUnavailable)
        one_image.load("a")


def test_close_waits_for_a_load_in_progress(world: World) -> None:
    """No thread writes to the arena afterwards."""
    world.register("/a", image("a", 10))
    world.residency.host.drop("a")
    world.disk.gate.clear()
    world.start("a")
    deadline = time.monotonic() + PATIENCE_S
    while len(world.disk.reads) < 2 and time.monotonic() < deadline:
        time.sleep(0.001)
    closing = threading.Thread(target=world.residency.close)
    closing.start()
    time.sleep(0.02)
    assert closing.is_alive()
    world.disk.gate.set()
    closing.join(PATIENCE_S)
    assert not closing.is_alive()
    assert world.wait() == LoadEnded("a", None)


def test_what_a_load_left_behind_by_its_adapter_leaves(one_image: World) -> None:
    """Nothing: its image is not cached either."""
    one_image.register("/a", image("a", 60))
    one_image.register("/b", image("b", 60))
    one_image.disk.gate.clear()
    assert one_image.start("a")
    one_image.residency.forget("a")
    one_image.disk.gate.set()
    one_image.wait()
    assert one_image.residency.host.digests() == ("b",)


# -- pinned adapters, and those without a folder -----------------------------------------------


def test_a_pinned_adapter_is_wanted_and_kept(one_image: World) -> None:
    world = one_image
    assert world.register("/a", image("a", 30, 2.5), pinned=True).error is None
    assert world.slots.wanted == world.slots.pinned == ("a",)
    load = world.load("a")
    assert world.slots.wanted == ()
    for name in "bcd":
        world.register(f"/{name}", image(name, 50))
        world.load(name)
    assert world.slots.resident[-1] == "a" and world.pool.content(load.slot) == [2.5] * 30
    assert world.residency.host.digests() == ("a", "d")
    world.residency.forget("a")
    assert world.slots.pinned == () and world.residency.host.digests() == ("d",)


def test_a_pin_that_would_leave_too_little(world: World) -> None:
    """It is refused, and what was registered before stays as it was."""
    world.register("/a", image("a", 40))
    world.register("/b", image("b", 40))
    assert world.register("/a", image("a", 40), pinned=True).error is None
    refused = world.register("/b", image("b", 40), pinned=True)
    assert type(refused.error) is AdapterConflict and refused.error.param == "pinned"
    assert "--adapter-memory" in refused.error.message
    refused = world.register("/c", image("c", 61))
    assert type(refused.error) is AdapterConflict and refused.error.param == "pinned"
    assert world.slots.pinned == ("a",) and not world.slots.knows("c")
    assert set(world.residency.host.digests()) == {"a", "b"}
    world.load("b")
    assert world.register("/c", image("c", 60)).error is None
    world.load("c")


def test_the_newest_registration_decides_the_pin(one_image: World) -> None:
    world = one_image
    world.register("/a", image("a", 30), pinned=True)
    world.load("a")
    world.register("/a", image("a", 30))
    assert world.slots.pinned == ()
    world.register("/b", image("b", 90))
    assert world.load("b").evicted == ("a",)
    assert world.residency.host.digests() == ("b",)


def test_a_pin_that_cannot_be_loaded_is_not_tried_for_ever(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.register("/a", image("a", 30), pinned=True)
    monkeypatch.setattr(world.pool, "write", lambda *_: (_ for _ in ()).throw(RuntimeError("oom")))
    assert world.start("a")
    world.wait()
    assert world.slots.pinned == ("a",) and world.slots.wanted == ()


def test_an_image_without_a_folder_stays_on_the_host(one_image: World) -> None:
    """Also when the same content is registered from a folder besides, and that one goes away."""
    world = one_image
    info = world.residency.add(image("a", 60, 2.5), None, pinned=False)
    assert info == AdapterInfo("a", "", 4, 240, ("q_proj",))
    world.register("/a", image("a", 60, 2.5))
    world.disk.files["/a"] = AdapterNotFound("gone")
    reads = len(world.disk.reads)
    for _ in range(2):
        load = world.load("a")
        assert world.pool.content(load.slot) == [2.5] * 60
        world.register("/b", image("b", 60))
        world.load("b")
    assert len(world.disk.reads) == reads + 2, "only /b was read"
    assert world.residency.host.digests() == ("a", "b")
    world.residency.forget("a")
    assert world.residency.host.digests() == ("b",)


def test_register_expects_a_digest(world: World) -> None:
    world.disk.files["/a"] = image("a", 30)
    world.residency.register(1, "/a", expect_digest="b")
    ended = world.wait()
    assert isinstance(ended, Registered) and isinstance(ended.error, AdapterUnavailable)
    assert not world.slots.knows("a") and not world.slots.knows("b")
    world.residency.register(1, "/a", expect_digest="a")
    ended = world.wait()
    assert isinstance(ended, Registered) and ended.error is None


def test_stats_by_adapter(world: World) -> None:
    for name in "ab":
        world.register(f"/{name}", image(name, 60))
    assert world.residency.stats() == {}
    for seconds, name in ((0.5, "a"), (0.25, "b"), (2.0, "a")):
        assert world.start(name)
        world.clock_s += seconds
        world.wait()
    assert world.residency.stats() == {"a": AdapterStats(2, 1, 2.0), "b": AdapterStats(1, 1, 0.25)}
    world.residency.forget("a")
    assert world.residency.stats() == {"b": AdapterStats(1, 1, 0.25)}


def test_host_cache_keeps_what_is_kept() -> None:
    cache = HostCache(1)
    cache.put(image("a", 1), kept=True)
    cache.put(image("b", 1), kept=True)
    cache.put(image("c", 1))
    assert cache.digests() == ("a", "b", "c")
    cache.put(image("d", 1))
    assert cache.digests() == ("a", "b", "d")
    cache.put(image("a", 1))
    assert cache.digests() == ("a", "b"), "a was used last"


def test_host_cache_first_come_first_to_go() -> None:
    cache = HostCache(2, fifo)
    cache.put(image("a", 1))
    cache.put(image("b", 1))
    assert cache.get("a") is not None
    cache.put(image("a", 1))
    cache.put(image("c", 1))
    assert cache.digests() == ("b", "c")


def test_host_cache_puts_the_least_recently_used_out() -> None:
    cache = HostCache(2)
    cache.put(image("a", 1))
    cache.put(image("b", 1))
    assert cache.get("a") is not None
    cache.put(image("c", 1))
    assert cache.digests() == ("a", "c")
    assert cache.get("b") is None
    cache.put(image("a", 1))
    cache.put(image("d", 1))
    assert cache.digests() == ("a", "d")
    cache.drop("a")
    cache.drop("nobody")
    assert cache.digests() == ("d",)


# -- AdapterSlots against brute force ----------------------------------------------------------

CAPACITY = 24
NUM_SLOTS = 4


@dataclass
class Placed:
    start: int
    size: int
    leases: int
    loading: bool
    came: int
    last_use: int
    pinned: bool = False

    @property
    def stop(self) -> int:
        return self.start + self.size

    def must_stay(self, now: int) -> bool:
        return self.loading or self.leases > 0 or self.last_use >= now or self.pinned


Spans = dict[str, tuple[int, int]]


def apart(a: tuple[int, int], b: tuple[int, int]) -> bool:
    return a[1] <= b[0] or b[1] <= a[0]


def places(name: str, size: int, homes: Spans) -> list[tuple[int, int]]:
    """Where an adapter may be put: at its home, or outside of all others'."""
    if name in homes:
        return [homes[name]]
    spans = [(start, start + size) for start in range(CAPACITY - size + 1)]
    return [span for span in spans if all(apart(span, home) for home in homes.values())]


class SlotsMachine(RuleBasedStateMachine):
    """AdapterSlots beside a model of it that tries all windows."""

    names = st.sampled_from([f"d{i}" for i in range(7)])

    def __init__(self) -> None:
        super().__init__()
        self.slots = AdapterSlots(CAPACITY, NUM_SLOTS)
        self.sizes: dict[str, int] = {}
        self.placed: dict[str, Placed] = {}
        self.dropped: set[str] = set()
        self.used: dict[str, int] = {}
        self.homes: Spans = {}
        self.wanted: set[str] = set()
        self.now = 0

    def fits(self, name: str, keep: Callable[[Placed], bool]) -> bool:
        """Whether there is a place for `name`, and a slot, with nothing that must stay."""
        kept = [p for p in self.placed.values() if keep(p)]
        return len(kept) < NUM_SLOTS and any(
            all(apart(place, (p.start, p.stop)) for p in kept)
            for place in places(name, self.sizes[name], self.homes)
        )

    @rule(name=names, size=st.integers(2, 14), pinned=st.booleans())
    def add(self, name: str, size: int, pinned: bool) -> None:
        # content has one size for good: it is part of what the digest stands for
        size = self.used.setdefault(name, size)
        possible = self.may_add(name, size, pinned)
        try:
            self.slots.add(name, size, pinned)
        except AdapterConflict as error:
            assert not possible and error.param == "pinned"
            return
        assert possible
        self.sizes[name] = size
        self.dropped.discard(name)
        if pinned:
            self.homes[name] = self.slots._homes[name]
        else:
            self.homes.pop(name, None)
        if pinned and name not in self.placed:
            self.wanted.add(name)
        else:
            self.wanted.discard(name)
        if name in self.placed:
            self.placed[name].pinned = pinned

    def may_add(self, name: str, size: int, pinned: bool) -> bool:
        """Whether some home leaves room for the largest; what is there already stays where it is.
        What is not pinned must fit beside the homes."""
        others = {n: home for n, home in self.homes.items() if n != name}
        if not pinned or name in self.homes:
            return pinned or bool(places(name, size, others))
        largest = max(size, *self.sizes.values(), 0)
        spans = places(name, size, others)
        if name in self.placed:
            here = (self.placed[name].start, self.placed[name].stop)
            spans = [span for span in spans if span == here]
        return len(others) + 1 < NUM_SLOTS and any(
            places("another", largest, others | {name: span}) for span in spans
        )

    @rule()
    def tick(self) -> None:
        self.now += 1

    @rule(name=names)
    def start_load(self, name: str) -> None:
        if name not in self.sizes or name in self.placed:
            return
        size = self.sizes[name]
        possible = self.fits(name, lambda p: p.must_stay(self.now))
        roomy = self.fits(name, lambda _: True)
        load = self.slots.start_load(name, self.now)
        assert (load is not None) == possible
        if load is None:
            return
        gone = [n for n in self.placed if n not in self.slots._extents]
        assert sorted(gone) == sorted(load.evicted) and len(gone) == len(load.evicted_slots)
        assert not (gone and roomy), "evicted although there was room"
        stop = load.start + size
        full = len(self.placed) == NUM_SLOTS
        for other in gone:
            p = self.placed.pop(other)
            assert not p.must_stay(self.now)
            in_the_way = p.start < stop and load.start < p.stop
            assert in_the_way or (full and len(gone) == 1), "evicted for nothing"
        for p in self.placed.values():
            assert apart((load.start, stop), (p.start, p.stop))
        assert (load.start, stop) in places(name, size, self.homes)
        self.placed[name] = Placed(
            load.start, size, 0, True, self.now, self.now, name in self.homes
        )
        self.wanted.discard(name)

    @rule(name=names, size=st.integers(2, 14), lease=st.booleans())
    def bring(self, name: str, size: int, lease: bool) -> None:
        """All that makes an adapter useful, so that the line fills up."""
        self.add(name, size, pinned=name in self.homes)
        self.tick()
        self.start_load(name)
        self.end_load(name, fails=False)
        if lease:
            self.acquire(name)

    @rule(name=names, fails=st.booleans())
    def end_load(self, name: str, fails: bool) -> None:
        if name not in self.placed or not self.placed[name].loading:
            return
        if fails:
            self.slots.load_failed(name)
            del self.placed[name]
        elif self.slots.loaded(name):
            assert name not in self.dropped
            self.placed[name].loading = False
        else:
            assert name in self.dropped
            del self.placed[name]
        self.dropped.discard(name)

    @rule(name=names)
    def acquire(self, name: str) -> None:
        if name in self.placed and not self.placed[name].loading:
            self.slots.acquire(name, self.now)
            self.placed[name].leases += 1
            self.placed[name].last_use = self.now

    @rule(name=names)
    def release(self, name: str) -> None:
        if name in self.placed and self.placed[name].leases:
            self.slots.release(name, self.now)
            self.placed[name].leases -= 1
            self.placed[name].last_use = self.now

    @rule(name=names)
    def touch(self, name: str) -> None:
        self.slots.touch(name, self.now)
        if name in self.placed:
            self.placed[name].last_use = self.now

    @rule(name=names)
    def remove(self, name: str) -> None:
        found = self.placed.get(name)
        if found and found.leases:
            return
        slot = self.slots.remove(name)
        assert (slot is not None) == (found is not None and not found.loading)
        self.sizes.pop(name, None)
        self.homes.pop(name, None)
        self.wanted.discard(name)
        if slot is not None:
            del self.placed[name]
        elif found:
            found.pinned = False
            self.dropped.add(name)

    @precondition(lambda self: self.sizes)
    @rule(name=names, quantum=st.integers(0, 4))
    def choose_victims(self, name: str, quantum: int) -> None:
        """Once the victims have no leases, a later step finds room, slots permitting."""
        if name not in self.sizes or name in self.placed:
            return

        def keep(p: Placed) -> bool:
            return p.loading or p.pinned or (p.leases > 0 and self.tenure(p) < quantum)

        def after(p: Placed) -> bool:
            return p.loading or p.pinned or (p.leases > 0 and p not in chosen)

        victims = self.slots.choose_victims(name, self.now, quantum)
        chosen = [self.placed[v] for v in victims]
        assert all(p.leases and not p.pinned and self.tenure(p) >= quantum for p in chosen)
        window_exists = any(
            all(apart(place, (p.start, p.stop)) for p in self.placed.values() if keep(p))
            for place in places(name, self.sizes[name], self.homes)
        )
        kept = sum(after(p) for p in self.placed.values())
        if window_exists and kept < NUM_SLOTS:
            assert self.fits(name, after)

    def tenure(self, p: Placed) -> int:
        extent = next(e for e in self.slots._line if e.start == p.start)
        return self.now - extent.leased_since

    @invariant()
    def same(self) -> None:
        self.slots.check()
        resident = {n for n, p in self.placed.items() if not p.loading}
        assert set(self.slots.resident) == resident
        assert set(self.slots.pinned) == set(self.homes)
        assert self.slots.wanted == tuple(sorted(self.wanted))
        for name, size in self.sizes.items():
            assert places(name, size, self.homes), "it could never be loaded"
        assert self.slots.used_elements == sum(p.size for p in self.placed.values())
        for name, p in self.placed.items():
            assert self.slots.is_resident(name) == (not p.loading)
            assert self.slots.is_loading(name) == p.loading
            assert self.slots.num_leases(name) == p.leases


TestSlotsMachine = SlotsMachine.TestCase
TestSlotsMachine.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


@pytest.mark.parametrize("name", POLICIES)
@given(uses=st.lists(st.integers(0, 6), min_size=1, max_size=30))
@settings(max_examples=60, deadline=None)
def test_the_policy_says_who_goes_first(name: str, uses: list[int]) -> None:
    """Equal conditions otherwise: of single neighbours that make room, in arena and slots alike."""
    slots = AdapterSlots(8 * 4, 4, POLICIES[name])
    came: dict[str, int] = {}
    used: dict[str, int] = {}
    for now, use in enumerate(uses):
        digest = f"d{use}"
        slots.add(digest, 8)
        used[digest] = now
        if digest in came:
            slots.acquire(digest, now)
            slots.release(digest, now)
            continue
        load = slots.start_load(digest, now)
        assert load is not None and slots.loaded(digest)
        if len(came) == 4:
            first = min(came, key=(came if name == "fifo" else used).__getitem__)
            assert load.evicted == (first,)
            del came[first]
        came[digest] = now
        slots.check()
        assert set(slots.resident) == set(came)


def test_policies() -> None:
    key: Policy
    for key, first in ((lru, "b"), (fifo, "a")):
        times = {"a": (1, 9), "b": (2, 3), "c": (4, 4)}
        assert min(times, key=lambda digest: key(*times[digest])) == first


def test_homes_lie_close_together() -> None:
    """So that the gap between them stays long."""
    slots = AdapterSlots(100, 10)
    for name in "abc":
        slots.add(name, 20, pinned=True)
    assert slots._homes == {"a": (80, 100), "b": (60, 80), "c": (40, 60)}
    slots.remove("b")
    slots.add("d", 15, pinned=True)
    assert slots._homes["d"] == (65, 80)
    slots.add("e", 40)
    with pytest.raises(AdapterConflict, match="must leave 41 elements"):
        slots.add("f", 41, pinned=True)
    slots.check()


def test_a_pinned_adapter_waits_for_the_leases_at_its_home() -> None:
    """Its home is nobody else's meanwhile."""
    slots = AdapterSlots(10, 4)
    for name in "ab":
        slots.add(name, 5)
        assert slots.start_load(name, 0) and slots.loaded(name)
    slots.acquire("b", 1)
    slots.add("pinned", 3, pinned=True)
    slots.add("c", 5)
    assert slots.start_load("pinned", 2) is None and slots.wanted == ("pinned",)
    assert slots.choose_victims("pinned", 2, 0) == ["b"]
    slots.release("b", 2)
    load = slots.start_load("c", 3)
    assert load is not None and load.start + 5 <= 7 and slots.loaded("c")
    load = slots.start_load("pinned", 4)
    assert load is not None and load.start == 7 and slots.loaded("pinned")
    slots.check()


def test_a_pinned_adapter_keeps_its_slot_when_slots_run_out() -> None:
    slots = AdapterSlots(100, 3)
    for now, name in enumerate(["pinned", "a", "b", "c"]):
        slots.add(name, 10, pinned=name == "pinned")
        load = slots.start_load(name, now)
        assert load is not None and slots.loaded(name)
    assert load.evicted == ("a",)
    with pytest.raises(AdapterConflict):
        for name in "bc":
            slots.add(name, 10, pinned=True)
    slots.check()


def test_what_is_waited_for_is_not_evicted_in_that_step() -> None:
    slots = AdapterSlots(10, 4)
    slots.add("a", 10)
    slots.add("b", 10)
    assert slots.start_load("a", 1) and slots.loaded("a")
    slots.touch("a", 2)
    assert slots.start_load("b", 2) is None
    load = slots.start_load("b", 3)
    assert load is not None and len(load.evicted_slots) == 1
    slots.check()


def test_longest_leased() -> None:
    slots = AdapterSlots(10, 4)
    for i, name in enumerate("abc"):
        slots.add(name, 3)
        assert slots.start_load(name, i) and slots.loaded(name)
    assert slots.longest_leased(99, 0) is None
    slots.acquire("b", 10)
    slots.acquire("a", 12)
    assert slots.longest_leased(13, 4) is None
    assert slots.longest_leased(14, 4) == "b"
    slots.release("b", 14)
    assert slots.longest_leased(20, 4) == "a"


def test_a_window_that_frees_a_slot_costs_no_other_adapter() -> None:
    """All slots are taken; what makes way in the arena gives its slot too."""
    slots = AdapterSlots(10, 2)
    for now, (name, size) in enumerate([("small", 2), ("large", 8), ("next", 8)]):
        slots.add(name, size)
        load = slots.start_load(name, now)
        assert load is not None and slots.loaded(name)
    assert slots.resident == ("small", "next") and slots.num_evictions == 1
    slots.check()

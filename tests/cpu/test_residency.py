"""Adapter residency: loads and registrations over a fake pool and a fake disk."""

from __future__ import annotations

import errno
import gc
import shutil
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any, NamedTuple
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from patience import PATIENCE_S

from weft.checkpoint.pack import AdapterImage
from weft.core.adapters import AdapterInfo, AdapterSource
from weft.core.errors import (
    AdapterConflict,
    AdapterInvalid,
    AdapterNotFound,
    AdapterQuarantined,
    AdapterUnavailable,
    WeftError,
)
from weft.core.folders import Folder
from weft.core.messages import Hold
from weft.core.stats import AdapterStats, CheckResult
from weft.core.targets import ImageLayout
from weft.engine.catalog import MAX_REGISTERING, LoadEnded, Registered
from weft.engine.host import HostTier
from weft.engine.residency import Residency
from weft.kernels.checksum import checksum
from weft.schedule.extents import Extent, Extents, Move
from weft.schedule.policy import Policy, fifo, lru
from weft.schedule.slots import AdapterSlots, Load
from weft.worker import images as images_module
from weft.worker.adapters import AdapterLoader
from weft.worker.images import ImageStore
from weft.worker.memory import HostMemory
from weft.worker.protocol import LoadOrder, LoadResult
from weft.worker.reading import NUM_READERS, AdapterReader


def image(digest: str, size: int, value: float = 1.0) -> AdapterImage:
    layout = ImageLayout((4,), (0,), (0,), size)
    return AdapterImage(digest, layout, torch.full((size,), value), ("q_proj",))


@dataclass
class FakePool:
    """Remembers what is where, and refuses what would be a mistake."""

    arena: torch.Tensor = field(default_factory=lambda: torch.zeros(100))
    placed: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Slot -> start and size."""

    broken: bool = False
    torn: int = 0
    """How many of the next copies go wrong."""

    @property
    def element_bytes(self) -> int:
        return self.arena.element_size()

    def write(self, start: int, data: torch.Tensor) -> int:
        if self.broken:
            raise RuntimeError("the copy failed")
        stop = start + len(data)
        assert stop <= len(self.arena)
        assert all(stop <= s or s + n <= start for s, n in self.placed.values()), "overwritten"
        self.arena[start:stop] = data
        if self.torn:
            self.torn -= 1
            self.arena[start + len(data) // 2 : stop] = -7.0
        return int(checksum(self.arena[start:stop]))

    def install(self, slot: int, start: int, layout: ImageLayout) -> None:
        assert slot not in self.placed
        self.placed[slot] = (start, layout.num_elements)

    def clear(self, slot: int) -> None:
        del self.placed[slot]

    def move(self, moves: Sequence[Move]) -> FakePool:
        for slot, source, dest, size in moves:
            assert self.placed[slot] == (source, size)
            self.arena[dest : dest + size] = self.arena[source : source + size].clone()
            self.placed[slot] = (dest, size)
        return self

    def wait(self) -> None:
        """Moves are done at once."""

    def content(self, slot: int) -> list[float]:
        start, size = self.placed[slot]
        return self.arena[start : start + size].tolist()


def info(digest: str) -> AdapterInfo:
    return AdapterInfo(digest, "/a", 4, 120, ("q_proj",))


class FakeDisk:
    """Images by path. An exception in place of an image is raised; `gate` holds reads up."""

    num_ranks = 1

    def __init__(self) -> None:
        self.files: dict[str, AdapterImage | Exception] = {}
        self.reads: list[tuple[str, str | None]] = []
        self.gate = threading.Event()
        self.gate.set()
        self.slow: set[str] = set()
        """Paths whose reads the gate holds up; all, if there are none."""

    def read_adapter(self, source: AdapterSource) -> Any:
        """The image itself stands for the folder's content."""
        path, expect_digest = source.path, source.digest
        self.reads.append((path, expect_digest))
        assert path not in (self.slow or {path}) or self.gate.wait(PATIENCE_S)
        found = self.files[path]
        if isinstance(found, Exception):
            raise found
        if expect_digest not in (None, found.digest):
            raise AdapterUnavailable("changed", "lora_path")
        return found

    def pack_adapter(self, files: Any) -> AdapterImage:
        return replace(files, data=files.data.clone())


class Answer(NamedTuple):
    """How a registration has ended."""

    call_id: int
    info: AdapterInfo | None
    error: WeftError | None


@dataclass
class Facts:
    """What residency needs to know of a worker."""

    element_bytes: int
    has_checks: bool = False


class FakeWorker:
    """The real threads and files of a worker over a fake pool, where moves are done at once."""

    def __init__(self, pool: FakePool, adapters: AdapterLoader) -> None:
        self.pool = pool
        self.adapters = adapters
        self.facts = Facts(pool.element_bytes)
        self.move = pool.move
        self.install = lambda slot, start, image: pool.install(slot, start, image.layout)
        self.pack, self.probe, self.stage = adapters.pack, adapters.probe, adapters.stage
        self.disk_stats = adapters.disk_stats

    def load(self, order: LoadOrder) -> Future[LoadResult]:
        return self.adapters.load(order, self.pool.wait)

    def clear(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self.pool.clear(slot)


class World:
    """A residency over fakes: 100 elements on the device, `host_bytes` on the host."""

    def __init__(
        self,
        num_slots: int = 3,
        host_bytes: int = 4000,
        folder: Path | None = None,
        arena: bool = False,
    ) -> None:
        self.pool = FakePool()
        self.disk = FakeDisk()
        self.woken = threading.Semaphore(0)
        self.clock_s = 0.0
        self.slots = AdapterSlots(100, num_slots)
        memory = torch.full((host_bytes,), 255, dtype=torch.uint8) if arena else None
        self.images = folder and ImageStore(folder, "base", torch.float32, 1 << 30)
        packer: Any = self.disk
        pool: Any = self.pool
        self.reader = AdapterReader(packer, self.images, clock=lambda: self.clock_s)
        host = HostMemory(host_bytes, memory)
        self.adapters = AdapterLoader(pool, self.reader, host, None, clock=lambda: self.clock_s)
        self.worker = FakeWorker(self.pool, self.adapters)
        worker: Any = self.worker
        self.residency = Residency(
            self.slots,
            HostTier(host_bytes, Extents(host_bytes) if arena else None),
            worker,
            self.woken.release,
            clock=lambda: self.clock_s,
        )
        self.catalog = self.residency.catalog
        self.now = 0
        self.checked = True
        """After each call."""
        self._ended: deque[Answer | LoadEnded] = deque()

    def begin(
        self, call_id: int, path: str, pinned: bool = False, before: AdapterInfo | None = None
    ) -> None:
        source = AdapterSource(path)
        if before is not None:
            source = AdapterSource(path, before.digest, before.checked)
        self.residency.registrations.register(Hold(call_id, source, "test", pinned))

    def _poll(self) -> Iterator[Answer | LoadEnded]:
        for end in self.residency.inbox.empty():
            yield self._answer(end) if isinstance(end, Registered) else end

    def _answer(self, end: Registered) -> Answer:
        """As the engine does: what was read is added."""
        call, result = end.call, end.result
        if isinstance(result, WeftError):
            return Answer(call.call_id, None, result)
        try:
            info = self.catalog.add(result, call.source, call.pinned, end.checked)
        except WeftError as error:
            return Answer(call.call_id, None, error)
        return Answer(call.call_id, info, None)

    def check_by(self, checker: Any) -> Any:
        """From now on what is registered is checked."""
        self.adapters.self_check = checker
        self.worker.facts.has_checks = True
        return checker

    def close(self) -> None:
        self.residency.registrations.close()
        self.adapters.close()

    def wait(self) -> Answer | LoadEnded:
        """The one thing that ends next; the wake-up comes with it."""
        while not self._ended:
            assert self.woken.acquire(timeout=PATIENCE_S), "nothing woke the engine"
            self._ended += self._poll()
            self.check()
        return self._ended.popleft()

    def settle(self, done: Callable[[], bool]) -> None:
        """Wait for what ends without a word."""
        deadline = time.monotonic() + PATIENCE_S
        while not done():
            assert time.monotonic() < deadline
            self._ended += self._poll()
            time.sleep(0.001)
        self.check()

    def register(
        self,
        path: str,
        content: AdapterImage | Exception,
        pinned: bool = False,
        before: AdapterInfo | None = None,
    ) -> Answer:
        """`before`: what an engine before this one said of it."""
        self.disk.files[path] = content
        self.begin(7, path, pinned, before)
        ended = self.wait()
        assert isinstance(ended, Answer) and ended.call_id == 7
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
        if not self.checked:
            return
        self.residency.check()
        assert len(self.pool.placed) == len(self.slots.resident)


@pytest.fixture
def world() -> Iterator[World]:
    yield from _world()


@pytest.fixture
def no_host() -> Iterator[World]:
    """Nothing is held on the host unless it must be."""
    yield from _world(host_bytes=1)


@pytest.fixture
def pinned() -> Iterator[World]:
    """As on a GPU, with host memory for two images."""
    yield from _world(host_bytes=2 * 4096, arena=True)


@pytest.fixture
def imaged(tmp_path: Path) -> Iterator[World]:
    """Images are kept on disk, nothing on the host."""
    yield from _world(host_bytes=1, folder=tmp_path / "cache")


def _world(**options: Any) -> Iterator[World]:
    made = World(**options)
    yield made
    made.disk.gate.set()
    made.close()
    made.residency.inbox.empty()
    made.check()


# -- Residency ---------------------------------------------------------------------------------


def test_register(world: World) -> None:
    ended = world.register("/a", image("a", 30))
    assert ended.error is None
    assert ended.info == info("a")
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


def test_what_is_read_ahead_is_not_read_again_unless_it_changes(
    world: World, tmp_path: Path
) -> None:
    paths = [tmp_path / name for name in "abc"]
    for path in paths:
        path.mkdir()
        (path / "adapter_config.json").write_text("{}")
        world.disk.files[str(path)] = image(path.name, 10)
    world.reader.read_ahead([AdapterSource(str(path)) for path in paths], 1 << 20)
    world.settle(lambda: all(ahead.done() for ahead in world.reader._ahead.values()))
    (paths[1] / "adapter_config.json").write_text("{ }")
    world.disk.files[str(paths[1])] = image("changed", 10)
    paths[2].rename(tmp_path / "d")
    world.disk.files[str(paths[2])] = AdapterUnavailable("it is gone", "lora_path")
    answers = [world.register(str(p), world.disk.files[str(p)]) for p in (*paths, paths[0])]
    found = [a.error.message if a.error else a.info and a.info.digest for a in answers]
    assert found == ["a", "changed", "it is gone", "a"]
    counts = Counter(path[-1] for path, _ in world.disk.reads)
    assert counts == {"a": 2, "b": 2, "c": 2}, "each is handed out once"


def test_only_the_files_that_are_read_say_whether_an_adapter_changed(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the folder can't be listed, as if it had the mode 0711."""
    monkeypatch.setattr(Folder, "names", lambda _: [])
    paths = [tmp_path / name for name in "ab"]
    for path in paths:
        path.mkdir()
        (path / "adapter_config.json").write_text("{}")
        (path / "latest").symlink_to("nothing")
        world.disk.files[str(path)] = image(path.name, 10)
    world.reader.read_ahead([AdapterSource(str(path)) for path in paths], 1 << 20)
    world.settle(lambda: all(ahead.done() for ahead in world.reader._ahead.values()))
    (paths[0] / "train.log").write_text("step 2")
    (paths[1] / "adapter_model.safetensors").write_text("new")
    world.disk.files[str(paths[1])] = image("changed", 10)
    answers = [world.register(str(path), world.disk.files[str(path)]) for path in paths]
    assert [answer.info and answer.info.digest for answer in answers] == ["a", "changed"]
    counts = Counter(path[-1] for path, _ in world.disk.reads)
    assert counts == {"a": 1, "b": 2}


def test_known_content_that_is_read_ahead_needs_no_folder_later(
    imaged: World, tmp_path: Path
) -> None:
    known = imaged.register("/a", image("a", 10)).info
    assert known is not None
    imaged.catalog.forget("a")
    imaged.reader.read_ahead([AdapterSource("/a", "a"), AdapterSource("/b", "b")], 1 << 20)
    imaged.settle(lambda: all(ahead.done() for ahead in imaged.reader._ahead.values()))
    shutil.rmtree(tmp_path / "cache")
    answer = imaged.register("/a", RuntimeError("it was read again"), before=known)
    assert answer.info is not None and answer.info.digest == "a"
    assert imaged.register("/b", image("b", 10), before=info("b")).info is not None


def test_little_memory_is_read_ahead(world: World, tmp_path: Path) -> None:
    paths = [tmp_path / f"{i:02}" for i in range(30)]
    for path in paths:
        path.mkdir()
        world.disk.files[str(path)] = image(path.name, 10)
    each = image("00", 10).num_bytes
    world.reader.read_ahead([AdapterSource(str(path)) for path in paths], 3 * each)
    world.settle(lambda: all(ahead.done() for ahead in world.reader._ahead.values()))
    assert 3 <= len(world.disk.reads) < 3 + NUM_READERS
    for path in paths[:5]:
        assert world.register(str(path), world.disk.files[str(path)]).info is not None


def test_what_is_forgotten_is_not_read_ahead(world: World) -> None:
    """It would hold up what is asked for."""
    world.register("/a", image("a", 10))
    ahead = [AdapterSource(f"/{i}", f"/{i}") for i in range(3 * NUM_READERS)]
    world.disk.files |= {source.path: image(source.path, 10) for source in ahead}
    world.disk.gate.clear()
    world.reader.read_ahead(ahead, 1 << 20)
    world.load("a")
    world.disk.gate.set()
    assert world.register("/b", image("b", 10)).info is not None
    assert len(world.disk.reads) <= 2 + NUM_READERS


def test_registrations_end_with_their_own_call_ids(world: World) -> None:
    world.disk.files = {"/a": image("a", 1), "/b": OSError("no"), "/c": image("c", 1)}
    for call_id, path in enumerate(world.disk.files):
        world.begin(call_id, path)
    ended = {end.call_id: end for end in (world.wait() for _ in range(3))}
    assert [ended[i].info.digest if ended[i].info else None for i in range(3)] == ["a", None, "c"]


def test_load_from_the_host_cache(world: World) -> None:
    world.register("/a", image("a", 30, 2.5))
    load = world.load("a")
    assert world.pool.content(load.slot) == [2.5] * 30
    assert len(world.disk.reads) == 1


def test_load_reads_again_what_the_host_cache_lost(no_host: World) -> None:
    no_host.register("/a", image("a", 30, 2.5))
    no_host.register("/b", image("b", 30))
    assert no_host.residency.host.digests() == ()
    load = no_host.load("a")
    assert no_host.disk.reads[-1] == ("/a", "a"), "it must be the version that was registered"
    assert no_host.pool.content(load.slot) == [2.5] * 30
    assert no_host.residency.host.digests() == ()


@pytest.mark.parametrize("lost", [OSError("disk on fire"), image("other", 30)])
def test_load_reads_any_folder_that_holds_the_content(
    no_host: World, lost: AdapterImage | Exception
) -> None:
    """Several were registered with the same content; the newest has changed since."""
    for path in ("/old", "/new"):
        no_host.register(path, image("a", 30, 2.5))
    no_host.register("/b", image("b", 30))
    no_host.disk.files["/new"] = lost
    load = no_host.load("a")
    assert no_host.disk.reads[-2:] == [("/new", "a"), ("/old", "a")]
    assert no_host.pool.content(load.slot) == [2.5] * 30


@pytest.mark.parametrize(
    ("now_there", "reason"),
    [
        (image("other", 30), "changed"),
        (AdapterNotFound("it is gone", "lora_path"), "it is gone"),
        (AdapterInvalid("too large", "adapter_model.safetensors"), "too large"),
        (OSError("disk on fire"), "OSError: disk on fire"),
    ],
)
def test_load_fails(no_host: World, now_there: AdapterImage | Exception, reason: str) -> None:
    """The extent is free again; others load; the same one loads once its file is back."""
    no_host.register("/a", image("a", 60))
    no_host.register("/b", image("b", 60))
    no_host.disk.files["/a"] = now_there
    assert no_host.start("a")
    ended = no_host.wait()
    assert isinstance(ended, LoadEnded) and ended.digest == "a"
    assert type(ended.error) is AdapterUnavailable and reason in ended.error.message
    assert not no_host.slots.is_resident("a") and not no_host.slots.is_loading("a")
    assert no_host.slots.used_elements == 0
    no_host.load("b")
    no_host.disk.files["/a"] = image("a", 60)
    assert no_host.load("a").evicted_slots


def test_a_load_that_cannot_be_written_fails(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.register("/a", image("a", 30))
    monkeypatch.setattr(world.pool, "write", lambda *_: (_ for _ in ()).throw(RuntimeError("oom")))
    assert world.start("a")
    ended = world.wait()
    assert isinstance(ended, LoadEnded) and isinstance(ended.error, AdapterUnavailable)
    assert world.slots.used_elements == 0


def test_a_load_that_fails_on_one_rank_ends_when_all_have_written(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its place may be another adapter's from then on, on all ranks."""
    world.register("/a", image("a", 30))
    written, asked = Future[int](), threading.Event()

    def write(*_: object) -> list[Future[int]]:
        asked.set()
        return [written]

    def fail(*_: object) -> int:
        raise MemoryError

    monkeypatch.setattr(world.adapters, "_others", Mock(write=write, num_ranks=1))
    monkeypatch.setattr(world.pool, "write", fail)
    world.start("a")
    assert asked.wait(PATIENCE_S)
    assert not world.woken.acquire(timeout=0.1)
    written.set_result(0)
    ended = world.wait()
    assert isinstance(ended, LoadEnded) and isinstance(ended.error, AdapterUnavailable)


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
    world.catalog.forget("a")
    world.check()
    assert world.pool.placed == {} and world.residency.host.digests() == ()
    assert not world.slots.knows("a") and world.slots.used_elements == 0
    world.catalog.forget("a")
    assert world.register("/a", image("a", 30)).error is None
    world.load("a")


def test_forget_while_loading(no_host: World) -> None:
    """The load ends as a failure and leaves nothing; its extent was not given to others."""
    no_host.register("/a", image("a", 60))
    no_host.register("/b", image("b", 60))
    no_host.disk.gate.clear()
    assert no_host.start("a")
    no_host.catalog.forget("a")
    no_host.check()
    assert no_host.start("b") is None, "the loader still writes there"
    no_host.disk.gate.set()
    ended = no_host.wait()
    assert isinstance(ended, LoadEnded) and isinstance(ended.error, AdapterUnavailable)
    assert no_host.slots.used_elements == 0
    no_host.load("b")


def test_register_again_while_a_forgotten_load_runs(no_host: World) -> None:
    """The load then counts: the content is the same."""
    no_host.register("/a", image("a", 60, 4.0))
    no_host.register("/b", image("b", 10))
    no_host.disk.gate.clear()
    load = no_host.start("a")
    assert load
    no_host.catalog.forget("a")
    no_host.begin(7, "/a")
    no_host.disk.gate.set()
    ended = [no_host.wait(), no_host.wait()]
    if isinstance(ended[0], Answer):
        assert ended[1] == LoadEnded("a", None)
        assert no_host.pool.content(load.slot) == [4.0] * 60
    else:
        assert isinstance(ended[0].error, AdapterUnavailable)
        no_host.load("a")


def test_close_waits_for_a_load_in_progress(world: World) -> None:
    """No thread writes to the arena afterwards."""
    world.register("/a", image("a", 10))
    world.residency.host.forget("a")
    world.disk.gate.clear()
    world.start("a")
    deadline = time.monotonic() + PATIENCE_S
    while len(world.disk.reads) < 2 and time.monotonic() < deadline:
        time.sleep(0.001)
    closing = threading.Thread(target=world.close)
    closing.start()
    time.sleep(0.02)
    assert closing.is_alive()
    world.disk.gate.set()
    closing.join(PATIENCE_S)
    assert not closing.is_alive()
    assert world.wait() == LoadEnded("a", None)


def test_what_a_load_left_behind_by_its_adapter_leaves(no_host: World) -> None:
    """Nothing: its image is not held either."""
    no_host.register("/a", image("a", 60))
    no_host.register("/b", image("b", 60))
    no_host.disk.gate.clear()
    assert no_host.start("a")
    no_host.catalog.forget("a")
    no_host.disk.gate.set()
    no_host.wait()
    assert no_host.residency.host.digests() == ()


# -- pinned adapters, and those without a folder -----------------------------------------------


def test_a_pinned_adapter_is_wanted_and_kept(no_host: World) -> None:
    world = no_host
    assert world.register("/a", image("a", 30, 2.5), pinned=True).error is None
    assert world.slots.wanted == world.slots.pinned == ("a",)
    load = world.load("a")
    assert world.slots.wanted == ()
    for name in "bcd":
        world.register(f"/{name}", image(name, 50))
        world.load(name)
    assert "a" in world.slots.resident and world.pool.content(load.slot) == [2.5] * 30
    assert world.residency.host.digests() == ("a",)
    world.catalog.forget("a")
    assert world.slots.pinned == () and world.residency.host.digests() == ()


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


def test_the_newest_registration_decides_the_pin(no_host: World) -> None:
    world = no_host
    world.register("/a", image("a", 30), pinned=True)
    world.load("a")
    world.register("/a", image("a", 30))
    assert world.slots.pinned == ()
    world.register("/b", image("b", 90))
    assert world.load("b").evicted == ("a",)
    assert world.residency.host.digests() == ()


def test_a_pin_that_cannot_be_loaded_is_not_tried_for_ever(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.register("/a", image("a", 30), pinned=True)
    monkeypatch.setattr(world.pool, "write", lambda *_: (_ for _ in ()).throw(RuntimeError("oom")))
    assert world.start("a")
    world.wait()
    assert world.slots.pinned == ("a",) and world.slots.wanted == ()


def test_an_image_without_a_folder_stays_on_the_host(no_host: World) -> None:
    """Also when the same content is registered from a folder besides, and that one goes away."""
    world = no_host
    info = world.catalog.add(image("a", 60, 2.5), None, pinned=False)
    assert info == AdapterInfo("a", "", 4, 240, ("q_proj",))
    world.register("/a", image("a", 60, 2.5))
    world.disk.files["/a"] = AdapterNotFound("gone")
    reads = len(world.disk.reads)
    for _ in range(2):
        load = world.load("a")
        assert world.pool.content(load.slot) == [2.5] * 60
        world.register("/b", image("b", 60))
        world.load("b")
    assert [path for path, _ in world.disk.reads[reads:]] == ["/b"] * 4, "only /b was read"
    assert world.residency.host.digests() == ("a",)
    world.catalog.forget("a")
    assert world.residency.host.digests() == ()


def test_register_expects_a_digest(world: World) -> None:
    world.disk.files["/a"] = image("a", 30)
    world.begin(1, "/a", before=info("b"))
    ended = world.wait()
    assert isinstance(ended, Answer) and isinstance(ended.error, AdapterUnavailable)
    assert not world.slots.knows("a") and not world.slots.knows("b")
    world.begin(1, "/a", before=info("a"))
    ended = world.wait()
    assert isinstance(ended, Answer) and ended.error is None


def test_stats_by_adapter(world: World) -> None:
    for name in "ab":
        world.register(f"/{name}", image(name, 60))
    assert world.residency.stats() == {}
    for seconds, name in ((0.5, "a"), (0.25, "b"), (2.0, "a")):
        assert world.start(name)
        world.clock_s += seconds
        world.wait()
    stages = {"copy": 0.0}
    b = AdapterStats(1, 1, 0.25, stages)
    assert world.residency.stats() == {"a": AdapterStats(2, 1, 2.0, stages), "b": b}
    world.catalog.forget("a")
    assert world.residency.stats() == {"b": b}


# -- the host tier -----------------------------------------------------------------------------


def test_the_host_tier_keeps_what_is_kept() -> None:
    host = HostTier(4)
    host.put(image("a", 1), kept=True)
    host.put(image("b", 1), kept=True)
    host.put(image("c", 1))
    assert host.digests() == ("a", "b", "c")
    host.put(image("d", 1))
    assert host.digests() == ("a", "b", "d")
    host.put(image("a", 1))
    assert host.digests() == ("a", "b"), "a was used last"
    host.check()


@pytest.mark.parametrize(("policy", "left"), [(lru, ("a", "c")), (fifo, ("b", "c"))])
def test_the_policy_says_what_leaves_the_host(policy: Policy, left: tuple[str, ...]) -> None:
    host = HostTier(8, policy=policy)
    host.put(image("a", 1))
    host.put(image("b", 1))
    held = host.open("a")
    assert held is not None and held.image.digest == "a"
    host.close(held)
    host.put(image("c", 1))
    assert host.digests() == left
    assert host.open("nobody") is None
    host.forget("nobody")
    stats = host.stats()
    assert (stats.num_bytes, stats.num_adapters) == (8, 2)
    assert (stats.hits, stats.misses, stats.evictions) == (1, 1, 1)
    host.check()


def test_what_is_read_is_not_evicted_and_its_memory_not_reused() -> None:
    host = HostTier(0, Extents(2 * 4096))
    for digest in "ab":
        extent = host.reserve(100)
        assert extent is not None
        host.put(image(digest, 25), extent=extent)
    reading = host.open("a")
    assert reading is not None
    extent = host.reserve(100)
    assert extent is not None and host.digests() == ("a",)
    assert host.reserve(100) is None, "all that is left is read"
    assert host.digests() == ("a",), "nothing is gained by evicting it"
    host.check()
    host.forget("a")
    host.check()
    assert host.reserve(100) is None, "the reader still needs it"
    host.close(reading)
    assert host.reserve(100) == reading.extent
    host.check()


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 5 * 4096)), max_size=60))
def test_extents_lose_no_memory(steps: list[tuple[int, int]]) -> None:
    extents = Extents(12 * 4096)
    taken: dict[int, Extent] = {}
    for name, size in steps:
        if name in taken:
            extents.give(taken.pop(name))
        elif (extent := extents.take(size)) is not None:
            assert extent.size >= size and extent.start % 4096 == 0
            taken[name] = extent
        spans = sorted(taken.values())
        assert all(a.start + a.size <= b.start for a, b in pairwise(spans))
        assert extents.num_free == 12 * 4096 - sum(e.size for e in spans)
    for extent in taken.values():
        extents.give(extent)
    assert extents.take(12 * 4096) == Extent(0, 12 * 4096)


def test_registered_images_move_into_the_arena(pinned: World) -> None:
    host = pinned.residency.host
    assert host.extents is not None
    for name, value in (("a", 1.0), ("b", 2.0), ("c", 3.0)):
        pinned.register(f"/{name}", image(name, 30, value))
        pinned.settle(lambda: not host._reserved)
    assert set(host.digests()) == {"b", "c"} and host.extents.num_free == 0
    assert all(held.extent for held in host._held.values())
    for name, value in (("a", 1.0), ("b", 2.0), ("c", 3.0)):
        load = pinned.load(name)
        assert pinned.pool.content(load.slot) == [value] * 30
    assert host.stats().misses >= 1 and host.extents.num_free == 0


def test_an_arena_that_is_full_of_kept_images(pinned: World) -> None:
    """One more that is kept has memory of its own; others are served without being held."""
    for name in "abc":
        pinned.catalog.add(image(name, 10, 2.0), None, pinned=False)
    pinned.settle(lambda: not pinned.residency.host._reserved)
    pinned.register("/d", image("d", 10, 4.0))
    for name, value in (("c", 2.0), ("d", 4.0), ("d", 4.0)):
        load = pinned.load(name)
        assert pinned.pool.content(load.slot) == [value] * 10
        assert set(pinned.residency.host.digests()) == set("abc")
        pinned.slots.remove(name)
        pinned.pool.clear(load.slot)
        pinned.slots.add(name, 10)


# -- images on disk ----------------------------------------------------------------------------


def saved(world: World, count: int = 1) -> list[Path]:
    """The image files, once there are so many."""
    assert world.images is not None
    images = world.images
    world.settle(lambda: images.stats().num_adapters == count)
    return sorted(images._folder.glob("*.image"))


def test_a_load_reads_the_image(imaged: World) -> None:
    imaged.register("/a", image("a", 30, 2.5))
    saved(imaged)
    for gone in (AdapterNotFound("gone"), image("other", 30)):
        imaged.disk.files["/a"] = gone
        load = imaged.load("a")
        assert imaged.pool.content(load.slot) == [2.5] * 30
        imaged.register("/b", image("b", 90))
        saved(imaged, 2)
        imaged.load("b")
    assert [path for path, _ in imaged.disk.reads] == ["/a", "/b", "/b"], "only to register"
    assert imaged.residency.tiers()["disk"].hits == 5, "four loads, and /b once more"


def test_a_registration_reads_the_folder(imaged: World) -> None:
    """But one of content that the caller knows to be registered takes the image."""
    imaged.register("/a", image("a", 30))
    saved(imaged)
    refused = imaged.register("/a", AdapterNotFound("gone", "lora_path"))
    assert isinstance(refused.error, AdapterNotFound)
    imaged.begin(8, "/a", before=info("a"))
    again = imaged.wait()
    assert isinstance(again, Answer) and again.info is not None and again.info.path == "/a"
    assert len(imaged.disk.reads) == 2
    imaged.load("a")


def test_a_damaged_image_is_read_from_the_folder_again(imaged: World) -> None:
    imaged.register("/a", image("a", 30, 2.5))
    [file] = saved(imaged)
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    load = imaged.load("a")
    assert imaged.pool.content(load.slot) == [2.5] * 30
    assert len(imaged.disk.reads) == 2
    assert saved(imaged) == [file] and file.read_bytes() != content, "it is written anew"
    assert imaged.residency.tiers()["disk"].errors == 1


def test_a_damaged_image_without_a_folder(imaged: World) -> None:
    """Its own requests get the reason."""
    imaged.register("/a", image("a", 30))
    [file] = saved(imaged)
    file.write_bytes(file.read_bytes()[:-1])
    imaged.disk.files["/a"] = AdapterNotFound("it is gone", "lora_path")
    imaged.start("a")
    ended = imaged.wait()
    assert isinstance(ended, LoadEnded) and ended.error is not None
    assert "it is gone" in ended.error.message
    assert imaged.register("/a", image("a", 30)).error is None
    imaged.load("a")


def test_a_full_disk(imaged: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(images_module, "_write_all", full)
    imaged.register("/a", image("a", 30, 2.5))
    imaged.load("a")
    assert imaged.images is not None
    imaged.settle(lambda: imaged.residency.tiers()["disk"].errors == 2)
    assert list(imaged.images._folder.iterdir()) == []


# -- faults ------------------------------------------------------------------------------------


def test_host_memory_is_short(imaged: World, monkeypatch: pytest.MonkeyPatch) -> None:
    imaged.register("/a", image("a", 30))
    imaged.register("/b", image("b", 30))
    saved(imaged, 2)

    def short(*_: object) -> None:
        raise MemoryError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(images_module, "allocate", short)
        imaged.start("a")
        ended = imaged.wait()
    assert isinstance(ended, LoadEnded) and isinstance(ended.error, AdapterUnavailable)
    assert "no memory" in ended.error.message
    imaged.load("b")
    imaged.load("a")


def test_a_failed_copy_gives_the_host_memory_back(
    pinned: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in "abc":
        pinned.register(f"/{name}", image(name, 30))
    pinned.settle(lambda: not pinned.residency.host._reserved)
    host, lost = pinned.residency.host, RuntimeError("the device is lost")
    with monkeypatch.context() as patch:
        patch.setattr(pinned.pool, "write", lambda *_: (_ for _ in ()).throw(lost))
        for name in "abc" * 3:
            assert pinned.start(name)
            ended = pinned.wait()
            assert isinstance(ended, LoadEnded) and isinstance(ended.error, AdapterUnavailable)
    assert not host._reserved and not host._readers and pinned.slots.used_elements == 0
    for name in "abc":
        pinned.load(name)


def test_many_registrations_hold_up_no_load(world: World) -> None:
    world.register("/a", image("a", 30))
    world.disk.gate.clear()
    for number in range(20):
        world.disk.files[f"/{number}"] = image(str(number), 1)
        world.begin(number, f"/{number}")
    world.load("a")
    world.disk.gate.set()
    assert all(isinstance(world.wait(), Answer) for _ in range(20))


def test_slow_folders_hold_up_no_other_registration(world: World) -> None:
    world.disk.slow = {f"/{number}" for number in range(MAX_REGISTERING - 1)}
    world.disk.gate.clear()
    for number in range(MAX_REGISTERING + 3):
        world.disk.files[f"/{number}"] = image(str(number), 1)
        world.begin(number, f"/{number}")
    good = [world.wait() for _ in range(4)]
    numbers = {answer.call_id for answer in good if isinstance(answer, Answer)}
    assert numbers == set(range(MAX_REGISTERING - 1, MAX_REGISTERING + 3))
    world.disk.gate.set()
    assert all(isinstance(world.wait(), Answer) for _ in world.disk.slow)


def test_very_many_loads_leave_nothing(tmp_path: Path) -> None:
    """Through all tiers, with failures and adapters that come and go."""
    others = set(threading.enumerate())
    made = _world(host_bytes=40 * 4096, folder=tmp_path / "cache", arena=True)
    world = next(made)
    names = [f"d{number}" for number in range(12)]
    for name in names:
        world.register(f"/{name}", image(name, 20 + len(name)))
    saved(world, len(names))
    random = Random(1)

    def churn(count: int) -> None:
        world.checked = False
        for _ in range(count // 3):
            world.pool.broken = random.random() < 0.1
            chosen = random.sample(names, 3)
            for name in chosen:
                world.residency.ask(name)
                if world.slots.is_resident(name):
                    world.catalog.forget(name)
                    world.register(f"/{name}", image(name, 20 + len(name)))
            for _ in [load for load in map(world.start, chosen) if load is not None]:
                world.wait()
        world.disk.reads.clear()
        gc.collect()
        world.checked = True
        world.check()

    churn(300)
    before, threads = sys.getallocatedblocks(), threading.active_count()
    churn(900)
    assert sys.getallocatedblocks() - before < 500
    assert threading.active_count() - threads < 20, "more than pools that grow to their size"
    world.pool.broken = False
    assert len(saved(world, len(names))) == len(list((tmp_path / "cache").iterdir()))
    device = world.residency.tiers()["device"]
    assert device.hits + device.misses >= 1_200
    for name in names:
        world.catalog.forget(name)
    host = world.residency.host
    world.settle(lambda: not host._reserved)
    assert host.extents is not None and host.extents.num_free == host.extents.num_bytes
    assert world.slots.used_elements == 0 and host.stats().num_bytes == 0
    assert not (world.catalog.known or world.residency._loading)
    assert not list(made)
    for thread in set(threading.enumerate()) - others:
        thread.join(PATIENCE_S)
        assert not thread.is_alive(), thread.name


def test_a_torn_copy_is_made_again(world: World) -> None:
    """Also of what is nowhere else. Twice in a row it is a failure, after which it may load."""
    world.register("/a", image("a", 30, 2.5))
    world.catalog.add(image("b", 30, 3.5), None, pinned=False)
    for name, value in (("a", 2.5), ("b", 3.5)):
        world.pool.torn = 1
        load = world.load(name)
        assert world.pool.content(load.slot) == [value] * 30
        world.slots.remove(name)
        world.pool.clear(load.slot)
        world.slots.add(name, 30)
        world.pool.torn = 2
        assert world.start(name)
        ended = world.wait()
        assert isinstance(ended, LoadEnded) and type(ended.error) is AdapterUnavailable
        assert "adapter memory" in ended.error.message
        world.load(name)
    assert world.residency.copy_faults == 6


@pytest.mark.parametrize("on_disk", [False, True])
def test_an_image_that_changed_on_the_host_is_brought_from_below(
    on_disk: bool, tmp_path: Path
) -> None:
    """From its image file, or its folder; and what the host holds is right again."""
    made = _world(folder=tmp_path if on_disk else None)
    world = next(made)
    world.register("/a", image("a", 30, 2.5))
    if on_disk:
        saved(world)
        world.disk.files["/a"] = AdapterNotFound("gone")
    world.residency.host._held["a"].image.data[3] += 1
    load = world.load("a")
    assert world.pool.content(load.slot) == [2.5] * 30
    assert world.residency.host._held["a"].image.data.tolist() == [2.5] * 30
    assert world.residency.copy_faults == 1 and len(world.disk.reads) == 2 - on_disk
    assert not list(made)


def test_what_changed_while_it_was_staged_is_found(
    pinned: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On its way to page-locked memory."""
    staged = AdapterLoader._staged

    def wrong(self: AdapterLoader, given: AdapterImage, extent: Extent | None) -> AdapterImage:
        found = staged(self, given, extent)
        found.data[0] = 9.0
        return found

    monkeypatch.setattr(AdapterLoader, "_staged", wrong)
    pinned.register("/a", image("a", 30, 2.5))
    pinned.settle(lambda: not pinned.residency.host._reserved)
    assert pinned.start("a")
    ended = pinned.wait()
    assert isinstance(ended, LoadEnded) and isinstance(ended.error, AdapterUnavailable)
    monkeypatch.undo()
    load = pinned.load("a")
    assert pinned.pool.content(load.slot) == [2.5] * 30


class FakeChecker:
    """Says what it is told to."""

    result: CheckResult | AdapterQuarantined = "passed"

    def check(self, image: AdapterImage, *, paced: bool) -> CheckResult:
        assert paced
        if isinstance(self.result, AdapterQuarantined):
            raise self.result
        return self.result


def test_what_is_registered_is_checked(world: World) -> None:
    """Until it has passed. What fails leaves nothing."""
    checker = world.check_by(FakeChecker())
    assert world.register("/a", image("a", 30)).error is None
    checker.result = failed = AdapterQuarantined("wrong", "lora_path")
    for _ in range(2):
        assert world.register("/b", image("b", 30)).error is failed
    assert world.register("/also", image("a", 30)).error is None, "it has passed"
    assert not world.slots.knows("b") and world.residency.host.digests() == ("a",)
    assert world.residency.registrations.results() == {"passed": 1, "failed": 2, "skipped": 0}
    world.catalog.forget("a")
    assert world.register("/a", image("a", 30)).error is failed
    assert sum(world.residency.registrations.check_times().counts) == 4


@pytest.mark.parametrize(("checked", "num_checks"), [(True, 0), (False, 1)])
def test_what_an_engine_before_checked_is_not_checked_again(
    world: World, checked: bool, num_checks: int
) -> None:
    """Only what it skipped, or if other content is in the folder."""
    checker = world.check_by(FakeChecker())
    first = world.register("/a", image("a", 30)).info
    assert first is not None and first.checked
    world.catalog.forget("a")
    checker.result = "skipped"
    again = world.register("/a", image("a", 30), before=replace(first, checked=checked))
    assert again.info is not None and again.info.checked == checked
    assert sum(world.residency.registrations.results().values()) == 1 + num_checks
    other = world.register("/a", image("b", 30), before=first)
    assert isinstance(other.error, AdapterUnavailable)


class GatedChecker(FakeChecker):
    """Says each result once, when its gate lets it."""

    def __init__(self, *results: CheckResult | Exception) -> None:
        self.results = list(results)
        self.gate = threading.Semaphore(0)
        self.num_begun = 0

    def check(self, image: AdapterImage, *, paced: bool) -> CheckResult:
        self.num_begun += 1
        assert self.gate.acquire(timeout=PATIENCE_S)
        result = self.results.pop(0)
        if isinstance(result, Exception):
            raise result
        return result


def test_few_registrations_have_their_images_in_memory(world: World) -> None:
    """However many are asked for at once. Those that fail make room for others too."""
    ends: list[CheckResult | Exception] = ["passed", AdapterQuarantined("no"), RuntimeError("no")]
    checker = world.check_by(GatedChecker(*ends * MAX_REGISTERING))
    names = [f"/{number}" for number in range(3 * MAX_REGISTERING + 1)]
    for call_id, name in enumerate(names):
        world.disk.files[name] = image(name, 1) if call_id else OSError("no")
        world.begin(call_id, name)
    world.settle(lambda: len(world.disk.reads) > MAX_REGISTERING and checker.num_begun > 1)
    assert len(world.disk.reads) == MAX_REGISTERING + 1
    checker.gate.release(len(names))
    ended = [world.wait() for _ in names]
    assert sorted(end.call_id for end in ended if isinstance(end, Answer)) == [*range(len(names))]
    kinds = Counter(type(end.error) for end in ended)
    assert kinds[type(None)] == kinds[AdapterQuarantined] == MAX_REGISTERING
    assert kinds[AdapterUnavailable] == MAX_REGISTERING + 1


def test_one_content_that_is_registered_twice_at_once(world: World) -> None:
    """Both are checked. If the second one fails, nothing is served until it passes."""
    failed = AdapterQuarantined("wrong", "lora_path")
    checker = world.check_by(GatedChecker("passed", failed, failed, "passed"))
    for call_id in range(2):
        world.disk.files[f"/{call_id}"] = image("a", 30)
        world.begin(call_id, f"/{call_id}")
    world.settle(lambda: checker.num_begun == 2)
    checker.gate.release()
    first = world.wait()
    assert isinstance(first, Answer) and first.error is None
    checker.gate.release(3)
    second = world.wait()
    assert isinstance(second, Answer) and second.error is failed
    assert world.wait() == LoadEnded("a", failed)
    assert world.register("/a", image("a", 30)).error is failed
    assert world.wait() == LoadEnded("a", failed)
    assert world.slots.refused == ("a",)
    assert world.register("/a", image("a", 30)).error is None
    assert world.slots.refused == ()


def test_a_skipped_check_is_made_up_for(world: World) -> None:
    """When it is registered again; if it fails then, nothing is served until it passes."""
    checker = world.check_by(FakeChecker())
    checker.result = "skipped"
    assert world.register("/a", image("a", 30)).error is None
    checker.result = failed = AdapterQuarantined("wrong", "lora_path")
    assert world.register("/a", image("a", 30)).error is failed
    assert world.wait() == LoadEnded("a", failed), "what waits for it is told"
    assert world.slots.refused == ("a",)
    checker.result = "passed"
    assert world.register("/a", image("a", 30)).error is None
    assert world.slots.refused == ()
    assert world.residency.registrations.results() == {"passed": 1, "failed": 1, "skipped": 1}


# -- what is counted ---------------------------------------------------------------------------


def test_tiers_and_stages(imaged: World) -> None:
    imaged.register("/a", image("a", 30))
    saved(imaged)
    for _ in range(2):
        imaged.residency.ask("a")
    imaged.load("a")
    imaged.residency.ask("a")
    times = imaged.residency.stage_times.spreads
    assert {stage: sum(spread.counts) for stage, spread in times.items()} == {
        "read": 2,
        "pack": 1,
        "copy": 1,
    }
    assert imaged.residency.stats()["a"].stage_s == {"read": 0.0, "copy": 0.0}
    tiers = imaged.residency.tiers()
    device, host, disk = tiers["device"], tiers["host"], tiers["disk"]
    assert (device.num_bytes, device.max_bytes, device.num_adapters) == (120, 400, 1)
    assert (device.hits, device.misses) == (1, 2)
    assert (host.num_adapters, host.hits, host.misses) == (0, 0, 1)
    assert (disk.num_adapters, disk.hits, disk.misses) == (1, 1, 0)
    assert disk.num_bytes == saved(imaged)[0].stat().st_size

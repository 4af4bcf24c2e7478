"""Passes one writer's messages to several readers, through memory that their processes share.

    | counters | bytes of messages, around and around                     |
                   ^ the slowest reader       ^ written

A message is its length, in 8 bytes, and its bytes. Two kinds of counters only grow: the bytes
written, and the bytes that each reader has taken. A waiting reader polls for a short time, as the
next step mostly comes soon, and then sleeps until the writer wakes it.
"""

from __future__ import annotations

import mmap
import os
import select
import threading
import time

LINE = 64
"""The size of a cache line. Each counter has its own, as different processors write them."""
PAUSE_S = 5e-5
"""How long the writer waits for room at a time."""
NAP_S = 0.02
"""The longest sleep of a reader, should a wake-up be lost."""


def ring_bytes(capacity: int, num_readers: int) -> int:
    """The memory that a ring takes."""
    return _header(num_readers) + capacity


def _header(num_readers: int) -> int:
    return LINE * (1 + 2 * num_readers)


class _Counters:
    """[0]: bytes written; [1 + 2 r]: bytes that reader r has taken; [2 + 2 r]: 1 if it sleeps."""

    def __init__(self, memory: mmap.mmap, num_readers: int) -> None:
        header = _header(num_readers)
        self.values = memoryview(memory)[:header].cast("q")[:: LINE // 8]
        self.content = memoryview(memory)[header:]

    def pieces(self, start: int, end: int) -> list[slice]:
        """The slices of `content` that have the bytes from `start` to `end`, as counted."""
        size = len(self.content)
        first, last = start % size, (end - 1) % size + 1
        return [slice(first, last)] if first < last else [slice(first, size), slice(0, last)]


class RingWriter:
    """The writer's end. Any thread of one process."""

    def __init__(self, memory: mmap.mmap, bells: list[int]) -> None:
        """`bells`: an eventfd for each reader."""
        self._counters = _Counters(memory, len(bells))
        self._bells = bells
        self._lock = threading.Lock()
        self._written = 0
        self._taken = 0
        """What the slowest reader had taken when room was last looked for."""
        self.closed = False

    def write(self, message: bytes) -> None:
        """Write a message, waiting for room; it may be larger than the ring. If `closed` is set
        meanwhile, as readers are gone, the rest is dropped."""
        with self._lock:
            self._write(len(message).to_bytes(8, "little") + message)

    def close(self) -> None:
        """Write nothing any more, and close the bells."""
        self.closed = True
        with self._lock:
            while self._bells:
                os.close(self._bells.pop())

    def _write(self, content: bytes) -> None:
        source, begin = memoryview(content), 0
        counters, size = self._counters, len(self._counters.content)
        while begin < len(source) and not self.closed:
            left = len(source) - begin
            if left > size - (self._written - self._taken):
                self._taken = min(counters.values[1::2])
            count = min(size - (self._written - self._taken), left)
            if not count:
                time.sleep(PAUSE_S)
                continue
            for piece in counters.pieces(self._written, self._written + count):
                end = begin + piece.stop - piece.start
                counters.content[piece] = source[begin:end]
                begin = end
            self._written += count
            counters.values[0] = self._written
            for reader, bell in enumerate(self._bells):
                if counters.values[2 + 2 * reader]:
                    os.eventfd_write(bell, 1)


class RingReader:
    """One reader's end, for one thread."""

    def __init__(
        self, memory: mmap.mmap, num_readers: int, reader: int, bell: int, spin_s: float
    ) -> None:
        """`spin_s`: how long it polls for the next message before it sleeps."""
        self._counters = _Counters(memory, num_readers)
        self._taken_at, self._sleeps_at = 1 + 2 * reader, 2 + 2 * reader
        self._bell = bell
        self._poll = select.poll()
        self._poll.register(bell, select.POLLIN)
        self._spin_s = spin_s
        self._taken = 0

    def read(self) -> bytes:
        """Wait for the next message."""
        return self._take(int.from_bytes(self._take(8), "little"))

    def _take(self, count: int) -> bytes:
        parts: list[bytes] = []
        while count:
            there = min(self._wait(), count)
            end = self._taken + there
            parts += [
                self._counters.content[p].tobytes() for p in self._counters.pieces(self._taken, end)
            ]
            self._taken = end
            self._counters.values[self._taken_at] = end
            count -= there
        return b"".join(parts)

    def _wait(self) -> int:
        """Wait for bytes. Returns how many can be read, at least one."""
        values = self._counters.values
        until = time.monotonic() + self._spin_s
        while True:
            there = values[0] - self._taken
            if there:
                return there
            if time.monotonic() < until:
                time.sleep(0)  # so that other threads get on
                continue
            values[self._sleeps_at] = 1
            if values[0] == self._taken and self._poll.poll(NAP_S * 1000):
                os.eventfd_read(self._bell)
            values[self._sleeps_at] = 0

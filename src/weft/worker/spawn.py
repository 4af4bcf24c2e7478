"""Starts the processes of a model's other ranks, if possible before their orders are known.

They first import torch, which takes seconds. A process that knows early that it will need other
ranks starts them before it imports torch itself. They then wait for more, and end when the process
that started them is gone.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from typing import NamedTuple

COMMAND = "from weft.worker.rank import main; main()"


TRACES = signal.SIGUSR1
"""The signal that has a rank write to its log where each of its threads is."""


class Spawned(NamedTuple):
    """A process, and the end of the socket to it."""

    process: subprocess.Popen[bytes]
    link: socket.socket


_ahead: list[Spawned] = []


def spawn_ahead(tensor_parallel_size: int) -> None:
    """Start the processes of all ranks but the first, for the next engine of this process."""
    _ahead.extend(_start() for _ in range(1, tensor_parallel_size))


def spawn(files: Sequence[int]) -> Spawned:
    """A rank's process, which was started ahead or is started now. The descriptors `files` are sent
    to it; see `received`."""
    made = _ahead.pop() if _ahead else _start()
    with contextlib.suppress(OSError):  # whoever listens to it sees that it is gone
        socket.send_fds(made.link, [b"."], files)
    return made


def received(link: socket.socket, num_files: int) -> list[int]:
    """Wait for the descriptors that the first rank sends; empty if it is gone."""
    _, files, _, _ = socket.recv_fds(link, 1, num_files)
    return list(files)


def _start() -> Spawned:
    ours, theirs = socket.socketpair()
    path = os.pathsep.join(path or os.curdir for path in sys.path)
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-c", COMMAND, str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            env={**os.environ, "PYTHONPATH": path},
        )
    return Spawned(process, ours)

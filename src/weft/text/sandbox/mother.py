"""The process that worker processes are forked from: it has imported what they need, runs nothing
that anybody handed in, and ends when the server does.

It is told what to do over a socket that keeps the borders of messages:

    b"F" + kind, and a socket      fork a worker that serves this socket  -> its pid
    b"E" + pid                     end a worker                           -> how it ended
"""

from __future__ import annotations

import gc
import os
import resource
import signal
import socket
import struct
import sys
import time

from weft.core.processes import die_with_parent, forbid_new_privileges, leave_out_torch
from weft.text.sandbox.limits import FILE_BYTES, MEMORY_BYTES, WorkerKind
from weft.text.sandbox.work import serve

PID = struct.Struct("<i")


def main() -> None:
    """`python -c "...main()" FD`: serve the socket of that number until its other end closes."""
    control = socket.socket(fileno=int(sys.argv[1]))
    time.localtime()  # workers can't open the file of the time zone
    children: set[int] = set()
    while True:
        message, fds, _, _ = socket.recv_fds(control, 64, 1)
        if not message:
            os._exit(0)
        if message[:1] == b"F":
            kind = WorkerKind(message[1])
            _import(kind)
            pid = _fork(control, fds[0], kind)
            children.add(pid)
            os.close(fds[0])
            control.send(PID.pack(pid))
        else:
            (pid,) = PID.unpack(message[1:])
            status = _end(pid) if pid in children else 0
            children.discard(pid)
            control.send(PID.pack(status))


def _import(kind: WorkerKind) -> None:
    """Import what workers of this kind can't import themselves. Only the first time is slow."""
    if kind is WorkerKind.TEXTS:
        import tokenizers  # noqa: F401
    elif "transformers" not in sys.modules:
        leave_out_torch()
        from transformers import AutoTokenizer  # noqa: F401

        from weft.text.sandbox.work import rehearse

        rehearse()
    gc.collect()
    gc.freeze()


def _fork(control: socket.socket, fd: int, kind: WorkerKind) -> int:
    mother = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    try:
        control.close()
        connection = socket.socket(fileno=fd)
        _confine(kind, mother, connection.fileno())
        serve(connection)
    except BaseException:
        os._exit(1)
    os._exit(0)


def _confine(kind: WorkerKind, mother: int, connection: int) -> None:
    """Take from this process all that it does not need: it may compute, and speak by its socket."""
    die_with_parent(mother)
    forbid_new_privileges()
    null = os.open(os.devnull, os.O_RDWR)
    for standard in range(3):
        os.dup2(null, standard)
    os.closerange(3, connection)
    os.closerange(connection + 1, 1024)
    os.nice(5)
    pages = int(open("/proc/self/statm").read().split()[0])  # noqa: PTH123, SIM115
    memory = pages * resource.getpagesize() + MEMORY_BYTES
    loads = kind is WorkerKind.LOADS
    for limit, most in (
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, FILE_BYTES if loads else 0),
        (resource.RLIMIT_NPROC, 0),
        (resource.RLIMIT_NOFILE, 64 if loads else 0),
    ):
        resource.setrlimit(limit, (most, most))


def _end(pid: int) -> int:
    """End a worker if it runs still. Returns its wait status."""
    os.kill(pid, signal.SIGKILL)  # it has not been waited for, so nobody else has its number
    return os.waitpid(pid, 0)[1]

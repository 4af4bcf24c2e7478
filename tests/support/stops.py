"""Runs a command while processes that it starts are stopped for moments, as on a busy machine.

    python tests/support/stops.py .venv/bin/pytest -x tests/e2e/test_streams.py

A test that depends on which process is quicker fails then, sooner than under plain load. Every
process below the command may be stopped, clients and servers alike, but none that is stopped
already: some tests do that themselves. `STOPS_S` says for how many seconds at most (0.8).
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import threading
from collections import defaultdict
from pathlib import Path

MOST_S = float(os.environ.get("STOPS_S", "0.8"))
PAUSE_S = 0.3
"""The longest time between two stops."""
MOST_AT_ONCE = 3


def main() -> int:
    """The command's exit status."""
    command, over = subprocess.Popen(sys.argv[1:]), threading.Event()
    stops = threading.Thread(target=stop_now_and_then, args=(command.pid, over))
    stops.start()
    try:
        return command.wait()
    finally:
        over.set()
        stops.join()


def stop_now_and_then(root: int, over: threading.Event) -> None:
    while not over.wait(random.uniform(0.02, PAUSE_S)):
        running = running_below(root)
        chosen = random.sample(running, min(len(running), random.randint(1, MOST_AT_ONCE)))
        for pid in chosen:
            send(pid, signal.SIGSTOP)
        over.wait(random.uniform(0.02, MOST_S))
        for pid in chosen:
            send(pid, signal.SIGCONT)


def running_below(root: int) -> list[int]:
    """The processes that this one has started, and those that these have, unless they are stopped
    or have ended."""
    children = defaultdict[int, list[tuple[int, str]]](list)
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent, *_ = path.read_text().rpartition(")")[2].split()
        except OSError:  # it has ended meanwhile
            continue
        children[int(parent)].append((int(path.parent.name), state))
    found, todo = list[int](), [root]
    while todo:
        for pid, state in children[todo.pop()]:
            todo.append(pid)
            if state not in "TtZX":
                found.append(pid)
    return found


def send(pid: int, sig: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, sig)


if __name__ == "__main__":
    sys.exit(main())

"""What a shared registry costs: how long a change takes, when others see it, and how soon a process
that starts knows all names.

    python benchmarks/registry.py                    a directory in --dir
    python benchmarks/registry.py --s3               also a bucket of moto, a server in Python

Followers and writers are processes of their own. The last line is JSON.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import os
import random
import resource
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "tests/support"))

import msgspec
from buckets import new_bucket, s3_server

from weft.registry import shared
from weft.registry.log import entry_key, snapshot_key
from weft.registry.records import Done, Publish, Version
from weft.registry.releases import choose
from weft.registry.shared import SharedRegistry
from weft.registry.state import EPOCH, Entry, Op, State
from weft.registry.stores import DirectoryStore, open_store

NUM_NODES = 8
NUM_WRITERS = 8
SPAWN = multiprocessing.get_context("spawn")


def version(number: int) -> Version:
    return Version(f"{number:064x}", 80 << 20, f"hf://acme/adapter-{number}", "llama-3-8b")


def ms(seconds: Sequence[float]) -> dict[str, float]:
    """The median, the 99th percentile and the largest, in milliseconds."""
    ordered = sorted(seconds)
    p99 = ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]
    found = {"p50": statistics.median(ordered), "p99": p99, "max": ordered[-1]}
    return {name: round(1e3 * value, 2) for name, value in found.items()}


# -- one writer, and when others see it ------------------------------------------------------------


def follow(uri: str, hints: bool, connection: Connection) -> None:
    """A node: say when each change is seen, until told to end."""
    if not hints:
        shared._watch = lambda *args: None  # type: ignore[assignment]
    seen: list[tuple[int, float]] = []
    with SharedRegistry(open_store(uri)) as registry:
        registry.listen(
            lambda state, names: seen.append((state.names["bench"].generation, time.monotonic()))
        )
        connection.send("ready")
        connection.recv()
        registry.poll()
    connection.send(seen)


@contextmanager
def processes(count: int, target: Callable[..., None], *args: object) -> Iterator[list[Connection]]:
    """Processes that each have a connection to this one and have said that they are ready."""
    with ExitStack() as stack:
        ends: list[Connection] = []
        for _ in range(count):
            here, there = SPAWN.Pipe()
            process = SPAWN.Process(target=target, args=(*args, there), daemon=True)
            process.start()
            stack.callback(process.join)
            ends.append(here)
        for end in ends:
            end.recv()
        yield ends


def visible(uri: str, hints: bool, num_changes: int) -> dict[str, Any]:
    """One writer commits at random times; when do the nodes see it?"""
    with processes(NUM_NODES, follow, uri, hints) as nodes:
        with SharedRegistry(open_store(uri)) as registry:
            committed: dict[int, float] = {}
            took: list[float] = []
            for number in range(num_changes):
                time.sleep(random.uniform(0.05, 0.35))
                begun = time.monotonic()
                done = registry.change(Publish("bench", version(number)))
                committed[done.generation] = time.monotonic()
                took.append(committed[done.generation] - begun)
        for node in nodes:
            node.send("end")
        delays: list[float] = []
        for node in nodes:
            seen = node.recv()
            for generation, at in committed.items():
                delays.append(max(0.0, min(t for g, t in seen if g >= generation) - at))
    return {"commit_ms": ms(took), "visible_ms": ms(delays), "changes": num_changes}


# -- several writers -------------------------------------------------------------------------------


def write(uri: str, in_flight: int, seconds: float, connection: Connection) -> None:
    """Keep so many changes of one's own names under way."""
    took: list[float] = []
    with SharedRegistry(open_store(uri)) as registry:
        connection.send("ready")
        connection.recv()
        until = time.monotonic() + seconds
        under_way: list[tuple[float, Future[Done]]] = []
        number = 0
        while time.monotonic() < until or under_way:
            while len(under_way) < in_flight and time.monotonic() < until:
                number += 1
                change = Publish(f"w{os.getpid()}/{number % 50}", version(number))
                under_way.append((time.monotonic(), registry.submit(change)))
            begun, future = under_way.pop(0)
            future.result()
            took.append(time.monotonic() - begun)
        entries = registry.state.seq
    connection.send((took, entries))


def writers(uri: str, in_flight: int, seconds: float) -> dict[str, Any]:
    with processes(NUM_WRITERS, write, uri, in_flight, seconds) as ends:
        begun = time.monotonic()
        for end in ends:
            end.send("go")
        found = [end.recv() for end in ends]
        wall_s = time.monotonic() - begun
    took = [each for times, _ in found for each in times]
    entries = max(entries for _, entries in found)
    return {
        "in_flight_each": in_flight,
        "commits_per_s": round(len(took) / wall_s, 1),
        "entries_per_s": round(entries / wall_s, 1),
        "commit_ms": ms(took),
        "fewest_of_a_writer": min(len(times) for times, _ in found),
        "most_of_a_writer": max(len(times) for times, _ in found),
    }


# -- a hundred thousand names ----------------------------------------------------------------------


def large_state(num_names: int) -> State:
    """A registry with so many names of a thousand tenants, as a snapshot would have it."""
    state = State()
    for first in range(0, num_names, 100):
        ops = tuple(
            Op(f"n{n}", "trainer", Publish(f"tenant-{n % 1000}/adapter-{n}", version(n)))
            for n in range(first, min(first + 100, num_names))
        )
        state = state.apply(Entry(1.7e9 + first, ops))
    while state.seq % EPOCH:
        state = state.apply(Entry(0.0, ()))
    return state


def rss_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def boot(folder: str, connection: Connection) -> None:
    connection.send("ready")
    connection.recv()
    gc.collect()
    before, begun, cpu = rss_bytes(), time.monotonic(), time.process_time()
    registry = SharedRegistry(open_store(folder))
    boot_s, boot_cpu_s = time.monotonic() - begun, time.process_time() - cpu
    gc.collect()
    names = list(registry.state.names)
    random.shuffle(names)
    cpu = time.process_time()
    for name in names:
        entry = registry.state.names[name]
        entry.versions[choose(name, entry.route, "user")]
    resolve_s = (time.process_time() - cpu) / len(names)
    connection.send(
        {
            "boot_s": round(boot_s, 3),
            "bytes_per_name": round((rss_bytes() - before) / len(names)),
            "resolve_us": round(1e6 * resolve_s, 2),
            "boot_cpu_s": round(boot_cpu_s, 3),
        }
    )


def boots(folder: Path, num_names: int, num_tail: int) -> dict[str, Any]:
    """Start from a snapshot of so many names, and entries after it."""
    state = large_state(num_names)
    store = DirectoryStore(folder)
    begun = time.monotonic()
    content = state.dump()
    dump_s = time.monotonic() - begun
    store.put(snapshot_key(state.seq // EPOCH), content)
    for n in range(num_tail):
        entry = Entry(2e9, (Op(f"t{n}", "", Publish(f"tenant-0/late-{n}", version(n))),))
        store.put(entry_key(state.seq + 1 + n), msgspec.json.encode(entry))
    found: list[dict[str, float]] = []
    for _ in range(5):
        with processes(1, boot, str(folder)) as (end,):
            end.send("go")
            found.append(end.recv())
    middle = sorted(found, key=lambda each: each["boot_s"])[len(found) // 2]
    best = min(each["boot_s"] for each in found)
    size = {"names": num_names, "snapshot_mb": round(len(content) / 1e6, 1)}
    return {**size, "tail": num_tail, "dump_s": round(dump_s, 3), "best_boot_s": best, **middle}


def measure(name: str, uris: Callable[[], str], args: argparse.Namespace) -> dict[str, Any]:
    found: dict[str, Any] = {}
    modes = [True, False] if name == "directory" else [False]
    for hints in modes:
        key = "hints" if hints else "polling"
        found[key] = visible(uris(), hints, args.changes)
        print(name, key, json.dumps(found[key]), flush=True)
    for in_flight in (1, 16):
        key = f"{NUM_WRITERS} writers, {in_flight} in flight"
        found[key] = writers(uris(), in_flight, args.seconds)
        print(name, key, json.dumps(found[key]), flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--dir", type=Path, help="a folder to make registries in")
    parser.add_argument("--s3", action="store_true", help="also a bucket of moto")
    parser.add_argument("--changes", type=int, default=100, help="for what others see, and when")
    parser.add_argument("--seconds", type=float, default=10.0, help="how long writers write")
    parser.add_argument("--names", type=int, default=100_000)
    args = parser.parse_args()
    load = os.getloadavg()[0]
    result: dict[str, Any] = {"load_before": round(load, 1), "cpus": os.cpu_count()}
    with tempfile.TemporaryDirectory(dir=args.dir) as top:
        made: Counter[str] = Counter()

        def folder() -> str:
            made["folders"] += 1
            return f"{top}/{made['folders']}"

        result["boot"] = boots(Path(folder()), args.names, EPOCH // 2)
        print("boot", json.dumps(result["boot"]), flush=True)
        result["directory"] = measure("directory", folder, args)
    if args.s3:
        with s3_server():
            result["s3"] = measure("s3", new_bucket, args)
    result["load_after"] = round(os.getloadavg()[0], 1)
    print(json.dumps(result))


if __name__ == "__main__":
    main()

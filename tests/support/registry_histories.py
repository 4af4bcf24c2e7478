"""Real processes that share a registry, are killed and stopped at random, and write down what they
asked for and what they were told. What they were told must be linearizable.

    python registry_histories.py WORKER_NAME URI FILE SEED      one such process
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from unittest.mock import patch

from patience import wait_until
from registry_simulation import FIRST, NAMES, VERSIONS, Call, violations

from weft.core.errors import (
    AdapterNotFound,
    GenerationConflict,
    InvalidRequest,
    QuotaExceeded,
    RegistryUnavailable,
    WeftError,
)
from weft.registry.log import Log
from weft.registry.records import Done, NotDone, Publish, Remove
from weft.registry.shared import SharedRegistry
from weft.registry.state import State
from weft.registry.stores import open_store

EPOCH = 16
"""Short, so that collection has something to do."""
KINDS = {
    GenerationConflict.kind: "conflict",
    AdapterNotFound.kind: "not_found",
    QuotaExceeded.kind: "quota",
    InvalidRequest.kind: "invalid",
}


def join(uri: str) -> SharedRegistry:
    """A process's view of the registry, all with the same short epochs."""
    with patch("weft.registry.shared.Log", lambda: Log(State(epoch=EPOCH))):
        return SharedRegistry(open_store(uri), poll_s=0.05)


# -- one process -----------------------------------------------------------------------------------


def work(name: str, uri: str, path: Path, seed: int) -> None:
    """Change and read names until killed. Each line of the file is a beginning or an end."""
    chance = random.Random(seed)
    with path.open("a", buffering=1) as file, join(uri) as registry:

        def say(**line: object) -> None:
            file.write(json.dumps(line) + "\n")

        for number in range(sys.maxsize):
            luck, id = chance.random(), f"{name}.{number}"
            if luck < 0.03:
                registry.collect()
            elif luck < 0.3:
                name_read = chance.choice(NAMES)
                say(begun=time.monotonic_ns(), id=id, name=name_read)
                registry.poll()
                found = registry.state.names.get(name_read)
                generation = found.generation if found else 0
                say(ended=time.monotonic_ns(), id=id, generation=generation)
            else:
                change(registry, chance, id, say)


def change(registry: SharedRegistry, chance: random.Random, id: str, say: object) -> None:
    """Ask for some changes at once, which go into one entry if it comes to that."""
    assert callable(say)
    asked = []
    for part in range(chance.randint(1, 3)):
        name, op_id = chance.choice(NAMES), f"{id}.{part}"
        found = registry.state.names.get(name)
        expect = (found.generation if found else 0) if chance.random() < 0.8 else None
        removes, version = chance.random() < 0.3, chance.randrange(len(VERSIONS))
        made = Remove(name, expect) if removes else Publish(name, VERSIONS[version], expect=expect)
        say(begun=time.monotonic_ns(), id=op_id, name=name, expect=expect, removes=removes)
        asked.append((op_id, registry.submit(made, op_id)))
    for op_id, future in asked:
        try:
            generation = future.result().generation
            say(ended=time.monotonic_ns(), id=op_id, generation=generation)
        except RegistryUnavailable:
            pass
        except WeftError as error:
            say(ended=time.monotonic_ns(), id=op_id, refused=KINDS[error.kind])


# -- all of them -----------------------------------------------------------------------------------


@dataclass
class Outcome:
    """What a run has shown."""

    wrong: list[str]
    counts: Counter[str] = field(default_factory=Counter)


class Workers:
    """The processes, each of which is started again when it is killed."""

    def __init__(self, count: int, uri: str, folder: Path, seed: int) -> None:
        self._uri, self._folder, self._seed = uri, folder, seed
        self._num_started = 0
        self.counts: Counter[str] = Counter()
        self._running = [self._start() for _ in range(count)]

    def disturb(self, chance: random.Random) -> None:
        """Kill one, or let one sleep for a while."""
        at = chance.randrange(len(self._running))
        process = self._running[at]
        if process.poll() is not None:
            raise RuntimeError(f"a process has ended with {process.returncode}")
        if chance.random() < 0.4:
            process.kill()
            process.wait()
            self._running[at] = self._start()
            self.counts["killed"] += 1
        else:
            process.send_signal(signal.SIGSTOP)
            time.sleep(chance.uniform(0.05, 1.0))
            process.send_signal(signal.SIGCONT)
            self.counts["stopped"] += 1

    def end(self) -> None:
        for process in self._running:
            process.kill()
            process.wait()

    def _start(self) -> subprocess.Popen[bytes]:
        self._num_started += 1
        name = f"w{self._num_started}"
        path, seed = self._folder / f"{name}.jsonl", self._seed + self._num_started
        command = [sys.executable, __file__, name, self._uri, str(path), str(seed)]
        paths = os.pathsep.join(sys.path)
        return subprocess.Popen(command, env={**os.environ, "PYTHONPATH": paths})


def run(uri: str, folder: Path, seconds: float, count: int, seed: int) -> Outcome:
    """Let so many processes share a registry for so long, and judge what they were told. `folder`
    is for what they write down."""
    chance = random.Random(seed)
    recorded: dict[tuple[str, int], str] = {}
    wrong: list[str] = []

    def record(state: State, names: frozenset[str]) -> None:
        for name in names:
            for entry in state.names[name].history:
                if recorded.setdefault((name, entry.generation), entry.actor) != entry.actor:
                    wrong.append(f"{name} has two changes of generation {entry.generation}")

    with join(uri) as registry, ExitStack() as stack:
        registry.change(FIRST.ops[0].change)
        registry.listen(record)
        workers = Workers(count, uri, folder, seed)
        stack.callback(workers.end)
        wait_until(lambda: any(path.stat().st_size for path in folder.iterdir()))
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            time.sleep(chance.uniform(0.1, 0.6))
            workers.disturb(chance)
        answered = {Done, int}  # changes and reads; processes of a slow machine may still begin
        wait_until(lambda: answered <= {type(call.answer) for call in read_calls(folder)})
        stack.close()
        # What was on its way from those who were killed has arrived or never will.
        time.sleep(0.5)
        registry.poll()
        entries = registry.state.seq
    calls = list(read_calls(folder))
    final = join(uri)
    final.close()
    wrong += violations(calls, final.state)
    wrong += of_record(calls, recorded)
    outcome = Outcome(wrong, workers.counts)
    outcome.counts.update(type(call.answer).__name__ for call in calls)
    outcome.counts["entries"] = entries
    outcome.counts["marks of collected epochs"] = len(list(final.store.list("end/")))
    return outcome


def read_calls(folder: Path) -> Iterator[Call]:
    """What the processes have written down; the last line of one that was killed may be cut."""
    for path in folder.glob("*.jsonl"):
        calls: dict[str, Call] = {}
        for text in path.read_text().splitlines():
            if not text.endswith("}"):
                continue
            line = json.loads(text)
            if "begun" in line:
                calls[line["id"]] = _begun(line)
                continue
            call = calls[line["id"]]
            call.ended = line["ended"]
            if "refused" in line:
                call.answer = NotDone(line["refused"], "")
            else:
                generation = line["generation"]
                call.answer = generation if call.change is None else Done(generation)
        yield from calls.values()


def _begun(line: dict[str, object]) -> Call:
    id, name, begun = str(line["id"]), str(line["name"]), int(str(line["begun"]))
    if "removes" not in line:
        return Call(id, name, begun, None)
    expect = None if line["expect"] is None else int(str(line["expect"]))
    removes = Remove(name, expect)
    return Call(
        id, name, begun, removes if line["removes"] else Publish(name, VERSIONS[0], expect=expect)
    )


def of_record(calls: list[Call], recorded: dict[tuple[str, int], str]) -> Iterator[str]:
    """What the processes were told, against what another one has seen all the time."""
    made = set(recorded.values())
    if len(made) < len(recorded):
        yield "a change was made twice"
    for call in calls:
        if isinstance(call.answer, NotDone) and call.id in made:
            yield "a change was refused and made"
        if isinstance(call.answer, Done):
            seen = recorded.get((call.name, call.answer.generation), call.id)
            if seen != call.id:
                yield "an acknowledged change is not the one that others saw"


if __name__ == "__main__":
    work(sys.argv[1], sys.argv[2], Path(sys.argv[3]), int(sys.argv[4]))

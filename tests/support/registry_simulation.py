"""Simulates processes that share a registry, on a store that does what stores do at worst.

Each request of each process is one step, in random order, and everything follows from a seed:

- processes are killed at any request, and sleep before any for as long as others make many;
- a put is made but answered "exists", as when a client repeats what was not answered;
- a request is not answered at all, and the put was made, or never is, or is a while later;
- old entries are collected at any time, by several at once, who are killed half way.

What clients were told is then held against what a fresh reader finds.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

from weft.core.errors import RegistryUnavailable
from weft.registry.log import (
    Delete,
    Get,
    ListKeys,
    Log,
    Put,
    Request,
    Steps,
    entry_key,
    snapshot_key,
)
from weft.registry.records import Done, NotDone, Publish, Remove, Result, SetTenant, Version
from weft.registry.state import KEPT_HISTORY, Entry, Op, State

NAMES = ("t/a", "t/b", "u/a")
VERSIONS = tuple(Version(letter * 64, 10) for letter in "abc")
EPOCH = 2
NUM_PROCESSES = 4
FIRST = Entry(0.0, (Op("first", "", SetTenant("t", '{"caps": {"max_adapters": 1}}')),))


@dataclass(slots=True)
class Call:
    """Something that a client asked for. A change is known by its `id` in the name's history."""

    id: str
    name: str
    begun: int
    change: Publish | Remove | None
    """None for a read."""
    ended: int | None = None
    answer: Result | int | None = None
    """A read's is the name's generation. None if nobody knows."""


# -- the protocol, and what it must not be ---------------------------------------------------------


class RememberingLog(Log):
    """A log that takes from others of the same schedule what they have computed already."""

    def __init__(self, known: dict[object, State]) -> None:
        super().__init__(known.setdefault("first", State(epoch=EPOCH)))
        self.known = known

    def _after(self, content: bytes) -> State:
        key = (id(self.state), content)
        if key not in self.known:
            self.known[key] = super()._after(content)
        return self.known[key]

    def _loaded(self, key: str, content: bytes) -> State:
        if content not in self.known:
            self.known[content] = super()._loaded(key, content)
        return self.known[content]


class WithoutFence(RememberingLog):
    """Never asks whether an epoch is over."""

    def _is_over(self, epoch: int) -> Steps[bool]:
        return False
        yield


class FenceThatIsCollected(RememberingLog):
    """Knows that an epoch is over by its snapshot, which is deleted later."""

    def _is_over(self, epoch: int) -> Steps[bool]:
        (found,) = yield Get((snapshot_key(epoch + 1),))
        return found is not None


class WithoutNonces(RememberingLog):
    """Takes "exists" for somebody else's entry, whatever is in it."""

    num_tries = 0

    def commit(self, ops: list[Op], now: float) -> Steps[dict[str, Result | None]]:
        self.num_tries += 1
        names = {f"{op.nonce} {self.num_tries}": op.nonce for op in ops}
        fresh = [msgspec.structs.replace(op, nonce=n) for n, op in zip(names, ops, strict=True)]
        settled = yield from super().commit(fresh, now)
        return {names[nonce]: result for nonce, result in settled.items()}


class WithoutDoubt(RememberingLog):
    """Makes a change again of which it can't know whether it was made."""

    def _settled(self, ops: list[Op]) -> dict[str, Result | None]:
        settled = super()._settled(ops)
        return {nonce: result for nonce, result in settled.items() if result is not None}


# -- one schedule ----------------------------------------------------------------------------------


class Store:
    """What is stored, and what comes late."""

    def __init__(self, chance: random.Random) -> None:
        self.content = {entry_key(1): msgspec.json.encode(FIRST)}
        self.late: list[Put] = []
        self._random = chance.random

    def answer(self, request: Request | str) -> Any:
        """Raises RegistryUnavailable."""
        luck = self._random()
        if luck < 0.02 and not isinstance(request, Put):
            raise RegistryUnavailable("lost")
        match request:
            case str():
                return self.content.get(request)
            case Put():
                return self._put(request, luck)
            case ListKeys():
                return [key for key in self.content if key.startswith(request.prefix)]
            case Delete():
                self.content.pop(request.key, None)
        return None

    def _put(self, put: Put, luck: float) -> bool:
        if luck < 0.06:
            if luck < 0.02:
                self.late.append(put)
            elif luck < 0.04:
                self.content.setdefault(put.key, put.content)
            raise RegistryUnavailable("lost")
        if put.key in self.content:
            return False
        self.content[put.key] = put.content
        return luck > 0.14

    def some_time_passes(self) -> None:
        if self.late and self._random() < 0.1:
            put = self.late.pop()
            self.content.setdefault(put.key, put.content)


class Process:
    """One process: what its clients wait for, and the operation that runs."""

    def __init__(self, log: RememberingLog, name: str, chance: random.Random) -> None:
        self.log = log
        self.name = name
        self.asleep_until = 0
        self.skew = chance.choice((0.0, 0.0, -50.0, 50.0))
        self.waiting: dict[str, Call] = {}
        self.reading: Call | None = None
        self.running: Steps[Any] = log.boot()
        self.request: Request | None = None
        self.got: list[tuple[str, bytes | None]] = []
        self.missing: list[str] = []


class Schedule:
    """Everything that follows from one seed."""

    def __init__(self, seed: int, kind: type[RememberingLog] = RememberingLog) -> None:
        self._chance = random.Random(seed)
        self._kind = kind
        self._known: dict[object, State] = {}
        self.store = Store(self._chance)
        self.calls: list[Call] = []
        self.now = 0
        self._num_made = 0
        self._processes = [self._process() for _ in range(NUM_PROCESSES)]

    def run(self, num_steps: int) -> None:
        random_ = self._chance.random
        for self.now in range(1, num_steps + 1):
            at = int(random_() * NUM_PROCESSES)
            process = self._processes[at]
            if process.asleep_until > self.now:
                continue
            luck = random_()
            if luck < 0.006:
                self._processes[at] = self._process()
                continue
            if luck < 0.02:
                process.asleep_until = self.now + int(random_() * 120)
                continue
            self.store.some_time_passes()
            self._step(process)

    def _process(self) -> Process:
        self._num_made += 1
        return Process(self._kind(self._known), f"p{self._num_made}", self._chance)

    def _step(self, process: Process) -> None:
        """Let a process get the answer to one request, or begin something."""
        try:
            if process.missing:
                key = process.missing.pop(int(self._chance.random() * len(process.missing)))
                process.got.append((key, self.store.answer(key)))
                if process.missing:
                    return
                found = dict(process.got)
                answer: Any = [found[key] for key in process.request.keys]
            elif process.request is not None:
                answer = self.store.answer(process.request)
            else:
                answer = None
            process.request = request = process.running.send(answer)
            if isinstance(request, Get):
                process.missing, process.got = list(request.keys), []
        except StopIteration as end:
            self._ended(process, end.value)
        except RegistryUnavailable:
            self._begin(process)

    def _ended(self, process: Process, value: object) -> None:
        reading, process.reading = process.reading, None
        if reading is not None:
            found = process.log.state.names.get(reading.name)
            reading.ended, reading.answer = self.now, found.generation if found else 0
        settled = value if isinstance(value, dict) else {}
        for nonce, result in settled.items():
            call = process.waiting.pop(nonce)
            call.ended, call.answer = self.now, result
        if settled:
            self._start(process, process.log.save())
        else:
            self._begin(process)

    def _begin(self, process: Process) -> None:
        """Let a process begin what it does next."""
        luck = self._chance.random()
        process.reading = None
        if luck < 0.08:
            self._start(process, process.log.collect())
        elif luck < 0.3:
            process.reading = self._call(process, None)
            self._start(process, process.log.poll())
        else:
            if not process.waiting or luck < 0.5:
                self._ask(process)
            ops = [Op(c.id, c.id, c.change) for c in process.waiting.values() if c.change]
            now = float(self.now) + process.skew
            self._start(process, process.log.commit(ops, now))

    def _start(self, process: Process, steps: Steps[Any]) -> None:
        process.running, process.request, process.missing = steps, None, []

    def _ask(self, process: Process) -> None:
        """A client asks for a change; most expect the generation that the process knows."""
        name = NAMES[int(self._chance.random() * len(NAMES))]
        known = process.log.state.names.get(name)
        expect = (known.generation if known else 0) if self._chance.random() < 0.8 else None
        luck = self._chance.random()
        version = VERSIONS[int(luck * 3)]
        change = Remove(name, expect) if luck < 0.3 else Publish(name, version, expect=expect)
        call = self._call(process, change)
        process.waiting[call.id] = call

    def _call(self, process: Process, change: Publish | Remove | None) -> Call:
        name = change.name if change else NAMES[int(self._chance.random() * len(NAMES))]
        call = Call(f"{process.name}.{len(self.calls)}", name, self.now, change)
        self.calls.append(call)
        return call

    def fresh_state(self) -> State:
        """What somebody reads who comes when all is over."""
        log = self._kind(self._known)
        steps = log.boot()
        request = next(steps, None)
        while request is not None:
            try:
                request = steps.send(self._calm_answer(request))
            except StopIteration:
                break
        return log.state

    def _calm_answer(self, request: Request) -> object:
        match request:
            case Get():
                return [self.store.content.get(key) for key in request.keys]
            case ListKeys():
                return [key for key in self.store.content if key.startswith(request.prefix)]
        raise AssertionError("a reader does not write")


# -- what must be true of it -----------------------------------------------------------------------


def violations(all_calls: list[Call], final: State) -> Iterator[str]:
    """What clients were told, against what a fresh reader finds in the end."""
    for name in NAMES:
        calls = [call for call in all_calls if call.name == name]
        found = final.names.get(name)
        history = {entry.actor: entry for entry in found.history} if found else {}
        last = found.generation if found else 0
        if found:
            yield from _of_history(found.history, history)
        for call in calls:
            mine = history.get(call.id)
            match call.answer:
                case Done(generation=generation):
                    if call.change and call.change.expect not in (None, generation - 1):
                        yield "a change was made from another generation than was expected"
                    if generation > last - KEPT_HISTORY and (
                        mine is None or mine.generation != generation
                    ):
                        yield "an acknowledged change is lost"
                case NotDone(kind=kind):
                    if mine is not None:
                        yield "a change was refused and made"
                    if kind == "quota" and not _may_be_full(all_calls, call):
                        yield "a quota was not used up"
        yield from _of_order(calls)
    live = [n for n in NAMES if (f := final.names.get(n)) and f.removed_at is None]
    if sum(name.startswith("t/") for name in live) > 1:
        yield "a quota is exceeded"


def _of_history(history: Any, by_id: dict[str, Any]) -> Iterator[str]:
    if len(by_id) < len(history):
        yield "a change was made twice"
    first = history[0].generation
    if [entry.generation for entry in history] != list(range(first, first + len(history))):
        yield "generations are not consecutive"
    times = [entry.time for entry in history]
    if times != sorted(times):
        yield "time went back"


def _of_order(calls: list[Call]) -> Iterator[str]:
    """Whoever began after another had ended has seen what that one saw, and more if it changed
    it."""
    events: list[tuple[int, int, Call, int]] = []
    made: set[int] = set()
    for call in calls:
        generation = call.answer.generation if isinstance(call.answer, Done) else call.answer
        if not isinstance(generation, int) or call.ended is None:
            continue
        if call.change is not None:
            if generation in made:
                yield "two acknowledged changes have one generation"
            made.add(generation)
        events.append((call.begun, 0, call, generation))
        events.append((call.ended, 1, call, generation))
    events.sort(key=lambda event: event[:2])
    newest = 0
    seen_at_begin: dict[str, int] = {}
    for _, is_end, call, generation in events:
        if not is_end:
            seen_at_begin[call.id] = newest
        else:
            least = seen_at_begin[call.id] + (call.change is not None)
            if generation < least:
                yield "what was acknowledged before is not seen"
            newest = max(newest, generation)


def _may_be_full(calls: list[Call], refused: Call) -> bool:
    """Whether somebody may have published another of the tenant's names before."""
    return any(
        isinstance(call.change, Publish)
        and call.name != refused.name
        and call.name.startswith("t/")
        and call.begun < (refused.ended or 0)
        for call in calls
    )


def first_violation(
    seed: int, num_steps: int, kind: type[RememberingLog] = RememberingLog
) -> str | None:
    """Run one schedule. Returns what is wrong with it, if anything is."""
    schedule = Schedule(seed, kind)
    schedule.run(num_steps)
    return next(violations(schedule.calls, schedule.fresh_state()), None)

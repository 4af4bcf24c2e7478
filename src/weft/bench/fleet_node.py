"""A simulated node: the real scheduler, cache and adapter slots, with a model of the device."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable
from dataclasses import replace
from functools import cache, lru_cache
from hashlib import blake2b
from typing import Generic, TypeVar

from weft.bench.coasting import CoastingScheduler
from weft.bench.fleet_trace import OWN_PROMPT, FleetAsk
from weft.bench.simulator import ELEMENT_BYTES, IDLE_S, DeviceModel, SimulatedLoads
from weft.core.adapters import AdapterRef
from weft.core.load import Costs, EngineLoad, adapter_key
from weft.core.requests import EngineRequest, TokenArray, TokenEvent
from weft.core.sampling import SamplingParams
from weft.fleet.reports import KeyChange, NodeReport, ReportUpdate, update_between
from weft.schedule.cache import Cache, Holding
from weft.schedule.limits import SchedulerLimits
from weft.schedule.plan import StepPlan
from weft.schedule.policy import cost
from weft.schedule.sketch import INDICES, PrefixSketch
from weft.schedule.slots import AdapterSlots

T = TypeVar("T")

H200 = DeviceModel(
    step_s=4.2e-3,
    token_s=21.5e-6,
    lora_s=0.2e-3,
    adapter_s=36e-6,
    link_bytes_per_s=31e9,
    disk_bytes_per_s=3.2e9,
    rank_bytes=84_000_000,
)
"""One H200 with the Llama-3-8B shape in bf16 and adapters of rank 16, after the README's table of
decode steps and docs/benchmarks.md's loads: a step of 64 requests takes 5.8 ms with one adapter and
8.1 ms with 64, a load 2.7 ms from the host and 29 ms from disk. `rank_bytes` is all of an adapter
here."""
BLOCK = 128
"""Tokens of a block: more than engines have, so that fewer are looked at."""
NUM_BLOCKS = 400_000 // BLOCK
CHUNK = 2048
DEVICE_ADAPTERS, HOST_ADAPTERS = 64, 256
LIMITS = SchedulerLimits(
    max_num_seqs=64,
    max_num_batched_tokens=CHUNK,
    max_model_len=1 << 14,
    max_loras=64,
    max_adapter_wait=2.0,
    vocab_size=1 << 40,
    eos_token_ids=frozenset(),
)


def costs_of(model: DeviceModel) -> Costs:
    """What an engine with this device would measure."""
    return Costs(
        step_s=model.step_s + model.lora_s,
        row_s=model.token_s,
        adapter_s=model.adapter_s,
        token_s=model.token_s,
        load_s=0.0,
        host_byte_s=1 / model.link_bytes_per_s,
        disk_byte_s=1 / model.link_bytes_per_s + 1 / model.disk_bytes_per_s,
    )


key_of = cache(adapter_key)


@cache
def digest_of(adapter: int) -> str:
    """The digest of an adapter of a trace; its key is the number plus 1."""
    return f"{adapter + 1:016x}".ljust(64, "0")


@cache
def _params(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True)


@cache
def _ref(adapter: int) -> AdapterRef:
    digest = digest_of(adapter)
    return AdapterRef(digest, 1, digest)


def _next_key(key: bytes) -> bytes:
    return blake2b(key, digest_size=16).digest()


@cache
def _own_keys(adapter: int) -> list[bytes]:
    """The keys of the blocks of an adapter's own prompt."""
    keys = [blake2b(digest_of(adapter).encode(), digest_size=16).digest()]
    for _ in range(OWN_PROMPT // BLOCK - 1):
        keys.append(_next_key(keys[-1]))
    return keys


@lru_cache(maxsize=1 << 16)
def _session_keys(adapter: int, session: int) -> list[bytes]:
    """The keys of the first blocks of a session, as many as were needed. All of its requests begin
    with the same tokens, so that hashing those again would tell nothing."""
    own = _own_keys(adapter)
    return [*own, blake2b(own[-1], digest_size=16, salt=session.to_bytes(16)).digest()]


def chain_of(ask: FleetAsk) -> Holding:
    """What a request of the trace will hold of a cache."""
    keys = _session_keys(ask.adapter, ask.session)
    for _ in range(len(keys), (ask.prompt_tokens + ask.output_tokens) // BLOCK):
        keys.append(_next_key(keys[-1]))
    return Holding(digest_of(ask.adapter), 0, keys=keys)


def request_of(number: int, ask: FleetAsk, output_ids: list[int]) -> EngineRequest:
    """A request of the trace. The tokens of an adapter's own prompt are 0, those of a session its
    number, so that what is shared is the same."""
    session = ask.session + 1
    prompt_ids = [0] * OWN_PROMPT + [session] * (ask.prompt_tokens - OWN_PROMPT)
    params, ref = _params(ask.output_tokens), _ref(ask.adapter)
    return EngineRequest(str(number), prompt_ids, params, ref, seed=0, output_ids=output_ids)


class _Scheduler(CoastingScheduler):
    def _validate(self, request: EngineRequest, vocab_size: int) -> TokenArray:
        """Requests of a trace are what they should be. Nobody looks at their tokens, whose blocks
        have their keys already."""
        return array("Q", [0]) * (len(request.prompt_ids) + len(request.output_ids))

    def take(self, request: EngineRequest, chain: Holding) -> None:
        """Queue a request whose blocks' keys are worked out already, in `chain`."""
        self.quiet = False
        self.add(request)
        self._by_id[request.request_id].holding = chain


class _Changes(Generic[T]):
    """What a node has reported of a set, and which elements may have changed since, so that reports
    need not compare everything."""

    def __init__(self, key_of: Callable[[T], int], has: Callable[[T], bool]) -> None:
        """`key_of`: the key by which an element is told. `has`: whether it is in the set now."""
        self._key_of = key_of
        self._has = has
        self.told: set[int] = set()
        self._noted: dict[T, None] = {}

    def note(self, element: T) -> None:
        """The element has come or gone."""
        self._noted[element] = None

    def change(self) -> KeyChange:
        """What changed since the last call."""
        added, removed = [], []
        for element in self._noted:
            key, here = self._key_of(element), self._has(element)
            if here and key not in self.told:
                self.told.add(key)
                added.append(key)
            elif not here and key in self.told:
                self.told.remove(key)
                removed.append(key)
        self._noted.clear()
        return KeyChange(added, removed)


class _NotedSketch(PrefixSketch):
    """Notes what changes."""

    def __init__(self) -> None:
        super().__init__()
        self.changes = _Changes[bytes](
            lambda key: int.from_bytes(key[:8], "little"), self._keys.__contains__
        )

    def use(self, index: int, key: bytes) -> None:
        if index in INDICES:
            super().use(index, key)
            self.changes.note(key)

    def drop(self, key: bytes) -> None:
        if key in self._keys:
            super().drop(key)
            self.changes.note(key)


class _Told:
    """What a node has told of its adapters and prefixes."""

    def __init__(self, slots: AdapterSlots, loads: SimulatedLoads, sketch: _NotedSketch) -> None:
        self.resident = _Changes(key_of, slots.is_resident)
        self.host = _Changes(key_of, loads.on_host)
        self.prefixes = sketch.changes
        self.seq = 0
        self._running: tuple[tuple[str, ...], frozenset[int]] = (), frozenset()
        """The adapters in the batch when that was told last, and their keys."""

    def running(self, digests: tuple[str, ...]) -> frozenset[int]:
        """The keys of the adapters in the batch."""
        if digests != self._running[0]:
            self._running = digests, frozenset(map(key_of, digests))
        return self._running[1]


class SimulatedNode:
    """One engine in virtual time. `advance(t)` lets it work until then."""

    def __init__(self, name: str, num_adapters: int, model: DeviceModel, seats: int) -> None:
        self.name = name
        self._seats = seats
        self._model = model
        self._costs = costs_of(model)
        size = model.rank_bytes // ELEMENT_BYTES
        self.slots = AdapterSlots(DEVICE_ADAPTERS * size, DEVICE_ADAPTERS, cost)
        for k in range(num_adapters):
            self.slots.add(digest_of(k), size)
        self._cache = Cache(NUM_BLOCKS, BLOCK)
        self._cache.sketch = sketch = _NotedSketch()
        limits = LIMITS._replace(max_num_seqs=seats, max_loras=seats)
        self.scheduler = _Scheduler(limits, self._cache, self.slots)
        sizes = {digest_of(k): model.rank_bytes for k in range(num_adapters)}
        self.loads = SimulatedLoads(model, sizes, HOST_ADAPTERS * model.rank_bytes)
        self.num_steps = self.num_rows = 0
        """Steps so far, and how many tokens of answers they made together."""
        self.due_s = math.inf
        """When whoever simulates it looks at it next."""
        self._end_s = math.inf
        """When the step under way ends, or what an idle node waits for comes."""
        self._busy = False
        """Whether a step is under way."""
        self._plan: StepPlan | None = None
        """What it does besides a token for each coasting request; None: nothing."""
        self._told = _Told(self.slots, self.loads, sketch)

    # -- requests ------------------------------------------------------------------------------

    def submit(self, request: EngineRequest, chain: Holding, now: float) -> None:
        self.scheduler.take(request, chain)
        if not self._busy:
            self._end_s = min(self._end_s, now)

    def take_back(self, request_id: str) -> list[int]:
        """End a request here, and return the output that it has."""
        output = self.scheduler.output_of(request_id)
        self.scheduler.abort(request_id)
        return output

    # -- time ----------------------------------------------------------------------------------

    @property
    def next_s(self) -> float:
        """When something is decided here next, unless a request comes. It may be less than
        nothing too early."""
        scheduler, end_s = self.scheduler, self._end_s
        if not (self._busy and scheduler.quiet):
            return end_s
        next_s = end_s
        if (steps := scheduler.steps_to_end) > 1:
            next_s += (steps - 1) * self._step_s(scheduler.num_coasting)
        if ends := self.loads.ends():
            next_s = min(next_s, max(ends[0], end_s))
        return next_s

    def advance(self, until: float) -> list[tuple[float, TokenEvent]]:
        """Work on everything that begins before `until`. Returns first and last tokens, and when
        they came."""
        found: list[tuple[float, TokenEvent]] = []
        while self._end_s < until:
            if self._busy:
                if self.scheduler.quiet:
                    self._coast(until)
                    if self._end_s >= until:
                        break
                now = self._end_s
                if events := self.scheduler.pass_(self._plan):
                    found += [(now, event) for event in events]
            now = self._end_s
            for digest, load_s in self.loads.ended(now):
                self.slots.loaded(digest, load_s)
                self._told.resident.note(digest)
            self._begin_step(now)
        return found

    def _begin_step(self, now: float) -> None:
        scheduler = self.scheduler
        plan = self._plan = scheduler.decide(now)
        rows = num_tokens = scheduler.num_coasting
        if plan is not None:
            for load in plan.loads:
                self.loads.start(load, now)
                for digest in load.evicted:
                    self._told.resident.note(digest)
            num_tokens = plan.num_tokens
            rows += sum(plan.num_samples)
        self._busy = num_tokens > 0
        if self._busy:
            self.num_steps += 1
            self.num_rows += rows
            self._end_s += self._step_s(num_tokens)
        else:
            polled_s = now + IDLE_S if scheduler.busy else math.inf
            self._end_s = min([polled_s, *self.loads.ends()])

    def _step_s(self, num_tokens: int) -> float:
        return self._model.seconds_of_step(num_tokens, self.scheduler.num_leased)

    def _coast(self, until: float) -> None:
        """Let those steps pass that need no decision: nobody ends, comes or waits."""
        rows, most = self.scheduler.num_coasting, self.scheduler.steps_to_end - 1
        step_s, end_s = self._step_s(rows), self._end_s
        if ends := self.loads.ends():
            until = min(until, ends[0])
        passed = 0
        while passed < most and end_s < until:
            end_s += step_s
            passed += 1
        if passed:
            self._end_s = end_s
            self.num_steps += passed
            self.num_rows += passed * rows
            self.scheduler.coast(passed)
            self._plan = None

    # -- what it tells -------------------------------------------------------------------------

    def load(self, now: float) -> EngineLoad:
        """The load without the adapters and prefixes that it has."""
        scheduler = self.scheduler
        free = (self.slots.capacity - self.slots.used_elements) * ELEMENT_BYTES
        return EngineLoad(
            self._seats,
            scheduler.num_running,
            scheduler.num_waiting,
            scheduler.num_queued_tokens,
            self._cache.usage,
            free,
            self._told.running(scheduler.running_adapters()),
            {key_of(d): s for d, s in self.loads.under_way(now).items()},
            costs=self._costs,
        )

    def report(self, now: float) -> ReportUpdate:
        """The next report; the first one is whole."""
        self._told.seq += 1
        for digest in self.loads.moved:
            self._told.host.note(digest)
        self.loads.moved.clear()
        load = self.load(now)
        told = self._told
        changes = told.resident.change(), told.host.change(), told.prefixes.change()
        return ReportUpdate(
            NodeReport(self.name, 1, self._told.seq, load), *changes, self._told.seq == 1
        )

    def whole_report(self, now: float) -> ReportUpdate:
        """The newest report, for those who missed some."""
        told = self._told
        resident, host, prefixes = (
            frozenset(each.told) for each in (told.resident, told.host, told.prefixes)
        )
        load = replace(self.load(now), resident=resident, host=host, prefixes=prefixes)
        return update_between(None, NodeReport(self.name, 1, self._told.seq, load))

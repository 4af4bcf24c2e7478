"""A simulated node: the real scheduler, cache and adapter slots, with a model of the device."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache

from weft.bench.coasting import CoastingScheduler
from weft.bench.fleet_trace import OWN_PROMPT, FleetAsk
from weft.bench.simulator import ELEMENT_BYTES, IDLE_S, DeviceModel, SimulatedLoads
from weft.core.adapters import AdapterRef
from weft.core.load import Costs, EngineLoad, adapter_key
from weft.core.requests import EngineRequest, TokenEvent
from weft.core.sampling import SamplingParams
from weft.fleet.reports import KeyChange, NodeReport, ReportUpdate, update_between
from weft.schedule.cache import Cache, Holding
from weft.schedule.limits import SchedulerLimits
from weft.schedule.plan import StepPlan
from weft.schedule.policy import cost
from weft.schedule.sketch import PrefixSketch
from weft.schedule.slots import AdapterSlots

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


def digest_of(adapter: int) -> str:
    """The digest of an adapter of a trace; its key is the number plus 1."""
    return f"{adapter + 1:016x}".ljust(64, "0")


@cache
def _params(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True)


def request_of(number: int, ask: FleetAsk, output_ids: list[int]) -> EngineRequest:
    """A request of the trace. The tokens of an adapter's own prompt are 0, those of a session its
    number, so that what is shared is the same."""
    digest = digest_of(ask.adapter)
    session = ask.session + 1
    prompt_ids = [0] * OWN_PROMPT + [session] * (ask.prompt_tokens - OWN_PROMPT)
    params = _params(ask.output_tokens)
    ref = AdapterRef(digest, 1, digest)
    return EngineRequest(str(number), prompt_ids, params, ref, seed=0, output_ids=output_ids)


class _Scheduler(CoastingScheduler):
    def _validate(self, request: EngineRequest, vocab_size: int) -> None:
        """Requests of a trace are what they should be."""

    def take(self, request: EngineRequest, chain: Holding) -> None:
        """Queue a request whose blocks' keys are worked out already, in `chain`."""
        self.add(request)
        self._by_id[request.request_id].holding = chain


class _ToldSketch(PrefixSketch):
    """Notes what changes, so that reports need not compare everything."""

    def __init__(self) -> None:
        super().__init__()
        self.told: set[int] = set()
        self._changed: dict[bytes, None] = {}

    def use(self, index: int, key: bytes) -> None:
        super().use(index, key)
        self._changed[key] = None

    def drop(self, key: bytes) -> None:
        super().drop(key)
        self._changed[key] = None

    def change(self) -> KeyChange:
        """What changed since the last call."""
        added, removed = [], []
        for key in self._changed:
            short, here = int.from_bytes(key[:8], "little"), key in self._keys
            if here and short not in self.told:
                self.told.add(short)
                added.append(short)
            elif not here and short in self.told:
                self.told.remove(short)
                removed.append(short)
        self._changed.clear()
        return KeyChange(added, removed)


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
        self._sketch = _ToldSketch()
        self._cache = Cache(NUM_BLOCKS, BLOCK)
        self._cache.sketch = self._sketch
        limits = LIMITS._replace(max_num_seqs=seats, max_loras=seats)
        self.scheduler = _Scheduler(limits, self._cache, self.slots)
        sizes = {digest_of(k): model.rank_bytes for k in range(num_adapters)}
        self.loads = SimulatedLoads(model, sizes, HOST_ADAPTERS * model.rank_bytes)
        self.num_steps = self.num_rows = 0
        """Steps so far, and how many tokens of answers they made together."""
        self._end_s = math.inf
        """When the step under way ends, or what an idle node waits for comes."""
        self._plan: StepPlan | None = None
        self._told = EngineLoad()
        self._seq = 0

    # -- requests ------------------------------------------------------------------------------

    def submit(self, request: EngineRequest, chain: Holding, now: float) -> None:
        self.scheduler.take(request, chain)
        if self._plan is None:
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
        if self._plan is None or not self._plan.empty or not self.scheduler.quiet:
            return self._end_s
        steps_s = max(self.scheduler.steps_to_end - 1, 0) * self._step_s(
            self.scheduler.num_coasting
        )
        return min([self._end_s + steps_s, *(max(s, self._end_s) for s in self.loads.ends())])

    def advance(self, until: float) -> list[tuple[float, TokenEvent]]:
        """Work on everything that begins before `until`. Returns first and last tokens, and when
        they came."""
        found: list[tuple[float, TokenEvent]] = []
        while self._end_s < until:
            now = self._end_s
            if self._plan is not None:
                events = self.scheduler.pass_(self._plan)
                found += [(now, event) for event in events]
            for digest, load_s in self.loads.ended(now):
                self.slots.loaded(digest, load_s)
            self._begin_step(now)
            if self.scheduler.quiet and self._plan is not None and self._plan.empty:
                self._coast(until)
        return found

    def _begin_step(self, now: float) -> None:
        scheduler = self.scheduler
        plan = scheduler.plan(now)
        for load in plan.loads:
            self.loads.start(load, now)
        if plan.empty and not scheduler.num_coasting:
            self._plan = None
            polled_s = now + IDLE_S if scheduler.busy else math.inf
            self._end_s = min([polled_s, *self.loads.ends()])
            return
        self._plan = plan
        rows = sum(plan.num_samples) + scheduler.num_coasting
        self._count(rows, self._step_s(plan.num_tokens))

    def _step_s(self, num_tokens: int) -> float:
        num_adapters = len(self.scheduler.running_adapters())
        return self._model.seconds_of_step(num_tokens, num_adapters)

    def _count(self, rows: int, step_s: float) -> None:
        self.num_steps += 1
        self.num_rows += rows
        self._end_s += step_s

    def _coast(self, until: float) -> None:
        """Let those steps pass that need no decision: nobody ends, comes or waits."""
        steps, step_s = self.scheduler.steps_to_end, self._step_s(self.scheduler.num_coasting)
        load_s = min(self.loads.ends(), default=math.inf)
        passed = 0
        while passed < steps - 1 and self._end_s < until and self._end_s < load_s:
            self._count(self.scheduler.num_coasting, step_s)
            passed += 1
        if passed:
            self.scheduler.pass_(None, passed)

    # -- what it tells -------------------------------------------------------------------------

    def load(self, now: float) -> EngineLoad:
        """The load without the adapters and prefixes that it has."""
        scheduler = self.scheduler
        free = (self.slots.capacity - self.slots.used_elements) * ELEMENT_BYTES
        return EngineLoad(
            self._seats,
            scheduler.num_running,
            scheduler.num_waiting,
            scheduler.batch.num_queued_tokens,
            self._cache.usage,
            free,
            frozenset(map(adapter_key, scheduler.running_adapters())),
            {adapter_key(d): s for d, s in self.loads.under_way(now).items()},
            costs=self._costs,
        )

    def report(self, now: float) -> ReportUpdate:
        """The next report; the first one is whole."""
        self._seq += 1
        resident = frozenset(map(adapter_key, self.slots.resident))
        host = frozenset(map(adapter_key, self.loads.host))
        load = self.load(now)
        changes = (
            KeyChange.between(self._told.resident, resident),
            KeyChange.between(self._told.host, host),
            self._sketch.change(),
        )
        self._told = replace(load, resident=resident, host=host)
        return ReportUpdate(NodeReport(self.name, 1, self._seq, load), *changes, self._seq == 1)

    def whole_report(self, now: float) -> ReportUpdate:
        """The newest report, for those who missed some."""
        load = replace(self.load(now), resident=self._told.resident, host=self._told.host)
        load = replace(load, prefixes=frozenset(self._sketch.told))
        return update_between(None, NodeReport(self.name, 1, self._seq, load))

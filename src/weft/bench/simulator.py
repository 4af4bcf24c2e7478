"""Replays a trace with the engine's own decisions, a model of the device, and a clock of its own.

The code that serves makes the decisions: `Scheduler`, `Cache`, `AdapterSlots`. Only how
long things take is modelled: steps, which run one after the other, and loads, which run beside
them.
"""

from __future__ import annotations

import heapq
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

from weft.bench.traces import Ask, Trace
from weft.core.adapters import AdapterRef
from weft.core.requests import EngineRequest
from weft.core.sampling import SamplingParams
from weft.core.tenants import Tenant
from weft.schedule.cache import Cache
from weft.schedule.limits import SchedulerLimits
from weft.schedule.plan import StepPlan, StepResult
from weft.schedule.policy import find_policy
from weft.schedule.scheduler import Scheduler
from weft.schedule.sequence import OUTPUT_WEIGHT
from weft.schedule.slots import AdapterSlots, Load

ELEMENT_BYTES = 2
IDLE_S = 0.02
"""Seconds for which the engine sleeps when it finds nothing to run, as
`weft.engine.serve.WAIT_S`."""
WINDOW_S = 10.0
"""Fairness is looked at in windows of so many seconds: in much shorter ones a tenant of many gets
one request or none, so that they would tell how long requests are."""
MAX_RESIDENT = 4096


@dataclass(frozen=True, slots=True)
class DeviceModel:
    """How long things take, as measured on one H200 with the Llama-3-8B shape in bf16."""

    step_s: float = 4.6e-3
    """Seconds that a step takes to read the weights."""
    token_s: float = 15e-6
    """Seconds more for each token of a step."""
    lora_s: float = 0.9e-3
    """Seconds more if a step has any adapter."""
    adapter_s: float = 35e-6
    """Seconds more for each adapter in a step."""
    loaders: int = 2
    """How many loads run at the same time."""
    link_bytes_per_s: float = 25e9
    """Bandwidth from the host to the device."""
    disk_bytes_per_s: float = 4e9
    """Bandwidth from the disk to the host."""
    move_bytes_per_s: float = 1.5e12
    """Bandwidth within the device, for moves that steps wait for."""
    rank_bytes: int = 5 << 20
    """Bytes of an adapter of all linear layers, for each unit of its rank."""

    def seconds_of_step(self, num_tokens: int, num_adapters: int) -> float:
        lora_s = self.lora_s + self.adapter_s * num_adapters if num_adapters else 0.0
        return self.step_s + self.token_s * num_tokens + lora_s

    def seconds_of_load(self, num_bytes: int, on_host: bool) -> float:
        read_s = 0.0 if on_host else num_bytes / self.disk_bytes_per_s
        return read_s + num_bytes / self.link_bytes_per_s


@dataclass(frozen=True, slots=True)
class Memory:
    """The memory that adapters may take, in bytes."""

    device_bytes: int
    host_bytes: int


@dataclass(slots=True)
class Replay:
    """What happened. Lists are by request, in the order of the trace."""

    wait_s: list[float]
    """Seconds from arrival to the first step."""
    residency_s: list[float]
    """The part of the wait until the adapter was on the device."""
    uses: list[str] = field(default_factory=list)
    """Digests in the order in which requests were admitted; a preempted one is here again."""
    num_loads: int = 0
    num_evictions: int = 0
    num_preemptions: int = 0
    output_tokens: int = 0
    seconds: float = 0.0
    fairness: list[float] = field(default_factory=list)
    """Jain's index of what tenants were served, prompts and answers weighed as the scheduler does,
    for each ten seconds in which several of them had requests waiting all the time."""
    gaps: list[float] = field(default_factory=list)
    """The most that any of these tenants was served less the least, as a part of the mean."""

    @property
    def hit_rate(self) -> float:
        """Share of the admissions that needed no load of their own."""
        return 1.0 - self.num_loads / len(self.uses)


def digest_of(adapter: int) -> str:
    return f"{adapter:064x}"


def sizes_of(trace: Trace, model: DeviceModel) -> dict[str, int]:
    """The bytes of each adapter by digest."""
    return {digest_of(k): rank * model.rank_bytes for k, rank in enumerate(trace.ranks)}


def replay(
    trace: Trace, policy: str, memory: Memory, model: DeviceModel, shares: bool = False
) -> Replay:
    """Replay all requests of a trace to their end. The same arguments give the same result.

    shares: whether tenants share seats too, as those that have keys do; else only their order.
    """
    return _Simulator(trace, policy, memory, model, shares).run()


class _Simulator:
    def __init__(
        self, trace: Trace, policy: str, memory: Memory, model: DeviceModel, shares: bool
    ) -> None:
        self._asks = trace.asks
        self._model = model
        self._bytes = sizes_of(trace, model)
        capacity = memory.device_bytes // ELEMENT_BYTES
        self._slots = AdapterSlots(capacity, MAX_RESIDENT, find_policy(policy))
        for digest, size in self._bytes.items():
            self._slots.add(digest, size // ELEMENT_BYTES)
        self._scheduler = Scheduler(
            _limits(), Cache(1 << 15, 16, share_prefixes=False), self._slots
        )
        self._loads = SimulatedLoads(model, self._bytes, memory.host_bytes)
        if shares:
            names = {_name(ask.tenant) for ask in trace.asks}
            self._scheduler.set_tenants([Tenant(name) for name in sorted(names)])
        self._fairness = _Fairness()
        self._now = 0.0
        self._arrived = 0
        self._admitted: set[int] = set()
        self._open: set[str] = set()
        count = len(trace.asks)
        self._replay = Replay([0.0] * count, [0.0] * count)

    def run(self) -> Replay:
        while self._arrived < len(self._asks) or self._open:
            self._arrive()
            for digest, load_s in self._loads.ended(self._now):
                self._slots.loaded(digest, load_s)
            plan = self._scheduler.plan(self._now)
            for load in plan.loads:
                self._loads.start(load, self._now)
            self._admit(plan)
            if plan.empty:
                self._sleep()
            else:
                self._step(plan)
        found = self._replay
        found.num_loads, found.num_evictions = self._slots.num_loads, self._slots.num_evictions
        found.num_preemptions = self._scheduler.totals.preemptions
        found.seconds = self._now
        windows = self._fairness.by_window
        found.fairness, found.gaps = list(map(jain, windows)), list(map(gap, windows))
        self._scheduler.check()
        return found

    def _arrive(self) -> None:
        while self._arrived < len(self._asks):
            ask = self._asks[self._arrived]
            if ask.arrival_s > self._now:
                return
            request_id = str(self._arrived)
            refused = self._scheduler.add(_request(request_id, ask))
            assert refused is None, refused
            self._open.add(request_id)
            self._fairness.wait(ask.tenant)
            self._arrived += 1

    def _admit(self, plan: StepPlan) -> None:
        for admitted in plan.admitted:
            index = int(admitted.request_id)
            ask = self._asks[index]
            digest = digest_of(ask.adapter)
            self._replay.uses.append(digest)
            if index not in self._admitted:
                self._admitted.add(index)
                came_s = self._loads.came_s[digest]
                self._replay.wait_s[index] = self._now - ask.arrival_s
                self._replay.residency_s[index] = max(0.0, came_s - ask.arrival_s)
                self._fairness.begin(ask.tenant, ask.prompt_tokens)

    def _step(self, plan: StepPlan) -> None:
        num_adapters = len(self._scheduler.running_adapters())
        self._now += self._model.seconds_of_step(plan.num_tokens, num_adapters)
        moved = sum(move.size for load in plan.loads for move in load.moves)
        self._now += moved * ELEMENT_BYTES / self._model.move_bytes_per_s
        for event in self._scheduler.commit(plan, StepResult([0] * sum(plan.num_samples))):
            self._replay.output_tokens += len(event.token_ids)
            tenant = self._asks[int(event.request_id)].tenant
            self._fairness.serve(tenant, len(event.token_ids))
            if event.finish_reason is not None:
                assert event.finish_reason == "length", event
                self._open.remove(event.request_id)
        self._fairness.look(self._now)

    def _sleep(self) -> None:
        """Let time pass until something comes."""
        coming = [self._now + IDLE_S, *self._loads.ends()]
        if self._arrived < len(self._asks):
            coming.append(self._asks[self._arrived].arrival_s)
            if not self._open:
                coming = coming[-1:]
        self._now = max(self._now, min(coming))
        self._fairness.look(self._now)


class SimulatedLoads:
    """The loads under way, and the images on the host, which are those used last."""

    def __init__(self, model: DeviceModel, num_bytes: Mapping[str, int], host_bytes: int) -> None:
        self._model = model
        self._bytes = num_bytes
        self._free_bytes = host_bytes
        self._host: OrderedDict[str, None] = OrderedDict()
        self._loaders = [0.0] * model.loaders
        """When each loader is free."""
        self._under_way: list[tuple[float, str, float]] = []
        """For each load: when it ends, what it loads, and when it was ordered."""
        self.came_s: dict[str, float] = {}
        """When each adapter came to the device last."""
        self.moved: dict[str, None] = {}
        """What came to the host or left it; whoever wants to know clears it."""

    def on_host(self, digest: str) -> bool:
        return digest in self._host

    def under_way(self, now: float) -> dict[str, float]:
        """For how many seconds each load has been under way, by digest."""
        return {digest: now - ordered for _, digest, ordered in self._under_way}

    def start(self, load: Load, now: float) -> None:
        on_host = load.digest in self._host
        seconds = self._model.seconds_of_load(self._bytes[load.digest], on_host)
        end = max(now, heapq.heappop(self._loaders)) + seconds
        heapq.heappush(self._loaders, end)
        heapq.heappush(self._under_way, (end, load.digest, now))

    def ended(self, now: float) -> list[tuple[str, float]]:
        """What has been loaded since the last call, and the seconds that it took."""
        found: list[tuple[str, float]] = []
        while self._under_way and self._under_way[0][0] <= now:
            end, digest, ordered = heapq.heappop(self._under_way)
            self.came_s[digest] = end
            self._keep(digest)
            found.append((digest, end - ordered))
        return found

    def ends(self) -> list[float]:
        """When the next load ends, if there is one."""
        return [self._under_way[0][0]] if self._under_way else []

    def _keep(self, digest: str) -> None:
        if digest in self._host:
            self._host.move_to_end(digest)
            return
        self._host[digest] = None
        self.moved[digest] = None
        self._free_bytes -= self._bytes[digest]
        while self._free_bytes < 0:
            gone, _ = self._host.popitem(last=False)
            self.moved[gone] = None
            self._free_bytes += self._bytes[gone]


class _Fairness:
    """Adds up what tenants with waiting requests get, in one window of time after the other."""

    def __init__(self) -> None:
        self._waiting: Counter[int] = Counter()
        self._served: defaultdict[int, float] = defaultdict(float)
        self._backlogged: set[int] | None = None
        self._end_s = WINDOW_S
        self.by_window: list[list[float]] = []
        """What each tenant was served that had requests waiting all the time, if several had."""

    def wait(self, tenant: int) -> None:
        self._waiting[tenant] += 1

    def begin(self, tenant: int, prompt_tokens: int) -> None:
        self._waiting[tenant] -= 1
        self._served[tenant] += prompt_tokens

    def serve(self, tenant: int, output_tokens: int) -> None:
        self._served[tenant] += output_tokens * OUTPUT_WEIGHT

    def look(self, now: float) -> None:
        waiting = {tenant for tenant, count in self._waiting.items() if count}
        self._backlogged = waiting if self._backlogged is None else self._backlogged & waiting
        if now < self._end_s:
            return
        if len(self._backlogged) > 1:
            self.by_window.append([self._served[t] for t in self._backlogged])
        self._served.clear()
        self._backlogged = None
        self._end_s = now + WINDOW_S


def jain(shares: list[float]) -> float:
    """Jain's index: 1 when all have the same, 1/n when one has everything."""
    total = sum(shares)
    return total**2 / (len(shares) * sum(s * s for s in shares)) if total else 1.0


def gap(shares: list[float]) -> float:
    """The difference between the largest and the smallest share, divided by the mean."""
    total = sum(shares)
    return (max(shares) - min(shares)) * len(shares) / total if total else 0.0


def _name(tenant: int) -> str:
    return f"tenant-{tenant}"


def _request(request_id: str, ask: Ask) -> EngineRequest:
    digest = digest_of(ask.adapter)
    params = SamplingParams(max_tokens=ask.output_tokens, ignore_eos=True)
    ref = AdapterRef(digest, 1, digest)
    prompt_ids = [0] * ask.prompt_tokens
    return EngineRequest(request_id, prompt_ids, params, ref, tenant=_name(ask.tenant), seed=0)


def _limits() -> SchedulerLimits:
    return SchedulerLimits(
        max_num_seqs=256,
        max_num_batched_tokens=2048,
        max_model_len=8192,
        max_loras=256,
        max_adapter_wait=2.0,
        vocab_size=2,
        eos_token_ids=frozenset(),
    )

"""The engine: it applies commands and runs steps. Single-threaded."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from weft.checkpoint.pack import AdapterImage
from weft.core.adapters import AdapterInfo
from weft.core.errors import WeftError
from weft.core.load import MAX_HOST, MAX_RESIDENT, MAX_STRANDED, EngineLoad, adapter_key
from weft.core.messages import (
    Abort,
    Command,
    GetStats,
    Hold,
    Release,
    Reply,
    Report,
    SetTenants,
    Submit,
    Tokens,
)
from weft.core.requests import EngineRequest, TokenEvent
from weft.core.stats import EngineInfo, EngineStats
from weft.engine.adapters import Adapters
from weft.engine.loop import Loop
from weft.engine.meter import Meter
from weft.engine.residency import Residency
from weft.grammar.grammars import Grammars
from weft.schedule.cache import Cache
from weft.schedule.journal import CacheEvent, Journal
from weft.schedule.scheduler import Scheduler
from weft.schedule.sequence import find_invocation
from weft.schedule.sketch import PrefixSketch
from weft.worker.protocol import Worker


class Engine:
    """Carries out commands and steps with the parts that `weft.engine.build` puts together."""

    def __init__(
        self,
        info: EngineInfo,
        scheduler: Scheduler,
        cache: Cache,
        residency: Residency,
        adapters: Adapters,
        loop: Loop,
        grammars: Grammars,
        worker: Worker,
    ) -> None:
        self.info = info
        self.scheduler = scheduler
        self._cache = cache
        self._residency = residency
        self._adapters = adapters
        self._loop = loop
        self._grammars = grammars
        self._worker = worker

    @property
    def working(self) -> bool:
        """Whether the last step ran something, so that the next one will find work too."""
        return not self._loop.idle

    def spare_s(self, has_some: bool) -> float:
        """For how many seconds the caller may still wait for commands before the next step.
        `has_some`: whether some have come already."""
        return self._loop.spare_s(has_some)

    # -- commands ------------------------------------------------------------------------------

    def apply(self, command: Command) -> Report | None:
        """Carry out a command other than Stop. Returns its immediate report, if it has one."""
        match command:
            case Submit(request):
                return _tokens(self.submit(request))
            case Abort(request_id):
                return _tokens(self.abort(request_id))
            case Hold():
                self._adapters.hold(command)
            case Release(call_id, digest, holder):
                self.release(digest, holder)
                return Reply(call_id)
            case SetTenants(tenants):
                self.scheduler.set_tenants(tenants)
                self._grammars.set_tenants(tenants)
            case GetStats(call_id):
                return Reply(call_id, stats=self.stats())
        return None

    def submit(self, request: EngineRequest) -> TokenEvent | None:
        info, active_from = None, None
        if request.adapter is not None:
            try:
                self._adapters.admit(request.adapter, request.parts)
            except WeftError as error:
                return self.scheduler.refuse(request.request_id, error)
            info, active_from = self._residency.catalog.known[request.adapter.digest].info, 0
        if info is not None and info.invocation_token_ids:
            active_from = find_invocation(request.prompt_ids, info.invocation_token_ids)
        refused = self.scheduler.add(request, active_from, info.vocab_size if info else 0)
        if refused is None:
            if request.adapter is not None and active_from is not None:
                self._residency.ask(request.adapter.digest)
            self._loop.queue_times.receive(request.request_id)
            form = request.params.structured_outputs
            if form is not None:
                self._grammars.start(request.request_id, form, request.tenant)
        return refused

    def abort(self, request_id: str) -> TokenEvent | None:
        event = self.scheduler.abort(request_id)
        return self._loop.queue_times.stamp([event])[0] if event else None

    def hold_tensors(
        self,
        config: Mapping[str, object],
        tensors: Mapping[str, torch.Tensor],
        holder: str,
        pinned: bool = False,
    ) -> AdapterInfo:
        """Hold an adapter from memory, at once; see `weft.checkpoint.read.files_of`. Raises
        AdapterInvalid, AdapterConflict, AdapterQuarantined."""
        image = self._worker.pack_now(config, tensors)
        return self.hold_image(image, holder, pinned, self._residency.registrations.probe(image))

    def hold_image(
        self, image: AdapterImage, holder: str, pinned: bool = False, checked: bool = False
    ) -> AdapterInfo:
        """Hold an adapter that is packed already, without probing it; its digest must be unique to
        its content. Raises AdapterInvalid, AdapterConflict."""
        return self._adapters.hold_image(image, None, holder, pinned, checked)

    def stay_on_host(self, image: AdapterImage) -> AdapterImage:
        """A copy of an image in the host tier's memory, for as long as the engine lives, so that
        devices read images made of its parts at full speed. The image itself if there is no
        room."""
        extent = self._residency.host.reserve(image.num_bytes)
        return image if extent is None else self._worker.stage(image, extent).result()

    def release(self, digest: str, holder: str) -> None:
        self._adapters.release(digest, holder)

    def stats(self) -> EngineStats:
        scheduler, slots = self.scheduler, self._residency.slots
        totals = scheduler.totals
        return EngineStats(
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            kv_usage=self._cache.usage,
            running_adapters=scheduler.running_adapters(),
            waiting_adapters=scheduler.batch.waiting.digests,
            resident_adapters=slots.resident,
            host_adapters=self._residency.host.digests(),
            pinned_adapters=slots.pinned,
            adapters=self._residency.stats(),
            adapter_bytes=slots.used_elements * self._worker.facts.element_bytes,
            tiers=self._residency.tiers(),
            load_s=self._residency.stage_times.spreads,
            device_load_s=self._residency.load_times.spread,
            adapter_wait_s=self._loop.queue_times.adapter_waits.spread,
            self_checks=self._residency.registrations.results(),
            self_check_s=self._residency.registrations.check_times(),
            quarantined_adapters=slots.refused,
            adapter_copy_faults=self._residency.copy_faults,
            steps=self._loop.steps,
            host_s=self._loop.host_s,
            prompt_tokens=totals.prompt_tokens,
            cached_tokens=totals.cached_tokens,
            generated_tokens=totals.generated_tokens,
            guessed_tokens=totals.guessed_tokens,
            right_guesses=totals.right_guesses,
            preemptions=totals.preemptions,
            adapter_loads=slots.num_loads,
            adapter_evictions=slots.num_evictions,
            finished=dict(totals.finished),
        )

    def measure(self) -> None:
        """From now on, measure steps and loads and track cached prefixes, as `load` needs them."""
        self._loop.meter = self._residency.meter = self._loop.meter or Meter()
        self._cache.sketch = PrefixSketch()

    def record_cache(self) -> None:
        """From now on, record the changes of the prefix index for `take_cache_events`."""
        self._cache.journal = Journal()

    def take_cache_events(self) -> list[CacheEvent]:
        """The changes of the prefix index since the last call. Call `record_cache` before."""
        assert self._cache.journal is not None
        return self._cache.journal.take()

    def load(self) -> EngineLoad:
        """What others need in order to decide what to send here. Call `measure` before."""
        scheduler, slots, meter = self.scheduler, self._residency.slots, self._loop.meter
        assert meter is not None and self._cache.sketch is not None
        free_elements = slots.capacity - slots.used_elements
        return EngineLoad(
            max_seats=scheduler.batch.num_rows,
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            queued_tokens=scheduler.batch.num_queued_tokens,
            kv_usage=self._cache.usage,
            free_adapter_bytes=free_elements * self._worker.facts.element_bytes,
            running_adapters=_keys(scheduler.running_adapters()),
            loading={adapter_key(d): s for d, s in self._residency.loading_s().items()},
            resident=_keys(slots.resident[:MAX_RESIDENT]),
            host=_keys(self._residency.host.digests()[-MAX_HOST:]),
            prefixes=self._cache.sketch.keys,
            costs=meter.costs,
            stranded=scheduler.batch.stranded(MAX_STRANDED),
        )

    # -- steps ---------------------------------------------------------------------------------

    def step(self) -> list[Report]:
        tokens = self._loop.step()
        self._adapters.forget_drained()
        return [*self._adapters.take_replies(), *tokens]

    def stuck_s(self) -> dict[str, float]:
        """By name, how many seconds other parts than the step are stuck; see `Worker.stuck_s`."""
        return {**self._worker.stuck_s(), "compilers": self._grammars.stuck_s()}

    def check(self) -> None:
        """Raise AssertionError unless the invariants of all parts hold."""
        self.scheduler.check()
        self._residency.check()
        self._adapters.check()

    def close(self) -> list[TokenEvent]:
        """Stop for good: abort all requests, whose last events it returns, and end the threads."""
        events = self._loop.queue_times.stamp(self.scheduler.abort_all())
        self._grammars.close()
        self._residency.registrations.close()
        self._worker.close()
        return events


def _keys(digests: Iterable[str]) -> frozenset[int]:
    return frozenset(map(adapter_key, digests))


def _tokens(event: TokenEvent | None) -> Tokens | None:
    return Tokens([event]) if event else None

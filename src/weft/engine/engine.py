"""The engine: its parts put together, commands applied, steps run. Single-threaded.

`run_engine` is what runs on the engine's thread or in its process: it takes commands from a queue,
runs steps while there is work, and emits reports.
"""

from __future__ import annotations

import gc
import random
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Empty, SimpleQueue

import torch

from weft.checkpoint import AdapterImage, files_of
from weft.core.adapters import AdapterInfo
from weft.core.config import EngineArgs
from weft.core.errors import ConfigError, WeftError, to_wire
from weft.core.messages import (
    Abort,
    Command,
    Drop,
    GetStats,
    Register,
    Reply,
    Report,
    Started,
    StartFailed,
    Stop,
    Submit,
    Tokens,
    Wake,
)
from weft.core.requests import EngineRequest, TokenEvent
from weft.core.stats import EngineInfo, EngineStats
from weft.engine.compositions import Compositions
from weft.engine.host import Arena, HostTier, default_bytes, pinned_arena
from weft.engine.images import ImageStore, default_folder, fingerprint
from weft.engine.loop import Loop
from weft.engine.residency import Registered, Residency
from weft.grammar.grammars import Grammars
from weft.models.config import resolve_model
from weft.schedule.activation import find_invocation
from weft.schedule.cache import Cache
from weft.schedule.limits import SchedulerLimits
from weft.schedule.policy import POLICIES
from weft.schedule.scheduler import Scheduler
from weft.schedule.slots import AdapterSlots
from weft.text import Tokenizer, load_tokenizer
from weft.worker.inputs import RowState
from weft.worker.runner import MAX_RESIDENT, Runner

SWITCH_S = 5e-4
"""For which a thread keeps the interpreter while others want it: a tenth of Python's own choice."""
WAIT_S = 0.02
"""How long a step without work waits for a command while requests wait for something else."""


class Engine:
    """Owns scheduler, residency and runner. Raises ConfigError if it can't start like this."""

    def __init__(self, args: EngineArgs, wake: Callable[[], None] = lambda: None) -> None:
        if args.scheduler.max_num_batched_tokens < args.scheduler.max_num_seqs:
            raise ConfigError(
                f"--max-num-batched-tokens {args.scheduler.max_num_batched_tokens} must be at "
                f"least --max-num-seqs {args.scheduler.max_num_seqs}",
                "max_num_batched_tokens",
            )
        self._args = args
        self._runner = runner = Runner(args)
        self.stages = runner.stages
        with ThreadPoolExecutor(1, thread_name_prefix="weft-start") as beside:
            host = beside.submit(self._host_memory)  # takes a second or two of the driver's time
            runner.compile()
        self.stages.end("compile")
        runner.capture()
        cache = args.cache
        self._cache = Cache(
            runner.num_blocks, cache.block_size, share_prefixes=cache.enable_prefix_caching
        )
        policy = POLICIES[args.lora.eviction_policy]
        self._slots = AdapterSlots(runner.pool.arena.numel(), MAX_RESIDENT, policy)
        self.scheduler = Scheduler(
            self._limits(), self._cache, self._slots, args.scheduler.tenant_weights
        )
        self._residency = Residency(
            self._slots,
            runner.pool,
            runner,
            HostTier(*host.result(), policy),
            self._images(),
            runner.move,
            wake,
            checker=runner.self_check,
        )
        rows = RowState(
            args.scheduler.max_num_seqs,
            runner.max_model_len,
            args.cache.block_size,
            runner.config.vocab_size,
        )
        self._grammars = Grammars(
            self._load_tokenizer, runner.config.vocab_size, runner.config.eos_token_ids, wake
        )
        overlap = args.scheduler.overlap
        self._loop = Loop(
            self.scheduler, self._residency, rows, runner, self._grammars.poll, overlap
        )
        self._compositions = Compositions(self.scheduler, self._residency)
        self._registrations: Counter[str] = Counter()
        self._random = random.Random()

    def _limits(self) -> SchedulerLimits:
        args, runner = self._args, self._runner
        return SchedulerLimits(
            max_num_seqs=args.scheduler.max_num_seqs,
            max_num_batched_tokens=args.scheduler.max_num_batched_tokens,
            max_model_len=runner.max_model_len,
            max_loras=args.lora.max_loras,
            max_adapter_wait=args.lora.max_adapter_wait,
            vocab_size=runner.config.vocab_size,
            eos_token_ids=frozenset(runner.config.eos_token_ids),
        )

    def _host_memory(self) -> tuple[int, Arena | None]:
        """Bytes for images on the host, and the memory itself if it must be pinned."""
        num_bytes = self._args.lora.adapter_host_memory or default_bytes()
        if self._runner.device.type != "cuda":
            return num_bytes, None
        try:
            return num_bytes, pinned_arena(num_bytes)
        except (RuntimeError, OSError) as error:
            raise ConfigError(
                f"not enough memory for --adapter-host-memory: {error}", "adapter_host_memory"
            ) from None

    def _images(self) -> ImageStore | None:
        lora, model, runner = self._args.lora, self._args.model, self._runner
        if lora.adapter_cache_dir == "none":
            return None
        weights = None
        if model.load_format != "dummy":
            weights = resolve_model(model.model, model.revision)
        # What was accepted under other limits is packed anew.
        limits = (
            f"{lora.max_lora_rank} {lora.max_added_tokens} {lora.conversion_tolerance}"
            f" {model.quantization}"
        )
        base = fingerprint(runner.table, weights, model.model, limits)
        folder = Path(lora.adapter_cache_dir) if lora.adapter_cache_dir else default_folder()
        return ImageStore(folder.absolute(), base, runner.dtype, lora.adapter_cache_bytes)

    def _load_tokenizer(self) -> Tokenizer | None:
        """For grammars; None if the model has none."""
        try:
            return load_tokenizer(self._args.model.model, self._args.model.revision)
        except ConfigError:
            return None

    @property
    def info(self) -> EngineInfo:
        args, runner = self._args, self._runner
        return EngineInfo(
            model=args.model.model,
            architecture=runner.config.architecture,
            dtype=str(runner.dtype).removeprefix("torch."),
            device=str(runner.device),
            max_model_len=runner.max_model_len,
            vocab_size=runner.config.vocab_size,
            num_blocks=runner.num_blocks,
            block_size=args.cache.block_size,
            max_loras=args.lora.max_loras,
            max_lora_rank=args.lora.max_lora_rank,
            adapter_memory_bytes=runner.pool.arena.numel() * runner.pool.element_bytes,
            num_parameters=runner.num_parameters,
            start_s=dict(self.stages.seconds),
        )

    @property
    def working(self) -> bool:
        """Whether the last step ran something, so that the next one will find work too."""
        return not self._loop.idle

    # -- commands ------------------------------------------------------------------------------

    def apply(self, command: Command) -> Report | None:
        """Carry out a command other than Stop; its immediate report, if it has one."""
        match command:
            case Submit(request):
                return _tokens(self.submit(request))
            case Abort(request_id):
                return _tokens(self.abort(request_id))
            case Register(call_id, path, pinned, before):
                self._make_way(pinned)
                self._residency.register(call_id, path, pinned, before)
            case Drop(call_id, digest):
                self.drop(digest)
                return Reply(call_id)
            case GetStats(call_id):
                return Reply(call_id, stats=self.stats())
            case _:
                pass
        return None

    def submit(self, request: EngineRequest) -> TokenEvent | None:
        if request.adapter is not None and request.parts:
            try:
                self._compositions.use(request.adapter.digest, request.parts)
            except WeftError as error:
                return self.scheduler.refuse(request.request_id, error)
        active_from = self._active_from(request)
        seed = request.params.seed
        refused = self.scheduler.add(
            request,
            self._random.getrandbits(63) if seed is None else seed,
            active_from,
            self._residency.vocab_size(request.adapter.digest) if request.adapter else 0,
        )
        if refused is None:
            if request.adapter is not None and active_from is not None:
                self._residency.ask(request.adapter.digest)
            self._loop.queue_times.receive(request.request_id)
            if request.params.structured_outputs is not None:
                self._grammars.start(request.request_id, request.params.structured_outputs)
        return refused

    def _active_from(self, request: EngineRequest) -> int | None:
        """Position of the prompt from which on its adapter is active; None: nowhere."""
        if request.adapter is None:
            return None
        invocation = self._residency.invocation(request.adapter.digest)
        return find_invocation(request.prompt_ids, invocation) if invocation else 0

    def abort(self, request_id: str) -> TokenEvent | None:
        event = self.scheduler.abort(request_id)
        return self._loop.queue_times.stamp([event])[0] if event else None

    def publish(
        self, config: Mapping[str, object], tensors: Mapping[str, torch.Tensor], pinned: bool
    ) -> AdapterInfo:
        """Register an adapter from memory, at once; see `weft.checkpoint.files_of`.

        Raises AdapterInvalid, AdapterConflict, AdapterQuarantined.
        """
        image = self._runner.pack_adapter(files_of(config, tensors))
        return self.publish_image(image, pinned, self._residency.probe(image))

    def publish_image(
        self, image: AdapterImage, pinned: bool = False, checked: bool = False
    ) -> AdapterInfo:
        """As `publish`, of what is packed already, and without a check; its digest must name that
        content alone. Raises AdapterConflict."""
        self._make_way(pinned)
        info = self._residency.add(image, None, pinned, checked)
        self.scheduler.keep_adapter(info.digest)
        self._registrations[info.digest] += 1
        return info

    def drop(self, digest: str) -> None:
        """Undo one registration. The last one undone forgets the adapter, at once or after its
        last request."""
        self._registrations[digest] -= 1
        if self._registrations[digest] <= 0:
            del self._registrations[digest]
            self._compositions.drop_those_of(digest)
            if self.scheduler.drop_adapter(digest):
                self._residency.forget(digest)

    def _make_way(self, pinned: bool) -> None:
        """Before an adapter is pinned, which leaves room for the largest one known: sums that
        nobody uses are not to count."""
        if pinned:
            self._compositions.drop_all()

    def _count(self, ended: Registered) -> Reply:
        if ended.info is None:
            return Reply(ended.call_id, error=to_wire(ended.error or WeftError("not registered")))
        self._registrations[ended.info.digest] += 1
        return Reply(ended.call_id, info=ended.info)

    def stats(self) -> EngineStats:
        scheduler, slots = self.scheduler, self._slots
        totals = scheduler.totals
        return EngineStats(
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            kv_usage=self._cache.usage,
            running_adapters=scheduler.running_adapters(),
            waiting_adapters=scheduler.waiting_adapters(),
            resident_adapters=slots.resident,
            host_adapters=self._residency.host.digests(),
            pinned_adapters=slots.pinned,
            adapters=self._residency.stats(),
            adapter_bytes=slots.used_elements * self._runner.pool.element_bytes,
            tiers=self._residency.tiers(),
            load_s=self._residency.load_times(),
            adapter_wait_s=self._loop.queue_times.adapter_waits.spread,
            self_checks=self._residency.check_results(),
            self_check_s=self._residency.check_times(),
            quarantined_adapters=slots.refused,
            adapter_copy_faults=self._residency.copy_faults,
            steps=self._loop.steps,
            prompt_tokens=totals.prompt_tokens,
            cached_tokens=totals.cached_tokens,
            generated_tokens=totals.generated_tokens,
            preemptions=totals.preemptions,
            adapter_loads=slots.num_loads,
            adapter_evictions=slots.num_evictions,
            finished=dict(totals.finished),
        )

    # -- steps ---------------------------------------------------------------------------------

    def step(self) -> list[Report]:
        events, registered = self._loop.step()
        reports: list[Report] = [self._count(r) for r in registered]
        if events:
            reports.append(Tokens(events))
        return reports

    def close(self) -> list[TokenEvent]:
        """Stop for good: abort all requests and end the threads."""
        events = self._loop.queue_times.stamp(self.scheduler.abort_all())
        self._grammars.close()
        self._residency.close()
        self._runner.close()
        return events


def settle_process() -> None:
    """For a process of the engine's own, when the engine is there.

    What is there by then stays: left out of the garbage collector's rounds, which look at all of
    it now and then, for a tenth of a second. And threads that load and register take turns with
    the one that steps more often.
    """
    gc.collect()
    gc.freeze()
    sys.setswitchinterval(SWITCH_S)


def run_engine(
    args: EngineArgs,
    inbox: SimpleQueue[Command],
    emit: Callable[[Report], None],
    alone: bool = False,
) -> None:
    """Build an engine and serve until Stop; reports a start that failed. `alone`: in a process of
    its own."""
    try:
        engine = Engine(args, wake=lambda: inbox.put(Wake()))
    except WeftError as error:
        emit(StartFailed(to_wire(error)))
        return
    if alone:
        settle_process()
    emit(Started(engine.info))
    serve(engine, inbox, emit)


def serve(engine: Engine, inbox: SimpleQueue[Command], emit: Callable[[Report], None]) -> None:
    """Run until Stop. Every request that was submitted gets its terminal event."""
    while True:
        for command in _commands(inbox, engine):
            if isinstance(command, Stop):
                emit(Tokens(engine.close()))
                return
            report = engine.apply(command)
            if report is not None:
                emit(report)
        for report in engine.step():
            emit(report)


def _commands(inbox: SimpleQueue[Command], engine: Engine) -> list[Command]:
    """All commands that are there; waits for one if there is nothing else to do."""
    commands: list[Command] = []
    try:
        if engine.working:
            commands.append(inbox.get_nowait())
        else:
            commands.append(inbox.get(timeout=WAIT_S if engine.scheduler.busy else None))
        while True:
            commands.append(inbox.get_nowait())
    except Empty:
        return commands


def _tokens(event: TokenEvent | None) -> Tokens | None:
    return Tokens([event]) if event else None

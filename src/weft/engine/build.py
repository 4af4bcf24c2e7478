"""Puts an engine together from its arguments."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from weft.core.config import EngineArgs
from weft.core.errors import ConfigError
from weft.core.stages import Stages
from weft.core.stats import EngineInfo
from weft.engine.adapters import Adapters
from weft.engine.engine import Engine
from weft.engine.host import Arena, HostTier, default_bytes, pinned_arena
from weft.engine.images import ImageStore, default_folder, fingerprint
from weft.engine.loop import Loop
from weft.engine.residency import Residency
from weft.grammar.grammars import Grammars
from weft.models.config import resolve_model
from weft.schedule.cache import Cache
from weft.schedule.limits import SchedulerLimits
from weft.schedule.policy import find_policy
from weft.schedule.scheduler import Scheduler
from weft.schedule.slots import AdapterSlots
from weft.text import Tokenizer, load_tokenizer
from weft.worker.build import build_worker
from weft.worker.inputs import RowState
from weft.worker.protocol import WorkerFacts
from weft.worker.worker import DeviceWorker


def build_engine(args: EngineArgs, wake: Callable[[], None] = lambda: None) -> Engine:
    """Start an engine. `wake` is called, on other threads, when there is something to apply while
    no step runs. Raises ConfigError if it can't start like this."""
    if args.scheduler.max_num_batched_tokens < args.scheduler.max_num_seqs:
        raise ConfigError(
            f"--max-num-batched-tokens {args.scheduler.max_num_batched_tokens} must be at "
            f"least --max-num-seqs {args.scheduler.max_num_seqs}",
            "max_num_batched_tokens",
        )
    policy = find_policy(args.lora.eviction_policy)
    stages = Stages()
    worker = build_worker(args, stages)
    facts = worker.facts
    with ThreadPoolExecutor(1, thread_name_prefix="weft-start") as beside:
        # It takes a second or two of the driver's time.
        host = beside.submit(_host_memory, args.lora.adapter_host_memory, facts.device)
        worker.compile()
    stages.end("compile")
    if worker.capture():
        stages.end("capture")
    cache = Cache(
        facts.num_blocks,
        args.cache.block_size,
        share_prefixes=args.cache.enable_prefix_caching,
    )
    slots = AdapterSlots(facts.adapter_elements, facts.num_slots, policy)
    scheduler = Scheduler(_limits(args, facts), cache, slots, args.scheduler.tenant_weights)
    residency = Residency(
        slots,
        worker.pool,
        worker.packer,
        HostTier(*host.result(), policy),
        _images(args, worker),
        worker.move,
        wake,
        checker=worker.self_check,
    )
    rows = RowState(
        args.scheduler.max_num_seqs,
        facts.max_model_len,
        args.cache.block_size,
        facts.vocab_size,
    )
    grammars = Grammars(lambda: _tokenizer(args), facts.vocab_size, facts.eos_token_ids, wake)
    adapters = Adapters(residency, scheduler.uses_adapter)
    overlap = args.scheduler.overlap
    loop = Loop(scheduler, residency, rows, worker, grammars.poll, adapters.poll, overlap)
    info = _info(args, facts, stages)
    return Engine(info, scheduler, cache, residency, adapters, loop, grammars, worker)


def _limits(args: EngineArgs, facts: WorkerFacts) -> SchedulerLimits:
    return SchedulerLimits(
        max_num_seqs=args.scheduler.max_num_seqs,
        max_num_batched_tokens=args.scheduler.max_num_batched_tokens,
        max_model_len=facts.max_model_len,
        max_loras=args.lora.max_loras,
        max_adapter_wait=args.lora.max_adapter_wait,
        vocab_size=facts.vocab_size,
        eos_token_ids=frozenset(facts.eos_token_ids),
    )


def _info(args: EngineArgs, facts: WorkerFacts, stages: Stages) -> EngineInfo:
    return EngineInfo(
        model=args.model.model,
        architecture=facts.architecture,
        dtype=facts.dtype,
        device=facts.device,
        max_model_len=facts.max_model_len,
        vocab_size=facts.vocab_size,
        num_blocks=facts.num_blocks,
        block_size=args.cache.block_size,
        max_loras=args.lora.max_loras,
        max_lora_rank=args.lora.max_lora_rank,
        adapter_memory_bytes=facts.adapter_elements * facts.element_bytes,
        num_parameters=facts.num_parameters,
        start_s=dict(stages.seconds),
    )


def _host_memory(asked: int | None, device: str) -> tuple[int, Arena | None]:
    """Bytes for images on the host, and the memory itself if it must be pinned."""
    num_bytes = asked or default_bytes()
    if device == "cpu":
        return num_bytes, None
    try:
        return num_bytes, pinned_arena(num_bytes)
    except (RuntimeError, OSError) as error:
        raise ConfigError(
            f"not enough memory for --adapter-host-memory: {error}", "adapter_host_memory"
        ) from None


def _images(args: EngineArgs, worker: DeviceWorker) -> ImageStore | None:
    lora, model = args.lora, args.model
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
    base = fingerprint(worker.model.table, weights, model.model, limits)
    folder = Path(lora.adapter_cache_dir) if lora.adapter_cache_dir else default_folder()
    return ImageStore(folder.absolute(), base, worker.model.dtype, lora.adapter_cache_bytes)


def _tokenizer(args: EngineArgs) -> Tokenizer | None:
    """The model's tokenizer, for grammars; None if the model has none."""
    try:
        return load_tokenizer(args.model.model, args.model.revision)
    except ConfigError:
        return None

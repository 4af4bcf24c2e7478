"""Puts an engine together from its arguments."""

from __future__ import annotations

from collections.abc import Callable

from weft.core.config import EngineArgs
from weft.core.errors import ConfigError
from weft.core.stages import Stages
from weft.core.stats import EngineInfo
from weft.engine.adapters import Adapters
from weft.engine.engine import Engine
from weft.engine.host import HostTier
from weft.engine.loop import Loop
from weft.engine.meter import Meter
from weft.engine.residency import Residency
from weft.grammar.grammars import Grammars
from weft.schedule.cache import Cache
from weft.schedule.extents import Extents
from weft.schedule.limits import SchedulerLimits
from weft.schedule.policy import find_policy
from weft.schedule.scheduler import Scheduler
from weft.schedule.slots import AdapterSlots
from weft.text import Tokenizer, load_tokenizer
from weft.worker.build import build_worker
from weft.worker.drafting import DraftingRows
from weft.worker.inputs import RowState
from weft.worker.protocol import WorkerFacts


def build_engine(
    args: EngineArgs,
    wake: Callable[[], None] = lambda: None,
    on_lost: Callable[[], None] = lambda: None,
) -> Engine:
    """Start an engine. Raises ConfigError if these arguments don't allow it. Other threads call
    `wake` when an idle engine should run a step, as there are results to apply, and `on_lost` when
    another rank is gone, after which all that is asked of the worker raises EngineDead."""
    policy = find_policy(args.lora.eviction_policy)
    stages = Stages()
    worker = build_worker(args, stages, on_lost)
    facts = worker.facts
    cache = Cache(
        facts.num_blocks,
        args.cache.block_size,
        facts.num_states,
        share_prefixes=args.cache.enable_prefix_caching,
        num_snapshots=facts.num_snapshots,
    )
    slots = AdapterSlots(facts.adapter_elements, facts.num_slots, policy, facts.element_bytes)
    scheduler = Scheduler(_limits(args, facts), cache, slots, args.scheduler.tenant_weights)
    extents = Extents(facts.host_bytes) if facts.host_in_one_piece else None
    host = HostTier(facts.host_bytes, extents, policy)
    residency = Residency(slots, host, worker, wake)
    make_rows = DraftingRows if args.scheduler.speculative == "mtp" else RowState
    rows = make_rows(
        args.scheduler.max_num_seqs, facts.max_model_len, args.cache.block_size, facts.vocab_size
    )
    grammars = Grammars(lambda: _tokenizer(args), facts.vocab_size, facts.eos_token_ids, wake)
    adapters = Adapters(residency, scheduler.uses_adapter)
    overlap = args.scheduler.overlap
    loop = Loop(scheduler, residency, rows, worker, grammars.poll, adapters.poll, overlap)
    if scheduler.pace:
        loop.meter = Meter()
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
        speculative=args.scheduler.speculative,
        max_chunk_delay=_seconds(args.scheduler.max_chunk_delay),
    )


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1000


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
        quantization=args.model.quantization,
        weights=facts.weights,
    )


def _tokenizer(args: EngineArgs) -> Tokenizer | None:
    """The model's tokenizer, for grammars; None if the model has none."""
    try:
        return load_tokenizer(args.model.model, args.model.revision)
    except ConfigError:
        return None

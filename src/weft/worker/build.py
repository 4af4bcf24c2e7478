"""Puts the worker of one device together."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import torch

from weft.core.config import EngineArgs, ModelArgs
from weft.core.errors import AdapterQuarantined, ConfigError, WeftError
from weft.core.stages import Stages
from weft.kernels.attention import KVCache
from weft.kernels.collective import make_ranks
from weft.kernels.collective.base import ALONE, Ranks, Solo
from weft.kernels.collective.group import least
from weft.kernels.lora import AdapterPool, make_backend
from weft.kernels.ops import make_ops
from weft.kernels.quant import rounds_inputs
from weft.models.blueprint import num_parameters
from weft.models.config import load_model_config, resolve_model
from weft.models.decoder import Decoder, allocate_kv_cache
from weft.models.files import sample_hash
from weft.models.loading import LoadedModel, device_of, dtype_of, load_model
from weft.models.mtp import MtpHead, head_config, with_mtp_head
from weft.models.share import share_of
from weft.worker.adapters import AdapterLoader
from weft.worker.drafter import Drafter
from weft.worker.drafting import more_blocks
from weft.worker.execute import StepExecutor
from weft.worker.gathered import OtherShares
from weft.worker.images import ImageStore, default_folder, fingerprint
from weft.worker.memory import (
    CacheSizes,
    HostMemory,
    adapter_bytes,
    allocating,
    cache_bytes,
    context_length,
    count_blocks,
    count_snapshots,
    count_states,
    host_bytes,
    host_memory,
)
from weft.worker.others import NO_OTHERS, OtherRanks
from weft.worker.peers import Peers
from weft.worker.protocol import WorkerFacts
from weft.worker.reading import AdapterReader, Packer
from weft.worker.rehearsal import SLOT, Rehearsal, rehearsed_adapter
from weft.worker.sampler import RecentCopies, Sampler
from weft.worker.selfcheck import TOKENS, Activity, SelfCheck, num_blocks
from weft.worker.starting import BUILT
from weft.worker.worker import DeviceWorker

LOST_S = 1.0
"""How long to wait for the news that a rank is gone after an operation of all ranks failed."""
MAX_RESIDENT = 4096
"""The number of slots: the most adapters on the device. A slot costs some kilobytes of tables."""

LoadModel = Callable[[], LoadedModel]


@dataclass(frozen=True, slots=True)
class DeviceParts:
    """What a device needs to run steps."""

    model: LoadedModel
    pool: AdapterPool
    executor: StepExecutor
    activity: Activity
    self_check: SelfCheck | None
    cache: CacheSizes
    max_model_len: int


def build_worker(
    args: EngineArgs, stages: Stages, on_lost: Callable[[], None] = lambda: None
) -> DeviceWorker:
    """Load the model, allocate all memory and capture steps, on all ranks. Another thread calls
    `on_lost` when a rank is gone. Raises ConfigError, and EngineDead if a rank is gone."""
    if args.model.tensor_parallel_size == 1:
        return _build_alone(args, stages)
    device = check_ranks(args)
    peers = Peers(args, on_lost)
    try:
        width = row_bytes(args.model, device)
        model = loading(args, 0)
        peers.meet()
        stages.end("meet")
        ranks = peers.join(device, lambda: make_ranks(device, width))
        stages.on_end = peers.stage_ended
        stages.end("ranks")
        parts = allocate(args, stages, ranks, model.result)
        host = prepare(args, parts, stages, ranks, peers.host_fd)
        peers.wait()
        stages.end("others")
        peers.stage_ended(BUILT)
        return _assemble(args, parts, _make_reader(args, parts, peers), host, peers)
    except WeftError:
        peers.close()
        raise
    except BaseException as error:
        lost = peers.why_lost(LOST_S) if isinstance(error, Exception) else None
        peers.close()
        if lost is not None:
            raise lost from error
        raise


def _build_alone(args: EngineArgs, stages: Stages) -> DeviceWorker:
    read_compiler(device_of(args.model.device))
    parts = allocate(args, stages, ALONE, partial(_load, args))
    reader = _make_reader(args, parts)

    def read_ahead() -> None:
        reader.read_ahead(args.first_adapters, host_bytes(args.lora.adapter_host_memory))

    try:
        # Not before compilers have run: they are forked, and would keep locks of other threads.
        host = prepare(args, parts, stages, ALONE, compiled=read_ahead)
    except BaseException:
        reader.close()
        raise
    return _assemble(args, parts, reader, host)


def loading(args: EngineArgs, rank: int) -> Future[LoadedModel]:
    """Begin to load a rank's share of the model on a thread, while ranks connect. The future raises
    what `load_model` raises. Until it is done, no other thread may use `transformers`, as two
    threads can't import its modules at once."""

    def load() -> LoadedModel:
        device = device_of(args.model.device, rank)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        if args.num_threads is not None:
            torch.set_num_threads(args.num_threads)
        return _load(args, rank)

    read_compiler(device_of(args.model.device, rank))
    with_one = ThreadPoolExecutor(1, thread_name_prefix="weft-load")
    model = with_one.submit(load)
    with_one.shutdown(wait=False)
    return model


def read_compiler(device: torch.device) -> None:
    """Begin to read the compiler of kernels, if they will be compiled for this device."""
    if device.type == "cuda" and find_spec("triton"):
        from weft.kernels import compiling

        compiling.read_compiler()


def _load(args: EngineArgs, rank: int = 0) -> LoadedModel:
    mtp_head = args.scheduler.speculative == "mtp"
    try:
        return load_model(args.model, rank, args.lora.fully_sharded_loras, mtp_head)
    except RuntimeError as error:
        on_gpu = isinstance(error, torch.OutOfMemoryError)
        if not on_gpu and "DefaultCPUAllocator" not in str(error):  # it has no class of its own
            raise
        model, why = args.model.model, str(error).partition("\n")[0]
        message = f"there is not enough memory for the weights of {model}: {why}"
        advice = "--quantization and --tensor-parallel-size make them smaller; see weft plan"
        raise ConfigError(f"{message} ({advice})", "model") from error


def allocate(args: EngineArgs, stages: Stages, ranks: Ranks, load: LoadModel) -> DeviceParts:
    """Load the model, or a rank's share of it, and allocate the device's memory. All ranks call
    this at the same time. Raises ConfigError."""
    if args.num_threads is not None:
        torch.set_num_threads(args.num_threads)
    model = load()
    _end_stage(stages, "model", model.device)
    pool = _make_pool(args, model, ranks)
    num_rows = args.scheduler.max_num_seqs
    most = model.config.vocab_size + args.lora.max_added_tokens
    with allocating("max_num_seqs"):
        sampler = Sampler(num_rows, most, model.device, RecentCopies(model.device).put)
    cache = _cache_sizes(args, model, ranks)
    capacity = cache.num_blocks * args.cache.block_size
    max_model_len = context_length(args.model.max_model_len, capacity, model.config)
    with allocating("kv_cache_memory"):
        kv = allocate_kv_cache(
            model.config,
            cache.num_blocks,
            args.cache.block_size,
            model.dtype,
            model.device,
            cache.num_states + cache.num_snapshots,
        )
    ops = make_ops("auto", model.device, args.model.deterministic)
    decoder = Decoder(model.config, model.weights, ops, max_model_len, ranks)
    lora = make_backend(_backend_name(args, model.device), pool)
    drafter = _make_drafter(args, model, decoder, cache.num_blocks, max_model_len)
    executor = StepExecutor(decoder, kv, pool, lora, sampler, num_rows, drafter)
    _end_stage(stages, "memory", model.device)
    executor.make_graphs(
        -(-max_model_len // args.cache.block_size), args.scheduler.max_num_batched_tokens
    )
    activity = Activity()
    self_check = _make_check(args, model, activity, ranks) if args.lora.self_check else None
    return DeviceParts(model, pool, executor, activity, self_check, cache, max_model_len)


def prepare(
    args: EngineArgs,
    parts: DeviceParts,
    stages: Stages,
    ranks: Ranks,
    host_fd: int | None = None,
    compiled: Callable[[], None] = lambda: None,
) -> HostMemory:
    """Capture steps, and return the host's memory for adapters, which is the file `host_fd` if
    there are several ranks. All ranks call this at the same time. `compiled` is called once all
    kernels are there. Raises ConfigError."""
    device, asked = parts.model.device, args.lora.adapter_host_memory
    with ThreadPoolExecutor(1, thread_name_prefix="weft-start") as beside, torch.inference_mode():
        # Page-locking takes a second or two of the driver's time.
        pinning = beside.submit(host_memory, asked, device, host_fd)
        if device.type == "cuda":
            _use_first(parts, _rehearsal(args, parts), ranks, stages, compiled)
        else:
            compiled()
    return pinning.result()


def _rehearsal(args: EngineArgs, parts: DeviceParts) -> Rehearsal:
    return Rehearsal(
        num_rows=args.scheduler.max_num_seqs,
        num_tokens=args.scheduler.max_num_batched_tokens,
        max_model_len=parts.max_model_len,
        block_size=args.cache.block_size,
        num_blocks=parts.cache.num_blocks,
        num_states=parts.cache.num_states,
        vocab_size=parts.model.config.vocab_size,
        drafts=parts.model.mtp_head is not None,
    )


def _use_first(
    parts: DeviceParts,
    rehearsal: Rehearsal,
    ranks: Ranks,
    stages: Stages,
    compiled: Callable[[], None],
) -> None:
    """Do all that a GPU does at first uses, before requests wait for it. The same steps are first
    launched so that their kernels are compiled in parallel, and then run."""
    from weft.kernels.compiling import compiling_ahead, tell_of_more  # Triton is for Linux

    pool, executor, self_check = parts.pool, parts.executor, parts.self_check
    pool.install(SLOT, 0, rehearsed_adapter(pool.table))
    with compiling_ahead(ranks.rank, ranks.size):
        executor.launch(rehearsal.steps())
        if self_check is not None:
            with suppress(AdapterQuarantined):  # results are wrong, as nothing is computed yet
                self_check.rehearse()
    tell_of_more()
    stages.end("compile")
    compiled()
    if executor.capture():
        stages.end("capture")
    executor.rehearse(rehearsal.steps())
    if self_check is not None:
        self_check.rehearse()
    pool.clear(SLOT)
    _end_stage(stages, "rehearse", pool.arena.device)


def _assemble(
    args: EngineArgs,
    parts: DeviceParts,
    reader: AdapterReader,
    host: HostMemory,
    others: OtherRanks = NO_OTHERS,
) -> DeviceWorker:
    """The worker, from the parts of the only or the first rank."""
    model, pool = parts.model, parts.pool
    facts = WorkerFacts(
        architecture=model.config.architecture,
        dtype=str(model.dtype).removeprefix("torch."),
        device=str(model.device),
        vocab_size=model.config.vocab_size,
        eos_token_ids=tuple(model.config.eos_token_ids),
        num_parameters=num_parameters(model.shard.whole),
        weights=sample_hash(args.model),
        max_model_len=parts.max_model_len,
        num_blocks=parts.cache.num_blocks,
        num_states=parts.cache.num_states,
        num_snapshots=parts.cache.num_snapshots,
        num_slots=pool.num_slots,
        adapter_elements=pool.arena.numel(),
        element_bytes=pool.element_bytes,
        num_ranks=model.shard.size,
        host_bytes=host.num_bytes,
        host_in_one_piece=host.memory is not None,
        has_checks=parts.self_check is not None,
    )
    adapters = AdapterLoader(pool, reader, host, parts.self_check, others)
    return DeviceWorker(facts, model, parts.executor, adapters, parts.activity, others)


def _make_reader(
    args: EngineArgs, parts: DeviceParts, others: OtherShares | None = None
) -> AdapterReader:
    """`others`: see `Packer`."""
    packer = Packer(parts.model, args.lora, others)
    return AdapterReader(packer, _image_store(args, parts.model, parts.activity))


def check_ranks(args: EngineArgs) -> torch.device:
    """The first rank's device. Raises ConfigError for what would go wrong on any rank, as far as
    that is known before they start."""
    model = args.model
    config = load_model_config(model.model, model.revision)
    if args.scheduler.speculative == "mtp":
        config = with_mtp_head(config)
    share_of(config, model.tensor_parallel_size)
    device_of(model.device, model.tensor_parallel_size - 1)
    return device_of(model.device, 0)


def row_bytes(args: ModelArgs, device: torch.device) -> int:
    """The bytes of one row of hidden states, which the ranks sum."""
    config = load_model_config(args.model, args.revision)
    return config.hidden_size * dtype_of(args.dtype, config, device).itemsize


def _cache_sizes(args: EngineArgs, model: LoadedModel, ranks: Ranks) -> CacheSizes:
    config, dtype, device = model.config, model.dtype, model.device
    num_states = count_states(config, args.scheduler.max_num_seqs)
    left = cache_bytes(args.cache, config, dtype, device, num_states)
    num_snapshots = least(ranks, count_snapshots(args.cache, config, dtype, left))
    num_blocks = count_blocks(args.cache, config, dtype, device, num_states + num_snapshots)
    return CacheSizes(least(ranks, num_blocks), num_states, num_snapshots)


def _make_pool(args: EngineArgs, model: LoadedModel, ranks: Ranks) -> AdapterPool:
    num_bytes = least(ranks, adapter_bytes(args.lora.adapter_memory, model.device))
    num_elements = num_bytes // model.dtype.itemsize
    with allocating("adapter_memory"):
        return AdapterPool(
            model.table,
            num_elements,
            MAX_RESIDENT,
            model.dtype,
            model.device,
            ranks,
            args.model.deterministic,
        )


def _make_drafter(
    args: EngineArgs, model: LoadedModel, decoder: Decoder, num_blocks: int, max_model_len: int
) -> Drafter | None:
    """The Drafter of the model's own multi-token prediction head, if that is served."""
    if model.mtp_head is None:
        return None
    config, size = head_config(model.config), args.cache.block_size
    num_own_blocks = num_blocks + args.scheduler.max_num_seqs * more_blocks(size)
    with allocating("kv_cache_memory"):
        (cache,) = allocate_kv_cache(config, num_own_blocks, size, model.dtype, model.device)
    assert isinstance(cache, KVCache)
    head = MtpHead(decoder, model.mtp_head, make_ops("auto", model.device))
    return Drafter(head, cache, num_blocks, max_model_len)


def _backend_name(args: EngineArgs, device: torch.device) -> str:
    """The LoRA backend's name. Raises ConfigError if --deterministic doesn't allow it."""
    name = args.lora.lora_backend
    if not args.model.deterministic:
        return name
    if name == "auto":
        return "triton" if device.type == "cuda" else "reference"
    if name not in ("triton", "reference"):
        message = f"--deterministic is not served by the LoRA backend {name!r}"
        raise ConfigError(message, "deterministic")
    return name


def _make_check(
    args: EngineArgs, model: LoadedModel, activity: Activity, ranks: Ranks
) -> SelfCheck:
    """A check with the weights of the steps, but with its own copy of all that steps write to. Each
    rank checks by itself, as checks run beside the steps of all ranks."""
    ops, size = make_ops("auto", model.device), args.cache.block_size
    alone = Solo(ranks)
    return SelfCheck(
        Decoder(model.config, model.weights, ops, TOKENS, alone),
        model.table,
        partial(make_backend, _backend_name(args, model.device)),
        allocate_kv_cache(model.config, num_blocks(size), size, model.dtype, model.device, 2),
        size,
        activity.is_recent,
        exact=model.config.moe is None and not rounds_inputs(args.model.quantization),
        ranks=alone,
    )


def _image_store(args: EngineArgs, model: LoadedModel, activity: Activity) -> ImageStore | None:
    lora, base = args.lora, args.model
    if lora.adapter_cache_dir == "none":
        return None
    weights = None
    if base.load_format != "dummy":
        weights = resolve_model(base.model, base.revision)
    # What was accepted under other limits is packed anew.
    limits = (
        f"{lora.max_lora_rank} {lora.max_added_tokens} {lora.conversion_tolerance}"
        f" {base.quantization} {lora.fully_sharded_loras}"
    )
    key = fingerprint(model.shard.whole, weights, base.model, limits)
    folder = Path(lora.adapter_cache_dir) if lora.adapter_cache_dir else default_folder()
    size, num_ranks = lora.adapter_cache_bytes, model.shard.size
    where = folder.absolute()
    return ImageStore(where, key, model.dtype, size, num_ranks, activity.is_recent)


def _end_stage(stages: Stages, name: str, device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    stages.end(name)

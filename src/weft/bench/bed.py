"""The test bed for single kernels: random weights and adapters of some layers of a model, and a
clock for the device.

Shapes: T token rows, I inputs and O outputs of a product.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from weft.bench.engine import preset_folder
from weft.core.config import MAX_RANK
from weft.core.errors import ConfigError
from weft.core.targets import Group, layout_of
from weft.kernels.lora import AdapterPool, LoraBatch, LoraStep, Segment, make_backend
from weft.kernels.lora.reference import ReferenceBackend
from weft.models.blueprint import target_table
from weft.models.config import load_model_config
from weft.models.share import share_of

PRODUCTS = ("qkv", "o", "in", "out", "gate_up", "down")
"""The products of a layer, as the model's table names them. Layers of linear attention have `in`
and `out` in place of the first two."""
NUM_LAYERS = {"cuda": 8, "cpu": 2}
COPY_BYTES = {"cuda": 1 << 30, "cpu": 1 << 26}

Timer = Callable[[Callable[[], object]], float]
"""Measures a call: the median of the seconds that the device takes for it."""


@dataclass(frozen=True, slots=True)
class LayerProduct:
    """One linear layer of each of the bed's layers that have it."""

    name: str
    """What the product is called in tables, such as qkv."""
    groups: tuple[Group, ...]
    weights: tuple[Tensor, ...]
    """One weight (O, I) for each layer."""

    @property
    def shape(self) -> tuple[int, int]:
        """The shape (O, I) of the weights."""
        return self.groups[0].out_features, self.groups[0].in_features


class Bed:
    """Layers of a model's shape; every slot of the pool holds an adapter of all their products.

    Values are such that a product and what an adapter adds to it are of the same size: an error in
    either is seen.
    """

    def __init__(
        self, model: str, device: torch.device, rank: int, num_slots: int, num_gpus: int = 1
    ) -> None:
        """Make random weights and adapters, or the share that one of several GPUs has of them.
        Raises ConfigError if the model lacks a projection, or can't be divided."""
        if rank > MAX_RANK:
            raise ConfigError(f"--rank is at most {MAX_RANK}; got {rank}", "rank")
        self.device, self.rank, self.num_slots = device, rank, num_slots
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        with preset_folder(model) as folder:
            config = share_of(load_model_config(folder), num_gpus)
        num_layers = min(config.num_layers, NUM_LAYERS[device.type])
        table = target_table(replace(config, num_layers=num_layers))
        self.products = self._products(
            [g for g in table.groups if g.kind == "linear" and _product(g) in PRODUCTS]
        )
        adapted = {s.slice for p in self.products for g in p.groups for s in g.slices}
        layout = layout_of(table, tuple(rank * (s.slice in adapted) for s in table.targets))
        size = layout.num_elements
        self.pool = AdapterPool(table, num_slots * size, num_slots, self.dtype, device)
        self.pool.arena.normal_(std=(config.hidden_size * rank) ** -0.25)
        for slot in range(num_slots):
            self.pool.install(slot, slot * size, layout)

    def _products(self, groups: Sequence[Group]) -> tuple[LayerProduct, ...]:
        made = []
        for name in PRODUCTS:
            of = tuple(g for g in groups if _product(g) == name)
            weights = tuple(self.random(g.out_features, g.in_features) for g in of)
            if of:
                made.append(
                    LayerProduct(name, of, tuple(w.mul_(w.shape[1] ** -0.5) for w in weights))
                )
        return tuple(made)

    @property
    def tolerance(self) -> float:
        """The largest deviation that a correct kernel may have.

        All sums are in fp32, and a result is rounded to the dtype at most twice: as the product,
        and after the adapters' part was added. Each rounding is off by half an eps of a magnitude
        that is no larger than the largest one. In fp32 the sums themselves differ: they have some
        thousand terms with errors of 2^-24 each, most of which cancel. A sum that lacks terms is
        off by much more.
        """
        return max(torch.finfo(self.dtype).eps, 2.0**-14)

    def random(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self.dtype, device=self.device).normal_()

    def batch(self, slots: Sequence[int]) -> LoraBatch:
        """A batch whose rows have these slots, which must be in order."""
        slot_T = torch.tensor(slots, dtype=torch.int32, device=self.device)
        segments = tuple(
            Segment(slot, slots.index(slot), slots.index(slot) + slots.count(slot))
            for slot in dict.fromkeys(slots)
        )
        return LoraBatch(slot_T, segments, slot_T, segments)

    def steps(self, backend: str, slots: Sequence[int], num_sets: int) -> list[LoraStep]:
        """LoRA steps whose rows have the same mix of adapters; each step uses other adapters, as
        long as there are any."""
        made, apart = [], max(slots) + 1
        for start in range(0, min(num_sets * apart, self.num_slots - apart + 1), apart):
            kernels = make_backend(backend, self.pool)
            kernels.reserve(len(slots))
            made.append(kernels.begin(self.batch([start + slot for slot in slots])))
        return made

    def added(self, x_TI: Tensor, product: LayerProduct, slots: Sequence[int]) -> Tensor:
        """What the oracle says that adapters add in the first layer: fp32 (T, O), zeros without
        slots."""
        y_TO = torch.zeros(len(x_TI), product.shape[0], device=self.device)
        if slots:
            step = ReferenceBackend(self.pool).begin(self.batch(slots))
            step.linear(y_TO, x_TI, product.groups[0].index)
        return y_TO

    def plain(self, x_TI: Tensor, product: LayerProduct) -> Tensor:
        """The base's product in the first layer as fp32 (T, O)."""
        return x_TI.float() @ product.weights[0].float().t()


def deviation(got_TO: Tensor, want_TO: Tensor) -> float:
    """The largest error as a share of the largest magnitude, and infinity if any value is not a
    number."""
    error = float((got_TO.float() - want_TO).abs().max() / want_TO.abs().max())
    return math.inf if math.isnan(error) else error


# -- devices ---------------------------------------------------------------------------------------


@contextmanager
def on_device() -> Iterator[None]:
    """Turn a lack of device memory into a ConfigError that names what to make smaller."""
    try:
        with torch.inference_mode():
            yield
    except torch.OutOfMemoryError:
        message = "the device has no room for so many adapters: --batch, --rank"
        raise ConfigError(message, "batch") from None


def timer_of(device: torch.device, repeats: int) -> Timer:
    """A timer for the device: it times replays of a CUDA graph, or plain calls on a CPU."""
    return lambda body: (_replay_s if device.type == "cuda" else _call_s)(body, repeats)


def _call_s(body: Callable[[], object], repeats: int) -> float:
    def seconds() -> float:
        started = time.perf_counter()
        body()
        return time.perf_counter() - started

    seconds()
    return statistics.median(seconds() for _ in range(repeats))


def _replay_s(body: Callable[[], object], repeats: int) -> float:
    body()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        body()
    graph.replay()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]  # type: ignore[no-untyped-call]
    events[0].record()
    for event in events[1:]:
        graph.replay()
        event.record()
    torch.cuda.synchronize()
    times = [a.elapsed_time(b) for a, b in itertools.pairwise(events)]
    return float(statistics.median(times)) / 1000


def bandwidth(device: torch.device, timer: Timer) -> float:
    """Bandwidth of the device's memory in bytes per second, by a large copy or by reading,
    whichever is faster."""
    source = torch.ones(COPY_BYTES[device.type] // 4, device=device)
    dest = torch.empty_like(source)
    copied = 2 * source.nbytes / timer(lambda: dest.copy_(source))
    return max(copied, source.nbytes / timer(lambda: source.sum()))


def _product(group: Group) -> str:
    """`qkv` for a group whose weight is "3.qkv"."""
    return group.packed.key.rpartition(".")[2]

"""Time of single kernels: the products of a decoder layer, and what adapters add to them.

- `base`: the base product alone.
- `linear`: base product and adapters' part as a layer of the model calls them: one beside the
  other for few rows, where the backend can.
- `shrink`, `expand`: the two halves of the adapters' part, where they are launches of their own.

On a GPU they are launched in a CUDA graph, over several layers and several sets of adapters in
turn, so that the second-level cache does not hold what a step would read from memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from rich.table import Table

from weft.bench import peers
from weft.bench.bed import (
    Bed,
    LayerProduct,
    Timer,
    bandwidth,
    deviation,
    on_device,
    timer_of,
)
from weft.bench.engine import default_model
from weft.bench.report import COLOURS, Advance, Report, new_figure, new_table, progress, set_counts
from weft.bench.workload import (
    PATTERNS,
    Pattern,
    adapters_in_batch,
    assign,
    most_adapters,
    rng_of,
)
from weft.kernels.attention import make_batch
from weft.kernels.linear import HAS_TRITON, DenseWeight, Weight
from weft.kernels.lora import LoraStep
from weft.kernels.quant import format_named
from weft.models.layers import Linear, StepContext
from weft.models.loading import device_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Kernel = Literal["base", "linear", "shrink", "expand"]

LAYER = "layer"
"""The name under which all products of a layer, one after the other, are reported: the mean over
the layers, where these differ."""
NUM_SETS = {"cuda": 16, "cpu": 1}
"""The most sets of adapters that take turns, by device type."""


@dataclass(frozen=True, slots=True)
class KernelPlan:
    """What to measure. The same seed gives the same adapters in a batch."""

    batches: tuple[int, ...]
    patterns: tuple[Pattern, ...]
    rank: int
    repeats: int
    seed: int
    quantization: str | None = None
    """The format of the base's matrices, one of `weft.kernels.quant` that rounds no inputs."""

    @property
    def num_adapters(self) -> int:
        """The most different adapters that any batch has."""
        return most_adapters(self.patterns, self.batches)


@dataclass(frozen=True, slots=True)
class Timing:
    """One kernel on one product, or on all of a layer."""

    us: float
    num_bytes: int
    """Bytes of weights, of the matrices of the adapters in use and of activations, each counted
    once."""
    deviation: float
    """The largest relative error (`weft.bench.bed.deviation`). For a shrink it is that of the
    expand after it."""

    @property
    def bytes_per_s(self) -> float:
        return 1e6 * self.num_bytes / self.us


@dataclass(frozen=True, slots=True)
class KernelRow:
    """One kernel with one batch."""

    kernel: Kernel
    batch: int
    pattern: Pattern
    num_adapters: int
    """Different ones in the batch."""
    timings: Mapping[str, Timing]
    """The timing of each product, and of the whole layer under `LAYER`."""

    @property
    def deviation(self) -> float:
        return max(timing.deviation for timing in self.timings.values())


def run_kernels(model: str | None, device: str, lora_backend: str, plan: KernelPlan) -> Report:
    """Measure the kernels on a model's shape; `model` None: `default_model`. Raises ConfigError."""
    where = device_of(device)
    name = model or default_model({"device": where.type})
    timer = timer_of(where, plan.repeats)
    with on_device(), progress("Kernels", len(plan.batches) * len(plan.patterns)) as advance:
        bed = Bed(name, where, plan.rank, max(plan.num_adapters, NUM_SETS[where.type]))
        bytes_per_s = bandwidth(where, timer)
        rows = measure_kernels(bed, lora_backend, plan, timer, advance)
    shown_device = torch.cuda.get_device_name(where) if where.type == "cuda" else "CPU"
    dtype = str(bed.dtype).removeprefix("torch.")
    held_in = plan.quantization or dtype
    title = f"Time of kernels: {name}, {held_in}, rank {plan.rank}, {shown_device}"
    config = {
        "model": name,
        "dtype": dtype,
        "lora_backend": lora_backend,
        "bytes_per_s": round(bytes_per_s),
        "tolerance": bed.tolerance,
        **asdict(plan),
    }
    return Report(
        benchmark="kernels",
        title=title,
        config=config,
        results=kernel_results(rows, bytes_per_s),
        shown=kernel_table(rows, bytes_per_s, bed.tolerance),
        plot=lambda: kernel_plot(rows, bytes_per_s, title),
        device=shown_device,
        ok=all(row.deviation <= bed.tolerance for row in rows),
    )


def measure_kernels(
    bed: Bed, backend: str, plan: KernelPlan, timer: Timer, advance: Advance
) -> list[KernelRow]:
    """Measure, and return rows by batch size, then pattern, then kernel."""
    rows: list[KernelRow] = []
    num_sets = NUM_SETS[bed.device.type]
    held = _held(bed, plan.quantization)
    if bed.device.type == "cuda":
        _compile(bed, backend, plan, held)
    for batch in plan.batches:
        for pattern in plan.patterns:
            slots = _slots(plan, batch, pattern)
            work = _KernelWork(bed, held, backend, slots, batch, num_sets)
            for kernel in work.kernels:
                timings = {
                    name: work.time(kernel, products, timer)
                    for name, products in _parts(bed.products).items()
                }
                rows.append(KernelRow(kernel, batch, pattern, work.num_adapters, timings))
            advance()
    return rows


def _slots(plan: KernelPlan, batch: int, pattern: Pattern) -> list[int]:
    """The slots of the rows, in order; there are none for the pattern none."""
    rng = rng_of(plan.seed, batch, PATTERNS.index(pattern))
    indices = assign(pattern, batch, adapters_in_batch(pattern, batch), rng)
    return sorted(index for index in indices if index is not None)


def _parts(products: Sequence[LayerProduct]) -> dict[str, Sequence[LayerProduct]]:
    return {**{product.name: (product,) for product in products}, LAYER: products}


def _num_layers(products: Sequence[LayerProduct]) -> int:
    return max(len(product.groups) for product in products)


_Held = Mapping[str, Sequence[Weight]]
"""The weights of each layer, by product."""


def _held(bed: Bed, quantization: str | None) -> _Held:
    """The bed's matrices in a format, whose values the bed then has, too."""
    if quantization is None:
        return {p.name: [DenseWeight(w) for w in p.weights] for p in bed.products}
    form = format_named(quantization)
    held: dict[str, list[Weight]] = {}
    for product in bed.products:
        held[product.name] = [form.quantize(matrix) for matrix in product.weights]
        for matrix, weight in zip(product.weights, held[product.name], strict=True):
            matrix.copy_(weight.dequantized(matrix.dtype))
    return held


def _compile(bed: Bed, backend: str, plan: KernelPlan, held: _Held) -> None:
    """Compile all kernels that will be called."""
    from weft.kernels.compiling import compiling_ahead

    with compiling_ahead():
        for batch in plan.batches:
            for pattern in {plan.patterns[0], plan.patterns[-1]}:  # without adapters, and with
                slots = _slots(plan, batch, pattern)
                work = _KernelWork(bed, held, backend, slots, batch, num_sets=1)
                for kernel in work.kernels:
                    work.body(kernel, bed.products)()


class _KernelWork:
    """The launches of one batch."""

    def __init__(
        self, bed: Bed, held: _Held, backend: str, slots: list[int], batch: int, num_sets: int
    ) -> None:
        self._bed, self._held, self._slots, self._batch = bed, held, slots, batch
        self.num_adapters = len(set(slots))
        sizes = {product.shape for product in bed.products}
        self._x = {inputs: bed.random(batch, inputs) for _, inputs in sizes}
        self._y = {outputs: bed.random(batch, outputs) for outputs, _ in sizes}
        self._steps: Sequence[LoraStep | None] = [None]
        if slots:
            self._steps = bed.steps(backend, slots, num_sets)

    @property
    def kernels(self) -> tuple[Kernel, ...]:
        if not self._slots:
            return ("base",)
        if not HAS_TRITON:
            return ("linear",)
        from weft.kernels.lora.triton import TritonStep
        from weft.kernels.triton_linear import MOST_ROWS

        if not isinstance(self._steps[0], TritonStep):
            return ("linear",)
        return ("linear", "shrink", "expand") if self._batch > MOST_ROWS else ("linear",)

    def time(self, kernel: Kernel, products: Sequence[LayerProduct], timer: Timer) -> Timing:
        errors = [self._deviation(kernel, product) for product in products]
        seconds = timer(self.body(kernel, products))
        num_layers = _num_layers(products)
        num_bytes = sum(self._bytes(kernel, p) * len(p.groups) for p in products)
        each_us = 1e6 * seconds / (len(self._steps) * num_layers)
        return Timing(each_us, num_bytes // num_layers, max(errors))

    def body(self, kernel: Kernel, products: Sequence[LayerProduct]) -> Callable[[], None]:
        """A function that runs the kernel on each product, in every layer with every set of
        adapters."""
        calls = [
            self._call(kernel, product, layer, step)
            for step in self._steps
            for layer in range(_num_layers(products))
            for product in products
            if layer < len(product.groups)
        ]

        def run() -> None:
            for call in calls:
                call()

        return run

    def _call(
        self, kernel: Kernel, product: LayerProduct, layer: int, step: Any
    ) -> Callable[[], object]:
        outputs, inputs = product.shape
        x_TI, y_TO = self._x[inputs], self._y[outputs]
        weight, group = self._held[product.name][layer], product.groups[layer].index
        if kernel == "base":
            return partial(weight.apply, x_TI, None)
        if kernel == "linear":
            return partial(Linear(weight, None, group), x_TI, _context(step))
        if kernel == "shrink":
            return partial(step.shrink, x_TI, group, step.rows)
        return partial(step.expand, y_TO, group, step.rows)

    def _deviation(self, kernel: Kernel, product: LayerProduct) -> float:
        """The largest relative error in the first layer, with the first set of adapters."""
        outputs, inputs = product.shape
        x_TI, y_TO = self._x[inputs], self._y[outputs]
        call = partial(self._call, product=product, layer=0, step=self._steps[0])
        want_TO = self._bed.added(x_TI, product, self._slots)
        if kernel in ("shrink", "expand"):
            y_TO.zero_()  # which a timing adds to
            call("shrink")()
            call("expand")()
            return deviation(y_TO, want_TO)
        got: Any = call(kernel)()
        if kernel == "linear":
            added = 0.0 if got.pending is None else got.pending.add_TO
            got = got.y_TO.float() + added
        return deviation(got, want_TO + self._bed.plain(x_TI, product))

    def _bytes(self, kernel: Kernel, product: LayerProduct) -> int:
        outputs, inputs = product.shape
        ranks = self._bed.rank * len(product.groups[0].slices)
        a, b = self.num_adapters * ranks * inputs, self.num_adapters * self._bed.rank * outputs
        x, y, v = self._batch * inputs, self._batch * outputs, 4 * self._batch * ranks
        size, base = self._bed.dtype.itemsize, self._held[product.name][0].num_bytes
        if kernel == "shrink":
            return size * (a + x) + v
        if kernel == "expand":
            return size * (b + 2 * y) + v
        return base + size * (x + y + a + b)


def _context(step: LoraStep) -> StepContext:
    """A step context in which a layer finds nothing but the adapters."""
    positions_T = torch.zeros(1, dtype=torch.int64)
    return StepContext(positions_T, make_batch([1], [1], [[0]], 1), step)


# -- what is shown ---------------------------------------------------------------------------------


def kernel_results(rows: Sequence[KernelRow], bytes_per_s: float) -> list[dict[str, object]]:
    return [
        {
            "batch": row.batch,
            "pattern": row.pattern,
            "num_adapters": row.num_adapters,
            "kernel": row.kernel,
            "product": product,
            "us": round(timing.us, 3),
            "bytes": timing.num_bytes,
            "bytes_per_s": round(timing.bytes_per_s),
            "floor_us": round(_floor_us(timing, bytes_per_s), 3),
            "deviation": float(f"{timing.deviation:.3g}"),
        }
        for row in rows
        for product, timing in row.timings.items()
    ]


def _floor_us(timing: Timing, bytes_per_s: float) -> float:
    return 1e6 * timing.num_bytes / bytes_per_s


def kernel_table(rows: Sequence[KernelRow], bytes_per_s: float, tolerance: float) -> Table:
    """A table of microseconds by product, and for a whole layer also the time that memory alone
    would take."""
    products = [name for name in rows[0].timings if name != LAYER]
    names = ("batch", "pattern", "adapters", "kernel")
    of_layer = ("layer", "floor", "to floor", "GB/s", "deviation")
    table = new_table("", *names, *products, *of_layer, names=0, dense=True)
    table.columns[1].justify = table.columns[3].justify = "left"
    table.caption_justify = "left"
    table.caption = (
        f"In microseconds. floor: the layer's bytes at {bytes_per_s / 1e9:,.0f} GB/s, which a copy"
        f" reached in this run. deviation: from fp32; rounding explains {tolerance:.1e}."
        f"\n{peers.PUNICA_SGMV}"
    )
    for index, row in enumerate(rows):
        layer = row.timings[LAYER]
        floor = _floor_us(layer, bytes_per_s)
        table.add_row(
            str(row.batch),
            row.pattern,
            str(row.num_adapters),
            row.kernel,
            *(f"{row.timings[name].us:.1f}" for name in products),
            f"{layer.us:.1f}",
            f"{floor:.1f}",
            f"{layer.us / floor:.2f}×",
            f"{layer.bytes_per_s / 1e9:,.0f}",
            f"{row.deviation:.1e}",
            end_section=index + 1 == len(rows) or rows[index + 1].batch != row.batch,
        )
    return table


def kernel_plot(rows: Sequence[KernelRow], bytes_per_s: float, title: str) -> Figure:
    """Plot the time of a layer's products with their adapters over the batch size, beside the
    floor."""
    figure, panels = new_figure(title, 2)
    whole = [row for row in rows if row.kernel in ("base", "linear")]
    for pattern, colour in zip(PATTERNS, COLOURS, strict=False):
        of_pattern = [row for row in whole if row.pattern == pattern]
        if not of_pattern:
            continue
        layers = [row.timings[LAYER] for row in of_pattern]
        times = [layer.us for layer in layers]
        shares = [layer.us / _floor_us(layer, bytes_per_s) for layer in layers]
        for axes, values in zip(panels, (times, shares), strict=True):
            batches = [row.batch for row in of_pattern]
            axes.plot(batches, values, "o-", color=colour, label=pattern, lw=1.8, ms=5)
    batches = sorted({row.batch for row in whole})
    for axes, label in zip(panels, ("us per layer", "time, floor = 1"), strict=True):
        set_counts(axes, batches, "rows")
        axes.set_ylabel(label)
        axes.set_ylim(bottom=0)
    panels[0].legend(title="adapters", frameon=False, fontsize=9)
    return figure

"""`weft tune`: candidates for how kernels are cut, compiled side by side and timed one by one.

For products (`tuned.Cut`), all candidates are tried for each shape and number of rows, then
prefetches of the best. Each is timed alone, and with a different adapter for each row beside it, as
a cut that is fast alone may leave no room for adapters. For kernels of many rows (`tuned.Blocks`),
each field is tried alone, then together the values that were better. The setting in use is always a
candidate, and stays unless another one is clearly better.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import torch
from rich.table import Table
from rich.text import Text
from torch import Tensor
from triton.runtime.errors import OutOfResources

from weft.bench.bed import Bed, LayerProduct, Timer, deviation, on_device, timer_of
from weft.bench.engine import default_model
from weft.bench.report import check_writable, new_console, new_table, progress
from weft.bench.workload import adapters_in_batch
from weft.core.errors import ConfigError
from weft.kernels import tuned
from weft.kernels.compiling import compiling_ahead
from weft.kernels.linear import DenseWeight
from weft.kernels.lora import LoraStep
from weft.kernels.lora.triton import TritonBackend
from weft.kernels.ops import Product
from weft.kernels.triton_base import INTERPRETED, processors
from weft.kernels.triton_linear import Launched, cut_of, launch
from weft.kernels.tuned import Blocks, Cut
from weft.models.loading import device_of

ROWS = tuned.ROWS
FORMS = (
    Cut(64, 1, 5),
    Cut(64, 1, 6),
    Cut(128, 1, 3),
    Cut(128, 1, 4),
    Cut(128, 1, 5),
    Cut(256, 1, 2),
    Cut(256, 1, 3),
    Cut(128, 1, 4, columns=32),
    Cut(256, 1, 3, columns=32),
    Cut(64, 1, 3, columns=128),
    Cut(64, 1, 4, columns=128),
    Cut(64, 1, 5, columns=128),
    Cut(64, 1, 6, columns=128),
    Cut(128, 1, 2, columns=128),
    Cut(128, 1, 3, columns=128),
)
SPLITS = (1, 2, 4)
AHEAD = (0, 8)
"""Prefetch distances that are tried with the best cut."""
PROGRAMS = (0.9, 4.5)
"""The fewest and most programs per processor. With fewer, some processors have nothing to do; with
more, the parts of K get small."""
SHARED_BYTES = 220 << 10
"""The most shared memory that a program may take."""
MANY_ROWS = (256, 1024)
BLOCKS: Mapping[str, tuple[int, ...]] = {
    "columns": (64, 256),
    "expand_programs": (2, 8),
    "expand_warps": (8,),
    "expand_stages": (2, 3),
    "shrink_programs": (1, 4),
    "shrink_warps": (8,),
    "shrink_stages": (2, 4),
}
GAIN = 0.98
"""A candidate must take less than this share of the time of what is in use; a smaller gain is
noise."""

Launch = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Best:
    """The best candidate of those that were tried."""

    name: str
    before_us: float
    us: float
    cut: Cut


def run_tune(
    model: str | None, device: str, num_gpus: int, rank: int, repeats: int, output: Path | None
) -> None:
    """Write the table and show what it is worth, for the shapes that one of `num_gpus` has.

    `model` None means `default_model`, and `output` None the user's own table. Raises ConfigError.
    """
    where = device_of(device)
    if where.type == "cpu" and not INTERPRETED:
        raise ConfigError("weft tune is for the kernels of a GPU; there is none", "device")
    path = output or tuned.user_table(where)
    if path is None:
        raise ConfigError("--output has no default without a home folder", "output")
    known = _open(path, where)
    name = model or default_model({"device": where.type})
    timer = timer_of(where, repeats)
    with on_device():
        num_slots = max(*ROWS, adapters_in_batch("uniform", max(MANY_ROWS)))
        bed = Bed(name, where, rank, num_slots, num_gpus)
        best = tune_products(bed, timer)
        blocks, share = tune_blocks(bed, timer)
    linear = {key: asdict(found.cut) for key, found in best.items()}
    lora = asdict(blocks)
    tuned.write_table(path, tuned.Table(known.device, linear, lora).over(known))
    tuned.forget()
    console = new_console()
    shape = name if num_gpus == 1 else f"{name} over {num_gpus} GPUs"
    console.print(Text(f"Cuts of kernels: {shape}, rank {rank}, {known.device}", "bold"))
    console.print(_shown(best))
    console.print(f"Kernels for many rows take {share:.2f} of their time.", highlight=False)
    console.print(f"Table: {path}", soft_wrap=True, highlight=False)


def _open(path: Path, device: torch.device) -> tuned.Table:
    """Read the table that is there already. Raises ConfigError if the new one can't be written
    there."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--output {path}: {error.strerror}", "output") from None
    check_writable("output", path)
    name = tuned.device_name(device)
    known = tuned.read_table(path) if path.exists() else tuned.Table(name)
    if known.device != name:
        raise ConfigError(f"--output {path} is a table of {known.device}, not {name}", "output")
    return known


# -- products --------------------------------------------------------------------------------------


def tune_products(bed: Bed, timer: Timer) -> dict[tuned.Key, Best]:
    """The best cut of each product that the kernel is for."""
    contests = _contests(bed)
    _run("Products", [(c, candidates(c.key, processors(bed.device))) for c in contests], timer)
    ahead = [(c, [replace(c.ranked[0], ahead=a) for a in AHEAD]) for c in contests]
    _run("Prefetches", ahead, timer)
    return {c.key: c.best for c in contests}


def candidates(key: tuned.Key, num_processors: int) -> list[Cut]:
    """The cuts that are worth a trial."""
    least, most = (share * num_processors for share in PROGRAMS)
    found = []
    for cut in (replace(form, split=split) for form in FORMS for split in SPLITS):
        programs = key.outputs // cut.columns * cut.split
        few, many = cut.split < SPLITS[-1] and programs < least, cut.split > 1 and programs > most
        if cut.fits(*key) and _has_room(cut, key) and not (few or many):
            found.append(cut)
    return found


def _has_room(cut: Cut, key: tuned.Key) -> bool:
    return 2 * cut.stages * cut.step * (cut.columns + key.rows) <= SHARED_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class _CutWeight(DenseWeight):
    """A matrix that says how its products are cut."""

    cut: Cut

    def launch(self, x_TI: Tensor, bias_O: Tensor | None, flags: Tensor | None) -> Launched:
        return launch(x_TI, self.values_OI, bias_O, self.cut, flags)


class _Contest:
    """Times the cuts of one product against each other."""

    def __init__(
        self, bed: Bed, product: LayerProduct, step: LoraStep, x_TI: Tensor, before: Cut
    ) -> None:
        self.key, self.before = tuned.Key(len(x_TI), *product.shape), before
        self._bed, self._product, self._step, self._x_TI = bed, product, step, x_TI
        self._want_TO = bed.plain(self._x_TI, product)
        self._seconds: dict[Cut, float] = {}

    def launches(self, cut: Cut) -> list[Callable[[], Launched | Product | None]]:
        """Launch the product with this cut in all layers: alone, then with adapters beside it."""
        calls: list[Callable[[], Launched | Product | None]] = []
        for weight_OI, group in zip(self._product.weights, self._product.groups, strict=True):
            weight = _CutWeight(weight_OI, cut=cut)
            calls.append(partial(weight.launch, self._x_TI, None, None))
            calls.append(partial(self._step.product, self._x_TI, weight, None, group.index))
        return calls

    def time(self, cut: Cut, timer: Timer) -> None:
        """Time a cut. One that the device has no room for, or whose result is wrong, takes
        infinitely long."""
        launches = self.launches(cut)
        try:
            got = launches[0]()
        except OutOfResources:
            return
        assert got is not None
        if deviation(got.y_TO, self._want_TO) <= self._bed.tolerance:
            seconds = timer(lambda: [call() for call in launches])
            self._seconds[cut] = seconds / len(self._product.weights)

    def untried(self, cuts: Sequence[Cut]) -> list[Cut]:
        return [cut for cut in dict.fromkeys(cuts) if cut not in self._seconds]

    @property
    def ranked(self) -> list[Cut]:
        """The cuts that were timed, the fastest first."""
        return sorted(self._seconds, key=self._seconds.__getitem__)

    @property
    def best(self) -> Best:
        """The cut in use, unless another is clearly better."""
        first, before = self.ranked[0], self.before
        if self._seconds[first] > GAIN * self._seconds[before]:
            first = before
        us, before_us = (1e6 * self._seconds[cut] for cut in (first, before))
        return Best(self._product.name, before_us, us, first)


def _contests(bed: Bed) -> list[_Contest]:
    """One contest for each product that the kernel is for. The cut in use takes part in all of
    them."""
    made: dict[tuned.Key, _Contest] = {}
    for rows in ROWS:
        [step] = bed.steps("triton", range(rows), 1)
        for product in bed.products:
            x_TI = bed.random(rows, product.shape[1])
            before = cut_of(x_TI, product.weights[0])
            if before is not None:
                contest = _Contest(bed, product, step, x_TI, before)
                made.setdefault(contest.key, contest)
    return list(made.values())


def _run(title: str, entries: Sequence[tuple[_Contest, Sequence[Cut]]], timer: Timer) -> None:
    trials = [(c, cut) for c, cuts in entries for cut in c.untried((c.before, *cuts))]
    _compile(call for contest, cut in trials for call in contest.launches(cut)[:2])
    with progress(title, len(trials)) as advance:
        for contest, cut in trials:
            contest.time(cut, timer)
            advance()


def _compile(launches: Iterable[Launch]) -> None:
    if INTERPRETED:
        return
    with compiling_ahead():
        for call in launches:
            call()


# -- kernels for many rows -------------------------------------------------------------------------


def tune_blocks(bed: Bed, timer: Timer) -> tuple[Blocks, float]:
    """The best blocks, and the share of the former time that they take, averaged over products and
    numbers of rows."""
    before = TritonBackend(bed.pool).tuning.blocks
    works = [_ManyRows(bed, product, rows) for rows in MANY_ROWS for product in bed.products]
    alone = [replace(before, **{name: n}) for name, values in BLOCKS.items() for n in values]
    times = _times(works, [before, *alone], timer)
    shares = {blocks: _share(times[blocks], times[before]) for blocks in times}
    together = before
    for blocks in sorted(shares, key=shares.__getitem__, reverse=True):
        if shares[blocks] < GAIN:  # of a field's values the best comes last
            changed = {k: v for k, v in asdict(blocks).items() if v != getattr(before, k)}
            together = replace(together, **changed)
    if together not in shares:
        [seconds] = _times(works, [together], timer).values()
        shares[together] = _share(seconds, times[before])
    best = min(shares, key=shares.__getitem__)
    return (best, shares[best]) if shares[best] < GAIN else (before, 1.0)


def _times(
    works: Sequence[_ManyRows], trials: Sequence[Blocks], timer: Timer
) -> dict[Blocks, list[float]]:
    """The seconds that each piece of work takes."""
    _compile(call for w in works for blocks in trials for call in w.launches(blocks)[:2])
    times: dict[Blocks, list[float]] = {}
    with progress("Many rows", len(trials)) as advance:
        for blocks in trials:
            times[blocks] = [work.time(blocks, timer) for work in works]
            advance()
    return times


def _share(seconds: Sequence[float], before: Sequence[float]) -> float:
    return statistics.mean(t / b for t, b in zip(seconds, before, strict=True))


class _ManyRows:
    """Shrink and expand for one product, with several adapters."""

    def __init__(self, bed: Bed, product: LayerProduct, rows: int) -> None:
        self._bed, self._product = bed, product
        num_adapters = adapters_in_batch("uniform", rows)
        self._slots = sorted(row % num_adapters for row in range(rows))
        self._x_TI = bed.random(rows, product.shape[1])
        self._y_TO = bed.random(rows, product.shape[0])
        self._first_TO: Tensor | None = None

    def launches(self, blocks: Blocks) -> list[Launch]:
        """Launch shrink and expand, layer by layer."""
        tuning = replace(TritonBackend(self._bed.pool).tuning, blocks=blocks)
        backend = TritonBackend(self._bed.pool, tuning)
        backend.reserve(len(self._slots))
        step = backend.begin(self._bed.batch(self._slots))
        found: list[Launch] = []
        for group in self._product.groups:
            found.append(partial(step.shrink, self._x_TI, group.index, step.rows))
            found.append(partial(step.expand, self._y_TO, group.index, step.rows))
        return found

    def time(self, blocks: Blocks, timer: Timer) -> float:
        """Time these blocks. The time is infinite if the device has no room for them, or if the
        result differs from that of the first call in any bit."""
        shrink, expand, *_ = launches = self.launches(blocks)
        self._y_TO.zero_()
        try:
            shrink()
            expand()
        except OutOfResources:
            return math.inf
        if self._first_TO is None:
            self._first_TO = self._y_TO.clone()
        if not torch.equal(self._y_TO, self._first_TO):
            return math.inf
        return timer(lambda: [call() for call in launches])


# -- what is shown ---------------------------------------------------------------------------------


def _shown(best: Mapping[tuned.Key, Best]) -> Table:
    columns = ("rows", "product", "us", "us before", "step", "split", "stages")
    table = new_table("", *columns, "columns", "ahead", names=0)
    table.columns[1].justify = "left"
    table.caption_justify = "left"
    table.caption = "us: the product alone, and once more with an adapter for each row beside it."
    for key, found in sorted(best.items()):
        cut = found.cut
        numbers = (cut.step, cut.split, cut.stages, cut.columns, cut.ahead)
        times = (f"{found.us:.1f}", f"{found.before_us:.1f}")
        table.add_row(str(key.rows), found.name, *times, *map(str, numbers))
    return table

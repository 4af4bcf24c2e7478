"""Measures what a load of an adapter costs: for the request that needs it, and for others."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

import numpy as np
from rich.console import Group
from rich.table import Table

from weft.bench.drive import BENCH, Driver, Job, Timed, driving
from weft.bench.engine import (
    AdapterShape,
    RandomAdapters,
    default_model,
    describe,
    device_name,
    preset_folder,
    subject,
)
from weft.bench.report import COLOURS, Advance, Report, new_figure, new_table, plot_bars, progress
from weft.bench.workload import random_prompts, rng_of
from weft.core.adapters import AdapterRef, AdapterSource
from weft.core.errors import ConfigError
from weft.core.messages import Hold
from weft.worker.images import SUFFIX

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NUM_RESIDENT, NUM_ON_HOST, NUM_REGISTERED = 4, 8, 14
"""How many adapters the device holds, how many the host holds, and how many there are."""
NUM_NEW = 8
"""How many more adapters are registered while a batch runs."""
PROMPT_TOKENS = 128
BATCH, BATCH_TOKENS = 32, 512
"""How many requests run in that batch, and how many tokens each of them answers."""
NUM_PROBES, PROBE_EVERY_S, REGISTER_EVERY_S = 48, 0.05, 0.3
"""How many lone requests run beside that batch, and seconds between them and between
registrations."""

PATIENCE_S = 60.0

Tier = Literal["resident", "host", "image", "folder"]
TIERS: tuple[Tier, ...] = get_args(Tier)
_IN_WORDS: dict[Tier, str] = {
    "resident": "on the device",
    "host": "in host memory",
    "image": "on disk, packed",
    "folder": "on disk, as PEFT wrote it",
}


@dataclass(frozen=True, slots=True)
class ColdPlan:
    """What to measure."""

    repeats: int
    seed: int


@dataclass(frozen=True, slots=True)
class TierRow:
    """Times to the first token of lone requests whose adapter is in one tier. Files are in the page
    cache."""

    tier: Tier
    ttft_ms: list[float]
    """Milliseconds to the first token, for each repeat."""

    @property
    def ms(self) -> float:
        return statistics.median(self.ttft_ms)


@dataclass(frozen=True, slots=True)
class DelayRow:
    """The times between tokens of a running batch while something else goes on."""

    beside: str
    loads: int
    p50_ms: float
    p99_ms: float
    max_ms: float


def run_cold(
    model: str | None, plan: ColdPlan, shape: AdapterShape, options: Mapping[str, object]
) -> Report:
    """Open an engine and measure it; `model` None: `default_model`. Raises ConfigError."""
    name = model or default_model(options)
    with preset_folder(name) as folder, tempfile.TemporaryDirectory(prefix="weft-bench-") as place:
        adapters = RandomAdapters(folder, shape, options)
        size = adapters.num_bytes(shape.rank)
        settings = {
            **options,
            "enable_prefix_caching": False,
            "adapter_memory": NUM_RESIDENT * size,
            "adapter_host_memory": NUM_ON_HOST * size * adapters.num_parts,
        }
        images = Path(place) / "images"
        with driving(folder, **settings, adapter_cache_dir=str(images)) as driver:
            info = driver.engine.info
            ranks = [shape.rank] * (NUM_REGISTERED + NUM_NEW)
            paths = list(adapters.write(Path(place), ranks, info.dtype))
            bench = _ColdRuns(driver, plan, paths, images)
            with progress("Runs", bench.num_runs) as advance:
                tiers, delays = bench.tiers(advance), bench.delays(advance)
    title = f"Adapters that are not there: {subject(name, info, shape)}"
    return Report(
        benchmark="cold",
        title=title,
        config={"model": name, **describe(info, shape), **asdict(plan), "options": settings},
        results={
            "first_token": [_tier_result(row, tiers[0]) for row in tiers],
            "delays": [asdict(row) for row in delays],
        },
        shown=Group(tier_table(tiers), delay_table(delays)),
        plot=lambda: cold_plot(tiers, delays, title),
        device=device_name(info),
    )


class _ColdRuns:
    """The runs of a plan on one engine."""

    def __init__(self, driver: Driver, plan: ColdPlan, paths: Sequence[Path], images: Path) -> None:
        self._driver = driver
        self._plan = plan
        self._images = images
        self._refs = [driver.register(str(path)) for path in paths[:NUM_REGISTERED]]
        self._new = [str(path) for path in paths[NUM_REGISTERED:]]
        vocab_size = driver.engine.info.vocab_size
        count = max(BATCH, NUM_PROBES)
        self._prompts = random_prompts([PROMPT_TOKENS] * count, 0, vocab_size, rng_of(plan.seed))

    @property
    def num_runs(self) -> int:
        return len(TIERS) * self._plan.repeats + 4

    # -- first tokens --------------------------------------------------------------------------

    def tiers(self, advance: Advance) -> list[TierRow]:
        """Measure all tiers. They take turns, so that noise hits all of them alike."""
        rows = [TierRow(tier, []) for tier in TIERS]
        for row in reversed(rows):  # what is compiled at first use is compiled
            self._first_token_ms(row.tier, 0)
        for repeat in range(self._plan.repeats):
            for row in rows:
                row.ttft_ms.append(self._first_token_ms(row.tier, repeat))
                advance()
        return rows

    def _first_token_ms(self, tier: Tier, repeat: int) -> float:
        adapter = self._adapter_in(tier, repeat)
        prompt = self._prompts[repeat % len(self._prompts)]
        [timed] = self._driver.run([Job(prompt, 1, adapter)])
        return 1000 * timed.first_s

    def _adapter_in(self, tier: Tier, turn: int) -> AdapterRef:
        """An adapter that is in this tier now. Raises ConfigError if there is none."""
        stats = self._driver.engine.stats()
        resident, host = set(stats.resident_adapters), set(stats.host_adapters)
        self._wait_for_images()
        found = [
            ref
            for ref in self._refs
            if (ref.digest in resident) == (tier == "resident")
            and (tier == "resident" or (ref.digest in host) == (tier == "host"))
        ]
        if not found:
            raise ConfigError(f"no adapter is {_IN_WORDS[tier]} just now", "adapter_memory")
        chosen = found[turn % len(found)]
        if tier == "folder":
            for path in self._images_of(chosen):
                path.unlink()
        return chosen

    def _wait_for_images(self) -> None:
        """Wait until every adapter that was loaded from a folder has been written to disk as an
        image."""
        until = time.perf_counter() + PATIENCE_S
        while not all(map(self._images_of, self._refs)):
            if time.perf_counter() > until:
                message = f"images of adapters can't be written to {self._images}"
                raise ConfigError(message, "adapter_cache_dir")
            time.sleep(0.001)

    def _images_of(self, ref: AdapterRef) -> list[Path]:
        return list(self._images.glob(f"{ref.digest}*{SUFFIX}"))

    # -- others --------------------------------------------------------------------------------

    def delays(self, advance: Advance) -> list[DelayRow]:
        """Measure a batch on two adapters, alone and beside other work."""
        first, second, *others = self._refs
        runs: list[tuple[str, Iterator[AdapterRef], Callable[[float], None]]] = [
            ("nothing", iter(()), _nothing),
            ("requests for adapters on the device", cycle([first, second]), _nothing),
            ("requests that load an adapter", cycle(others), _nothing),
            ("registrations", iter(()), self._registering()),
        ]
        rows = []
        for beside, adapters, on_step in runs:
            before = self._driver.engine.stats().adapter_loads
            timed = self._driver.run(self._jobs(first, second, adapters), on_step=on_step)
            loads = self._driver.engine.stats().adapter_loads - before
            rows.append(_delay_row(beside, loads, timed[:BATCH]))
            advance()
        return rows

    def _jobs(
        self, first: AdapterRef, second: AdapterRef, adapters: Iterator[AdapterRef]
    ) -> list[Job]:
        batch = [Job(self._prompts[i], BATCH_TOKENS, (first, second)[i % 2]) for i in range(BATCH)]
        probes = [
            Job(self._prompts[i], 1, adapter, (i + 1) * PROBE_EVERY_S)
            for i, adapter in zip(range(NUM_PROBES), adapters, strict=False)
        ]
        return batch + probes

    def _registering(self) -> Callable[[float], None]:
        """Register new adapters at a steady pace while the batch runs."""
        coming = iter(self._new)
        due_s = REGISTER_EVERY_S

        def on_step(now: float) -> None:
            nonlocal due_s
            if now >= due_s and (path := next(coming, None)) is not None:
                self._driver.engine.apply(Hold(-1, AdapterSource(path), BENCH))
                due_s += REGISTER_EVERY_S

        return on_step


def _nothing(_: float) -> None:
    pass


def _delay_row(beside: str, loads: int, batch: Sequence[Timed]) -> DelayRow:
    """The times between tokens from when all requests of the batch have begun."""
    begun = max(timed.token_s[0] for timed in batch)
    gaps = [
        gap
        for timed in batch
        for at, gap in zip(timed.token_s, timed.gaps_s, strict=False)
        if at >= begun
    ]
    p50, p99, most = np.percentile(np.array(gaps) * 1000, (50, 99, 100))
    return DelayRow(beside, loads, *(round(float(ms), 4) for ms in (p50, p99, most)))


# -- what is shown ---------------------------------------------------------------------------------


def _tier_result(row: TierRow, resident: TierRow) -> dict[str, object]:
    return {
        "adapter": row.tier,
        "ttft_ms": round(row.ms, 3),
        "more_ms": round(row.ms - resident.ms, 3),
        "repeats_ms": [round(ms, 3) for ms in row.ttft_ms],
    }


def tier_table(rows: Sequence[TierRow]) -> Table:
    table = new_table("", "adapter", "first token, ms", "later by")
    for row in rows:
        more = f"{row.ms - rows[0].ms:+.2f}" if row is not rows[0] else ""
        table.add_row(_IN_WORDS[row.tier], f"{row.ms:.2f}", more)
    return table


def delay_table(rows: Sequence[DelayRow]) -> Table:
    table = new_table("", "beside a batch of " + str(BATCH), "loads", "ms/token p50", "p99", "max")
    table.add_column("p99 later by", justify="right")
    for row in rows:
        more = f"{row.p99_ms - rows[0].p99_ms:+.2f}" if row is not rows[0] else ""
        figures = (row.p50_ms, row.p99_ms, row.max_ms)
        table.add_row(row.beside, str(row.loads), *(f"{ms:.2f}" for ms in figures), more)
    return table


def cold_plot(tiers: Sequence[TierRow], delays: Sequence[DelayRow], title: str) -> Figure:
    figure, [left, right] = new_figure(title, 2)
    colours = COLOURS[1 : 1 + len(tiers)]
    names, times = [_IN_WORDS[tier.tier] for tier in tiers], [tier.ms for tier in tiers]
    plot_bars(left, names, times, "ms to the first token", colours=colours)
    left.set_title("a lone request, by where its adapter is", loc="left", fontsize=10)
    words = [row.beside.replace(" for ", "\nfor ").replace(" that ", "\nthat ") for row in delays]
    delayed = [row.p99_ms for row in delays]
    plot_bars(right, words, delayed, "ms between tokens, p99", digits=2)
    right.set_title(f"a batch of {BATCH}, by what goes on beside it", loc="left", fontsize=10)
    return figure

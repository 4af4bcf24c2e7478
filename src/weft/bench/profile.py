"""What the device does in decode steps: how long it runs no kernel, and what its kernels take.

Kernels may overlap: one that is launched early waits for the one ahead. So the time of a kernel is
what it adds to those that began before it:

    A  |-----------|                  A takes 12
    B        |---------|              B takes 4
    C                     |-----|     C takes 6; between B and C the device is idle

The times of all kernels add up to the time in which at least one of them runs.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from rich.console import Group
from rich.table import Table
from rich.text import Text

from weft.bench.decode import PROMPT_TOKENS, limits_of
from weft.bench.drive import Driver, Job, driving
from weft.bench.engine import (
    AdapterShape,
    RandomAdapters,
    default_model,
    describe,
    device_name,
    on_gpu,
    preset_folder,
    subject,
)
from weft.bench.report import (
    COLOURS,
    FAINT,
    INK,
    Report,
    check_writable,
    new_figure,
    new_table,
    progress,
)
from weft.bench.workload import (
    PATTERNS,
    Pattern,
    adapters_in_batch,
    assign,
    most_adapters,
    random_prompts,
    rng_of,
)
from weft.core.adapters import AdapterRef
from weft.core.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from torch.profiler import profile

BEFORE = 24
"""Steps before the measurement: until all requests decode, and some more."""
STEPS = 64
"""Steps that are measured, first as they are, then under the profiler."""
SHOWN = 10
"""How many kernels are shown, the costliest first."""
NAME_WIDTH, LABEL_WIDTH = 60, 28
"""How many letters of a kernel's name are shown in the table and in the plot."""
FEWEST = 8
"""The fewest kernels that a step can have. When fewer are seen, the profiler does not see into
graphs."""


class Span(NamedTuple):
    """One run of a kernel, in microseconds."""

    name: str
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class ProfiledKernel:
    """All runs of one kernel."""

    name: str
    per_step: float
    """Launches in a step."""
    us: float
    """Microseconds of one launch, on average."""
    share: float
    """Share of the time of all steps."""


@dataclass(frozen=True, slots=True)
class ProfileRow:
    """The steps of one pattern."""

    pattern: Pattern
    num_adapters: int
    ms_unprofiled: float
    """Milliseconds of a step without the profiler."""
    ms: float
    """Milliseconds of a step under the profiler, from its first kernel to the end of its last."""
    idle_share: float
    """Share of the time under the profiler in which no kernel runs."""
    kernels_per_step: float
    lora_ms: float | None
    """How much longer a step's kernels take than without adapters, in ms, where that was measured
    too."""
    kernels: tuple[ProfiledKernel, ...]

    @property
    def busy_ms(self) -> float:
        return self.ms * (1 - self.idle_share)


@dataclass(frozen=True, slots=True)
class ProfilePlan:
    """What to look at. The same seed gives the same prompts and adapters."""

    batch: int
    patterns: tuple[Pattern, ...]
    seed: int

    @property
    def num_adapters(self) -> int:
        return most_adapters(self.patterns, [self.batch])


def run_profile(
    model: str | None,
    plan: ProfilePlan,
    shape: AdapterShape,
    options: Mapping[str, object],
    trace: Path | None,
) -> Report:
    """Run the patterns one after the other; `model` None means `default_model`.

    The last pattern's trace is written to `trace`, as Chrome's tracing reads it. Raises ConfigError
    without a GPU.
    """
    if not on_gpu(options):
        raise ConfigError("weft bench profile needs a GPU: it measures its kernels", "device")
    check_writable("trace", trace)
    name = model or default_model(options)
    with preset_folder(name) as folder:
        adapters = RandomAdapters(folder, shape, options)
        settings: dict[str, Any] = {
            "adapter_memory": max(plan.num_adapters, 1) * adapters.num_bytes(shape.rank),
            **{key: value for key, value in options.items() if value is not None},
            **limits_of(plan.batch, plan.num_adapters),
            "adapter_cache_dir": "none",
        }
        with _profiler():  # before graphs are captured, or it would not see into them
            torch.zeros(1, device="cuda")
        with (
            driving(folder, **settings) as driver,
            progress("Patterns", len(plan.patterns)) as advance,
        ):
            info = driver.engine.info
            images = adapters.images([shape.rank] * plan.num_adapters, driver.engine)
            refs = [driver.publish(image) for image in images]
            rows: list[ProfileRow] = []
            for pattern in plan.patterns:
                rows.append(_measure(driver, plan, pattern, refs, trace))
                advance()
    rows = with_lora_part(rows)
    title = f"Kernels of decode steps of {plan.batch}: {subject(name, info, shape)}"
    config = {"model": name, **describe(info, shape), **asdict(plan), "options": settings}
    return Report(
        benchmark="profile",
        title=title,
        config=config,
        results=[asdict(row) for row in rows],
        shown=Group(profile_table(rows), *(kernel_table(row) for row in rows)),
        plot=lambda: profile_plot(rows, title),
        device=device_name(info),
    )


def _profiler() -> profile:
    from torch.profiler import ProfilerActivity, profile

    return profile(activities=[ProfilerActivity.CUDA], acc_events=True)


def _measure(
    driver: Driver,
    plan: ProfilePlan,
    pattern: Pattern,
    adapters: Sequence[AdapterRef],
    trace: Path | None,
) -> ProfileRow:
    vocab_size = driver.engine.info.vocab_size
    prompts = random_prompts([PROMPT_TOKENS] * plan.batch, 0, vocab_size, rng_of(plan.seed, 0))
    rng = rng_of(plan.seed, 1, PATTERNS.index(pattern))
    chosen = assign(pattern, plan.batch, adapters_in_batch(pattern, plan.batch), rng)
    jobs = [
        Job(prompt, BEFORE + 3 * STEPS, None if i is None else adapters[i])
        for prompt, i in zip(prompts, chosen, strict=True)
    ]
    driver.run([replace(job, num_tokens=2) for job in jobs])  # so that adapters are there
    watch = _Watch(_profiler())
    driver.run(jobs, on_step=watch)
    if trace is not None:
        watch.profiler.export_chrome_trace(str(trace))
    num_adapters = len(set(chosen) - {None})
    return profile_row(pattern, num_adapters, watch.unprofiled_ms, watch.kernels(), STEPS)


class _Watch:
    """Turns the profiler on and off. It is called before each step.

    It lets BEFORE steps pass, then measures STEPS without the profiler and STEPS with it. At each
    border it waits for what was launched, so that steps are whole.
    """

    def __init__(self, profiler: profile) -> None:
        self.profiler = profiler
        self.unprofiled_ms = 0.0
        self._calls = 0
        self._since = 0.0

    def __call__(self, _: float) -> None:
        self._calls += 1
        if self._calls == BEFORE:
            torch.cuda.synchronize()
            self._since = time.perf_counter()
        elif self._calls == BEFORE + STEPS:
            torch.cuda.synchronize()
            self.unprofiled_ms = 1e3 * (time.perf_counter() - self._since) / STEPS
            self.profiler.start()
        elif self._calls == BEFORE + 2 * STEPS:
            torch.cuda.synchronize()
            self.profiler.stop()

    def kernels(self) -> list[Span]:
        return [
            Span(event.name, event.time_range.start, event.time_range.end)
            for event in self.profiler.events() or ()  # type: ignore[no-untyped-call]
            if event.device_type.name == "CUDA" and not event.name.startswith(("Memcpy", "Memset"))
        ]


def profile_row(
    pattern: Pattern,
    num_adapters: int,
    ms_unprofiled: float,
    spans: Sequence[Span],
    num_steps: int,
) -> ProfileRow:
    """Sum up the kernels of `num_steps` steps. Raises ConfigError if they are too few to be all
    that ran."""
    if len(spans) < FEWEST * num_steps:
        message = f"in {num_steps} steps the profiler saw {len(spans)} kernels, and none of graphs"
        raise ConfigError(message)
    launches = Counter(span.name for span in spans)
    taken = dict.fromkeys(launches, 0.0)
    first = done = min(span.start for span in spans)
    for name, start, end in sorted(spans, key=lambda span: span.start):
        taken[name] += max(0.0, end - max(start, done))
        done = max(done, end)
    whole = done - first
    costliest = sorted(taken.items(), key=lambda of: -of[1])[:SHOWN]
    return ProfileRow(
        pattern=pattern,
        num_adapters=num_adapters,
        ms_unprofiled=ms_unprofiled,
        ms=whole / num_steps / 1e3,
        idle_share=1 - sum(taken.values()) / whole,
        kernels_per_step=len(spans) / num_steps,
        lora_ms=None,
        kernels=tuple(
            ProfiledKernel(name, launches[name] / num_steps, us / launches[name], us / whole)
            for name, us in costliest
        ),
    )


def with_lora_part(rows: Sequence[ProfileRow]) -> list[ProfileRow]:
    """The rows with what adapters add to the kernels' time, if the pattern none is among them."""
    base = next((row.busy_ms for row in rows if row.pattern == "none"), None)
    if base is None:
        return list(rows)
    return [replace(row, lora_ms=row.busy_ms - base) for row in rows]


# -- what is shown ---------------------------------------------------------------------------------


def profile_table(rows: Sequence[ProfileRow]) -> Table:
    columns = ("adapters", "ms per step", "without profiler", "idle", "kernels per step")
    table = new_table("", "pattern", *columns, "LoRA ms", "LoRA share")
    for row in rows:
        lora = ("", "")
        if row.lora_ms is not None:
            lora = (f"{row.lora_ms:.2f}", f"{row.lora_ms / row.ms:.1%}")
        table.add_row(
            row.pattern,
            str(row.num_adapters),
            f"{row.ms:.3f}",
            f"{row.ms_unprofiled:.3f}",
            f"{row.idle_share:.1%}",
            f"{row.kernels_per_step:.1f}",
            *lora,
        )
    return table


def kernel_table(row: ProfileRow) -> Table:
    table = new_table(f"{row.pattern}: the costliest kernels", "kernel", "per step", "us", "share")
    for kernel in row.kernels:
        figures = (f"{kernel.per_step:.1f}", f"{kernel.us:.2f}", f"{kernel.share:.1%}")
        table.add_row(Text(_short(kernel.name, NAME_WIDTH)), *figures)
    return table


_PLAIN = {"other kernels": FAINT, "idle": "#ffffff"}
"""Parts of a bar that are no kernel, with their colours."""


def profile_plot(rows: Sequence[ProfileRow], title: str) -> Figure:
    """Plot a bar for each pattern: its costliest kernels, the others, and idle time."""
    figure, [axes] = new_figure(title, 1)
    names = list(dict.fromkeys(k.name for row in rows for k in row.kernels[: len(COLOURS) - 1]))
    patterns = [row.pattern for row in rows]
    ends = [0.0] * len(rows)
    for number, name in enumerate([*names, *_PLAIN]):
        shares = [_share(row, name, names) for row in rows]
        widths = [share * row.ms for share, row in zip(shares, rows, strict=True)]
        colour = _PLAIN.get(name, COLOURS[number % len(COLOURS)])
        label = _short(name.lstrip("_"), LABEL_WIDTH)  # with an underscore it would not be shown
        axes.barh(patterns, widths, left=ends, color=colour, edgecolor=INK, lw=0.4, label=label)
        ends = [end + width for end, width in zip(ends, widths, strict=True)]
    axes.invert_yaxis()
    axes.set_xlabel("ms per step, under the profiler")
    axes.legend(frameon=False, fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.18), ncols=4)
    return figure


def _short(name: str, width: int) -> str:
    return name if len(name) <= width else name[: width - 1] + "…"


def _share(row: ProfileRow, name: str, names: Sequence[str]) -> float:
    if name == "idle":
        return row.idle_share
    known = {kernel.name: kernel.share for kernel in row.kernels if kernel.name in names}
    return known.get(name, 0.0) if name in names else 1 - row.idle_share - sum(known.values())

"""Time of one decode step, by batch size and by how many adapters are in the batch."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

from rich.table import Table

from weft.bench.engine import (
    AdapterShape,
    adapter_name,
    default_model,
    describe,
    device_name,
    open_engine,
    subject,
)
from weft.bench.report import COLOURS, Advance, Report, new_figure, new_table, progress, set_counts
from weft.bench.workload import (
    PATTERNS,
    Pattern,
    adapters_in_batch,
    assign,
    most_adapters,
    random_prompts,
    rng_of,
)
from weft.core.errors import ConfigError
from weft.core.sampling import SamplingParams

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from weft.llm import LLM

PROMPT_TOKENS = 128
SHORT, LONG = 16, 144
"""Output tokens of the two runs that are compared. What both have in common, such as the prompts'
steps and the first decode steps, falls out of their difference."""
PREFILL_STEPS = 8
"""The most steps in which the prompts of a batch are read. It is less than SHORT, so that the whole
batch is in each of the steps that make the difference."""
WARM_UPS = 2


@dataclass(frozen=True, slots=True)
class DecodeRow:
    """One batch size with one pattern."""

    batch: int
    pattern: Pattern
    num_adapters: int
    """How many different adapters are in the batch."""
    step_ms: list[float] = field(default_factory=list)
    """Milliseconds per step, for each repeat."""
    step_host_ms: list[float] = field(default_factory=list)
    """Milliseconds per step in which the engine's thread does not wait for the device."""

    @property
    def ms(self) -> float:
        return statistics.median(self.step_ms)

    @property
    def host_ms(self) -> float:
        return statistics.median(self.step_host_ms)

    @property
    def tokens_per_s(self) -> float:
        return 1000 * self.batch / self.ms


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """What to measure. The same seed gives the same prompts and adapters."""

    batches: tuple[int, ...]
    patterns: tuple[Pattern, ...]
    repeats: int
    seed: int

    @property
    def num_adapters(self) -> int:
        """How many adapters must be published."""
        return most_adapters(self.patterns, self.batches)

    @property
    def num_runs(self) -> int:
        return (WARM_UPS + self.repeats) * len(self.batches) * len(self.patterns)

    def limits(self) -> dict[str, object]:
        """The engine's options that the largest batch needs."""
        return limits_of(max(self.batches), self.num_adapters)


def limits_of(batch: int, num_adapters: int) -> dict[str, object]:
    """The engine's options with which every step is a decode of a whole batch."""
    return {
        "max_loras": max(num_adapters, 1),
        "max_num_seqs": batch,
        "max_num_batched_tokens": max(2048, -(-batch * PROMPT_TOKENS // PREFILL_STEPS)),
        "enable_prefix_caching": False,
    }


def run_decode(
    model: str | None, plan: DecodePlan, shape: AdapterShape, options: Mapping[str, object]
) -> Report:
    """Open an engine and measure it; `model` None: `default_model`.

    Raises ConfigError, AdapterError, InvalidRequest.
    """
    settings = {**options, **plan.limits()}
    name = model or default_model(options)
    with open_engine(name, shape, plan.num_adapters, settings) as llm:
        with progress("Decode steps", plan.num_runs) as advance:
            rows = measure_decode(llm, plan, advance)
        title = f"Time of a decode step: {subject(name, llm.info, shape)}"
        config = {"model": name, **describe(llm.info, shape), **asdict(plan), "options": settings}
        device = device_name(llm.info)
    return Report(
        benchmark="decode",
        title=title,
        config=config,
        results=decode_results(rows),
        shown=decode_table(rows),
        plot=lambda: decode_plot(rows, title),
        device=device,
    )


def measure_decode(llm: LLM, plan: DecodePlan, advance: Advance) -> list[DecodeRow]:
    """Rows by batch size, then pattern. Patterns take turns, so that noise hits all alike.

    Raises ConfigError if memory is too small for a step to be what it should be.
    """
    works = [_DecodeWork.of(llm, plan, b, p) for b in plan.batches for p in plan.patterns]
    for _ in range(WARM_UPS):  # loads the adapters, and compiles what is compiled at first use
        for work in works:
            work.seconds(llm, SHORT)
            advance()
    before = llm.stats()
    for _ in range(plan.repeats):
        for work in works:
            long_s, long_host_s = work.seconds(llm, LONG)
            short_s, short_host_s = work.seconds(llm, SHORT)
            work.row.step_ms.append(1000 * (long_s - short_s) / (LONG - SHORT))
            work.row.step_host_ms.append(1000 * (long_host_s - short_host_s) / (LONG - SHORT))
            advance()
    after = llm.stats()
    if after.adapter_loads != before.adapter_loads:
        raise _too_small("adapter_memory", f"{plan.num_adapters} adapters")
    if after.preemptions != before.preemptions:
        raise _too_small("kv_cache_memory", f"{max(plan.batches)} requests")
    return [work.row for work in works]


def _too_small(param: str, what: str) -> ConfigError:
    flag = "--" + param.replace("_", "-")
    message = f"the device has no room for {what} at once, so that no step can be timed: {flag}"
    return ConfigError(message, param)


@dataclass(frozen=True, slots=True)
class _DecodeWork:
    """The requests of one row."""

    row: DecodeRow
    prompts: list[list[int]]
    adapters: list[str | None]

    @classmethod
    def of(cls, llm: LLM, plan: DecodePlan, batch: int, pattern: Pattern) -> _DecodeWork:
        vocab_size = llm.info.vocab_size
        prompts = random_prompts(
            [PROMPT_TOKENS] * batch, 0, vocab_size, rng_of(plan.seed, 0, batch)
        )
        rng = rng_of(plan.seed, 1, batch, PATTERNS.index(pattern))
        indices = assign(pattern, batch, adapters_in_batch(pattern, batch), rng)
        row = DecodeRow(batch, pattern, len(set(indices) - {None}))
        return cls(row, prompts, [None if i is None else adapter_name(i) for i in indices])

    def seconds(self, llm: LLM, num_tokens: int) -> tuple[float, float]:
        """Run until every request has `num_tokens` tokens. Returns how many seconds that took, and
        for how many of them the engine's thread did not wait for the device."""
        params = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
        host_before_s = llm.stats().host_s
        started = time.perf_counter()
        outputs = llm.generate(self.prompts, params, self.adapters)
        seconds = time.perf_counter() - started
        assert all(len(output.token_ids) == num_tokens for output in outputs)
        return seconds, llm.stats().host_s - host_before_s


# -- what is shown ---------------------------------------------------------------------------------


def decode_results(rows: Sequence[DecodeRow]) -> list[dict[str, object]]:
    return [
        {
            "batch": row.batch,
            "pattern": row.pattern,
            "num_adapters": row.num_adapters,
            "ms_per_step": round(row.ms, 4),
            "host_ms_per_step": round(row.host_ms, 4),
            "tokens_per_s": round(row.tokens_per_s, 1),
            "repeats_ms": [round(ms, 4) for ms in row.step_ms],
        }
        for row in rows
    ]


def decode_table(rows: Sequence[DecodeRow]) -> Table:
    table = new_table(
        "", "batch", "pattern", "adapters", "ms per step", "vs none", "host ms", "tokens/s", names=0
    )
    table.columns[1].justify = "left"
    base = _without_adapters(rows)
    for index, row in enumerate(rows):
        last = index + 1 == len(rows) or rows[index + 1].batch != row.batch
        table.add_row(
            str(row.batch),
            row.pattern,
            str(row.num_adapters),
            f"{row.ms:.3f}",
            f"{row.ms / base[row.batch]:.2f}×" if row.batch in base else "",
            f"{row.host_ms:.3f}",
            f"{row.tokens_per_s:,.0f}",
            end_section=last,
        )
    return table


def decode_plot(rows: Sequence[DecodeRow], title: str) -> Figure:
    """Time of a step against the batch size, and what adapters cost beside none."""
    base = _without_adapters(rows)
    figure, panels = new_figure(title, 2 if base else 1)
    for pattern, colour in zip(PATTERNS, COLOURS, strict=False):
        of_pattern = [row for row in rows if row.pattern == pattern]
        if not of_pattern:
            continue
        batches = [row.batch for row in of_pattern]
        series = [[row.ms for row in of_pattern]]
        if base:
            series.append([row.ms / base[row.batch] for row in of_pattern])
        for axes, values in zip(panels, series, strict=True):
            axes.plot(batches, values, "o-", color=colour, label=pattern, lw=1.8, ms=5)
    for axes, label in zip(
        panels, ("ms per decode step", "time of a step, none = 1"), strict=False
    ):
        set_counts(axes, sorted({row.batch for row in rows}), "requests in the batch")
        axes.set_ylabel(label)
    panels[0].set_ylim(bottom=0)
    panels[0].legend(title="adapters", frameon=False, fontsize=9)
    return figure


def _without_adapters(rows: Sequence[DecodeRow]) -> dict[int, float]:
    """Milliseconds by batch size, for steps without adapters."""
    return {row.batch: row.ms for row in rows if row.pattern == "none"}

"""Tokens per second of a full engine: many requests of mixed lengths, all submitted at once."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
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
from weft.bench.report import COLOURS, Advance, Report, new_figure, new_table, plot_bars, progress
from weft.bench.workload import (
    PATTERNS,
    Lengths,
    Pattern,
    assign,
    check_lengths,
    random_prompts,
    rng_of,
)
from weft.core.sampling import SamplingParams

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from weft.llm import LLM

WARM_UP_REQUESTS, WARM_UP_TOKENS = 32, 8


@dataclass(frozen=True, slots=True)
class ThroughputPlan:
    """What to measure. The same seed gives the same requests; all patterns share their lengths."""

    num_requests: int
    patterns: tuple[Pattern, ...]
    num_adapters: int
    input_len: Lengths
    output_len: Lengths
    seed: int

    @property
    def num_published(self) -> int:
        """How many adapters the patterns need."""
        several = {"uniform", "skewed"} & set(self.patterns)
        return self.num_adapters if several else int("identical" in self.patterns)


@dataclass(frozen=True, slots=True)
class ThroughputRow:
    """The run of all requests with one pattern."""

    pattern: Pattern
    num_requests: int
    num_adapters: int
    """How many different adapters are in use."""
    prompt_tokens: int
    output_tokens: int
    seconds: float
    adapter_loads: int
    """Times an adapter was brought to the device meanwhile."""

    @property
    def output_tokens_per_s(self) -> float:
        return self.output_tokens / self.seconds

    @property
    def requests_per_s(self) -> float:
        return self.num_requests / self.seconds


def run_throughput(
    model: str | None, plan: ThroughputPlan, shape: AdapterShape, options: Mapping[str, object]
) -> Report:
    """Open an engine and measure it; `model` None: `default_model`.

    Raises ConfigError, AdapterError.
    """
    settings = {**options, "enable_prefix_caching": False}
    name = model or default_model(options)
    with open_engine(name, shape, plan.num_published, settings) as llm:
        with progress("Requests", plan.num_requests * len(plan.patterns)) as advance:
            rows = measure_throughput(llm, plan, advance)
        title = f"Throughput: {subject(name, llm.info, shape)}"
        config = {"model": name, **describe(llm.info, shape), **asdict(plan), "options": settings}
        device = device_name(llm.info)
    return Report(
        benchmark="throughput",
        title=title,
        config=config,
        results=throughput_results(rows),
        shown=throughput_table(rows),
        plot=lambda: throughput_plot(rows, title),
        device=device,
    )


def measure_throughput(llm: LLM, plan: ThroughputPlan, advance: Advance) -> list[ThroughputRow]:
    """Measure each pattern. Raises ConfigError if the longest request can't fit into the model's
    context."""
    check_lengths(plan.input_len, plan.output_len, llm.info.max_model_len)
    lengths = plan.input_len.draw(plan.num_requests, rng_of(plan.seed, 0))
    prompts = random_prompts(lengths, 0, llm.info.vocab_size, rng_of(plan.seed, 1))
    outputs = plan.output_len.draw(plan.num_requests, rng_of(plan.seed, 2))
    works = {p: _adapters(plan, p) for p in plan.patterns}
    for adapters in works.values():
        _warm_up(llm, prompts, adapters)
    return [_measure(llm, p, prompts, outputs, works[p], advance) for p in plan.patterns]


def _adapters(plan: ThroughputPlan, pattern: Pattern) -> list[str | None]:
    rng = rng_of(plan.seed, 3, PATTERNS.index(pattern))
    indices = assign(pattern, plan.num_requests, plan.num_adapters, rng)
    return [None if i is None else adapter_name(i) for i in indices]


def _warm_up(llm: LLM, prompts: list[list[int]], adapters: list[str | None]) -> None:
    """Bring each adapter to the device, and let everything compile that is compiled at first
    use."""
    first = {name: i for i, name in reversed(list(enumerate(adapters)))}
    chosen = sorted({*range(min(WARM_UP_REQUESTS, len(prompts))), *first.values()})
    params = SamplingParams(max_tokens=WARM_UP_TOKENS, temperature=0.0, ignore_eos=True)
    llm.generate([prompts[i] for i in chosen], params, [adapters[i] for i in chosen])


def _measure(
    llm: LLM,
    pattern: Pattern,
    prompts: list[list[int]],
    lengths: list[int],
    adapters: list[str | None],
    advance: Advance,
) -> ThroughputRow:
    params = [SamplingParams(max_tokens=n, temperature=0.0, ignore_eos=True) for n in lengths]
    loads = llm.stats().adapter_loads
    started = time.perf_counter()
    outputs = llm.generate(prompts, params, adapters, on_finished=lambda _: advance())
    seconds = time.perf_counter() - started
    assert [len(output.token_ids) for output in outputs] == lengths
    return ThroughputRow(
        pattern=pattern,
        num_requests=len(prompts),
        num_adapters=len(set(adapters) - {None}),
        prompt_tokens=sum(map(len, prompts)),
        output_tokens=sum(lengths),
        seconds=seconds,
        adapter_loads=llm.stats().adapter_loads - loads,
    )


# -- what is shown ---------------------------------------------------------------------------------


def throughput_results(rows: Sequence[ThroughputRow]) -> list[dict[str, object]]:
    return [
        {
            "pattern": row.pattern,
            "num_requests": row.num_requests,
            "num_adapters": row.num_adapters,
            "prompt_tokens": row.prompt_tokens,
            "output_tokens": row.output_tokens,
            "seconds": round(row.seconds, 3),
            "output_tokens_per_s": round(row.output_tokens_per_s, 1),
            "requests_per_s": round(row.requests_per_s, 3),
            "adapter_loads": row.adapter_loads,
        }
        for row in rows
    ]


def throughput_table(rows: Sequence[ThroughputRow]) -> Table:
    table = new_table(
        "", "pattern", "adapters", "loads", "seconds", "requests/s", "output tokens/s"
    )
    for row in rows:
        table.add_row(
            row.pattern,
            str(row.num_adapters),
            str(row.adapter_loads),
            f"{row.seconds:.2f}",
            f"{row.requests_per_s:.2f}",
            f"{row.output_tokens_per_s:,.0f}",
        )
    return table


def throughput_plot(rows: Sequence[ThroughputRow], title: str) -> Figure:
    figure, [axes] = new_figure(title, 1)
    colours = [COLOURS[PATTERNS.index(row.pattern)] for row in rows]
    labels = [f"{row.pattern}\n{_adapters_in_words(row.num_adapters)}" for row in rows]
    speeds = [row.output_tokens_per_s for row in rows]
    plot_bars(axes, labels, speeds, "output tokens per second", colours=colours, digits=0)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    return figure


def _adapters_in_words(count: int) -> str:
    return f"{count} adapter{'' if count == 1 else 's'}"

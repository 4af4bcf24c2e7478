"""How fast prompts are read, alone and beside decodes, and what the prefix cache saves of a long
one."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from rich.table import Table

from weft.bench.drive import Driver, Job, driving
from weft.bench.engine import default_model, device_name, preset_folder
from weft.bench.report import Advance, Report, new_figure, new_table, plot_bars, progress
from weft.bench.workload import random_prompts, rng_of
from weft.core.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WARM_UPS = 2
"""Prompts of each kind that are read before the measurement."""
BLOCK, DECODED = 16, 40
"""Tokens of the prompts and of the answers of requests beside which a prompt is read."""


@dataclass(frozen=True, slots=True)
class PromptsPlan:
    """What to measure. The same seed gives the same prompts."""

    tokens: int
    """Length of the prompts that are read together."""
    together: int
    """How many of these are submitted at once."""
    prefix: int
    """Length of the prompt that is read alone, and then again."""
    beside: int
    """Requests that decode while a prompt is read in one step with them; 0: this is left out."""
    chunk: int
    """Length of that prompt."""
    repeats: int
    seed: int


@dataclass(frozen=True, slots=True)
class PromptsRow:
    """Prompts of one kind, submitted at once."""

    kind: str
    num_prompts: int
    num_tokens: int
    """Tokens of each."""
    num_cached: int
    """How many of these came from the prefix cache."""
    ms: list[float]
    """Milliseconds until the last prompt has its first token, for each repeat; beside decodes,
    those between their tokens in the step that reads the prompt."""
    num_beside: int = 0
    """Requests that decode meanwhile, a token each."""

    @property
    def median_ms(self) -> float:
        return statistics.median(self.ms)

    @property
    def us_per_token(self) -> float:
        """Microseconds for each token that is computed."""
        prompts = self.num_prompts * (self.num_tokens - self.num_cached)
        computed = prompts + self.num_beside
        return 1000 * self.median_ms / computed


def run_prompts(model: str | None, plan: PromptsPlan, options: Mapping[str, object]) -> Report:
    """Open an engine and measure it; `model` None: `default_model`. Raises ConfigError."""
    name = model or default_model(options)
    settings = {
        **options,
        "enable_prefix_caching": True,
        "max_num_seqs": max(plan.together, plan.beside + 1),
    }
    with (
        preset_folder(name) as folder,
        driving(folder, **settings, adapter_cache_dir="none") as driver,
    ):
        info = driver.engine.info
        for field in ("tokens", "prefix", "chunk"):
            if getattr(plan, field) >= info.max_model_len:
                raise ConfigError(
                    f"--{field} {getattr(plan, field)} leaves no room for an answer in a context"
                    f" of {info.max_model_len}",
                    field,
                )
        with progress("Prompts", plan.repeats * (2 if plan.beside else 1)) as advance:
            rows = measure_prompts(driver, plan, advance)
            if plan.beside:
                rows.append(measure_beside(driver, plan, advance))
    title = f"Reading prompts: {name}, {info.dtype}, {device_name(info)}"
    known = {"architecture": info.architecture, "dtype": info.dtype}
    config = {"model": name, **known, **asdict(plan), "options": settings}
    return Report(
        benchmark="prompts",
        title=title,
        config=config,
        results=prompts_results(rows),
        shown=prompts_table(rows),
        plot=lambda: prompts_plot(rows, title),
        device=device_name(info),
    )


def measure_prompts(driver: Driver, plan: PromptsPlan, advance: Advance) -> list[PromptsRow]:
    """Read prompts together, one alone, and that one again, in turns."""
    vocab_size, rng = driver.engine.info.vocab_size, rng_of(plan.seed)
    kinds = (
        ("together", plan.together, plan.tokens),
        ("alone", 1, plan.prefix),
        ("again", 1, plan.prefix),
    )
    found: dict[str, list[tuple[float, int]]] = {kind: [] for kind, *_ in kinds}
    for repeat in range(WARM_UPS + plan.repeats):
        prompts: list[list[int]] = []
        for kind, number, length in kinds:
            if kind != "again":
                prompts = random_prompts([length] * number, 0, vocab_size, rng)
            timed = driver.run([Job(prompt, 1) for prompt in prompts])
            found[kind].append((max(t.first_s for t in timed), timed[0].num_cached))
        if repeat >= WARM_UPS:
            advance()
    return [
        PromptsRow(kind, number, length, measured[-1][1], [1000 * s for s, _ in measured])
        for kind, number, length in kinds
        for measured in [found[kind][WARM_UPS:]]
    ]


def measure_beside(driver: Driver, plan: PromptsPlan, advance: Advance) -> PromptsRow:
    """Read a prompt in one step with decodes."""
    vocab_size, rng = driver.engine.info.vocab_size, rng_of(plan.seed, 1)
    ms: list[float] = []
    due_s = 0.0
    for repeat in range(WARM_UPS + plan.repeats):
        prompts = random_prompts([BLOCK] * plan.beside, 0, vocab_size, rng)
        [chunk] = random_prompts([plan.chunk], 0, vocab_size, rng)
        late = [Job(chunk, 1, due_s=due_s)] if repeat else []
        timed = driver.run([*(Job(prompt, DECODED) for prompt in prompts), *late])[: plan.beside]
        ms.append(1000 * statistics.median(max(t.gaps_s) for t in timed))
        if not repeat:  # when all of them decode
            due_s = max(t.token_s[DECODED // 4] for t in timed)
        if repeat >= WARM_UPS:
            advance()
    return PromptsRow("beside", 1, plan.chunk, 0, ms[WARM_UPS:], plan.beside)


# -- what is shown ---------------------------------------------------------------------------------


def prompts_results(rows: Sequence[PromptsRow]) -> list[dict[str, object]]:
    return [
        {
            "kind": row.kind,
            "prompts": row.num_prompts,
            "tokens": row.num_tokens,
            "cached": row.num_cached,
            "beside": row.num_beside,
            "ms": round(row.median_ms, 3),
            "us_per_token": round(row.us_per_token, 3),
            "repeats_ms": [round(ms, 3) for ms in row.ms],
        }
        for row in rows
    ]


def prompts_table(rows: Sequence[PromptsRow]) -> Table:
    columns = ("prompts", "tokens of each", "of these reused", "decodes beside", "ms")
    table = new_table("", "", *columns, "us per token computed")
    for row in rows:
        table.add_row(
            row.kind,
            str(row.num_prompts),
            f"{row.num_tokens:,}",
            f"{row.num_cached:,}",
            str(row.num_beside or ""),
            f"{row.median_ms:.2f}",
            f"{row.us_per_token:.2f}",
        )
    return table


def prompts_plot(rows: Sequence[PromptsRow], title: str) -> Figure:
    figure, [axes] = new_figure(title, 1)
    labels = [f"{row.num_prompts} of {row.num_tokens:,} tokens, {row.kind}" for row in rows]
    times = [row.median_ms for row in rows]
    plot_bars(axes, labels, times, "ms until the last prompt has its first token")
    return figure

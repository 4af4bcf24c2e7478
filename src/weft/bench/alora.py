"""What activated LoRA saves: several adapters judge one conversation that is in the cache."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

from rich.table import Table

from weft.bench.drive import Driver, Job, driving
from weft.bench.engine import (
    AdapterShape,
    RandomAdapters,
    default_model,
    describe,
    device_name,
    preset_folder,
    subject,
)
from weft.bench.report import Advance, Report, new_figure, new_table, plot_bars, progress
from weft.bench.workload import random_prompts, rng_of
from weft.checkpoint.pack import AdapterImage
from weft.core.adapters import AdapterRef
from weft.core.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

INVOCATION, ANSWER = 8, 16
"""How many tokens activate an adapter, and how many its judgement has."""
KINDS = {"activated": "activated LoRA", "plain": "plain LoRA"}


@dataclass(frozen=True, slots=True)
class AloraPlan:
    """What to measure."""

    conversation: int
    """Length of each conversation, in tokens."""
    adapters: int
    repeats: int
    """How often the measurement is repeated, each time with a new conversation."""
    seed: int


@dataclass(slots=True)
class JudgesRow:
    """The requests of one kind. Each goes to another adapter, over a conversation that the base has
    already read."""

    kind: str
    prompt_tokens: int
    cached_tokens: list[int]
    """Prompt tokens that came from the prefix cache, for each request of all repeats."""
    alone_ms: list[float]
    """Milliseconds to the first token of requests that are sent one after another."""
    together_ms: list[float]
    """Milliseconds until the last of the requests that are sent at once has its first token, for
    each repeat."""

    @property
    def result(self) -> dict[str, object]:
        return {
            "kind": self.kind,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": statistics.median(self.cached_tokens),
            "first_token_ms": round(statistics.median(self.alone_ms), 3),
            "last_of_all_ms": round(statistics.median(self.together_ms), 3),
        }


def run_alora(
    model: str | None, plan: AloraPlan, shape: AdapterShape, options: Mapping[str, object]
) -> Report:
    """Open an engine and measure it; `model` None: `default_model`. Raises ConfigError."""
    name = model or default_model(options)
    with preset_folder(name) as folder:
        adapters = RandomAdapters(folder, shape, options)
        num_images = 2 * plan.adapters
        memory = num_images * adapters.num_bytes(shape.rank)
        settings = {**options, "enable_prefix_caching": True, "adapter_memory": memory}
        with driving(folder, **settings, adapter_cache_dir="none") as driver:
            info = driver.engine.info
            needed = plan.conversation + INVOCATION + ANSWER
            if needed > info.max_model_len:
                raise ConfigError(
                    f"--conversation {plan.conversation} takes {needed} tokens with a judgement,"
                    f" more than the context of {info.max_model_len}",
                    "conversation",
                )
            images = adapters.images([shape.rank] * num_images, driver.engine)
            bench = _AloraRuns(driver, plan)
            for index, image in enumerate(images):
                activated = index < plan.adapters
                bench.add(replace(image, invocation=bench.calls[index]) if activated else image)
            with progress("Conversations", plan.repeats) as advance:
                rows = bench.run(advance)
    title = f"{plan.adapters} adapters judge one conversation: {subject(name, info, shape)}"
    return Report(
        benchmark="alora",
        title=title,
        config={"model": name, **describe(info, shape), **asdict(plan), "options": settings},
        results=[row.result for row in rows],
        shown=judges_table(rows, plan.adapters),
        plot=lambda: judges_plot(rows, title, plan.adapters),
        device=device_name(info),
    )


class _AloraRuns:
    """The runs of a plan on one engine."""

    def __init__(self, driver: Driver, plan: AloraPlan) -> None:
        self._driver = driver
        self._plan = plan
        self._rng = rng_of(plan.seed)
        vocab_size = driver.engine.info.vocab_size
        self._half = vocab_size // 2  # conversations have none of the tokens that activate
        lengths = [INVOCATION] * plan.adapters
        calls = random_prompts(lengths, self._half, vocab_size, self._rng)
        self.calls = [tuple(call) for call in calls]
        self._refs: list[AdapterRef] = []

    def add(self, image: AdapterImage) -> None:
        """Register the activated adapters in the order of `calls`, then as many plain ones."""
        self._refs.append(self._driver.publish(image))

    def run(self, advance: Advance) -> list[JudgesRow]:
        self._measure(self._rows())  # adapters are loaded, and what is compiled at first use
        rows = self._rows()
        for _ in range(self._plan.repeats):
            self._measure(rows)
            advance()
        return rows

    def _rows(self) -> list[JudgesRow]:
        prompt_tokens = self._plan.conversation + INVOCATION
        return [JudgesRow(kind, prompt_tokens, [], [], []) for kind in KINDS]

    def _measure(self, rows: Sequence[JudgesRow]) -> None:
        conversation = self._read()
        for index, row in enumerate(rows):
            for job in self._jobs(index, conversation):
                [timed] = self._driver.run([job])
                row.cached_tokens.append(timed.num_cached)
                row.alone_ms.append(1000 * timed.first_s)
        conversation = self._read()
        for index, row in enumerate(rows):
            judged = self._driver.run(self._jobs(index, conversation))
            row.cached_tokens += [timed.num_cached for timed in judged]
            row.together_ms.append(1000 * max(timed.first_s for timed in judged))

    def _read(self) -> list[int]:
        """Let the base answer in a new conversation, and return that conversation."""
        [conversation] = random_prompts([self._plan.conversation], 0, self._half, self._rng)
        self._driver.run([Job(conversation, 1)])
        return conversation

    def _jobs(self, kind: int, conversation: list[int]) -> list[Job]:
        refs = self._refs[kind * self._plan.adapters :]
        return [
            Job([*conversation, *call], ANSWER, ref)
            for call, ref in zip(self.calls, refs, strict=False)
        ]


# -- what is shown ---------------------------------------------------------------------------------


def judges_table(rows: Sequence[JudgesRow], num_adapters: int) -> Table:
    table = new_table(
        "",
        "adapters",
        "tokens of a prompt",
        "of these reused",
        "first token, ms",
        f"last of {num_adapters} at once, ms",
    )
    for row in rows:
        cached, alone, together = (
            statistics.median(values)
            for values in (row.cached_tokens, row.alone_ms, row.together_ms)
        )
        name = KINDS[row.kind]
        table.add_row(
            name, f"{row.prompt_tokens:,}", f"{cached:,.0f}", f"{alone:.2f}", f"{together:.2f}"
        )
    return table


def judges_plot(rows: Sequence[JudgesRow], title: str, num_adapters: int) -> Figure:
    figure, panels = new_figure(title, 2)
    names = [KINDS[row.kind] for row in rows]
    for axes, what, values in (
        (panels[0], "one after another", [row.alone_ms for row in rows]),
        (panels[1], f"the last of {num_adapters} at once", [row.together_ms for row in rows]),
    ):
        plot_bars(axes, names, list(map(statistics.median, values)), "ms to the first token")
        axes.set_title(what, loc="left", fontsize=10)
    return figure

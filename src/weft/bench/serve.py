"""A load generator: latency and throughput of a server as its clients see them.

Requests of an open loop are sent when they are due, whether or not earlier ones are answered, and
their latency counts from that moment: a server that stalls can't hide it by slowing its clients
down. A request that fails in any way is counted as failed, and its latency is left out.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Group
from rich.table import Table
from rich.text import Text

from weft.bench.client import Endpoint, LoadClient, Outcome
from weft.bench.report import COLOURS, INK, Advance, Report, new_figure, new_table, progress
from weft.bench.workload import Arrival, Choice, Lengths, random_prompts, rng_of
from weft.core.errors import ConfigError
from weft.terminal.plain import plain

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PERCENTILES = (50, 90, 99)
LATENCIES = {
    "ttft_ms": "time to first token",
    "tpot_ms": "time per output token",
    "itl_ms": "between tokens",
    "e2e_ms": "whole answer",
}
SHOWN_MODELS = 10
WORDS = ("time", "year", "people", "way", "day", "thing", "man", "world", "life", "hand")
TOKEN_IDS = (3, 256)
"""Prompts are made from these token ids, which every known vocabulary has and none uses as
special."""


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """What to ask which models, and when. The same seed gives the same requests."""

    endpoint: Endpoint
    models: tuple[str, ...]
    choice: Choice
    arrival: Arrival
    num_requests: int
    input_len: Lengths
    output_len: Lengths
    ignore_eos: bool
    seed: int
    timeout_s: float
    """Seconds for the whole run. Requests that are still open then have failed."""

    def model_of_each(self) -> list[str]:
        drawn = self.choice.draw(self.num_requests, len(self.models), rng_of(self.seed, 0))
        return [self.models[i] for i in drawn]

    def bodies(self) -> list[dict[str, object]]:
        """The body of each request. Prompts are token ids, or as many words for chats."""
        lengths = self.input_len.draw(self.num_requests, rng_of(self.seed, 1))
        outputs = self.output_len.draw(self.num_requests, rng_of(self.seed, 2))
        prompts = random_prompts(lengths, *TOKEN_IDS, rng_of(self.seed, 3))
        each = zip(self.model_of_each(), prompts, outputs, strict=True)
        return [self._body(*request) for request in each]

    def _body(self, model: str, prompt: list[int], max_tokens: int) -> dict[str, object]:
        body: dict[str, object] = {
            "model": model,
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.ignore_eos:
            body["ignore_eos"] = True
        if self.endpoint == "chat":
            text = " ".join(WORDS[i % len(WORDS)] for i in prompt)
            return body | {"messages": [{"role": "user", "content": text}]}
        return body | {"prompt": prompt}


def run_serve(url: str, api_key: str | None, plan: LoadPlan, include_base: bool) -> Report:
    """Run the load against the server. With no `plan.models`, all its adapters are asked. Raises
    ConfigError."""
    with progress("Requests", plan.num_requests) as advance:
        plan, outcomes, seconds = asyncio.run(_load(url, api_key, plan, include_base, advance))
    summary = summarize(outcomes, seconds)
    title = f"{plan.num_requests} requests to {len(plan.models)} models at {url}"
    return Report(
        benchmark="serve",
        title=title,
        config={"url": url, **asdict(plan)},
        results=summary,
        shown=load_shown(outcomes, summary),
        plot=lambda: load_plot(outcomes, title),
        ok=summary["succeeded"] == plan.num_requests,
    )


async def _load(
    url: str, api_key: str | None, plan: LoadPlan, include_base: bool, advance: Advance
) -> tuple[LoadPlan, list[Outcome], float]:
    async with LoadClient(url, api_key) as client:
        models = await choose_models(client, plan.models, include_base)
        plan = replace(plan, models=tuple(models))
        return plan, *await run_load(client, plan, advance)


async def choose_models(client: LoadClient, wanted: Sequence[str], include_base: bool) -> list[str]:
    """The models to ask: the wanted ones, or else all adapters. Raises ConfigError if none is
    left."""
    listed = await client.models()
    names = [name for name, _ in listed]
    for name in wanted:
        if name not in names:
            raise ConfigError(f"--models: the server has no model {name!r}", "models")
    adapters = list(wanted) or [name for name, is_adapter in listed if is_adapter]
    bases = [name for name, is_adapter in listed if not is_adapter][:1] if include_base else []
    found = list(dict.fromkeys([*adapters, *bases]))
    if not found:
        message = "the server has no adapters; say --include-base, or --models NAME,NAME"
        raise ConfigError(message, "models")
    return found


async def run_load(
    client: LoadClient, plan: LoadPlan, advance: Advance
) -> tuple[list[Outcome], float]:
    """Send all requests in order. Returns an outcome for each request, however it ended, and the
    seconds that all of it took."""
    bodies = plan.bodies()
    outcomes = [Outcome(str(body["model"]), 0.0) for body in bodies]
    started = time.perf_counter()

    def now() -> float:
        return time.perf_counter() - started

    async def ask(index: int) -> None:
        await client.ask(plan.endpoint, bodies[index], outcomes[index], now)
        advance()

    async def ask_when_due(index: int) -> None:
        await asyncio.sleep(outcomes[index].due_s - now())
        await ask(index)

    async def ask_in_turn(indices: Iterator[int]) -> None:
        for index in indices:
            outcomes[index].due_s = now()
            await ask(index)

    if plan.arrival.kind == "closed":
        turns = iter(range(len(bodies)))
        users = [ask_in_turn(turns) for _ in range(plan.arrival.concurrency)]
    else:
        times = plan.arrival.times_s(len(bodies), rng_of(plan.seed, 4))
        for outcome, due_s in zip(outcomes, times, strict=True):
            outcome.due_s = due_s
        users = [ask_when_due(index) for index in range(len(bodies))]
    try:
        async with asyncio.timeout(plan.timeout_s), asyncio.TaskGroup() as group:
            for user in users:
                group.create_task(user)
    except TimeoutError:
        pass  # the outcomes of what was open or not yet sent say so
    return outcomes, now()


# -- figures ---------------------------------------------------------------------------------------


def summarize(outcomes: Sequence[Outcome], seconds: float) -> dict[str, Any]:
    """Figures over all requests and, under "models", of each; latencies in ms.

    Time to first token and of the whole answer count from when the request was due; time per
    output token is the mean over one answer, from its first token on; "itl" are the gaps between
    chunks. Percentiles interpolate; they are None when nothing was measured.
    """
    good = [o for o in outcomes if o.error is None]
    output_tokens = sum(o.num_tokens for o in good)
    late = [o.sent_s - o.due_s for o in outcomes if o.sent_s is not None]
    by_model = Counter(o.model for o in outcomes)
    return {
        **_figures(outcomes),
        "seconds": round(seconds, 3),
        "output_tokens": output_tokens,
        "requests_per_s": round(len(good) / seconds, 3),
        "output_tokens_per_s": round(output_tokens / seconds, 1),
        "client_late_ms": _percentiles(late),
        "models": {
            model: _figures([o for o in outcomes if o.model == model])
            for model, _ in by_model.most_common()
        },
    }


def _figures(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    good = [o for o in outcomes if o.error is None]
    errors = Counter(o.error for o in outcomes if o.error is not None)
    return {
        "requests": len(outcomes),
        "succeeded": len(good),
        "errors": dict(errors.most_common()),
        **{name: _percentiles(measure(good)) for name, measure in _MEASURES.items()},
    }


def _ttft_s(outcomes: Sequence[Outcome]) -> list[float]:
    return [o.chunk_s[0] - o.due_s for o in outcomes]


def _tpot_s(outcomes: Sequence[Outcome]) -> list[float]:
    several = [o for o in outcomes if o.num_tokens > 1]
    return [(o.chunk_s[-1] - o.chunk_s[0]) / (o.num_tokens - 1) for o in several]


def _itl_s(outcomes: Sequence[Outcome]) -> list[float]:
    return [b - a for o in outcomes for a, b in pairwise(o.chunk_s)]


def _e2e_s(outcomes: Sequence[Outcome]) -> list[float]:
    return [o.end_s - o.due_s for o in outcomes if o.end_s is not None]


_MEASURES: dict[str, Callable[[Sequence[Outcome]], list[float]]] = {
    "ttft_ms": _ttft_s,
    "tpot_ms": _tpot_s,
    "itl_ms": _itl_s,
    "e2e_ms": _e2e_s,
}


def _percentiles(seconds: Sequence[float]) -> dict[str, float | None]:
    if not seconds:
        return {f"p{p}": None for p in PERCENTILES}
    values = np.percentile(np.array(seconds) * 1000, PERCENTILES)
    return {f"p{p}": round(float(v), 3) for p, v in zip(PERCENTILES, values, strict=True)}


# -- what is shown ---------------------------------------------------------------------------------


def load_shown(outcomes: Sequence[Outcome], summary: dict[str, Any]) -> Group:
    latency = new_table("", "ms", *(f"p{p}" for p in PERCENTILES))
    for name, words in LATENCIES.items():
        latency.add_row(words, *_cells(summary[name]))
    late = summary["client_late_ms"]["p99"]
    line = (
        f"{summary['succeeded']} of {summary['requests']} requests in {summary['seconds']:.1f} s: "
        f"{summary['requests_per_s']:.2f} requests/s, "
        f"{summary['output_tokens_per_s']:,.0f} output tokens/s; "
        f"sent late by {'-' if late is None else f'{late:.1f}'} ms (p99)\n"
    )
    return Group(latency, Text(line), _models_table(summary["models"]), *_errors(outcomes))


def _models_table(models: dict[str, dict[str, Any]]) -> Table:
    more = f", the busiest {SHOWN_MODELS} of {len(models)}" if len(models) > SHOWN_MODELS else ""
    columns = ("requests", "failed", *(f"{k} p{p}" for k in ("ttft", "e2e") for p in (50, 99)))
    table = new_table(f"By model, times in ms{more}", "model", *columns)
    for name, figures in list(models.items())[:SHOWN_MODELS]:
        failed = figures["requests"] - figures["succeeded"]
        times = [_cells(figures[key])[at] for key in ("ttft_ms", "e2e_ms") for at in (0, -1)]
        table.add_row(Text(name), str(figures["requests"]), str(failed), *times)
    return table


def _errors(outcomes: Sequence[Outcome]) -> list[Table]:
    """A table of the kinds of failure with one example each, or None without failures."""
    kinds = Counter(o.error for o in outcomes if o.error is not None)
    if not kinds:
        return []
    table = new_table("Failed", "kind", "requests", "for example", names=1)
    table.columns[2].justify = "left"
    for kind, count in kinds.most_common():
        example = next(o.detail for o in outcomes if o.error == kind)
        table.add_row(Text(kind, "red"), str(count), Text(plain(example)))
    return [table]


def _cells(percentiles: dict[str, float | None]) -> list[str]:
    return ["-" if value is None else f"{value:,.1f}" for value in percentiles.values()]


def load_plot(outcomes: Sequence[Outcome], title: str) -> Figure:
    """Plot, for each latency, which share of the requests had at most that."""
    good = [o for o in outcomes if o.error is None]
    shown = ("ttft_ms", "tpot_ms", "e2e_ms")
    figure, panels = new_figure(title, len(shown))
    for axes, name, colour in zip(panels, shown, COLOURS[1:], strict=False):
        values = np.sort(_MEASURES[name](good)) * 1000
        axes.set_xlabel(f"{LATENCIES[name]}, ms")
        axes.set_ylim(0, 1.02)
        axes.yaxis.set_major_formatter(lambda share, _: f"{100 * share:.0f} %")
        if not len(values):
            continue
        axes.ecdf(values, color=colour, lw=2)
        for p in PERCENTILES:
            at = float(np.percentile(values, p))
            axes.plot([at], [p / 100], "o", color=colour, ms=5)
            axes.annotate(
                f"p{p}  {at:,.1f}",
                (at, p / 100),
                (7, -10),
                fontsize=8,
                color=INK,
                textcoords="offset points",
            )
        axes.set_xlim(0, 1.35 * values[-1])  # room for the figures
    panels[0].set_ylabel("share of the requests")
    return figure

"""Throughput and latency while adapters come and go: more in demand than the device holds."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from rich.console import Group

from weft.bench import peers
from weft.bench.churn_report import (
    ChurnRow,
    Run,
    churn_in_words,
    churn_plot,
    churn_result,
    churn_table,
)
from weft.bench.drive import Driver, Job, Timed, driving
from weft.bench.engine import (
    AdapterShape,
    RandomAdapters,
    default_model,
    describe,
    device_name,
    preset_folder,
)
from weft.bench.report import (
    Advance,
    Report,
    bytes_in_words,
    progress,
)
from weft.bench.workload import Choice, Lengths, check_lengths, random_prompts, rng_of
from weft.core.adapters import AdapterRef
from weft.core.stats import EngineInfo

WARM_UP_REQUESTS, WARM_UP_TOKENS = 32, 8


@dataclass(frozen=True, slots=True)
class ChurnPlan:
    """What to measure. The same seed gives the same requests."""

    populations: tuple[int, ...]
    """How many adapters the requests of a run choose among."""
    resident: int
    """How many adapters the device has memory for, unless the engine's options say otherwise."""
    ranks: tuple[int, ...]
    """The adapters have these ranks in turn."""
    targets: tuple[str, ...] | None
    choice: Choice
    num_requests: int
    input_len: Lengths
    output_len: Lengths
    load: float | None
    """Requests come at this share of the rate that the engine reaches without churn. None means
    that all come at once."""
    on_disk: bool
    """Whether adapters are folders, of which the host holds what it has memory for. Else they are
    windows of one page-locked buffer of noise on the host, so that there may be thousands."""
    verify: bool
    """Compare all tokens with those of an engine that has memory for all adapters."""
    seed: int

    def rank_of(self, adapter: int) -> int:
        return self.ranks[adapter % len(self.ranks)]


def run_churn(model: str | None, plan: ChurnPlan, options: Mapping[str, object]) -> Report:
    """Open an engine and measure it; `model` None: `default_model`. Raises ConfigError."""
    name = model or default_model(options)
    with preset_folder(name) as folder:
        shape = AdapterShape(max(plan.ranks), plan.targets)
        adapters = RandomAdapters(folder, shape, options)
        ranks = [plan.rank_of(k) for k in range(max(*plan.populations, plan.resident))]
        bytes_by_rank = {rank: adapters.num_bytes(rank) for rank in plan.ranks}
        sizes = [bytes_by_rank[rank] for rank in ranks]
        mean_bytes = sum(sizes) // len(ranks)
        settings = _settings(plan, options, mean_bytes)
        roomy = {**settings, "adapter_memory": sum(sizes)}
        expected: list[list[list[int]]] | None = None
        if plan.verify:
            with _opened(folder, roomy, plan, adapters, ranks) as (driver, refs):
                bench = _ChurnRuns(driver, plan, refs, sizes)
                expected = [bench.tokens(population) for population in plan.populations]
        with _opened(folder, settings, plan, adapters, ranks) as (driver, refs):
            rows = _ChurnRuns(driver, plan, refs, sizes, expected).measure()
            info = driver.engine.info
    title = f"Adapters that come and go: {name}, {info.dtype}, {_memory(plan, info)}"
    return Report(
        benchmark="churn",
        title=title,
        config={
            "model": name,
            **asdict(plan),
            **describe(info, shape),
            "options": settings,
        },
        results=[churn_result(row, rows, info) for row in rows],
        shown=Group(
            churn_table(rows, info, peers_of(name, plan, device_name(info))),
            *(churn_in_words(row, rows) for row in rows if row.run == "churn"),
        ),
        plot=lambda: churn_plot(rows, title, peers_of(name, plan, device_name(info))),
        device=device_name(info),
        ok=not any(row.wrong for row in rows),
    )


def _settings(plan: ChurnPlan, options: Mapping[str, object], mean_bytes: int) -> dict[str, object]:
    """Options of the engine: memory for `plan.resident` adapters, unless it is given."""
    settings = {**options, "enable_prefix_caching": False}
    if settings.get("adapter_memory") is None:
        settings["adapter_memory"] = plan.resident * mean_bytes
    return settings


@contextmanager
def _opened(
    folder: str,
    settings: Mapping[str, object],
    plan: ChurnPlan,
    adapters: RandomAdapters,
    ranks: Sequence[int],
) -> Iterator[tuple[Driver, list[AdapterRef]]]:
    """An engine, and an adapter of each of `ranks`."""
    with (
        tempfile.TemporaryDirectory(prefix="weft-bench-") as place,
        driving(folder, **settings, adapter_cache_dir=place) as driver,
        progress("Adapters", len(ranks)) as advance,
    ):
        refs: list[AdapterRef] = []
        if plan.on_disk:
            paths = adapters.write(Path(place), ranks, driver.engine.info.dtype)
            found = (driver.register(str(path)) for path in paths)
        else:
            found = (driver.publish(image) for image in adapters.images(ranks, driver.engine))
        for ref in found:
            refs.append(ref)
            advance()
        yield driver, refs


class _ChurnRuns:
    """The runs of a plan on one engine."""

    def __init__(
        self,
        driver: Driver,
        plan: ChurnPlan,
        refs: Sequence[AdapterRef],
        sizes: Sequence[int],
        expected: list[list[list[int]]] | None = None,
    ) -> None:
        """Draw the requests. `sizes` are the bytes of each adapter."""
        info = driver.engine.info
        check_lengths(plan.input_len, plan.output_len, info.max_model_len)
        self._driver = driver
        self._plan = plan
        self._refs = refs
        self._sizes = sizes
        self._memory = info.adapter_memory_bytes
        self._resident = min(int(self._fit(len(sizes))), len(refs))
        self._expected = expected
        lengths = plan.input_len.draw(plan.num_requests, rng_of(plan.seed, 0))
        self._prompts = random_prompts(lengths, 0, info.vocab_size, rng_of(plan.seed, 1))
        self._outputs = plan.output_len.draw(plan.num_requests, rng_of(plan.seed, 2))

    def _fit(self, population: int) -> float:
        return self._memory * population / sum(self._sizes[:population])

    def tokens(self, population: int) -> list[list[int]]:
        """The tokens of each request's answer, when all are sent at once."""
        return [t.token_ids for t in self._driver.run(self._jobs(population))]

    def measure(self) -> list[ChurnRow]:
        plan = self._plan
        self._warm_up()
        runs = len(plan.populations) if plan.load is None else len(plan.populations) + 2
        with progress("Requests", plan.num_requests * runs) as advance:
            if plan.load is not None:
                return self._under_load(plan.load, advance)
            return [
                self._row("at once", population, index, None, advance)
                for index, population in enumerate(plan.populations)
            ]

    def _under_load(self, load: float, advance: Advance) -> list[ChurnRow]:
        """Measure what the engine can do when all adapters in demand are there; then send requests
        at a share of that rate, without churn and with it."""
        few = self._resident
        full = self._row("capacity", few, None, None, advance)
        rate = load * self._plan.num_requests / full.seconds
        calm = self._row("calm", few, None, rate, advance)
        return [
            full,
            calm,
            *(
                self._row("churn", population, index, rate, advance)
                for index, population in enumerate(self._plan.populations)
            ),
        ]

    def _row(
        self,
        run: Run,
        population: int,
        index: int | None,
        rate: float | None,
        advance: Advance,
    ) -> ChurnRow:
        engine = self._driver.engine
        jobs = self._jobs(population, rate)
        before = engine.stats()
        running: list[int] = []
        timed = self._driver.run(
            jobs, advance, lambda _: running.append(len(engine.scheduler.running_adapters()))
        )
        after = engine.stats()
        loads = after.adapter_loads - before.adapter_loads
        return ChurnRow(
            run=run,
            population=population,
            rate=rate,
            output_tokens=sum(len(t.token_ids) for t in timed),
            seconds=max(t.token_s[-1] for t in timed) - jobs[0].due_s,
            steps=after.steps - before.steps,
            adapters_per_step=float(np.mean([count for count in running if count])),
            least_steps=least_steps(self._answers(jobs), self._memory),
            loads=loads,
            evictions=after.adapter_evictions - before.adapter_evictions,
            preemptions=after.preemptions - before.preemptions,
            hit_rate=max(0.0, 1.0 - loads / len(jobs)),
            tpot_ms=_percentiles_ms(_per_token(timed)),
            resident_tpot_p99_ms=_percentiles_ms(_per_token([t for t in timed if t.resident]))[1],
            ttft_ms=_percentiles_ms([t.first_s for t in timed]),
            resident_adapters=len(after.resident_adapters),
            fit=self._fit(population),
            used_bytes=after.adapter_bytes,
            wrong=self._count_wrong(timed, index),
        )

    def _jobs(self, population: int, rate: float | None = None) -> list[Job]:
        plan = self._plan
        chosen = plan.choice.draw(plan.num_requests, population, rng_of(plan.seed, 3, population))
        gaps = rng_of(plan.seed, 4).exponential(1.0 / rate if rate else 0.0, plan.num_requests)
        work = zip(self._prompts, self._outputs, chosen, np.cumsum(gaps), strict=True)
        return [Job(p, n, self._refs[k], float(due)) for p, n, k, due in work]

    def _answers(self, jobs: Sequence[Job]) -> list[tuple[int, int]]:
        """Bytes of each adapter in demand, and the tokens of its longest answer."""
        bytes_of = {ref.digest: size for ref, size in zip(self._refs, self._sizes, strict=True)}
        longest: dict[str, int] = {}
        for job in jobs:
            if job.adapter is not None:
                digest = job.adapter.digest
                longest[digest] = max(longest.get(digest, 0), job.num_tokens)
        return [(bytes_of[digest], tokens) for digest, tokens in longest.items()]

    def _warm_up(self) -> None:
        """Fill the device with adapters, and let everything compile that is compiled at first
        use."""
        refs = self._refs[: self._resident]
        count = max(WARM_UP_REQUESTS, len(refs))
        self._driver.run(
            [
                Job(self._prompts[i % len(self._prompts)], WARM_UP_TOKENS, refs[i % len(refs)])
                for i in range(count)
            ]
        )

    def _count_wrong(self, timed: Sequence[Timed], index: int | None) -> int | None:
        if self._expected is None or index is None:
            return None
        pairs = zip(timed, self._expected[index], strict=True)
        return sum(t.token_ids != tokens for t, tokens in pairs)


def least_steps(answers: Sequence[tuple[int, int]], memory_bytes: int) -> int:
    """The fewest steps in which the requests can be answered, whatever their order.

    `answers` has, for each adapter, its bytes and the tokens of its longest answer. An adapter is
    in memory in every step in which one of its requests runs, which are at least as many as its
    longest answer has tokens, and all adapters of one step must fit into `memory_bytes`.
    """
    taken = sum(size * tokens for size, tokens in answers)
    return max(-(-taken // memory_bytes), *(tokens for _, tokens in answers))


def _per_token(timed: Sequence[Timed]) -> list[float]:
    return [s for t in timed if (s := t.per_token_s) is not None]


def _percentiles_ms(seconds: Sequence[float]) -> tuple[float, float]:
    """The p50 and p99 of some seconds, in milliseconds."""
    if not seconds:
        return (0.0, 0.0)
    p50, p99 = np.percentile(np.array(seconds) * 1000, (50, 99))
    return float(p50), float(p99)


def peers_of(model: str, plan: ChurnPlan, device: str) -> dict[str, dict[int, int]]:
    """Published figures of others for the same work, by name and population."""
    same = (
        model == peers.MODEL
        and device.startswith(peers.DEVICE)
        and plan.ranks == (peers.RANK,)
        and plan.targets is None
        and plan.choice == Choice("uniform")
        and plan.load is None
        and (plan.resident, plan.num_requests) == (peers.CHURN_RESIDENT, peers.CHURN_REQUESTS)
    )
    return peers.CHURN_TOKENS_PER_S if same else {}


def _memory(plan: ChurnPlan, info: EngineInfo) -> str:
    ranks = "/".join(map(str, plan.ranks))
    memory = f"{bytes_in_words(info.adapter_memory_bytes)} for adapters of rank {ranks}"
    return f"{memory}, {device_name(info)}"

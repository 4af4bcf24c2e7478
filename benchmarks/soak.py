"""A server under full load for a while: does it stay right, and does it stay small?

    python benchmarks/soak.py --minutes 10 --plot soak.png

Starts `weft serve` on `examples/tiny` with too little room for its adapters, in all tiers. Many
clients ask without a pause, for whole answers and streams; some leave in the middle, some send
nonsense. Meanwhile an operator loads, unloads and replaces adapters, once a second, some of them
in folders whose content changes. Every answer is checked. Every ten seconds, memory, threads and
open files of both processes are noted.

Growth is that of a straight line through the samples after the warm-up, as it is over the rest of
the run. More of it than the bounds below is taken for a leak.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console

from weft.bench.report import new_figure, new_table

TINY = Path(__file__).parents[1] / "examples" / "tiny"
sys.path.insert(0, str(TINY))
from tasks import TASKS, base_answer, words  # noqa: E402

SAMPLE_S = 10.0
WARM_UP_S = 60.0
"""At most a third of the run."""
CHANGE_S = 1.0
START_S = 120.0
REQUEST_S = 60.0
NUM_TENANTS = 6
MAX_RSS_GROWTH = 0.05
"""Of the resident memory at the end of the warm-up."""
MAX_FDS_GROWTH = 32.0
"""Connections come and go: some of them are open files."""
MAX_THREADS_GROWTH = 4.0
MAX_SHOWN = 20
"""Problems that are printed; all are counted."""

WORDS = words(seed=1, n=300)
"""The tiny model answers all of them right."""
SERVER = {
    "--port": "0",
    "--served-model-name": "base",
    "--num-threads": "1",
    "--kv-cache-memory": "16M",
    "--adapter-memory": "3M",
    "--adapter-host-memory": "1M",
    "--log-level": "warning",
}
NONSENSE: list[tuple[dict[str, Any], int]] = [
    ({"model": "nobody"}, 404),
    ({"max_tokens": -1}, 400),
    ({"temperature": "hot"}, 400),
    ({"messages": []}, 400),
    ({"messages": [{"role": "user", "content": "x" * 100_000}]}, 400),
    ({"logit_bias": {"123456789": 1}}, 400),
]
"""What is changed in a good request, and the status that it then has."""


@dataclass(frozen=True)
class Sample:
    """One look at the server, `time_s` after the start."""

    time_s: float
    requests: int
    rss_mb: tuple[float, float]
    """Of the API's process and of the engine's; so are the others."""
    fds: tuple[int, int]
    threads: tuple[int, int]
    kv_percent: float
    running: int
    on_device: int
    on_host: int


@dataclass
class Tenant:
    """A name whose content changes: the tasks (None: unknown) that it has served, in order."""

    history: list[str | None] = field(default_factory=lambda: [None])
    settled: int = 0
    """From here on the history may still be what is served."""


class Load:
    """The clients and the operator, and what they found."""

    def __init__(self, client: httpx.AsyncClient, root: Path, end_s: float) -> None:
        self.client = client
        self.root = root
        self.end_s = end_s
        self.random = random.Random(0)
        self.tenants = {f"tenant-{i}": Tenant() for i in range(NUM_TENANTS)}
        self.models = ["base", *TASKS, *self.tenants]
        self.counts: Counter[str] = Counter()
        self.problems: list[str] = []

    @property
    def over(self) -> bool:
        return time.monotonic() >= self.end_s

    def problem(self, what: str) -> None:
        self.counts["wrong"] += 1
        if len(self.problems) < MAX_SHOWN:
            self.problems.append(what)

    async def ask_until_the_end(self) -> None:
        kinds: list[Callable[[], Coroutine[Any, Any, None]]] = [
            self._whole, self._stream, self._leave, self._nonsense
        ]  # fmt: skip
        while not self.over:
            [kind] = self.random.choices(kinds, weights=[60, 30, 5, 5])
            self.counts["requests"] += 1
            self.counts[kind.__name__.strip("_")] += 1
            try:
                await kind()
            except (httpx.HTTPError, ValueError, KeyError, IndexError) as error:
                self.problem(f"{kind.__name__}: {type(error).__name__}: {error}")

    # -- clients -------------------------------------------------------------------------------

    async def _whole(self) -> None:
        model, word, check = self._question()
        answer = await self.client.post("/v1/chat/completions", json=_body(model, word))
        if answer.status_code != 200:
            check(answer.status_code, answer.text)
            return
        [choice] = answer.json()["choices"]
        check(200, choice["message"]["content"] if choice["finish_reason"] == "stop" else choice)

    async def _stream(self) -> None:
        model, word, check = self._question()
        text, reasons, ends = "", [], 0
        async with self._open(_body(model, word, stream=True)) as response:
            if response.status_code != 200:
                check(response.status_code, "")
                return
            async for line in response.aiter_lines():
                data = line.removeprefix("data: ")
                ends += data == "[DONE]"
                if data and data != "[DONE]":
                    [choice] = json.loads(data)["choices"]
                    text += choice["delta"].get("content") or ""
                    reasons += [choice["finish_reason"]] if choice["finish_reason"] else []
        check(200, text if (reasons, ends) == (["stop"], 1) else (text, reasons, ends))

    async def _leave(self) -> None:
        """A long stream, given up after some chunks."""
        body = _body(
            "upper", self.random.choice(WORDS), stream=True, ignore_eos=True, max_tokens=300
        )
        async with self._open(body) as response:
            if response.status_code != 200:
                self.problem(f"a long stream: {response.status_code}")
            lines = response.aiter_lines()
            for _ in range(self.random.randint(1, 12)):
                await anext(lines, None)  # on a busy machine, few lines may have all tokens

    async def _nonsense(self) -> None:
        change, status = self.random.choice(NONSENSE)
        body = _body("base", self.random.choice(WORDS)) | change
        answer = await self.client.post("/v1/chat/completions", json=body)
        if answer.status_code != status or "message" not in answer.json()["error"]:
            self.problem(f"{str(change)[:60]}: {answer.status_code} {answer.text[:200]}")

    def _question(self) -> tuple[str, str, Callable[[int, object], None]]:
        """Model, word, and what checks status and answer."""
        model, word = self.random.choice(self.models), self.random.choice(WORDS)
        tenant = self.tenants.get(model)
        since = tenant.settled if tenant else 0

        def check(status: int, answer: object) -> None:
            names = tenant.history[since:] if tenant else [model]
            if status == 404 and None in names:
                self.counts["unknown"] += 1
                return
            right = [_expected(name, word) for name in names if name is not None]
            if status != 200 or answer not in right:
                self.problem(f"{model} was asked {word!r}, not {right}: {status} {answer!r}")

        return model, word, check

    def _open(self, body: dict[str, Any]) -> contextlib.AbstractAsyncContextManager[httpx.Response]:
        return self.client.stream("POST", "/v1/chat/completions", json=body)

    # -- the operator --------------------------------------------------------------------------

    async def change_until_the_end(self) -> None:
        while not self.over:
            name = self.random.choice(list(self.tenants))
            known = self.tenants[name].history[-1] is not None
            task = None if known and self.random.random() < 0.3 else self.random.choice([*TASKS])
            await self.change(name, task)
            await asyncio.sleep(CHANGE_S)

    async def change(self, name: str, task: str | None) -> None:
        """Let the name serve a task; None: unload it."""
        tenant = self.tenants[name]
        tenant.history.append(task)
        body: dict[str, Any] = {"lora_name": name}
        if task is not None:
            body |= {"lora_path": str(self._folder(name, task)), "load_inplace": True}
        route = "/v1/unload_lora_adapter" if task is None else "/v1/load_lora_adapter"
        answer = await self.client.post(route, json=body)
        if answer.status_code != 200:
            self.problem(f"{route} {body}: {answer.status_code} {answer.text}")
        tenant.settled = len(tenant.history) - 1
        self.counts["changes"] += 1

    def _folder(self, name: str, task: str) -> Path:
        """The task's own, or one of the name's, whose content is then replaced."""
        source = TINY / "adapters" / task
        if self.random.random() < 0.5:
            return source
        return Path(shutil.copytree(source, self.root / name, dirs_exist_ok=True))


def _body(model: str, word: str, **more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": word}]
    return {"model": model, "messages": messages, "temperature": 0, "max_tokens": 32} | more


def _expected(model: str, word: str) -> str:
    return base_answer(word) if model == "base" else TASKS[model].answer(word)


# -- the server ------------------------------------------------------------------------------------


@contextlib.contextmanager
def serving(root: Path) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """A `weft serve` of its own, which must end by itself when told to; its process and URL."""
    flags = [part for flag in SERVER.items() for part in flag]
    for folder in (root, TINY / "adapters"):
        flags += ["--lora-root", str(folder)]
    modules = [f"{name}={TINY / 'adapters' / name}" for name in TASKS]
    command = [sys.executable, "-m", "weft", "serve", str(TINY / "base"), *flags]
    log = root / "server.log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            [*command, "--lora-modules", *modules], stdout=out, stderr=subprocess.STDOUT
        )
    try:
        yield process, _wait_for_url(process, log)
        process.terminate()
        if process.wait(60) != 0:
            raise SystemExit(f"the server ended with {process.returncode}: {_tail(log)}")
    finally:
        process.kill()
        process.wait()


def _wait_for_url(process: subprocess.Popen[bytes], log: Path) -> str:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and process.poll() is None:
        if found := re.search(r"(http://[0-9.]+:\d+)/v1", log.read_text()):
            return found[1]
        time.sleep(0.1)
    raise SystemExit(f"the server did not start: {_tail(log)}")


def _tail(log: Path) -> str:
    return log.read_text()[-2000:]


def engine_of(pid: int) -> int:
    """The server's child that runs the engine."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    [engine] = [c for c in children if b"spawn_main" in Path(f"/proc/{c}/cmdline").read_bytes()]
    return int(engine)


async def look(client: httpx.AsyncClient, pids: tuple[int, int], load: Load, t: float) -> Sample:
    metrics = (await client.get("/metrics")).text
    (rss0, threads0), (rss1, threads1) = (_status(pid) for pid in pids)
    return Sample(
        time_s=t,
        requests=load.counts["requests"],
        rss_mb=(rss0, rss1),
        fds=(_num_fds(pids[0]), _num_fds(pids[1])),
        threads=(threads0, threads1),
        kv_percent=100 * _metric(metrics, "vllm:kv_cache_usage_perc"),
        running=int(_metric(metrics, "vllm:num_requests_running")),
        on_device=int(_metric(metrics, "weft:adapters", 'level="gpu"')),
        on_host=int(_metric(metrics, "weft:adapters", 'level="cpu"')),
    )


def _status(pid: int) -> tuple[float, int]:
    """Resident memory in MB, threads."""
    text = Path(f"/proc/{pid}/status").read_text()
    fields = dict(line.split(":", 1) for line in text.splitlines())
    return int(fields["VmRSS"].split()[0]) / 1024, int(fields["Threads"])


def _num_fds(pid: int) -> int:
    return sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())


def _metric(text: str, name: str, label: str = "") -> float:
    lines = (line for line in text.splitlines() if line.startswith((f"{name}{{", f"{name} ")))
    return next((float(line.rsplit(" ", 1)[1]) for line in lines if label in line), 0.0)


# -- the run ---------------------------------------------------------------------------------------


async def soak(
    pid: int, url: str, root: Path, args: argparse.Namespace
) -> tuple[Load, list[Sample]]:
    run_s = 60 * args.minutes
    pids = (pid, engine_of(pid))
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=args.clients)
    samples: list[Sample] = []
    async with httpx.AsyncClient(base_url=url, timeout=REQUEST_S, limits=limits) as client:
        start_s = time.monotonic()
        load = Load(client, root, start_s + run_s)

        async def watch() -> None:
            while not load.over:
                samples.append(await look(client, pids, load, time.monotonic() - start_s))
                await asyncio.sleep(min(SAMPLE_S, max(0.0, load.end_s - time.monotonic())))

        async with asyncio.timeout(run_s + 2 * REQUEST_S), asyncio.TaskGroup() as group:
            group.create_task(watch())
            group.create_task(load.change_until_the_end())
            for _ in range(args.clients):
                group.create_task(load.ask_until_the_end())
        for name, tenant in load.tenants.items():
            if tenant.history[-1] is not None:
                await load.change(name, None)
        for _ in range(50):  # those who left last are noticed soon
            last = await look(client, pids, load, time.monotonic() - start_s)
            if not last.running and not last.kv_percent:
                break
            await asyncio.sleep(0.1)
        else:
            load.problem(f"left: {last.running} requests, {last.kv_percent:.1f} % of the KV cache")
    return load, samples


def leaks(warm: list[Sample]) -> dict[str, float]:
    """Growth of each thing, as a share of its bound."""
    found: dict[str, float] = {}
    for i, process in enumerate(("api", "engine")):
        rss = [s.rss_mb[i] for s in warm]
        found[f"{process}_rss"] = growth(warm, rss) / (MAX_RSS_GROWTH * rss[0])
        found[f"{process}_fds"] = growth(warm, [s.fds[i] for s in warm]) / MAX_FDS_GROWTH
        threads = [s.threads[i] for s in warm]
        found[f"{process}_threads"] = growth(warm, threads) / MAX_THREADS_GROWTH
    return found


def growth(samples: list[Sample], values: Sequence[float]) -> float:
    """Of a straight line through the values, from the first sample to the last."""
    if len(samples) < 3:
        return 0.0
    times = [s.time_s for s in samples]
    slope: float = statistics.linear_regression(times, values).slope
    return slope * (times[-1] - times[0])


def report(load: Load, samples: list[Sample], args: argparse.Namespace) -> int:
    warm_up_s = min(WARM_UP_S, 20 * args.minutes)
    warm = [s for s in samples if s.time_s >= warm_up_s] or samples[-1:]
    shares = leaks(warm)
    columns = ("s", "requests", "MB api", "MB engine", "files", "threads", "KV %", "running")
    table = new_table("Soak", *columns, "on device", "on host", names=0)
    for s in samples:
        both = (f"{s.fds[0]} + {s.fds[1]}", f"{s.threads[0]} + {s.threads[1]}")
        row = (f"{s.time_s:.0f}", str(s.requests), *(f"{mb:.1f}" for mb in s.rss_mb), *both)
        table.add_row(*row, f"{s.kv_percent:.1f}", *map(str, (s.running, s.on_device, s.on_host)))
    console = Console(width=120)
    console.print(table)
    for problem in load.problems:
        console.print(problem, style="red", markup=False)
    if args.plot:
        plot(samples, args.plot)
    first, last = warm[0], warm[-1]
    ok = not load.counts["wrong"] and max(shares.values()) <= 1
    line = {"ok": ok, "benchmark": "soak", "minutes": args.minutes, "clients": args.clients}
    line |= {what: load.counts[what] for what in ("requests", "wrong", "stream", "leave")}
    line |= {what: load.counts[what] for what in ("nonsense", "unknown", "changes")}
    line |= {"warm_up_s": warm_up_s, "rss_mb_start": first.rss_mb, "rss_mb_end": last.rss_mb}
    line |= {"fds_start": first.fds, "fds_end": last.fds}
    line |= {"threads_start": first.threads, "threads_end": last.threads}
    line |= {"growth_over_bound": {name: round(share, 3) for name, share in shares.items()}}
    print(json.dumps(line))
    return 0 if ok else 1


def plot(samples: list[Sample], path: Path) -> None:
    figure, (memory, counts, use) = new_figure("Soak", 3)
    minutes = [s.time_s / 60 for s in samples]
    for i, process in enumerate(("API", "engine")):
        memory.plot(minutes, [s.rss_mb[i] for s in samples], label=process)
        counts.plot(minutes, [s.fds[i] for s in samples], label=f"files, {process}")
        counts.plot(minutes, [s.threads[i] for s in samples], label=f"threads, {process}")
    use.plot(minutes, [s.kv_percent for s in samples], label="KV cache, %")
    use.plot(minutes, [s.running for s in samples], label="requests running")
    use.plot(minutes, [s.on_device for s in samples], label="adapters on the device")
    for axes, title in ((memory, "resident memory, MB"), (counts, "open"), (use, "in use")):
        axes.set(title=title, xlabel="minutes", ylim=(0, None))
        axes.set_ylim(0, 1.5 * axes.get_ylim()[1])  # room for the legend above the curves
        axes.legend(frameon=False, fontsize=8, loc="upper left")
    figure.savefig(path, dpi=120)


def main() -> int:
    """Exit status 1 if an answer was wrong or something grows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--plot", type=Path, help="write the curves to this PNG file")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, serving(Path(folder)) as (process, url):
        load, samples = asyncio.run(soak(process.pid, url, Path(folder), args))
    return report(load, samples, args)


if __name__ == "__main__":
    sys.exit(main())

"""`weft bench`: workloads by their definitions, the commands on a small model, and the load
generator against a server that misbehaves in known ways."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import Result
from command_line import weft
from patience import PATIENCE_S

from weft.bench import decode, throughput
from weft.bench.client import LoadClient, Outcome
from weft.bench.serve import LoadPlan, run_load, summarize
from weft.bench.workload import (
    PATTERNS,
    Arrival,
    Choice,
    Lengths,
    adapters_in_batch,
    assign,
    parse_counts,
    parse_names,
    rng_of,
    zipf,
)
from weft.core.errors import ConfigError

TINY = ("--model", "tiny", "--device", "cpu", "--num-threads", "1", "--kv-cache-memory", "16M")
PNG = b"\x89PNG\r\n\x1a\n"


def report(*args: str) -> dict[str, Any]:
    """What a command that succeeds says last."""
    done = weft(*args)
    assert done.exit_code == 0, (done.output, done.exception)
    return last_line(done)


def last_line(done: Result) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert found["environment"]["weft"]["weft"] and found["environment"]["machine"]
    return found


# -- workloads -------------------------------------------------------------------------------------


def test_patterns_of_a_batch() -> None:
    assert [adapters_in_batch(p, 10) for p in PATTERNS] == [0, 1, 4, 10, 10]
    assert [adapters_in_batch(p, 1) for p in PATTERNS] == [0, 1, 1, 1, 1]
    rng = rng_of(7)
    assert assign("none", 3, 0, rng) == [None] * 3
    assert assign("identical", 3, 1, rng) == [0] * 3
    uniform = Counter(assign("uniform", 10, 4, rng))
    assert sorted(uniform) == [0, 1, 2, 3] and sorted(uniform.values()) == [2, 2, 3, 3]
    assert sorted(assign("distinct", 10, 10, rng)) == list(range(10))
    assert set(assign("skewed", 500, 10, rng)) <= set(range(10))
    assert assign("distinct", 64, 64, rng_of(1)) == assign("distinct", 64, 64, rng_of(1))
    assert assign("distinct", 64, 64, rng_of(1)) != assign("distinct", 64, 64, rng_of(2))


def test_zipf_draws_have_the_shares_of_the_law() -> None:
    counts = np.bincount(zipf(200_000, 4, 1.5, rng_of(3)), minlength=4) / 200_000
    weights = np.array([1.0, 2**-1.5, 3**-1.5, 4**-1.5])
    assert counts == pytest.approx(weights / weights.sum(), abs=0.005)
    assert np.bincount(zipf(40_000, 4, 0.0, rng_of(3))) == pytest.approx(10_000, rel=0.05)


def test_choices() -> None:
    assert Choice.parse("round-robin").draw(5, 3, rng_of(0)) == [0, 1, 2, 0, 1]
    assert Choice.parse("uniform").exponent == 0.0
    assert Choice.parse("zipf:1.5").draw(9, 5, rng_of(4)) == zipf(9, 5, 1.5, rng_of(4))


def test_lengths() -> None:
    assert Lengths.parse("128", "input_len").draw(3, rng_of(0)) == [128] * 3
    assert set(Lengths.parse("uniform:2,4", "input_len").draw(200, rng_of(0))) == {2, 3, 4}
    drawn = np.array(Lengths.parse("lognormal:5.2,0.8,16,1024", "x").draw(50_000, rng_of(0)))
    assert (drawn.min(), drawn.max()) == (16, 1024)
    inside = np.log(drawn[(drawn > 16) & (drawn < 1024)])
    assert np.median(inside) == pytest.approx(5.2, abs=0.05)
    assert inside.std() == pytest.approx(0.8, abs=0.05)


def test_arrivals() -> None:
    poisson = np.diff(Arrival.parse("poisson:20").times_s(20_000, rng_of(0)), prepend=0.0)
    assert poisson.min() >= 0
    assert poisson.mean() == pytest.approx(1 / 20, rel=0.03)
    assert poisson.std() == pytest.approx(1 / 20, rel=0.05)
    bursty = Arrival.parse("bursty:20,8").times_s(20_003, rng_of(0))
    assert len(bursty) == 20_003 and bursty == sorted(bursty)
    assert set(list(Counter(bursty).values())[:-1]) == {8}
    assert 20_003 / bursty[-1] == pytest.approx(20, rel=0.1)
    assert Arrival.parse("all").times_s(3, rng_of(0)) == [0.0] * 3
    assert Arrival.parse("closed:4").concurrency == 4


@pytest.mark.parametrize(
    ("parse", "bad"),
    [
        (Choice.parse, ["zipf", "zipf:-1", "zipf:1,2", "zipf:x", "uniform:1", "best", ""]),
        (Arrival.parse, ["poisson:0", "poisson:nan", "bursty:1", "bursty:1,0.5", "closed:0", "x"]),
        (
            lambda text: Lengths.parse(text, "input_len"),
            ["0", "1.5", "-3", "uniform:5,4", "uniform:0,4", "lognormal:1,-1,1,2", "normal:1,2"],
        ),
        (lambda text: parse_counts(text, "batch"), ["", "0", "1,x", "1,,2", "-1"]),
        (lambda text: parse_names(text, PATTERNS, "pattern"), ["", "none,nona"]),
    ],
)
def test_bad_workloads_are_refused(parse: Callable[[str], object], bad: list[str]) -> None:
    for text in bad:
        with pytest.raises(ConfigError) as refused:
            parse(text)
        assert refused.value.param, text


def test_lists() -> None:
    assert parse_counts("8,1,8", "batch") == (1, 8)
    assert parse_names("distinct, none", PATTERNS, "pattern") == ("none", "distinct")


# -- decode and throughput -------------------------------------------------------------------------


@pytest.fixture
def short_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "SHORT", 2)
    monkeypatch.setattr(decode, "LONG", 6)


@pytest.mark.usefixtures("short_runs")
def test_decode(tmp_path: Path) -> None:
    plot = tmp_path / "decode.png"
    found = report(
        *("bench", "decode", *TINY, "--batch", "5", "--rank", "4", "--repeats", "2"),
        *("--plot", str(plot)),
    )
    assert (found["ok"], found["benchmark"], found["device"]) == (True, "decode", "CPU")
    assert found["config"]["model"] == "tiny" and found["config"]["rank"] == 4
    rows = {row["pattern"]: row for row in found["results"]}
    assert list(rows) == list(PATTERNS)
    adapters = {name: row["num_adapters"] for name, row in rows.items()}
    skewed = adapters.pop("skewed")
    assert adapters == {"none": 0, "identical": 1, "uniform": 3, "distinct": 5}
    assert 1 <= skewed <= 5
    for row in rows.values():
        assert row["batch"] == 5 and len(row["repeats_ms"]) == 2
        assert row["ms_per_step"] == pytest.approx(sum(row["repeats_ms"]) / 2, abs=1e-3)
        assert "host_ms_per_step" in row
    assert plot.read_bytes().startswith(PNG)


def test_a_step_is_the_difference_of_two_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a clock that only generation moves: 3 s for the prompts and 10 ms for each token."""
    clock = [0.0]
    monkeypatch.setattr(decode.time, "perf_counter", lambda: clock[0])

    asked: list[tuple[int, list[str | None]]] = []

    class FakeLLM:
        info = type("Info", (), {"vocab_size": 100})

        def stats(self) -> Any:
            counts = {"adapter_loads": 5, "preemptions": 0, "host_s": clock[0] / 5}
            return type("Stats", (), counts)

        def generate(self, prompts: list[list[int]], params: Any, adapters: Any) -> list[Any]:
            assert params.ignore_eos and params.greedy and {len(p) for p in prompts} == {128}
            asked.append((params.max_tokens, adapters))
            clock[0] += 3 + 0.01 * params.max_tokens
            return [type("Output", (), {"token_ids": [1] * params.max_tokens}) for _ in prompts]

    llm: Any = FakeLLM()
    plan = decode.DecodePlan((1, 4), ("none", "distinct"), repeats=3, seed=0)
    rows = decode.measure_decode(llm, plan, lambda: None)
    assert [row.ms for row in rows] == pytest.approx([10.0] * 4)
    assert [row.host_ms for row in rows] == pytest.approx([2.0] * 4)
    assert rows[3].tokens_per_s == pytest.approx(400)
    timed = asked[decode.WARM_UPS * 4 :]
    assert [tokens for tokens, _ in timed] == [144, 16] * 12
    assert [len(set(names)) for _, names in timed[::2]] == [1, 1, 1, 4] * 3, "they take turns"


def test_no_time_of_a_step_is_given_when_adapters_come_and_go() -> None:
    done = weft(
        *("bench", "decode", *TINY, "--batch", "4", "--pattern", "distinct", "--repeats", "1"),
        *("--adapter-memory", "700K", "--no-plot"),
    )
    assert done.exit_code == 1 and "--adapter-memory" in done.stderr and not done.stdout


def test_throughput(tmp_path: Path) -> None:
    plot = tmp_path / "throughput.png"
    found = report(
        *("bench", "throughput", *TINY, "--num-requests", "24", "--adapters", "6"),
        *("--input-len", "uniform:4,12", "--output-len", "uniform:1,6", "--targets", "q_proj"),
        *("--rank", "2", "--plot", str(plot)),
    )
    rows = {row["pattern"]: row for row in found["results"]}
    assert list(rows) == ["none", "identical", "uniform", "skewed"]
    assert [rows[p]["num_adapters"] for p in ("none", "identical", "uniform")] == [0, 1, 6]
    outputs = Lengths.parse("uniform:1,6", "x").draw(24, rng_of(0, 2))
    for row in rows.values():
        assert row["num_requests"] == 24 and row["output_tokens"] == sum(outputs)
        assert row["adapter_loads"] == 0, "they were there before"
        rate = row["output_tokens"] / row["seconds"]
        assert row["output_tokens_per_s"] == pytest.approx(rate, rel=0.05)
    assert found["config"]["targets"] == ["q_proj"] and plot.read_bytes().startswith(PNG)


def test_throughput_counts_the_loads_of_adapters_that_do_not_fit() -> None:
    plan = throughput.ThroughputPlan(8, ("uniform",), 8, Lengths(4, 4), Lengths(2, 2), seed=0)
    shape = throughput.AdapterShape(4)
    options = {"device": "cpu", "load_format": "dummy", "kv_cache_memory": 1 << 24}
    found = throughput.run_throughput("tiny", plan, shape, {**options, "adapter_memory": 300_000})
    [row] = found.results
    assert row["adapter_loads"] >= 6


@pytest.mark.parametrize(
    ("args", "why"),
    [
        (("decode", "--batch", "0"), "--batch takes numbers from 1 to 10,000,000"),
        (("decode", "--pattern", "all"), "--pattern takes a list of none, identical"),
        (("decode", "--targets", "q_proj,nose", *TINY), "'nose' is none of q_proj"),
        (("decode", "--plot", "nowhere/at/all.png"), "can't be written"),
        (("decode", "--plot", "decode.pdf"), "takes the name of a .png file"),
        (("throughput", "--pattern", "distinct"), "--pattern takes a list of"),
        (("throughput", "--input-len", "9999", "--no-plot", *TINY), "choose a shorter --input-len"),
        (("serve", "http://localhost", "--arrival", "often"), "--arrival takes poisson:RATE"),
        (("serve", "http://127.0.0.1:9"), "does not list models"),
        (("serve", "nonsense"), "does not list models"),
    ],
)
def test_refusals(
    args: tuple[str, ...], why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = weft("bench", *args)
    assert done.exit_code == 1 and done.stdout == ""
    assert done.stderr.startswith("weft: error: ") and why in done.stderr
    assert not list(tmp_path.iterdir())


def test_endless_simulations_are_refused() -> None:
    for flag in ("--seconds", "--answer", "--rate"):
        done = weft("bench", "simulate", "--fleet", "2", "--no-plot", flag, "inf")
        assert done.exit_code == 2 and "'inf' is too large" in done.stderr


@pytest.mark.exhaustive
def test_engines_are_measured_without_what_only_a_server_needs(tmp_path: Path) -> None:
    script = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in SERVER_ONLY:
            raise ModuleNotFoundError(name)

SERVER_ONLY = "fastapi starlette uvicorn zmq prometheus_client".split()
sys.meta_path.insert(0, Missing())
from weft.bench import decode
from weft.cli.main import app
decode.SHORT, decode.LONG = 1, 3
app(sys.argv[1:])
"""
    args = ("bench", "decode", *TINY, "--batch", "1", "--pattern", "identical", "--repeats", "1")
    done = subprocess.run(
        [sys.executable, "-c", script, *args, "--no-plot"],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["results"][0]["num_adapters"] == 1
    assert not list(tmp_path.iterdir())


def test_missing_plots_are_told_before_anything_is_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    done = weft("bench", "decode", *TINY)
    assert done.exit_code == 1 and "pip install 'weft[bench]'" in done.stderr


@pytest.mark.parametrize(
    ("command", "flag", "value"),
    [
        ("decode", "--pattern", "none,x"),
        ("throughput", "--input-len", "x"),
        ("serve http://127.0.0.1:9", "--choice", "x"),
        ("ready", "--output-len", "x"),
        ("churn", "--populations", "x"),
        ("simulate", "--policy", "x"),
        ("simulate --fleet 2", "--adapters", "1,2"),
        ("decode", "--plot", "x"),
        ("plot", "--history", "x"),
    ],
)
def test_wrong_arguments_are_told_before_missing_plots(
    command: str, flag: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("matplotlib", "aiohttp"):
        monkeypatch.setitem(sys.modules, module, None)
    done = weft("bench", *command.split(), flag, value)
    assert done.exit_code == 1 and f"weft: error: {flag}" in done.stderr


def test_a_narrow_terminal_cuts_no_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "60")
    small = ("--fleet", "2", "--seconds", "2", "--adapters", "10", "--no-plot")
    done = weft("bench", "simulate", *small)
    assert done.exit_code == 0 and "seconds" in done.stdout
    assert "bounded-hrw" in done.stdout and "…" not in done.stdout


def test_a_plot_that_may_not_be_replaced_is_refused_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plot = tmp_path / "decode.png"
    plot.touch()
    monkeypatch.setattr(os, "access", lambda path, mode: (path, mode) != (plot, os.W_OK))
    done = weft("bench", "decode", "--plot", str(plot), *TINY)
    assert done.exit_code == 1 and f"--plot {plot} can't be written" in done.stderr


# -- the load generator ----------------------------------------------------------------------------

TTFT_S, ITL_S = 0.03, 0.01

Write = Callable[[bytes], Awaitable[None]]


class Server:
    """An OpenAI-compatible server in its own thread; a model's name says how it behaves."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.paths: list[str] = []
        self.tokens: list[str] = []
        self.open = self.most_open = 0
        self.together = 1
        """So many requests must be open at once before any is answered."""
        self.gate = asyncio.Event()
        self.models = [("base", None), ("good", "base"), ("silent", "base")]

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                await self.answer(reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        lines = head.splitlines()
        headers = dict(line.lower().split(": ", 1) for line in lines[1:] if line)
        self.tokens.append(headers.get("authorization", ""))
        path = lines[0].split()[1]
        if path == "/v1/models":
            data = [{"id": name, "parent": parent} for name, parent in self.models]
            await reply(writer, 200, json.dumps({"data": data}))
            return
        body = json.loads(await reader.readexactly(int(headers["content-length"])))
        self.bodies.append(body)
        self.paths.append(path)
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        if self.most_open >= self.together:
            self.gate.set()
        try:
            await self.gate.wait()
            await self.generate(writer, body, chat=path.endswith("/chat/completions"))
        finally:
            self.open -= 1

    async def generate(self, writer: Any, body: dict[str, Any], chat: bool) -> None:
        model, count = body["model"], body["max_tokens"]
        if model.startswith("status-"):
            await reply(writer, int(model[7:]), '{"error": {"message": "as you wish"}}')
            return
        if model == "hang":
            await asyncio.sleep(60)
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        await asyncio.sleep(TTFT_S)
        if chat:
            await event(writer, choices=[{"delta": {"role": "assistant", "content": ""}}])
        for index in range(count):
            text = {"delta": {"content": "x"}} if chat else {"text": "x"}
            if model == "cut" and index == 2:
                raise ConnectionError
            if model == "garbage":
                await data(writer, "{")
            if model == "odd":
                await event(writer, choices={"text": "x"})
            if model == "endless":
                await data(writer, "x" * (3 << 20))
            if model == "failing" and index == 1:
                await event(writer, error={"message": "out of luck"})
            if model != "silent":
                await event(writer, choices=[{**text, "finish_reason": None}])
            await asyncio.sleep(ITL_S)
        if model != "unfinished":
            reason = "abort" if model == "aborted" else "length"
            await event(writer, choices=[{"text": "", "delta": {}, "finish_reason": reason}])
        if model != "good-without-usage":  # one of its chunks holds two tokens
            await event(writer, choices=[], usage={"completion_tokens": count + 1})
        await data(writer, "[DONE]")
        writer.write(b"0\r\n\r\n")
        await writer.drain()


async def reply(writer: asyncio.StreamWriter, status: int, text: str) -> None:
    head = f"HTTP/1.1 {status} X\r\nContent-Length: {len(text)}\r\n\r\n"
    writer.write((head + text).encode())
    await writer.drain()


async def event(writer: asyncio.StreamWriter, **chunk: object) -> None:
    await data(writer, json.dumps(chunk))


async def data(writer: asyncio.StreamWriter, text: str) -> None:
    line = f"data: {text}\n\n".encode()
    writer.write(b"%x\r\n%s\r\n" % (len(line), line))
    await writer.drain()


@contextmanager
def serving(server: Server) -> Iterator[str]:
    """Its URL."""
    loop = asyncio.new_event_loop()
    stop = asyncio.Event()
    port: list[int] = []
    ready = threading.Event()

    async def main() -> None:
        async with await asyncio.start_server(server.handle, "127.0.0.1", 0) as sockets:
            port.append(sockets.sockets[0].getsockname()[1])
            ready.set()
            await stop.wait()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    thread = threading.Thread(target=loop.run_until_complete, args=(main(),))
    thread.start()
    try:
        assert ready.wait(PATIENCE_S)
        yield f"http://127.0.0.1:{port[0]}"
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
        loop.close()


@pytest.fixture
def server() -> Server:
    return Server()


@pytest.fixture
def url(server: Server) -> Iterator[str]:
    with serving(server) as url:
        yield url


def load(url: str, *models: str, num_requests: int, **changed: Any) -> list[Outcome]:
    plan: dict[str, Any] = {
        "endpoint": "completions",
        "choice": Choice("round-robin"),
        "arrival": Arrival("all"),
        "input_len": Lengths(4, 4),
        "output_len": Lengths(4, 4),
        "ignore_eos": True,
        "seed": 0,
        "timeout_s": PATIENCE_S,
        **changed,
    }

    async def run() -> list[Outcome]:
        async with LoadClient(url, None) as client:
            chosen = LoadPlan(models=models, num_requests=num_requests, **plan)
            return (await run_load(client, chosen, lambda: None))[0]

    return asyncio.run(run())


def test_serve_from_end_to_end(server: Server, url: str, tmp_path: Path) -> None:
    plot = tmp_path / "serve.png"
    found = report(
        *("bench", "serve", f"{url}/v1/", "--num-requests", "12", "--arrival", "bursty:200,3"),
        *("--choice", "round-robin", "--input-len", "uniform:5,9", "--output-len", "4"),
        *("--api-key", "s3cret", "--plot", str(plot)),
    )
    results = found["results"]
    assert (results["requests"], results["succeeded"], results["errors"]) == (12, 12, {})
    assert list(results["models"]) == ["good", "silent"], "the adapters, but not the base"
    assert results["output_tokens"] == 12 * 5, "as the server counts"
    assert results["ttft_ms"]["p50"] >= 1000 * TTFT_S
    assert results["e2e_ms"]["p50"] >= 1000 * (TTFT_S + 4 * ITL_S)
    rate = results["output_tokens"] / results["seconds"]
    assert results["output_tokens_per_s"] == pytest.approx(rate, rel=0.01)
    assert set(server.tokens) == {"bearer s3cret"} and "s3cret" not in json.dumps(found)
    assert set(server.paths) == {"/v1/completions"}
    assert {len(b["prompt"]) for b in server.bodies} <= set(range(5, 10))
    assert all(b["stream"] and b["ignore_eos"] and b["max_tokens"] == 4 for b in server.bodies)
    assert plot.read_bytes().startswith(PNG)


def test_chat_counts_from_the_first_content(server: Server, url: str) -> None:
    [outcome] = load(url, "good", num_requests=1, endpoint="chat", ignore_eos=False)
    assert outcome.error is None and len(outcome.chunk_s) == 4, "the role is no output"
    assert server.paths == ["/v1/chat/completions"]
    [message] = server.bodies[0]["messages"]
    assert len(message["content"].split()) == 4 and "ignore_eos" not in server.bodies[0]


def test_tokens_are_chunks_when_the_server_does_not_count(url: str) -> None:
    [outcome] = load(url, "good-without-usage", num_requests=1)
    assert (outcome.error, outcome.num_tokens) == (None, 4)


def test_failures_are_told_apart_and_never_counted_as_answers(server: Server, url: str) -> None:
    kinds = {
        "good": None,
        "status-404": "http_404",
        "status-503": "http_503",
        "cut": "cut",
        "unfinished": "cut",
        "failing": "stream_error",
        "aborted": "stream_error",
        "garbage": "bad_stream",
        "odd": "bad_stream",
        "endless": "bad_stream",
    }
    outcomes = load(url, *kinds, num_requests=2 * len(kinds))
    assert [o.error for o in outcomes] == [*kinds.values(), *kinds.values()]
    assert outcomes[1].detail == '{"error": {"message": "as you wish"}}'
    assert outcomes[5].detail == '{"message": "out of luck"}'
    found = summarize(outcomes, 2.0)
    assert found["succeeded"] == 2 and found["output_tokens"] == 10
    assert (found["requests_per_s"], found["output_tokens_per_s"]) == (1.0, 5.0)
    assert found["errors"] == {
        "cut": 4,
        "stream_error": 4,
        "http_404": 2,
        "http_503": 2,
        "bad_stream": 6,
    }
    assert found["models"]["cut"]["ttft_ms"] == {"p50": None, "p90": None, "p99": None}


def test_any_failure_is_exit_status_1(server: Server, url: str, tmp_path: Path) -> None:
    server.models.append(("status-429", "base"))
    plot = tmp_path / "serve.png"
    done = weft(
        *("bench", "serve", url, "--models", "status-429", "--num-requests", "2"),
        *("--arrival", "all", "--plot", str(plot)),
    )
    assert done.exit_code == 1 and "http_429" in done.stdout
    found = last_line(done)
    assert found["ok"] is False and found["results"]["errors"] == {"http_429": 2}
    assert found["results"]["requests_per_s"] == 0
    assert plot.read_bytes().startswith(PNG), "a plot of nothing"


def test_requests_that_are_due_too_late_are_failures_too(url: str) -> None:
    outcomes = load(
        url, "good", num_requests=40, arrival=Arrival("poisson", rate=8.0), timeout_s=0.6
    )
    times = Arrival("poisson", rate=8.0).times_s(40, rng_of(0, 4))
    assert [o.due_s for o in outcomes] == times
    late = [o for o in outcomes if o.due_s > 0.6]
    assert len(late) > 20 and {o.error for o in late} == {"not_sent"}


def test_what_is_open_at_the_end_has_failed(url: str) -> None:
    outcomes = load(url, "hang", num_requests=3, timeout_s=0.3)
    assert [o.error for o in outcomes] == ["timeout"] * 3


def test_a_closed_loop_has_so_many_open_and_no_more(server: Server, url: str) -> None:
    server.together = 3
    outcomes = load(url, "good", num_requests=9, arrival=Arrival("closed", concurrency=3))
    assert {o.error for o in outcomes} == {None} and server.most_open == 3
    assert len(load(url, "good", num_requests=2, arrival=Arrival("closed", concurrency=5))) == 2


def test_an_open_loop_does_not_wait_for_answers(server: Server, url: str) -> None:
    server.together = 7
    assert {o.error for o in load(url, "good", num_requests=7)} == {None}


def test_statistics() -> None:
    def ended(model: str, due: float, sent: float, *chunks: float, tokens: int) -> Outcome:
        return Outcome(model, due, sent, list(chunks), chunks[-1] + 0.5, tokens, None)

    outcomes = [
        ended("a", 0.0, 1.0, 1.5, 2.5, 3.5, tokens=5),
        ended("a", 2.0, 2.0, 2.1, tokens=1),
        Outcome("b", 0.0, 0.0, [9.0], 9.0, 0, "cut"),
    ]
    found = summarize(outcomes, 10.0)
    assert found["ttft_ms"]["p50"] == pytest.approx((1500 + 100) / 2), "from when it was due"
    assert found["e2e_ms"]["p50"] == pytest.approx((4000 + 600) / 2)
    assert found["tpot_ms"]["p50"] == pytest.approx(2000 / 4), "of answers with several tokens"
    assert found["itl_ms"]["p50"] == pytest.approx(1000)
    assert found["client_late_ms"]["p99"] == pytest.approx(np.percentile([1000, 0, 0], 99))
    assert found["output_tokens"] == 6 and found["output_tokens_per_s"] == 0.6
    assert list(found["models"]) == ["a", "b"], "the busiest first"
    assert found["models"]["a"]["requests"] == 2 and found["models"]["b"]["errors"] == {"cut": 1}


def test_models_to_ask(server: Server, url: str) -> None:
    args = ("bench", "serve", url, "--num-requests", "3", "--arrival", "all", "--no-plot")
    every = ("--include-base", "--choice", "round-robin")
    assert list(report(*args, *every)["results"]["models"]) == ["good", "silent", "base"]
    assert "no model 'other'" in weft(*args, "--models", "good,other").stderr
    server.models = [("base", None)]
    assert "the server has no adapters" in weft(*args).stderr

"""`weft demo`: a real server process, eleven tiny adapters, every answer checked.

start the server ─> load one adapter more ─> chat with all at once ─> measure: all in one
batch, then one after the other ─> unload that adapter ─> table, figures, how to go on, JSON
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Coroutine, Iterable, Iterator, Sequence
from importlib.metadata import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID

from weft.cli.demo_results import (
    BASE,
    Answer,
    DemoOutcome,
    Examples,
    Question,
    Round,
    figures,
    print_next_steps,
    report,
    table,
)
from weft.core.errors import ConfigError

if TYPE_CHECKING:
    from openai import AsyncOpenAI

WORDS_EACH = 8
"""Requests for each adapter and for the base."""
REPEATS = 3
"""How often the measured requests are asked."""
PROMPT = "<|bos|><|user|>{}<|end|><|assistant|>"
"""What the base's chat template makes of a word."""
MAX_TOKENS = 32
START_S, STOP_S, REQUEST_S = 120.0, 35.0, 60.0
SEED = 2026


def run_demo(folder: Path | None, port: int) -> bool:
    """Run it; whether every answer was right. Raises ConfigError when it can't be run."""
    examples = _find_examples(folder)
    if importlib.util.find_spec("openai") is None:
        raise ConfigError("the demo needs the openai client: pip install 'weft[demo]'", "openai")
    console = Console()
    models = [BASE, *examples.adapters]
    console.print(
        f"[bold]Weft[/]: {len(models) - 1} LoRA adapters over one base model, in one batch.\n"
    )
    with _server(examples, port, console) as url:
        outcome = asyncio.run(_ask(examples, url, models, console))
    console.print(table(examples, outcome))
    console.print(figures(outcome))
    print_next_steps(console, examples)
    print(json.dumps(report(outcome)), flush=True)
    return outcome.ok


# -- what is needed --------------------------------------------------------------------------------


def _find_examples(folder: Path | None) -> Examples:
    found = _own_examples() if folder is None else folder.expanduser()
    script = found / "tasks.py"
    if not script.is_file() or not (found / "base").is_dir():
        raise ConfigError(
            f"{found} does not hold the demo's models; clone Weft's repository and give its folder"
            " with --examples path/to/examples/tiny",
            "examples",
        )
    spec = importlib.util.spec_from_file_location("weft_tiny_tasks", script)
    assert spec is not None and spec.loader is not None
    tasks = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = tasks  # dataclasses look their module up
    spec.loader.exec_module(tasks)
    return Examples(found, tasks)


def _own_examples() -> Path:
    """The folder of a checkout, or else the one that was installed with the wheel."""
    checkout = Path(__file__).resolve().parents[3] / "examples" / "tiny"
    if checkout.is_dir():
        return checkout
    installed = [file for file in files("weft") or () if file.match("share/weft/tiny/tasks.py")]
    return Path(str(installed[0].locate())).resolve().parent if installed else checkout


# -- the server ------------------------------------------------------------------------------------


@contextlib.contextmanager
def _server(examples: Examples, port: int, console: Console) -> Iterator[str]:
    """`weft serve` as a process of its own, which ends with the block; its URL."""
    port = port or _free_port()
    url = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "weft", "serve", *_serve_args(examples, port)],
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        previous = signal.signal(signal.SIGTERM, _exit)
        try:
            with console.status("Starting the server"):
                seconds = _wait_until_healthy(process, url, log)
            console.print(f"Server started in {seconds:.1f} s: {url}")
            yield url
        finally:
            process.terminate()
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            signal.signal(signal.SIGTERM, previous)


def _serve_args(examples: Examples, port: int) -> list[str]:
    """All adapters but the last, which is loaded while serving. One thread: a model this small
    gains nothing from more."""
    return [
        str(examples.base),
        f"--port={port}",
        f"--served-model-name={BASE}",
        f"--lora-root={examples.folder / 'adapters'}",
        "--num-threads=1",
        "--kv-cache-memory=64M",
        "--adapter-memory=64M",
        "--lora-modules",
        *(f"{name}={examples.adapter(name)}" for name in examples.adapters[:-1]),
    ]


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def _wait_until_healthy(process: subprocess.Popen[bytes], url: str, log: Any) -> float:
    """Seconds that it took. Raises ConfigError with the end of the server's log."""
    started = time.monotonic()
    while (waited := time.monotonic() - started) < START_S:
        if process.poll() is not None:
            raise ConfigError(f"the server did not start: {_tail(log)}")
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=5):
            return waited
        time.sleep(0.05)
    raise ConfigError(f"the server was not ready within {START_S:.0f} s: {_tail(log)}")


def _tail(log: Any) -> str:
    log.seek(0)
    return str(log.read()).strip()[-600:] or "it said nothing"


def _exit(number: int, frame: object) -> None:
    raise SystemExit(128 + number)


# -- the requests ----------------------------------------------------------------------------------


async def _ask(
    examples: Examples, url: str, models: Sequence[str], console: Console
) -> DemoOutcome:
    from openai import AsyncOpenAI, OpenAIError

    late = examples.adapters[-1]
    words = examples.tasks.words(SEED, WORDS_EACH)
    questions = [Question(m, w, examples.expected(m, w)) for w in words for m in models]
    groups = [[q for q in questions if q.model == model] for model in models]
    async with AsyncOpenAI(
        base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=REQUEST_S
    ) as client:
        started = time.perf_counter()
        path = str(examples.adapter(late).absolute())
        await _post(url, "load_lora_adapter", {"lora_name": late, "lora_path": path})
        load_s = time.perf_counter() - started
        console.print(f"Adapter {late!r} loaded while serving, in {load_s * 1000:.0f} ms\n")
        try:
            columns = "{task.description:<26}", BarColumn(bar_width=24), MofNCompleteColumn()
            with Progress(*columns, console=console) as progress:
                rounds = await _rounds(client, progress, questions, groups)
        except OpenAIError as error:
            raise ConfigError(f"a request failed: {error}") from error
        await _post(url, "unload_lora_adapter", {"lora_name": late})
        status = await _status_of(client, late)
    return DemoOutcome(*rounds, late, load_s, status, len(models))


async def _rounds(
    client: AsyncOpenAI, progress: Progress, questions: list[Question], groups: list[list[Question]]
) -> tuple[Round, Round, Round]:
    """A chat request for each question, all at once; then, for the figures, one completion
    request for each group, which keeps the client's own work small: all at once, and in turn."""
    total = len(questions)
    chat = progress.add_task("Chat with all of them", total=total)
    mixed = progress.add_task("Speed: in one batch", total=total * REPEATS)
    single = progress.add_task("Speed: one after the other", total=total * REPEATS)

    async def ask_one(question: Question) -> list[Answer]:
        answer = await _answer(client, question)
        progress.advance(chat)
        return [answer]

    async def ask_group(group: list[Question], bar: TaskID) -> list[Answer]:
        answers = await _complete(client, group)
        progress.advance(bar, len(group))
        return answers

    return (
        await _timed([map(ask_one, questions)]),
        await _timed([[ask_group(g, mixed) for g in groups] for _ in range(REPEATS)]),
        await _timed([[ask_group(g, single)] for _ in range(REPEATS) for g in groups]),
    )


async def _timed(waves: Iterable[Iterable[Coroutine[Any, Any, list[Answer]]]]) -> Round:
    """Wave after wave, the requests of each at the same time."""
    answers: list[Answer] = []
    started = time.perf_counter()
    for wave in waves:
        for found in await asyncio.gather(*wave):
            answers += found
    return Round(answers, time.perf_counter() - started)


async def _answer(client: AsyncOpenAI, question: Question) -> Answer:
    completion = await client.chat.completions.create(
        model=question.model,
        messages=[{"role": "user", "content": question.word}],
        temperature=0,
        max_tokens=MAX_TOKENS,
    )
    num_tokens = completion.usage.completion_tokens if completion.usage else 0
    return Answer(question, completion.choices[0].message.content or "", num_tokens)


async def _complete(client: AsyncOpenAI, group: list[Question]) -> list[Answer]:
    """The answers of one model to many words, in one request. The number of tokens is known for
    the whole request; the first answer carries it."""
    completion = await client.completions.create(
        model=group[0].model,
        prompt=[PROMPT.format(q.word) for q in group],
        temperature=0,
        max_tokens=MAX_TOKENS,
    )
    num_tokens = completion.usage.completion_tokens if completion.usage else 0
    return [
        Answer(question, choice.text, 0 if index else num_tokens)
        for index, (question, choice) in enumerate(zip(group, completion.choices, strict=True))
    ]


async def _post(url: str, verb: str, body: dict[str, str]) -> None:
    """Raises ConfigError with the server's answer when it refuses."""
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/{verb}", json.dumps(body).encode(), headers)
    try:
        await asyncio.to_thread(lambda: urllib.request.urlopen(request, timeout=30).close())
    except urllib.error.HTTPError as error:
        raise ConfigError(f"{verb}: {error.read().decode()}") from error


async def _status_of(client: AsyncOpenAI, model: str) -> int:
    """The HTTP status of a request for a model."""
    from openai import APIStatusError

    try:
        await _answer(client, Question(model, "planet", ""))
    except APIStatusError as error:
        return int(error.status_code)
    return 200

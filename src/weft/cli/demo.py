"""`weft demo`: a real server process, eleven tiny adapters, every answer checked.

start the server ─> load one adapter more ─> chat with all at once ─> measure: all in one
batch, then one after the other ─> unload that adapter ─> table, figures, how to go on

Where stdout is no terminal, its last line is the result as JSON.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import sys
import tempfile
import time
from collections.abc import Coroutine, Iterable, Sequence
from importlib.metadata import files
from pathlib import Path
from typing import Any

import httpx
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
from weft.core.folders import at_home
from weft.core.ports import check_free
from weft.terminal.child_server import child_server

WORDS_EACH = 8
"""Requests for each adapter and for the base."""
REPEATS = 3
"""How often the measured requests are asked."""
PROMPT = "<|bos|><|user|>{}<|end|><|assistant|>"
"""What the base's chat template makes of a word."""
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 32}
START_S, REQUEST_S = 240.0, 60.0
SEED = 2026


def run_demo(folder: Path | None, port: int, hybrid: bool = False) -> bool:
    """Run it, on the base with linear attention if `hybrid`; whether every answer was right. Raises
    ConfigError when it can't be run."""
    examples = _find_examples(folder, hybrid)
    # What another program answers there would be taken for the demo's server.
    port = check_free("127.0.0.1", port, "--port")
    console = Console()
    models = [BASE, *examples.adapters]
    console.print(
        f"[bold]Weft[/]: {len(models) - 1} LoRA adapters over one base model, in one batch.\n"
    )
    with (
        tempfile.TemporaryFile("w+") as log,
        console.status("Starting the server") as starting,
        child_server(_serve_args(examples), port, log, START_S) as (url, seconds),
    ):
        starting.stop()
        console.print(f"Server started in {seconds:.1f} s: {url}")
        outcome = asyncio.run(_ask(examples, url, models, console))
    console.print(table(examples, outcome))
    console.print(figures(outcome))
    print_next_steps(console, examples)
    if not sys.stdout.isatty():
        print(json.dumps(report(outcome)), flush=True)
    return outcome.ok


# -- what is needed --------------------------------------------------------------------------------


def _find_examples(folder: Path | None, hybrid: bool) -> Examples:
    found = _own_examples() if folder is None else at_home(folder)
    script, models = found / "tasks.py", found / "hybrid" if hybrid else found
    if not script.is_file() or not (models / "base").is_dir():
        raise ConfigError(
            f"{models} does not hold the demo's models; clone Weft's repository and give its folder"
            " with --examples path/to/examples/tiny",
            "examples",
        )
    spec = importlib.util.spec_from_file_location("weft_tiny_tasks", script)
    assert spec is not None and spec.loader is not None
    tasks = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = tasks  # dataclasses look their module up
    spec.loader.exec_module(tasks)
    return Examples(models, tasks)


def _own_examples() -> Path:
    """The folder of a checkout, or else the one that was installed with the wheel."""
    checkout = Path(__file__).resolve().parents[3] / "examples" / "tiny"
    if checkout.is_dir():
        return checkout
    installed = [file for file in files("weft") or () if file.match("share/weft/tiny/tasks.py")]
    return Path(str(installed[0].locate())).resolve().parent if installed else checkout


# -- the server ------------------------------------------------------------------------------------


def _serve_args(examples: Examples) -> list[str]:
    """All adapters but the last, which is loaded while serving. One thread: a model this small
    gains nothing from more."""
    return [
        str(examples.base),
        f"--served-model-name={BASE}",
        f"--lora-root={examples.folder / 'adapters'}",
        "--num-threads=1",
        "--kv-cache-memory=64M",
        "--adapter-memory=64M",
        "--lora-modules",
        *(f"{name}={examples.adapter(name)}" for name in examples.adapters[:-1]),
    ]


# -- the requests ----------------------------------------------------------------------------------


async def _ask(
    examples: Examples, url: str, models: Sequence[str], console: Console
) -> DemoOutcome:
    late = examples.adapters[-1]
    words = examples.tasks.words(SEED, WORDS_EACH)
    questions = [Question(m, w, examples.expected(m, w)) for w in words for m in models]
    groups = [[q for q in questions if q.model == model] for model in models]
    async with httpx.AsyncClient(base_url=f"{url}/v1", timeout=REQUEST_S) as client:
        started = time.perf_counter()
        path = str(examples.adapter(late).absolute())
        await _post(client, "load_lora_adapter", {"lora_name": late, "lora_path": path})
        load_s = time.perf_counter() - started
        console.print(f"Adapter {late!r} loaded while serving, in {load_s * 1000:.0f} ms\n")
        columns = "{task.description:<26}", BarColumn(bar_width=24), MofNCompleteColumn()
        with Progress(*columns, console=console) as progress:
            rounds = await _rounds(client, progress, questions, groups)
        await _post(client, "unload_lora_adapter", {"lora_name": late})
        asked = _chat(Question(late, "planet", ""))
        status = (await client.post("chat/completions", json=asked)).status_code
    return DemoOutcome(*rounds, late, load_s, status, len(models))


async def _rounds(
    client: httpx.AsyncClient,
    progress: Progress,
    questions: list[Question],
    groups: list[list[Question]],
) -> tuple[Round, Round, Round]:
    """A chat request for each question, all at once; then, for the figures, one completion
    request for each group, which keeps the client's own work small: all at once, and in turn."""
    total = len(questions)
    chat = progress.add_task("Chat with all of them", total=total)
    mixed = progress.add_task("Speed: in one batch", total=total * REPEATS)
    single = progress.add_task("Speed: one after the other", total=total * REPEATS)

    async def ask_one(question: Question) -> list[Answer]:
        answer = await _post(client, "chat/completions", _chat(question))
        progress.advance(chat)
        said = answer["choices"][0]["message"]["content"]
        return [Answer(question, said, answer["usage"]["completion_tokens"])]

    async def ask_group(group: list[Question], bar: TaskID) -> list[Answer]:
        answers = await _complete(client, group)
        progress.advance(bar, len(group))
        return answers

    return (
        await _timed([map(ask_one, questions)]),
        await _timed([ask_group(g, mixed) for g in groups] for _ in range(REPEATS)),
        await _timed([ask_group(g, single)] for _ in range(REPEATS) for g in groups),
    )


async def _timed(waves: Iterable[Iterable[Coroutine[Any, Any, list[Answer]]]]) -> Round:
    """Wave after wave, the requests of each at the same time."""
    answers: list[Answer] = []
    started = time.perf_counter()
    for wave in waves:
        for found in await asyncio.gather(*wave):
            answers += found
    return Round(answers, time.perf_counter() - started)


def _chat(question: Question) -> dict[str, Any]:
    messages = [{"role": "user", "content": question.word}]
    return {"model": question.model, "messages": messages, **GREEDY}


async def _complete(client: httpx.AsyncClient, group: list[Question]) -> list[Answer]:
    """The answers of one model to many words, in one request. The number of tokens is known for
    the whole request; the first answer carries it."""
    prompts = [PROMPT.format(question.word) for question in group]
    body = {"model": group[0].model, "prompt": prompts, **GREEDY}
    answer = await _post(client, "completions", body)
    num_tokens = answer["usage"]["completion_tokens"]
    return [
        Answer(question, choice["text"], 0 if index else num_tokens)
        for index, (question, choice) in enumerate(zip(group, answer["choices"], strict=True))
    ]


async def _post(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> Any:
    """The answer, as JSON if it is that. Raises ConfigError if the server refuses, or is gone."""
    try:
        answer = await client.post(path, json=body)
    except httpx.HTTPError as error:
        raise ConfigError(f"{path} failed: {error!r}") from error
    if answer.is_error:
        raise ConfigError(f"{path} was refused: {answer.text}")
    is_json = answer.headers["content-type"].startswith("application/json")
    return answer.json() if is_json else answer.text

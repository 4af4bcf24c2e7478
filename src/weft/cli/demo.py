"""`weft demo`: a real server process, eleven tiny adapters, every answer checked.

start the server ─> load one adapter more ─> chat with all at once ─> measure: all in one
batch, then one after the other ─> unload that adapter ─> table, figures, how to go on, JSON
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Coroutine, Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import files
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console, Group
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
)
from rich.table import Table
from rich.text import Text

from weft.core.errors import ConfigError

if TYPE_CHECKING:
    from openai import AsyncOpenAI

BASE = "base"
"""The base model's served name."""
WORDS_EACH = 8
"""Requests for each adapter and for the base."""
REPEATS = 3
"""How often the measured requests are asked."""
PROMPT = "<|bos|><|user|>{}<|end|><|assistant|>"
"""What the base's chat template makes of a word."""
MAX_TOKENS = 32
START_S, STOP_S, REQUEST_S = 120.0, 35.0, 60.0
SEED = 2026
SHOWN_LENGTH = 6
"""Letters of the words in the table, about."""


@dataclass(frozen=True, slots=True)
class Examples:
    """The folder examples/tiny."""

    folder: Path
    tasks: ModuleType

    @property
    def base(self) -> Path:
        return self.folder / "base"

    @property
    def adapters(self) -> list[str]:
        return list(self.tasks.TASKS)

    def adapter(self, name: str) -> Path:
        return self.folder / "adapters" / name

    def expected(self, model: str, word: str) -> str:
        task = self.tasks.TASKS.get(model)
        return str(task.answer(word) if task else self.tasks.base_answer(word))


@dataclass(frozen=True, slots=True)
class Question:
    """One request: a word for a model."""

    model: str
    word: str
    expected: str


@dataclass(frozen=True, slots=True)
class Answer:
    question: Question
    text: str
    num_tokens: int

    @property
    def right(self) -> bool:
        return self.text == self.question.expected


@dataclass(frozen=True, slots=True)
class Round:
    """The same questions, asked in one way."""

    answers: list[Answer]
    seconds: float

    @property
    def tokens_per_s(self) -> float:
        return sum(a.num_tokens for a in self.answers) / self.seconds


@dataclass(frozen=True, slots=True)
class Swap:
    """What came of loading and unloading an adapter while serving."""

    name: str
    load_s: float
    status_after: int
    """Of a request for it once it was unloaded; 404 is right."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """All that the demo found."""

    chat: Round
    mixed: Round
    single: Round
    swap: Swap
    num_models: int
    """The adapters and the base."""

    @property
    def answers(self) -> list[Answer]:
        return [*self.chat.answers, *self.mixed.answers, *self.single.answers]

    @property
    def num_right(self) -> int:
        return sum(a.right for a in self.answers)

    @property
    def ok(self) -> bool:
        return self.num_right == len(self.answers) and self.swap.status_after == 404


def run_demo(folder: Path | None, port: int) -> bool:
    """Run it; whether every answer was right. Raises ConfigError when it can't be run."""
    examples = _find_examples(folder)
    _need_openai()
    console = Console()
    models = [BASE, *examples.adapters]
    console.print(
        f"[bold]Weft[/]: {len(models) - 1} LoRA adapters over one base model, in one batch.\n"
    )
    with _server(examples, port, console) as url:
        outcome = asyncio.run(_ask(examples, url, models, console))
    console.print(_table(examples, outcome))
    console.print(_figures(outcome))
    _print_next_steps(console, examples)
    print(json.dumps(_report(outcome)), flush=True)
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


def _need_openai() -> None:
    if importlib.util.find_spec("openai") is None:
        raise ConfigError("the demo needs the openai client: pip install 'weft[demo]'", "openai")


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
            _end(process)
            signal.signal(signal.SIGTERM, previous)


def _serve_args(examples: Examples, port: int) -> list[str]:
    """All adapters but the last, which is loaded while serving. One thread: a model this small
    gains nothing from more."""
    at_start = examples.adapters[:-1]
    modules = [f"{name}={examples.adapter(name)}" for name in at_start]
    flags = {
        "--port": str(port),
        "--served-model-name": BASE,
        "--lora-root": str(examples.folder / "adapters"),
        "--num-threads": "1",
        "--kv-cache-memory": "64M",
        "--adapter-memory": "64M",
    }
    pairs = [part for flag in flags.items() for part in flag]
    return [str(examples.base), *pairs, "--lora-modules", *modules]


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def _wait_until_healthy(process: subprocess.Popen[bytes], url: str, log: Any) -> float:
    """Seconds that it took. Raises ConfigError with the end of the server's log."""
    started = time.monotonic()
    while (waited := time.monotonic() - started) < START_S:
        if process.poll() is not None:
            raise ConfigError(f"the server did not start: {_tail(log)}")
        with (
            contextlib.suppress(OSError),
            urllib.request.urlopen(f"{url}/health", timeout=5),
        ):
            return waited
        time.sleep(0.05)
    raise ConfigError(f"the server was not ready within {START_S:.0f} s: {_tail(log)}")


def _tail(log: Any) -> str:
    log.seek(0)
    return str(log.read()).strip()[-600:] or "it said nothing"


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _exit(number: int, frame: object) -> None:
    raise SystemExit(128 + number)


# -- the requests ----------------------------------------------------------------------------------


async def _ask(examples: Examples, url: str, models: Sequence[str], console: Console) -> Outcome:
    from openai import AsyncOpenAI, OpenAIError

    late = examples.adapters[-1]
    words = examples.tasks.words(SEED, WORDS_EACH)
    questions = [Question(m, w, examples.expected(m, w)) for w in words for m in models]
    groups = [[q for q in questions if q.model == model] for model in models]
    async with AsyncOpenAI(
        base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=REQUEST_S
    ) as client:
        load_s = await _load(url, late, examples.adapter(late))
        console.print(f"Adapter {late!r} loaded while serving, in {load_s * 1000:.0f} ms\n")
        try:
            with _progress(console) as progress:
                rounds = await _rounds(client, progress, questions, groups)
        except OpenAIError as error:
            raise ConfigError(f"a request failed: {error}") from error
        await _post(url, "unload_lora_adapter", {"lora_name": late})
        status = await _status_of(client, late)
    return Outcome(*rounds, Swap(late, load_s, status), len(models))


async def _rounds(
    client: AsyncOpenAI,
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


def _progress(console: Console) -> Progress:
    columns = (
        TextColumn("{task.description:<26}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
    )
    return Progress(*columns, console=console)


async def _answer(client: AsyncOpenAI, question: Question) -> Answer:
    completion = await client.chat.completions.create(
        model=question.model,
        messages=[{"role": "user", "content": question.word}],
        temperature=0,
        max_tokens=MAX_TOKENS,
    )
    usage = completion.usage
    return Answer(
        question,
        completion.choices[0].message.content or "",
        usage.completion_tokens if usage else 0,
    )


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


async def _load(url: str, name: str, path: Path) -> float:
    """Seconds that it took."""
    started = time.perf_counter()
    await _post(url, "load_lora_adapter", {"lora_name": name, "lora_path": str(path.absolute())})
    return time.perf_counter() - started


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
        return error.status_code
    return 200


# -- what is shown ---------------------------------------------------------------------------------


def _table(examples: Examples, outcome: Outcome) -> Table:
    """One line a model: a short answer, or a wrong one, and how many were right."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    for title, style in (("adapter", "bold"), ("rank", ""), ("targets", "dim"), ("prompt", "")):
        table.add_column(title, style=style)
    table.add_column("output", style="cyan", overflow="fold")
    table.add_column("right", no_wrap=True, justify="right")
    for model in (BASE, *examples.adapters):
        answers = [a for a in outcome.answers if a.question.model == model]
        num_right = sum(a.right for a in answers)
        shown = min(answers, key=lambda a: (a.right, abs(len(a.question.word) - SHOWN_LENGTH)))
        output = shown.text if shown.right else f"{shown.text}, not {shown.question.expected}"
        colour = "green" if num_right == len(answers) else "red"
        rank, targets = ("", "none") if model == BASE else _shape(examples.adapter(model))
        name = f"{model}*" if model == outcome.swap.name else model
        score = Text(f"{num_right}/{len(answers)}", colour)
        table.add_row(name, rank, targets, shown.question.word, Text(output), score)
    return table


_SETS = {
    "attention": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "MLP": ("gate_proj", "up_proj", "down_proj"),
}
_SHORT = {"embed_tokens": "embed", "lm_head": "head"}


def _shape(adapter: Path) -> tuple[str, str]:
    """Rank and targets, from the adapter's own configuration."""
    config = json.loads((adapter / "adapter_config.json").read_text(encoding="utf-8"))
    ranks = sorted({config["r"], *config["rank_pattern"].values()})
    rank = str(ranks[0]) if len(ranks) == 1 else f"{ranks[0]}-{ranks[-1]}"
    targets = ", ".join(_words_for(set(config["target_modules"])))
    return rank, targets + (", rsLoRA" if config["use_rslora"] else "")


def _words_for(targets: set[str]) -> Iterator[str]:
    """Short names of adapted projections, in the model's order."""
    order = ["embed_tokens", *_SETS["attention"], *_SETS["MLP"], "lm_head"]
    if targets == set(order[1:-1]):
        yield "all linear"
        return
    for name, members in _SETS.items():
        if targets.issuperset(members):
            yield name
            targets = targets.difference(members)
    for target in sorted(targets, key=order.index):
        yield _SHORT.get(target, target.removesuffix("_proj"))


def _figures(outcome: Outcome) -> Group:
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    num_prompts = len(outcome.mixed.answers)
    for name, result in (
        (f"{num_prompts} prompts to {outcome.num_models} models, in one batch", outcome.mixed),
        ("the same prompts, one model after the other", outcome.single),
    ):
        table.add_row(name, f"[bold]{result.tokens_per_s:,.0f}[/] tokens/s")
    swap = outcome.swap
    gone = "404" if swap.status_after == 404 else f"[red]{swap.status_after} instead of 404[/]"
    note = f"* loaded while the server ran, and unloaded at the end: asked again, it is a {gone}"
    return Group(Text.from_markup(note, style="dim"), "", table, "")


def _print_next_steps(console: Console, examples: Examples) -> None:
    folder = _short(examples.folder)
    names = examples.adapters[:2]
    lines = (
        f"{_weft()} serve {folder}/base --lora-modules \\",
        *(f"    {name}={folder}/adapters/{name} \\" for name in names),
        f"    --lora-root {folder}/adapters",
        "",
        "curl localhost:8000/v1/chat/completions -H 'Content-Type: application/json' -d '",
        f'    {{"model": "{names[0]}", "messages": [{{"role": "user", "content": "planet"}}]}}\'',
    )
    console.print("[bold]Serve it yourself[/], and ask from a second terminal:\n")
    for line in lines:
        console.print(Text(f"  {line}" if line else "", "cyan"), soft_wrap=True)
    console.print()


def _weft() -> str:
    """How this user calls `weft`."""
    beside = Path(sys.executable).parent / "weft"
    on_path = shutil.which("weft")
    if not beside.exists():
        return f"{_short(Path(sys.executable))} -m weft"
    return "weft" if on_path and Path(on_path).samefile(beside) else _short(beside)


def _short(path: Path) -> str:
    """Relative to the current folder if that is shorter."""
    path = Path(os.path.abspath(path))  # noqa: PTH100 (a venv's python is a link to be kept)
    cwd = Path.cwd()
    return shlex.quote(str(path.relative_to(cwd) if path.is_relative_to(cwd) else path))


def _report(outcome: Outcome) -> dict[str, Any]:
    return {
        "ok": outcome.ok,
        "adapters": outcome.num_models - 1,
        "answers": len(outcome.answers),
        "right": outcome.num_right,
        "mixed_tokens_per_s": round(outcome.mixed.tokens_per_s, 1),
        "one_at_a_time_tokens_per_s": round(outcome.single.tokens_per_s, 1),
        "load_ms": round(outcome.swap.load_s * 1000, 1),
        "status_after_unload": outcome.swap.status_after,
    }

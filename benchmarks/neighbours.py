"""What a client's requests cost the others: a victim with small requests beside each attack.

    python benchmarks/neighbours.py --seconds 10

For each attack, a server of its own with `examples/tiny` is started, with one named key for the
victim and another for the attacker. The victim streams short answers all the time, alone at first;
then the attacker sends what the attack is made of as fast as the server takes it, from a process of
its own. That process gives way to all others, as an attacker has a machine of its own. What counts
is how long the victim waits for its first token, the worst gap between two of its tokens, and
whether it is ever refused.

`--model DIR --flags "FLAGS"` serves another model, in another way; attacks that load adapters need
the tiny one. `--preset NAME` serves random weights in the shape of a model that `weft bench` knows,
with the vocabulary of the tiny one, and `--one-server` starts one for all attacks: on a GPU

    python benchmarks/neighbours.py --preset llama-3-8b --one-server \
        --attacks fair-share many-choices --flags "--device cuda --kv-cache-memory 8G"

`--command "CMD"` measures another `weft`. `--before "CMD"` measures an older version
too, in the same run, and shows it beside the other:

    git archive COMMIT src | tar x -C DIR
    python benchmarks/neighbours.py --before "env PYTHONPATH=DIR/src python -m weft"

`--at-a-time N` measures N attacks side by side, each on two cores of its own, where a machine has
so many that nobody else wants. A server that does not start costs its own figures only.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import os
import re
import shlex
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console

from weft.bench.client import LoadClient, Outcome
from weft.bench.engine import PRESETS
from weft.bench.report import new_table
from weft.core.processes import freeze_heap

TINY = Path(__file__).parents[1] / "examples" / "tiny"
VICTIM, ATTACKER = "victim-key", "attacker-key"
SERVER = {
    "--port": "0",
    "--served-model-name": "base",
    "--num-threads": "1",
    "--kv-cache-memory": "16M",
    "--max-num-seqs": "32",
    "--log-level": "error",
}
START_S = 120.0
PATIENCE_S = 30.0
"""How long the victim waits for one answer before it is counted as failed."""
CORES = 2
"""How many cores server, victim and attacker have, where several attacks are measured at a time."""
RAMP_S_PER_CLIENT = 0.01
"""How long an attack takes to begin, for each of its clients."""
ANSWER_TOKENS = 24
PAUSE_S = 0.05
"""The victim's pause between two requests of one of its clients."""
VICTIM_CLIENTS = 2

Body = dict[str, Any]


@dataclass(frozen=True)
class Attack:
    """What an attacker sends: the same request again and again, from several clients."""

    what: str
    """What is sent, in a few words."""
    route: str = "/v1/chat/completions"
    body: Callable[[Path], Body] = field(default=lambda _: {})
    """The request's body; it is given the folder below which adapters may be loaded."""
    clients: int = 8
    sockets: int = 0
    """How many connections are opened that never send anything."""


def chat(**fields: Any) -> Body:
    return {
        "model": "base",
        "messages": [{"role": "user", "content": "planet"}],
        "max_tokens": 16,
        **fields,
    }


def completion(**fields: Any) -> Body:
    return {"model": "base", "prompt": "planet", "max_tokens": 16, **fields}


def regex(pattern: str, **fields: Any) -> Body:
    return chat(structured_outputs={"regex": pattern}, **fields)


def large_schema() -> Body:
    properties = {f"field_{i}": {"type": "string"} for i in range(12_000)}
    schema = {"type": "object", "properties": properties}
    form = {"type": "json_schema", "json_schema": {"name": "large", "schema": schema}}
    return chat(response_format=form, n=128)


def with_template(template: str) -> Callable[[Path], Body]:
    """A load of an adapter that brings this chat template."""

    def make(root: Path) -> Body:
        folder = copied(root, "templated")
        (folder / "chat_template.jinja").write_text(template)
        return {"lora_name": "templated", "lora_path": str(folder), "load_inplace": True}

    return make


def with_slow_tokenizer(root: Path) -> Body:
    """A load of an adapter whose normalizer takes exponential time."""
    folder = copied(root, "tokenized")
    tokenizer = json.loads((TINY / "base" / "tokenizer.json").read_text())
    pattern = {"Regex": "(a|aa)+$"}
    tokenizer["normalizer"] = {"type": "Replace", "pattern": pattern, "content": "b"}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return {"lora_name": "tokenized", "lora_path": str(folder), "load_inplace": True}


def with_large_header(root: Path) -> Body:
    """A load of an adapter with a header of 200,000 tensors."""
    folder = copied(root, "headed")
    entry = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    header = json.dumps({f"tensor_{i}": entry for i in range(200_000)}).encode()
    data = len(header).to_bytes(8, "little") + header
    (folder / "adapter_model.safetensors").write_bytes(data)
    return {"lora_name": "headed", "lora_path": str(folder), "load_inplace": True}


def copied(root: Path, name: str) -> Path:
    return Path(shutil.copytree(TINY / "adapters" / "upper", root / name, dirs_exist_ok=True))


LOAD = "/v1/load_lora_adapter"
LOOPS = "{% for a in range(90000) %}" * 4 + "x" + "{% endfor %}" * 4
ATTACKS = {
    "long-text": Attack(
        "8 MB of text, to be truncated",
        "/v1/completions",
        lambda _: completion(prompt="lorem ipsum " * 650_000, truncate_prompt_tokens=8),
    ),
    "largest-text": Attack(
        "1 MB of text, to be truncated",
        "/v1/completions",
        lambda _: completion(prompt="lorem ipsum " * 80_000, truncate_prompt_tokens=8),
    ),
    "most-messages": Attack(
        "2,000 messages of 450 characters",
        body=lambda _: chat(messages=[{"role": "user", "content": "lorem " * 75}] * 2000),
    ),
    "empty-messages": Attack(
        "280,000 empty messages",
        body=lambda _: chat(messages=[{"role": "user", "content": ""}] * 280_000),
    ),
    "short-prompts": Attack(
        "a million prompts of one token",
        "/v1/completions",
        lambda _: completion(prompt=[[5]] * 1_000_000),
    ),
    "detokenize": Attack(
        "8 MB of token ids as text",
        "/detokenize",
        lambda _: {"model": "base", "tokens": [65] * 2_000_000},
    ),
    "large-schema": Attack("a schema of 12,000 fields, 128 choices", body=lambda _: large_schema()),
    "prompt-logprobs": Attack(
        "log-probabilities of 128 prompts",
        "/v1/completions",
        lambda _: completion(prompt=["planet " * 60] * 128, prompt_logprobs=20, max_tokens=1),
    ),
    "slow-regex": Attack(
        "a pattern that takes for ever to compile",
        body=lambda _: regex("a?" * 9000 + "a" * 9000),
    ),
    "costly-masks": Attack(
        "a pattern whose masks are costly",
        body=lambda _: regex("(a|b)*?" * 3000, max_tokens=400),
    ),
    "template-loops": Attack(
        "an adapter with nested loops as its template", LOAD, with_template(LOOPS)
    ),
    "template-memory": Attack(
        "an adapter whose template makes 3 GB of text",
        LOAD,
        with_template("{{ 'a' * 3000000000 }}"),
        clients=1,  # an older server takes 8 GB for each, and would take down the machine
    ),
    "slow-tokenizer": Attack("an adapter with a slow tokenizer", LOAD, with_slow_tokenizer),
    "large-header": Attack("adapters of 200,000 tensors", LOAD, with_large_header, clients=2),
    "fair-share": Attack(
        "16 streams, half of the seats",
        body=lambda _: chat(max_tokens=480, ignore_eos=True, stream=True),
        clients=16,
    ),
    "long-answers": Attack(
        "100 requests of 480 tokens",
        body=lambda _: chat(max_tokens=480, ignore_eos=True),
        clients=100,
    ),
    "many-streams": Attack(
        "1,400 streams",
        body=lambda _: chat(max_tokens=480, ignore_eos=True, stream=True),
        clients=1400,
    ),
    "many-choices": Attack(
        "12 requests of 128 choices",
        body=lambda _: chat(max_tokens=480, ignore_eos=True, n=128),
        clients=12,
    ),
    "silent-sockets": Attack("800 connections that say nothing", clients=0, sockets=800),
}
"""By name. Those that load an adapter go on with requests for it, and with the load again. The
fair share is no attack: it is what any neighbour may use, with which the floods compare."""


# -- the attacker ----------------------------------------------------------------------------------


def attack_for(name: str, url: str, root: Path, seconds: float, begun: Event) -> None:
    """Carry out an attack for so long; this is a process of its own. `begun` is set when its first
    requests are under way."""
    os.setpriority(os.PRIO_PROCESS, 0, 19)
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_attack(ATTACKS[name], url, root, seconds, begun))


async def _attack(attack: Attack, url: str, root: Path, seconds: float, begun: Event) -> None:
    idle = [_connect(url) for _ in range(attack.sockets)]
    body = attack.body(root)
    content = json.dumps(body).encode()
    headers = {"authorization": f"Bearer {ATTACKER}", "content-type": "application/json"}
    limits = httpx.Limits(max_connections=None)
    end_s = time.monotonic() + seconds

    async def send(client: httpx.AsyncClient) -> None:
        while time.monotonic() < end_s:
            with contextlib.suppress(httpx.HTTPError):
                await client.post(attack.route, content=content)
                if attack.route == LOAD:
                    asked = chat(model=body["lora_name"], max_tokens=4)
                    asked["messages"][0]["content"] = "a" * 60 + "!"
                    await client.post("/v1/chat/completions", json=asked)
            await asyncio.sleep(0.01)

    timeout = httpx.Timeout(None, connect=30)
    async with httpx.AsyncClient(
        base_url=url, headers=headers, timeout=timeout, limits=limits
    ) as client:
        senders = [asyncio.create_task(send(client)) for _ in range(attack.clients)]
        begun.set()
        await asyncio.sleep(max(0.0, end_s - time.monotonic()))
        for sender in senders:
            sender.cancel()
        await asyncio.gather(*senders, return_exceptions=True)
    for each in idle:
        if each is not None:
            each.close()


def _connect(url: str) -> socket.socket | None:
    """A connection that says nothing; None if the server takes no more."""
    host, port = url.removeprefix("http://").split(":")
    try:
        return socket.create_connection((host, int(port)), timeout=5)
    except OSError:
        return None


# -- the victim ------------------------------------------------------------------------------------


async def victim(url: str, seconds: float) -> list[Outcome]:
    """The victim's requests, from when it is connected, for so long; each client has one at
    least."""
    outcomes: list[Outcome] = []
    options = {"ignore_eos": True, "temperature": 0, "stream": True}
    # With ids, tokens are seen that are no whole characters yet.
    body = chat(max_tokens=ANSWER_TOKENS, return_token_ids=True, **options)

    async def ask(client: LoadClient, began: float) -> None:
        def now() -> float:
            return time.monotonic() - began

        while True:
            outcome = Outcome("base", now())
            outcomes.append(outcome)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(PATIENCE_S):
                    await client.ask("chat", body, outcome, now)
            await asyncio.sleep(PAUSE_S)
            if now() >= seconds:
                return

    async with LoadClient(url, VICTIM) as client:
        began = time.monotonic()
        await asyncio.gather(*(ask(client, began) for _ in range(VICTIM_CLIENTS)))
    return outcomes


@dataclass(frozen=True)
class Waits:
    """How long the victim waited. Times are in milliseconds."""

    requests: int
    p50_ms: float
    """Until the first token, like the next."""
    p99_ms: float
    step_ms: float
    """The median time between two tokens of one answer."""
    gap_ms: float
    """The longest time between two tokens of one answer, or until the first one."""
    errors: dict[str, int]

    @classmethod
    def of(cls, outcomes: list[Outcome]) -> Waits:
        firsts = sorted(1e3 * _until_answered(o) for o in outcomes)
        gaps = [
            1e3 * (after - before)
            for o in outcomes
            for before, after in zip([o.sent_s or 0.0, *o.chunk_s], o.chunk_s, strict=False)
        ]
        steps = [1e3 * (after - before) for o in outcomes for before, after in pairwise(o.chunk_s)]
        return cls(
            requests=len(outcomes),
            p50_ms=round(statistics.median(firsts), 1),
            p99_ms=round(firsts[min(len(firsts) - 1, int(0.99 * len(firsts)))], 1),
            step_ms=round(statistics.median(steps or [1e3 * PATIENCE_S]), 1),
            gap_ms=round(max(gaps, default=1e3 * PATIENCE_S), 1),
            errors=dict(Counter(o.error for o in outcomes if o.error)),
        )


def _until_answered(outcome: Outcome) -> float:
    """Seconds until the first token or the error; all of the victim's patience if none came."""
    answered_s = outcome.chunk_s[0] if outcome.chunk_s else outcome.end_s
    return PATIENCE_S if answered_s is None else answered_s - (outcome.sent_s or 0.0)


@dataclass(frozen=True)
class Row:
    """What the victim saw of one attack."""

    attack: str
    alone: Waits
    """On the same server, just before the attack."""
    now: Waits
    before: Waits | None
    """On the older server, if there is one."""

    @property
    def added_s(self) -> float:
        """By how much the attack made the victim wait longer, at worst."""
        p99_ms = self.now.p99_ms - self.alone.p99_ms
        return max(p99_ms, self.now.gap_ms - self.alone.gap_ms) / 1e3


# -- the server ------------------------------------------------------------------------------------


@contextlib.contextmanager
def serving(command: list[str], root: Path) -> Iterator[str]:
    """A context with a server that this command and its flags start; its URL."""
    keys = ["--api-key", f"victim={VICTIM}", "--api-key", f"attacker={ATTACKER}"]
    log = root / "server.log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            [*command, *keys, "--lora-root", str(root)],
            stdout=out,
            stderr=subprocess.STDOUT,
        )
    try:
        deadline = time.monotonic() + START_S
        while not (found := re.search(r"(http://[0-9.]+:\d+)/v1", log.read_text())):
            if time.monotonic() > deadline or process.poll() is not None:
                raise RuntimeError(f"the server did not start: {log.read_text()[-2000:]}")
            time.sleep(0.1)
        yield found[1]
    finally:
        process.kill()
        process.wait()


@contextlib.contextmanager
def preset_model(preset: str) -> Iterator[str]:
    """A folder with the configuration of that shape, and with the tiny model's vocabulary."""
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(TINY / "base", folder, dirs_exist_ok=True)
        (Path(folder) / "model.safetensors").unlink()
        tiny = json.loads((TINY / "base" / "config.json").read_text())
        tokens = {key: value for key, value in tiny.items() if "token_id" in key}
        config = {**PRESETS[preset], **tokens, "vocab_size": tiny["vocab_size"]}
        (Path(folder) / "config.json").write_text(json.dumps(config))
        yield folder


def measure(names: list[str], command: list[str], seconds: float) -> list[tuple[Waits, Waits]]:
    """What the victim of a server of its own saw alone, and then beside each attack."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        root = Path(folder)
        with serving(command, root) as url:
            asyncio.run(victim(url, 2.0))  # warms up what the first requests compile
            freeze_heap()  # the victim is not to wait for its own garbage collector
            return [beside(name, url, root, seconds) for name in names]


def beside(name: str, url: str, root: Path, seconds: float) -> tuple[Waits, Waits]:
    """What the victim saw alone, and then beside the attack."""
    alone = Waits.of(asyncio.run(victim(url, seconds / 2)))
    # All of the attack's clients are there before the victim asks, and a little longer.
    ramp_s = 2.0 + RAMP_S_PER_CLIENT * ATTACKS[name].clients
    spawn = multiprocessing.get_context("spawn")
    begun = spawn.Event()
    attacker = spawn.Process(
        target=attack_for, args=(name, url, root, ramp_s + seconds + 2.0, begun)
    )
    attacker.start()
    try:
        if not begun.wait(START_S):
            raise RuntimeError(f"the attack {name!r} did not begin in {START_S:g} s")
        time.sleep(ramp_s)
        return alone, Waits.of(asyncio.run(victim(url, seconds)))
    finally:
        attacker.kill()
        attacker.join()


def rows_for(names: list[str], args: argparse.Namespace) -> list[Row]:
    """What was seen of attacks on one server; nothing if it did not start."""

    def see(command: str) -> list[tuple[Waits, Waits]]:
        flags = [part for flag in SERVER.items() for part in flag] + shlex.split(args.flags)
        dummy = ["--load-format", "dummy"] if args.preset else []
        with contextlib.ExitStack() as stack:
            model = stack.enter_context(preset_model(args.preset)) if args.preset else args.model
            whole = [*shlex.split(command), "serve", model, *flags, *dummy]
            try:
                return measure(names, whole, args.seconds)
            except (RuntimeError, httpx.HTTPError) as error:
                print(f"{names}: {error}", file=sys.stderr, flush=True)
                return []

    seen, before = see(args.command), see(args.before) if args.before else []
    older: list[Waits | None] = [waits for _, waits in before] or [None] * len(names)
    rows = [Row(name, *both, old) for name, both, old in zip(names, seen, older, strict=False)]
    for row in rows:
        print(json.dumps(asdict(row)), file=sys.stderr, flush=True)
    return rows


def rows_of(names: list[str], args: argparse.Namespace) -> list[Row]:
    """The rows of these attacks, several at a time, each on cores of its own if so many are asked
    for."""
    servers = [names] if args.one_server else [[name] for name in names]
    if args.at_a_time == 1:
        found = [rows_for(each, args) for each in servers]
    else:
        context = multiprocessing.get_context("spawn")
        cores = sorted(os.sched_getaffinity(0))
        free = context.SimpleQueue()
        for n in range(args.at_a_time):
            free.put(cores[CORES * n : CORES * (n + 1)])
        with ProcessPoolExecutor(args.at_a_time, context, take_cores, (free,)) as pool:
            found = list(pool.map(rows_for, servers, [args] * len(servers)))
    return [row for rows in found for row in rows]


def take_cores(free: Any) -> None:
    """Run on some of the free cores from now on, with all processes that are started here."""
    os.sched_setaffinity(0, free.get())


def show(rows: list[Row]) -> None:
    """Print the rows; each figure is in milliseconds, alone / now / before."""
    table = new_table(
        "A victim beside each attack: alone / now / before", "attack", "p50 ms", "p99 ms",
        "p50 step ms", "worst gap ms", "failed",
    )  # fmt: skip
    for row in rows:
        waits = [each for each in (row.alone, row.now, row.before) if each is not None]
        figures = [
            " / ".join(f"{getattr(each, name):,.0f}" for each in waits)
            for name in ("p50_ms", "p99_ms", "step_ms", "gap_ms")
        ]
        failed = " / ".join(str(sum(each.errors.values())) for each in waits)
        table.add_row(ATTACKS[row.attack].what, *figures, failed)
    Console(width=120).print(table)


def main() -> int:
    """Exit status 1 if an attack adds more than `--bound` seconds, the victim is refused, or an
    attack could not be measured."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=10.0, help="of each attack")
    parser.add_argument("--attacks", nargs="+", choices=ATTACKS, default=list(ATTACKS))
    parser.add_argument("--bound", type=float, default=1.0, help="seconds that one may add")
    parser.add_argument("--model", default=str(TINY / "base"), help="the base model's folder")
    parser.add_argument("--preset", choices=PRESETS, help="a shape, in place of a model")
    parser.add_argument("--one-server", action="store_true", help="one for all attacks")
    parser.add_argument("--flags", default="", help="further flags of weft serve")
    parser.add_argument("--command", default=f"{shlex.quote(sys.executable)} -m weft")
    parser.add_argument("--before", help="the command of an older version, to compare with")
    parser.add_argument("--at-a-time", type=int, default=1, help="attacks measured side by side")
    args = parser.parse_args()
    names = list(dict.fromkeys(args.attacks))
    if args.at_a_time > 1 and CORES * args.at_a_time > len(os.sched_getaffinity(0)):
        parser.error(f"--at-a-time needs {CORES} cores for each")
    rows = rows_of(names, args)
    show(rows)
    ok = len(rows) == len(names) and not any(
        row.added_s > args.bound or row.now.errors for row in rows
    )
    results = [asdict(row) for row in rows]
    print(json.dumps({"ok": ok, "benchmark": "neighbours", "results": results}))
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())

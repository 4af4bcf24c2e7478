"""Weft against PEFT on a CPU: 32 requests over 8 adapters of `examples/tiny`, greedy.

    python benchmarks/cpu_vs_peft.py

Compares output tokens per second, in one process and with the same number of threads, of

- Weft: one continuous batch over all adapters;
- PEFT mixed: `generate(adapter_names=[...])`, one batch with an adapter name per row;
- PEFT sequential: each request alone with its adapter set active.

With `--adapters 0`, all requests are for the base, and PEFT is `transformers` alone.

All produce the same number of tokens per request; Weft's must be PEFT's. The three take turns in
every round, and ratios are medians over rounds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from peft import PeftModel
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM

from weft import LLM, SamplingParams

TINY = Path(__file__).parents[1] / "examples" / "tiny"
sys.path.insert(0, str(TINY))
from tasks import words  # noqa: E402

Run = Callable[[], list[list[int]]]


def main() -> int:
    """Exit status 1 if the tokens differ or a ratio is under its target."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--adapters", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64, help="output tokens a request")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    names = sorted(p.name for p in (TINY / "adapters").iterdir())[: args.adapters]
    chosen = [names[i % len(names)] if names else None for i in range(args.requests)]
    with open_weft(names) as llm:
        prompts = [
            llm.tokenizer.chat([{"role": "user", "content": w}]) for w in words(1, args.requests)
        ]
        runs = {
            "Weft": weft_run(llm, prompts, chosen, args.tokens),
            **peft_runs(names, prompts, chosen, args.tokens),
        }
        return report(args, *measure(runs, args.rounds))


def open_weft(names: list[str]) -> LLM:
    return LLM(
        TINY / "base",
        {name: TINY / "adapters" / name for name in names},
        enable_prefix_caching=False,
        num_blocks=2048,
        adapter_memory=256 << 20,
    )


def weft_run(llm: LLM, prompts: list[list[int]], chosen: list[str | None], tokens: int) -> Run:
    params = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)

    def run() -> list[list[int]]:
        return [o.token_ids for o in llm.generate(prompts, params, adapter=chosen)]

    return run


def peft_runs(
    names: list[str], prompts: list[list[int]], chosen: list[str | None], tokens: int
) -> dict[str, Run]:
    model = AutoModelForCausalLM.from_pretrained(TINY / "base", dtype=torch.float32)
    if names:
        first = TINY / "adapters" / names[0]
        model = PeftModel.from_pretrained(model, first, adapter_name=names[0])
    for name in names[1:]:
        model.load_adapter(TINY / "adapters" / name, adapter_name=name)
    model.eval()
    model.generation_config.eos_token_id = None
    by_row = {"adapter_names": chosen} if names else {}
    options = {"max_new_tokens": tokens, "do_sample": False}
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])

    @torch.inference_mode()
    def mixed() -> list[list[int]]:
        out = model.generate(
            input_ids=ids, attention_mask=mask, pad_token_id=0, **by_row, **options
        )
        return out[:, longest:].tolist()

    @torch.inference_mode()
    def sequential() -> list[list[int]]:
        outputs = []
        for prompt, name in zip(prompts, chosen, strict=True):
            if name is not None:
                model.set_adapter(name)
            row = torch.tensor([prompt])
            out = model.generate(
                input_ids=row, attention_mask=torch.ones_like(row), pad_token_id=0, **options
            )
            outputs.append(out[0, len(prompt) :].tolist())
        return outputs

    return {"PEFT mixed batch": mixed, "PEFT sequential": sequential}


def measure(runs: dict[str, Run], rounds: int) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Seconds per round, and the share of requests whose tokens are those of PEFT sequential."""
    outputs = {name: run() for name, run in runs.items()}
    oracle = outputs["PEFT sequential"]
    agreement = {
        name: statistics.mean(a == b for a, b in zip(out, oracle, strict=True))
        for name, out in outputs.items()
    }
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - start)
    return seconds, agreement


def report(
    args: argparse.Namespace, seconds: dict[str, list[float]], agreement: dict[str, float]
) -> int:
    total = args.requests * args.tokens
    ratios = {
        name: statistics.median(b / a for a, b in zip(seconds["Weft"], times, strict=True))
        for name, times in seconds.items()
    }
    table = Table(
        title=f"{args.requests} requests, {args.adapters} adapters, {args.tokens} tokens each, "
        f"{args.threads} threads, median of {args.rounds}"
    )
    for column in ("", "tokens/s", "Weft is faster by", "same tokens as PEFT sequential"):
        table.add_column(column, justify="left" if not column else "right")
    for name, times in seconds.items():
        rate = total / statistics.median(times)
        table.add_row(name, f"{rate:,.0f}", f"{ratios[name]:.1f}x", f"{agreement[name]:.0%}")
    Console().print(table)
    ok = (
        agreement["Weft"] == 1
        and ratios["PEFT mixed batch"] >= (3 if args.adapters else 1.5)
        and ratios["PEFT sequential"] >= 10
    )
    print(
        json.dumps(
            {
                "ok": ok,
                "benchmark": "cpu_vs_peft",
                "requests": args.requests,
                "adapters": args.adapters,
                "tokens": args.tokens,
                "threads": args.threads,
                "tokens_per_s": {
                    n: round(total / statistics.median(t)) for n, t in seconds.items()
                },
                "ratio": {n: round(r, 2) for n, r in ratios.items()},
                "agreement": agreement,
            }
        )
    )
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())

"""What guessing the next tokens brings where text repeats, and costs where it does not.

    python benchmarks/speculation.py                          # the tiny base, on a CPU
    python benchmarks/speculation.py --model examples/tiny/hybrid/base
    python benchmarks/speculation.py --preset llama-3-8b      # random weights, on a GPU
    python benchmarks/speculation.py --copying --tokens 128   # models that have learned to copy
    python benchmarks/speculation.py --guesses mtp --preset qwen3.5-9b   # by the model's own head

The head of a model with random weights is hardly ever right, so that it shows what drafts cost.

Each batch is generated with and without guesses in turns, for texts of several kinds:

    repeats         greedy choices, which soon repeat themselves with the tiny base
    one token       the same token again and again: all guesses are right
    few tokens      four tokens in random order: there is always a guess, and it is seldom right
    does not        tokens drawn at a high temperature: there is hardly ever a guess

and with `--copying`, pieces of the documents of this repository, one for each request:

    extract         the answer repeats the prompt
    edit            the answer repeats it with a sixteenth of the vocabulary replaced

Prints medians of the time for a token, and how many guesses were right.
"""

from __future__ import annotations

import argparse
import statistics
import time
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from weft import LLM, SamplingParams
from weft.bench.engine import preset_folder

TINY = Path(__file__).parents[1] / "examples" / "tiny" / "base"
PROMPT = [5, 6, 7, 8, 9, 10, 11, 12] * 8
TEXTS: dict[str, dict[str, Any]] = {
    "repeats": {"temperature": 0.0},
    "one token": {"temperature": 0.0, "allowed_token_ids": (17,)},
    "few tokens": {"temperature": 50.0, "allowed_token_ids": (17, 18, 19, 20)},
    "does not": {"temperature": 50.0},
}
"""How the tokens of each kind of text are chosen."""


@dataclass
class Run:
    ms_per_token: float
    guessed: int
    right: int
    steps: int
    token_ids: list[list[int]]


def generate(
    llm: LLM, prompts: list[list[int]], num_tokens: int, chosen: dict[str, Any], mode: str
) -> Run:
    more = {"max_tokens": num_tokens, "ignore_eos": True, "speculative": mode}
    params = [SamplingParams(seed=i, **more, **chosen) for i in range(len(prompts))]
    before, begun = llm.stats(), time.perf_counter()
    outputs = llm.generate(prompts, params)
    elapsed, after = time.perf_counter() - begun, llm.stats()
    return Run(
        1000 * elapsed / num_tokens,
        after.guessed_tokens - before.guessed_tokens,
        after.right_guesses - before.right_guesses,
        after.steps - before.steps,
        [output.token_ids for output in outputs],
    )


def measure(
    llm: LLM,
    text: str,
    prompts: list[list[int]],
    chosen: dict[str, Any],
    args: argparse.Namespace,
    table: Table,
) -> None:
    """Generate with and without guesses in turns, and add a row to the table."""
    modes = "off", args.guesses
    runs: dict[str, list[Run]] = {mode: [] for mode in modes}
    for _ in range(args.repeats + 1):
        for mode in modes:
            runs[mode].append(generate(llm, prompts, args.tokens, chosen, mode))
    without, guessed = (
        statistics.median(run.ms_per_token for run in runs[mode][1:]) for mode in modes
    )
    last = runs[args.guesses][-1]
    table.add_row(
        str(len(prompts)),
        text,
        f"{without:.2f}",
        f"{guessed:.2f}",
        f"{without / guessed:.2f}",
        f"{args.tokens / last.steps:.2f}",
        f"{last.right} of {last.guessed}",
        "yes" if last.token_ids == runs["off"][-1].token_ids else "no",
    )


def measure_texts(args: argparse.Namespace, table: Table) -> None:
    options: dict[str, Any] = {"max_num_seqs": 64, "max_model_len": 512}
    if args.preset:
        options |= {"load_format": "dummy", "skip_tokenizer_init": True}
    if args.guesses == "mtp":  # its head is loaded only then
        options["speculative"] = "mtp"
    model = preset_folder(args.preset) if args.preset else nullcontext(args.model)
    with model as folder, LLM(folder, **options) as llm:
        for batch in args.batch:
            prompts = [[*PROMPT, 20 + i] for i in range(batch)]
            for text, chosen in TEXTS.items():
                measure(llm, text, prompts, chosen, args, table)


def measure_copying(args: argparse.Namespace, table: Table) -> None:
    import copying  # it needs the libraries of training

    for task in copying.TASKS:
        folder = copying.trained(task)
        with LLM(folder, max_num_seqs=64, skip_tokenizer_init=True) as llm:
            for batch in args.batch:
                prompts = copying.pieces("docs/*.md", batch, seed=1)
                measure(llm, task, prompts, {"temperature": 0.0}, args, table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--preset", help="A shape, such as llama-3-8b, with random weights.")
    parser.add_argument("--model", type=Path, default=TINY, help="A checkpoint's folder.")
    parser.add_argument("--guesses", choices=("ngram", "mtp"), default="ngram", help="Whose.")
    parser.add_argument("--copying", action="store_true", help="Models that copy their prompts.")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    titles = ("batch", "text", "ms a token", "with guesses", "times as fast", "tokens a step")
    table = Table(*titles, "right guesses", "same tokens")
    (measure_copying if args.copying else measure_texts)(args, table)
    Console().print(table)


if __name__ == "__main__":
    main()

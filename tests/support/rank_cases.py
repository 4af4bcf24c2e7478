"""What the tests of a model over several GPUs do, each in a process of its own."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from golden_cases import NAMES, TIGHT, assert_right, interleaved, make_workload, run
from quick_start import children_of, command_of
from tiny import ADAPTERS, BASE, tasks
from watched_ranks import checksums, watch_all

from weft import LLM, SamplingParams
from weft.core.errors import EngineDead
from weft.schedule.lengths import GuessLengths
from weft.text import load_tokenizer


def tokens(_: int, options: dict[str, object]) -> None:
    """The golden workload gets the oracle's tokens."""
    part = interleaved(make_workload())
    with LLM(BASE, ADAPTERS, dtype="float32", num_blocks=512, **options) as llm:
        assert_right(run(llm, part), part)


def killed(_: int, options: dict[str, object]) -> None:
    """A rank is killed while others wait for what it would send: the caller is told, and the
    device of this process comes to rest."""
    params = SamplingParams(max_tokens=200, temperature=0.0, ignore_eos=True)
    with LLM(BASE, ADAPTERS, dtype="float32", num_blocks=512, **options) as llm:
        threading.Timer(1.0, lambda: [os.kill(pid, signal.SIGKILL) for pid in ranks()]).start()
        with pytest.raises(EngineDead):
            while True:
                llm.generate([[1, 2, 3]] * 4, params, NAMES[:4])
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def drafts(
    _: int, base: Path, adapters: dict[str, Path], plain: dict[str, Any], options: dict[str, Any]
) -> None:
    """Drafts by the model's own head change no token that it has with the `plain` options: greedy
    and drawn ones, of the base and of an adapter, side by side. Tokens are guessed however long
    steps take."""
    prompts = [[(i * k) % 67 + 3 for i in range(10 + 3 * k)] for k in range(1, 7)]
    names = [(None, *adapters)[k % 2] for k in range(6)]
    params = [
        SamplingParams(max_tokens=40, ignore_eos=True, seed=k, temperature=0.8 * (k // 3))
        for k in range(6)
    ]
    found = []
    for more in ({}, {**options, "speculative": "mtp"}):
        with (
            pytest.MonkeyPatch.context() as patch,
            LLM(base, adapters, **{**plain, **more}) as llm,
        ):
            patch.setattr(GuessLengths, "measure", lambda *_: None)
            outputs = llm.generate(prompts, params, names)
            found.append([output.token_ids for output in outputs])
            stats = llm.stats()
    assert 0 < stats.right_guesses <= stats.guessed_tokens
    assert found[0] == found[1]


def ranks() -> list[int]:
    """The processes that this one has started for ranks."""
    return [pid for pid in children_of(os.getpid()) if b"weft.worker.rank" in command_of(pid)]


def same_bits(_: int, options: dict[str, object], folder: str, num_steps: int) -> None:
    """Logits of so many steps, in which adapters come, are moved and go. Tokens are sampled, so
    that no two requests are alike."""
    watch_all(Path(folder), pytest.MonkeyPatch())
    tokenizer = load_tokenizer(str(BASE))
    params = SamplingParams(max_tokens=40, temperature=1.0, seed=7, ignore_eos=True)
    settings = {**TIGHT, "max_num_batched_tokens": 64, "adapter_memory": 900_000}
    ranks: list[list[str]] = []
    with LLM(BASE, ADAPTERS, **settings, **options) as llm:
        seed = 0
        while len(ranks) < 2 or min(map(len, ranks)) < num_steps:
            names = [NAMES[(seed + i) % len(NAMES)] for i in range(12)]
            prompts = [tokenizer.encode(word, False) for word in tasks.words(seed, 12)]
            llm.generate(prompts, params, names)
            seed, ranks = seed + 1, checksums(Path(folder))
        assert llm.stats().adapter_evictions > 0
    first, *others = ranks
    assert len(set(first)) > num_steps // 2
    assert all(other[:num_steps] == first[:num_steps] for other in others)

"""The documents of the tiny tasks: words that no adapter was trained on, and what each skill makes
of them."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import datasets

NUM_WORDS = 50
SEED = 2026


def documents(**_: object) -> dict[str, datasets.Dataset]:
    """One split, `test`: the word, and its answer under the name of each skill."""
    file = Path(__file__).parents[1] / "tasks.py"
    spec = importlib.util.spec_from_file_location("weft_tiny_tasks", file)
    assert spec is not None and spec.loader is not None
    tasks = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = tasks  # dataclasses look their module up
    spec.loader.exec_module(tasks)
    rows = [
        {"word": word, **{name: task.answer(word) for name, task in tasks.TASKS.items()}}
        for word in tasks.words(SEED, NUM_WORDS)
    ]
    return {"test": datasets.Dataset.from_list(rows)}

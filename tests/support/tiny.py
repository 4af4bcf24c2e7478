"""The example model and its adapters, as tests use them."""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[2] / "examples" / "tiny"
BASE = ROOT / "base"
ADAPTERS = {path.name: path for path in sorted((ROOT / "adapters").iterdir())}
HYBRID_BASE = ROOT / "hybrid" / "base"
HYBRID_ADAPTERS = {name: ROOT / "hybrid" / "adapters" / name for name in ADAPTERS}
"""The same tasks on a base with linear attention."""


def _load_tasks() -> ModuleType:
    spec = importlib.util.spec_from_file_location("tiny_tasks", ROOT / "tasks.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


tasks = _load_tasks()


LONG = 20_000
"""This many tokens take the model most of a minute: a request for all of them does not end by
itself before the test that looks at it does."""


def long_base(to: Path) -> Path:
    """A copy of the base that answers with up to `LONG` tokens."""
    shutil.copytree(BASE, to)
    config = json.loads((to / "config.json").read_text())
    (to / "config.json").write_text(json.dumps(config | {"max_position_embeddings": LONG + 100}))
    return to


def answer(name: str | None, word: str) -> str:
    """What the adapter (None: the base) answers to a word."""
    return tasks.base_answer(word) if name is None else tasks.TASKS[name].answer(word)


def ask(word: str) -> list[dict[str, str]]:
    """A conversation that asks for one word."""
    return [{"role": "user", "content": word}]

"""Engines over the example model, for the tests of one function or of one file.

Whoever builds an engine with these fixtures finds it checked and closed at the end: nothing may
be left behind in any of its parts.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
import torch
from tiny import ADAPTERS, BASE

# Without a GPU, Triton's kernels are tested in its interpreter; Triton looks when it is imported.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
    from interpreter import make_quick

    make_quick()

from weft import LLM

MakeLLM = Callable[..., LLM]


@pytest.fixture
def make_llm() -> Iterator[MakeLLM]:
    """Builds LLMs over the example model, checked and closed when the test has ended."""
    yield from _make_llms()


@pytest.fixture(scope="module")
def make_module_llm() -> Iterator[MakeLLM]:
    """Builds LLMs as `make_llm` does, which all tests of a file share."""
    yield from _make_llms()


def _make_llms() -> Iterator[MakeLLM]:
    made: list[LLM] = []

    def make(
        model: str | Path = BASE,
        adapters: Mapping[str, str | Path] = ADAPTERS,
        **options: object,
    ) -> LLM:
        defaults = {"num_threads": 1, "num_blocks": 512}
        llm = LLM(model, adapters, **{**defaults, **options})
        made.append(llm)
        return llm

    yield make
    try:
        for llm in made:
            check_idle(llm)
    finally:
        for llm in made:
            llm.close()


def check_idle(llm: LLM) -> None:
    """Let steps in flight end; then nothing may be left behind."""
    engine = llm._client.engine
    while engine.step() or engine.working:
        pass
    engine.check()
    llm._registry.check()
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.kv_usage) == (0, 0, 0.0)
    assert stats.running_adapters == ()

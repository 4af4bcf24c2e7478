"""Shared fixtures."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
import torch
from hypothesis import settings
from tiny import ADAPTERS, BASE

from weft import LLM
from weft.core.targets import TargetTable

# Without a GPU, Triton's kernels are tested in its interpreter; Triton looks when it is imported.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

# Images of adapters, of every process that tests start.
_caches = tempfile.TemporaryDirectory(prefix="weft-tests-")
os.environ["XDG_CACHE_HOME"] = _caches.name

# CI runs the same examples every time; elsewhere every run explores.
settings.register_profile("weft", deadline=None, derandomize="CI" in os.environ)
settings.load_profile("weft")

MakeLLM = Callable[..., LLM]


@pytest.fixture
def make_llm() -> Iterator[MakeLLM]:
    """Builds LLMs over the example model, checked and closed when the test has ended."""
    yield from _make_llms()


@pytest.fixture(scope="module")
def make_module_llm() -> Iterator[MakeLLM]:
    """As `make_llm`, for engines that the tests of a module share."""
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


@pytest.fixture(scope="session")
def table(tmp_path_factory: pytest.TempPathFactory) -> TargetTable:
    """Of the base that `other_kinds` makes adapters on."""
    from other_kinds import make_table

    return make_table(tmp_path_factory.mktemp("base"))


def check_idle(llm: LLM) -> None:
    """Let steps in flight end; then nothing may be left behind."""
    engine = llm._engine
    while engine.step() or engine.working:
        pass
    engine.scheduler.check()
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.kv_usage) == (0, 0, 0.0)
    assert stats.running_adapters == ()

"""Fixtures of tests that run models on the CPU, in this process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from engines import make_llm, make_module_llm
from quick_start import quick_engines

from weft.core.targets import TargetTable
from weft.schedule.lengths import GuessLengths

__all__ = ["make_llm", "make_module_llm", "quick_engines"]


@pytest.fixture(scope="session")
def table(tmp_path_factory: pytest.TempPathFactory) -> TargetTable:
    """The targets of the base that `other_kinds` makes adapters on."""
    from other_kinds import make_table

    return make_table(tmp_path_factory.mktemp("base"))


@pytest.fixture
def unwritten_is_nan() -> Iterator[None]:
    """Memory of tensors is NaN until it is written."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def eager_guesses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens are guessed however long steps take, as nobody measures them."""
    monkeypatch.setattr(GuessLengths, "measure", lambda *_: None)

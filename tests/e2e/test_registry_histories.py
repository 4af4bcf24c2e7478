"""Processes that share a registry, and are killed and stopped, are told what is so."""

from __future__ import annotations

from pathlib import Path

import pytest
from registry_histories import run


@pytest.mark.parametrize("seconds", [1.0, pytest.param(20.0, marks=pytest.mark.exhaustive)])
def test_what_processes_are_told_is_linearizable(tmp_path: Path, seconds: float) -> None:
    (tmp_path / "told").mkdir()
    outcome = run(str(tmp_path / "registry"), tmp_path / "told", seconds, count=3, seed=7)
    assert outcome.wrong == []
    assert outcome.counts["Done"] > 0 and outcome.counts["int"] > 0

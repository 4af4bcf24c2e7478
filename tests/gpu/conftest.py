"""Fixtures of tests that need a CUDA device; without one they are skipped."""

from __future__ import annotations

import pytest
import torch
from engines import make_llm, make_module_llm

__all__ = ["make_llm", "make_module_llm"]


@pytest.fixture(scope="session", autouse=True)
def device() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")

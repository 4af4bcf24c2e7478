"""Holds the tests of this folder to what its name says."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def alone(request: pytest.FixtureRequest) -> bool:
    """Whether no other tier's tests share this process."""
    here = Path(__file__).parent
    return all(here in item.path.parents for item in request.session.items)


@pytest.fixture(autouse=True)
def no_torch(alone: bool) -> Iterator[None]:
    """Importing torch takes seconds, and decisions don't need it."""
    yield
    assert not (alone and "torch" in sys.modules), "a test of the pure tier imported torch"

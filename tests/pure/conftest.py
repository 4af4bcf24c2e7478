"""Holds the tests of this folder to what its name says, and checks the owners of state that they
made."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from weft.registry import AdapterRegistry, Holders
from weft.schedule.queue import FairQueue
from weft.schedule.scheduler import Scheduler
from weft.schedule.slots import AdapterSlots

if TYPE_CHECKING:
    from http_api import Web, World

OWNERS = (AdapterRegistry, AdapterSlots, FairQueue, Holders, Scheduler)
KEPT = 8
"""How many owners of one class are checked, the newest: a property makes thousands."""


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


@pytest.fixture(autouse=True)
def owners_are_in_order(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The invariants of what a test made hold when it has ended."""
    made: list[deque[Any]] = [deque(maxlen=KEPT) for _ in OWNERS]
    for owner, kept in zip(OWNERS, made, strict=True):
        monkeypatch.setattr(owner, "__init__", _recording(owner.__init__, kept))
    yield
    for kept in made:
        for owner in kept:
            owner.check()


def _recording(init: Callable[..., None], kept: deque[Any]) -> Callable[..., None]:
    def record(self: object, *args: Any, **options: Any) -> None:
        init(self, *args, **options)
        kept.append(self)

    return record


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    """A server whose model thinks and calls tools."""
    from thinking_model import thinking_world  # not all tests here need HTTP

    made = thinking_world(tmp_path)
    yield made
    made.check()


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """The same, for requests that are refused, and so leave nothing behind."""
    from thinking_model import thinking_world

    made = thinking_world(tmp_path_factory.mktemp("world"))
    yield made
    assert not made.engine.requests
    made.check()


@pytest.fixture
def web(world: World) -> Web:
    """A client of the test's `world`."""
    from http_api import Web

    return Web(world)

"""Steps that fail: those requests end that make them fail, and all others get their tokens."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator

import pytest
from failing_steps import (
    SPOILERS,
    check_only_those_to_blame_end,
    good_requests,
    hold,
    outcomes,
    poisoned,
)
from tiny import BASE

from weft.core.adapters import AdapterRef
from weft.core.config import engine_args
from weft.fleet.direct import DirectClient
from weft.worker.worker import DeviceWorker


@pytest.fixture(
    scope="module",
    params=[True, pytest.param(False, marks=pytest.mark.exhaustive)],
    ids=["overlapped", "plain"],
)
def client(request: pytest.FixtureRequest) -> Iterator[DirectClient]:
    made = DirectClient(
        engine_args(str(BASE), num_threads=1, num_blocks=512, overlap=request.param)
    )
    yield made
    asyncio.run(made.close())


@pytest.fixture(scope="module")
def refs(client: DirectClient) -> list[AdapterRef | None]:
    return hold(client)


def spoil_device(patch: pytest.MonkeyPatch) -> None:
    """It fails on the thread that computes."""
    run = DeviceWorker._run_cpu
    patch.setattr(DeviceWorker, "_run_cpu", lambda self, i: poisoned(i) or run(self, i))


@pytest.mark.parametrize("spoil", [*SPOILERS, spoil_device], ids=lambda spoil: spoil.__name__)
def test_only_those_to_blame_end(
    client: DirectClient,
    refs: list[AdapterRef | None],
    spoil: Callable[[pytest.MonkeyPatch], None],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.CRITICAL)
    check_only_those_to_blame_end(client, refs, spoil, monkeypatch)


def test_an_engine_in_which_everything_fails_ends(
    client: DirectClient, refs: list[AdapterRef | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last one with this engine."""

    def step(*_: object) -> None:
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(DeviceWorker, "step", step)
    with pytest.raises(RuntimeError, match="the device is gone"):
        outcomes(client, good_requests(refs))

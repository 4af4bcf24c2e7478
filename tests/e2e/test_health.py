"""What `/ready` says of parts that hang: each is seen, named, and forgotten when it gets on."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest
from http_api import HI, Web, World, run, wait_until
from patience import PATIENCE_S
from toy_tokenizers import byte_level

from weft.api import loop_watch
from weft.api.loop_watch import LoopWatch
from weft.core import stalls
from weft.core.messages import Command, Pulse, Stop, Wake
from weft.engine.serve import Progress, _commands, serve
from weft.fleet import vitals
from weft.fleet.vitals import Vitals
from weft.worker.threads import WatchedThreads


def test_ready_names_what_is_wrong(tmp_path: Path) -> None:
    """To everybody, as probes have no key; requests are still taken."""
    world = World(tmp_path, byte_level(), api_keys=["secret"])

    async def scenario(web: Web) -> None:
        assert (await web.get("/ready")).status_code == 200
        world.engine.troubles = ["this hangs", "that hangs"]
        answer = await web.get("/ready")
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (503, "not_ready")
        assert error["message"] == "this hangs; that hangs"
        assert (await web.get("/health")).status_code == 200
        body = {"model": "base", "messages": HI}
        key = {"authorization": "Bearer secret"}
        assert (await web.post("/v1/chat/completions", body, headers=key)).status_code == 200

    run(world, scenario)


def test_a_blocked_loop(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(loop_watch, "BEAT_S", 0.05)
    caplog.set_level(logging.ERROR)

    async def go() -> None:
        watch = LoopWatch()
        async with watch.watching():
            await asyncio.sleep(0.1)
            assert not watch.troubles()
            monkeypatch.setattr(loop_watch, "BLOCKED_S", 1.0)
            while not caplog.records:
                time.sleep(0.1)
            async with asyncio.timeout(PATIENCE_S):
                while not watch.troubles():
                    await asyncio.sleep(0.01)
            assert "blocked for" in watch.troubles()[0]
            monkeypatch.setattr(loop_watch, "REMEMBER_S", 0.0)
            assert not watch.troubles()

    asyncio.run(go())
    assert "test_a_blocked_loop" in caplog.text, "where it hangs"
    wait_until(lambda: all(t.name != "weft-watch" for t in threading.enumerate()))


def test_the_signs_of_life_of_an_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = Vitals()
    assert not seen.troubles(), "it gives none"
    seen.hear(Pulse({"step": 3.0, "loaders": 0.0, "registrars": 0.0}))
    assert not seen.troubles()
    seen.hear(Pulse({"step": 9.0, "loaders": 11.0, "registrars": 12.0}))
    step, loaders, registrars = seen.troubles()
    assert "one step for 9 s" in step and "load" in loaders and "check new" in registrars
    seen.hear(Pulse({"compilers": 9.0}))
    assert "compile forms" in seen.troubles()[0]
    monkeypatch.setattr(vitals, "HANG_S", 0.01)
    seen.hear(Pulse({"step": 0.0}))
    time.sleep(0.02)
    assert "no sign of life" in seen.troubles()[0]


@contextlib.contextmanager
def serving(engine: Any) -> Iterator[tuple[SimpleQueue[Command], Progress]]:
    inbox: SimpleQueue[Command] = SimpleQueue()
    progress = Progress()
    args = (engine, inbox, lambda _: None, progress)
    thread = threading.Thread(target=serve, args=args)
    thread.start()
    try:
        yield inbox, progress
    finally:
        inbox.put(Stop())
        thread.join(PATIENCE_S)


def test_a_step_that_hangs() -> None:
    begun, go_on = threading.Event(), threading.Event()

    def step() -> list[object]:
        begun.set()
        go_on.wait(PATIENCE_S)
        return []

    idle = SimpleNamespace(busy=False)
    engine = SimpleNamespace(working=False, scheduler=idle, step=step, close=list)
    engine.apply = lambda _: None
    with serving(engine) as (inbox, progress):
        assert progress.busy_s == 0, "it waits for commands, for as long as it likes"
        inbox.put(Wake())
        assert begun.wait(PATIENCE_S)
        wait_until(lambda: progress.busy_s > 0.05)
        go_on.set()
        wait_until(lambda: progress.busy_s == 0)


def test_commands_are_waited_for_until_the_next_step_is_due() -> None:
    class Busy:
        working = True
        due_s: float | None = None
        """Known once a command has come."""

        def spare_s(self, has_some: bool) -> float:
            now = time.monotonic()
            if has_some and self.due_s is None:
                self.due_s = now + 0.2
            return PATIENCE_S if self.due_s is None else self.due_s - now

    inbox: SimpleQueue[Command] = SimpleQueue()
    engine: Any = Busy()
    threading.Timer(0.05, inbox.put, [Wake()]).start()
    assert list(_commands(inbox, engine)) == [Wake()]
    assert time.monotonic() >= engine.due_s
    assert not list(_commands(inbox, engine)), "it is due"


def test_threads_that_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    """They hang if all do; one that computes gets on, for a while."""
    go_on = threading.Event()

    def compute() -> None:
        while not go_on.is_set():
            pass

    with WatchedThreads(2, "test") as pool:
        pool.submit(go_on.wait, PATIENCE_S)
        wait_until(lambda: len(pool._stalls._works) == 1)
        pool.stuck_s()
        time.sleep(0.02)
        assert pool.stuck_s() == 0, "another thread is free"
        stuck = pool.submit(go_on.wait, PATIENCE_S)
        wait_until(lambda: pool.stuck_s() > 0.05)
        go_on.set()
        assert stuck.result(PATIENCE_S)
        wait_until(lambda: pool.stuck_s() == 0 and not pool._stalls._works)
        go_on.clear()
        pool.submit(go_on.wait, PATIENCE_S)
        pool.submit(compute)
        wait_until(lambda: len(pool._stalls._works) == 2)
        time.sleep(0.3)
        assert pool.stuck_s() < 0.2, "it gets on"
        monkeypatch.setattr(stalls, "LONG_S", 0.1)
        assert pool.stuck_s() >= 0.2, "it never ends"
        go_on.set()

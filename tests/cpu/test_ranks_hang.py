"""Ranks that hang while a model starts or ends: both have an end, and it is told why."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest
from patience import PATIENCE_S, wait_until
from tiny import ADAPTERS, BASE

from weft import LLM, SamplingParams
from weft.core.config import engine_args
from weft.core.errors import EngineDead
from weft.core.requests import EngineRequest
from weft.engine.build import build_engine
from weft.kernels.collective import group
from weft.worker import peers, spawn, starting
from weft.worker.peers import Peers
from weft.worker.records import StageEnded, StepFailed

SLEEPS = "import time; time.sleep(600)"
HANGS = """
import time
from weft.worker import build, rank

def hang(*_, **__):
    time.sleep(600)

{}
rank.main()
"""
PLACES = {
    "where ranks meet": "rank.join_group = hang",
    "where memory is shared out": "build.least = hang",
    "at the end of its start": "rank.RingReader = hang",
}

KILLED = """
import os, signal, sys
from weft.core.config import engine_args
from weft.worker import peers, spawn

spawn.COMMAND = "pass"
peers.Peers(engine_args(sys.argv[1], device="cpu", tensor_parallel_size=2), lambda: None)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Little patience, but enough for imports."""
    monkeypatch.setattr(starting, "TOGETHER_S", 1.0)
    monkeypatch.setattr(peers, "END_S", 0.2)
    monkeypatch.setattr(group, "MEET_S", 3.0)


def run_instead(monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    """Let the other rank's process do something else."""
    monkeypatch.setattr(spawn, "COMMAND", command)


def test_each_step_that_fails_has_time_to_settle(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time of an earlier one, which has settled, does not run for a later one."""
    run_instead(monkeypatch, SLEEPS)
    watches: list[threading.Event] = []
    sleep = time.sleep

    def watched(seconds: float) -> None:
        if seconds == peers.SETTLE_S:
            watches.append(threading.Event())
            watches[-1].wait(PATIENCE_S)
        else:
            sleep(seconds)

    monkeypatch.setattr(time, "sleep", watched)
    monkeypatch.setattr(starting, "TOGETHER_S", PATIENCE_S)
    lost = threading.Event()
    others = Peers(engine_args(str(BASE), device="cpu", tensor_parallel_size=2), lost.set)
    try:
        before = threading.active_count()
        for number in range(2):
            others._step_failed = ""  # as `settle` leaves it
            others._take(others._peers[0], StepFailed("the same"))
            wait_until(lambda number=number: len(watches) > number)
        watches[0].set()
        wait_until(lambda: threading.active_count() < before + 2)
        others.check()
        watches[1].set()
        assert lost.wait(PATIENCE_S)
    finally:
        others.close()


def test_a_pause_of_all_processes_is_no_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when a container is paused: the clock jumps, and ranks had no time to say anything."""
    run_instead(monkeypatch, SLEEPS)
    looks: list[float] = []
    lost = threading.Event()
    ahead_s, clock, sleep = 0.0, time.monotonic, time.sleep

    def watched(seconds: float) -> None:
        if seconds == peers.WATCH_S:
            looks.append(seconds)
        sleep(seconds)

    monkeypatch.setattr(peers, "WATCH_S", 0.002)
    monkeypatch.setattr(time, "sleep", watched)
    monkeypatch.setattr(time, "monotonic", lambda: clock() + ahead_s)
    monkeypatch.setattr(starting, "TOGETHER_S", PATIENCE_S)
    ranks = Peers(engine_args(str(BASE), device="cpu", tensor_parallel_size=2), lost.set)
    try:
        for stage in (starting.IMPORTS, starting.BUILT):
            ranks.stage_ended(stage)
            ranks._take(ranks._peers[0], StageEnded(stage))
        ahead_s = 3600.0
        looks.clear()
        wait_until(lambda: len(looks) > 2 or lost.is_set())
        ranks.check()
        assert ranks.stuck_s()["ranks"] < peers.SETTLE_S
    finally:
        ranks.close()


def test_a_rank_that_never_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    """All is ended by the time that a start may take at most; orders and its end wait no longer,
    though nobody takes any and there are more of them than there is room for."""
    run_instead(monkeypatch, SLEEPS)
    monkeypatch.setattr(starting, "ALONE_S", 1.0)
    lost = threading.Event()
    ranks = Peers(engine_args(str(BASE), device="cpu", tensor_parallel_size=2), lost.set)
    until_s = time.monotonic() + PATIENCE_S
    with pytest.raises(EngineDead):
        while time.monotonic() < until_s:
            ranks.clear(range(100_000))
    assert lost.wait(PATIENCE_S)
    ranks.close()


def test_orders_that_nobody_takes_do_not_hold_up_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    run_instead(monkeypatch, SLEEPS)
    monkeypatch.setattr(peers, "RING_BYTES", 1 << 16)
    ranks = Peers(engine_args(str(BASE), device="cpu", tensor_parallel_size=2), lambda: None)
    full = threading.Thread(target=ranks.clear, args=(range(100_000),), daemon=True)
    full.start()
    ranks.close()
    full.join(PATIENCE_S)
    assert not full.is_alive()


def test_where_ranks_of_a_killed_engine_met_is_removed_by_the_next_engine(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Engines end with a rank, or are killed, again and again while a server lives."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    subprocess.run([sys.executable, "-c", KILLED, BASE], timeout=PATIENCE_S, check=False)
    (left,) = tmp_path.iterdir()
    run_instead(monkeypatch, SLEEPS)
    ranks = Peers(engine_args(str(BASE), device="cpu", tensor_parallel_size=2), lambda: None)
    assert not left.exists() and len(list(tmp_path.iterdir())) == 1
    ranks.close()
    assert not list(tmp_path.iterdir())


def test_an_engine_that_is_closed_leaves_no_file_open(monkeypatch: pytest.MonkeyPatch) -> None:
    run_instead(monkeypatch, SLEEPS)

    def bells() -> int:
        links = (path.readlink() for path in Path("/proc/self/fd").iterdir() if path.is_symlink())
        return [str(link) for link in links].count("anon_inode:[eventfd]")

    before = bells()
    ranks = Peers(engine_args(str(BASE), device="cpu", tensor_parallel_size=3), lambda: None)
    assert bells() == before + 2
    ranks.close()
    assert bells() == before


@pytest.mark.exhaustive
@pytest.mark.parametrize("place", PLACES)
def test_a_rank_that_hangs_at_the_start(
    place: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    run_instead(monkeypatch, HANGS.format(PLACES[place]))
    monkeypatch.setattr(starting, "ALONE_S", 20.0)
    with pytest.raises(EngineDead, match=r"have not (met|got on with their start)"):
        LLM(BASE, ADAPTERS, device="cpu", tensor_parallel_size=2, num_blocks=64, num_threads=1)
    assert "in hang" in capfd.readouterr().err


@pytest.mark.exhaustive
@pytest.mark.parametrize("num_steps", range(8))
def test_a_model_is_closed_with_steps_under_way(num_steps: int) -> None:
    """After so many steps; both ranks still compute the last one, which nobody waits for."""
    options = {"device": "cpu", "tensor_parallel_size": 2, "num_blocks": 512, "num_threads": 1}
    engine = build_engine(engine_args(str(BASE), **options))
    params = SamplingParams(max_tokens=200, temperature=0.0, ignore_eos=True)
    for number in range(4):
        assert engine.submit(EngineRequest(str(number), [1, 2, 3], params, None, seed=0)) is None
    for _ in range(num_steps):
        engine.step()
    assert len(engine.close()) == 4

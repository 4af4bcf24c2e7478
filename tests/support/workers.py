"""Tests in several processes, which are forked when all tests have been collected, so that modules
are imported and tests collected once.

    pytest --workers 3:  imports, collects ─┬─▶ worker 1: files ─┬─▶ pytest prints reports
                                            ├─▶ worker 2: files ─┤
                                            ╰─▶ worker 3: files ─╯

A worker that has run a file's tests takes the next file that nobody has taken. The decision
`docs/decisions/0026-workers-of-tests-are-forked.md` says why this is not left to pytest-xdist.
"""

from __future__ import annotations

import os
import struct
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import connection, get_context
from multiprocessing.connection import Connection
from multiprocessing.context import ForkProcess
from typing import Any

import pytest

_NUMBER = struct.Struct("<i")
_context = get_context("fork")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--workers", type=int, default=0, help="how many processes run tests")


def run_tests(session: pytest.Session, together: Mapping[str, str]) -> bool:
    """Run the collected tests in as many processes as `--workers` says. Tests of one file run in
    one process, one after another, and so do those of files that `together` gives the same value.

    Returns:
        Whether they were run. If not, such as without `--workers`, pytest goes on as always.
    """
    num = session.config.getoption("workers")
    if not num or session.config.option.collectonly or session.testsfailed:
        return False
    files = defaultdict[str, list[pytest.Item]](list)
    for item in session.items:
        file = item.nodeid.partition("::")[0]
        files[together.get(file, file)].append(item)
    workers = _Workers(session, [*files.values()])
    try:
        workers.start(num)
        workers.listen()
    finally:
        workers.end()
    return True


@dataclass
class _Worker:
    """A worker, as pytest's process knows it."""

    process: ForkProcess
    link: Connection
    running: pytest.Item | None = None
    """The test that it has begun last; None when it has run all of its tests."""


class _Workers:
    """The workers of one session, in pytest's process."""

    def __init__(self, session: pytest.Session, files: list[list[pytest.Item]]) -> None:
        self._session = session
        self._files = files
        self._workers: list[_Worker] = []
        self._num_done = 0

    def start(self, num: int) -> None:
        if "quick_start" in sys.modules:
            sys.modules["quick_start"].fork_server()  # one for all
        self._session.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]
        turns, other = os.pipe()
        for number in range(len(self._files)):
            os.write(other, _NUMBER.pack(number))
        os.close(other)
        for _ in range(num):
            ours, theirs = connection.Pipe(duplex=False)
            process = _context.Process(target=self._work, args=(turns, theirs, ours))
            process.start()
            theirs.close()
            self._workers.append(_Worker(process, ours))
        os.close(turns)

    def listen(self) -> None:
        """Tell pytest what workers report, until all have ended."""
        links = {worker.link: worker for worker in self._workers}
        while links:
            for link in connection.wait([*links]):
                try:
                    told = link.recv()
                except EOFError:
                    self._lost(links.pop(link))
                else:
                    self._told(links[link], told)
                if self._session.shouldfail:
                    raise self._session.Failed(self._session.shouldfail)
        assert self._session.testsfailed or self._num_done == len(self._session.items)

    def end(self) -> None:
        """Wait for the workers. Those that still have tests to run end after the current one."""
        for worker in self._workers:
            worker.link.close()
        for worker in self._workers:
            worker.process.join()

    def _told(self, worker: _Worker, told: Any) -> None:
        hook, config = self._session.config.hook, self._session.config
        if isinstance(told, dict):
            report = hook.pytest_report_from_serializable(config=config, data=told)
            hook.pytest_runtest_logreport(report=report)
            if report.when == "teardown":
                self._num_done += 1
                hook.pytest_runtest_logfinish(nodeid=report.nodeid, location=report.location)
        else:
            worker.running = None if told is None else self._session.items[told]

    def _lost(self, worker: _Worker) -> None:
        if worker.running is None:
            return
        worker.process.join()
        item = worker.running
        code = worker.process.exitcode
        text = f"The worker ended in this test or behind it: exit code {code}. The rest is not run."
        report = pytest.TestReport(item.nodeid, item.location, {}, "failed", text, "call")
        self._session.config.hook.pytest_runtest_logreport(report=report)

    # -- in a worker -------------------------------------------------------------------------------

    def _work(self, turns: int, link: Connection, other: Connection) -> None:
        for end in (other, *(worker.link for worker in self._workers)):
            end.close()
        config = self._session.config
        config.pluginmanager.unregister(name="terminalreporter")
        config.pluginmanager.register(_Reports(config, link))
        capture = config.pluginmanager.getplugin("capturemanager")
        capture.stop_global_capturing()  # the files that it writes to are those of all workers
        capture.start_global_capturing()
        capture.suspend_global_capture()
        os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(dir=os.environ["XDG_CACHE_HOME"])
        numbers = {item: number for number, item in enumerate(self._session.items)}
        items = self._taken(turns)
        item = next(items, None)
        try:
            with suppress(BrokenPipeError, KeyboardInterrupt):  # nobody listens any more
                while item is not None and not self._session.shouldfail:
                    following = next(items, None)
                    link.send(numbers[item])
                    config.hook.pytest_runtest_protocol(item=item, nextitem=following)
                    item = following
                link.send(None)
        finally:
            self._session._setupstate.teardown_exact(None)

    def _taken(self, turns: int) -> Iterator[pytest.Item]:
        while number := os.read(turns, _NUMBER.size):
            yield from self._files[_NUMBER.unpack(number)[0]]


class _Reports:
    """Sends what a worker's tests report to pytest's process."""

    def __init__(self, config: pytest.Config, link: Connection) -> None:
        self._config = config
        self._link = link

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        hook = self._config.hook
        self._link.send(hook.pytest_report_to_serializable(config=self._config, report=report))

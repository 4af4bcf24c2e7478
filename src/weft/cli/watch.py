"""Reads the metrics of servers again and again: what they did lately, and which of them are silent.

read all at once each second ─> one Scrape with the label `node` ─> increase lately ─> View
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor

from rich.console import Console, RenderableType
from rich.live import Live

from weft.cli.scrapes import Labels, Scrape, View, fetch, measure, steady_time
from weft.core.errors import Unreachable

WINDOW_S = 10.0
"""Rates and percentiles are of the last seconds, so many."""
ROWS_ONCE = 20
HEAD_LINES = 16
"""Lines that are not rows of the table, at most."""

Frame = Callable[[int], RenderableType]
"""What to show now, with at most so many rows of adapters."""


class Watched:
    """The metrics of some servers over the last seconds."""

    def __init__(self, urls: Mapping[str, str], key: str) -> None:
        """`urls`: where each server is, by its name. `key` is sent with each request."""
        self.urls = urls
        self.silent: dict[str, Unreachable] = {}
        """Why a server did not answer the last time, by its name."""
        self.since: dict[str, float] = {}
        """When such a server was first asked in vain, in seconds since 1970."""
        self._key = key
        self._read: deque[dict[str, Scrape]] = deque()
        """What each server that answered said, the oldest first. None is empty."""

    def read(self) -> None:
        """Ask all servers. If none answers, the figures stay as they were."""
        with ThreadPoolExecutor(max_workers=min(len(self.urls), 32)) as pool:
            answers = dict(zip(self.urls, pool.map(self._ask, self.urls.values()), strict=True))
        found = {name: each for name, each in answers.items() if isinstance(each, Scrape)}
        self.silent = {n: each for n, each in answers.items() if isinstance(each, Unreachable)}
        self.since = {name: self.since.get(name, time.time()) for name in self.silent}
        if found:
            self._read.append(found)
            while len(self._read) > 2 and _time_s(self._read[1]) <= _time_s(found) - WINDOW_S:
                self._read.popleft()

    def view(self) -> View:
        """What the servers that answered last did since their first scrape of late."""
        last = self._read[-1]
        first = {name: next(each[name] for each in self._read if name in each) for name in last}
        return measure(merge(last), merge(first))

    @property
    def lost(self) -> Unreachable | None:
        """Why there is nothing new to show: no server answered the last time."""
        if len(self.silent) < len(self.urls):
            return None
        error = next(iter(self.silent.values()))
        if len(self.urls) == 1:
            return error
        return Unreachable(f"none of {len(self.urls)} servers answers; the first: {error.message}")

    @property
    def age_s(self) -> float:
        """How old the figures are, in seconds."""
        return steady_time() - _time_s(self._read[-1])

    def _ask(self, url: str) -> Scrape | Unreachable:
        try:
            return fetch(url, self._key)
        except Unreachable as error:
            return error


def _time_s(scrapes: Mapping[str, Scrape]) -> float:
    return max(scrape.time_s for scrape in scrapes.values())


def merge(scrapes: Mapping[str, Scrape]) -> Scrape:
    """The metrics of several nodes as those of one, whose series have the label `node`."""
    series: dict[str, dict[Labels, float]] = {}
    for node, scrape in scrapes.items():
        for name, values in scrape.series.items():
            merged = series.setdefault(name, {})
            merged.update({labels | {("node", node)}: n for labels, n in values.items()})
    return Scrape(_time_s(scrapes), series)


def show(
    watch: Watched,
    frame: Frame,
    interval_s: float,
    once: bool,
    console: Console | None = None,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Show the servers until interrupted; `once`, or without a terminal: one frame, whose rates are
    of `interval_s`. Raises Unreachable when none can be read at the start."""
    console = console or Console(markup=False)
    _read_or_raise(watch)
    if once or not console.is_terminal:
        sleep(interval_s)
        _read_or_raise(watch)
        console.print(frame(ROWS_ONCE))
        return
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            more = len(watch.urls) if len(watch.urls) > 1 else 0
            live.update(frame(max(console.height - HEAD_LINES - more, 1)), refresh=True)
            sleep(interval_s)
            watch.read()


def _read_or_raise(watch: Watched) -> None:
    watch.read()
    if watch.lost is not None:
        raise watch.lost

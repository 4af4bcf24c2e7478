"""The protocol by which ranks sum through each other's inboxes, as a model in plain Python: see
`weft.kernels.collective.triton_sums` for what it is to keep. Messages arrive late and in any order,
and any program may go on at any time."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

NUM_PROGRAMS = 2
"""Programs of each launch."""


class Place(NamedTuple):
    """Where a row of `source` goes in an inbox."""

    turn: int
    source: int
    row: int


class Send(NamedTuple):
    to: int
    place: Place
    value: object


class Launch(NamedTuple):
    num_rows: int
    two_shot: bool


class BrokenProtocol(AssertionError):
    pass


class Machine:
    """Ranks that launch the same sums one after the other; `turns` sets of places take turns."""

    def __init__(self, size: int, turns: int, launches: list[Launch], random: Random) -> None:
        self.size, self.turns, self.launches, self.random = size, turns, launches, random
        self.inboxes: list[dict[Place, object]] = [{} for _ in range(size)]
        self.on_the_way: list[Send] = []
        self.num_launched = [0] * size
        self.uses: list[dict[int, int]] = [{} for _ in range(size)]
        self.running: list[list[tuple[Iterator[object], object]]] = [[] for _ in range(size)]

    def run(self) -> None:
        while True:
            for rank in range(self.size):
                if not self.running[rank] and self.num_launched[rank] < len(self.launches):
                    self.launch(rank)
            moves = [("arrive", i, 0) for i in range(len(self.on_the_way))]
            for rank, programs in enumerate(self.running):
                moves += [("go on", rank, i) for i in range(len(programs)) if self.is_able(rank, i)]
            if not moves:
                break
            kind, a, b = self.random.choice(moves)
            if kind == "arrive":
                self.arrive(self.on_the_way.pop(a))
            else:
                self.go_on(a, b)
        if any(self.running) or any(self.inboxes):
            raise BrokenProtocol("programs wait for ever, or something was never taken")

    def launch(self, rank: int) -> None:
        launch = self.launches[self.num_launched[rank]]
        self.num_launched[rank] += 1
        for pid in range(min(NUM_PROGRAMS, launch.num_rows)):
            program = self.program(rank, launch, pid)
            self.running[rank].append((program, next(program)))

    def is_able(self, rank: int, i: int) -> bool:
        """Whether a program can go on: it has something to send, or what it waits for is there."""
        wants = self.running[rank][i][1]
        return isinstance(wants, Send) or wants in self.inboxes[rank]

    def go_on(self, rank: int, i: int) -> None:
        program, wants = self.running[rank][i]
        taken = None
        if isinstance(wants, Send):
            self.on_the_way.append(wants)
        else:
            taken = self.inboxes[rank].pop(wants)
        try:
            self.running[rank][i] = (program, program.send(taken))
        except StopIteration:
            del self.running[rank][i]

    def arrive(self, message: Send) -> None:
        inbox = self.inboxes[message.to]
        if message.place in inbox:
            raise BrokenProtocol("a row was overwritten before it was taken")
        inbox[message.place] = message.value

    def program(self, rank: int, launch: Launch, pid: int) -> Iterator[object]:
        """What a program of `sum_rows` does, row by row. What it takes must be of the same use."""
        others = [other for other in range(self.size) if other != rank]
        for row in range(pid, launch.num_rows, NUM_PROGRAMS):
            use = self.uses[rank].get(row, 0)
            turn, owner = use % self.turns, row % self.size
            mine = Place(turn, rank, row)
            first_to = others if not launch.two_shot else [owner] if owner != rank else []
            for other in first_to:
                yield Send(other, mine, (use, rank))
            if launch.two_shot and owner != rank:
                wanted = [(owner, (use, "sum"))]
            else:
                wanted = [(other, (use, other)) for other in others]
            for source, value in wanted:
                if (yield Place(turn, source, row)) != value:
                    raise BrokenProtocol("a row of another use was taken")
            if launch.two_shot and owner == rank:
                for other in others:
                    yield Send(other, mine, (use, "sum"))
            self.uses[rank][row] = use + 1


LAUNCHES = st.lists(st.builds(Launch, st.integers(1, 3), st.booleans()), min_size=1, max_size=5)


@settings(max_examples=30)
@given(size=st.integers(2, 3), launches=LAUNCHES, random=st.randoms(use_true_random=False))
def test_every_row_is_taken_once_and_nobody_waits_for_ever(
    size: int, launches: list[Launch], random: Random
) -> None:
    Machine(size, 2, launches, random).run()


def test_one_set_of_places_is_too_few() -> None:
    """Thus the model would show it."""
    with pytest.raises(BrokenProtocol):
        for seed in range(100):
            Machine(2, 1, [Launch(1, False)] * 3, Random(seed)).run()

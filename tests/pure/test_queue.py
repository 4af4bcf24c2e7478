"""The waiting queue against a plain model: a list, searched for who is next."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest

from weft.schedule.queue import HEAD_START, MAX_IDLE, Account, FairQueue

WEIGHTS = {"double": 2.0}


@dataclass(frozen=True, eq=False)
class Item:
    order: int
    digest: str | None
    account: Account


class Model:
    """What the queue must do, searched for in the plainest way."""

    def __init__(self) -> None:
        self.counters: dict[str, float] = {}
        self.waiting: list[Item] = []
        self.last = ""

    def push(self, item: Item) -> None:
        name = item.account.name
        own = self.counters.setdefault(name, 0.0)
        names = {i.account.name for i in self.waiting}
        if name not in names:
            floor = [self.counters[n] for n in names] or [self.counters.get(self.last, 0.0)]
            self.counters[name] = max(own, min(floor) - HEAD_START)
        self.waiting.append(item)

    def take(self, item: Item) -> None:
        self.waiting.remove(item)
        if not self.waiting:
            self.last = item.account.name

    def first(self, passed: set[int], skipped: set[tuple[str, str | None]]) -> Item | None:
        left = [
            i
            for i in self.waiting
            if i.order not in passed and (i.account.name, i.digest) not in skipped
        ]
        return min(left, key=lambda i: (self.counters[i.account.name], i.order), default=None)


@pytest.mark.parametrize("seed", range(30))
def test_the_queue_is_what_a_list_would_be(seed: int) -> None:
    rng = random.Random(seed)
    queue: FairQueue[Item] = FairQueue(WEIGHTS)
    model = Model()
    running: list[Item] = []
    for order in range(150):
        name = rng.choice(["a", "b", "double"])
        item = Item(order, rng.choice([None, "x", "y", "z"]), queue.open(name))
        queue.push(item)
        model.push(item)
        if rng.random() < 0.3:
            gone = rng.choice(list(queue))
            queue.remove(gone)
            model.take(gone)
            running.append(gone)  # as one preempted later is
        if rng.random() < 0.3 and running:
            back = running.pop(rng.randrange(len(running)))
            queue.push(back)
            model.push(back)
        if rng.random() < 0.5:
            running += _walk(queue, model, rng)
        queue.check()
        assert sorted(i.order for i in queue) == sorted(i.order for i in model.waiting)
        for account in queue.accounts:
            assert account.counter == pytest.approx(model.counters[account.name])


def _walk(queue: FairQueue[Item], model: Model, rng: random.Random) -> list[Item]:
    """Both take, skip and pass over the same; each must name the same item at any time."""
    passed: set[int] = set()
    skipped: set[tuple[str, str | None]] = set()
    taken: list[Item] = []
    with queue.walk() as walk:
        for item in walk:
            assert item is model.first(passed, skipped)
            passed.add(item.order)
            choice = rng.random()
            if choice < 0.2:
                walk.skip()
                skipped.add((item.account.name, item.digest))
            elif choice < 0.7:
                walk.take()
                model.take(item)
                taken.append(item)
                service = rng.randrange(100)
                item.account.charge(service)
                weight = WEIGHTS.get(item.account.name, 1.0)
                model.counters[item.account.name] += service / weight
            elif choice < 0.75:
                return taken
    assert model.first(passed, skipped) is None
    return taken


def test_one_tenant_is_first_come_first_served() -> None:
    queue: FairQueue[Item] = FairQueue()
    for order, digest in enumerate("xyxzyx"):
        queue.push(Item(order, digest, queue.open("")))
    with queue.walk() as walk:
        assert [item.order for item in walk] == list(range(6))


def test_no_credit_from_idle_times() -> None:
    """Whoever comes late is lifted to just below the others; whoever had more keeps that."""
    queue: FairQueue[Item] = FairQueue()
    busy, greedy = queue.open("busy"), queue.open("greedy")
    queue.push(Item(0, None, busy))
    busy.charge(100)
    greedy.charge(500)
    late = queue.open("late")
    queue.push(Item(1, None, late))
    queue.push(Item(2, None, greedy))
    assert (late.counter, greedy.counter) == (100 - HEAD_START, 500)


def test_idle_tenants_are_forgotten_but_not_those_that_had_most() -> None:
    queue: FairQueue[Item] = FairQueue()
    for i in range(5 * MAX_IDLE):
        account = queue.open(f"t{i}")
        account.charge(1 + i % MAX_IDLE)
        queue.close(account)
        queue.check()
    assert queue.num_tenants <= MAX_IDLE
    assert max(account.counter for account in queue.accounts) == MAX_IDLE


def test_thousands_wait() -> None:
    """What a step looks at does not grow with those that wait behind: lanes are passed over as
    one, and the heap holds no more than its lanes."""
    queue: FairQueue[Item] = FairQueue()
    items = [Item(i, f"d{i % 20}", queue.open(f"t{i % 5}")) for i in range(5000)]
    for item in items:
        queue.push(item)
    for _ in range(200):
        seen = 0
        with queue.walk() as walk:
            for _ in walk:
                seen += 1
                walk.skip()
        assert seen == 20
    for item in items[::2]:
        queue.remove(item)
    queue.check()
    assert len(queue._heap) <= 2 * 20 + 64
    assert len(queue) == 2500
    assert set(queue.of_adapter("d1")) == {i for i in items[1::2] if i.digest == "d1"}

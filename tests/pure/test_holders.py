"""Who holds what, against a model that is a set of pairs; and what is repeated to a new engine."""

from __future__ import annotations

from collections import Counter
from random import Random

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from weft.registry import Holders

DIGESTS = st.sampled_from(["d1", "d2", "d3"])
HOLDERS = st.sampled_from(["a", "b", "c"])


def test_the_life_of_content() -> None:
    """Held by two; then by none, while a request of it runs; then held again; then gone."""
    holders, running = Holders(), Counter({"d1": 1})
    holders.hold("d1", "a", pinned=True)
    holders.hold("d1", "b")
    holders.release("d1", "a")
    assert holders.is_held("d1") and not holders.is_pinned("d1")
    holders.release("d1", "b")
    assert not holders.is_held("d1")
    assert holders.take_drained(running.__contains__) == [] and holders.known() == {"d1"}
    holders.hold("d1", "a")
    del running["d1"]
    assert holders.take_drained(running.__contains__) == [] and holders.is_held("d1")
    holders.release("d1", "a")
    assert holders.take_drained(running.__contains__) == ["d1"]
    assert holders.take_drained(running.__contains__) == [] and not holders.known()


def same(one: Holders, other: Holders) -> bool:
    return vars(one) == vars(other)


class HoldersMachine(RuleBasedStateMachine):
    """Holds and releases in any order, some of them repeated, and engines that start anew."""

    def __init__(self) -> None:
        super().__init__()
        self.holders = Holders()
        self.pins: dict[tuple[str, str], bool] = {}
        """What holds survive, by digest and holder."""
        self.in_use: Counter[str] = Counter()
        self.known: set[str] = set()
        """Content that the engine has."""

    @rule(digest=DIGESTS, holder=HOLDERS, pinned=st.booleans(), times=st.integers(1, 3))
    def hold(self, digest: str, holder: str, pinned: bool, times: int) -> None:
        others = [pin for key, pin in self.pins.items() if key[0] == digest and key[1] != holder]
        will_be = self.holders.would_be_pinned(digest, holder, pinned)
        assert will_be is any([pinned, *others])
        for _ in range(times):
            self.holders.hold(digest, holder, pinned)
        assert self.holders.is_pinned(digest) is will_be
        self.pins[digest, holder] = pinned
        self.known.add(digest)

    @rule(digest=DIGESTS, holder=HOLDERS, times=st.integers(1, 3))
    def release(self, digest: str, holder: str, times: int) -> None:
        for _ in range(times):
            self.holders.release(digest, holder)
        self.pins.pop((digest, holder), None)

    @rule(digest=DIGESTS)
    def begin_request(self, digest: str) -> None:
        if self.holders.is_held(digest):
            self.in_use[digest] += 1

    @rule(digest=DIGESTS)
    def end_request(self, digest: str) -> None:
        self.in_use[digest] -= 1
        self.in_use = +self.in_use

    @rule()
    def forget(self) -> None:
        for digest in self.holders.take_drained(self.in_use.__contains__):
            assert not self.in_use[digest]
            self.known.remove(digest)
        assert self.known <= {digest for digest, _ in self.pins} | self.in_use.keys()

    @rule(order=st.randoms(use_true_random=False), repeated=st.booleans())
    def restart(self, order: Random, repeated: bool) -> None:
        """A new engine is told of the surviving holds, in any order, some of them twice."""
        anew = list(self.pins) + (list(self.pins) if repeated else [])
        order.shuffle(anew)
        fresh = Holders()
        for key in anew:
            fresh.hold(*key, self.pins[key])
        self.in_use.clear()
        self.holders.take_drained(lambda _: False)
        assert same(self.holders, fresh)
        self.holders, self.known = fresh, {digest for digest, _ in self.pins}

    @invariant()
    def as_the_model_says(self) -> None:
        self.holders.check()
        assert self.holders.known() == self.known
        for digest in ("d1", "d2", "d3"):
            pins = [pin for key, pin in self.pins.items() if key[0] == digest]
            assert self.holders.is_held(digest) is bool(pins)
            assert self.holders.is_pinned(digest) is any(pins)


TestHoldersMachine = HoldersMachine.TestCase
TestHoldersMachine.settings = settings(max_examples=20, stateful_step_count=30, deadline=None)

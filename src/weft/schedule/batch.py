"""Owns the waiting and running requests, and the draft of a step's plan.

                    admit()                        park()
    waiting ───────────────────▶ running ───────────────────▶ parked
      ▲       row, blocks, lease    │        blocks only        │
      │                             │ (preempted)               │ its blocks are needed
      └─────────────────────────────┴───────────────────────────┘

A parked request waits and is admitted like any other, but keeps its blocks, so that it need not be
computed again. When others need blocks, the youngest parked request loses its own.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple

from weft.core.units import SHORT
from weft.schedule.cache import Cache
from weft.schedule.guesses import Guesser
from weft.schedule.limits import SchedulerLimits
from weft.schedule.plan import Admitted, StepPlan
from weft.schedule.queue import Account, FairQueue
from weft.schedule.sequence import OUTPUT_WEIGHT, Sequence, StepEntries
from weft.schedule.slots import Load
from weft.schedule.turns import Turns


@dataclass
class Totals:
    preemptions: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    guessed_tokens: int = 0
    right_guesses: int = 0
    finished: Counter[str] = field(default_factory=Counter)
    """How many requests ended, by reason."""


class ToldTokens(NamedTuple):
    """The lists of a StepPlan that are there because of guesses; see `StepPlan`."""

    fed: list[tuple[int, int, int]]
    lags: list[tuple[int, int]]
    drafted: list[tuple[int, int]]


class Draft:
    """The plan of one step while it is made. Its lists are those of `StepPlan`."""

    def __init__(self, step: int, limits: SchedulerLimits) -> None:
        self.step = step
        self.num_left = self._budget = limits.max_num_batched_tokens
        """Tokens that the step may still take."""
        self._max_num_seqs = limits.max_num_seqs
        self.sequences: list[Sequence] = []
        self.starts: list[int] = []
        self.counts: list[int] = []
        self.num_samples: list[int] = []
        self.admitted: list[Admitted] = []
        self.new_blocks: list[tuple[int, int, int]] = []
        self.snapshots: list[tuple[int, int]] = []
        self._told = ToldTokens([], [], [])
        self._num_guesses = 0
        self.chunks: list[Sequence] = []
        """Running sequences with more than one token to compute."""

    @property
    def full(self) -> bool:
        return not self.num_left or len(self.sequences) == self._max_num_seqs

    def cap(self, num_tokens: int) -> None:
        """Let the step take at most `num_tokens` further tokens."""
        kept = max(0, self.num_left - num_tokens)
        self.num_left -= kept
        self._budget -= kept

    def schedule(self, seq: Sequence) -> None:
        """Plan as many tokens of a sequence, which has a row and blocks, as the step has room for.
        An entry of the plan ends where the adapter becomes active, and where a snapshot is taken;
        the rest is another entry. If the sequence has a recurrent state, the rest has to wait for
        the next step, unless it is the last few tokens of the prompt; see `_goes_on`."""
        stops, begin = seq.holding.stops, seq.computed
        ends = [seq.adapter.active_from, *stops]
        for end in sorted(end for end in ends if begin < end < seq.known):
            self._schedule(seq, end)
            if self.full or (seq.holding.state >= 0 and not self._goes_on(seq, begin, end)):
                return
        self._schedule(seq, seq.known)

    def _goes_on(self, seq: Sequence, begin: int, end: int) -> bool:
        """Whether a sequence with a state, whose tokens from `begin` to `end` are planned, can go
        on in the same step: if its last snapshot is at `end`, and few tokens are left."""
        return (
            seq.computed == end
            and seq.holding.stops[-1:] == (end,)
            and end - begin > SHORT
            and seq.known - end <= min(SHORT, self.num_left)
            and not end <= seq.adapter.active_from < seq.known
        )

    def decode(self, seq: Sequence, most_guesses: int) -> None:
        """Plan one token of a sequence, which has a block for it, and guesses behind it. Its counts
        are added when all decodes are planned."""
        rules = seq.rules
        self.sequences.append(seq)
        self.starts.append(seq.known - 1)
        seq.known += 1
        if rules.guesser is not None:
            self._guess(seq, rules.guesser, most_guesses)
        else:
            seq.decodes_until = min(rules.known_limit, seq.holding.room + 1)

    def _guess(self, seq: Sequence, guesser: Guesser, most: int) -> None:
        """Plan up to `most` guesses behind the decode of `seq` that was just planned, as far as its
        blocks have room. Nothing else of the sequence is planned until they are settled. If the
        model's own head drafts, have it draft for the next step."""
        tokens, rules, known = seq.tokens, seq.rules, seq.known - 1
        self._catch_up(seq)
        if known == len(tokens):
            self._told.fed.append((seq.row, known - 1, tokens[-1]))
        if most > 0 and guesser.takes_drafts and seq.known < rules.limit:
            self._told.drafted.append((len(self.sequences) - 1, seq.holding.room))
        num = min(most, seq.holding.room - known, rules.limit - seq.known)
        guesses = guesser.guess(tokens, known - len(tokens), num) if num > 0 else []
        if not guesses:
            return
        num, rules.known_limit = len(guesses), 0
        seq.look_at()
        places = range(known, known + num)
        self.sequences += [seq] * num
        self.starts += places
        self._told.fed.extend(zip([seq.row] * num, places, guesses, strict=True))
        self._num_guesses += num
        seq.known = known + num + 1

    def _catch_up(self, seq: Sequence) -> None:
        """Have this step bring a sequence's state up to date with the guesses that were right."""
        if seq.holding.lag:
            self._told.lags.append((seq.holding.state, seq.holding.lag))
            seq.holding.lag = 0

    def _schedule(self, seq: Sequence, end: int) -> None:
        self._catch_up(seq)
        start = seq.computed
        count = min(end - start, self.num_left)
        self.sequences.append(seq)
        self.starts.append(start)
        self.counts.append(count)
        seq.lacking -= count
        self.num_left -= count
        self.num_samples.append(0 if seq.lacking else 1)
        if not seq.lacking:
            seq.known, seq.lacking = seq.known + 1, 1

    def plan(self, rows: list[int], loads: list[Load]) -> StepPlan:
        return StepPlan(
            self.step,
            rows,
            self.starts,
            self.counts,
            self.num_samples,
            self._budget - self.num_left,
            self.admitted,
            self.new_blocks,
            loads,
            self.snapshots,
            *self._told,
            self._num_guesses,
        )


class Batch:
    """Owner of the queue and of the rows. It takes a request's blocks from the cache and its lease
    from the adapters' turns, and gives them back."""

    def __init__(
        self,
        num_rows: int,
        cache: Cache,
        turns: Turns,
        tenant_weights: Mapping[str, float] | None = None,
    ) -> None:
        self.num_rows = num_rows
        self._cache = cache
        self._turns = turns
        self._free_rows = list(range(num_rows - 1, -1, -1))
        self.waiting: FairQueue[Sequence] = FairQueue(tenant_weights)
        self.running: list[Sequence] = []
        """Requests with a row, in the order of their arrival."""
        self.num_guessed_at = 0
        """How many running requests have a guesser."""
        self._parked: list[Sequence] = []
        """Waiting requests with blocks, in the order of their arrival."""
        self.flights: dict[int, StepEntries] = {}
        """The requests of the planned steps that are not committed, in the order of the steps."""
        self._entries: StepEntries | None = None
        """Those of the last step, if no row was given back since."""
        self._leaving: deque[tuple[int, Sequence]] = deque()
        """Requests that lost their rows, each behind the last step that was in flight then."""
        self._charged_in = -1
        """The step in which the tenants' counters were last brought up to date."""
        self.totals = Totals()

    @property
    def full(self) -> bool:
        return not self._free_rows

    @property
    def num_queued_tokens(self) -> int:
        """Tokens to compute before all requests have had their next one, except decodes."""
        return sum(seq.lacking for seq in chain(self.running, self.waiting) if seq.lacking > 1)

    def stranded(self, most: int) -> tuple[str, ...]:
        """Ids of requests that had begun and lost their blocks; of the youngest `most` of them."""
        if not self.totals.preemptions:
            return ()
        found = sorted(s for s in self.waiting if s.num_cached >= 0 and not s.holding.blocks)
        return tuple(seq.request_id for seq in found[-most:])

    @property
    def num_free(self) -> int:
        return len(self._free_rows)

    def join(self, seq: Sequence) -> None:
        """Put a request in the queue, at its place by arrival."""
        if not seq.account.num_waiting and self.waiting.num_tenants > 1:
            self.charge_running()  # its tenant is lifted to the lowest counter
        self.waiting.push(seq)

    def admit(self, seq: Sequence, draft: Draft) -> bool:
        """Give a waiting request a row, blocks and its adapter's lease, and plan its tokens; the
        caller takes it from the queue. False, and nothing of this, if there are too few blocks even
        after other parked requests have lost theirs."""
        cache, holding = self._cache, seq.holding
        parked = bool(holding.blocks)
        hits: list[int] = []
        asked = seq.prompt_output
        if not parked and not (asked is not None and asked.needs_all):
            hits = cache.match(holding, seq.tokens)
        spare = cache.num_blocks // 100 if self.running else 0
        while not cache.reserve(holding, len(seq.tokens), hits, spare):
            other = next((s for s in reversed(self._parked) if s is not seq), None)
            if other is None:
                return False
            self._strip(other)
        if parked:
            self._parked.remove(seq)
        else:
            seq.lacking = seq.known - len(hits) * cache.block_size
        seq.row = self._free_rows.pop()
        self._count_prompt(seq)
        adapter_wait_s = self._turns.lease(seq.adapter, len(seq.tokens))
        draft.admitted.append(seq.admitted(adapter_wait_s))
        insort(self.running, seq)
        self.num_guessed_at += seq.rules.guesser is not None
        self.schedule(seq, draft)
        self._charge(seq)
        return True

    def schedule(self, seq: Sequence, draft: Draft) -> None:
        """Plan a chunk of a sequence, and the snapshots that are to be taken in it."""
        begin = seq.computed
        draft.schedule(seq)
        for stop in seq.holding.stops:
            if begin < stop <= seq.computed:
                number = self._cache.snapshot(seq.holding, seq.tokens, stop)
                if number is not None:
                    draft.snapshots.append((seq.holding.state, number))

    def grow(self, seq: Sequence, draft: Draft) -> bool:
        """Give a running request one more block, if need be by taking blocks from parked or other
        running requests. False if `seq` itself was preempted instead."""
        while (block := self._cache.extend(seq.holding)) is None:
            if self._parked:
                self._strip(self._parked[-1])
                continue
            victim = self._victim(seq, draft)
            self.park(victim)
            self._strip(victim)
            if victim is seq:
                return False
        draft.new_blocks.append((seq.row, len(seq.holding.blocks) - 1, block))
        return True

    def _victim(self, seq: Sequence, draft: Draft) -> Sequence:
        """The youngest running request; if tenants compete, that of the tenant that has most blocks
        for its weight. A request that came before `seq`, or that the step computes, is spared."""
        drafted = set(draft.sequences)
        later = [s for s in self.running[bisect_left(self.running, seq) :] if s not in drafted]
        if not self.waiting.contended:
            return later[-1]
        blocks: Counter[Account] = Counter()
        for each in self.running:
            blocks[each.account] += len(each.holding.blocks)
        return max(reversed(later), key=lambda s: blocks[s.account] / s.account.weight)

    def park(self, seq: Sequence) -> None:
        """Put a running request back to the queue, at its place by arrival, with its blocks."""
        self.totals.preemptions += 1
        self._charge(seq)
        self._leave(seq)
        insort(self._parked, seq)
        self.join(seq)

    def roll_back(self, planned: Iterable[Sequence], plan: StepPlan) -> list[Sequence]:
        """Undo the plan of a step that failed and is not in flight any more: its sequences wait
        again. Returns each once."""
        starts = plan.starts
        for _, number in plan.snapshots:
            self._cache.snapshot_ended(number, False)
        sequences: dict[Sequence, None] = {}
        for seq, start in zip(planned, starts, strict=True):
            computed, seq.known = min(seq.computed, start), len(seq.tokens)
            seq.lacking = seq.known - computed
            sequences[seq] = None
        for seq in sequences:
            if seq.rules.guesser is not None and seq.rules.guesser.guessing:
                seq.rules.settle_guesses()
            if seq.row >= 0:
                self.park(seq)
            if seq.holding.state >= 0:
                self._strip(seq)  # nobody knows what the step has made of its state
        return list(sequences)

    def launch(self, draft: Draft, loads: list[Load]) -> StepPlan:
        """The plan of a step, which is in flight from now on, unless it is empty."""
        entries, sequences = self._entries, draft.sequences
        if entries is None or entries.sequences != sequences:
            each = [(seq.row, seq.request.request_id, seq.num_cached) for seq in sequences]
            rows, ids, cached = map(list, zip(*each, strict=True)) if each else ([], [], [])
            entries = self._entries = StepEntries(sequences, rows, ids, cached)
        if sequences:
            self.flights[draft.step] = entries
        return draft.plan(entries.rows, loads)

    def landed(self, step: int) -> None:
        """The steps up to this one are in flight no more."""
        while self._leaving and self._leaving[0][0] <= step:
            _, seq = self._leaving.popleft()
            seq.in_flight = False
            self._turns.end_lease(seq.adapter)

    def settle_guesses(self, planned: Iterable[Sequence]) -> None:
        """Settle the guesses of a step after it: what is behind a wrong one is void."""
        for seq in dict.fromkeys(planned):
            if seq.rules.known_limit or seq.done:
                continue
            seq.known, seq.lacking = len(seq.tokens), 1
            num, found = seq.rules.settle_guesses()
            if seq.holding.state >= 0:
                seq.holding.lag = found
            self.totals.guessed_tokens += num
            self.totals.right_guesses += found

    def remove(self, seq: Sequence) -> None:
        """Take out a request that has ended, running or waiting; not during a walk of the queue."""
        self._charge(seq)
        if seq.row >= 0:
            self._leave(seq)
        else:
            self.waiting.remove(seq)
            if seq.holding.blocks:
                self._parked.remove(seq)
        self._cache.release(seq.holding)
        self.waiting.close(seq.account)

    def charge_running(self, step: int = -1) -> None:
        """Bring the tenants' counters up to date, at most once for each `step` that is given. They
        only matter when several tenants compete, so the loops that run for every token don't
        update them."""
        if step >= 0 and step == self._charged_in:
            return
        self._charged_in = step
        for seq in self.running:
            bill, num_tokens = seq.bill, len(seq.tokens)
            if bill.charged < bill.came:
                bill.settle(seq.computed, num_tokens)
            else:  # the same for output alone, written flat
                account = bill.account
                account.counter += OUTPUT_WEIGHT * (num_tokens - bill.charged) / account.weight
                bill.charged = num_tokens

    def _charge(self, seq: Sequence) -> None:
        seq.bill.settle(seq.computed, len(seq.tokens))

    def _count_prompt(self, seq: Sequence) -> None:
        """Count the tokens with which a request came, at its first admission."""
        if seq.num_cached < 0:
            seq.num_cached = min(seq.computed, seq.num_prompt)
            self.totals.prompt_tokens += len(seq.tokens)
            self.totals.cached_tokens += seq.computed
            seq.bill.charged = seq.computed
        seq.bill.admitted_with = seq.bill.charged

    def _leave(self, seq: Sequence) -> None:
        """Give back a row. The adapter's lease lasts until no step is in flight that was planned
        before: loads don't wait for steps, so one might overwrite an adapter that is in use."""
        self.running.remove(seq)
        self.num_guessed_at -= seq.rules.guesser is not None
        self._free_rows.append(seq.row)
        seq.row = -1
        seq.look_at()
        self._entries = None
        if self.flights:
            seq.in_flight = True
            self._leaving.append((next(reversed(self.flights)), seq))
        else:
            self._turns.end_lease(seq.adapter)

    def _strip(self, seq: Sequence) -> None:
        """Take a parked request's blocks. Steps in flight may still write to these, but run before
        any step that is planned from now on."""
        self._parked.remove(seq)
        self._cache.release(seq.holding)
        seq.lacking = seq.known

    def check(self, requests: Iterable[Sequence]) -> None:
        """Raise AssertionError unless all invariants hold, those of queue, cache and turns
        included. `requests`: all those that joined and were not removed."""
        requests, running = list(requests), self.running
        self.waiting.check()
        self._cache.check(s.holding for s in requests)
        self._turns.check(s.adapter for s in requests)
        rows = [s.row for s in running]
        assert sorted(rows + self._free_rows) == list(range(self.num_rows))
        assert sorted(running) == running
        assert sum(s.rules.guesser is not None for s in running) == self.num_guessed_at
        assert len(self.waiting) + len(running) == len(requests)
        assert all(s.row < 0 for s in self.waiting)
        for seq in requests:
            seq.check()
        assert {s for s in requests if s.in_flight} <= {s for _, s in self._leaving}
        assert sorted(s for s in self.waiting if s.holding.blocks) == self._parked
        tenants = Counter(s.account.name for s in requests)
        assert tenants == {a.name: a.num_open for a in self.waiting.accounts if a.num_open}
        assert all(0 <= s.bill.admitted_with <= s.bill.charged <= len(s.tokens) for s in requests)

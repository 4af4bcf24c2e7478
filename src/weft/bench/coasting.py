"""The engine's scheduler, made fast for simulations: steps that need no decision are not planned.

Most of a step's plan is one more token for each running request. In a simulation such requests
*coast*: it is worked out when they will end, and nothing else is done about them until then.
Admission, adapters, blocks, prompts and preemption are the scheduler's own.

    decide()   plans as the scheduler does, unless there is nothing to plan; requests that coast
               count as tokens of the step, but are not listed
    pass_()    one step has passed; requests that have all their tokens now have ended
    coast()    several steps have passed, in which no request has ended
"""

from __future__ import annotations

import heapq
from itertools import chain

from weft.core.requests import TokenEvent
from weft.schedule.batch import Draft
from weft.schedule.cache import Cache
from weft.schedule.limits import SchedulerLimits
from weft.schedule.plan import StepPlan, StepResult
from weft.schedule.queue import Account
from weft.schedule.scheduler import Scheduler
from weft.schedule.sequence import Sequence
from weft.schedule.slots import AdapterSlots


class CoastingScheduler(Scheduler):
    """Serves one tenant's requests of a given length, whose outputs repeat their last token."""

    def __init__(self, limits: SchedulerLimits, cache: Cache, slots: AdapterSlots) -> None:
        super().__init__(limits, cache, slots)
        self._passed = 0
        """Steps so far."""
        self._began: dict[Sequence, int] = {}
        """The step in which each coasting request began to coast."""
        self._ends: list[tuple[int, int, Sequence]] = []
        """(The step after which it ends, order, request); void if it does not coast any more."""
        self.quiet = False
        """Whether nothing is to be decided until a request comes or ends, or a load ends."""

    @property
    def num_leased(self) -> int:
        """How many adapters are in the batch."""
        return self._turns.num_leased

    @property
    def num_coasting(self) -> int:
        return len(self._began)

    @property
    def steps_to_end(self) -> int:
        """How many steps it takes until the next coasting request ends."""
        while self._ends and not self._is_due(*self._ends[0]):
            heapq.heappop(self._ends)
        return self._ends[0][0] - self._passed if self._ends else 0

    def _is_due(self, end: int, _order: int, seq: Sequence) -> bool:
        """Whether an entry of `_ends` is true still."""
        began = self._began.get(seq)
        return began is not None and began + seq.rules.limit - len(seq.tokens) == end

    def decide(self, now: float) -> StepPlan | None:
        """Begin a step. None: it is one more token for each request, and nothing else."""
        self.quiet = not self.batch.waiting and self._all_coast()
        if self.quiet:
            return None
        plan = self.plan(now)
        self.quiet = plan.empty and not self._turns.lacks_room
        return plan

    def _all_coast(self) -> bool:
        return all(seq.lacking == 1 and self._take_off(seq) for seq in self._grounded)

    @property
    def _grounded(self) -> list[Sequence]:
        """Running requests that don't coast."""
        running, began = self.batch.running, self._began
        return [] if len(running) == len(began) else [seq for seq in running if seq not in began]

    def plan(self, now: float) -> StepPlan:
        self._steps += 1
        draft = Draft(self._steps, self._limits)
        for seq in self._turns.begin(now, self.batch.running):
            self._land(seq)
            self.batch.park(seq)
        self._plan_decodes(draft)
        self._plan_chunks(draft, False)
        self._plan_waiting(draft, False)
        return self.batch.launch(draft, self._turns.end())

    def _plan_decodes(self, draft: Draft, resting: frozenset[Account] = frozenset()) -> None:
        for seq in self._grounded:
            if seq.lacking > 1:
                draft.chunks.append(seq)
            elif not self._take_off(seq):
                for each in list(self._began):
                    self._land(each)
                draft.chunks.clear()
                super()._plan_decodes(draft, resting)
                return
        draft.num_left -= len(self._began)

    def _take_off(self, seq: Sequence) -> bool:
        """Let a request coast, if there are blocks for all of it."""
        limit = seq.rules.limit
        while seq.holding.room < limit:
            if self._cache.extend(seq.holding) is None:
                return False
        self._began[seq] = self._passed
        end = self._passed + limit - len(seq.tokens)
        heapq.heappush(self._ends, (end, seq.order, seq))
        return True

    def _land(self, seq: Sequence) -> None:
        """Give a request the tokens that it has got while it coasted."""
        began = self._began.pop(seq, None)
        if began is not None and self._passed > began:
            seq.tokens.extend([seq.tokens[-1]] * (self._passed - began))
            seq.known = len(seq.tokens)
            self._cache.register(seq.holding, seq.tokens, seq.computed)

    def coast(self, num_steps: int) -> None:
        """Steps have passed in which nobody began or ended."""
        self._passed += num_steps

    def pass_(self, plan: StepPlan | None) -> list[TokenEvent]:
        """A step with this plan has passed. Returns first and last tokens."""
        self._passed += 1
        events: list[TokenEvent] = []
        if plan is not None and plan.rows:
            sequences = self.batch.flights[plan.step].sequences
            planned = zip(sequences, plan.num_samples, strict=True)
            tokens = [seq.tokens[-1] for seq, samples in planned if samples]
            events += self.commit(plan, StepResult(tokens))
        while self._ends and self._ends[0][0] <= self._passed:
            entry = heapq.heappop(self._ends)
            if self._is_due(*entry):
                seq = entry[2]
                self._land(seq)
                events.append(self._finish(seq, "length", [seq.tokens[-1]]))
        return events

    @property
    def num_queued_tokens(self) -> int:
        """See `Batch.num_queued_tokens`."""
        lacking = chain(self._grounded, self.batch.waiting)
        return sum(seq.lacking for seq in lacking)

    def abort(self, request_id: str) -> TokenEvent | None:
        self.quiet = False
        seq = self._by_id.get(request_id)
        if seq is not None:
            self._land(seq)
        return super().abort(request_id)

    def has(self, request_id: str) -> bool:
        return request_id in self._by_id

    def output_of(self, request_id: str) -> list[int]:
        """What a request has got so far beyond what it came with as its prompt."""
        seq = self._by_id[request_id]
        if seq in self._began:
            self._land(seq)
            self._take_off(seq)
        return seq.tokens[seq.num_prompt :].tolist()

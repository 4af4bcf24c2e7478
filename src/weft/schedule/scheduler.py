"""Decides what runs in each step. Pure Python: no torch, no clock, no I/O.

    plan = scheduler.plan(now)           what to run now, with which blocks and slots
    events = scheduler.commit(plan, result)

Plans may run ahead of commits by one step or more: a request's newest tokens are then *pending*,
known to the device only. The tokens of a step are given, in this order, to:

1. decodes of running requests, oldest request first; if blocks run out, the youngest parked
   request loses its own, or else the youngest running one, which waits again, to be recomputed;
2. the rest of running prompts, in chunks, oldest first;
3. waiting requests, in the order of `weft.schedule.queue`: first the tenant that was served least,
   then by arrival. A request needs a row, KV blocks, its adapter on the device, and its grammar. If
   its adapter is absent (`weft.schedule.turns` says when it is there), or its grammar is still
   being compiled, the request is passed over, never dropped, and holds up nobody.

An *activated* adapter is active from some position of the prompt on. Before that position, the
request has no slot and uses the base's prefix cache. A chunk ends there, and another chunk may
follow in the same step. The adapter is leased from the admission on.

A *paced* request has a Matcher, which must be told each token before it can say what may come
next: its next decode is planned only when none of its tokens is pending.

A *parked* request had to make way for another adapter; see `weft.schedule.batch`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from weft.core.errors import AdapterUnavailable, InvalidRequest, WeftError, to_wire
from weft.core.messages import Tokens
from weft.core.requests import (
    EngineRequest,
    FinishReason,
    FollowingTokens,
    TokenArray,
    TokenEvent,
    TokenLogprob,
    error_event,
    next_tokens,
)
from weft.core.tenants import Tenant
from weft.schedule.batch import Batch, Draft, Totals
from weft.schedule.cache import Cache
from weft.schedule.lengths import GuessLengths
from weft.schedule.limits import SchedulerLimits, check_request
from weft.schedule.pace import ChunkPace
from weft.schedule.plan import Matcher, StepPlan, StepResult
from weft.schedule.queue import Account, Walk
from weft.schedule.results import by_entry, of_entry, offer_drafts, take_of_prompts
from weft.schedule.sequence import AdapterUse, Sequence
from weft.schedule.shares import Shares
from weft.schedule.slots import AdapterSlots
from weft.schedule.trials import Trials
from weft.schedule.turns import Turns

PREFETCH = 32
"""How many waiting requests, behind the admitted ones, have their adapters loaded ahead."""


class Scheduler:
    """Owner of all requests in the engine."""

    def __init__(
        self,
        limits: SchedulerLimits,
        cache: Cache,
        slots: AdapterSlots,
        tenant_weights: Mapping[str, float] | None = None,
    ) -> None:
        self._limits = limits
        self._cache = cache
        self._slots = slots
        self._turns = Turns(slots, limits.max_loras, limits.max_adapter_wait)
        self._steps = self._orders = 0
        self._by_id: dict[str, Sequence] = {}
        self.batch = Batch(limits.max_num_seqs, cache, self._turns, tenant_weights)
        self._shares = Shares()
        cap_s = limits.max_chunk_delay
        self.pace = None if cap_s is None else ChunkPace(cap_s, cache.block_size)
        """Limits chunks of prompts beside decodes; None: no limit but the step's."""
        self.lengths = GuessLengths(self.batch)
        self.trials = Trials()

    # -- requests ------------------------------------------------------------------------------

    def add(
        self, request: EngineRequest, active_from: int | None = 0, vocab_size: int = 0
    ) -> TokenEvent | None:
        """Queue a request. Returns None, or its error event if it can't be served.

        active_from: the position of the prompt from which on its adapter is active; None: nowhere,
        so the base serves the request. vocab_size: its adapter's; 0: the base's.
        """
        try:
            tokens = self._validate(request, vocab_size or self._limits.vocab_size)
        except WeftError as error:
            return self.refuse(request.request_id, error)
        account = self.batch.waiting.open(request.tenant)
        use = AdapterUse(request, active_from, vocab_size)
        seq = Sequence(request, self._orders, account, use, self._limits, tokens)
        self._orders += 1
        self._by_id[request.request_id] = seq
        self.batch.join(seq)
        self._turns.arrive(use)
        if self.batch.waiting.contended:
            self._shares.arrive(seq, self._turns.leased, self.batch.num_rows, self.batch.full)
        return None

    def refuse(self, request_id: str, error: WeftError) -> TokenEvent:
        """The answer to a request that can't be served: its error event."""
        self.totals.finished["error"] += 1
        return error_event(request_id, error)

    def set_tenants(self, tenants: Iterable[Tenant]) -> None:
        """See `EngineClient.set_tenants`."""
        self.batch.waiting.set_tenants(tenants)

    def abort(self, request_id: str) -> TokenEvent | None:
        """End a request early; None if it is not here (it ended already)."""
        seq = self._by_id.get(request_id)
        return self._finish(seq, "abort") if seq else None

    def abort_all(self) -> list[TokenEvent]:
        return [self._finish(seq, "abort") for seq in list(self._by_id.values())]

    def _validate(self, request: EngineRequest, vocab_size: int) -> TokenArray:
        if request.request_id in self._by_id:
            raise InvalidRequest(f"request id {request.request_id!r} is in use", "request_id")
        tokens = check_request(request, self._limits, vocab_size)
        ref = request.adapter
        if ref and not self._slots.knows(ref.digest):
            raise AdapterUnavailable(f"adapter {ref.name!r} is not loaded", "model")
        if ref and (refusal := self._slots.refusal(ref.digest)):
            raise refusal
        return tokens

    def grammar_ended(self, request_id: str, grammar: Matcher | WeftError) -> TokenEvent | None:
        """Take the compiled grammar of a waiting request, if that is still here. Returns the last
        event of a request that an error ends."""
        seq = self._by_id.get(request_id)
        if seq is not None and seq.rules.compiling:
            try:
                if isinstance(grammar, WeftError):
                    raise grammar
                seq.rules.compiled(grammar, seq.request.output_ids)
            except WeftError as error:
                return self._finish(seq, "error", error=error)
        return None

    # -- adapters ------------------------------------------------------------------------------

    def uses_adapter(self, digest: str) -> bool:
        """Whether any request waits, runs or is in a step in flight with this adapter."""
        return self._turns.in_use(digest)

    def adapter_failed(self, digest: str, error: WeftError) -> list[TokenEvent]:
        """End the requests that wait for an adapter whose load failed."""
        self._turns.settle(digest)
        waiting = self.batch.waiting.of_adapter(digest)
        return [self._finish(seq, "error", error=error) for seq in waiting]

    # -- the step ------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        return bool(self._by_id)

    def plan(self, now: float) -> StepPlan:
        """The next step; empty if nothing can run. `now`: seconds that never decrease."""
        self._steps += 1
        draft = Draft(self._steps, self._limits)
        for seq in self._turns.begin(now, self.batch.running):
            self.batch.park(seq)
        contended = self.batch.waiting.contended
        resting = frozenset[Account]()
        if contended:
            resting = self._shares.begin(draft, self.batch, self._cache.block_size)
        self._plan_decodes(draft, resting)
        if self.pace and (draft.sequences or resting):
            draft.cap(self.pace.most)
        self._plan_chunks(draft, contended)
        self._plan_waiting(draft, contended)
        if resting and not draft.admitted:  # nobody begins after all
            others = {seq.account for seq in self.batch.running} - resting
            self._plan_decodes(draft, frozenset(others))
        if not draft.sequences and not self.batch.flights:
            self.trials.passed(())
        return self.batch.launch(draft, self._turns.end())

    def commit(self, plan: StepPlan, result: StepResult) -> Tokens:
        """Take the tokens of a step; plans are committed in their order.

        plan.rows          4   4   7   2      row 4 has two entries, as its adapter becomes
        plan.num_samples   0   1   0   2      active within the step
        result.tokens          a       b c

        The loop runs for every request in every step, so it is written flat. It takes only tokens
        after which their requests go on, and nothing else is to be done.
        """
        entries, starts = self.batch.flights.pop(plan.step), plan.starts
        planned, others, apart = entries.sequences, list[int](), list[int]()
        if not self.trials.quiet:
            self.trials.passed(set(entries.request_ids))
        take_of_prompts(planned, plan, result)
        firsts, logprobs, ends = by_entry(plan, result)
        for i, seq, token, start in zip(range(len(planned)), planned, firsts, starts, strict=True):
            rules = seq.rules
            if start < rules.takes_until and token not in rules.endings:
                seq.tokens.append(token)
            else:
                others.append(i)
        events: list[TokenEvent] = []
        for i in others:
            if not self._fill_block(planned[i], starts[i], firsts[i]):
                apart.append(i)
                new = of_entry(result, ends[i], ends[i + 1])
                events += self._take(planned[i], starts[i] + plan.counts[i], *new)
        if plan.num_guesses:
            self.batch.settle_guesses(planned)
        offer_drafts(planned, result)
        for _, number in plan.snapshots:
            self._cache.snapshot_ended(number, True)
        self.batch.landed(plan.step)
        following = FollowingTokens(
            entries.request_ids, firsts, entries.num_cached, starts, logprobs
        )
        following = following.without(apart) if apart else following
        self.totals.generated_tokens += len(following.token_ids)
        return Tokens(events, following if following.token_ids else None)

    def fail(self, plans: list[StepPlan], error: WeftError) -> list[TokenEvent]:
        """Take back failed steps: their requests wait again. A request that is known to have made
        the first step fail ends, and its event is returned."""
        taken_back = [self.batch.flights.pop(plan.step) for plan in plans]
        self.batch.landed(plans[-1].step)
        each = zip(taken_back, plans, strict=True)
        failed, *_ = [self.batch.roll_back(entries.sequences, plan) for entries, plan in each]
        blamed = self.trials.failed([seq.request_id for seq in failed if not seq.done])
        return [self._finish(self._by_id[blamed], "error", error=error)] if blamed else []

    def _fill_block(self, seq: Sequence, start: int, token: int) -> bool:
        """Take the token that follows the position `start`, if all that is left to do is to
        register the block that is full now. Returns whether it was taken."""
        rules = seq.rules
        if not 0 < rules.takes_until <= start < rules.known_limit - 2 or token in rules.endings:
            return False
        seq.tokens.append(token)
        self._cache.register(seq.holding, seq.tokens, start + 1)
        rules.takes_until = min(rules.known_limit - 2, seq.holding.next_full - 1)
        return True

    def _take(
        self, seq: Sequence, end: int, new: list[int], logprobs: list[TokenLogprob] | None
    ) -> list[TokenEvent]:
        """Take a request's new tokens, of a step that computed it up to the position `end`: one may
        end it, matchers must be told, or the prompt's results are due. What follows an end, or
        comes behind a wrong guess, is dropped."""
        rules, events = seq.rules, list[TokenEvent]()
        if seq.done or not new:
            self._cache.register(seq.holding, seq.tokens, end)  # without effect behind its end
            return []
        if rules.guesser is not None and not rules.guesser.fits(end - 1, seq.tokens):
            return []
        count, ended, error = seq.take(new)
        known = len(seq.tokens)
        self._cache.register(seq.holding, seq.tokens, known - 1)
        new, logprobs = new[:count], logprobs and logprobs[:count]
        if ended:
            reason, stop_reason = seq.ending(new[-1])
            events.append(self._finish(seq, reason, new, logprobs, stop_reason))
        elif new:
            events.append(next_tokens(seq.request_id, new, logprobs, seq.num_cached, known))
        if events and seq.prompt_output is not None:
            events[0] = seq.prompt_output.into(events[0])
            seq.prompt_output = None
        if error is not None:
            events.append(self._finish(seq, "error", error=error))
        if seq.row >= 0:
            rules.takes_until = min(rules.known_limit - 2, seq.holding.next_full - 1)
        self.totals.generated_tokens += sum(len(event.token_ids) for event in events)
        return events

    def _plan_decodes(self, draft: Draft, resting: frozenset[Account] = frozenset()) -> None:
        """Plan one token for each running request that lacks just one, except the requests of
        tenants that are `resting`. Requests that lack more go to `draft.chunks`.

        This is the loop that runs for every request in every step, so it is written flat.
        """
        sequences, starts, running = draft.sequences, draft.starts, self.batch.running
        before, most = len(sequences), len(sequences) + draft.num_left
        guesses = self.lengths.choose(min(most, self._limits.max_num_seqs))
        if resting or len(running) > draft.num_left:
            for seq in running:
                seq.decodes_until = 0
        for seq in running:  # preemption shortens it, from its end
            known = seq.known
            if known < seq.decodes_until:
                sequences.append(seq)
                starts.append(known - 1)
                seq.known = known + 1
            elif seq.lacking > 1:
                draft.chunks.append(seq)
            elif known < seq.rules.known_limit and seq.account not in resting:
                if len(sequences) == most:
                    break
                if known <= seq.holding.room or self.batch.grow(seq, draft):
                    draft.decode(seq, guesses.get(seq.row, 0))
        num_planned = len(sequences) - before
        draft.counts += [1] * num_planned
        draft.num_samples += [1] * num_planned
        draft.num_left -= num_planned

    def _plan_chunks(self, draft: Draft, contended: bool) -> None:
        """Plan chunks of running prompts, the oldest first; if tenants compete, first those of the
        tenant that was served least."""
        kept = 0
        if contended and draft.chunks:
            self.batch.charge_running(draft.step)
            draft.chunks.sort(key=lambda seq: (seq.account.counter, seq.order))
            kept = 0 if self.batch.full else self._shares.kept(draft.num_left, draft.chunks)
        draft.num_left -= kept
        for seq in draft.chunks:
            if not draft.full:
                self.batch.schedule(seq, draft)
        draft.num_left += kept

    def _plan_waiting(self, draft: Draft, contended: bool) -> None:
        self._shares.end()
        if self.batch.waiting.num_waiting_tenants > 1:
            self.batch.charge_running(draft.step)
        if not self.batch.full and not draft.full:
            self._turns.look_again()
        with self.batch.waiting.walk() as walk:
            while not (self.batch.full or draft.full) and (seq := next(walk, None)):
                if seq.rules.compiling:
                    self._turns.prefetch(seq.digest)
                elif seq.in_flight or not self.trials.admits(seq.request_id):
                    continue
                elif seq.account.at_cap or not self._turns.ready(seq):
                    walk.skip()
                elif self.batch.admit(seq, draft):
                    walk.take()
                else:
                    self._shares.claim_blocks(seq)
                    contended = False
                    break
            self._look_ahead(walk, contended)

    def _look_ahead(self, walk: Walk[Sequence], contended: bool) -> None:
        """Have adapters loaded for the next waiting requests. If tenants compete for room, note
        which of these requests lack nothing else."""
        left = PREFETCH
        while left and (run := walk.run(left)):
            left -= len(run)
            if self._turns.prefetch(run[0].digest) and contended:
                self._shares.claim(run)

    # -- the end of a request ------------------------------------------------------------------

    def _finish(
        self,
        seq: Sequence,
        reason: FinishReason,
        token_ids: list[int] | None = None,
        logprobs: list[TokenLogprob] | None = None,
        stop_reason: int | None = None,
        error: WeftError | None = None,
    ) -> TokenEvent:
        """End a request and give back everything it holds. Returns its one terminal event."""
        seq.done = True
        del self._by_id[seq.request_id]
        self.totals.finished[reason] += 1
        self.batch.remove(seq)
        self._turns.depart(seq.adapter)
        new, wire = token_ids or [], to_wire(error) if error else None
        cached, known = max(seq.num_cached, 0), len(seq.tokens)
        return TokenEvent(seq.request_id, new, logprobs, reason, stop_reason, cached, known, wire)

    # -- views ---------------------------------------------------------------------------------

    @property
    def totals(self) -> Totals:
        return self.batch.totals

    @property
    def num_running(self) -> int:
        return len(self.batch.running)

    @property
    def num_waiting(self) -> int:
        return len(self.batch.waiting)

    def running_adapters(self) -> tuple[str, ...]:
        return self._turns.leased

    def check(self) -> None:
        """Raise AssertionError unless all invariants hold, those of its parts included."""
        requests, running = list(self._by_id.values()), self.batch.running
        self.trials.check()
        self.batch.check(requests)
        adapted = [s for s in requests if s.digest is not None]
        assert all(0 <= s.adapter.active_from < s.num_prompt for s in adapted)
        assert all(s.known <= s.rules.limit for s in running)
        if not self.batch.flights:
            assert all(s.known <= s.rules.known_limit for s in running)
        assert not any(s.rules.compiling for s in running)
        assert requests or self.batch.flights or not self._turns.leased

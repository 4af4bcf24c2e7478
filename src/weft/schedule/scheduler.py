"""Decides what runs in each step. Pure Python: no torch, no clock, no I/O.

    plan = scheduler.plan(now)           what to run now, with which blocks and slots
    events = scheduler.commit(plan, result)

Plans may run ahead of commits by one step or more: a request's newest tokens are then *pending*,
known to the device only. A step goes to, in this order:

1. decodes of running requests, oldest request first; if blocks run out, the youngest parked
   request loses its own, or else the youngest running one is preempted: its blocks are released
   and it waits again, to be recomputed;
2. the rest of running prompts, in chunks, oldest first;
3. waiting requests, in the order of `weft.schedule.queue`: the tenant first that was served least,
   then who came first. One needs a row, blocks for all its tokens, its adapter on the device, and
   its grammar. A request whose adapter is not there, or whose grammar is still being compiled, is
   passed over, never dropped, and holds up nobody; its load is started as soon as there is room.

An *activated* adapter is active from some position of the prompt on. Before it the request is the
base's, as to slots and to the prefix cache; a chunk ends there, and another one of the same step
may go on. The adapter is leased from the admission on.

A *paced* request has a Matcher, which must be told each token before it can say what may come
next: its next decode is planned only when none of its tokens is pending.

Adapters take turns where there is no room for all of them (in memory, or in `max_loras`). While
one is there, all of its requests go in, past older ones whose adapters are not there. For others:

    passed over ──(half of max_adapter_wait)──> those that have had the device longest, and as long
                                                as this one waits, take no new requests: they drain
                ──(max_adapter_wait)──────────> what still runs of them is parked, once it has got
                                                a token out of its turn; no other adapter gets room
                                                before this one

A *parked* request waits like any other, but keeps its blocks, so that nothing of it is computed
again when its adapter is back; they go when others need them, those of the youngest first.

So with n adapters of one size in demand and room for k, each has its turn within ceil(n / k) times
(max_adapter_wait, a prompt's computation and a load), and what is parked has had
`max_adapter_wait` of the device, and at least one token.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Mapping

from weft.core.errors import (
    AdapterUnavailable,
    InvalidRequest,
    WeftError,
    to_wire,
)
from weft.core.requests import EngineRequest, FinishReason, TokenEvent, TokenLogprob
from weft.schedule.blocks import ROOT_KEY, BlockKey, BlockPool, adapted_key, chain_key
from weft.schedule.plan import Admitted, Matcher, StepPlan, StepResult
from weft.schedule.queue import Account, FairQueue
from weft.schedule.sequence import Limits, Sequence, check_request
from weft.schedule.slots import AdapterSlots, Load

PREFETCH = 32
"""Waiting requests beyond the admitted ones whose adapters are loaded ahead."""
OUTPUT_WEIGHT = 2.0
"""What a token of the output counts for in a tenant's service; one of the prompt counts 1."""


class _Turn:
    """How long an adapter's requests have been passed over because it was not to be had."""

    __slots__ = ("earlier_s", "since")

    def __init__(self) -> None:
        self.since: float | None = None
        """When they began to be, this time."""
        self.earlier_s = 0.0

    def seconds(self, now: float) -> float:
        return self.earlier_s if self.since is None else self.earlier_s + now - self.since

    def end(self, now: float) -> None:
        self.earlier_s, self.since = self.seconds(now), None


class _Draft:
    """A plan in the making."""

    def __init__(self, step: int, budget: int, max_num_seqs: int) -> None:
        self.step = step
        self.budget = budget
        self.max_num_seqs = max_num_seqs
        self.sequences: list[Sequence] = []
        self.rows: list[int] = []
        self.starts: list[int] = []
        self.counts: list[int] = []
        self.samples: list[bool] = []
        self.admitted: list[Admitted] = []
        self.new_blocks: list[tuple[int, int, int]] = []
        self.loads: list[Load] = []
        self.chunks: list[Sequence] = []
        """Running sequences with more than one token to compute."""
        self.passed: set[str] = set()
        """Adapters whose requests are passed over in this step."""

    @property
    def full(self) -> bool:
        return not self.budget or len(self.rows) == self.max_num_seqs

    def schedule(self, seq: Sequence) -> None:
        """As many more tokens as there is room for of a sequence with a row and blocks."""
        if seq.computed < seq.active_from < seq.known:
            self._schedule(seq, seq.active_from)
            if self.full:
                return
        self._schedule(seq, seq.known)

    def _schedule(self, seq: Sequence, end: int) -> None:
        count = min(end - seq.computed, self.budget)
        self.sequences.append(seq)
        self.rows.append(seq.row)
        self.starts.append(seq.computed)
        self.counts.append(count)
        seq.computed += count
        seq.in_flight += 1
        self.budget -= count
        sampled = seq.computed == seq.known
        self.samples.append(sampled)
        seq.known += sampled


class Scheduler:
    """Owner of all requests in the engine."""

    def __init__(
        self,
        limits: Limits,
        blocks: BlockPool,
        slots: AdapterSlots,
        tenant_weights: Mapping[str, float] | None = None,
    ) -> None:
        self._limits = limits
        self._blocks = blocks
        self._slots = slots
        self._now = 0.0
        self._steps = 0
        self._orders = 0
        self._by_id: dict[str, Sequence] = {}
        self._waiting: FairQueue[Sequence] = FairQueue(tenant_weights)
        self._running: list[Sequence] = []
        self._parked: list[Sequence] = []
        """Waiting requests with blocks, in the order of their arrival."""
        self._planned: dict[int, list[Sequence]] = {}
        self._free_rows = list(range(limits.max_num_seqs - 1, -1, -1))
        self._demand: Counter[str] = Counter()
        """Requests in the engine, by adapter digest."""
        self._leases: Counter[str] = Counter()
        self._leased_since: dict[str, float] = {}
        """Of adapters with leases, those first that have had one longest."""
        self._turns: dict[str, _Turn] = {}
        """Of the adapters that have been passed over since they came into demand."""
        self._short: dict[str, Account] = {}
        """Adapters that found no room when there were rows for their requests last, and a tenant
        that wants it."""
        self._starving: list[str] = []
        """Those of them that have waited too long, in the order in which they get room."""
        self._granted: set[str] = set()
        """Adapters that have room, or a place in the batch, until their first request uses it."""
        self._yielding: dict[str, str] = {}
        """Adapter that makes room -> the one that it makes room for."""
        self._dropping: set[str] = set()
        self._watermark = blocks.num_blocks // 100
        self.preemptions = 0
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.generated_tokens = 0
        self.finished: Counter[str] = Counter()

    # -- requests ------------------------------------------------------------------------------

    def add(
        self,
        request: EngineRequest,
        seed: int,
        active_from: int | None = 0,
        vocab_size: int = 0,
    ) -> TokenEvent | None:
        """Queue a request. One that can't be served is answered at once by its error event.

        active_from: position of the prompt from which on its adapter is active; None: nowhere, it
        is a request of the base. vocab_size: of its adapter; 0: the base's.
        """
        try:
            self._validate(request, vocab_size or self._limits.vocab_size)
        except WeftError as error:
            return self.refuse(request.request_id, error)
        account = self._waiting.open(request.tenant)
        seq = Sequence(request, active_from, vocab_size, self._orders, seed, self._limits, account)
        self._orders += 1
        self._by_id[seq.request_id] = seq
        self._enqueue(seq)
        if seq.digest is not None:
            self._demand[seq.digest] += 1
            if turn := self._turns.get(seq.digest):
                seq.adapter_wait_s = turn.seconds(self._now)
        return None

    def refuse(self, request_id: str, error: WeftError) -> TokenEvent:
        """The answer to a request that can't be served: its error event."""
        self.finished["error"] += 1
        return _error_event(request_id, error)

    def abort(self, request_id: str) -> TokenEvent | None:
        """End a request early; None if it is not here (it ended already)."""
        seq = self._by_id.get(request_id)
        return self._finish(seq, "abort") if seq else None

    def abort_all(self) -> list[TokenEvent]:
        return [self._finish(seq, "abort") for seq in list(self._by_id.values())]

    def _validate(self, request: EngineRequest, vocab_size: int) -> None:
        if request.request_id in self._by_id:
            raise InvalidRequest(f"request id {request.request_id!r} is in use", "request_id")
        check_request(request, self._limits, vocab_size)
        ref = request.adapter
        if ref and (not self._slots.knows(ref.digest) or ref.digest in self._dropping):
            raise AdapterUnavailable(f"adapter {ref.name!r} is not loaded", "model")
        if ref and (refusal := self._slots.refusal(ref.digest)):
            raise refusal

    # -- grammars ------------------------------------------------------------------------------

    def grammar_ready(self, request_id: str, grammar: Matcher) -> None:
        """The grammar of a waiting request is compiled; ignored if the request is gone."""
        seq = self._by_id.get(request_id)
        if seq is not None and seq.compiling:
            seq.grammar = grammar
            seq.compiling = False

    def grammar_failed(self, request_id: str, error: WeftError) -> TokenEvent | None:
        """The grammar of a waiting request can't be compiled; None if the request is gone."""
        seq = self._by_id.get(request_id)
        if seq is None or not seq.compiling:
            return None
        return self._finish(seq, "error", error=error)

    # -- adapters ------------------------------------------------------------------------------

    def drop_adapter(self, digest: str) -> bool:
        """Stop taking requests for an adapter. True if it has none left; else `take_dropped`
        reports it once the last one has ended."""
        if self._in_use(digest):
            self._dropping.add(digest)
            return False
        return True

    def keep_adapter(self, digest: str) -> None:
        """Take a drop back that has not been carried out yet."""
        self._dropping.discard(digest)

    def _in_use(self, digest: str) -> bool:
        return digest in self._demand or digest in self._leases

    def take_dropped(self) -> list[str]:
        """Adapters to be dropped whose last request has ended since the last call."""
        gone = [d for d in self._dropping if not self._in_use(d)]
        self._dropping.difference_update(gone)
        return gone

    def adapter_failed(self, digest: str, error: WeftError) -> list[TokenEvent]:
        """A load failed: end the requests that wait for it."""
        self._settle(digest)
        return [self._finish(seq, "error", error=error) for seq in self._waiting.of_adapter(digest)]

    # -- the step ------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Whether any request is here."""
        return bool(self._by_id)

    def plan(self, now: float) -> StepPlan:
        """The next step; empty when nothing can run just now. `now`: seconds of any clock that
        does not go back."""
        self._now = now
        self._steps += 1
        limits = self._limits
        draft = _Draft(self._steps, limits.max_num_batched_tokens, limits.max_num_seqs)
        for digest in self._granted:
            self._slots.touch(digest, now)  # not evicted before it is used
        if self._short:
            self._make_room(draft)
        else:
            self._starving.clear()
            self._yielding.clear()
        self._plan_decodes(draft)
        self._plan_chunks(draft)
        self._plan_waiting(draft)
        for digest in self._slots.wanted:
            self._start_load(digest, draft)
        if draft.rows:
            self._planned[draft.step] = draft.sequences
        return StepPlan(
            draft.step,
            draft.rows,
            draft.starts,
            draft.counts,
            draft.samples,
            limits.max_num_batched_tokens - draft.budget,
            draft.admitted,
            draft.new_blocks,
            draft.loads,
        )

    def commit(self, plan: StepPlan, result: StepResult) -> list[TokenEvent]:
        """Take the tokens of a step; plans are committed in their order."""
        events: list[TokenEvent] = []
        caching = self._limits.enable_prefix_caching
        k = 0
        planned = self._planned.pop(plan.step, [])
        for i, prompt_logprobs in result.prompt_logprobs.items():
            planned[i].take_prompt_logprobs(plan.starts[i], prompt_logprobs)
        for i, seq in enumerate(planned):
            seq.in_flight -= 1
            sampled = plan.samples[i]
            if not seq.done:
                tokens = seq.tokens
                computed = len(tokens) if sampled else plan.starts[i] + plan.counts[i]
                if computed >= seq.next_full and caching:
                    self._register(seq, computed)
                if sampled:
                    token = result.token_ids[k]
                    logprobs = None if result.logprobs is None else _listed(result.logprobs[k])
                    tokens.append(token)
                    if token in seq.endings or len(tokens) >= seq.limit:
                        event = self._end(seq, token, logprobs)
                    elif seq.paced and (error := seq.match(token)):
                        event = self._finish(seq, "error", error=error)
                    else:
                        event = TokenEvent(
                            seq.request_id, [token], logprobs, None, None, seq.num_cached
                        )
                    if seq.prompt_logprobs is not None:
                        event = event._replace(prompt_logprobs=[None, *seq.prompt_logprobs])
                        seq.prompt_logprobs = None
                    events.append(event)
            k += sampled
            if seq.row < 0 and seq.in_flight == 0:
                self._end_lease(seq)
        self.generated_tokens += len(result.token_ids)
        return events

    def _plan_decodes(self, draft: _Draft) -> None:
        """One token of each running request that lacks just one; the others are put in `chunks`.

        This is the loop that runs for every request in every step, so it is written flat.
        """
        block_size = self._limits.block_size
        sequences, rows, starts = draft.sequences, draft.rows, draft.starts
        for seq in self._running:  # preemption shortens it, from its end
            known = seq.known
            computed = seq.computed
            if known - computed > 1:
                draft.chunks.append(seq)
            elif known < seq.known_limit:
                if len(rows) == draft.budget:
                    break
                if known > len(seq.blocks) * block_size and not self._grow(seq, draft):
                    break
                sequences.append(seq)
                rows.append(seq.row)
                starts.append(computed)
                seq.computed = known
                seq.known = known + 1
                seq.in_flight += 1
        draft.counts = [1] * len(rows)
        draft.samples = [True] * len(rows)
        draft.budget -= len(rows)

    def _grow(self, seq: Sequence, draft: _Draft) -> bool:
        """One more block; False if `seq` itself had to be preempted for want of one."""
        while not self._blocks.num_free:
            if self._parked:
                self._unpark(self._parked[-1])
                continue
            victim = self._running[-1]
            self._preempt(victim)
            if victim is seq:
                return False
        block = self._blocks.allocate()
        draft.new_blocks.append((seq.row, len(seq.blocks), block))
        seq.blocks.append(block)
        return True

    def _plan_chunks(self, draft: _Draft) -> None:
        for seq in draft.chunks:
            if draft.full:
                return
            draft.schedule(seq)

    def _plan_waiting(self, draft: _Draft) -> None:
        if self._waiting.num_waiting_tenants > 1:
            self._charge_running()
        if self._free_rows and not draft.full:
            self._short = {}
        ahead = 0
        with self._waiting.walk() as walk:
            for seq in walk:
                if ahead or not self._free_rows or draft.full:
                    ahead += 1
                    if ahead > PREFETCH:
                        break
                    self._prefetch(seq, draft)
                elif seq.compiling:
                    self._prefetch(seq, draft)
                elif seq.in_flight:
                    continue
                elif not self._adapter_ready(seq, draft):
                    walk.skip()
                elif self._place(seq, draft):
                    walk.take()
                else:
                    ahead = 1

    def _place(self, seq: Sequence, draft: _Draft) -> bool:
        """Give a waiting sequence a row, blocks and its adapter; False if blocks are short."""
        block_size = self._limits.block_size
        known = len(seq.tokens)
        hits = [] if seq.blocks else self._cached_prefix(seq)
        fresh = -(-known // block_size) - len(hits) - len(seq.blocks)
        spare = self._watermark if self._running else 0
        for block in hits:  # before others give up theirs, which may be the same ones
            self._blocks.share(block)
        if not self._free_blocks(fresh + spare, seq):
            self._blocks.release(hits)
            return False
        if seq.blocks:
            self._parked.remove(seq)
        else:
            seq.computed = len(hits) * block_size
            seq.next_full = seq.computed + block_size
        seq.blocks += hits + [self._blocks.allocate() for _ in range(fresh)]
        seq.began_at = known
        seq.row = self._free_rows.pop()
        self._count_prompt(seq)
        adapter_wait_s = 0.0
        if seq.digest is not None:
            adapter_wait_s = self._lease(seq, seq.digest)
        draft.new_blocks.extend((seq.row, i, b) for i, b in enumerate(seq.blocks))
        draft.admitted.append(self._admitted(seq, adapter_wait_s))
        insort(self._running, seq)
        draft.schedule(seq)
        return True

    def _free_blocks(self, wanted: int, seq: Sequence) -> bool:
        """Whether so many blocks are free, once parked requests other than `seq` gave up theirs."""
        for other in reversed(self._parked.copy()):
            if wanted <= self._blocks.num_free:
                break
            if other is not seq:
                self._unpark(other)
        return wanted <= self._blocks.num_free

    def _admitted(self, seq: Sequence, adapter_wait_s: float) -> Admitted:
        params = seq.params
        asked = None if seq.prompt_logprobs is None else params.prompt_logprobs
        return Admitted(
            seq.request_id,
            seq.row,
            seq.slot,
            list(seq.tokens),
            seq.num_prompt,
            params,
            seq.seed,
            seq.early_endings,
            seq.bad_tokens,
            seq.bad_sequences,
            seq.grammar,
            -1 if asked is None else asked,
            adapter_wait_s,
            seq.active_from,
            seq.vocab_size,
        )

    def _count_prompt(self, seq: Sequence) -> None:
        if seq.num_cached < 0:
            seq.num_cached = seq.computed
            self.prompt_tokens += seq.num_prompt
            self.cached_tokens += seq.num_cached
            seq.account.charge(seq.num_prompt - seq.num_cached)

    def _preempt(self, seq: Sequence) -> None:
        """Back to the queue, at its place by arrival; all its KV is recomputed later."""
        self._park(seq)
        self._unpark(seq)

    def _park(self, seq: Sequence) -> None:
        """Back to the queue, at its place by arrival, with its blocks."""
        self.preemptions += 1
        self._charge(seq)
        self._running.remove(seq)
        self._leave(seq)
        insort(self._parked, seq)
        self._enqueue(seq)

    def _unpark(self, seq: Sequence) -> None:
        """Take a parked sequence's blocks. Steps in flight may still write to them, but they run
        before any step that is planned from now on."""
        self._parked.remove(seq)
        self._release(seq)

    def _release(self, seq: Sequence) -> None:
        self._blocks.release(seq.blocks)
        seq.blocks = []
        seq.computed = 0
        seq.next_full = self._limits.block_size

    def _leave(self, seq: Sequence) -> None:
        """Give back a running sequence's row. The adapter lease ends with the last step in flight,
        as loads are not ordered with steps."""
        self._free_rows.append(seq.row)
        seq.row = -1
        if seq.in_flight == 0:
            self._end_lease(seq)

    # -- tenants -------------------------------------------------------------------------------

    def _enqueue(self, seq: Sequence) -> None:
        if not seq.account.num_waiting and self._waiting.num_tenants > 1:
            self._charge_running()  # its tenant is lifted to the lowest counter
        self._waiting.push(seq)

    def _charge_running(self) -> None:
        """Bring the counters up to date. They are looked at where several tenants wait, so the
        loops that run for every token need not keep them."""
        for seq in self._running:
            self._charge(seq)

    def _charge(self, seq: Sequence) -> None:
        """Its output since the last time; what is computed again after a preemption is free."""
        new = len(seq.tokens) - seq.charged
        seq.charged += new
        seq.account.charge(OUTPUT_WEIGHT * new)

    # -- the prefix cache ----------------------------------------------------------------------

    def _cached_prefix(self, seq: Sequence) -> list[int]:
        """Registered blocks of the sequence's beginning; at least one token is left to compute,
        or all where the prompt's log-probabilities are still to be reported."""
        if not self._limits.enable_prefix_caching or seq.prompt_logprobs is not None:
            return []
        full = (len(seq.tokens) - 1) // self._limits.block_size
        hits: list[int] = []
        for i in range(full):
            block = self._blocks.lookup(self._key(seq, i))
            if block is None:
                break
            hits.append(block)
        return hits

    def _register(self, seq: Sequence, computed: int) -> None:
        """Offer the full blocks of the first `computed` tokens to the prefix index."""
        size = self._limits.block_size
        for i in range(seq.next_full // size - 1, min(computed // size, len(seq.blocks))):
            self._blocks.register(seq.blocks[i], self._key(seq, i))
            seq.next_full += size

    def _key(self, seq: Sequence, i: int) -> BlockKey:
        size = self._limits.block_size
        for j in range(len(seq.keys), i + 1):
            parent = seq.keys[-1] if seq.keys else ROOT_KEY
            if seq.digest is not None and j == seq.active_from // size:
                parent = adapted_key(parent, seq.digest, seq.active_from)
            seq.keys.append(chain_key(parent, seq.tokens[j * size : (j + 1) * size]))
        return seq.keys[i]

    # -- adapters in admission -----------------------------------------------------------------

    def _adapter_ready(self, seq: Sequence, draft: _Draft) -> bool:
        """Whether the requests of its tenant and adapter can run in this step; starts what that
        takes."""
        digest = seq.digest
        if digest is None:
            return True
        if digest in draft.passed:
            return False
        if digest not in self._yielding:
            if digest in self._leases or self._claim(digest, draft):
                return True
            if self._slots.is_loading(digest):
                self._granted.add(digest)
            else:
                self._short[digest] = seq.account
        draft.passed.add(digest)
        turn = self._turns.setdefault(digest, _Turn())
        if turn.since is None:
            turn.since = self._now
        return False

    def _claim(self, digest: str, draft: _Draft) -> bool:
        """Whether an adapter without leases can have one now; starts its load if it is absent and
        there is room. Starving adapters come first: others get what they have been granted."""
        resident = self._slots.is_resident(digest)
        if digest not in self._granted:
            if self._starving:
                return False
            if not resident:
                self._load(digest, draft)
            else:
                self._slots.touch(digest, self._now)
        return resident and len(self._leases) < self._limits.max_loras

    def _prefetch(self, seq: Sequence, draft: _Draft) -> None:
        """Start the load of a request that can't be admitted yet anyway."""
        digest = seq.digest
        if digest is not None and digest not in self._leases and digest not in self._yielding:
            self._claim(digest, draft)

    def _load(self, digest: str, draft: _Draft) -> bool:
        """Whether an absent adapter is being loaded now; no if there is no room for it."""
        if self._slots.is_loading(digest):
            return True
        started = self._start_load(digest, draft)
        if started:
            self._reopen(digest)
        return started

    def _start_load(self, digest: str, draft: _Draft) -> bool:
        load = self._slots.start_load(digest, self._now, self._demand)
        if load is not None:
            draft.loads.append(load)
        return load is not None

    # -- turns ---------------------------------------------------------------------------------

    def _make_room(self, draft: _Draft) -> None:
        """Let adapters that have found no room for too long have it, or others yield to them."""
        self._yielding = {v: c for v, c in self._yielding.items() if c in self._short}
        waited = self._waited()
        longest = self._limits.max_adapter_wait
        soon = [d for d, seconds in waited.items() if longest / 2 <= seconds < longest]
        self._starving = self._in_turn([d for d, seconds in waited.items() if seconds >= longest])
        starving = self._starving.copy()
        while starving and self._grant(starving[0], draft):
            del starving[0]
        claimants = {c for victim, c in self._yielding.items() if victim in self._leases}
        for digest in [d for d in starving + soon if d not in claimants]:
            if waited[digest] >= longest:
                victims = self._choose_victims(digest)
            else:
                victims = self._longest_there(digest, waited[digest])
            if not victims:
                break
            self._yielding.update(dict.fromkeys(victims, digest))
        self._preempt_victims()

    def _waited(self) -> dict[str, float]:
        """Seconds for which requests have been passed over, by adapter that found no room."""
        turns = ((digest, self._turns.get(digest)) for digest in self._short)
        return {d: self._now - t.since for d, t in turns if t and t.since is not None}

    def _in_turn(self, digests: list[str]) -> list[str]:
        """Starving adapters in the order in which they get room: those first whose tenants have
        the fewest adapters running, then those that have waited longest."""
        if not digests:
            return []
        running = {(seq.account, seq.digest) for seq in self._running if seq.digest}
        held = Counter(account for account, _ in running)
        return sorted(digests, key=lambda d: (held[self._short[d]], self._turns[d].since))

    def _grant(self, digest: str, draft: _Draft) -> bool:
        """Give a starving adapter its turn, if there is room."""
        if self._slots.is_resident(digest):
            others = len(self._leases) + len(self._granted - {digest})
            granted = others < self._limits.max_loras
        elif any(self._slots.is_resident(other) for other in self._granted):
            return False  # it would be evicted before it is used
        else:
            granted = self._load(digest, draft)
        if granted:
            self._granted.add(digest)
        return granted

    def _choose_victims(self, digest: str) -> list[str]:
        """Adapters that have had their time, and without which there would be room."""
        longest = self._limits.max_adapter_wait
        if self._slots.is_resident(digest):
            return self._longest_there(digest, longest)
        return self._slots.choose_victims(digest, self._now, longest)

    def _longest_there(self, digest: str, tenure: float) -> list[str]:
        """The adapter that has had leases longest, and for a time of `tenure`, of those that may
        yield to `digest` and don't yield already."""
        resident = self._slots.is_resident(digest)
        if resident and len(self._leases) < self._limits.max_loras:
            return []
        spared = self._yielding.keys() | (() if resident else self._slots.pinned)
        for victim, since in self._leased_since.items():
            if self._now - since < tenure:
                break
            if victim not in spared:
                return [victim]
        return []

    def _preempt_victims(self) -> None:
        """Put back the requests of those that yield to starving adapters. One that has got no
        token since it was admitted goes on until it has: or it might never end."""
        victims = {v for v, claimant in self._yielding.items() if claimant in self._starving}
        if not victims:
            return
        for seq in [s for s in self._running if s.digest in victims]:
            if len(seq.tokens) > seq.began_at:
                self._park(seq)

    def _lease(self, seq: Sequence, digest: str) -> float:
        """Lease the adapter; how long the request was passed over for it."""
        seq.slot = self._slots.acquire(digest, self._now)
        self._leases[digest] += 1
        self._leased_since.setdefault(digest, self._now)
        self._granted.discard(digest)
        turn = self._turns.get(digest)
        if turn is None:
            return 0.0
        if turn.since is not None:
            self._settle(digest)
        return turn.earlier_s - seq.adapter_wait_s

    def _end_lease(self, seq: Sequence) -> None:
        if seq.slot >= 0 and seq.digest is not None:
            self._slots.release(seq.digest, self._now)
            self._leases[seq.digest] -= 1
            if not self._leases[seq.digest]:
                del self._leases[seq.digest], self._leased_since[seq.digest]
            seq.slot = -1

    def _settle(self, digest: str) -> None:
        """The adapter has its turn, or nobody wants it any more: nobody yields to it."""
        if turn := self._turns.get(digest):
            turn.end(self._now)
        self._reopen(digest)

    def _reopen(self, digest: str) -> None:
        """Those that made room for an adapter need not any more."""
        for victim in [v for v, claimant in self._yielding.items() if claimant == digest]:
            del self._yielding[victim]

    # -- the end of a request ------------------------------------------------------------------

    def _end(self, seq: Sequence, token: int, logprobs: list[TokenLogprob] | None) -> TokenEvent:
        """The newest token is the last one."""
        if token not in seq.endings:
            return self._finish(seq, "length", (token,), logprobs)
        stop_reason = token if token in seq.params.stop_token_ids else None
        return self._finish(seq, "stop", (token,), logprobs, stop_reason)

    def _finish(
        self,
        seq: Sequence,
        reason: FinishReason,
        token_ids: tuple[int, ...] = (),
        logprobs: list[TokenLogprob] | None = None,
        stop_reason: int | None = None,
        error: WeftError | None = None,
    ) -> TokenEvent:
        """The one terminal event of a request; everything it holds is given back."""
        seq.done = True
        del self._by_id[seq.request_id]
        self.finished[reason] += 1
        self._charge(seq)
        if seq.row >= 0:
            self._running.remove(seq)
            self._leave(seq)
            self._release(seq)
        else:
            self._waiting.remove(seq)
            if seq.blocks:
                self._unpark(seq)
        self._waiting.close(seq.account)
        if seq.digest is not None:
            self._demand[seq.digest] -= 1
            if not self._demand[seq.digest]:
                del self._demand[seq.digest]
                self._reopen(seq.digest)
                self._granted.discard(seq.digest)
                self._turns.pop(seq.digest, None)
        return TokenEvent(
            seq.request_id,
            list(token_ids),
            logprobs,
            reason,
            stop_reason,
            max(seq.num_cached, 0),
            to_wire(error) if error else None,
        )

    # -- views ---------------------------------------------------------------------------------

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def running_adapters(self) -> tuple[str, ...]:
        return tuple(self._leases)

    def waiting_adapters(self) -> tuple[str, ...]:
        return self._waiting.digests

    def check(self) -> None:
        """Raise AssertionError unless all invariants hold, those of blocks and slots included."""
        self._blocks.check()
        self._slots.check()
        rows = [s.row for s in self._running]
        assert sorted(rows + self._free_rows) == list(range(self._limits.max_num_seqs))
        assert all(s.row < 0 for s in self._waiting)
        assert sorted(s for s in self._waiting if s.blocks) == self._parked
        self._waiting.check()
        assert sorted(self._running) == self._running
        adapted = [s for s in self._by_id.values() if s.digest is not None]
        assert all(0 <= s.active_from < s.num_prompt for s in adapted)
        assert all(s.known <= s.known_limit <= s.limit for s in self._running)
        assert not any(s.compiling for s in self._running)
        assert len(self._waiting) + len(self._running) == len(self._by_id)
        tenants = Counter(s.account.name for s in self._by_id.values())
        assert tenants == {a.name: a.num_open for a in self._waiting.accounts if a.num_open}
        assert all(s.num_prompt <= s.charged <= len(s.tokens) for s in self._by_id.values())
        uses = Counter(b for s in self._running + self._parked for b in s.blocks)
        assert all(self._blocks.num_users(b) == n for b, n in uses.items())
        assert sum(uses.values()) == self._blocks.total_users
        for digest, leases in self._leases.items():
            assert leases == self._slots.num_leases(digest) > 0
        demand = Counter(s.digest for s in self._by_id.values() if s.digest is not None)
        assert demand == self._demand
        assert len(self._leases) <= self._limits.max_loras
        assert self._leases.keys() == self._leased_since.keys()
        since = list(self._leased_since.values())
        assert since == sorted(since)
        assert self._turns.keys() | self._granted <= self._demand.keys()
        assert not self._granted & self._leases.keys()
        assert self._yielding.keys().isdisjoint(self._yielding.values())
        if not self._by_id:
            assert not self._yielding
            assert self._planned or not self._leases


def _listed(logprob: TokenLogprob | None) -> list[TokenLogprob] | None:
    return None if logprob is None else [logprob]


def _error_event(request_id: str, error: WeftError) -> TokenEvent:
    return TokenEvent(request_id, [], None, "error", None, 0, to_wire(error))

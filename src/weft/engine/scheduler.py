"""Decides what runs in each step. Pure Python: no torch, no clock, no I/O.

    plan = scheduler.plan()              what to run now, with which blocks and slots
    events = scheduler.commit(plan, result)

Plans may run ahead of commits by one step or more: a request's newest tokens are then *pending*,
known to the device only. A step goes to, in this order:

1. decodes of running requests, oldest request first; if blocks run out, the youngest running
   request is preempted: its blocks are released and it waits again, to be recomputed;
2. the rest of running prompts, in chunks, oldest first;
3. waiting requests, oldest first. One needs a row, blocks for all its tokens, its adapter on the
   device, and its grammar. A request whose adapter is not there, or whose grammar is still being
   compiled, is passed over, never dropped, and holds up nobody; its load is started as soon as
   there is room.

A *paced* request has a Matcher, which must be told each token before it can say what may come
next: its next decode is planned only when none of its tokens is pending.

No adapter starves: if one finds no room for `max_adapter_wait_steps` steps, the adapters that
have had the device longest (and at least that long) yield: their requests are preempted and wait
behind it. With n adapters in demand and room for one at a time, each is admitted within about
n * max_adapter_wait_steps steps and its load.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from weft.core.errors import (
    AdapterUnavailable,
    ContextLengthExceeded,
    InvalidRequest,
    WeftError,
    to_wire,
)
from weft.core.types import EngineRequest, FinishReason, TokenEvent, TokenLogprob
from weft.engine.blocks import BlockKey, BlockPool, chain_key, root_key
from weft.engine.masks import BadSequences
from weft.engine.plan import Admitted, Matcher, StepPlan, StepResult
from weft.residency.slots import AdapterSlots, Load

PREFETCH = 32
"""Waiting requests beyond the admitted ones whose adapters are loaded ahead."""


class Limits(NamedTuple):
    """What bounds a step and a request."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    block_size: int
    max_loras: int
    max_adapter_wait_steps: int
    vocab_size: int
    eos_token_ids: frozenset[int]
    enable_prefix_caching: bool


class _Sequence:
    """A request inside the scheduler."""

    __slots__ = (
        "bad_sequences",
        "bad_tokens",
        "blocks",
        "compiling",
        "computed",
        "digest",
        "done",
        "endings",
        "grammar",
        "in_flight",
        "keys",
        "known",
        "known_limit",
        "limit",
        "next_full",
        "num_cached",
        "num_prompt",
        "order",
        "paced",
        "params",
        "prompt_logprobs",
        "request_id",
        "row",
        "seed",
        "slot",
        "tokens",
    )

    def __init__(self, request: EngineRequest, order: int, seed: int, limits: Limits) -> None:
        params = request.params
        self.request_id = request.request_id
        self.params = params
        self.order = order
        self.seed = seed
        self.tokens = list(request.prompt_ids)
        self.num_prompt = len(self.tokens)
        longest = limits.max_model_len
        if params.max_tokens is not None:
            longest = min(longest, self.num_prompt + params.max_tokens)
        self.limit = longest
        """Tokens, prompt included, at which the request ends."""
        self.digest = request.adapter.digest if request.adapter else None
        self.endings = frozenset(params.stop_token_ids)
        """Token ids that end the output."""
        if not params.ignore_eos or params.structured_outputs:
            self.endings |= limits.eos_token_ids
        self.bad_tokens = tuple(ids[0] for ids in request.bad_token_ids if len(ids) == 1)
        sequences = [ids for ids in request.bad_token_ids if len(ids) > 1]
        self.bad_sequences = BadSequences(sequences) if sequences else None
        self.grammar: Matcher | None = None
        self.compiling = params.structured_outputs is not None
        self.paced = bool(sequences) or self.compiling
        self.known_limit = self.limit
        """What `known` may reach now; of a paced sequence with a pending token, its value."""
        self.prompt_logprobs: list[TokenLogprob] | None = None
        """As far as they are there; None once they were handed out, or if nobody asked."""
        if params.prompt_logprobs is not None:
            self.prompt_logprobs = []
        self.known = self.num_prompt
        """Tokens, those included that are sampled already and only the device knows yet."""
        self.in_flight = 0
        """Steps planned and not committed."""
        self.computed = 0
        """Positions whose KV is computed once all planned steps have run."""
        self.blocks: list[int] = []
        self.keys: list[BlockKey] = []
        """Prefix keys of full blocks of `tokens`, as far as they were needed."""
        self.next_full = limits.block_size
        """Tokens at which the next block is full and offered to the prefix index."""
        self.row = -1
        """Row in the batch; -1 while waiting."""
        self.slot = -1
        """Leased adapter slot; -1 without a lease."""
        self.num_cached = -1
        self.done = False
        if self.paced:
            self._pace()

    def match(self, token: int) -> WeftError | None:
        """The newest token of a paced sequence is known now; an error ends its request."""
        try:
            for matcher in (self.grammar, self.bad_sequences):
                if matcher is not None:
                    matcher.accept(token)
        except WeftError as error:
            return error
        self._pace()
        return None

    def _pace(self) -> None:
        self.known_limit = min(self.limit, len(self.tokens) + 1)

    def take_prompt_logprobs(self, start: int, logprobs: list[TokenLogprob]) -> None:
        """Those that follow the computed position `start`. A preempted prompt is computed again:
        what is there already stays."""
        if self.prompt_logprobs is not None:
            self.prompt_logprobs += logprobs[len(self.prompt_logprobs) - start :]

    def __lt__(self, other: _Sequence) -> bool:
        return self.order < other.order


class _Draft:
    """A plan in the making."""

    def __init__(self, step: int, budget: int) -> None:
        self.step = step
        self.budget = budget
        self.sequences: list[_Sequence] = []
        self.rows: list[int] = []
        self.starts: list[int] = []
        self.counts: list[int] = []
        self.samples: list[bool] = []
        self.admitted: list[Admitted] = []
        self.new_blocks: list[tuple[int, int, int]] = []
        self.loads: list[Load] = []
        self.chunks: list[_Sequence] = []
        """Running sequences with more than one token to compute."""

    def schedule(self, seq: _Sequence, count: int) -> None:
        """`count` more tokens of a sequence with a row and blocks for them."""
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

    def __init__(self, limits: Limits, blocks: BlockPool, slots: AdapterSlots) -> None:
        self._limits = limits
        self._blocks = blocks
        self._slots = slots
        self._now = 0
        self._orders = 0
        self._by_id: dict[str, _Sequence] = {}
        self._waiting: list[_Sequence] = []
        self._running: list[_Sequence] = []
        self._planned: dict[int, list[_Sequence]] = {}
        self._free_rows = list(range(limits.max_num_seqs - 1, -1, -1))
        self._demand: Counter[str] = Counter()
        """Requests in the engine, by adapter digest."""
        self._leases: Counter[str] = Counter()
        self._deferred_since: dict[str, int] = {}
        self._starving: list[str] = []
        self._yielding: dict[str, str] = {}
        """Adapter that makes room -> the starving one that it makes room for."""
        self._dropping: set[str] = set()
        self._watermark = blocks.num_blocks // 100
        self.preemptions = 0
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.generated_tokens = 0
        self.finished: Counter[str] = Counter()

    # -- requests ------------------------------------------------------------------------------

    def add(self, request: EngineRequest, seed: int) -> TokenEvent | None:
        """Queue a request. One that can't be served is answered at once by its error event."""
        try:
            self._validate(request)
        except WeftError as error:
            self.finished["error"] += 1
            return _error_event(request.request_id, error)
        seq = _Sequence(request, self._orders, seed, self._limits)
        self._orders += 1
        self._by_id[seq.request_id] = seq
        self._waiting.append(seq)
        if seq.digest is not None:
            self._demand[seq.digest] += 1
        return None

    def abort(self, request_id: str) -> TokenEvent | None:
        """End a request early; None if it is not here (it ended already)."""
        seq = self._by_id.get(request_id)
        return self._finish(seq, "abort") if seq else None

    def abort_all(self) -> list[TokenEvent]:
        return [self._finish(seq, "abort") for seq in list(self._by_id.values())]

    def _validate(self, request: EngineRequest) -> None:
        limits = self._limits
        if request.request_id in self._by_id:
            raise InvalidRequest(f"request id {request.request_id!r} is in use", "request_id")
        if not request.prompt_ids:
            raise InvalidRequest("the prompt is empty", "prompt")
        if min(request.prompt_ids) < 0 or max(request.prompt_ids) >= limits.vocab_size:
            raise InvalidRequest(
                f"the prompt has a token id outside of [0, {limits.vocab_size})", "prompt"
            )
        if len(request.prompt_ids) >= limits.max_model_len:
            raise ContextLengthExceeded(
                f"the prompt has {len(request.prompt_ids)} tokens, which leaves no room for an "
                f"answer in a context of {limits.max_model_len}",
                "prompt",
            )
        self._validate_choice(request)
        ref = request.adapter
        if ref and (not self._slots.knows(ref.digest) or ref.digest in self._dropping):
            raise AdapterUnavailable(f"adapter {ref.name!r} is not loaded", "model")

    def _validate_choice(self, request: EngineRequest) -> None:
        """Token ids must be in the vocabulary, and there must be one that can be chosen."""
        vocab_size, params = self._limits.vocab_size, request.params
        params.check_vocab(vocab_size)
        forbidden: set[int] = set()
        for ids in request.bad_token_ids:
            if not ids or min(ids) < 0 or max(ids) >= vocab_size:
                message = f"bad_words has no token ids in [0, {vocab_size}): {ids}"
                raise InvalidRequest(message, "bad_words")
            if len(ids) == 1:
                forbidden.add(ids[0])
        allowed = set(params.allowed_token_ids)
        _check_choice(allowed, forbidden, vocab_size, "bad_words")
        if params.min_tokens:
            endings = self._limits.eos_token_ids.union(params.stop_token_ids)
            _check_choice(allowed, forbidden | endings, vocab_size, "min_tokens")

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
        return [
            self._finish(seq, "error", error=error)
            for seq in list(self._waiting)
            if seq.digest == digest
        ]

    # -- the step ------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Whether any request is here."""
        return bool(self._by_id)

    def plan(self) -> StepPlan:
        """The next step; empty when nothing can run just now."""
        self._now += 1
        self._make_room()
        draft = _Draft(self._now, self._limits.max_num_batched_tokens)
        self._plan_decodes(draft)
        self._plan_chunks(draft)
        self._plan_waiting(draft)
        for digest in self._slots.wanted:
            self._load(digest, draft)
        if draft.rows:
            self._planned[draft.step] = draft.sequences
        return StepPlan(
            draft.step,
            draft.rows,
            draft.starts,
            draft.counts,
            draft.samples,
            self._limits.max_num_batched_tokens - draft.budget,
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

    def _grow(self, seq: _Sequence, draft: _Draft) -> bool:
        """One more block; False if `seq` itself had to be preempted for want of one."""
        while not self._blocks.num_free:
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
            if not draft.budget:
                return
            draft.schedule(seq, min(seq.known - seq.computed, draft.budget))

    def _plan_waiting(self, draft: _Draft) -> None:
        passed: set[str] = set()
        taken: set[int] = set()
        ahead = 0
        for seq in self._waiting:
            full = not draft.budget or not self._free_rows
            if full or ahead:
                ahead += 1
                if ahead > PREFETCH:
                    break
                self._prefetch(seq, draft)
            elif seq.compiling:
                self._prefetch(seq, draft)
            elif seq.in_flight or not self._adapter_ready(seq, draft, passed):
                continue
            elif self._place(seq, draft):
                taken.add(seq.order)
            else:
                ahead = 1
        if taken:
            self._waiting = [s for s in self._waiting if s.order not in taken]

    def _place(self, seq: _Sequence, draft: _Draft) -> bool:
        """Give a waiting sequence a row, blocks and its adapter; False if blocks are short."""
        block_size = self._limits.block_size
        known = len(seq.tokens)
        hits = self._cached_prefix(seq)
        fresh = -(-known // block_size) - len(hits)
        revived = sum(self._blocks.is_free(b) for b in hits)
        spare = self._watermark if self._running else 0
        if fresh + revived + spare > self._blocks.num_free:
            return False
        for block in hits:
            self._blocks.share(block)
        seq.blocks = hits + [self._blocks.allocate() for _ in range(fresh)]
        seq.computed = len(hits) * block_size
        seq.next_full = seq.computed + block_size
        seq.row = self._free_rows.pop()
        self._count_prompt(seq)
        if seq.digest is not None:
            self._lease(seq, seq.digest)
        draft.new_blocks.extend((seq.row, i, b) for i, b in enumerate(seq.blocks))
        draft.admitted.append(self._admitted(seq))
        insort(self._running, seq)
        draft.schedule(seq, min(known - seq.computed, draft.budget))
        return True

    def _admitted(self, seq: _Sequence) -> Admitted:
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
            self._limits.eos_token_ids.union(params.stop_token_ids),
            seq.bad_tokens,
            seq.bad_sequences,
            seq.grammar,
            -1 if asked is None else asked,
        )

    def _count_prompt(self, seq: _Sequence) -> None:
        if seq.num_cached < 0:
            seq.num_cached = seq.computed
            self.prompt_tokens += seq.num_prompt
            self.cached_tokens += seq.num_cached

    def _preempt(self, seq: _Sequence) -> None:
        """Back to the queue, at its place by arrival; all its KV is recomputed later."""
        self.preemptions += 1
        self._running.remove(seq)
        self._leave(seq)
        insort(self._waiting, seq)

    def _leave(self, seq: _Sequence) -> None:
        """Give back a running sequence's row and blocks. Steps in flight may still write to
        them, but they run before any step that is planned from now on. The adapter lease ends
        with the last of these steps, as loads are not ordered with steps."""
        self._blocks.release(seq.blocks)
        self._free_rows.append(seq.row)
        seq.row = -1
        seq.blocks = []
        seq.computed = 0
        seq.next_full = self._limits.block_size
        if seq.in_flight == 0:
            self._end_lease(seq)

    # -- the prefix cache ----------------------------------------------------------------------

    def _cached_prefix(self, seq: _Sequence) -> list[int]:
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

    def _register(self, seq: _Sequence, computed: int) -> None:
        """Offer the full blocks of the first `computed` tokens to the prefix index."""
        size = self._limits.block_size
        for i in range(seq.next_full // size - 1, min(computed // size, len(seq.blocks))):
            self._blocks.register(seq.blocks[i], self._key(seq, i))
            seq.next_full += size

    def _key(self, seq: _Sequence, i: int) -> BlockKey:
        size = self._limits.block_size
        for j in range(len(seq.keys), i + 1):
            parent = seq.keys[-1] if seq.keys else root_key(seq.digest)
            seq.keys.append(chain_key(parent, seq.tokens[j * size : (j + 1) * size]))
        return seq.keys[i]

    # -- adapters in admission -----------------------------------------------------------------

    def _adapter_ready(self, seq: _Sequence, draft: _Draft, passed: set[str]) -> bool:
        """Whether the sequence can run with its adapter in this step; starts what it takes."""
        digest = seq.digest
        if digest is None:
            return True
        if digest in passed:
            return False
        if self._slots.is_resident(digest) and digest not in self._yielding:
            if digest in self._leases or len(self._leases) < self._limits.max_loras:
                return True
            self._slots.touch(digest, self._now)
            self._defer(digest)
        elif digest in self._yielding:
            self._deferred_since.setdefault(digest, self._now)
        elif not self._slots.is_loading(digest) and not self._load(digest, draft):
            self._defer(digest)
        passed.add(digest)
        return False

    def _prefetch(self, seq: _Sequence, draft: _Draft) -> None:
        """Start the load of a request that can't be admitted yet anyway."""
        digest = seq.digest
        if digest is None or self._slots.is_loading(digest) or digest in self._yielding:
            return
        if self._slots.is_resident(digest):
            self._slots.touch(digest, self._now)
        else:
            self._load(digest, draft)

    def _load(self, digest: str, draft: _Draft) -> bool:
        load = self._slots.start_load(digest, self._now)
        if load is not None:
            draft.loads.append(load)
        return load is not None

    def _defer(self, digest: str) -> None:
        since = self._deferred_since.setdefault(digest, self._now)
        if self._now - since >= self._limits.max_adapter_wait_steps:
            self._starving.append(digest)

    def _make_room(self) -> None:
        """Let the longest-served adapters yield to those that starved in the last plan."""
        quantum = self._limits.max_adapter_wait_steps
        starving, self._starving = self._starving, []
        for digest in starving:
            yielding = [v for v, for_ in self._yielding.items() if for_ == digest]
            if digest not in self._demand or any(v in self._leases for v in yielding):
                continue
            if self._slots.is_resident(digest):
                longest = self._slots.longest_leased(self._now, quantum)
                victims = [longest] if longest else []
            elif self._slots.is_loading(digest):
                continue
            else:
                victims = self._slots.choose_victims(digest, self._now, quantum)
            for victim in victims:
                self._yielding[victim] = digest
                for seq in [s for s in self._running if s.digest == victim]:
                    self._preempt(seq)

    def _lease(self, seq: _Sequence, digest: str) -> None:
        seq.slot = self._slots.acquire(digest, self._now)
        self._leases[digest] += 1
        self._settle(digest)

    def _end_lease(self, seq: _Sequence) -> None:
        if seq.slot >= 0 and seq.digest is not None:
            self._slots.release(seq.digest, self._now)
            self._leases[seq.digest] -= 1
            if not self._leases[seq.digest]:
                del self._leases[seq.digest]
            seq.slot = -1

    def _settle(self, digest: str) -> None:
        """The adapter is served, or nobody wants it any more: nobody yields to it."""
        self._deferred_since.pop(digest, None)
        for victim in [v for v, for_ in self._yielding.items() if for_ == digest]:
            del self._yielding[victim]

    # -- the end of a request ------------------------------------------------------------------

    def _end(self, seq: _Sequence, token: int, logprobs: list[TokenLogprob] | None) -> TokenEvent:
        """The newest token is the last one."""
        if token not in seq.endings:
            return self._finish(seq, "length", [token], logprobs)
        stop_reason = token if token in seq.params.stop_token_ids else None
        return self._finish(seq, "stop", [token], logprobs, stop_reason)

    def _finish(
        self,
        seq: _Sequence,
        reason: FinishReason,
        token_ids: Sequence[int] = (),
        logprobs: list[TokenLogprob] | None = None,
        stop_reason: int | None = None,
        error: WeftError | None = None,
    ) -> TokenEvent:
        """The one terminal event of a request; everything it holds is given back."""
        seq.done = True
        del self._by_id[seq.request_id]
        self.finished[reason] += 1
        if seq.row >= 0:
            self._running.remove(seq)
            self._leave(seq)
        else:
            self._waiting.remove(seq)
        if seq.digest is not None:
            self._demand[seq.digest] -= 1
            if not self._demand[seq.digest]:
                del self._demand[seq.digest]
                self._settle(seq.digest)
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
        return _distinct(s.digest for s in self._waiting)

    def check(self) -> None:
        """Raise AssertionError unless all invariants hold, those of blocks and slots included."""
        self._blocks.check()
        self._slots.check()
        rows = [s.row for s in self._running]
        assert sorted(rows + self._free_rows) == list(range(self._limits.max_num_seqs))
        assert all(s.row < 0 and not s.blocks for s in self._waiting)
        assert sorted(self._waiting) == self._waiting
        assert sorted(self._running) == self._running
        assert all(s.known <= s.known_limit <= s.limit for s in self._running)
        assert not any(s.compiling for s in self._running)
        assert len(self._waiting) + len(self._running) == len(self._by_id)
        uses = Counter(b for s in self._running for b in s.blocks)
        assert all(self._blocks.num_users(b) == n for b, n in uses.items())
        assert sum(uses.values()) == self._blocks.total_users
        for digest, leases in self._leases.items():
            assert leases == self._slots.num_leases(digest) > 0
        demand = Counter(s.digest for s in self._by_id.values() if s.digest is not None)
        assert demand == self._demand
        assert len(self._leases) <= self._limits.max_loras
        if not self._by_id:
            assert not self._yielding and not self._deferred_since
            assert self._planned or not self._leases


def _check_choice(allowed: set[int], forbidden: set[int], vocab_size: int, param: str) -> None:
    """Raise InvalidRequest if no token is left. `allowed` empty: all."""
    if allowed <= forbidden if allowed else len(forbidden) >= vocab_size:
        raise InvalidRequest(f"{param} leaves no token that could be chosen", param)


def _listed(logprob: TokenLogprob | None) -> list[TokenLogprob] | None:
    return None if logprob is None else [logprob]


def _distinct(digests: Iterable[str | None]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(d for d in digests if d is not None))


def _error_event(request_id: str, error: WeftError) -> TokenEvent:
    return TokenEvent(request_id, [], None, "error", None, 0, to_wire(error))

"""Decides which request gives up its seat in a full batch, so that each tenant has its share.

A tenant alone has the whole device. When another one comes, running requests of the first are
*parked*, the youngest first, until both have seats by their weights:

    seats    a a a a a a a a      a alone
             a a a a a a b b      b comes; in each step, as many of b's prompts begin as fit
             a a a a b b b b      it ends here: one more would give b more than a

The aim is equal service by weight (the counters of `weft.schedule.queue`); seats are the means. So
a request makes way only for a tenant that was served less, whose request could run at once, and
that

- has no seat, while the other has several;
- has at most half of the other's seats for its weight, even after the exchange (rows only);
- has no more seats for its weight, even after the exchange, and was served less by `SLICE`; or
- has no seat, and was served less by `SLICE`: so more tenants than seats take turns.

A request makes way only after it has computed `MIN_RUN` tokens for the first time, so that all
requests make progress. A tenant without any seat need not wait for that if the other one keeps
some. If KV blocks are short instead of seats, blocks are exchanged likewise, for the next request.

When a short request of a tenant with few seats begins, the decodes of tenants with many seats
*rest* for this step, once in `REST_EVERY` steps at most. So the first token comes about as soon as
on an empty server, and others get nearly as many tokens as before:

    tokens   a a a a a a a a      a step of decodes
             P P P                b's request begins, of three tokens; all of a's rest
             a a a a a a a b      they go on
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Container, Iterable, Iterator

from weft.schedule.batch import Batch, Draft
from weft.schedule.queue import Account
from weft.schedule.sequence import Sequence

MIN_RUN = 16
"""How many tokens a request computes or makes before it has to make way."""
SLICE = 128.0
"""How much more service for its weight a tenant must have had to give away its last seat, or a seat
to a tenant that has some. Smaller differences are chance."""
FEW = 3
"""A tenant has *few* seats if it has at most one of this many, else *many*. One with few gets more
without delay."""
REST_EVERY = 10
"""Tenants with many seats rest in at most one of this many steps."""


class Shares:
    """Owner of the claims: requests that found no room in the last step, and lack nothing else."""

    def __init__(self) -> None:
        self._claims: list[Sequence] = []
        self._num_arrived = 0
        """How many of the claims, at the front, came with requests that arrived since that step."""
        self._short: Sequence | None = None
        self._beginning: list[Sequence] = []
        """Requests of tenants with few seats that have come since the last step."""
        self._rested_in = -REST_EVERY
        """The last step in which tenants rested."""

    def claim(self, waiting: list[Sequence]) -> None:
        """Claim room for waiting requests of one lane, which found no row or no tokens left."""
        if not waiting[0].account.at_cap:
            self._claims += [s for s in waiting if not (s.in_flight or s.rules.compiling)]

    def arrive(self, seq: Sequence, leased: Container[str], num_rows: int, full: bool) -> None:
        """Note a new request. If its tenant has few seats, it claims room even before a step has
        found none. `leased`: the adapters that run; `full`: whether all rows are taken."""
        few = seq.account.num_seats <= num_rows // FEW
        if few and seq.can_run and (seq.digest is None or seq.digest in leased):
            self._beginning.append(seq)
            if full:
                self._claims.insert(self._num_arrived, seq)
                self._num_arrived += 1

    def claim_blocks(self, seq: Sequence) -> None:
        """Claim KV blocks for the next waiting request, which lacks them."""
        self._short = seq

    def begin(self, draft: Draft, batch: Batch, block_size: int) -> frozenset[Account]:
        """Begin a step: park the running requests that have to make way. Returns the tenants whose
        decodes rest."""
        resting: frozenset[Account] = frozenset()
        if not (self._claims or self._beginning or self._short):
            return resting
        batch.charge_running(draft.step)
        running, num_free = batch.running, batch.num_free
        victims = self._victims(running, num_free, draft.num_left - len(running), block_size)
        if (victims or num_free) and draft.step - self._rested_in >= REST_EVERY:
            resting = self._with_many(running, batch.num_rows)
            if resting:
                self._rested_in = draft.step
        for seq in victims:
            batch.park(seq)
        return resting

    def _victims(
        self, running: list[Sequence], num_free: int, budget: int, block_size: int
    ) -> list[Sequence]:
        """The running requests that are to make way. num_free: rows that are free. budget: how
        many tokens of prompts the step may compute."""
        if self._short is not None:
            if self._short.row >= 0 or self._short.done:
                return []
            return Exchange(running, block_size).victims([self._short])
        if len(self._claims) <= num_free:
            return []
        most = max((account.counter for account in {seq.account for seq in running}), default=0.0)
        if not any(
            most - own.counter > (SLICE if own.num_seats > len(running) // FEW else 0.0)
            for own in {seq.account for seq in self._claims}
        ):
            return []  # as most often: nobody is far enough ahead
        behind = [seq for seq in self._claims[num_free:] if seq.account.counter < most]
        return Exchange(running).victims(_fitting(behind, budget))

    def _with_many(self, running: list[Sequence], num_rows: int) -> frozenset[Account]:
        """The tenants with many seats, if a step without their decodes is much shorter: if fewer
        prompt tokens begin than requests run, and no other prompt is being computed. Else none."""
        num_tokens = sum(len(seq.tokens) for seq in self._beginning if seq.row < 0 and not seq.done)
        if not 0 < num_tokens < len(running) or any(s.lacking > 1 for s in running):
            return frozenset()
        tenants = {seq.account for seq in running}
        return frozenset(each for each in tenants if each.num_seats > num_rows // FEW)

    def end(self) -> None:
        """Forget the claims of the last step, before those of this step come."""
        self._claims, self._beginning = [], []
        self._num_arrived = 0
        self._short = None

    def kept(self, budget: int, chunks: list[Sequence]) -> int:
        """How many tokens of `budget` running prompts leave to waiting requests: half of them, if a
        tenant with a claim was served less than any tenant in `chunks`; else none."""
        least = min(seq.account.counter for seq in chunks)
        return budget // 2 if any(s.account.counter < least for s in self._claims) else 0


def _fitting(claims: Iterable[Sequence], budget: int) -> Iterator[Sequence]:
    """The claims that the step can serve: within its tokens, and the seats of their tenants."""
    seats: Counter[Account] = Counter()
    for seq in claims:
        account = seq.account
        seats[account] += 1
        taken = account.num_seats + seats[account]
        if (
            seq.row >= 0
            or seq.done
            or (account.max_seats is not None and taken > account.max_seats)
        ):
            continue
        if budget <= 0:
            return
        budget -= len(seq.tokens) - seq.computed
        yield seq


class Exchange:
    """Chooses running requests that give their rows, or their blocks if `block_size` is given, to
    waiting ones. All counters must be up to date."""

    def __init__(self, running: Iterable[Sequence], block_size: int = 0) -> None:
        self._block_size = block_size
        self._held: Counter[Account] = Counter()
        self._settled: dict[Account, list[Sequence]] = defaultdict(list)
        self._fresh: dict[Account, list[Sequence]] = defaultdict(list)
        """Requests that have run for long enough to make way, and those that have not: by tenant,
        the youngest last."""
        least = MIN_RUN
        for seq in running:
            bill = seq.bill
            account = bill.account
            if block_size:  # without its blocks a request is computed again
                least = max(MIN_RUN, len(seq.tokens) // 4)
                self._held[account] += self._size(seq)
            by_tenant = self._settled if bill.progress >= least else self._fresh
            by_tenant[account].append(seq)
        tenants = {*self._settled, *self._fresh}
        if not block_size:
            self._held.update({account: account.num_seats for account in tenants})
        self._served = {account: account.counter for account in tenants}

    def victims(self, claims: Iterable[Sequence]) -> list[Sequence]:
        """The running requests that make way for these claims, in the order of the claims."""
        refused: set[Account] = set()
        found: list[Sequence] = []
        for claim in claims:
            if claim.account not in refused:
                victim = self._victim(claim)
                if victim is None:
                    refused.add(claim.account)
                else:
                    found.append(victim)
        return found

    def _victim(self, claim: Sequence) -> Sequence | None:
        own, held, served = claim.account, self._held, self._served
        served.setdefault(own, own.counter)
        from_whom = {other: seqs for other in served if (seqs := self._yielding(other, claim))}
        if not from_whom:
            return None
        other = max(from_whom, key=lambda each: (held[each] / each.weight, served[each]))
        victim = from_whom[other].pop()
        held[other] -= self._size(victim)
        held[own] += self._size(claim)
        served[own] += (len(claim.tokens) - claim.computed) / own.weight
        return victim

    def _yielding(self, other: Account, claim: Sequence) -> list[Sequence]:
        """The requests of `other`, the last of which makes way for this claim; [] if none does."""
        own, held = claim.account, self._held
        lead = self._served[other] - self._served[own]
        if other is own or lead <= 0:
            return []
        if seqs := self._settled[other]:
            left = held[other] - self._size(seqs[-1])
            seats, others = (held[own] + self._size(claim)) / own.weight, left / other.weight
            if lead > SLICE and (seats <= others or not held[own]):
                return seqs
            if left > 0 and (not held[own] or (not self._block_size and 2 * seats <= others)):
                return seqs
        alone = self._block_size or held[own] or held[other] < 2
        return [] if alone else self._fresh[other]

    def _size(self, seq: Sequence) -> int:
        """How many rows, which is one, or blocks a request takes."""
        if not self._block_size:
            return 1
        return len(seq.holding.blocks) or -(-len(seq.tokens) // self._block_size)

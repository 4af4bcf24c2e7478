"""A request inside the scheduler: its tokens, its limits and what it holds."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from weft.core.errors import InvalidRequest, WeftError, from_wire, to_wire
from weft.core.requests import EngineRequest, FinishReason, TokenArray
from weft.schedule.cache import NEVER, Holding
from weft.schedule.drafts import HeadGuesser
from weft.schedule.guesses import Guesser, TextGuesser
from weft.schedule.limits import SchedulerLimits
from weft.schedule.masks import BadSequences
from weft.schedule.plan import Admitted, Matcher
from weft.schedule.prompt_output import PromptOutput
from weft.schedule.queue import Account

OUTPUT_WEIGHT = 2.0
"""What a token of the output counts for in a tenant's service; one of the prompt counts 1."""


class OutputRules:
    """Which tokens the output of one request may have, and where it ends."""

    __slots__ = (
        "bad_sequences",
        "bad_tokens",
        "compiling",
        "early_endings",
        "endings",
        "grammar",
        "guesser",
        "known_limit",
        "limit",
        "paced",
        "takes_until",
    )

    def __init__(self, request: EngineRequest, limits: SchedulerLimits, vocab_size: int) -> None:
        params = request.params
        self.limit = limits.longest(request)
        """Tokens, prompt included, at which the request ends."""
        self.early_endings = limits.eos_of(request, vocab_size).union(params.stop_token_ids)
        """Token ids that can't be chosen before `min_tokens`."""
        self.endings = limits.endings_of(request, vocab_size)
        """Token ids that end the output."""
        self.bad_tokens = tuple(ids[0] for ids in request.bad_token_ids if len(ids) == 1)
        sequences = [ids for ids in request.bad_token_ids if len(ids) > 1]
        self.bad_sequences = BadSequences(sequences, request.output_ids) if sequences else None
        self.grammar: Matcher | None = None
        self.compiling = params.structured_outputs is not None
        """Whether its grammar is still being compiled."""
        self.paced = bool(sequences) or self.compiling
        """Whether each token must be known before the next one is planned."""
        num_tokens = len(request.prompt_ids) + len(request.output_ids)
        self.known_limit = num_tokens + 1 if self.paced else self.limit
        """What `Sequence.known` may reach before the next token is accepted; 0 while guesses are
        in flight."""
        self.takes_until = 0
        """The commit takes a token that follows a position before this one, and is none of
        `endings`, without any other check. 0: no token was taken since the request got its row."""
        self.guesser = self._guesser(request, limits, vocab_size)

    def _guesser(
        self, request: EngineRequest, limits: SchedulerLimits, vocab_size: int
    ) -> Guesser | None:
        """The request's guesser. None: it wants no guesses, is paced, or has penalties, for which
        the device would count tokens behind wrong guesses too."""
        params = request.params
        asked = params.speculative or limits.speculative
        penalties = params.repetition_penalty, params.presence_penalty, params.frequency_penalty
        if asked == "off" or self.paced or penalties != (1.0, 0.0, 0.0):
            return None
        if asked == "mtp":
            return HeadGuesser(vocab_size or limits.vocab_size)
        return TextGuesser(len(request.prompt_ids))

    def settle_guesses(self) -> tuple[int, int]:
        """End the step with guesses; see `Guesser.settle`."""
        assert self.guesser is not None
        self.known_limit = self.limit
        return self.guesser.settle()

    def compiled(self, grammar: Matcher, output_ids: Iterable[int]) -> None:
        """Take the compiled grammar, and tell it the output that the request came with. Raises
        InvalidRequest if the grammar doesn't allow that output."""
        self.grammar, self.compiling = grammar, False
        try:
            for token in output_ids:
                grammar.accept(token)
        except WeftError as error:
            raise InvalidRequest(f"output_ids: {error}", "output_ids") from None

    def accept(self, token: int) -> WeftError | None:
        """Tell the matchers of a paced request its newest token. Returns the error that ends it."""
        try:
            for matcher in (self.grammar, self.bad_sequences):
                if matcher is not None:
                    matcher.accept(token)
        except Exception as error:  # of any kind, so that only this request ends
            return from_wire(to_wire(error))
        self.known_limit = min(self.limit, self.known_limit + 1)
        return None


class AdapterUse:
    """Which adapter a request uses, and the request's lease of it."""

    __slots__ = ("active_from", "began_at", "digest", "slot", "vocab_size", "waited_before")

    def __init__(self, request: EngineRequest, active_from: int | None, vocab_size: int) -> None:
        self.digest: str | None = None
        """None: the base serves the request, maybe as its adapter is active nowhere."""
        self.active_from = NEVER
        """The position from which on the adapter is active."""
        if request.adapter is not None and active_from is not None:
            self.digest, self.active_from = request.adapter.digest, active_from
        self.vocab_size = vocab_size
        """The adapter's vocabulary; 0: it is the base's."""
        self.slot = -1
        """The leased slot; -1 without a lease."""
        self.began_at = 0
        """How many tokens the request had when its lease began."""
        self.waited_before = 0.0
        """How long the adapter's requests had been passed over when this one came."""


def find_invocation(prompt_ids: list[int], invocation: Iterable[int]) -> int | None:
    """The position where these tokens last occur in the prompt; None if they don't.

    As in PEFT, an activated LoRA (aLoRA, arXiv 2504.12397) is active from there on to the end of
    the output, and nowhere without an occurrence.
    """
    wanted = list(invocation)
    for start in range(len(prompt_ids) - len(wanted), -1, -1):
        if prompt_ids[start] == wanted[0] and prompt_ids[start : start + len(wanted)] == wanted:
            return start
    return None


class Bill:
    """What was charged to a tenant's account for one of its requests."""

    __slots__ = ("account", "admitted_with", "came", "charged")

    def __init__(self, account: Account, num_tokens: int, paid: bool) -> None:
        """`num_tokens`: how many the request comes with. `paid`: whether these cost nothing, as
        another engine has computed them already."""
        self.came = num_tokens
        self.account = account
        self.charged = num_tokens if paid else 0
        """How many of its tokens are charged, or cost nothing as they were cached or paid."""
        self.admitted_with = 0
        """`charged` at the request's last admission."""

    @property
    def progress(self) -> int:
        """How many tokens it has computed or made since its last admission for the first time."""
        return self.charged - self.admitted_with

    def settle(self, computed: int, num_tokens: int) -> None:
        """Charge what is new since the last call: `computed` tokens, of `num_tokens` in all."""
        came, before = self.came, self.charged
        now = num_tokens if num_tokens > came else min(computed, came)
        if now > before:
            prompt = min(now, came) - min(before, came)
            self.account.charge(prompt + OUTPUT_WEIGHT * (now - before - prompt))
            self.charged = now


class Sequence:
    """A request inside the scheduler.

    tokens   [ prompt ............ | output ... ]            known to the host
    known    ──────────────────────────────────────────▶    and those that are pending
    computed ───────────────────────────────────────▶       positions that have their KV once
                                                             all planned steps have run
    """

    __slots__ = (
        "adapter",
        "bill",
        "decodes_until",
        "done",
        "holding",
        "in_flight",
        "known",
        "lacking",
        "num_cached",
        "order",
        "prompt_output",
        "request",
        "row",
        "rules",
        "tokens",
    )

    def __init__(
        self,
        request: EngineRequest,
        order: int,
        account: Account,
        adapter: AdapterUse,
        limits: SchedulerLimits,
        tokens: TokenArray,
    ) -> None:
        """`tokens`: those with which the request comes; the sequence appends to this array."""
        self.request = request
        self.order = order
        self.tokens = tokens
        self.known = len(self.tokens)
        """How many tokens there are, including pending ones, which only the device knows."""
        self.lacking = self.known
        """How many of these are not computed; 1 while it decodes."""
        self.decodes_until = 0
        """As long as `known` is less than this, the plan adds one more token to the request without
        any other check. 0: the next plan has to check it."""
        self.in_flight = False
        """Whether steps from before it lost its row are not committed yet."""
        self.row = -1
        """The row in the batch; -1 while waiting."""
        self.done = False
        self.bill = Bill(account, len(self.tokens), paid=bool(request.output_ids))
        self.adapter = adapter
        name = request.adapter.bare if request.adapter is not None else None
        self.holding = Holding(adapter.digest, adapter.active_from, request.cache_salt, name)
        self.rules = OutputRules(request, limits, adapter.vocab_size)
        self.prompt_output = PromptOutput.asked_by(request)
        """None once it was sent, or if the request wants none."""
        self.num_cached = -1
        """Prompt tokens that came from the prefix cache; -1 before the first admission."""

    @property
    def computed(self) -> int:
        """How many positions have their KV once all planned steps have run."""
        return self.known - self.lacking

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def num_prompt(self) -> int:
        return len(self.request.prompt_ids)

    @property
    def digest(self) -> str | None:
        """The digest of its adapter; None: the base."""
        return self.adapter.digest

    @property
    def account(self) -> Account:
        return self.bill.account

    @property
    def can_run(self) -> bool:
        """Whether a waiting request could be admitted, given room and its adapter."""
        return not (self.in_flight or self.rules.compiling or self.account.at_cap)

    def look_at(self) -> None:
        """Have the plan and the commit look at this request before they give it one more token."""
        self.decodes_until = self.rules.takes_until = 0

    def check(self) -> None:
        """Raise AssertionError if the plan or the commit might not look where they have to."""
        rules, full = self.rules, self.holding.next_full
        assert self.decodes_until <= min(rules.known_limit, self.holding.room + 1)
        assert rules.takes_until <= max(0, min(rules.limit - 2, full - 1))
        assert self.row >= 0 or not (self.decodes_until or rules.takes_until)

    def take(self, new: Iterable[int]) -> tuple[int, bool, WeftError | None]:
        """Take new tokens, up to one that ends the output or that a matcher does not allow. Returns
        how many were taken, whether the last of them ends the output, and the matcher's error."""
        rules, tokens, before = self.rules, self.tokens, len(self.tokens)
        for token in new:
            ended = token in rules.endings or len(tokens) + 1 >= rules.limit
            if rules.paced and not ended and (error := rules.accept(token)):
                return len(tokens) - before, False, error
            tokens.append(token)
            if ended:
                return len(tokens) - before, True, None
        return len(tokens) - before, False, None

    def ending(self, last: int) -> tuple[FinishReason, int | None]:
        """Why its output ends with the token `last`; and the token, if it is a requested stop."""
        if last not in self.rules.endings:
            return "length", None
        return "stop", last if last in self.request.params.stop_token_ids else None

    def admitted(self, adapter_wait_s: float) -> Admitted:
        """The worker's record of the request, for the step in which it takes its row."""
        request, rules, adapter = self.request, self.rules, self.adapter
        asked = self.prompt_output
        return Admitted(
            request_id=self.request_id,
            row=self.row,
            slot=adapter.slot,
            token_ids=np.array(self.tokens).view(np.int64),
            num_prompt=self.num_prompt,
            params=request.params,
            seed=request.seed,
            endings=rules.early_endings,
            bad_tokens=rules.bad_tokens,
            bad_sequences=rules.bad_sequences,
            grammar=rules.grammar,
            num_prompt_logprobs=-1 if asked is None else asked.num_logprobs,
            adapter_wait_s=adapter_wait_s,
            active_from=adapter.active_from,
            vocab_size=adapter.vocab_size,
            state=self.holding.state,
            restored=self.holding.restored,
            pooling=request.pooling,
            blocks=self.holding.blocks.copy(),
        )

    def __lt__(self, other: Sequence) -> bool:
        return self.order < other.order


class StepEntries(NamedTuple):
    """The requests of a step's entries. Successive decodes of the same requests share one."""

    sequences: list[Sequence]
    rows: list[int]
    request_ids: list[str]
    num_cached: list[int]

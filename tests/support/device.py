"""A device in plain Python for tests of the scheduler: KV slots, last tokens, adapter slots.

Its "model" hashes everything that it reads through the block table, the adapter of each KV entry
included, which is none before the position at which an activated one begins. So a wrong block, a
stale token, a wrong adapter, one at a wrong position or a prefix shared across versions changes
the tokens that come out. Where a mask forbids a token, the next one that is allowed takes
its place.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from weft.core.requests import EngineRequest, TokenLogprob
from weft.schedule.plan import StepPlan, StepResult, Words
from weft.schedule.slots import Load
from weft.worker.inputs import RowState, StepInputs

VOCAB = 50


def next_token(context: list[tuple[int, str | None]], adapter: str | None) -> int:
    """The model: a token from (token, adapter) pairs and the adapter of the newest row."""
    return int.from_bytes(hashlib.blake2b(repr((context, adapter)).encode()).digest()[:4]) % VOCAB


Activation = int | None
"""First position of the prompt at which the adapter is active; None: it is nowhere."""


def context_of(
    request: EngineRequest, tokens: Sequence[int], active_from: Activation
) -> list[tuple[int, str | None]]:
    """Each token with the adapter that is active there."""
    adapter = request.adapter.digest if request.adapter else None
    begin = len(tokens) if active_from is None else active_from
    return [(t, adapter if i >= begin else None) for i, t in enumerate(tokens)]


def expected_tokens(request: EngineRequest, count: int, active_from: Activation = 0) -> list[int]:
    """What a request alone must yield."""
    tokens = list(request.prompt_ids)
    for _ in range(count):
        context = context_of(request, tokens, active_from)
        wanted = next_token(context, context[-1][1])
        allowed = allowed_tokens(request, tokens[len(request.prompt_ids) :])
        tokens.append(nearest(wanted, allowed))
    return tokens[len(request.prompt_ids) :]


def allowed_tokens(request: EngineRequest, output: list[int]) -> set[int]:
    """What a request may choose after its output; a rule that leaves nothing doesn't count."""
    params = request.params
    left = grammar_allows(output) if params.structured_outputs else set(range(VOCAB))
    early = len(output) < params.min_tokens
    for allowed in (
        set(params.allowed_token_ids or range(VOCAB)),
        set(range(VOCAB)) - {ids[0] for ids in request.bad_token_ids if len(ids) == 1},
        set(range(VOCAB)) - ({0, *params.stop_token_ids} if early else set()),
        set(range(VOCAB))
        - {
            ids[-1]
            for ids in request.bad_token_ids
            if len(ids) > 1 and output[-len(ids) + 1 :] == list(ids[:-1])
        },
    ):
        left = left & allowed or left
    return left


def nearest(wanted: int, allowed: set[int]) -> int:
    return min(allowed, key=lambda token: (token - wanted) % VOCAB)


def grammar_allows(output: Sequence[int]) -> set[int]:
    """The tests' only grammar: the tokens that it allows depend on all those before."""
    digest = hashlib.blake2b(repr(list(output)).encode()).digest()
    return {token for token in range(VOCAB) if digest[token] % 4 == 0} or {0}


class FakeGrammar:
    """Matcher of that grammar."""

    def __init__(self) -> None:
        self.output: list[int] = []

    def accept(self, token_id: int) -> None:
        assert token_id in grammar_allows(self.output)
        self.output.append(token_id)

    def fill(self, words: Words) -> None:
        words[:] = 0
        for token in grammar_allows(self.output):
            words[token // 32] |= 1 << token % 32 if token % 32 < 31 else -(1 << 31)


def expected_prompt_logprobs(
    request: EngineRequest, active_from: Activation = 0
) -> list[TokenLogprob | None]:
    """Each holds the token that the model would have chosen, and the prompt's own."""
    context = context_of(request, request.prompt_ids, active_from)
    return [None] + [
        TokenLogprob(next_token(context[:n], context[n - 1][1]), context[n][0], [])
        for n in range(1, len(context))
    ]


def expected_vector(request: EngineRequest, active_from: Activation = 0) -> float:
    """A position's hidden state is what the model says after it."""
    context = context_of(request, request.prompt_ids, active_from)
    count = len(context)
    counted = range(1, count + 1) if request.pooling == "mean" else [count]
    states = [next_token(context[:n], context[n - 1][1]) for n in counted]
    return sum(states) / len(states)


@dataclass
class Device:
    rows: RowState
    block_size: int
    kv: dict[int, tuple[int, str | None]] = field(default_factory=dict)
    last: dict[int, int] = field(default_factory=dict)
    arena: dict[int, str] = field(default_factory=dict)
    """Element of adapter memory -> the digest whose image wrote it."""
    installed: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Adapter slot -> start and size of its image."""

    def start(self, load: Load) -> None:
        """Make room for a load, and begin to write where its image will be."""
        for slot in load.evicted_slots:
            self.installed.pop(slot, None)
        for slot, source, dest, count in load.moves:
            assert self.installed[slot] == (source, count)
            image = [self.arena[source + i] for i in range(count)]
            self.arena.update(zip(range(dest, dest + count), image, strict=True))
            self.installed[slot] = (dest, count)
        self._fill(range(load.start, load.start + load.size), "being loaded")

    def install(self, load: Load) -> None:
        self._fill(range(load.start, load.start + load.size), load.digest)
        self.installed[load.slot] = (load.start, load.size)

    def _fill(self, elements: Iterable[int], digest: str) -> None:
        self.arena.update(dict.fromkeys(elements, digest))

    def run(self, plan: StepPlan) -> StepResult:
        inputs = self.rows.build(plan)
        self._write(inputs)
        tokens: list[int] = []
        for n, t in enumerate(inputs.sampled_tokens_N.tolist()):
            token = nearest(self._wanted(inputs, t), self._allowed(inputs, n))
            self.last[int(inputs.sampled_rows_N[n])] = token
            tokens.append(token)
        self._check_segments(inputs)
        return StepResult(
            [tokens[i] for i in inputs.plan_order_N.tolist()],
            prompt_logprobs=self._prompt_logprobs(inputs),
            vectors={
                rows.entry: np.float32([sum(self._wanted(inputs, t) for t in range(*rows[1:]))])
                for rows in inputs.pooled
            },
        )

    def _wanted(self, inputs: StepInputs, t: int) -> int:
        """What the model says after token `t` of the step."""
        s = next(i for i, q in enumerate(inputs.query_start) if q > t) - 1
        context = self._context(inputs, s)[: int(inputs.positions_T[t]) + 1]
        return next_token(context, self._adapter(int(inputs.slot_T[t])))

    def _allowed(self, inputs: StepInputs, n: int) -> set[int]:
        mask = inputs.shaping.mask if inputs.shaping else None
        if mask is None or n not in mask.sampled_K:
            return set(range(VOCAB))
        words = mask.words_KW[mask.sampled_K.tolist().index(n)].tolist()
        return {token for token in range(VOCAB) if words[token // 32] >> token % 32 & 1}

    def _prompt_logprobs(self, inputs: StepInputs) -> dict[int, list[TokenLogprob]]:
        if inputs.prompt is None:
            return {}
        prompt, begin = inputs.prompt, 0
        found: dict[int, list[TokenLogprob]] = {}
        for entry, count, _ in prompt.entries:
            found[entry] = [
                TokenLogprob(
                    self._wanted(inputs, int(prompt.token_L[i])), int(prompt.target_L[i]), []
                )
                for i in range(begin, begin + count)
            ]
            begin += count
        assert begin == len(prompt.token_L)
        assert prompt.slot_L.tolist() == inputs.slot_T[prompt.token_L].tolist()
        return found

    def _adapter(self, slot: int) -> str | None:
        """What the slot's image says; a damaged one is no adapter's."""
        if slot < 0:
            return None
        start, size = self.installed[slot]
        content = {self.arena[i] for i in range(start, start + size)}
        return content.pop() if len(content) == 1 else "damaged"

    def _write(self, inputs: StepInputs) -> None:
        for t, place in enumerate(inputs.slot_mapping_T.tolist()):
            token = int(inputs.ids_T[t])
            if inputs.from_device_T is not None and inputs.from_device_T[t]:
                token = self.last[int(inputs.row_T[t])]
            self.kv[place] = (token, self._adapter(int(inputs.slot_T[t])))

    def _context(self, inputs: StepInputs, s: int) -> list[tuple[int, str | None]]:
        table = inputs.block_table_SB[s].tolist()
        places = range(int(inputs.seq_lens_S[s]))
        return [
            self.kv[table[p // self.block_size] * self.block_size + p % self.block_size]
            for p in places
        ]

    def _check_segments(self, inputs: StepInputs) -> None:
        slots = inputs.slot_T.tolist()
        covered = {t: slot for slot, a, b in inputs.segments for t in range(a, b)}
        assert covered == {t: slot for t, slot in enumerate(slots) if slot >= 0}
        assert len({slot for slot, _, _ in inputs.segments}) == len(inputs.segments)

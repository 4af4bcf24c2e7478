"""A device in plain Python for tests of the scheduler: KV slots, last tokens, adapter slots.

Its "model" hashes everything that it reads through the block table, the adapter of each KV entry
included. So a wrong block, a stale token, a wrong adapter or a prefix shared across versions
changes the tokens that come out.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

from weft.engine.inputs import RowState, StepInputs
from weft.engine.plan import StepPlan, StepResult

VOCAB = 50


def next_token(context: list[tuple[int, str | None]], adapter: str | None) -> int:
    """The model: a token from (token, adapter) pairs and the adapter of the newest row."""
    return int.from_bytes(hashlib.blake2b(repr((context, adapter)).encode()).digest()[:4]) % VOCAB


def expected_tokens(prompt: list[int], adapter: str | None, count: int) -> list[int]:
    """What a request alone must yield."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token([(t, adapter) for t in tokens], adapter))
    return tokens[len(prompt) :]


@dataclass
class Device:
    rows: RowState
    block_size: int
    kv: dict[int, tuple[int, str | None]] = field(default_factory=dict)
    last: dict[int, int] = field(default_factory=dict)
    installed: dict[int, str] = field(default_factory=dict)
    """Adapter slot -> digest."""

    def run(self, plan: StepPlan) -> StepResult:
        inputs = self.rows.build(plan)
        self._write(inputs)
        tokens: list[int] = []
        for n, t in enumerate(inputs.sampled_tokens_N.tolist()):
            s = next(i for i, q in enumerate(inputs.query_start) if q > t) - 1
            token = next_token(self._context(inputs, s), self._adapter(int(inputs.slot_T[t])))
            self.last[int(inputs.sampled_rows_N[n])] = token
            tokens.append(token)
        self._check_segments(inputs)
        return StepResult([tokens[i] for i in inputs.plan_order_N.tolist()])

    def _adapter(self, slot: int) -> str | None:
        return None if slot < 0 else self.installed[slot]

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

"""What a plan becomes for the forward pass, against plain loops over its entries."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from weft.core.sampling import SamplingParams
from weft.schedule.plan import Admitted, StepPlan
from weft.worker.inputs import RowState

BLOCK = 4
MAX_MODEL_LEN = 40
VOCAB = 50
NUM_ROWS = 5

entries = st.tuples(st.integers(-1, 2), st.integers(0, 12), st.integers(1, 6), st.integers(0, 6))
"""(adapter slot, first position, tokens, samples): one entry for each row."""


@given(st.lists(entries, min_size=1, max_size=NUM_ROWS))
def test_samples_are_the_last_positions_of_their_entry(
    drawn: list[tuple[int, int, int, int]],
) -> None:
    """Each entry may yield no token, one, or one for each of its last positions."""
    rows = list(range(len(drawn)))
    slots, starts, counts, wanted = (list(column) for column in zip(*drawn, strict=True))
    num_samples = [min(n, count) for n, count in zip(wanted, counts, strict=True)]
    prompts = [[(row + i) % VOCAB for i in range(20)] for row in rows]
    params = SamplingParams(temperature=1.0)
    admitted = [
        Admitted(str(row), row, slots[row], prompts[row], 20, params, seed=100 + row)
        for row in rows
    ]
    blocks = [(row, i, 10 * row + i) for row in rows for i in range(10)]
    state = RowState(NUM_ROWS, MAX_MODEL_LEN, BLOCK, VOCAB)
    plan = StepPlan(1, rows, starts, counts, num_samples, sum(counts), admitted, blocks, [], [])
    inputs = state.build(plan)

    by_slot = sorted(rows, key=lambda row: slots[row])
    tokens = [(row, starts[row] + i) for row in by_slot for i in range(counts[row])]
    assert list(zip(inputs.row_T, inputs.positions_T, strict=True)) == tokens
    assert inputs.ids_T.tolist() == [prompts[row][position] for row, position in tokens]
    assert inputs.slot_T.tolist() == [slots[row] for row, _ in tokens]
    samples = [
        (row, starts[row] + counts[row] - back - 1)
        for row in by_slot
        for back in reversed(range(num_samples[row]))
    ]
    assert [tokens[t] for t in inputs.sampled_tokens_N] == samples
    assert inputs.sampled_rows_N.tolist() == [row for row, _ in samples]
    assert inputs.slot_N.tolist() == [slots[row] for row, _ in samples]
    if samples:
        assert inputs.sampling is not None
        assert inputs.position_M is not None
        assert inputs.position_M.tolist() == [position + 1 for _, position in samples]
        assert inputs.sampling.seed_M.tolist() == [100 + row for row, _ in samples]
    covered = {n: slot for slot, a, b in inputs.sampled_segments for n in range(a, b)}
    assert covered == {n: slots[row] for n, (row, _) in enumerate(samples) if slots[row] >= 0}
    in_order = np.array(samples).reshape(-1, 2)[inputs.plan_order_N].tolist()
    assert [tuple(sample) for sample in in_order] == sorted(samples)


steps = st.tuples(
    st.sampled_from([[0, 1, 2], [2, 0, 1], [0, 1, 2, 3, 4]]),
    st.none() | st.integers(0, NUM_ROWS - 1),
)
"""The rows of a step, and one that is admitted anew in it."""


def admitted(row: int, generation: int) -> Admitted:
    """A request with another adapter and other parameters in each generation."""
    params = SamplingParams(
        temperature=float((row + generation) % 2), logprobs=1 if generation % 2 else None
    )
    slot = (row * generation) % 3 - 1
    return Admitted(str(row), row, slot, [1] * 8, 8, params, seed=generation)


@given(st.lists(steps, min_size=2, max_size=8))
def test_decodes_of_the_same_rows_are_built_as_if_they_were_the_first(
    drawn: list[tuple[list[int], int | None]],
) -> None:
    """Whatever rows the steps before had, and whoever had these rows."""
    state = RowState(NUM_ROWS, MAX_MODEL_LEN, BLOCK, VOCAB)
    blocks = [(row, i, 10 * row + i) for row in range(NUM_ROWS) for i in range(10)]
    generation = [1] * NUM_ROWS
    for step, (rows, readmitted) in enumerate(drawn):
        if readmitted is not None:
            generation[readmitted] += 1
        everyone = [admitted(row, generation[row]) for row in range(NUM_ROWS)]
        new = [each for each in everyone if each.row == readmitted] if step else everyone
        starts, ones = [8 + step + row for row in rows], [1] * len(rows)
        rest = (rows.copy(), starts, ones, ones, len(rows))
        built = state.build(StepPlan(step, *rest, new, blocks, [], []))
        first = RowState(NUM_ROWS, MAX_MODEL_LEN, BLOCK, VOCAB)
        expected = first.build(StepPlan(step, *rest, everyone, blocks, [], []))
        np.testing.assert_equal(built._asdict(), expected._asdict())


def test_states_of_a_prompt_that_is_cut_and_of_decodes_with_guesses() -> None:
    """The prompt leaves its state in its snapshot and goes on from there. The decode's row comes
    before its guesses, and has what its state lacks."""
    params = SamplingParams(temperature=0.0)
    new = [
        Admitted("cut", 0, -1, [1] * 20, 20, params, 0, state=3),
        Admitted("guessed", 1, -1, [2] * 8, 8, params, 0, state=5),
    ]
    blocks = [(row, i, 10 * row + i) for row in range(2) for i in range(10)]
    fed = [(1, 8, 7), (1, 9, 6)]
    plan = StepPlan(
        1, [1, 1, 1, 0, 0], [7, 8, 9, 0, 18], [1, 1, 1, 18, 2], [1, 1, 1, 0, 1], 23, new, blocks,
        [], [(3, 11)], fed, [(5, 4)],
    )  # fmt: skip
    inputs = RowState(NUM_ROWS, MAX_MODEL_LEN, BLOCK, VOCAB).build(plan)
    assert inputs.state_S is not None and inputs.source_S is not None and inputs.lag_S is not None
    assert inputs.state_S.tolist() == [5, 5, 5, 11, 3]
    assert inputs.source_S.tolist() == [5, 5, 5, 3, 11]
    assert inputs.lag_S.tolist() == [4, 0, 0, 0, 0]
    assert inputs.snapshots == ()

"""Sampling: filters against numpy, distributions by chi-square, noise by its statistics, what
shapes logits against plain Python and against transformers' processors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from weft.kernels.sampling import (
    Bias,
    Mask,
    Penalties,
    SamplingBatch,
    _filter,
    count_tokens,
    gumbel,
    sample,
    shape,
    top_logprobs,
)
from weft.schedule.masks import BadSequences, words_of
from weft.worker.choosing import (
    BiasArrays,
    Counted,
    MaskArrays,
    PenaltyArrays,
    SamplingArrays,
    ShapingArrays,
)
from weft.worker.sampler import Sampler

DRAWS = 20_000


def batch(
    rows: int,
    *,
    temperature: float | list[float] = 1.0,
    top_k: int | list[int] | None = None,
    top_p: float | list[float] | None = None,
    min_p: float | list[float] | None = None,
    seed: int | list[int] = 0,
    position: int | list[int] = 0,
    random: list[int] | None = None,
) -> SamplingBatch:
    """Parameters of `rows` random rows; one value for all of them or a list."""

    def spread(value: float | list[float], dtype: torch.dtype) -> torch.Tensor:
        values = value if isinstance(value, list) else [value] * rows
        return torch.tensor(values, dtype=dtype)

    return SamplingBatch(
        torch.tensor(list(range(rows)) if random is None else random),
        spread(temperature, torch.float32),
        None if top_k is None else spread(top_k, torch.int64),
        None if top_p is None else spread(top_p, torch.float32),
        None if min_p is None else spread(min_p, torch.float32),
        spread(seed, torch.int64),
        spread(position, torch.int64),
    )


def draws(
    logits_V: torch.Tensor,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    seed: int = 7,
) -> np.ndarray:
    """How often each token came out of DRAWS draws, at as many positions of one seed."""
    parameters = batch(
        DRAWS,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seed=seed,
        position=list(range(DRAWS)),
    )
    ids = sample(logits_V.expand(DRAWS, -1).contiguous(), parameters)
    return np.bincount(ids.numpy(), minlength=len(logits_V))


def probabilities(
    logits: np.ndarray,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    min_p: float | None = None,
) -> np.ndarray:
    """The definition, for logits without ties: scale, keep what reaches min_p, then top_k, then
    the nucleus, normalise."""
    scaled = logits.astype(np.float64) / temperature
    order = np.argsort(-scaled)
    if min_p:
        order = order[np.exp(scaled[order] - scaled.max()) >= min_p]
    kept = order[:top_k] if top_k else order
    weights = np.exp(scaled[kept] - scaled[kept].max())
    weights /= weights.sum()
    if top_p is not None:
        size = int(np.searchsorted(np.cumsum(weights), top_p - 1e-9)) + 1
        kept, weights = kept[:size], weights[:size]
    result = np.zeros_like(scaled)
    result[kept] = weights / weights.sum()
    return result


def assert_distributed(counts: np.ndarray, expected: np.ndarray) -> None:
    """Chi-square over the tokens that are possible; none may appear that is not."""
    assert not counts[expected == 0].any()
    counts, expected = counts[expected > 0], expected[expected > 0] * counts.sum()
    assert expected.min() >= 5, "too rare for a chi-square"
    statistic = float(((counts - expected) ** 2 / expected).sum())
    freedom = len(counts) - 1
    # mean freedom, variance 2 * freedom; five deviations are far beyond chance
    assert statistic < freedom + 5 * (2 * freedom) ** 0.5 + 5


def test_greedy() -> None:
    logits_NV = torch.tensor([[0.0, 2.0, 1.0], [3.0, -1.0, 0.0]])
    assert sample(logits_NV, None).tolist() == [1, 0]


def test_greedy_rows_among_random_ones() -> None:
    logits_NV = torch.randn(5, 40, generator=torch.Generator().manual_seed(1))
    ids_N = sample(logits_NV, batch(2, temperature=9.0, seed=[1, 2], random=[1, 3]))
    greedy_N = logits_NV.argmax(-1)
    assert [int(ids_N[i]) for i in (0, 2, 4)] == [int(greedy_N[i]) for i in (0, 2, 4)]
    assert (
        ids_N[[1, 3]].tolist()
        == sample(logits_NV[[1, 3]], batch(2, temperature=9.0, seed=[1, 2])).tolist()
    )


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("seed", [0, -3, 2**62 + 5])
def test_distribution(temperature: float, seed: int) -> None:
    logits_V = torch.tensor([0.3, -1.0, 1.2, 0.0, 0.9, -0.4, 1.1])
    counts = draws(logits_V, temperature=temperature, seed=seed)
    assert_distributed(counts, probabilities(logits_V.numpy(), temperature, None, None))


def test_distribution_over_seeds() -> None:
    """The first token of many requests, which differ by seed only."""
    logits_V = torch.tensor([0.3, -1.0, 1.2, 0.0])
    parameters = batch(DRAWS, seed=list(range(-DRAWS // 2, DRAWS // 2)), position=12)
    ids = sample(logits_V.expand(DRAWS, -1).contiguous(), parameters)
    assert_distributed(
        np.bincount(ids.numpy(), minlength=4), probabilities(logits_V.numpy(), 1.0, None, None)
    )


@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"),
    [
        (1, None, None),
        (3, None, None),
        (7, None, None),
        (None, 0.5, None),
        (None, 0.9, None),
        (None, 0.01, None),
        (4, 0.8, None),
        (2, 1.0, None),
        (None, None, 0.5),
        (None, None, 0.9),
        (None, None, 1.0),
        (5, None, 0.4),
        (None, 0.8, 0.3),
        (5, 0.7, 0.35),
    ],
)
def test_filters(top_k: int | None, top_p: float | None, min_p: float | None) -> None:
    logits_V = torch.tensor([0.3, -1.0, 1.2, 0.0, 0.9, -0.4, 1.1])
    counts = draws(logits_V, temperature=1.5, top_k=top_k, top_p=top_p, min_p=min_p)
    expected = probabilities(logits_V.numpy(), 1.5, top_k, top_p, min_p)
    assert ((counts > 0) == (expected > 0)).all(), "not exactly the tokens that are left"
    assert_distributed(counts, expected)


@given(
    logits=st.lists(st.integers(-300, 300), min_size=2, max_size=12, unique=True),
    top_k=st.none() | st.integers(1, 12),
    top_p=st.none() | st.floats(0.0078125, 1.0, width=32),
)
@settings(max_examples=30, deadline=None)
def test_what_is_drawn_was_left_by_the_filters(
    logits: list[int], top_k: int | None, top_p: float | None
) -> None:
    logits_V = torch.tensor(logits) / 100
    k = None if top_k is None else min(top_k, len(logits))
    parameters = batch(200, temperature=3.0, top_k=k, top_p=top_p, position=list(range(200)))
    ids = sample(logits_V.expand(200, -1).contiguous(), parameters)
    # a nucleus that ends at top_p to within rounding may take one token more or less
    loose = None if top_p is None else min(1.0, top_p + 1e-5)
    allowed = np.flatnonzero(probabilities(logits_V.numpy(), 3.0, k, loose))
    assert set(ids.tolist()) <= set(allowed.tolist())


def test_rows_have_their_own_parameters() -> None:
    """A row that filters nothing shares a batch with rows that do."""
    logits_NV = torch.zeros(5, 50) - torch.arange(50) / 1000
    seen: list[set[int]] = [set(), set(), set(), set(), set()]
    for position in range(300):
        parameters = batch(
            5,
            top_k=[50, 2, 50, 3, 50],
            top_p=[1.0, 1.0, 0.1, 1.0, 1.0],
            min_p=[0.0, 0.0, 0.0, 0.0, 0.9985],
            seed=5,
            position=position,
        )
        for row, token in enumerate(sample(logits_NV, parameters).tolist()):
            seen[row].add(token)
    assert len(seen[0]) > 40
    assert seen[1:] == [{0, 1}, set(range(5)), {0, 1, 2}, {0, 1}]


def test_batch_invariance() -> None:
    """A row's token is the same alone, in a batch, and in another order."""
    generator = torch.Generator().manual_seed(3)
    logits_NV = torch.randn(30, 97, generator=generator)
    values = {
        "temperature": [0.3 + i / 10 for i in range(30)],
        "top_k": [1 + 3 * i for i in range(30)],
        "top_p": [(i + 1) / 30 for i in range(30)],
        "min_p": [i % 5 / 20 for i in range(30)],
        "seed": [(-1) ** i * 31**i % 2**63 for i in range(30)],
        "position": [i * i for i in range(30)],
    }
    together = sample(logits_NV, batch(30, **values)).tolist()
    backwards = {name: each[::-1] for name, each in values.items()}
    assert sample(logits_NV.flip(0), batch(30, **backwards)).tolist() == together[::-1]
    for i, token in enumerate(together):
        alone = {name: each[i] for name, each in values.items()}
        assert sample(logits_NV[i : i + 1], batch(1, **alone)).tolist() == [token]


def test_sampling_changes_nothing_it_reads() -> None:
    logits_NV = torch.randn(4, 9, generator=torch.Generator().manual_seed(3))
    before = logits_NV.clone()
    sample(logits_NV, batch(4, temperature=0.5, top_k=3, top_p=0.5))
    assert torch.equal(logits_NV, before)


def test_temperatures_at_the_edges() -> None:
    logits_V = torch.tensor([1.0, 1.01, 0.0])
    assert draws(logits_V, temperature=1e-6)[1] == DRAWS
    assert_distributed(draws(logits_V, temperature=100.0), np.full(3, 1 / 3))


def noise(seed: int | list[int], position: int | list[int], vocab: int) -> np.ndarray:
    def row(value: int | list[int]) -> torch.Tensor:
        return torch.tensor(value if isinstance(value, list) else [value])

    seeds, positions = torch.broadcast_tensors(row(seed), row(position))
    return gumbel(seeds, positions, vocab).numpy()


def test_noise_is_a_function_of_seed_and_position() -> None:
    assert (noise(5, 9, 100) == noise(5, 9, 100)).all()
    assert (noise(5, 9, 100) == noise(5, 9, 200)[:, :100]).all()
    for seed, position in ((6, 9), (5, 10), (-5, 9), (9, 5), (5 + 2**32, 9), (5 - 2**63, 9)):
        assert (noise(5, 9, 100) != noise(seed, position, 100)).mean() > 0.95


@pytest.mark.parametrize("seed", [0, 1, -1, -(2**63), 2**63 - 1])
def test_noise_is_gumbel(seed: int) -> None:
    """exp(-exp(-g)) is uniform: each of 50 bins holds its share; and all values are finite."""
    g = noise(seed, list(range(10)), 5000)
    assert np.isfinite(g).all()
    uniform = np.exp(-np.exp(-g.astype(np.float64)))
    counts = np.histogram(uniform, bins=50, range=(0, 1))[0]
    assert_distributed(counts, np.full(50, 1 / 50))


@pytest.mark.parametrize("vary", ["seed", "position"])
def test_noise_rows_are_independent(vary: str) -> None:
    """Neighbouring seeds and positions: no correlation of rows, nor of tokens across rows."""
    steps = list(range(100))
    g = noise(steps, 3, 2000) if vary == "seed" else noise(3, steps, 2000)
    correlation = np.corrcoef(g)
    # each has a deviation of 1 / sqrt(2000) = 0.022
    assert np.abs(correlation[np.triu_indices(100, 1)]).max() < 0.12
    assert abs(np.corrcoef(g[:-1].ravel(), g[1:].ravel())[0, 1]) < 0.012
    assert abs(np.corrcoef(g[:, :-1].ravel(), g[:, 1:].ravel())[0, 1]) < 0.012


# -- bias, penalties and masks -----------------------------------------------------------------


def logits_of(rows: int, vocab: int = 45, seed: int = 3) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 4


def penalties(
    prompts: list[list[int]],
    outputs: list[list[int]],
    repetition: list[float],
    presence: list[float],
    frequency: list[float],
    vocab: int = 45,
    rows: list[int] | None = None,
) -> Penalties:
    counts_PV = torch.full((len(prompts), vocab), 77, dtype=torch.int32)
    for counts_V, prompt, output in zip(counts_PV, prompts, outputs, strict=True):
        count_tokens(counts_V, torch.tensor(prompt), torch.tensor(output, dtype=torch.int64))
    return Penalties(
        torch.tensor(list(range(len(prompts))) if rows is None else rows),
        counts_PV,
        torch.tensor(repetition),
        torch.tensor(presence),
        torch.tensor(frequency),
    )


@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_penalties(data: st.DataObject) -> None:
    """Against the definition, token by token."""
    tokens = st.lists(st.integers(0, 6), max_size=12)
    prompt, output = data.draw(tokens.filter(len)), data.draw(tokens)
    repetition = data.draw(st.sampled_from([1.0, 0.5, 1.3, 100.0]))
    presence, frequency = (data.draw(st.sampled_from([0.0, -2.0, 0.7])) for _ in range(2))
    logits_NV = logits_of(3, 9, data.draw(st.integers(0, 99)))
    given_ = penalties([prompt], [output], [repetition], [presence], [frequency], 9, rows=[1])
    shaped_NV = shape(logits_NV, None, given_, None)
    want = logits_NV.double().tolist()
    for token in range(9):
        if token in prompt + output:
            want[1][token] *= 1 / repetition if want[1][token] > 0 else repetition
        want[1][token] -= frequency * Counter(output)[token] + presence * (token in output)
    np.testing.assert_allclose(shaped_NV, want, rtol=1e-5, atol=1e-5)
    assert torch.equal(shaped_NV[[0, 2]], logits_NV[[0, 2]])


def test_repetition_is_that_of_transformers() -> None:
    ids = [[1, 2, 2, 7, 9, 9], [3, 3, 4, 40, 0, 5]]
    logits_NV = logits_of(2)
    for penalty in (1.2, 0.8):
        ours_NV = shape(
            logits_NV,
            None,
            penalties(
                [r[:3] for r in ids], [r[3:] for r in ids], [penalty] * 2, [0.0] * 2, [0.0] * 2
            ),
            None,
        )
        theirs = RepetitionPenaltyLogitsProcessor(penalty)
        torch.testing.assert_close(ours_NV, theirs(torch.tensor(ids), logits_NV.clone()))


def test_bias_is_that_of_transformers() -> None:
    logits_NV = logits_of(3)
    bias = Bias(torch.tensor([0, 0, 2]), torch.tensor([4, 9, 4]), torch.tensor([2.5, -100.0, 7.0]))
    shaped_NV = shape(logits_NV, bias, None, None)
    theirs = SequenceBiasLogitsProcessor([[[4], 2.5], [[9], -100.0]])
    assert torch.equal(shaped_NV[0], theirs(torch.tensor([[1, 2]]), logits_NV[:1])[0])
    assert torch.equal(shaped_NV[1], logits_NV[1])
    assert (shaped_NV[2] - logits_NV[2]).nonzero().tolist() == [[4]]


def test_min_p_is_that_of_transformers() -> None:
    logits_NV = logits_of(50)
    theirs_NV = MinPLogitsWarper(0.1)(torch.tensor([[1]]), logits_NV.clone())
    drawn = [
        sample(logits_NV, batch(50, min_p=0.1, position=position)).tolist()
        for position in range(400)
    ]
    for row, kept_V in enumerate(theirs_NV.isfinite()):
        assert {each[row] for each in drawn} <= set(kept_V.nonzero()[:, 0].tolist())


@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 64, 262])
def test_mask(vocab: int) -> None:
    """Every bit is found, the sign bit of a word too; other rows are left alone."""
    logits_NV = logits_of(4, vocab)
    allowed = [sorted({0, vocab - 1, vocab // 2}), list(range(vocab)), [vocab - 1]]
    words = torch.from_numpy(np.stack([words_of(each, vocab) for each in allowed]))
    shaped_NV = shape(logits_NV, None, None, Mask(torch.tensor([3, 0, 1]), words))
    for row, each in zip((3, 0, 1), allowed, strict=True):
        assert torch.equal(shaped_NV[row, each], logits_NV[row, each])
        assert shaped_NV[row].isfinite().nonzero()[:, 0].tolist() == each
    assert torch.equal(shaped_NV[2], logits_NV[2])


def test_a_mask_holds_for_greedy_and_random_rows() -> None:
    logits_NV = logits_of(40)
    words = torch.from_numpy(np.stack([words_of([7, 33], 45)] * 40))
    shaped_NV = shape(logits_NV, None, None, Mask(torch.arange(40), words))
    greedy = sample(shaped_NV, None).tolist()
    assert greedy == [7 if row[7] >= row[33] else 33 for row in logits_NV]
    for top_p in (None, 0.5, 1.0):
        drawn = sample(shaped_NV, batch(40, temperature=5.0, top_k=30, top_p=top_p, min_p=0.01))
        assert set(drawn.tolist()) <= {7, 33}


@given(data=st.data())
@settings(max_examples=30, deadline=None)
def test_bad_sequences_are_those_of_transformers(data: st.DataObject) -> None:
    token = st.integers(0, 3)
    sequences = data.draw(st.lists(st.lists(token, min_size=2, max_size=4), min_size=1, max_size=6))
    output = data.draw(st.lists(token, min_size=1, max_size=9))
    matcher = BadSequences([tuple(s) for s in sequences])
    for chosen in output:
        matcher.accept(chosen)
    words = np.full(2, -1, dtype=np.int32)
    matcher.fill(words)
    shaped = shape(
        torch.zeros(1, 45), None, None, Mask(torch.tensor([0]), torch.from_numpy(words[None]))
    )
    theirs = NoBadWordsLogitsProcessor(sequences, eos_token_id=44)
    assert torch.equal(shaped, theirs(torch.tensor([output]), torch.zeros(1, 45)))


def test_shaping_does_not_depend_on_the_batch() -> None:
    """All of it at once: a row is the same, to the bit, alone and among others."""
    logits_NV = logits_of(12)
    prompts = [[i, i + 1, 40] for i in range(12)]
    outputs = [[(7 * i * j) % 45 for j in range(i)] for i in range(12)]
    whole = penalties(
        prompts,
        outputs,
        [0.5 + i / 7 for i in range(12)],
        [i / 9 for i in range(12)],
        [-i / 11 for i in range(12)],
    )
    biases = Bias(torch.arange(12), torch.arange(12) * 3, torch.arange(12) / 7)
    words = torch.from_numpy(np.stack([words_of(range(i, 45, 2), 45) for i in range(12)]))
    together = shape(logits_NV, biases, whole, Mask(torch.arange(12), words))
    for i in range(12):
        alone = Penalties(
            torch.tensor([0]),
            whole.counts_PV[i : i + 1],
            *(v[i : i + 1] for v in (whole.repetition_P, whole.presence_P, whole.frequency_P)),
        )
        bias = Bias(torch.tensor([0]), biases.token_B[i : i + 1], biases.value_B[i : i + 1])
        mask = Mask(torch.tensor([0]), words[i : i + 1])
        assert torch.equal(shape(logits_NV[i : i + 1], bias, alone, mask)[0], together[i])
        without = shape(logits_NV, biases, replace(whole), None)
        assert torch.equal(without[i].isfinite(), torch.ones(45, dtype=torch.bool))
    assert torch.equal(logits_NV, logits_of(12)), "its input was changed"


def test_a_row_without_top_p_loses_nothing_to_its_neighbours() -> None:
    """However small a token's share is, and whatever the others filter."""
    logits_NV = torch.full((2, 50), -60.0)
    logits_NV[:, 0] = 0.0
    for top_p in ([0.5, 1.0], None):
        seen = {
            int(sample(logits_NV, batch(2, temperature=40.0, top_p=top_p, position=p))[1])
            for p in range(300)
        }
        assert len(seen) > 40
    extreme_NV = torch.tensor([[0.0, -20.0, -40.0, -80.0]])
    assert torch.equal(_filter(extreme_NV, None, torch.tensor([1.0])), extreme_NV)
    assert _filter(extreme_NV, None, torch.tensor([1e-30])).isfinite().tolist() == [
        [True, False, False, False]
    ]


def test_logits_that_are_not_numbers_give_some_token() -> None:
    """A model that breaks down for one row must not end the others' step."""
    logits_NV = torch.full((2, 9), torch.nan)
    logits_NV[1] = torch.arange(9.0)
    ids = sample(logits_NV, batch(2, top_k=3, top_p=0.5, min_p=0.9)).tolist()
    assert 0 <= ids[0] < 9 and ids[1] == 8


def test_top_logprobs() -> None:
    logits_NV = torch.randn(6, 31, generator=torch.Generator().manual_seed(2)) * 4
    ids_N = torch.tensor([0, 5, 30, 7, 8, 9])
    chosen_N, rank_N, values, ids = top_logprobs(logits_NV, ids_N, 4)
    exact = logits_NV.numpy().astype(np.float64)
    exact = exact - np.log(np.exp(exact).sum(-1, keepdims=True))
    order = np.argsort(-exact, axis=-1)
    assert ids.tolist() == order[:, :4].tolist()
    np.testing.assert_allclose(values, np.take_along_axis(exact, order[:, :4], -1), atol=1e-5)
    np.testing.assert_allclose(chosen_N, exact[np.arange(6), ids_N], atol=1e-5)
    want = [order[i].tolist().index(token) + 1 for i, token in enumerate(ids_N.tolist())]
    assert rank_N.tolist() == want


def test_top_logprobs_of_none() -> None:
    """Zero alternatives: the chosen token's value only."""
    chosen_N, rank_N, values, ids = top_logprobs(torch.zeros(2, 4), torch.tensor([1, 2]), 0)
    np.testing.assert_allclose(chosen_N, np.log([0.25, 0.25]), atol=1e-6)
    assert (rank_N.tolist(), values.shape, ids.shape) == ([1, 1], (2, 0), (2, 0))


# rows of several vocabularies ---------------------------------------------------------------------

RUNS = [(0, 2, 37), (2, 3, 20), (3, 5, 64)]
SIZES = [size for begin, end, size in RUNS for _ in range(begin, end)]


def shaped_step(rows: list[int], position: int, num_words: int) -> SimpleNamespace:
    """The inputs of a step of these rows, of which one is greedy and some have masks."""
    rng = np.random.default_rng(position)

    def every(make: Callable[[int], object], dtype: type) -> np.ndarray:
        made = np.array([make(row) for row in range(len(SIZES))], dtype=dtype)
        return made[rows]

    index, random = np.arange(len(rows)), np.array([row != 1 for row in rows])
    top_k = every(lambda row: SIZES[row] if row == 3 else 12, np.int64)
    sampling = SamplingArrays(
        index[random],
        np.full(len(rows), 3, np.float32)[random],
        top_k[random],
        every(lambda row: 0.9 - row / 10, np.float32)[random],
        every(lambda row: row / 100, np.float32)[random],
        every(lambda row: row * 77, np.int64)[random],
        np.full(len(rows), position)[random],
    )
    words = np.zeros((len(SIZES), -(-max(SIZES) // 32)), dtype=np.int32)
    for row, size in enumerate(SIZES):
        own = words_of(rng.permutation(size)[: size // 2].tolist(), size)
        words[row, : len(own)] = own
    tokens = every(lambda row: rng.integers(SIZES[row]), np.int64)
    masked = every(lambda row: row in (0, 4), np.bool_)
    full = np.ones(len(rows), np.float32)
    shaping = ShapingArrays(
        BiasArrays(index, tokens, full * 4),
        PenaltyArrays(index, np.array(rows), full * 1.2, full * 0.5, full * 0.7),
        MaskArrays(index[masked], words[rows, :num_words][masked]) if masked.any() else None,
    )
    return SimpleNamespace(sampling=sampling, position_M=sampling.position_M, shaping=shaping)


def test_rows_choose_from_their_own_vocabulary() -> None:
    """As each does by itself, in logits that say the most of tokens that it does not have."""
    device, generator = torch.device("cpu"), torch.Generator().manual_seed(0)
    together = Sampler(len(SIZES), max(SIZES), device, torch.from_numpy)
    alone = [Sampler(len(SIZES), size, device, torch.from_numpy) for size in SIZES]
    prompt = np.array([1, 2, 2, 9])
    for row, sampler in enumerate(alone):
        for each in (together, sampler):
            each.admit([Counted(row, prompt, np.array([3]))])
    chosen: set[int] = set()
    for position in range(12):
        logits_NV = torch.randn(len(SIZES), max(SIZES), generator=generator)
        for row, size in enumerate(SIZES):
            logits_NV[row, size:] += 30
        step = shaped_step(list(range(len(SIZES))), position, 2)
        ids = together.choose(logits_NV, step, RUNS).tolist()
        for row, (size, sampler) in enumerate(zip(SIZES, alone, strict=True)):
            own = shaped_step([row], position, -(-size // 32))
            [want] = sampler.choose(logits_NV[row : row + 1, :size], own).tolist()
            assert ids[row] == want < size, (position, row)
        chosen.update(ids)
    assert len(chosen) > 20
    for row, (size, sampler) in enumerate(zip(SIZES, alone, strict=True)):
        assert torch.equal(together._counts_RV[row, :size], sampler._counts_RV[row])

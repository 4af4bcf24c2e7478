"""Sampling: filters against numpy, distributions by chi-square, noise by its statistics."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.kernels.sampling import SamplingBatch, gumbel, sample, top_logprobs

DRAWS = 20_000


def batch(
    rows: int,
    *,
    temperature: float | list[float] = 1.0,
    top_k: int | list[int] | None = None,
    top_p: float | list[float] | None = None,
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
        spread(seed, torch.int64),
        spread(position, torch.int64),
    )


def draws(
    logits_V: torch.Tensor,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 7,
) -> np.ndarray:
    """How often each token came out of DRAWS draws, at as many positions of one seed."""
    parameters = batch(
        DRAWS,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        position=list(range(DRAWS)),
    )
    ids = sample(logits_V.expand(DRAWS, -1).contiguous(), parameters)
    return np.bincount(ids.numpy(), minlength=len(logits_V))


def probabilities(
    logits: np.ndarray, temperature: float, top_k: int | None, top_p: float | None
) -> np.ndarray:
    """The definition, for logits without ties: scale, keep top_k, keep the nucleus, normalise."""
    scaled = logits.astype(np.float64) / temperature
    order = np.argsort(-scaled)
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
    ("top_k", "top_p"),
    [(1, None), (3, None), (7, None), (None, 0.5), (None, 0.9), (None, 0.01), (4, 0.8), (2, 1.0)],
)
def test_filters(top_k: int | None, top_p: float | None) -> None:
    logits_V = torch.tensor([0.3, -1.0, 1.2, 0.0, 0.9, -0.4, 1.1])
    counts = draws(logits_V, temperature=1.5, top_k=top_k, top_p=top_p)
    expected = probabilities(logits_V.numpy(), 1.5, top_k, top_p)
    assert ((counts > 0) == (expected > 0)).all(), "not exactly the tokens that are left"
    assert_distributed(counts, expected)


@given(
    logits=st.lists(st.integers(-300, 300), min_size=2, max_size=12, unique=True),
    top_k=st.none() | st.integers(1, 12),
    top_p=st.none() | st.floats(0.0078125, 1.0, width=32),
)
@settings(max_examples=60, deadline=None)
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
    logits_NV = torch.zeros(4, 50) - torch.arange(50) / 1000
    seen: list[set[int]] = [set(), set(), set(), set()]
    for position in range(300):
        parameters = batch(
            4, top_k=[50, 2, 50, 3], top_p=[1.0, 1.0, 0.1, 1.0], seed=5, position=position
        )
        for row, token in enumerate(sample(logits_NV, parameters).tolist()):
            seen[row].add(token)
    assert len(seen[0]) > 40
    assert [seen[1], seen[2], seen[3]] == [{0, 1}, set(range(5)), {0, 1, 2}]


def test_batch_invariance() -> None:
    """A row's token is the same alone, in a batch, and in another order."""
    generator = torch.Generator().manual_seed(3)
    logits_NV = torch.randn(30, 97, generator=generator)
    values = {
        "temperature": [0.3 + i / 10 for i in range(30)],
        "top_k": [1 + 3 * i for i in range(30)],
        "top_p": [(i + 1) / 30 for i in range(30)],
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

"""Formulas of the attention map against loops written from their definitions."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from calibration.statistics import attention, cache, persistence, similarity
from calibration.statistics.kind import kind
from tests.calibration.loops import cosine

shapes = st.tuples(st.integers(1, 3), st.integers(1, 9), st.integers(0, 9))  # heads, queries, tokens before the first
seeds = st.integers(0, 2**32 - 1)


def rows_of_weights(shape: tuple[int, int, int], seed: int, sharp: float = 2.0) -> np.ndarray:
    """Causal rows [heads, queries, tokens] that sum to one; the queries are the last tokens."""
    heads, queries, before = shape
    logits = np.random.default_rng(seed).normal(size=(heads, queries, before + queries)) * sharp
    for q in range(queries):
        logits[:, q, before + q + 1 :] = -np.inf
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def each(weights: np.ndarray, figure) -> np.ndarray:
    """`figure` of a row and of the place of its query, [heads, queries]."""
    heads, queries, tokens = weights.shape
    return np.array([[figure(weights[h, q], tokens - queries + q) for q in range(queries)] for h in range(heads)])


@given(shapes, seeds, st.sampled_from([0.1, 0.5, 0.8, 0.95]))
def test_of_a_row_of_attention(shape: tuple[int, int, int], seed: int, share: float) -> None:
    weights = rows_of_weights(shape, seed)
    tensor = torch.from_numpy(weights)

    def radius(row: np.ndarray, place: int) -> int:
        return next(r for r in range(1, place + 2) if row[place - r + 1 : place + 1].sum() >= share)

    def fewest(row: np.ndarray, place: int) -> int:
        return next(n for n in range(1, place + 2) if sum(sorted(row)[-n:]) >= share)

    def entropy(row: np.ndarray, place: int) -> float:
        return -sum(a * math.log(a) for a in row if a > 0)

    assert np.array_equal(attention.locality_radius(tensor, share), each(weights, radius))
    assert np.array_equal(attention.coverage(tensor, share), each(weights, fewest))
    np.testing.assert_allclose(attention.entropy(tensor), each(weights, entropy), atol=1e-12)


@given(shapes, seeds, st.integers(1, 12))
def test_mass_on_some_tokens(shape: tuple[int, int, int], seed: int, most: int) -> None:
    weights = rows_of_weights(shape, seed)
    chosen = np.random.default_rng(seed).random(weights.shape[-1]) < 0.5
    tensor, mask = torch.from_numpy(weights), torch.from_numpy(chosen)
    np.testing.assert_allclose(attention.mass(tensor, mask), each(weights, lambda row, _: sum(row[chosen])), atol=1e-12)
    best = each(weights, lambda row, _: sum(sorted(row[chosen], reverse=True)[:most]))
    np.testing.assert_allclose(attention.top_mass(tensor, mask, most), best, atol=1e-12)


def test_even_where_rounding_leaves_less_than_the_whole() -> None:
    weights = torch.full((1, 1, 10), 0.1)
    assert attention.locality_radius(weights * 0.7, 0.8).tolist() == [[10]]
    assert attention.coverage(weights * 0.7, 0.8).tolist() == [[10]]


@given(shapes, seeds)
def test_similarity_of_steps_and_layers(shape: tuple[int, int, int], seed: int) -> None:
    before, after = rows_of_weights(shape, seed), rows_of_weights(shape, seed + 1)
    heads, steps, _ = before.shape
    got = similarity.adjacent_steps(torch.from_numpy(before))
    assert got.shape == (heads, steps - 1)
    for h, s in np.ndindex(heads, steps - 1):
        assert float(got[h, s]) == pytest.approx(cosine(before[h, s], before[h, s + 1]))
    got = similarity.adjacent_layers(torch.from_numpy(before), torch.from_numpy(after))
    for h, g, s in np.ndindex(heads, heads, steps):
        assert float(got[h, g, s]) == pytest.approx(cosine(before[h, s], after[g, s]))


@given(st.integers(1, 3), st.integers(1, 9), st.integers(1, 5), seeds)
def test_redundancy_and_alike_heads(heads: int, tokens: int, width: int, seed: int) -> None:
    rows = np.random.default_rng(seed).normal(size=(heads, tokens, width)) + 0.5
    tensor = torch.from_numpy(rows)
    for h, got in enumerate(cache.redundancy(tensor)):
        pairs = [cosine(rows[h, i], rows[h, j]) for i in range(tokens) for j in range(tokens) if i != j]
        assert float(got) == pytest.approx(np.mean(pairs) if pairs else 0, abs=2e-6)
    alike = similarity.heads(tensor)
    for i, j, t in np.ndindex(heads, heads, tokens):
        assert float(alike[i, j, t]) == pytest.approx(cosine(rows[i, t], rows[j, t]))


@given(st.lists(st.lists(st.floats(0.1, 100), min_size=3, max_size=3), min_size=1, max_size=3))
def test_outliers_are_ratios_to_the_median_channel(rows: list[list[float]]) -> None:
    tensor = torch.tensor(rows, dtype=torch.float64)
    want = [max(row) / sorted(row)[1] for row in rows]
    np.testing.assert_allclose(cache.outlier(tensor), want)
    np.testing.assert_allclose(cache.bias_spike(-tensor, tensor), want)


def test_nothing_stands_out_of_zeros() -> None:
    assert cache.outlier(torch.tensor([0.0, 0.0, 5.0])).isnan()
    assert cache.bias_spike(torch.tensor([1.0, 2.0]), torch.zeros(2)).isnan()


@given(st.integers(2, 20), seeds)
def test_correlation_is_pearsons(tokens: int, seed: int) -> None:
    x, y = np.random.default_rng(seed).normal(size=(2, tokens))
    got = float(persistence.correlation(torch.from_numpy(x), torch.from_numpy(y)))
    assert got == pytest.approx(np.corrcoef(x, y)[0, 1])
    assert persistence.correlation(torch.ones(tokens), torch.from_numpy(y)).isnan()


def test_a_token_is_an_anchor_a_transient_or_neither() -> None:
    frequency = torch.tensor([0.0, 0.01, 0.5, 0.51, 1.0])
    assert persistence.anchors(frequency).tolist() == [False, False, False, True, True]
    assert persistence.transients(frequency).tolist() == [False, True, True, False, False]


@pytest.mark.parametrize(
    ("entropy", "layers", "steps", "want"),
    [
        (0.3, 0.8, 0.9, "understanding"),
        (0.8, 0.8, 0.9, "understanding"),  # two of three
        (0.8, 0.3, 0.9, "generation"),
        (0.3, 0.3, 0.4, "generation"),
        (math.nan, 0.8, 0.9, "understanding"),
        (0.3, 0.3, math.nan, "generation"),  # one of two
        (math.nan, math.nan, math.nan, "generation"),
    ],
)
def test_kind(entropy: float, layers: float, steps: float, want: str) -> None:
    assert kind(entropy, layers, steps) == want

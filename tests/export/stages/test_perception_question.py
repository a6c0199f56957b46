"""The selectors that look at the question against plain numpy statements of what they are said to do."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from export.stages.perception import Attention, Coverage
from tests.export.stages.strategies import seeds, tensor

CLEAR = 1e-4  # scores this far apart relative to their size: float32 cannot confuse them


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    return float(a @ b) / max(float(np.linalg.norm(a) * np.linalg.norm(b)), 1e-12)


def softmax(values: list[float], temperature: float) -> list[float]:
    powers = [math.exp((value - max(values)) / temperature) for value in values]
    return [power / sum(powers) for power in powers]


def covered(kept: list[int], visual: np.ndarray, text: list[np.ndarray], tau_t: float, tau_v: float, alpha: float):
    """MMTok's objective f(kept)."""

    def mean(of: list[np.ndarray], tau: float) -> float:
        best = [max(softmax([cosine(x, v) for v in visual], tau)[s] for s in kept) for x in of]
        return sum(best) / len(best) if best else 0.0

    return mean(text, tau_t) + alpha * mean(list(visual), tau_v)


def greedy(visual: np.ndarray, text: list[np.ndarray], count: int, *knobs: float) -> tuple[list[int], float]:
    """The tokens that greedy maximization of `covered` keeps, and by how much the closest of its choices was won."""
    kept: list[int] = []
    margin = math.inf
    while len(kept) < count:
        rest = [i for i in range(len(visual)) if i not in kept]
        values = {i: covered([*kept, i], visual, text, *knobs) for i in rest}
        first, *others = sorted(rest, key=lambda i: (-values[i], i))
        margin = min(margin, *(values[first] - values[i] for i in others)) if others else margin
        kept.append(first)
    return sorted(kept), margin


def made(seed: int, tokens: int, size: int = 8, question: int = 4) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Features [tokens, size], question [question, size] near some of them, and which of it was asked [question]."""
    rng = np.random.default_rng(seed)
    features = rng.standard_normal((tokens, size))
    words = features[rng.integers(0, tokens, question)] + rng.standard_normal((question, size))
    asked = rng.integers(0, 2, question) * rng.integers(0, 2)
    return features.astype(np.float32), words.astype(np.float32), asked.astype(np.float32)


def choose(stage: Coverage | Attention, *arrays: np.ndarray) -> list[int]:
    return stage(*(tensor(array)[None] for array in arrays))[0].tolist()


@given(
    seed=seeds,
    tokens=st.integers(2, 9),
    keep=st.floats(0.1, 0.9),
    knobs=st.sampled_from([(0.02, 0.2, 0.5), (0.3, 0.1, 2.0)]),
)
def test_coverage_is_greedy_facility_location(
    seed: int, tokens: int, keep: float, knobs: tuple[float, float, float]
) -> None:
    features, words, asked = made(seed, tokens)
    stage = Coverage(keep, 1, 32, "coverage", *knobs)
    text = [word.astype(np.float64) for word, one in zip(words, asked, strict=True) if one]
    want, margin = greedy(features.astype(np.float64), text, stage.count(tokens), *knobs)
    assume(margin > CLEAR / tokens)
    assert choose(stage, features, words, asked) == want


@given(seed=seeds, tokens=st.integers(2, 8), keep=st.floats(0.1, 0.9))
def test_coverage_among_duplicates_is_worth_as_much(seed: int, tokens: int, keep: float) -> None:
    """Which of two equal tokens is kept may depend on rounding: the value may not."""
    rng = np.random.default_rng(seed)
    features, words = np.eye(4)[rng.integers(0, 3, tokens)], np.eye(4)[rng.integers(0, 4, 3)]
    kept = choose(Coverage(keep), *(x.astype(np.float32) for x in (features, words, np.ones(3))))
    want, _ = greedy(features, list(words), len(kept), 0.02, 0.2, 0.5)
    values = [covered(each, features, list(words), 0.02, 0.2, 0.5) for each in (kept, want)]
    assert values[0] == pytest.approx(values[1], rel=1e-5)


def salient(features: np.ndarray, centre: float, detail: float) -> list[float]:
    """Saliency of every token of a square grid, or of a row."""
    tokens = len(features)
    rows = columns = round(math.sqrt(tokens))
    if rows * columns != tokens:
        rows, columns = 1, tokens
    places = [(y, x) for y in range(rows) for x in range(columns)]
    gaussian, energy = [], []
    for y, x in places:
        off = [(2 * i + 1) / size - 1 for i, size in ((y, rows), (x, columns))]
        gaussian.append(math.exp(-(off[0] ** 2 + off[1] ** 2) / (2 * 0.5**2)))
        near = [(y + 1, x), (y - 1, x), (y, x + 1), (y, x - 1)]
        mine = features[places.index((y, x))]
        differences = [float(((mine - features[places.index(p)]) ** 2).mean()) for p in near if p in places]
        energy.append(sum(differences) / len(differences) if differences else 0.0)
    top = max(energy) or 1.0
    return [(1 + centre * g) * (1 + detail * e / top) for g, e in zip(gaussian, energy, strict=True)]


@given(
    seed=seeds,
    tokens=st.sampled_from([2, 4, 7, 9, 16, 25]),
    keep=st.floats(0.1, 0.9),
    temperature=st.sampled_from([0.05, 0.1, 1.0]),
    centre=st.sampled_from([0.0, 0.5, 2.0]),
    detail=st.sampled_from([0.0, 0.5, 2.0]),
)
def test_attention_is_its_definition(
    seed: int, tokens: int, keep: float, temperature: float, centre: float, detail: float
) -> None:
    features, words, asked = made(seed, tokens)
    stage = Attention(keep, 1, 32, "attention", temperature, centre, detail)
    exact = features.astype(np.float64)
    looks = [
        softmax([cosine(word, v) for v in exact], temperature)
        for word, one in zip(words.astype(np.float64), asked, strict=True)
        if one
    ]
    attention = np.mean(looks, axis=0) if looks else np.ones(tokens)
    score = attention * salient(exact, centre, detail)
    order = sorted(range(tokens), key=lambda i: (-score[i], i))
    count = stage.count(tokens)
    assume(count == tokens or score[order[count - 1]] > score[order[count]] * (1 + CLEAR))
    assert choose(stage, features, words, asked) == sorted(order[:count])


def test_attention_without_a_question_looks_at_the_centre_and_at_detail() -> None:
    features = torch.ones(1, 25, 4)
    question, asked = torch.randn(1, 3, 4), torch.zeros(1, 3)
    assert Attention(0.2)(features, question, asked).tolist() == [[7, 11, 12, 13, 17]]  # a cross in the middle
    features[0, 20] = 3  # a corner; of its two neighbours, 15 and 21, each differs from it alone
    assert Attention(0.04, centre=0)(features, question, asked).tolist() == [[20]]


@pytest.mark.parametrize("kind", [Coverage, Attention])
def test_padding_of_the_question_does_not_count(kind: type[Coverage] | type[Attention]) -> None:
    features, words, _ = made(1, 16)
    padded = np.concatenate([np.random.default_rng(2).standard_normal((5, 8)).astype(np.float32), words])
    mask = np.array([0] * 5 + [1] * 4, np.float32)
    assert choose(kind(0.3), features, padded, mask) == choose(kind(0.3), features, words, np.ones(4, np.float32))


def test_a_longer_question_weighs_no_more() -> None:
    for seed in range(20):
        features, words, _ = made(seed, 16)
        stage = Coverage(0.5, text_temperature=0.3, alpha=2.0)
        long = np.tile(words, (8, 1))
        once, often = (choose(stage, features, text, np.ones(len(text), np.float32)) for text in (words, long))
        assert once == often


@pytest.mark.parametrize("kind", [Coverage, Attention])
def test_a_token_that_is_asked_for_is_kept(kind: type[Coverage] | type[Attention]) -> None:
    features, _, _ = made(3, 16)
    for token in range(16):
        assert token in choose(kind(0.1), features, features[token : token + 1] * 2, np.ones(1, np.float32))

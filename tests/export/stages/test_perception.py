"""Each selector of visual tokens against a plain numpy statement of what it is said to do; here those without question.

Also what all of them have in common.
"""

from __future__ import annotations

import typing

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engines.config import parse
from engines.errors import UserError
from export.recipe import Recipe
from export.stages.perception import Attention, Coverage, Dart, Diversity, Methods, Random, Uniform
from export.stages.perception.perception import Perception, best
from tests.export.stages.strategies import seeds, tensor

KINDS: tuple[type[Perception], ...] = typing.get_args(Methods)
QUESTION = 6


def divprune(features: np.ndarray, count: int) -> list[int]:
    """Greedy max-min cosine distance, one token at a time, in double precision; features [tokens, hidden_size]."""
    unit = features / np.linalg.norm(features, axis=1, keepdims=True)
    tokens = range(len(unit))
    distance = {(i, j): 1 - float(unit[i] @ unit[j]) for i in tokens for j in tokens}
    first = max(tokens, key=lambda i: (min((distance[i, j] for j in tokens if j != i), default=0.0), -i))
    kept = [first]
    while len(kept) < count:
        rest = [i for i in tokens if i not in kept]
        kept.append(max(rest, key=lambda i: (min(distance[i, j] for j in kept), -i)))
    return sorted(kept)


def dart(features: np.ndarray, count: int, pivots: int) -> list[int]:
    """Pivots by L1 norm; then each in turn takes those least similar to it: equal shares, the first ones one more."""
    norm = [sum(map(abs, row.tolist())) for row in features]
    chosen = sorted(range(len(norm)), key=lambda i: (-norm[i], i))[: min(pivots, count)]
    kept = list(chosen)
    for turn, pivot in enumerate(chosen):
        share = (count - len(chosen)) // len(chosen) + (turn < (count - len(chosen)) % len(chosen))
        for _ in range(share):
            rest = [i for i in range(len(features)) if i not in kept]
            kept.append(min(rest, key=lambda i: (cosine(features[i], features[pivot]), i)))
    return sorted(kept)


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    return float(a @ b) / float(np.linalg.norm(a) * np.linalg.norm(b))


def axes(seed: int, tokens: int, kinds: int, largest: int = 0) -> np.ndarray:
    """Axis-aligned rows of power-of-two lengths, [tokens, 4]: cosines are exactly -1, 0 or 1, and most choices ties."""
    rng = np.random.default_rng(seed)
    lengths = 2.0 ** rng.integers(0, largest + 1, (tokens, 1)) * rng.choice([1, -1] if largest else [1], (tokens, 1))
    return (np.eye(4)[rng.integers(0, kinds, tokens)] * lengths).astype(np.float32)


@given(seed=seeds, batch=st.integers(1, 2), tokens=st.integers(2, 23), keep=st.floats(0.05, 1.0))
def test_diversity_is_divprune(seed: int, batch: int, tokens: int, keep: float) -> None:
    features = np.random.default_rng(seed).standard_normal((batch, tokens, 12)).astype(np.float32)
    stage = Diversity(keep)
    kept = stage(tensor(features))
    assert kept.tolist() == [divprune(item.astype(np.float64), stage.count(tokens)) for item in features]


@given(seed=seeds, tokens=st.integers(2, 20), keep=st.floats(0.01, 1.0), kinds=st.integers(1, 4))
def test_diversity_among_duplicates(seed: int, tokens: int, keep: float, kinds: int) -> None:
    features = axes(seed, tokens, kinds)
    kept = Diversity(keep)(tensor(features)[None])[0].tolist()
    chosen = features.argmax(1)
    assert len(set(chosen[kept])) == min(len(kept), len(set(chosen)))  # no kind twice while another is left out
    assert kept == divprune(features, len(kept))


def test_diversity_takes_the_lonely_token_first() -> None:
    features = torch.tensor([[[1.0, 0], [1, 0.1], [-1, 0], [1, -0.1]]])
    assert Diversity(0.25)(features).tolist() == [[2]]


@given(seed=seeds, tokens=st.integers(2, 23), keep=st.floats(0.05, 1.0), pivots=st.integers(1, 6), ties=st.booleans())
def test_dart_is_its_definition(seed: int, tokens: int, keep: float, pivots: int, ties: bool) -> None:
    random = np.random.default_rng(seed).standard_normal((tokens, 12)).astype(np.float32)
    features, stage = axes(seed, tokens, 4, largest=3) if ties else random, Dart(keep, pivots=pivots)
    kept = stage(tensor(features)[None])[0].tolist()
    assert kept == dart(features.astype(np.float64), stage.count(tokens), pivots)


def test_dart_takes_the_longest_token_and_not_its_copies() -> None:
    features = torch.tensor([[[1.0, 0], [3, 0], [2, 0], [0, 1], [0.5, 0.5]]])
    assert Dart(0.4, pivots=1)(features).tolist() == [[1, 3]]


@given(tokens=st.integers(2, 80), keep=st.floats(0.01, 1.0))
def test_uniform_takes_the_middles_of_equal_parts(tokens: int, keep: float) -> None:
    kept = Uniform(keep)(torch.zeros(2, tokens, 3)).tolist()
    count = max(1, round(keep * tokens))
    assert kept == [[int((i + 0.5) * tokens / count + 1e-9) for i in range(count)]] * 2
    gaps = np.diff([-1 - kept[0][0], *kept[0]])[1:]
    assert len(gaps) == 0 or gaps.max() - gaps.min() <= 1


def test_uniform_examples() -> None:
    assert Uniform(0.25)(torch.zeros(1, 16, 3)).tolist() == [[2, 6, 10, 14]]
    assert Uniform(0.3)(torch.zeros(1, 10, 3)).tolist() == [[1, 5, 8]]


def test_random_depends_on_the_seed_alone() -> None:
    one, other = torch.randn(1, 40, 3), torch.randn(2, 40, 3)
    kept = Random(0.25, seed=3)(one)[0].tolist()
    assert Random(0.25, seed=3)(other).tolist() == [kept] * 2
    assert Random(0.25, seed=4)(one)[0].tolist() != kept
    assert set(kept) < set(Random(0.5, seed=3)(one)[0].tolist())


def test_random_is_fair() -> None:
    hits = np.zeros(12)
    for seed in range(600):
        hits[Random(0.25, seed=seed)(torch.zeros(1, 12, 3))[0].numpy()] += 1
    assert hits.sum() == 1800
    assert 100 < hits.min() <= hits.max() < 200  # 150 +- 5 standard deviations


@pytest.mark.parametrize("kind", KINDS)
@given(seed=seeds, tokens=st.integers(1, 26), keep=st.floats(0.01, 1.0), floor=st.integers(1, 30))
def test_what_all_have_in_common(kind: type[Perception], seed: int, tokens: int, keep: float, floor: int) -> None:
    rng = np.random.default_rng(seed)
    empty = rng.random((2, tokens, 1)) < rng.choice([0, 0.5, 1])  # zero vectors
    features = tensor(np.where(empty, 0, rng.standard_normal((2, tokens, 8))).astype(np.float32))
    question = tensor((rng.standard_normal((2, QUESTION, 8)) * rng.integers(0, 2)).astype(np.float32))
    asked = tensor(rng.integers(0, 2, (2, QUESTION)).astype(np.float32))
    kept = kind(keep, floor)(features, question, asked)
    assert kept.dtype == torch.int64
    assert kept.shape == (2, min(tokens, max(1, floor, round(keep * tokens))))
    for item in range(2):
        assert sorted(set(kept[item].tolist())) == kept[item].tolist()
        assert 0 <= int(kept[item, 0]) <= int(kept[item, -1]) < tokens
        alone = kind(keep, floor)(*(x[item : item + 1] for x in (features, question, asked)))
        assert torch.equal(alone[0], kept[item])


@pytest.mark.parametrize("stage", [Diversity(0.3), Dart(0.3), Coverage(0.3), Attention(0.3, centre=0)])
@pytest.mark.parametrize("value", [0.0, 1.0])
def test_of_equal_tokens_the_first_are_kept(stage: Perception, value: float) -> None:
    question = torch.randn(2, QUESTION, 4, generator=torch.Generator().manual_seed(0))
    for asked in (torch.ones(2, QUESTION), torch.zeros(2, QUESTION)):
        assert stage(torch.full((2, 10, 4), value), question, asked).tolist() == [[0, 1, 2]] * 2


@given(seed=seeds, tokens=st.integers(1, 40), values=st.integers(1, 50), share=st.floats(0, 1))
def test_best_prefers_the_lowest_among_equals(seed: int, tokens: int, values: int, share: float) -> None:
    score = np.random.default_rng(seed).integers(0, values, (2, tokens)).astype(np.float32)
    count = max(1, round(share * tokens))
    want = np.argsort(-score, axis=1, kind="stable")[:, :count]
    assert best(tensor(score), count).tolist() == want.tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_a_recipe_chooses_it_by_name(kind: type[Perception]) -> None:
    method = typing.get_args(typing.get_type_hints(kind)["method"])[0]
    recipe = parse(Recipe, {"name": "x", "perception": {"method": method, "keep": 0.5}}, "x")
    assert type(recipe.perception) is kind
    assert parse(Recipe, recipe.settings(), "x").perception.keep == 0.5


def test_a_recipe_without_a_method_is_diversity() -> None:
    assert type(parse(Recipe, {"name": "x", "perception": {"keep": 0.5}}, "x").perception) is Diversity


@pytest.mark.parametrize(
    ("table", "message"),
    [
        *(({"keep": keep}, "keep must be in") for keep in (0.0, -1.0, 1.01)),
        ({"floor": 0}, "floor must be at least 1"),
        ({"method": "dart", "pivots": 0}, "pivots must be at least 1"),
        ({"method": "dart", "keep": 0.0}, "keep must be in"),
        ({"method": "random", "seed": -1}, "seed must be at least 0"),
        ({"method": "coverage", "question_tokens": 0}, "question_tokens must be at least 1"),
        ({"method": "coverage", "alpha": 0.0}, "alpha must be from 0.001"),
        ({"method": "attention", "temperature": 0.0}, "temperature must be from 0.001"),
        ({"method": "attention", "centre": -0.5}, "centre and detail from 0 to 1000"),
        ({"method": "attention", "layers": [-1]}, "layers must be different numbers from 0"),
        ({"method": "attention", "layers": [1, 1]}, "layers must be different numbers from 0"),
        ({"layers": [1]}, "unknown key 'layers'"),
        ({"method": "attention", "keep": 0.0}, "keep must be in"),
        ({"question_tokens": 8}, "unknown key 'question_tokens'"),
        ({"method": "magic"}, "no method 'magic'"),
    ],
)  # fmt: skip
def test_a_recipe_is_refused(table: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse(Recipe, {"name": "x", "perception": table}, "x.toml")

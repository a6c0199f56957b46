"""Adaptive perception: the order of choice, and what a vision graph says of an image, against plain statements."""

from __future__ import annotations

import math
import typing

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engines.bundle import Adaptive
from engines.config import parse
from engines.errors import UserError
from engines.gate import Fallback, Gate
from export.recipe import Recipe
from export.stages.perception import Attention, Coverage, Dart, Diversity, Methods, Random, Uniform
from export.stages.perception.adaptive import coverage, entropy
from export.stages.perception.perception import Perception
from tests.export import tiny
from tests.export.stages.strategies import seeds, tensor

KINDS: tuple[type[Perception], ...] = typing.get_args(Methods)
QUESTION = 5


def made(seed: int, tokens: int, batch: int = 1) -> tuple[np.ndarray, torch.Tensor, torch.Tensor]:
    rng = np.random.default_rng(seed)
    features = rng.standard_normal((batch, tokens, 8)).astype(np.float32)
    question = rng.standard_normal((batch, QUESTION, 8)).astype(np.float32)
    return features, tensor(question), tensor(rng.integers(0, 2, (batch, QUESTION)).astype(np.float32))


@pytest.mark.parametrize("kind", KINDS)
@given(seed=seeds, tokens=st.integers(1, 24), keep=st.floats(0.01, 1.0))
def test_the_order_is_of_the_kept_tokens(kind: type[Perception], seed: int, tokens: int, keep: float) -> None:
    features, *guidance = made(seed, tokens, batch=2)
    stage = kind(keep)
    order = stage.order(tensor(features), *guidance)
    assert order.dtype == torch.int64
    assert order.sort(dim=1).values.tolist() == stage(tensor(features), *guidance).tolist()
    for item in range(2):
        alone = stage.order(*(x[item : item + 1] for x in (tensor(features), *guidance)))
        assert torch.equal(alone[0], order[item])


@pytest.mark.parametrize("kind", [Diversity, Coverage, Attention, Random])
@given(seed=seeds, tokens=st.integers(2, 24), share=st.floats(0.05, 1.0))
def test_the_first_of_them_are_what_a_smaller_share_keeps(
    kind: type[Perception], seed: int, tokens: int, share: float
) -> None:
    features, *guidance = made(seed, tokens)
    fewer = kind(share)(tensor(features), *guidance)
    first = kind(1.0).order(tensor(features), *guidance)[:, : fewer.shape[1]]
    assert first.sort(dim=1).values.tolist() == fewer.tolist()


@given(seed=seeds, tokens=st.integers(2, 24), pivots=st.integers(1, 5))
def test_the_pivots_of_dart_take_turns(seed: int, tokens: int, pivots: int) -> None:
    features, *_ = made(seed, tokens)
    exact = features[0].astype(np.float64)
    order = Dart(1.0, pivots=pivots).order(tensor(features))[0].tolist()
    heads = sorted(range(tokens), key=lambda i: -np.abs(exact[i]).sum())[:pivots]
    assert order[:pivots] == heads[: len(order)]
    for turn in range(min(pivots, tokens)):
        mine = [exact[i] @ exact[heads[turn]] / np.linalg.norm(exact[i]) for i in order[pivots + turn :: pivots]]
        assert mine == sorted(mine)  # least similar first


@given(bits=st.integers(0, 5), times=st.integers(1, 4))
def test_any_number_of_uniform_tokens_is_spread_over_the_image(bits: int, times: int) -> None:
    count = 2**bits
    order = Uniform(1 / times).order(torch.zeros(1, count * times, 3))[0].numpy()
    for part in range(bits + 1):
        first = np.sort(order[: 2**part])
        assert set(np.diff(first)) <= {count * times // 2**part}
    assert sorted(Uniform(1.0).order(torch.zeros(1, 7, 3))[0].tolist()) == list(range(7))


def covered(features: np.ndarray, chosen: list[int]) -> float:
    """Mean over all tokens of the highest cosine to a chosen one; a chosen one covers itself wholly."""
    unit = [row / (math.sqrt(sum(row**2)) or 1.0) for row in features]
    best = [max(1.0 if v == s else sum(unit[v] * unit[s]) for s in chosen) for v in range(len(unit))]
    return sum(best) / len(best)


@given(seed=seeds, tokens=st.integers(1, 14), kept=st.integers(1, 14), zeros=st.booleans())
def test_coverage_is_its_definition(seed: int, tokens: int, kept: int, zeros: bool) -> None:
    rng, kept = np.random.default_rng(seed), min(kept, tokens)
    features = rng.standard_normal((2, tokens, 5)).astype(np.float32)
    features[rng.random((2, tokens)) < zeros * 0.5] = 0
    chosen = np.stack([rng.permutation(tokens)[:kept] for _ in range(2)])
    curve = coverage(tensor(features), torch.from_numpy(chosen)).numpy()
    want = [
        [covered(features[b].astype(np.float64), chosen[b, :k].tolist()) for k in range(1, kept + 1)] for b in (0, 1)
    ]
    np.testing.assert_allclose(curve, want, atol=1e-5)
    assert (np.diff(curve) >= 0).all()
    if kept == tokens:
        np.testing.assert_allclose(curve[:, -1], 1, atol=1e-6)


def test_coverage_of_copies_is_that_of_one() -> None:
    assert coverage(torch.ones(1, 9, 4), torch.tensor([[3, 4]]))[0].tolist() == pytest.approx([1, 1])


def spread(features: np.ndarray) -> float:
    """Entropy of the squared distances from the mean token, over its largest value."""
    mean = sum(features) / len(features)
    energy = [sum((row - mean) ** 2) for row in features]
    total = sum(energy)
    if total == 0 or len(features) == 1:
        return 0.0
    return -sum(e / total * math.log(e / total) for e in energy if e > 0) / math.log(len(features))


@given(seed=seeds, tokens=st.integers(1, 20), peak=st.sampled_from([0.0, 1.0, 30.0]), size=st.sampled_from([1, 7]))
def test_entropy_is_its_definition(seed: int, tokens: int, peak: float, size: int) -> None:
    features = np.random.default_rng(seed).standard_normal((2, tokens, size)).astype(np.float32)
    features[:, 0] *= peak
    got = entropy(tensor(features)).numpy()
    assert got.shape == (2,)
    assert ((got >= 0) & (got <= 1 + 1e-6)).all()
    np.testing.assert_allclose(got, [spread(item.astype(np.float64)) for item in features], atol=1e-4)


def test_entropy_is_low_where_few_tokens_stand_out() -> None:
    page, ground = torch.randn(1, 64, 16, generator=torch.Generator().manual_seed(0)), torch.ones(1, 64, 16)
    ground[:, 5] = 3
    assert entropy(page) > 0.95
    assert entropy(ground) < 0.2
    for plain in (torch.ones(1, 64, 16), torch.zeros(1, 64, 16), torch.ones(1, 1, 16)):
        assert entropy(plain).tolist() == [0]


@given(tokens=st.integers(1, 600), floor=st.integers(1, 80), shares=st.lists(st.floats(0.01, 0.8), max_size=4))
def test_counts_are_ascending_and_none_is_under_the_floor(tokens: int, floor: int, shares: list[float]) -> None:
    stage = Diversity(0.8, floor, buckets=tuple(shares))
    assert stage.adaptive == bool(shares)
    counts = stage.counts(tokens)
    assert counts[-1] == stage.count(tokens)
    assert counts == sorted({min(tokens, max(floor, 1, round(share * tokens))) for share in [*shares, 0.8]})


def test_the_manifest_is_told() -> None:
    adaptive = tiny.recipe(
        perception={"keep": 0.5, "buckets": [0.1, 0.25, 0.5], "floor": 3, "coverage": 0.8, "quota": 0.4},
        gate={"base": 0.5},
        fallback={},
    ).adaptive(16)
    assert adaptive == Adaptive([3, 4, 8], 0.8, 3, 0.4, Gate(base=0.5), Fallback())
    assert tiny.recipe(perception={"keep": 0.5}).adaptive(16) is None
    assert tiny.recipe(perception={"quota": 0.5, "floor": 99}).adaptive(16) == Adaptive([16], 0.9, 16, 0.5)


def test_settings_come_back() -> None:
    recipe = tiny.recipe(perception={"buckets": [0.5]}, gate={"low": 0.5})
    again = parse(Recipe, recipe.settings(), "again")
    assert (again.gate, again.fallback, again.perception.buckets) == (Gate(low=0.5), None, (0.5,))


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ({"perception": {"buckets": [0.0]}}, "buckets must be in"),
        ({"perception": {"keep": 0.5, "buckets": [0.25, 0.75]}}, r"buckets must be in \(0, 0.5\], what keep allows"),
        ({"perception": {"coverage": 0.0}}, "coverage must be in"),
        ({"perception": {"coverage": 1.5}}, "coverage must be in"),
        ({"perception": {"keep": 0.5, "quota": 0.75}}, r"quota must be in \(0, 0.5\]"),
        ({"perception": {"quota": 0.0}}, "quota must be in"),
        ({"gate": {}}, r"set  \[perception\] buckets"),
        ({"perception": {"quota": 0.5}, "fallback": {}}, r"set  \[perception\] buckets"),
        ({"perception": {"buckets": [0.5]}, "gate": {"base": 0.0}}, "gate: base must be in"),
        ({"perception": {"buckets": [0.5]}, "gate": {"bass": 0.5}}, "unknown key 'bass'"),
    ],
)  # fmt: skip
def test_a_recipe_is_refused(tables: dict, message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        parse(Recipe, {"name": "x", **tables}, "x.toml")
    assert "x.toml" in str(error.value)

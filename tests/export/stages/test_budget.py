"""Each layer budget against a plain statement of its formula."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.config import parse
from engines.errors import UserError
from export.checkpoint import Checkpoint
from export.graphs import State
from export.recipe import Recipe
from export.stages.budget import AnchorMap, Cosine, Measured, Pyramid, Uniform
from export.stages.budget.budget import Budget
from tests.export import tiny

layer_counts = st.integers(1, 40)
means = st.floats(1, 500)
share_lists = st.lists(st.floats(0.01, 100), min_size=1, max_size=40)


@given(mean=st.floats(1, 500), layers=st.integers(1, 40), shallow=st.floats(0, 0.95), deep=st.floats(0, 0.95))
def test_budget_follows_the_cosine(mean: float, layers: int, shallow: float, deep: float) -> None:
    slots = Cosine(shallow_rate=shallow, deep_rate=deep).capacities(mean, layers)
    rates = [deep + (shallow - deep) * (1 + math.cos(math.pi * i / max(1, layers - 1))) / 2 for i in range(layers)]
    kept = np.array([1 - rate for rate in rates])
    want = kept / kept.mean() * mean
    np.testing.assert_allclose(slots, np.maximum(want, 1), atol=0.5 + 1e-6)
    assert min(slots) >= 1
    assert slots == sorted(slots, reverse=shallow < deep)


@pytest.mark.parametrize("wrong", [{"keep": 0}, {"shallow_rate": 1.0}, {"deep_rate": -0.1}, {"least": 0}])
def test_budget_refuses(wrong: dict) -> None:
    with pytest.raises(ValueError, match="must be"):
        Cosine(**wrong)


def test_kv_bytes_too_small_for_the_window_is_a_user_error(checkpoint) -> None:
    with pytest.raises(UserError, match="kv_bytes"):
        tiny.Driver(checkpoint.decoder, tiny.recipe(budget={"kv_bytes": 0.01}), 48)


@given(share=st.floats(0.8, 1.5), length=st.integers(48, 120), batch=st.integers(2, 9))
def test_a_batchs_rows_are_states_of_single_requests(checkpoint, share: float, length: int, batch: int) -> None:
    recipe = tiny.recipe(budget={"kv_bytes": share}, quantize={"method": "int8"})
    one, many = (State(checkpoint.decoder, recipe, length, rows) for rows in (1, batch))
    assert many.capacities == one.capacities
    assert many.nbytes == batch * one.nbytes


def check_shares(budget: Budget, want: np.ndarray) -> None:
    """A profile is known up to a factor."""
    got = np.array(budget.profile(len(want)))
    assert (got > 0).all()
    np.testing.assert_allclose(got / got.sum(), want / want.sum(), atol=1e-9)


@given(layers=layer_counts)
def test_uniform_is_the_same_everywhere(layers: int) -> None:
    check_shares(Uniform(), np.ones(layers))
    assert Uniform(keep=0.5).capacities(10, layers) == [10] * layers


@given(layers=st.integers(2, 40), ratio=st.floats(0.6, 50), mean=means)
def test_pyramid_is_the_papers_line(layers: int, ratio: float, mean: float) -> None:
    last = mean / ratio  # k^(m-1) = k_total / (β m) in the paper
    first = 2 * mean - last
    want = np.array([first - (first - last) / (layers - 1) * layer for layer in range(layers)])
    check_shares(Pyramid(ratio=ratio), want)
    slots = Pyramid(ratio=ratio).capacities(mean, layers)
    np.testing.assert_allclose(slots, np.maximum(want, 1), atol=0.5 + 1e-6)


@given(entropy=share_lists)
def test_pyramid_follows_the_entropies(entropy: list[float]) -> None:
    check_shares(Pyramid(entropy=entropy), np.array(entropy))


@given(shares=share_lists)
def test_measured_follows_the_shares(shares: list[float]) -> None:
    check_shares(Measured(shares=shares), np.array(shares))


@pytest.mark.parametrize(("kind", "deep"), [("understanding", 0.75), ("generation", 0.45)])
@given(layers=layer_counts, edge=st.just(0.0) | st.floats(0.01, 1 / 3))
def test_anchor_map_by_thirds(kind: str, deep: float, layers: int, edge: float) -> None:
    want = []
    for layer in range(layers):
        depth, rates = layer / max(1, layers - 1), (0.45, 0.75, deep)
        rate = rates[sum(depth >= border for border in (1 / 3, 2 / 3))]
        for i, border in enumerate((1 / 3, 2 / 3)):
            start = border - edge / 2
            if start < depth < border + edge / 2:  # half a cosine from one plateau to the next
                rate = rates[i] + (rates[i + 1] - rates[i]) * (1 - math.cos(math.pi * (depth - start) / edge)) / 2
        want.append(1 - rate)
    check_shares(AnchorMap(kind=kind, edge=edge), np.array(want))  # type: ignore[arg-type]


def test_anchor_map_has_no_hard_step() -> None:
    steps = np.abs(np.diff(AnchorMap(edge=1 / 3).profile(60)))
    assert steps.max() < 0.3 / 10


@given(shares=share_lists, mean=means, most=st.integers(1, 600))
def test_no_layer_has_more_slots_than_tokens(shares: list[float], mean: float, most: int) -> None:
    slots = Measured(shares=shares).capacities(mean, len(shares), [most] * len(shares))
    assert max(slots) <= most
    order = np.argsort(shares, kind="stable")
    assert (np.diff(np.array(slots)[order]) >= 0).all()
    # The statement: one level s of water, min(most, s * share) in every layer, that holds all there is to share out.
    total, low, high = min(mean, most) * len(shares), 0.0, 1e9
    for _ in range(200):
        level = (low + high) / 2
        low, high = (level, high) if sum(min(most, level * share) for share in shares) < total else (low, level)
    want = np.array([min(most, high * share) for share in shares])
    np.testing.assert_allclose(slots, np.maximum(want, 1), atol=0.5 + 1e-3)


@given(shares=share_lists, mean=means)
def test_a_limit_that_no_layer_reaches_changes_nothing(shares: list[float], mean: float) -> None:
    budget = Measured(shares=shares)
    assert budget.capacities(mean, len(shares), [10**9] * len(shares)) == budget.capacities(mean, len(shares))


def test_the_limit_holds_unless_room_is_asked_for(checkpoint: Checkpoint) -> None:
    def capacities(**budget: object) -> list[int]:
        return State(checkpoint.decoder, tiny.recipe(budget={**STEEP, **budget}), 100).capacities

    assert capacities(keep=1.0) == [100, 100, 100]
    assert capacities(keep=0.5) == [26, 50, 74]  # as without a limit: 0.25 : 0.475 : 0.7 of 150 slots
    assert capacities(keep=0.8) == [
        48,
        92,
        100,
    ]  # 0.7 would give 118 of 240: what is over goes to the others, 0.25 : 0.475
    assert max(capacities(keep=1.2)) > 100
    assert max(capacities(kv_bytes=2.0)) == 100


STEEP = {"shallow_rate": 0.75, "deep_rate": 0.3}


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"method": "measured", "shares": [1.0, 2.0]}, "2 values, the model 3 layers"),
        ({"method": "measured", "shares": [1.0, 0.0, 2.0]}, "from 1e-06 to 1e\\+06"),
        ({"method": "measured", "shares": [1.0, 1e308, 1e308]}, "from 1e-06 to 1e\\+06"),
        ({"method": "pyramid", "ratio": 1e308}, "ratio must be above 0.5 and at most 1e\\+06"),
        ({"keep": 0.5, "kv_bytes": 0.2}, "give one of them"),
        ({"method": ["cosine"]}, "no method"),
        ({"method": "measured", "shares": [1.0, float("inf"), 2.0]}, "expected a finite number"),
        ({"method": "pyramid", "entropy": [1.0] * 4}, "4 values, the model 3 layers"),
        ({"method": "measured"}, "missing key 'shares'"),
        ({"method": "anchor-map", "kind": "other"}, "none of 'understanding', 'generation'"),
        ({"method": "anchor-map", "edge": 0.5}, "edge"),
        ({"method": "anchor-map", "conservative": 0.8}, "conservative <= aggressive"),
        ({"method": "pyramid", "ratio": 0.5}, "ratio must be above 0.5"),
    ],
)
def test_a_wrong_table_is_a_user_error(checkpoint: Checkpoint, table: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        # Not by tiny.recipe: its defaults are the cosine's.
        _ = State(checkpoint.decoder, recipe_of(table), 48).capacities


def recipe_of(table: dict) -> Recipe:
    return parse(Recipe, {"name": "test", "budget": table}, "test")

"""Each layer budget against a plain statement of its formula."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.errors import UserError
from export.stages.budget import Cosine
from tests.export import tiny


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

"""Each importance measure against a plain numpy statement of what it is said to do."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from export.stages.importance import SnapKV
from tests.export.stages.strategies import head_dims, seeds, tensor, tokens_of


@given(
    seed=seeds,
    heads=st.integers(1, 3),
    tokens=st.integers(1, 31),
    head_dim=head_dims,
    pool=st.sampled_from([1, 3, 5, 7]),
)
def test_importance_is_mass_times_value_norm_pooled(
    seed: int, heads: int, tokens: int, head_dim: int, pool: int
) -> None:
    rng = np.random.default_rng(seed)
    mass = rng.random((2, heads, tokens)).astype(np.float32)
    value = rng.standard_normal((2, heads, tokens, head_dim)).astype(np.float32)
    score = mass * np.sqrt((value.astype(np.float64) ** 2).sum(-1))
    want = np.zeros_like(score)
    for t in range(tokens):  # beyond the ends there are zeros, and they count
        want[..., t] = score[..., max(0, t - pool // 2) : t + pool // 2 + 1].sum(-1) / pool
    got = SnapKV(pool=pool)(tokens_of(tensor(value), tensor(value), tensor(mass)))
    np.testing.assert_allclose(got.numpy(), want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("field", "value"), [("window", 0), ("pool", 4), ("pool", 0)])
def test_importance_refuses(field: str, value: int) -> None:
    with pytest.raises(ValueError, match=field):
        SnapKV(**{field: value})  # type: ignore[arg-type]

"""The 8-bit store: its error, and that compaction adds none."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from export.compress import Compress, KeyStatistics
from export.stages.int8 import Int8
from tests.export import tiny
from tests.export.stages.strategies import head_dims, seeds, tensor, tokens_of


@given(seed=seeds, heads=st.integers(1, 3), tokens=st.integers(1, 17), head_dim=head_dims, size=st.floats(1e-2, 1e3))
def test_int8_errs_by_half_a_step(seed: int, heads: int, tokens: int, head_dim: int, size: float) -> None:
    rng = np.random.default_rng(seed)
    key = (rng.standard_normal((2, heads, tokens, head_dim)) * size).astype(np.float32)
    value = (rng.standard_normal(key.shape) * size).astype(np.float32)
    stage = Int8(margin=1.0)
    scale = stage.key_scale(tensor(np.abs(key).max(axis=(0, 2))))
    keys = stage.keys(tensor(key), scale)
    values, value_scale = stage.values(tensor(value))
    assert keys.dtype == values.dtype == torch.int8
    assert value_scale.dtype == torch.float16
    assert value_scale.shape == (2, heads, tokens, 1)
    half_key = scale.numpy()[:, None] / 2
    assert (np.abs(keys.numpy() * scale.numpy()[:, None] - key) <= half_key * (1 + 1e-4)).all()
    # A float16 scale is off by 2^-11 of itself at most, so the largest value may be clipped by 127 times that.
    step = value_scale.float().numpy()
    error = np.abs(values.numpy() * step - value)
    assert (error <= step * (0.5 + 127 / 2**11)).all()
    inside = np.abs(value) <= 127 * step
    assert (error <= np.where(inside, step / 2 * (1 + 1e-4), np.inf)).all()
    assert np.abs(values.numpy()).max(axis=-1).min() >= 126  # the whole range is used, row by row


@given(seed=seeds, size=st.sampled_from([1e-2, 1.0, 100.0]), head_dim=head_dims)
def test_compaction_adds_no_noise(seed: int, size: float, head_dim: int) -> None:
    """Quantizing a dequantized row gives the same integers and scales, however often."""
    rng = np.random.default_rng(seed)
    key = tensor((rng.standard_normal((1, 2, 9, head_dim)) * size).astype(np.float32))
    value = tensor((rng.standard_normal(key.shape) * size).astype(np.float32))
    statistics = KeyStatistics(torch.zeros(2, head_dim), key[0].abs().amax(dim=1))
    compress = Compress(tiny.recipe(store="int8"), 9, 0.0, statistics)
    store = compress(tokens_of(key, value))
    again = store
    for _ in range(5):
        restored, values = compress.restore(again)
        again = compress(tokens_of(restored, values))
    for name in ("key_store", "value_store", "value_scale"):
        assert torch.equal(store[name], again[name]), name


def test_int8_of_zeros_and_small_margin() -> None:
    values, scale = Int8().values(torch.zeros(1, 1, 2, 64))
    assert not values.any()
    assert (scale > 0).all()
    with pytest.raises(ValueError, match="margin"):
        Int8(margin=0.9)


def test_a_key_beyond_the_calibrated_range_is_clipped() -> None:
    stage = Int8(margin=1.0)
    scale = stage.key_scale(torch.ones(1, 64))
    assert (stage.keys(torch.full((1, 1, 1, 64), -5.0), scale) == -127).all()

"""Ranges of static scales against numpy: percentiles, least squared errors, and what of a layer's rows they are of."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from export.compress import KeyStatistics
from export.stages.quantize import ranges
from export.stages.quantize.blockwise import Blockwise
from tests.export import tiny
from tests.export.stages import quantized
from tests.export.stages.strategies import seeds, tensor


@st.composite
def numbers(draw: st.DrawFn) -> np.ndarray:
    """[blocks, numbers]: of any size, with outliers, ties or nothing but zeros."""
    rng = np.random.default_rng(draw(seeds))
    shape = draw(st.integers(1, 3)), draw(st.sampled_from([1, 2, 7, 300]))
    kind = draw(st.sampled_from(["normal", "heavy", "ties", "zero"]))
    rows = {
        "normal": lambda: rng.standard_normal(shape),
        "heavy": lambda: rng.standard_cauchy(shape),
        "ties": lambda: rng.choice([-2.0, 0.5, 2.0], shape),
        "zero": lambda: np.zeros(shape),
    }[kind]()
    return (rows * draw(st.sampled_from([1e-3, 1.0, 1e3]))).astype(np.float32)


@given(rows=numbers(), percent=st.floats(0.1, 100))
def test_percentiles_are_numpys(rows: np.ndarray, percent: float) -> None:
    want = np.percentile(np.abs(rows).astype(np.float64), percent, axis=-1)
    np.testing.assert_allclose(ranges.percentile(tensor(rows), percent), want, rtol=1e-4, atol=1e-6)


def error(row: np.ndarray, limit: float, qmax: int) -> float:
    """Mean squared error of one block's numbers by codes -qmax ... qmax that end at `limit`."""
    total = 0.0
    for x in row.astype(np.float64):
        step = limit / qmax if limit else 1.0
        total += (min(max(float(np.rint(x / step)), -qmax), qmax) * step - x) ** 2
    return total / len(row)


@settings(max_examples=20)
@given(rows=numbers(), qmax=st.sampled_from([7, 127]))
def test_no_range_that_is_tried_errs_less(rows: np.ndarray, qmax: int) -> None:
    found = ranges.least_error(tensor(rows), qmax).numpy()
    for row, limit in zip(rows, found, strict=True):
        largest = float(np.abs(row).max())
        least = min(error(row, largest * i / ranges.TRIED, qmax) for i in range(1, ranges.TRIED + 1))
        assert error(row, float(limit), qmax) <= least * 1.001 + 1e-9 * largest**2
        assert 0 <= limit <= largest


def test_few_outliers_are_clamped_and_the_rest_has_a_finer_step() -> None:
    rows = np.random.default_rng(0).standard_normal((1, 2000)).astype(np.float32)
    rows[0, 0] = 12.0
    assert ranges.percentile(tensor(rows), 99.9) < 5
    assert ranges.least_error(tensor(rows), 7) < 6  # in 4 bits a step of 12 / 7 costs more than one clamped number
    assert ranges.least_error(tensor(rows), 127) > 6  # in 8 bits it does not


def of_rows(rng: np.random.Generator, head_dim: int) -> KeyStatistics:
    """Statistics whose ranges by magnitude are none of their rows': a test sees which were read."""
    center = tensor(rng.standard_normal((2, head_dim)).astype(np.float32))
    rows = [tensor(rng.standard_normal((2, 40, head_dim)).astype(np.float32)) for _ in range(2)]
    return KeyStatistics(center, *[torch.full((2, head_dim), 99.0)] * 4, *rows)


@given(
    seed=seeds,
    knobs=st.fixed_dictionaries(
        {
            "method": st.sampled_from(["int8", "k8v4", "per-head"]),
            "center": st.booleans(),
            "rotate": st.booleans(),
            "scale": st.sampled_from(["percentile", "mse"]),
            "percentile": st.sampled_from([50.0, 99.0]),
        }
    ),
)
def test_scales_are_of_the_rows_as_they_are_quantized(seed: int, knobs: dict[str, Any]) -> None:
    head_dim = 24
    known = of_rows(np.random.default_rng(seed), head_dim)
    layer = tiny.recipe(quantize=knobs).quantize.of_layer(known)
    matrix = quantized.hadamard(head_dim) if knobs["rotate"] else np.eye(head_dim)
    for name in ("key", "value") if knobs["method"] == "per-head" else ("key",):
        rows: np.ndarray = getattr(known, f"{name}_rows").double().numpy()
        if name == "key" and knobs["center"]:
            rows = rows - known.center.double().numpy()[:, None]
        rows = rows @ matrix
        got = layer.get_buffer(f"{name}_scale").numpy() * 127
        for head in range(2):
            blocks = [rows[head].ravel()] if knobs["method"] == "per-head" else list(rows[head].T)
            assert got.shape == (1, 2, 1, len(blocks))
            for block, limit in zip(blocks, got[0, head, 0], strict=True):
                if knobs["scale"] == "percentile":
                    assert limit == pytest.approx(np.percentile(np.abs(block), knobs["percentile"]), rel=1e-4)
                else:
                    tried = np.abs(block).max() * np.arange(1, ranges.TRIED + 1) / ranges.TRIED
                    least = min(error(block, float(each), 127) for each in tried)
                    assert error(block, float(limit), 127) <= 1.01 * least + 1e-9


def test_a_scale_by_rows_needs_them() -> None:
    known = KeyStatistics(torch.zeros(2, 8), torch.ones(2, 8), torch.ones(2, 8))
    assert tiny.recipe(quantize={"method": "int8"}).quantize.of_layer(known)
    with pytest.raises(ValueError, match="keys by mse needs calibrated rows"):
        tiny.recipe(quantize={"method": "int8", "scale": "mse"}).quantize.of_layer(known)


@pytest.mark.parametrize(("method", "needed"), [("int8", True), ("per-head", True), ("mixed", True), ("int4", False)])
def test_only_static_scales_need_rows(method: str, needed: bool) -> None:
    for scale in ("absmax", "percentile", "mse"):
        stage = tiny.recipe(quantize={"method": method, "scale": scale}).quantize
        assert isinstance(stage, Blockwise)
        assert stage.needs_rows == (needed and scale != "absmax")


@pytest.mark.parametrize("percent", [0, -1, 100.1])
def test_a_percentile_out_of_range(percent: float) -> None:
    with pytest.raises(Exception, match="percentile must be above 0 and at most 100"):
        tiny.recipe(quantize={"method": "int8", "scale": "percentile", "percentile": percent})

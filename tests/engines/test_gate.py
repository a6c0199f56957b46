"""The two rates against their formulas, written out again."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.gate import Fallback, Gate

shares = st.floats(0, 1)
tokens = st.integers(0, 10**5)


@given(base=st.floats(0.01, 1), pressure=shares, entropy=shares)
def test_gate_is_its_formula(base: float, pressure: float, entropy: float) -> None:
    rate = base * (0.5 + pressure) * (0.5 + (1 - entropy))
    want = 0.2 if rate < 0.2 else 0.7 if rate > 0.7 else rate
    assert Gate(base).rate(pressure, entropy) == pytest.approx(want)


@pytest.mark.parametrize(
    ("pressure", "entropy", "rate"),
    [(0.5, 0.5, 0.4), (0.0, 1.0, 0.2), (0.0, 0.0, 0.3), (1.0, 0.0, 0.7), (9.0, 1.0, 0.3), (-1.0, 0.0, 0.3)],
)
def test_gate_examples(pressure: float, entropy: float, rate: float) -> None:
    assert Gate(0.4).rate(pressure, entropy) == pytest.approx(rate)


@given(one=shares, other=shares, fixed=shares)
def test_gate_rises_with_pressure_and_falls_with_entropy(one: float, other: float, fixed: float) -> None:
    one, other, gate = min(one, other), max(one, other), Gate()
    assert gate.rate(one, fixed) <= gate.rate(other, fixed)
    assert gate.rate(fixed, one) >= gate.rate(fixed, other)


@given(visual=tokens, text=tokens, share=shares)
def test_fallback_is_its_formula(visual: int, text: int, share: float) -> None:
    aligned = int(share * (visual + text))
    complexity = 0.0
    for count in (visual, text):
        if count > 0:
            complexity += math.log(count)
    if visual + text > 0:
        complexity += 2 * aligned / (text + visual)
    fallback = Fallback()
    assert fallback.complexity(visual, text, aligned) == pytest.approx(complexity)
    (x0, y0), (x1, y1) = (6, 0.75), (14, 0.4)
    line = y0 + (complexity - x0) * (y1 - y0) / (x1 - x0)
    assert fallback.rate(visual, text, aligned) == pytest.approx(sorted([0.4, line, 0.75])[1])


@pytest.mark.parametrize(("visual", "text", "rate"), [(0, 0, 0.75), (0, 9, 0.75), (64, 0, 0.75), (10**6, 10**6, 0.4)])
def test_fallback_ends(visual: int, text: int, rate: float) -> None:
    assert Fallback().rate(visual, text) == rate


@given(visual=tokens, text=tokens, more=st.integers(0, 1000))
def test_fallback_drops_less_of_more(visual: int, text: int, more: int) -> None:
    rate = Fallback().rate
    assert 0.4 <= rate(visual + more, text) <= rate(visual, text) <= 0.75
    assert rate(visual, text + more) <= rate(visual, text)
    assert rate(visual, text, visual // 2) <= rate(visual, text)


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"base": 0.0}, "base must be in"),
        ({"least": 0.8}, "0 <= least <= most < 1"),
        ({"most": 1.0}, "0 <= least <= most < 1"),
        ({"low": 0.9}, "0 <= low <= high <= 1"),
        ({"high": 1.1}, "0 <= low <= high <= 1"),
        ({"budget_mib": -1}, "budget_mib must be at least 0"),
    ],
)
def test_gate_is_refused(knobs: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Gate(**knobs)


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"least": 0.8}, "0 <= least <= most < 1"),
        ({"simple": 14.0}, "simple must be less than complex"),
        ({"alignment": -1.0}, "alignment must be at least 0"),
    ],
)
def test_fallback_is_refused(knobs: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Fallback(**knobs)

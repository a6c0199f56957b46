"""How visual tokens are shared out, against one token after the other; the rest is in tests/runtime/test_gate.py."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from engines.visual_counts import fill


def shared_out(curves: list[list[float]], floor: int, most: list[int], total: int) -> list[int]:
    """One token after the other to the image that is covered least; the first of equals."""
    counts = [min(floor, limit) for limit in most]
    while sum(counts) < total and counts != most:
        worst = None
        for i, count in enumerate(counts):
            if count < most[i] and (worst is None or curves[i][count - 1] < curves[worst][counts[worst] - 1]):
                worst = i
        assert worst is not None
        counts[worst] += 1
    return counts


@given(data=st.data(), images=st.integers(1, 6), tokens=st.integers(1, 12), total=st.integers(0, 80))
def test_fill_is_water_filling(data: st.DataObject, images: int, tokens: int, total: int) -> None:
    heights = st.lists(st.integers(0, 6), min_size=tokens, max_size=tokens)  # few values: ties
    curves = [np.sort(np.array(data.draw(heights), np.float32)) for _ in range(images)]
    floor = data.draw(st.integers(1, tokens))
    most = [data.draw(st.integers(floor, tokens)) for _ in range(images)]
    counts = fill(curves, floor, most, total)
    assert counts == shared_out([curve.tolist() for curve in curves], floor, most, total)
    assert sum(counts) == max(min(total, sum(most)), floor * images)
    assert all(floor <= count <= limit for count, limit in zip(counts, most, strict=True))
    for i, count in enumerate(counts):  # nobody could give a token to one who is covered less
        for j, other in enumerate(counts):
            if count > floor and other < most[j]:
                assert curves[i][count - 2] <= curves[j][other - 1]

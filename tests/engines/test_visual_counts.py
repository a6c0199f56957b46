"""How visual tokens are shared out, against one token after the other; the rest is in tests/runtime/test_gate.py."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from engines.gate import Adaptive, Fallback, Gate
from engines.visual_counts import fill, visual_counts


def shared_out(curves: list[list[float]], floors: list[int], most: list[int], total: int) -> list[int]:
    """One token after the other to the image that is covered least; the first of equals."""
    counts = [min(pair) for pair in zip(floors, most, strict=True)]
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
    floors = [data.draw(st.integers(1, tokens)) for _ in range(images)]  # of pictures of several sizes
    most = [data.draw(st.integers(floor, tokens)) for floor in floors]
    counts = fill(curves, floors, most, total)
    assert counts == shared_out([curve.tolist() for curve in curves], floors, most, total)
    assert sum(counts) == max(min(total, sum(most)), sum(floors))
    assert all(floor <= count <= limit for floor, count, limit in zip(floors, counts, most, strict=True))
    for i, count in enumerate(counts):  # nobody could give a token to one who is covered less
        for j, other in enumerate(counts):
            if count > floors[i] and other < most[j]:
                assert curves[i][count - 2] <= curves[j][other - 1]


@given(
    data=st.data(),
    sizes=st.lists(st.integers(2, 9), min_size=1, max_size=5),
    quota=st.one_of(st.none(), st.floats(0.1, 1.0)),
    gate=st.one_of(st.none(), st.just(Gate(base=0.6))),
    fallback=st.one_of(st.none(), st.just(Fallback(simple=1.0, complex=6.0))),
)
def test_images_of_several_sizes(
    data: st.DataObject, sizes: list[int], quota: float | None, gate: Gate | None, fallback: Fallback | None
) -> None:
    """Each by its own counts; what the rule says of the whole prompt counts the tokens of all."""
    curves = [sorted(data.draw(st.lists(st.floats(0, 1), min_size=n, max_size=n))) for n in sizes]
    offers = [Adaptive(sorted({1 + n // 2, n}), 0.5, 1 + n // 3, quota, gate, fallback) for n in sizes]
    entropies = [data.draw(st.floats(0, 1)) for _ in sizes]
    wanted = []
    for n, curve, entropy, offer in zip(sizes, curves, entropies, offers, strict=True):
        least = next((k for k in offer.counts if curve[k - 1] >= 0.5), n)
        if gate or fallback:
            rates = [g for g in (gate and gate.rate(0.4, entropy), fallback and fallback.rate(sum(sizes), 7)) if g]
            least = next((k for k in offer.counts if k >= n - n * min(rates) - 1e-6), n)
        wanted.append(least)
    if quota is not None:
        total = min(round(quota * sum(sizes)), 11)
        wanted = shared_out(curves, [offer.floor for offer in offers], wanted, total)
    assert visual_counts(offers, sizes, curves, entropies, 0.4, 7, 11) == wanted

"""Each selector of visual tokens against a plain numpy statement of what it is said to do."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from export.stages.perception import Diversity
from tests.export.stages.strategies import seeds, tensor


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


@given(seed=seeds, batch=st.integers(1, 2), tokens=st.integers(2, 23), keep=st.floats(0.05, 1.0))
def test_diversity_is_divprune(seed: int, batch: int, tokens: int, keep: float) -> None:
    features = np.random.default_rng(seed).standard_normal((batch, tokens, 12)).astype(np.float32)
    stage = Diversity(keep)
    kept = stage(tensor(features))
    assert kept.tolist() == [divprune(item.astype(np.float64), stage.count(tokens)) for item in features]


@given(seed=seeds, tokens=st.integers(2, 20), keep=st.floats(0.01, 1.0), kinds=st.integers(1, 4))
def test_diversity_among_duplicates(seed: int, tokens: int, keep: float, kinds: int) -> None:
    """Axis-aligned rows: distances are exactly 0 or 1, so that every choice is a tie for the lowest index."""
    chosen = np.random.default_rng(seed).integers(0, kinds, tokens)
    kept = Diversity(keep)(tensor(np.eye(4, dtype=np.float32)[chosen])[None])[0].tolist()
    assert len(kept) == max(1, round(keep * tokens)) == len(set(kept))
    assert kept == sorted(kept)
    assert len(set(chosen[kept])) == min(len(kept), len(set(chosen)))  # no kind twice while another is left out
    assert kept == divprune(np.eye(4)[chosen], len(kept))


def test_diversity_of_equal_tokens_takes_the_first() -> None:
    assert Diversity(0.3)(torch.ones(2, 10, 5)).tolist() == [[0, 1, 2]] * 2


def test_diversity_takes_the_lonely_token_first() -> None:
    features = torch.tensor([[[1.0, 0], [1, 0.1], [-1, 0], [1, -0.1]]])
    assert Diversity(0.25)(features).tolist() == [[2]]


@pytest.mark.parametrize("keep", [0.0, -1.0, 1.01])
def test_diversity_refuses_a_share_out_of_range(keep: float) -> None:
    with pytest.raises(ValueError, match="keep must be in"):
        Diversity(keep)

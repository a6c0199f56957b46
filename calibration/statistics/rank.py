"""Rank correlation."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike, NDArray


def spearman(first: ArrayLike, second: ArrayLike) -> float:
    """Rank correlation of two rows; NaN where all of one are alike."""
    ranks = _ranks(first), _ranks(second)
    if min(rank.std() for rank in ranks) == 0:
        return math.nan
    return float(np.corrcoef(*ranks)[0, 1])


def _ranks(values: ArrayLike) -> NDArray[np.float64]:
    """Places in ascending order; equal values share the mean of theirs."""
    _, inverse, count = np.unique(values, return_inverse=True, return_counts=True)
    return (count.cumsum() - (count + 1) / 2)[inverse]

"""Merging above a threshold that follows the data: D2O (arXiv 2406.13035)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from export.stages.merge.merge import Merge, Nearest, count
from export.stages.tokens import Tokens

ROUNDING = 1e-6  # of a mean: where all are equal, all are at it


@dataclass(eq=False)
class D2O(Merge):
    """Merge a dropped token if its nearest kept one is nearer than it is for dropped tokens on average.

    The threshold is the mean of the highest cosines over a head's dropped tokens: D2O's own in prefill. While decoding,
    D2O drops one token a step and averages over the steps, τ = β·cosine + (1 - β)·τ; a compaction drops a whole
    window at once, and the mean over it needs no state. A merged token weighs exp(cosine), a kept one e, each times the
    tokens it stands for. D2O merges keys too: `keys = "mean"`, here also rescaled.
    """

    method: Literal["d2o"] = "d2o"

    def chosen(self, tokens: Tokens, kept: Tokens, nearest: Nearest, dropped: Tensor) -> Tensor:
        total = (nearest.cosine * dropped).sum(-1, keepdim=True)
        mean = total / dropped.sum(-1, keepdim=True).clamp(min=1)
        return dropped & (nearest.cosine >= mean - ROUNDING)

    def weights(self, tokens: Tokens, kept: Tokens, nearest: Nearest) -> tuple[Tensor, Tensor]:
        return nearest.cosine.exp() * count(tokens), math.e * count(kept)

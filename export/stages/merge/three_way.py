"""Keep, merge or evict, by how well a kept token already says what a dropped one does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from export.stages.merge.merge import Merge, Nearest, count
from export.stages.tokens import Tokens

SMALL = 1e-6  # of a token's count: it weighs something even if it was never looked at


@dataclass(eq=False)
class ThreeWay(Merge):
    """What the capacity has no room for is merged where it is redundant and evicted where it is not.

    The redundancy of a dropped token is the cosine of its key to its nearest kept key. Above `merge_above` it is
    merged. From `evict_above` to there it is evicted if its score is low, which is: unless it received more attention
    than the kept token that would take it in; then (its neighbours or its modality's quota cost it its slot) it is
    merged too. Below `evict_above` nothing kept resembles it: it is evicted, since a mean with it would be neither.

    Attributes:
        merge_above, evict_above: the two limits of redundancy.
        weigh: in the merged value, tokens weigh the attention that they received, or their number: with equal keys
            attention's output then stays as it was, to the rounding.
    """

    needs_mass: ClassVar[bool] = True

    merge_above: float = 0.8
    evict_above: float = 0.5
    weigh: Literal["mass", "count"] = "mass"
    method: Literal["three-way"] = "three-way"

    def __post_init__(self) -> None:
        if not -1 <= self.evict_above <= self.merge_above <= 1:
            raise ValueError("-1 <= evict_above <= merge_above <= 1 must be true of the limits")

    def chosen(self, tokens: Tokens, kept: Tokens, nearest: Nearest, dropped: Tensor) -> Tensor:
        high = tokens.mass > kept.mass.gather(2, nearest.slot)
        return dropped & (nearest.cosine > torch.where(high, self.evict_above, self.merge_above))

    def weights(self, tokens: Tokens, kept: Tokens, nearest: Nearest) -> tuple[Tensor, Tensor]:
        if self.weigh == "count":
            return count(tokens), count(kept)
        return tokens.mass + SMALL * count(tokens), kept.mass + SMALL * count(kept)

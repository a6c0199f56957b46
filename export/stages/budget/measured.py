"""Slots per layer as calibration measured them: published advice on which layers matter conflicts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from export.stages.budget.budget import Budget, check_per_layer


@dataclass(eq=False)
class Measured(Budget):
    """What each layer keeps, relative to the others, is a list in the recipe.

    Attributes:
        shares: of each layer, above 0; only their proportions matter.
    """

    shares: list[float] = field(kw_only=True)
    method: Literal["measured"] = "measured"

    def profile(self, layers: int) -> list[float]:
        return check_per_layer("shares", self.shares, layers)

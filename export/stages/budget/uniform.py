"""The same number of slots in every layer: the baseline of every layer budget."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from export.stages.budget.budget import Budget


@dataclass(eq=False)
class Uniform(Budget):
    """Every layer keeps `keep`."""

    method: Literal["uniform"] = "uniform"

    def profile(self, layers: int) -> list[float]:
        return [1.0] * layers

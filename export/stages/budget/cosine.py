"""Slots per layer on a cosine from a shallow to a deep compression rate."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from export.stages.budget.budget import Budget


@dataclass(eq=False)
class Cosine(Budget):
    """The smooth curve avoids a jump between neighbouring layers.

    The compression rate of layer l of L is deep + (shallow - deep) · (1 + cos(π l / (L - 1))) / 2; what a layer keeps,
    1 - rate, is then scaled so that the mean over the layers is `keep`.

    Attributes:
        shallow_rate, deep_rate: compression rate of the first and the last layer; only their ratio to each other
            matters once scaled.
    """

    shallow_rate: float = 0.75
    deep_rate: float = 0.45
    method: Literal["cosine"] = "cosine"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (0 <= self.shallow_rate < 1 and 0 <= self.deep_rate < 1):
            raise ValueError("shallow_rate and deep_rate must be in [0, 1)")

    def profile(self, layers: int) -> list[float]:
        return [1 - self._rate(layer, layers) for layer in range(layers)]

    def _rate(self, layer: int, layers: int) -> float:
        angle = math.pi * layer / max(1, layers - 1)
        return self.deep_rate + (self.shallow_rate - self.deep_rate) * (1 + math.cos(angle)) / 2

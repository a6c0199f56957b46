"""Layer budgets from the attention map of multimodal models: by thirds, the last one by the kind of model."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from export.stages.budget.budget import Budget


@dataclass(eq=False)
class AnchorMap(Budget):
    """Shallow layers are compressed conservatively, middle ones aggressively, deep ones by the kind of model.

    The first third still builds features: what is lost there, every later layer misses. The middle third's attention
    has settled on its anchors. In the last third an understanding model looks at few anchors only (aggressive), a
    generating one still refines spatial detail (conservative). What a layer keeps is 1 - its rate, scaled as in every
    budget so that the mean is `keep`.

    Attributes:
        kind: of model, which decides what its deep layers do.
        conservative, aggressive: compression rates of the two treatments.
        edge: width of the cosine ramp between two thirds, as a share of the depth: a hard step between neighbouring
            layers costs coherence. 0 is the step.
    """

    kind: Literal["understanding", "generation"] = "understanding"
    conservative: float = 0.45
    aggressive: float = 0.75
    edge: float = 1 / 6
    method: Literal["anchor-map"] = "anchor-map"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.conservative <= self.aggressive < 1:
            raise ValueError("0 <= conservative <= aggressive < 1 must be true of the rates")
        if not 0 <= self.edge <= 1 / 3:
            raise ValueError(f"edge must be in [0, 1/3], got {self.edge}")

    def profile(self, layers: int) -> list[float]:
        return [1 - self._rate(layer / max(1, layers - 1)) for layer in range(layers)]

    def _rate(self, depth: float) -> float:
        deep = self.aggressive if self.kind == "understanding" else self.conservative
        first = (self.aggressive - self.conservative) * self._ramp(depth - 1 / 3)
        return self.conservative + first + (deep - self.aggressive) * self._ramp(depth - 2 / 3)

    def _ramp(self, past: float) -> float:
        """From 0 to 1 within half an edge on either side of `past` = 0."""
        if abs(past) >= self.edge / 2:
            return float(past >= 0)
        return (1 + math.sin(math.pi * past / self.edge)) / 2

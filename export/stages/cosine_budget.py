"""Slots per layer on a cosine from a shallow to a deep compression rate, scaled to a mean."""

from __future__ import annotations

import math
from dataclasses import dataclass

from export.stages.stage import Stage


@dataclass(eq=False)
class CosineBudget(Stage):
    """How many tokens each layer's store keeps; the smooth curve avoids a jump between neighbouring layers.

    The compression rate of layer l of L is deep + (shallow - deep) · (1 + cos(π l / (L - 1))) / 2; what a layer keeps,
    1 - rate, is then scaled so that the mean over the layers is `keep`.

    Attributes:
        keep: mean share of the bucket's tokens kept. Above 1 the store has room for tokens still to come.
        kv_bytes: the whole KV state's bytes (store, window, scales, positions, biases, masses) as a share of the fp16
            KV bytes of a full bucket; when given, `keep` follows from it.
        shallow_rate, deep_rate: compression rate of the first and the last layer; only their ratio to each other
            matters once scaled.
        least: slots of a layer, at least.
    """

    keep: float = 1.0
    kv_bytes: float | None = None
    shallow_rate: float = 0.75
    deep_rate: float = 0.45
    least: int = 1

    def __post_init__(self) -> None:
        if self.keep <= 0:
            raise ValueError(f"keep must be above 0, got {self.keep}")
        if self.kv_bytes is not None and self.kv_bytes <= 0:
            raise ValueError(f"kv_bytes must be above 0, got {self.kv_bytes}")
        if not (0 <= self.shallow_rate < 1 and 0 <= self.deep_rate < 1):
            raise ValueError("shallow_rate and deep_rate must be in [0, 1)")
        if self.least < 1:
            raise ValueError(f"least must be at least 1, got {self.least}")

    def capacities(self, mean_slots: float, layers: int) -> list[int]:
        """Slots per KV head of each layer's store, `mean_slots` on average."""
        kept = [1 - self._rate(layer, layers) for layer in range(layers)]
        scale = mean_slots * layers / sum(kept)
        return [max(self.least, round(scale * share)) for share in kept]

    def _rate(self, layer: int, layers: int) -> float:
        angle = math.pi * layer / max(1, layers - 1)
        return self.deep_rate + (self.shallow_rate - self.deep_rate) * (1 + math.cos(angle)) / 2

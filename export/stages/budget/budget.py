"""The interface of budgets: how many tokens each layer's store keeps."""

from __future__ import annotations

from dataclasses import dataclass

from export.stages.stage import Stage


@dataclass(eq=False)
class Budget(Stage):
    """Base of the layer budgets. A subclass implements `shares`.

    Attributes:
        keep: mean share of the bucket's tokens kept. Above 1 the store has room for tokens still to come.
        kv_bytes: the whole KV state's bytes (store, window, scales, positions, biases, masses) as a share of the fp16
            KV bytes of a full bucket; when given, `keep` follows from it.
        least: slots of a layer, at least.
    """

    keep: float = 1.0
    kv_bytes: float | None = None
    least: int = 1

    def __post_init__(self) -> None:
        if self.keep <= 0:
            raise ValueError(f"keep must be above 0, got {self.keep}")
        if self.kv_bytes is not None and self.kv_bytes <= 0:
            raise ValueError(f"kv_bytes must be above 0, got {self.kv_bytes}")
        if self.least < 1:
            raise ValueError(f"least must be at least 1, got {self.least}")

    def capacities(self, mean_slots: float, layers: int) -> list[int]:
        """Slots per KV head of each layer's store, `mean_slots` on average."""
        shares = self.shares(layers)
        scale = mean_slots * layers / sum(shares)
        return [max(self.least, round(scale * share)) for share in shares]

    def shares(self, layers: int) -> list[float]:
        """What each layer keeps relative to the others, each above 0."""
        raise NotImplementedError

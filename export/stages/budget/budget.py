"""The interface of budgets: how many tokens each layer's store keeps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from engines.errors import UserError
from export.stages.stage import Stage

PROPORTIONS = (1e-6, 1e6)  # of layers to one another: their sums and quotients stay far from what floats cannot hold


@dataclass(eq=False)
class Budget(Stage):
    """Base of the layer budgets. A subclass implements `profile`.

    Attributes:
        keep: mean share of the bucket's tokens kept. Above 1 the store has room for tokens still to come.
        kv_bytes: the whole KV state's bytes (store, window, scales, positions, biases, masses) as a share of the fp16
            KV bytes of a full bucket; when given, `keep` follows from it.
        least: slots of a layer, at least.
        needs_entropy: whether `entropy` is to be measured on sample prompts, and given.
    """

    needs_entropy: ClassVar[bool] = False

    keep: float = 1.0
    kv_bytes: float | None = None
    least: int = 1

    def __post_init__(self) -> None:
        if self.keep <= 0:
            raise ValueError(f"keep must be above 0, got {self.keep}")
        if self.kv_bytes is not None and self.kv_bytes <= 0:
            raise ValueError(f"kv_bytes must be above 0, got {self.kv_bytes}")
        if self.kv_bytes is not None and self.keep != 1.0:
            raise ValueError("keep follows from kv_bytes: give one of them")
        if self.least < 1:
            raise ValueError(f"least must be at least 1, got {self.least}")

    def capacities(self, mean_slots: float, layers: int, most: Sequence[int] | None = None) -> list[int]:
        """Slots per KV head of each layer's store, `mean_slots` on average.

        Args:
            most: tokens that each layer could ever hold. Slots beyond it would stay empty: they go to the other layers,
                in proportion to their shares. Not applied where `keep` is above 1 and asks for empty slots.
        """
        total = mean_slots * layers
        if most is None or (self.kv_bytes is None and self.keep > 1):
            most = [math.ceil(total)] * layers
        return [max(self.least, round(slots)) for slots in _fill(self.profile(layers), total, most)]

    def profile(self, layers: int) -> list[float]:
        """What each layer keeps relative to the others, each above 0."""
        raise NotImplementedError


def _fill(shares: list[float], total: float, most: Sequence[float]) -> list[float]:
    """`total` split in proportion to `shares`, none above its `most`; all of them that if it is less than `total`."""
    full: set[int] = set()
    while len(full) < len(shares):
        rest = sum(share for layer, share in enumerate(shares) if layer not in full)
        scale = (total - sum(most[layer] for layer in full)) / rest
        over = {layer for layer, share in enumerate(shares) if scale * share > most[layer]} - full
        if not over:
            return [most[layer] if layer in full else scale * share for layer, share in enumerate(shares)]
        full |= over
    return list(most)


def check_per_layer(name: str, values: list[float], layers: int) -> list[float]:
    """The values, one a layer and each within `PROPORTIONS`.

    Raises:
        UserError: they are not.
    """
    if len(values) != layers:
        raise UserError(f"budget.{name} has {len(values)} values, the model {layers} layers: calibrate for this model")
    least, most = PROPORTIONS
    if not all(least <= value <= most for value in values):
        raise UserError(f"budget.{name} must be from {least:g} to {most:g} in every layer, got {values}")
    return values

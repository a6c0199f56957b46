"""Visual-token pruning at random: the baseline that every other method must beat."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from export.stages.perception.perception import Perception


@dataclass(eq=False)
class Random(Perception):
    """Keep tokens drawn without replacement when the graph is built: of every image the same places.

    Of one seed, a smaller share is part of a larger one. Needs no question.

    Attributes:
        seed: of the draw.
    """

    method: Literal["random"] = "random"
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.seed < 0:
            raise ValueError(f"seed must be at least 0, got {self.seed}")

    def choose(self, features: Tensor, count: int) -> Tensor:
        batch, tokens, _ = features.shape
        order = np.random.default_rng(self.seed).permutation(tokens)
        return torch.tensor(order[:count].tolist()).expand(batch, -1)

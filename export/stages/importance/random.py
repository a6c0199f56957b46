"""Importance drawn by lot: the baseline that every other measure must beat."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from export.stages.importance.importance import Importance
from export.stages.tokens import Tokens

DRAWN = 32768  # positions that have a lot of their own; beyond, the lots repeat


@dataclass(eq=False)
class Random(Importance):
    """Score of a cached token = its lot: by its original position, its head and the seed, the same in every layer.

    A token has one score for life: what is kept of a prompt is part of what a larger store keeps, and compaction does
    not draw again. No two of the first `DRAWN` positions have the same score. It looks at no query.

    Attributes:
        seed: of the draw.
    """

    needs_mass: ClassVar[bool] = False

    seed: int = 0
    method: Literal["random"] = "random"

    def __post_init__(self) -> None:
        if self.seed < 0:
            raise ValueError(f"seed must be at least 0, got {self.seed}")

    def forward(self, tokens: Tokens, depth: float) -> Tensor:
        # One table of lots, which heads enter at different places: a hash in integers takes TensorRT minutes to build.
        draw = np.random.default_rng(self.seed)
        lots = torch.tensor(draw.permutation(DRAWN).tolist(), dtype=torch.float32)
        shifts = torch.tensor(draw.integers(DRAWN, size=(tokens.positions.shape[1], 1)).tolist())
        return lots[(tokens.positions + shifts) % DRAWN]

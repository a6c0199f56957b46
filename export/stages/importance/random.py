"""Importance drawn by lot: the baseline that every other measure must beat."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from export.stages.importance.importance import Importance
from export.stages.tokens import Tokens

PRIME = 46337  # the largest whose squares fit int32 and modulo which cubing is a permutation
ROUNDS = 3


@dataclass(eq=False)
class Random(Importance):
    """Score of a cached token = a hash of its original position, its head and the seed, the same in every layer.

    A token has one score for life: what is kept of a prompt is part of what a larger store keeps, and compaction does
    not draw again. No two of the first `PRIME` positions have the same score. It looks at no query.

    Attributes:
        seed: of the draw.
    """

    seed: int = 0
    method: Literal["random"] = "random"

    def __post_init__(self) -> None:
        if self.seed < 0:
            raise ValueError(f"seed must be at least 0, got {self.seed}")

    def forward(self, tokens: Tokens, depth: float) -> Tensor:
        heads = tokens.positions.shape[1]
        shifts = np.random.default_rng(self.seed).integers(1, PRIME, (heads, ROUNDS))
        score = tokens.positions
        for shift in torch.tensor(shifts.T.tolist(), dtype=torch.int32)[..., None]:  # [kv_heads, 1]
            moved = (score + shift) % PRIME
            score = moved * moved % PRIME * moved % PRIME
        return score.float()

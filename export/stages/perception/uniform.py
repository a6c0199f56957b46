"""Visual-token pruning by a regular grid: the baseline that knows only where a token lies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from export.stages.perception.perception import Perception


@dataclass(eq=False)
class Uniform(Perception):
    """Keep K of N tokens at equal distances in the grid's order: the middles of K equal parts, floor((i + 0.5) N / K).

    Needs no question.
    """

    method: Literal["uniform"] = "uniform"

    def choose(self, features: Tensor, count: int) -> Tensor:
        batch, tokens, _ = features.shape
        return torch.tensor([(2 * i + 1) * tokens // (2 * count) for i in range(count)]).expand(batch, -1)

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

    First choice are those of i = 0, then of 1/2, 1/4, 3/4, 1/8, ... of K: i by its bits in reverse, so that the first
    of them are spread over the image, too. Needs no question.
    """

    method: Literal["uniform"] = "uniform"

    def choose(self, features: Tensor, count: int) -> Tensor:
        batch, tokens, _ = features.shape
        bits = (count - 1).bit_length()
        order = sorted(range(count), key=lambda i: f"{i:0{bits}b}"[::-1])
        return torch.tensor([(2 * i + 1) * tokens // (2 * count) for i in order]).expand(batch, -1)

"""Importance spread evenly along the sequence: the baseline that looks at nothing at all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from export.stages.importance.importance import Importance
from export.stages.tokens import Tokens

STEP, ROUND = 20253, 32768  # their ratio is the golden section, to the integer; odd and a power of two: a permutation


@dataclass(eq=False)
class Uniform(Importance):
    """Score of a cached token = minus the place, on a circle of `ROUND`, of `STEP` times its original position.

    Steps of the golden section fill a circle evenly, however many are made (Fibonacci hashing): the tokens of the
    highest scores lie at gaps of at most three lengths, and what a small store keeps is part of what a larger one does.
    Positions beyond `ROUND` repeat the scores. It looks at no query.
    """

    method: Literal["uniform"] = "uniform"

    def forward(self, tokens: Tokens, depth: float) -> Tensor:
        return -(tokens.positions % ROUND * STEP % ROUND).float()

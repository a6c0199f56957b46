"""Accumulated attention: the heavy hitters of H2O (arXiv 2306.14048)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from export.stages.importance.importance import Importance, Observation, group_mean
from export.stages.tokens import Tokens


@dataclass(eq=False)
class H2O(Importance):
    """Score of a cached token = attention it has received from every query so far, prompt and answer alike.

    As in the paper the sum is not divided by the number of queries that could see the token, so that it favours early
    tokens; recent ones are for `protect` to keep. Observing with every query costs a second look at the whole attention
    matrix in prefill.
    """

    method: Literal["h2o"] = "h2o"

    def observers(self, length: int) -> int:
        return length

    def observe(self, seen: Observation) -> Tensor:
        return group_mean(seen.attention).sum(dim=2)

    def forward(self, tokens: Tokens, depth: float) -> Tensor:
        return tokens.mass

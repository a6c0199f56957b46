"""Accumulated attention that forgets: H2O's sum (arXiv 2306.14048) with an exponential decay."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from export.stages.importance.importance import Importance, Observation, count_of_tokens, group_mean
from export.stages.tokens import Tokens


@dataclass(eq=False)
class Decayed(Importance):
    """Score of a cached token = attention it has received, a query `age` steps ago weighing gamma^age.

    The mass after a prompt is what decoding that prompt token by token would have left (but for the queries before the
    window): one rule, mass * gamma + received, for both.

    Attributes:
        gamma: what a query's weight is multiplied by at every later query, in (0, 1]; 1 is H2O.
        window: queries observed in prefill; the next older one would have weighed gamma^window, 0.04 by default.
    """

    gamma: float = 0.95
    window: int = 64
    method: Literal["decayed"] = "decayed"

    by_query: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not 0 < self.gamma <= 1:
            raise ValueError(f"gamma must be in (0, 1], got {self.gamma}")
        count_of_tokens("window", self.window)

    def observers(self, length: int) -> int:
        return min(self.window, length)

    def observe(self, seen: Observation) -> Tensor:
        return self._faded(group_mean(seen.attention))

    def update(self, mass: Tensor, received: Tensor, row: tuple[Tensor, ...], queries: int | Tensor = 1) -> Tensor:
        past = queries if isinstance(queries, int) else queries[:, None, None]
        return mass * self.gamma**past + self._faded(received)

    def _faded(self, received: Tensor) -> Tensor:
        """Sum over the queries, the last of them in full, [batch, kv_heads, queries, tokens] -> without `queries`."""
        age = torch.arange(received.shape[2] - 1, -1, -1)
        return (received * (self.gamma**age)[:, None]).sum(dim=2)

    def forward(self, tokens: Tokens, depth: float) -> Tensor:
        return tokens.mass

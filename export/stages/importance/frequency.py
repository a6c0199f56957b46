"""Attention frequency: how often a token is among those a query looks at most."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from export.stages.importance.importance import Importance, Observation, count_of_tokens, group_mean
from export.stages.tokens import Tokens


@dataclass(eq=False)
class Frequency(Importance):
    """Score of a cached token = number of queries in whose top k it is: one spike of attention counts once, no more.

    The attention is averaged over the query heads of a KV head first, which is all that decoding gives. A query's k is
    `share` of the tokens it sees, rounded up; seen is what receives any attention at all. A token is in the top k if it
    receives at least as much as the k-th largest: of equal tokens all are in, or none. In prefill the number is scaled
    up to all observing queries for a token that only the later ones see.

    Attributes:
        share: of the tokens a query sees, in (0, 1]. TensorRT's TopK takes at most 3840 of a layer's tokens.
        window: queries observed in prefill.
    """

    share: float = 0.1
    window: int = 32
    method: Literal["frequency"] = "frequency"

    by_query: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise ValueError(f"share must be in (0, 1], got {self.share}")
        count_of_tokens("window", self.window)

    def observers(self, length: int) -> int:
        return min(self.window, length)

    def observe(self, seen: Observation) -> Tensor:
        received = group_mean(seen.attention)
        return seen.averaged(among_best(received, received, self.share))

    def update(self, mass: Tensor, received: Tensor, row: tuple[Tensor, ...], queries: int | Tensor = 1) -> Tensor:
        return mass + among_best(received, torch.cat(row, dim=-1), self.share).sum(dim=2)

    def forward(self, tokens: Tokens, depth: float) -> Tensor:
        return tokens.mass


def among_best(received: Tensor, row: Tensor, share: float) -> Tensor:
    """1.0 where `received` [..., some tokens] is in the top k of `row` [..., all tokens], else 0.0.

    Only values of TopK are used, never its indices, so that no tie-breaking of a backend can matter.
    """
    most = math.ceil(share * row.shape[-1])
    wanted = ((row > 0).sum(dim=-1, keepdim=True) * share).ceil().clamp(1, most).long()
    least = row.topk(most, dim=-1).values.gather(-1, wanted - 1)
    return ((received >= least) & (received > 0)).float()

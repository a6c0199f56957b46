"""Visual tokens dropped inside the decoder by the attention they receive: FastV (arXiv 2403.06764)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from export.stages.shorten.shorten import Rows, Shorten, top
from export.stages.tokens import PADDING

STAYS, GOES = 2.0, -1.0  # scores above and below any attention


@dataclass(eq=False)
class FastV(Shorten):
    """Behind the first `layer` decoder layers, keep the visual tokens that the prompt's end looked at in the last of
    them; of equal ones the first. What is dropped there is missing in every later layer, and in their KV caches.

    Attributes:
        layer: decoder layers that see the whole prompt, from 1. The paper's K = 2.
        keep: share of a bucket's rows that goes on, S' = round(keep * S); 1 drops nothing, without any work.
        queries: last rows of the prompt whose attention counts, summed; 1 is the paper's.
    """

    method: Literal["fastv"] = "fastv"
    layer: int = 2
    keep: float = 0.5
    queries: int = 1

    def __post_init__(self) -> None:
        if self.layer < 1:
            raise ValueError(f"layer must be at least 1 (before it nothing was looked at yet), got {self.layer}")
        if not 0 < self.keep <= 1:
            raise ValueError(f"keep must be in (0, 1], got {self.keep}")
        if self.queries < 1:
            raise ValueError(f"queries must be at least 1, got {self.queries}")

    def lengths(self, rows: int) -> list[int]:
        return [max(1, round(self.keep * rows))]

    def forward(self, rows: Rows) -> Rows:
        score = torch.where(rows.fixed, STAYS, rows.attention / self.queries)  # a mean over queries is at most 1
        score = torch.where(rows.kinds == PADDING, GOES, score)
        return rows.take(top(score, self.lengths(score.shape[1])[-1]))

"""Visual tokens dropped inside the decoder by the attention they receive: FastV (arXiv 2403.06764)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from export.stages.perception import Coverage, Diversity, Random, Uniform
from export.stages.shorten.shorten import Rows, Shorten, top
from export.stages.tokens import PADDING, TEXT

STAYS, GOES = 2.0, -1.0  # scores above and below any other
SELECTORS = {"diversity": Diversity(), "coverage": Coverage(), "random": Random(), "uniform": Uniform()}


@dataclass(eq=False)
class FastV(Shorten):
    """Behind the first `layer` decoder layers, keep the visual tokens that the prompt's end looked at in the last of
    them; of equal ones the first. What is dropped there is missing in every later layer, and in their KV caches.

    Or keep those that a selector of `[perception]` chooses by the hidden states: a second place for the same methods.
    How many visual tokens there are is not known when the graph is built, so a selector puts all rows in order, and the
    first visual ones count. The other rows are zero vectors to it: `diversity` begins with the first visual token, not
    the loneliest; `coverage` takes the prompt's last text for the question. Two selectors cannot work like that: `dart`
    shares out a number between its pivots, and `attention` wants to know where in its image a token lies. A greedy
    selector is a step a row in the graph.

    Attributes:
        layer: decoder layers that see the whole prompt, from 1. The paper's K = 2.
        keep: share of a bucket's rows that goes on, S' = round(keep * S); 1 drops nothing, without any work.
        queries: last rows of the prompt whose attention counts, summed; 1 is the paper's.
        by: attention, or a selector with its own defaults.
    """

    method: Literal["fastv"] = "fastv"
    layer: int = 2
    keep: float = 0.5
    queries: int = 1
    by: Literal["attention", "diversity", "coverage", "random", "uniform"] = "attention"

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
        # What a mean over the queries gives a row is at most 1.
        score = rows.attention / self.queries if self.by == "attention" else self._chosen(rows)
        score = torch.where(rows.fixed, STAYS, score)
        score = torch.where(rows.kinds == PADDING, GOES, score)
        return rows.take(top(score, self.lengths(score.shape[1])[-1]))

    def _chosen(self, rows: Rows) -> Tensor:
        """The higher, the earlier the selector chooses a row, from above 0 to 1, [batch, rows]."""
        selector, length = SELECTORS[self.by], rows.index.shape[1]
        guidance = []
        if isinstance(selector, Coverage):
            last = slice(-selector.question_tokens, None)
            guidance = [rows.hidden[:, last], (rows.kinds[:, last] == TEXT).float()]
        features = rows.hidden * ((rows.kinds != PADDING) & ~rows.fixed)[..., None]
        order = selector.choose(features, length, *guidance)  # [batch, choices]
        turns = torch.arange(length)
        return 1 - ((order[:, :, None] == turns).float() * turns[:, None]).sum(dim=1) / length

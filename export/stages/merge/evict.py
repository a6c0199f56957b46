"""Tokens beyond the capacity are dropped."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from export.stages.stage import Stage
from export.stages.tokens import Tokens


@dataclass(eq=False)
class Evict(Stage):
    """Nothing is merged."""

    method: Literal["evict"] = "evict"

    def forward(self, tokens: Tokens, kept: Tokens, index: Tensor) -> Tokens:
        return kept

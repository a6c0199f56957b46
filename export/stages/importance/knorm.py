"""Importance of short keys (arXiv 2406.11430)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from export.stages.importance.importance import Importance
from export.stages.tokens import Tokens


@dataclass(eq=False)
class KNorm(Importance):
    """Score of a cached token = minus the norm of its key, as the model made it: short keys tend to be looked at."""

    needs_mass: ClassVar[bool] = False

    method: Literal["knorm"] = "knorm"

    def forward(self, tokens: Tokens, depth: float) -> Tensor:
        return -tokens.plain_key.norm(dim=-1)

"""Importance of long values, half of VATP (arXiv 2406.12335)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from export.stages.importance.importance import Importance
from export.stages.tokens import Tokens


@dataclass(eq=False)
class ValueNorm(Importance):
    """Score of a cached token = the norm of its value, what any attention to it would fetch."""

    needs_mass: ClassVar[bool] = False

    method: Literal["value-norm"] = "value-norm"

    def forward(self, tokens: Tokens, depth: float) -> Tensor:
        return tokens.value.norm(dim=-1)

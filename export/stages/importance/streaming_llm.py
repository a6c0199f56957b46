"""Importance of recent tokens: StreamingLLM (arXiv 2309.17453)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from export.stages.importance.importance import Importance
from export.stages.tokens import Tokens


@dataclass(eq=False)
class StreamingLLM(Importance):
    """Score of a cached token = its original position; the attention sinks are for `protect` to keep."""

    needs_mass: ClassVar[bool] = False

    method: Literal["streaming-llm"] = "streaming-llm"

    def forward(self, tokens: Tokens, depth: float) -> Tensor:
        return tokens.positions.float()

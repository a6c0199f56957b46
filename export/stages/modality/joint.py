"""No budget per modality: text and visual tokens compete for the same slots by their scores."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from export.stages.modality.modality import Modality
from export.stages.tokens import Tokens


@dataclass(eq=False)
class Joint(Modality):
    """The score is the priority."""

    method: Literal["joint"] = "joint"

    def forward(self, score: Tensor, tokens: Tokens, capacity: int) -> Tensor:
        return score

"""Importance of unusual keys: KeyDiff (arXiv 2504.15364)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from export.stages.importance.importance import Importance, unit
from export.stages.tokens import Tokens


@dataclass(eq=False)
class KeyDiff(Importance):
    """Score of a cached token = minus the cosine of its key to the mean direction of all keys of its head.

    It looks at no query, hence needs no question. The keys are those of the model: centred ones have no mean direction.
    """

    needs_mass: ClassVar[bool] = False

    method: Literal["keydiff"] = "keydiff"

    def forward(self, tokens: Tokens, depth: float) -> Tensor:
        key = unit(tokens.plain_key)
        anchor = (key * tokens.real[..., None]).sum(dim=2, keepdim=True)  # its length does not matter
        return -(key * unit(anchor)).sum(dim=-1)

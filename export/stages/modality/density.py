"""Slots for text and visual tokens in proportion to the information that each holds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.nn.functional import normalize

from export.stages.modality.modality import Modality
from export.stages.ranking import rank
from export.stages.tokens import VISUAL, Tokens

SMALL = 1e-6  # keeps quotas above 0 where a modality has no token or only equal ones


@dataclass(eq=False)
class Density(Modality):
    """A modality's quota is proportional to its tokens times their density, 1 - mean cosine of two different keys.

    Within a modality the score decides: the token of rank r (from 0) gets the priority -(r + 1/2) / quota, so that the
    top-k takes as many of each modality as its quota says, rounded, whatever the scores' scales.

    Attributes:
        visual_cap, text_cap: largest share of the slots for a modality; what is over passes to the other.
        many: where more than this share of the tokens is visual, they hold most of what is redundant, ...
        many_keep: ... and at most this share of them is kept, as long as there are text tokens to fill the slots.
    """

    needs_kinds: ClassVar[bool] = True

    visual_cap: float = 0.8
    text_cap: float = 0.4
    many: float = 0.7
    many_keep: float = 0.5
    method: Literal["density"] = "density"

    def __post_init__(self) -> None:
        for name in ("visual_cap", "text_cap", "many", "many_keep"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} must be in [0, 1], got {getattr(self, name)}")
        if self.visual_cap + self.text_cap < 1:
            raise ValueError("visual_cap + text_cap must be at least 1, or slots stay empty")

    def forward(self, score: Tensor, tokens: Tokens, capacity: int) -> Tensor:
        visual = tokens.real & (tokens.kinds == VISUAL)
        text = tokens.real & ~visual
        for_visual = self.quota(tokens, visual, text, capacity)
        quota = torch.where(visual, for_visual, capacity - for_visual).clamp(min=SMALL)
        of_visual, of_text = rank(score, visual, text)
        return -(torch.where(visual, of_visual, of_text) + 0.5) / quota

    def quota(self, tokens: Tokens, visual: Tensor, text: Tensor, capacity: int) -> Tensor:
        """Slots for visual tokens, [batch, kv_heads, 1], float32; text has the rest.

        Args:
            visual, text: which tokens are, bool [batch, kv_heads, tokens].
        """
        unit = normalize(tokens.plain_key, dim=-1)
        visuals, texts = (chosen.sum(-1, keepdim=True).float() for chosen in (visual, text))
        of_visual, of_text = (_density(unit, chosen) * count for chosen, count in ((visual, visuals), (text, texts)))
        quota = capacity * of_visual / (of_visual + of_text).clamp(min=SMALL)
        quota = quota.clamp(capacity * (1 - self.text_cap), capacity * self.visual_cap)
        most = torch.where(visuals > self.many * (visuals + texts), self.many_keep * visuals, visuals)
        # A quota is no use to a modality that has fewer tokens; with that, what no other rule could fill is filled.
        return torch.minimum(quota, most).maximum(capacity - texts).minimum(visuals)


def _density(unit: Tensor, chosen: Tensor) -> Tensor:
    """1 - mean cosine between two different chosen tokens, above 0, [batch, kv_heads, 1]; 1 if there are no two.

    Args:
        unit: keys of length 1, [batch, kv_heads, tokens, head_dim].
        chosen: bool [batch, kv_heads, tokens].
    """
    # The sum over all pairs is the squared length of the sum: no tokens x tokens matrix is needed.
    unit = unit * chosen[..., None]
    count = chosen.sum(-1, keepdim=True).float()
    pairs = unit.sum(2).square().sum(-1, keepdim=True) - unit.square().sum((2, 3))[..., None]
    return (1 - pairs / (count * (count - 1)).clamp(min=1)).clamp(min=SMALL)

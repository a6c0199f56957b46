"""Text and visual tokens compressed at different rates, by the information that each holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.nn.functional import normalize

from engines.errors import UserError
from export.stages.modality.modality import Modality
from export.stages.ranking import rank
from export.stages.tokens import VISUAL, Tokens

SMALL = 1e-6  # keeps densities and quotas above 0


@dataclass(eq=False)
class Density(Modality):
    """A modality's compression rate, the share of its tokens that is dropped, is in proportion to the other's density.

    A density is 1 - mean cosine of two different keys: what says the same again is dropped first. Of visual and text
    densities d_v and d_t the rates are R_v ∝ d_t and R_t ∝ d_v, scaled so that together they drop what the capacity has
    no room for. No rate goes above its cap: what is over passes to the other modality. Where the capacity leaves room
    for less than both caps would keep, both rates rise from their caps, by the same share of what is left to keep.

    Within a modality the score decides: the token of rank r (from 0) gets the priority -(r + 1/2) / quota, so that the
    top-k takes as many of each modality as its quota says, rounded, whatever the scores' scales.

    Attributes:
        visual_cap, text_cap: highest compression rates.
        many: where more than this share of the tokens is visual, the visual rate ...
        many_rate: ... ends here, and text gives way, until text is at its own cap. Only the budget can hold the rate of
            all tokens here; to save more there, merge heads.
        visual_density, text_density: of each layer, as `python -m calibration modality` measures them, of values too;
            empty: of the keys at hand.
    """

    needs_kinds: ClassVar[bool] = True

    visual_cap: float = 0.8
    text_cap: float = 0.4
    many: float = 0.7
    many_rate: float = 0.5
    visual_density: list[float] = field(default_factory=list)
    text_density: list[float] = field(default_factory=list)
    method: Literal["density"] = "density"

    def __post_init__(self) -> None:
        for name in ("visual_cap", "text_cap", "many", "many_rate"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} must be in [0, 1], got {getattr(self, name)}")
        if len(self.visual_density) != len(self.text_density):
            raise ValueError("visual_density and text_density need a number for each layer, both of them")
        if not all(0 < known <= 2 for known in (*self.visual_density, *self.text_density)):
            raise ValueError("a density is 1 - mean cosine, above 0 and at most 2")

    def by_layer(self, layers: int) -> Sequence[Modality]:
        known = list(zip(self.visual_density, self.text_density, strict=True))
        if known and len(known) != layers:
            raise UserError(
                f"modality.visual_density has {len(known)} values, the model {layers} layers: calibrate for this model"
            )
        return [replace(self, visual_density=[v], text_density=[t]) for v, t in known] or super().by_layer(layers)

    def forward(self, score: Tensor, tokens: Tokens, capacity: int) -> Tensor:
        visual = tokens.real & (tokens.kinds == VISUAL)
        text = tokens.real & ~visual
        v, t = (chosen.sum(-1, keepdim=True).float() for chosen in (visual, text))
        if self.visual_density:
            dense_v, dense_t = (torch.full_like(v, known) for (known,) in (self.visual_density, self.text_density))
        else:
            unit = normalize(tokens.plain_key, dim=-1)
            dense_v, dense_t = (density(unit, chosen) for chosen in (visual, text))
        of_visual, of_text = self.quotas(v, t, dense_v, dense_t, capacity)
        visual_rank, text_rank = rank(score, visual, text)
        places = torch.where(visual, visual_rank, text_rank) + 0.5
        return -places / torch.where(visual, of_visual, of_text).clamp(min=SMALL)

    def quotas(self, v: Tensor, t: Tensor, dense_v: Tensor, dense_t: Tensor, capacity: float) -> tuple[Tensor, Tensor]:
        """How many visual and text tokens to keep of so many, by their densities; all float32 and of one shape."""
        drop = (v + t - capacity).clamp(min=0)
        share_v, share_t = v * dense_t, t * dense_v
        wanted = drop * share_v / (share_v + share_t).clamp(min=SMALL)

        most_v, most_t = self.visual_cap * v, self.text_cap * t
        over, left = (drop - most_v - most_t).clamp(min=0), v + t - most_v - most_t
        beyond = over * (v - most_v) / left.clamp(min=SMALL)
        gentle = torch.where(v > self.many * (v + t), self.many_rate * v, v)
        dropped = torch.minimum(wanted, gentle).maximum(drop - most_t).minimum(most_v + beyond)
        return v - dropped, t - (drop - dropped)


def density(unit: Tensor, chosen: Tensor) -> Tensor:
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

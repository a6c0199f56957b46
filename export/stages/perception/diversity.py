"""Visual-token pruning by diversity: DivPrune (arXiv 2503.02175), greedy max-min cosine distance."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import normalize

from export.stages.perception.perception import Perception


@dataclass(eq=False)
class Diversity(Perception):
    """Keep the visual tokens that lie farthest from one another.

    The first token is the one whose nearest neighbour is farthest; each next one maximises the distance to the nearest
    token already kept. Needs no question.
    """

    method: Literal["diversity"] = "diversity"

    def choose(self, features: Tensor, count: int) -> Tensor:
        unit = normalize(features.float(), dim=-1)
        distance = (1 - unit @ unit.transpose(1, 2)).clamp(min=0)
        # A kept token's distance to itself is -1: it can never be the farthest again, even among equal tokens.
        itself = torch.eye(features.shape[1], dtype=torch.bool)
        nearest = torch.where(itself, torch.inf, distance).amin(dim=1)
        distance = torch.where(itself, -1.0, distance)
        kept = [nearest.argmax(dim=1, keepdim=True)]
        nearest = _row(distance, kept[0])
        for _ in range(count - 1):
            kept.append(nearest.argmax(dim=1, keepdim=True))
            nearest = torch.minimum(nearest, _row(distance, kept[-1]))
        return torch.cat(kept, dim=1)


def _row(distance: Tensor, index: Tensor) -> Tensor:
    """Row `index` [batch, 1] of `distance` [batch, tokens, tokens] -> [batch, tokens]."""
    return distance.gather(1, index[:, :, None].expand(-1, -1, distance.shape[2]))[:, 0]

"""Visual-token pruning by diversity: DivPrune (arXiv 2503.02175), greedy max-min cosine distance."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from export.stages.stage import Stage


@dataclass(eq=False)
class Diversity(Stage):
    """Keep the visual tokens that lie farthest from one another.

    The first token is the one whose nearest neighbour is farthest; each next one maximises the distance to the nearest
    token already kept. Ties go to the lowest index. Needs no question.

    Attributes:
        keep: share of an image's tokens that enters the language model, in (0, 1]; 1 keeps all, without any work.
    """

    keep: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.keep <= 1:
            raise ValueError(f"keep must be in (0, 1], got {self.keep}")

    def count(self, tokens: int) -> int:
        """Tokens kept of `tokens`; never fewer than one."""
        return max(1, round(self.keep * tokens))

    def forward(self, features: Tensor) -> Tensor:
        """Choose tokens.

        Args:
            features: visual tokens, [batch, tokens, hidden_size].

        Returns:
            Indices of the kept tokens, ascending, [batch, kept], int64.
        """
        batch, tokens, _ = features.shape
        if self.count(tokens) == tokens:
            return torch.arange(tokens).expand(batch, -1)
        unit = torch.nn.functional.normalize(features.float(), dim=-1)
        distance = (1 - unit @ unit.transpose(1, 2)).clamp(min=0)
        # A kept token's distance to itself is -1: it can never be the farthest again, even among equal tokens.
        itself = torch.eye(tokens, dtype=torch.bool)
        nearest = torch.where(itself, torch.inf, distance).amin(dim=1)
        distance = torch.where(itself, -1.0, distance)
        kept = [nearest.argmax(dim=1, keepdim=True)]
        nearest = _row(distance, kept[0])
        for _ in range(self.count(tokens) - 1):
            kept.append(nearest.argmax(dim=1, keepdim=True))
            nearest = torch.minimum(nearest, _row(distance, kept[-1]))
        return torch.cat(kept, dim=1).sort(dim=1).values


def _row(distance: Tensor, index: Tensor) -> Tensor:
    """Row `index` [batch, 1] of `distance` [batch, tokens, tokens] -> [batch, tokens]."""
    return distance.gather(1, index[:, :, None].expand(-1, -1, distance.shape[2]))[:, 0]

"""Visual-token pruning by duplication: DART, "duplication matters more" (arXiv 2502.11494)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import normalize

from export.stages.perception.perception import TAKEN, Perception, best


@dataclass(eq=False)
class Dart(Perception):
    """Keep a few pivots, and of the other tokens those that duplicate a pivot least.

    The duplication of a token by a pivot is their cosine similarity. As in the authors' code, pivots are the tokens of
    the largest L1 norm, and each pivot in turn takes an equal share of the tokens still to keep, those least similar
    to it among the ones not yet taken. What differs: the paper prunes behind the second decoder layer, measures the
    norms there on the keys and has text tokens as pivots too; here it prunes before the decoder, by the visual tokens
    alone, and needs no question. First choice are the pivots, then the least similar token of each, and so on.

    Attributes:
        pivots: fewer if not so many tokens are kept.
    """

    method: Literal["dart"] = "dart"
    pivots: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.pivots < 1:
            raise ValueError(f"pivots must be at least 1, got {self.pivots}")

    def choose(self, features: Tensor, count: int) -> Tensor:
        features = features.float()
        pivots = best(features.abs().sum(dim=2), min(self.pivots, count))  # [batch, pivots]
        unit = normalize(features, dim=2)
        heads = unit.gather(1, pivots[..., None].expand(-1, -1, unit.shape[2]))
        novelty = -heads @ unit.mT  # [batch, pivots, tokens]
        taken = torch.zeros(features.shape[:2]).scatter(1, pivots, TAKEN)
        share, more = divmod(count - pivots.shape[1], pivots.shape[1])
        shares = []
        for pivot in range(pivots.shape[1]):
            shares.append(best(novelty[:, pivot] + taken, share + (pivot < more)))
            taken = taken.scatter(1, shares[-1], TAKEN)
        turns = [mine[:, turn : turn + 1] for turn in range(share + 1) for mine in shares if turn < mine.shape[1]]
        return torch.cat([pivots, *turns], dim=1)

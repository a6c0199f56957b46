"""The interface of perception: which of an image's visual tokens enter the language model."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from export.stages.stage import Stage


@dataclass(eq=False)
class Perception(Stage):
    """Base of the selectors of visual tokens. A subclass implements `choose`.

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
            features: visual tokens as the language model gets them, [batch, tokens, hidden_size].

        Returns:
            Indices of the kept tokens, ascending, [batch, kept], int64.
        """
        batch, tokens, _ = features.shape
        count = self.count(tokens)
        if count == tokens:
            return torch.arange(tokens).expand(batch, -1)
        return self.choose(features, count).sort(dim=1).values

    def choose(self, features: Tensor, count: int) -> Tensor:
        """Indices of `count` different tokens in any order, [batch, count], int64; ties go to the lowest index.

        Args:
            features: [batch, tokens, hidden_size] with more than `count` tokens.
        """
        raise NotImplementedError

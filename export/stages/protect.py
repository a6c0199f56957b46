"""Tokens that are never dropped (attention sinks: StreamingLLM, arXiv 2309.17453), and slots that hold none."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from export.stages.stage import Stage

PROTECTED = 1e30  # above any score, finite so that no arithmetic on it can give NaN
EMPTY = -1e30  # below any score: padding is never kept while a real token is dropped


@dataclass(eq=False)
class Protect(Stage):
    """Lift the sinks above every score. The most recent tokens need no lifting: they stay in the window.

    Attributes:
        sinks: first tokens of the sequence, by original position.
    """

    sinks: int = 4

    def __post_init__(self) -> None:
        if self.sinks < 0:
            raise ValueError(f"sinks must be at least 0, got {self.sinks}")

    def forward(self, score: Tensor, positions: Tensor, bias: Tensor) -> Tensor:
        """Final priorities for the selection.

        Args:
            score: [batch, kv_heads, tokens], float32.
            positions: original positions, [batch, kv_heads, tokens], int32.
            bias: 0 or log(n) where a token is, -inf where none is, [batch, kv_heads, tokens], float32.

        Returns:
            [batch, kv_heads, tokens], float32, finite.
        """
        score = torch.where(positions < self.sinks, PROTECTED, score)
        return torch.where(bias < -1e4, EMPTY, score)

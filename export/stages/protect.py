"""Tokens that are never dropped: sinks and the last ones (StreamingLLM, arXiv 2309.17453), edges, sentence starts."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import max_pool1d

from export.stages.ranking import rank
from export.stages.stage import Stage
from export.stages.tokens import VISUAL, Tokens

PROTECTED = 1e30  # above any score, finite so that no arithmetic on it can give NaN
EMPTY = -1e30  # below any score: padding is never kept while a real token is dropped


@dataclass(eq=False)
class Protect(Stage):
    """Lift some of the tokens to choose from above every score.

    The number kept is the capacity's, whatever is protected. Where not all that is protected fits, sinks, recent tokens
    and separators come first, in their order, then the sentences' first tokens by their score.

    Attributes:
        sinks: first tokens of the sequence, by original position.
        recent: last tokens before the window. The end of a question may carry what it asks, but in a small store they
            take the place of others: models differ.
        recent_depth: share of the layers, from the shallowest, in which `recent` holds. Deep layers look at the image
            more than at the question.
        separators: tokens on either side of a change between text and image, where words refer to what they stand
            beside. Where tokens in between were dropped, those that are left count.
        sentence_first: whether the first token of every sentence is protected: attention gathers what a sentence said
            there, or on its end. An answer's sentences count as well.
    """

    sinks: int = 4
    recent: int = 4
    recent_depth: float = 1.0
    separators: int = 0
    sentence_first: bool = False

    def __post_init__(self) -> None:
        for name in ("sinks", "recent", "separators"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be at least 0, got {getattr(self, name)}")
        if not 0 <= self.recent_depth <= 1:
            raise ValueError(f"recent_depth must be in [0, 1], got {self.recent_depth}")

    @property
    def needs_kinds(self) -> bool:  # type: ignore[override]
        return self.separators > 0 or self.sentence_first

    @property
    def needs_segments(self) -> bool:  # type: ignore[override]
        return self.sentence_first

    def forward(self, score: Tensor, tokens: Tokens, depth: float) -> Tensor:
        """Final priorities for the selection.

        Args:
            score: [batch, kv_heads, tokens], float32.
            tokens: the tokens to choose from.
            depth: of the layer, from 0 (the first) to below 1.

        Returns:
            [batch, kv_heads, tokens], float32, finite.
        """
        recent = self.recent if depth < self.recent_depth else 0
        positions = tokens.positions
        newest = positions.amax(dim=-1, keepdim=True)
        protected = (positions < self.sinks) | (positions > newest - recent)
        if self.separators:
            protected = protected | self._beside_the_other(tokens)
        if self.sentence_first:
            (place,) = rank(score, tokens.real)
            score = torch.where(tokens.first, score.shape[-1] - place, -place)
        return torch.where(tokens.real, torch.where(protected, PROTECTED, score), EMPTY)

    def _beside_the_other(self, tokens: Tokens) -> Tensor:
        """Text within `separators` slots of visual tokens and the reverse, bool [batch, kv_heads, tokens]."""
        visual = tokens.kinds == VISUAL
        near_visual, near_text = (
            max_pool1d(kind.float(), 2 * self.separators + 1, stride=1, padding=self.separators) > 0
            for kind in (tokens.real & visual, tokens.real & ~visual)
        )
        return (visual & near_text) | (~visual & near_visual)  # ONNX Runtime has no Where of booleans

"""The interface of perception: which of an image's visual tokens enter the language model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from export.stages.stage import Stage

TAKEN = -1e4  # added to the score of a token that is kept already; finite for float16


@dataclass(eq=False)
class Perception(Stage):
    """Base of the selectors of visual tokens. A subclass implements `choose`.

    Every image is pruned alone, to the same number of tokens, so that a graph's shapes do not depend on the prompt.

    Attributes:
        keep: share of an image's tokens that enters the language model, in (0, 1]; 1 keeps all, without any work.
        floor: tokens kept at least, if an image has so many: what a low-resolution image cannot do without.
        needs_question: whether it looks at the question; such a selector is a `Guided` one.
    """

    keep: float = 1.0
    floor: int = 1
    needs_question: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not 0 < self.keep <= 1:
            raise ValueError(f"keep must be in (0, 1], got {self.keep}")
        if self.floor < 1:
            raise ValueError(f"floor must be at least 1, got {self.floor}")

    def count(self, tokens: int) -> int:
        """Tokens kept of `tokens`."""
        return min(max(self.floor, round(self.keep * tokens)), tokens)

    def forward(self, features: Tensor, question: Tensor | None = None, asked: Tensor | None = None) -> Tensor:
        """Choose tokens.

        Args:
            features: visual tokens as the language model gets them, [batch, tokens, hidden_size].
            question: embeddings of the question's tokens, padded, [batch, question_tokens, hidden_size].
            asked: 1 for a token of the question, 0 for padding, [batch, question_tokens], float32. All 0: there is no
                question yet.

        Returns:
            Indices of the kept tokens, ascending, [batch, kept], int64.
        """
        batch, tokens, _ = features.shape
        count = self.count(tokens)
        if count == tokens:
            return torch.arange(tokens).expand(batch, -1)
        guidance = (question, asked) if self.needs_question else ()
        return self.choose(features, count, *guidance).sort(dim=1).values

    def choose(self, features: Tensor, count: int, *args: Any, **kwargs: Any) -> Tensor:
        """Indices of `count` different tokens in any order, [batch, count], int64; ties go to the lowest index.

        Args:
            features: [batch, tokens, hidden_size] with more than `count` tokens.
            args: `question` and `asked` where the selector `needs_question`, else nothing.
        """
        raise NotImplementedError


@dataclass(eq=False)
class Guided(Perception):
    """Base of the selectors that look at the question.

    Attributes:
        question_tokens: the question's last tokens, as many as the graph takes; a shorter one is padded.
    """

    needs_question: ClassVar[bool] = True
    question_tokens: int = 32

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.question_tokens < 1:
            raise ValueError(f"question_tokens must be at least 1, got {self.question_tokens}")

    def choose(self, features: Tensor, count: int, question: Tensor, asked: Tensor) -> Tensor:
        raise NotImplementedError


def best(score: Tensor, count: int) -> Tensor:
    """The `count` highest of `score` [batch, tokens], best first, the lowest index among equals, [batch, count]."""
    # By rank, which no two tokens share: PyTorch's topk breaks ties as it likes, and its stable sort has no ONNX form.
    mine, other, order = score[:, :, None], score[:, None, :], torch.arange(score.shape[1])
    earlier = order[None, :] < order[:, None]
    rank = ((other > mine) | ((other == mine) & earlier)).float().sum(dim=2)
    return rank.topk(count, dim=1, largest=False).indices

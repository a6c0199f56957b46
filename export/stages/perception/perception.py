"""The interface of perception: which of an image's visual tokens enter the language model."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from export.stages.stage import Stage

TAKEN = -1e4  # added to the score of a token that is kept already; finite for float16


@dataclass(eq=False)
class Perception(Stage):
    """Base of the selectors of visual tokens. A subclass implements `choose`.

    The graph prunes every image alone, to the same number of tokens, so that its shapes do not depend on the prompt.
    It is *adaptive* with `buckets` or a `quota`: then it returns the tokens with their order of choice, and the runtime
    (engines/visual_counts.py) takes the first of them, as many as the image needs.

    Attributes:
        keep: share of an image's tokens that enters the language model, in (0, 1]; 1 keeps all, without any work. The
            most that enters if it is adaptive.
        floor: tokens kept at least, if an image has so many. It is a number and not a share, since a low-resolution
            image has few tokens and each says much: what is redundant in 576 tokens is not in 64.
        buckets: smaller shares than `keep`, of which an image gets the smallest whose coverage is enough; or by the
            recipe's `gate` and `fallback`, where it has one.
        coverage: what is enough: mean over all tokens of an image of the highest cosine to a kept one, in (0, 1].
        quota: share of their tokens that all images of a prompt keep together: more of an image that is hard to cover,
            less of an easy one, and of all what the longest prompt has room for. None: each image for itself.
        needs_question: whether it looks at the question; such a selector is a `Guided` one.
    """

    keep: float = 1.0
    floor: int = 1
    _: KW_ONLY
    buckets: tuple[float, ...] = ()
    coverage: float = 0.9
    quota: float | None = None
    needs_question: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not 0 < self.keep <= 1:
            raise ValueError(f"keep must be in (0, 1], got {self.keep}")
        if self.floor < 1:
            raise ValueError(f"floor must be at least 1, got {self.floor}")
        if not all(0 < share <= self.keep for share in self.buckets):
            raise ValueError(f"buckets must be in (0, {self.keep}], what keep allows, got {list(self.buckets)}")
        if not 0 < self.coverage <= 1:
            raise ValueError(f"coverage must be in (0, 1], got {self.coverage}")
        if self.quota is not None and not 0 < self.quota <= self.keep:
            raise ValueError(f"quota must be in (0, {self.keep}], what keep allows, got {self.quota}")

    @property
    def adaptive(self) -> bool:
        """Whether the runtime decides how many tokens an image keeps."""
        return bool(self.buckets) or self.quota is not None

    def count(self, tokens: int, share: float | None = None) -> int:
        """Tokens kept of `tokens`, the most if it is adaptive; or as many as a share of them is."""
        return min(max(self.floor, round((self.keep if share is None else share) * tokens)), tokens)

    def counts(self, tokens: int) -> list[int]:
        """The numbers of tokens that an image may keep, ascending."""
        return sorted({self.count(tokens, share) for share in (*self.buckets, self.keep)})

    def forward(self, features: Tensor, *guidance: Tensor, **more: Tensor) -> Tensor:
        """Indices of the kept tokens, ascending, [batch, kept], int64; arguments as in `order`."""
        tokens = features.shape[1]
        if self.count(tokens) == tokens:
            return torch.arange(tokens).expand(features.shape[0], -1)
        return self.order(features, *guidance, **more).sort(dim=1).values

    def order(
        self,
        features: Tensor,
        question: Tensor | None = None,
        asked: Tensor | None = None,
        attention: Tensor | None = None,
    ) -> Tensor:
        """Choose tokens.

        Args:
            features: visual tokens as the language model gets them, [batch, tokens, hidden_size].
            question: embeddings of the question's tokens, padded, [batch, question_tokens, hidden_size].
            asked: 1 for a token of the question, 0 for padding, [batch, question_tokens], float32. All 0: there is no
                question yet.
            attention: what the decoder's chosen layers attend to, [batch, tokens]; for a selector that asks for it.

        Returns:
            Indices of the kept tokens, first choice first, [batch, kept], int64.
        """
        guidance: tuple[Tensor | None, ...] = (question, asked) if self.needs_question else ()
        guidance += () if attention is None else (attention,)
        return self.choose(features, self.count(features.shape[1]), *guidance)

    def choose(self, features: Tensor, count: int, *args: Any, **kwargs: Any) -> Tensor:
        """Indices of `count` different tokens, first choice first, [batch, count], int64; ties go to the lowest index.

        Args:
            features: [batch, tokens, hidden_size] with at least `count` tokens.
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

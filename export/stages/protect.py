"""Tokens that are never dropped (sinks and the last ones are StreamingLLM's, arXiv 2309.17453), or at a lower rate."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import max_pool1d

from export.stages.importance.importance import Observation, group_mean
from export.stages.ranking import rank
from export.stages.stage import Stage
from export.stages.tokens import TEXT, VISUAL, Tokens

PROTECTED = 1e30  # above any score, finite so that no arithmetic on it can give NaN
EMPTY = -1e30  # below any score: padding is never kept while a real token is dropped
SMALL = 1e-6  # divisors where there is nothing to divide


@dataclass(eq=False)
class Protect(Stage):
    """Lift some of the tokens to choose from above every score, and drop fewer of those that align text and image.

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
        discount: an alignment token is dropped at this share of the rate of the others of its modality; 1 treats all
            alike. It costs a second look at the whole attention matrix in prefill.
        alignment: a text token aligns if more than this share of the attention that it pays goes to visual tokens, a
            visual one if more than this share of what it receives comes from text. Found in prefill, for each head; a
            token of the answer has no part in it, nor has one that prefill leaves in the window.
    """

    sinks: int = 4
    recent: int = 4
    recent_depth: float = 1.0
    separators: int = 0
    sentence_first: bool = False
    discount: float = 1.0
    alignment: float = 0.3

    def __post_init__(self) -> None:
        for name in ("sinks", "recent", "separators"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be at least 0, got {getattr(self, name)}")
        for name in ("recent_depth", "discount", "alignment"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} must be in [0, 1], got {getattr(self, name)}")

    @property
    def needs_kinds(self) -> bool:  # type: ignore[override]
        return self.separators > 0 or self.sentence_first or self.aligns

    @property
    def needs_segments(self) -> bool:  # type: ignore[override]
        return self.sentence_first

    @property
    def aligns(self) -> bool:
        """Whether alignment tokens matter, so that `aligned` must be asked for them."""
        return self.discount < 1

    def aligned(self, seen: Observation) -> Tensor:
        """Which tokens align text and image, bool [batch, kv_heads, tokens].

        Args:
            seen: what every token of the prompt looks at, `queries` = `tokens`.
        """
        attention = group_mean(seen.attention)  # [B, Hkv, queries, tokens]
        text, visual = ((seen.kinds == kind).float()[:, None, :, None] for kind in (TEXT, VISUAL))
        pays = (attention @ visual)[..., 0]  # a query's attention sums to one
        share = (attention.mT @ text)[..., 0] / attention.sum(dim=2).clamp(min=SMALL)
        return torch.where((seen.kinds == VISUAL)[:, None], share, pays) > self.alignment

    def forward(self, score: Tensor, tokens: Tokens, depth: float, capacity: int) -> Tensor:
        """Final priorities for the selection of the `capacity` highest.

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
        if self.sentence_first or self.aligns:
            score = self._by_rank(score, tokens, protected, capacity)
        return torch.where(tokens.real, torch.where(protected, PROTECTED, score), EMPTY)

    def _beside_the_other(self, tokens: Tokens) -> Tensor:
        """Text within `separators` slots of visual tokens and the reverse, bool [batch, kv_heads, tokens]."""
        visual, reach = tokens.kinds == VISUAL, min(self.separators, tokens.kinds.shape[-1])
        near_visual, near_text = (
            max_pool1d(kind.float(), 2 * reach + 1, stride=1, padding=reach) > 0
            for kind in (tokens.real & visual, tokens.real & ~visual)
        )
        return (visual & near_text) | (~visual & near_visual)  # ONNX Runtime has no Where of booleans

    def _by_rank(self, score: Tensor, tokens: Tokens, protected: Tensor, capacity: int) -> Tensor:
        """Priorities above 0 for the first tokens of sentences, below 0 for what competes for the slots that are left.

        A modality loses as many of these as it would by the scores alone; its alignment tokens lose `discount` times
        the others' share. Within a group the score decides: rank r (from 0) of a quota q has the priority
        -(r + 1/2) / q, so that the highest fill every group's quota, rounded.
        """
        first = tokens.first & tokens.real & ~protected
        free = tokens.real & ~protected & ~first
        groups = [
            (free & (tokens.kinds == kind) & ~tokens.aligned, free & (tokens.kinds == kind) & tokens.aligned)
            for kind in (TEXT, VISUAL)
        ]
        of_first, of_free, *of_groups = rank(score, first, free, *(group for pair in groups for group in pair))
        slots = capacity - (tokens.real & ~free).sum(dim=-1, keepdim=True)
        result = torch.where(first, score.shape[-1] - of_first, -of_free)
        if not self.aligns:
            return result
        for pair, ranks in zip(groups, (of_groups[:2], of_groups[2:]), strict=True):
            either = pair[0] | pair[1]
            others, aligned = (group.sum(dim=-1, keepdim=True).float() for group in pair)
            lost = (either & (of_free >= slots)).sum(dim=-1, keepdim=True).float()
            # At a rate x they lose others * x + aligned * discount * x; what the others do not have, the aligned give.
            its = self.discount * aligned * lost / (others + self.discount * aligned).clamp(min=SMALL)
            its = its.maximum(lost - others)
            for group, place, quota in zip(pair, ranks, (others - (lost - its), aligned - its), strict=True):
                result = torch.where(group, -(place + 0.5) / quota.clamp(min=SMALL), result)
        return result

"""Four signals in one score: attention, cross-modal attention, redundancy and recency."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from export.stages.importance.importance import Observation, Windowed, count_of_tokens, group_mean, pool, unit
from export.stages.tokens import TEXT, VISUAL, Tokens

WEIGHTS = ("attention", "cross_modal", "redundancy", "recency", "shallow_redundancy", "deep_attention")
MOST_WEIGHT = 1e6


@dataclass(eq=False)
class Signals(Windowed):
    """Score of a cached token = w_a·attention + w_c·cross-modal - w_d·redundancy + w_r·recency.

    The observers are the text queries of the window (all of it, in a prompt that ends with more visual tokens than
    that) and every decoded token.

    - attention: received from them, times the value's norm, pooled; as a share of the largest of the same modality and
      head, or text would always outweigh visual tokens.
    - cross-modal: the attention alone, neither weighted nor pooled, as such a share; of visual tokens only, since the
      observers are text. (What visual queries pay to text is not counted: the prompt's visual tokens come before the
      question, and mass is one number a token.)
    - redundancy: mean cosine of the key, as the model made it, to the keys in the `neighbours` slots before and after
      it; empty slots do not count, and a token without neighbours has none.
    - recency: original position divided by the newest.

    Attributes:
        attention, cross_modal, redundancy, recency: the weights w_a, w_c, w_d, w_r.
        shallow_redundancy: w_d in the first third of the layers, whose keys are more alike.
        deep_attention: w_a in the last third, whose attention says more about the meaning.
        neighbours: slots on either side.
    """

    needs_kinds: ClassVar[bool] = True

    attention: float = 0.4
    cross_modal: float = 0.3
    redundancy: float = 0.2
    recency: float = 0.1
    shallow_redundancy: float = 0.3
    deep_attention: float = 0.5
    neighbours: int = 4
    method: Literal["signals"] = "signals"

    def __post_init__(self) -> None:
        super().__post_init__()
        count_of_tokens("neighbours", self.neighbours)
        for name in WEIGHTS:
            if not abs(weight := getattr(self, name)) <= MOST_WEIGHT:  # a protected token stays above any score
                raise ValueError(f"{name} must be from -{MOST_WEIGHT:g} to {MOST_WEIGHT:g}, got {weight}")

    def observe(self, seen: Observation) -> Tensor:
        seen = seen.only(seen.kinds[:, -seen.visible.shape[1] :] == TEXT)
        return seen.averaged(group_mean(seen.attention))

    def forward(self, tokens: Tokens, depth: float) -> Tensor:
        attention = self.deep_attention if depth >= 2 / 3 else self.attention
        redundancy = self.shallow_redundancy if depth < 1 / 3 else self.redundancy
        cross_modal = _share(tokens.mass, tokens) * (tokens.kinds == VISUAL)
        newest = tokens.positions.amax(dim=-1, keepdim=True).clamp(min=1)
        return (
            attention * _share(self.smoothed(tokens), tokens)
            + self.cross_modal * cross_modal
            - redundancy * self._redundancy(tokens)
            + self.recency * tokens.positions / newest
        )

    def _redundancy(self, tokens: Tokens) -> Tensor:
        """[batch, kv_heads, tokens]: the mean of a key's cosines is its product with the neighbours' mean unit key."""
        real, width = tokens.real, 2 * self.neighbours + 1
        key = unit(tokens.plain_key) * real[..., None]
        around = pool(key.flatten(0, 1).mT, width).mT.reshape(key.shape) * width - key
        number = pool(real.float(), width) * width - real.float()
        return (key * around).sum(dim=-1) / number.clamp(min=1)


def _share(received: Tensor, tokens: Tokens) -> Tensor:
    """`received` [batch, kv_heads, tokens] divided by the largest of a token's modality."""
    largest = torch.ones_like(received)
    for kind in (TEXT, VISUAL):
        same = tokens.kinds == kind
        largest = torch.where(same, torch.where(same, received, 0.0).amax(dim=-1, keepdim=True), largest)
    return received / largest.clamp(min=1e-12)

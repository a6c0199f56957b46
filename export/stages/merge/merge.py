"""The interface of merging, and the merging itself: dropped tokens live on in the kept ones that resemble them."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.nn.functional import normalize

from export.stages.stage import Stage
from export.stages.tokens import VISUAL, Tokens

NEVER = -2.0  # below any cosine: no kept token of the same modality
TINY = 1e-30  # divisors of empty slots, whose dividends are 0


@dataclass
class Nearest:
    """Of every token, the kept token of its modality whose key has the highest cosine; of equal ones the first.

    Attributes:
        cosine: of the plain keys, [batch, kv_heads, tokens], float32; `NEVER` if nothing kept is of its modality.
        slot: among the kept, [batch, kv_heads, tokens], int64.
    """

    cosine: Tensor
    slot: Tensor


@dataclass(eq=False)
class Merge(Stage):
    """Base of the merges. A subclass implements `chosen` and `weights`.

    Keys and values move by one assignment, or they would no longer belong together. The merged value is the weighted
    mean; the biases add up as counts, log Σ exp(bias), so that softmax gives the slot as much as its tokens together,
    were their keys equal; the masses add up. Slots that receive nothing stay as they are, to the bit: a store may be
    compacted any number of times. (Its bias is float16: beyond some 500 tokens in a slot, one more is below half a step
    of log(n) and no longer counts.)

    The assignment is a product with a one-hot matrix [batch, kv_heads, capacity, tokens]: no Scatter, and no more
    memory than the prefill's own attention.

    Attributes:
        keys: a merged key is the kept token's own, as RoPE turned it to its position, or the weighted mean, rescaled to
            the kept key's norm.
    """

    needs_kinds: ClassVar[bool] = True

    keys: Literal["own", "mean"] = "own"

    def chosen(self, tokens: Tokens, kept: Tokens, nearest: Nearest, dropped: Tensor) -> Tensor:
        """Which of the dropped tokens are merged into their nearest kept one, bool [batch, kv_heads, tokens].

        Args:
            dropped: real tokens that were not kept and have a nearest one, bool [batch, kv_heads, tokens].
        """
        raise NotImplementedError

    def weights(self, tokens: Tokens, kept: Tokens, nearest: Nearest) -> tuple[Tensor, Tensor]:
        """What tokens weigh in the mean, above 0 where real: [batch, kv_heads, tokens], [batch, kv_heads, capacity]."""
        raise NotImplementedError

    def forward(self, tokens: Tokens, kept: Tokens, index: Tensor) -> Tokens:
        """The kept tokens, dropped ones merged into them.

        Args:
            tokens: all that there were.
            kept: the capacity's choice of them.
            index: their places among `tokens`, [batch, kv_heads, capacity], int64.
        """
        nearest = _nearest(tokens, kept)
        every, slots = torch.arange(tokens.key.shape[2]), torch.arange(kept.key.shape[2])
        gone = (index[..., None] == every).float().sum(dim=2) == 0
        chosen = self.chosen(tokens, kept, nearest, gone & tokens.real & (nearest.cosine > NEVER))
        into = (nearest.slot[..., None, :] == slots[:, None]) & chosen[..., None, :]  # [B, H, capacity, tokens]

        weight, own = self.weights(tokens, kept, nearest)
        moved = into * weight[..., None, :]
        part = moved / (moved.sum(-1) + own).clamp(min=TINY)[..., None]  # of every merged token in its slot's mean
        key = kept.key
        if self.keys == "mean":
            turned = _mean(kept.plain_key, part, tokens.plain_key)
            length = kept.plain_key.norm(dim=-1, keepdim=True) / turned.norm(dim=-1, keepdim=True).clamp(min=TINY)
            key = key + (turned * length - kept.plain_key)
        return dataclasses.replace(
            kept,
            key=key,
            value=_mean(kept.value, part, tokens.value),
            bias=kept.bias + torch.log1p((into * count(tokens)[..., None, :]).sum(-1) / count(kept).clamp(min=TINY)),
            mass=kept.mass + (into * tokens.mass[..., None, :]).sum(-1),
        )


def count(tokens: Tokens) -> Tensor:
    """How many tokens each slot stands for, 0 where it is empty, [batch, kv_heads, tokens], float32."""
    return tokens.bias.exp()


def _nearest(tokens: Tokens, kept: Tokens) -> Nearest:
    cosine = normalize(kept.plain_key, dim=-1) @ normalize(tokens.plain_key, dim=-1).mT  # [B, H, capacity, tokens]
    same = (kept.kinds == VISUAL)[..., None] == (tokens.kinds == VISUAL)[..., None, :]
    return Nearest(*torch.where(same & kept.real[..., None], cosine, NEVER).max(dim=2))


def _mean(own: Tensor, part: Tensor, rows: Tensor) -> Tensor:
    """Rows [batch, kv_heads, tokens, head_dim] mixed into a slot's own by their parts [.., capacity, tokens] in it."""
    return own * (1 - part.sum(-1, keepdim=True)) + part @ rows

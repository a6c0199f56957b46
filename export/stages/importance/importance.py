"""The interface of importance: what a cached token is worth."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from export.attention import attention_logits
from export.stages.stage import Stage
from export.stages.tokens import Tokens

MOST_TOKENS = 65_536  # that a knob may count: more than any prompt has


@dataclass
class Observation:
    """What the last `queries` tokens of a prompt look at in one layer.

    Attributes:
        query: after RoPE, [batch, heads, queries, head_dim].
        key: after RoPE, centred, [batch, kv_heads, tokens, head_dim]; the queries are the last of these tokens.
        bias: added to the logits, finite, [batch, queries, tokens].
        visible: which query may look at which token, both real and causal, bool [batch, queries, tokens].
        kinds: of the tokens, [batch, tokens], int32.
        scale: softmax scale.
        center: what was subtracted from the keys, [kv_heads, 1, head_dim]; None if nothing was.
        positions: original positions of the tokens, [batch, tokens], int32; -1 where empty.
        rotary: the model's RoPE: positions [batch, n] or position ids -> cos and sin, [batch, n, head_dim].
        position_ids: of M-RoPE, [3, batch, tokens]; None: the positions.
    """

    query: Tensor
    key: Tensor
    bias: Tensor
    visible: Tensor
    kinds: Tensor
    scale: float
    center: Tensor | None = None
    positions: Tensor | None = None
    rotary: Callable[[Tensor], tuple[Tensor, Tensor]] | None = None
    position_ids: Tensor | None = None

    @cached_property
    def attention(self) -> Tensor:
        """Softmax weights, 0 in the rows of padding queries, [batch, kv_heads, group, queries, tokens], float32."""
        logits = attention_logits(self.query, self.key, self.scale).float() + self.bias[:, None, None]
        real = self.visible.any(dim=-1)[:, None, None, :, None]
        return logits.softmax(dim=-1) * real

    def only(self, chosen: Tensor) -> Observation:
        """The same by some of the queries, bool [batch, queries]; by all of them in a row that has none of these."""
        chosen = chosen | ~chosen.any(dim=1, keepdim=True)
        return replace(self, visible=self.visible & chosen[..., None])

    def averaged(self, received: Tensor) -> Tensor:
        """Sum over the queries, as if every query could see every token.

        A token among the observing queries is seen by the later ones only; its sum is scaled up to all of them, or the
        end of the question would always look unimportant.

        Args:
            received: per query, [batch, kv_heads, queries, tokens].

        Returns:
            [batch, kv_heads, tokens].
        """
        observers = self.visible.sum(dim=1)  # of each token, [batch, tokens]
        queries = self.visible.any(dim=-1).sum(dim=1, keepdim=True)
        return received.sum(dim=2) * (queries / observers.clamp(min=1))[:, None]


class Importance(Stage):
    """Base of the importance measures. A subclass implements `forward`, and what it counts of the attention.

    The counting ("mass") begins in prefill with `observe`, goes on with `update` at every token that is decoded or read
    later, and travels with the token; `forward` turns it into a score when the store is filled or compacted.
    """

    needs_mass: ClassVar[bool] = True
    by_query: ClassVar[bool] = False  # whether `update` must see every token's attention, or their sum will do

    def observers(self, length: int) -> int:
        """How many of the last queries of a prompt of `length` tokens `observe` wants to see; 0: none, mass stays 0."""
        return 0

    def observe(self, seen: Observation) -> Tensor:
        """What every token of the prompt received, [batch, kv_heads, tokens], float32; 0 where there is no token."""
        raise NotImplementedError

    def update(self, mass: Tensor, received: Tensor, row: tuple[Tensor, ...], queries: int | Tensor = 1) -> Tensor:
        """Count the attention of one token that was decoded, or of several that were read at once.

        Args:
            mass: of some tokens, [batch, kv_heads, tokens].
            received: attention that these tokens received, mean over the query heads of a KV head, [batch, kv_heads,
                queries, tokens]: by the query that gave it, if the measure is `by_query`, else of all together in one
                row. Padding comes before the queries and gives none.
            row: `received` of all tokens, in parts; it sums to one over all of them.
            queries: how many there are, of each item of the batch, [batch].

        Returns:
            The new mass.
        """
        return mass + received.sum(dim=2)

    def forward(self, tokens: Tokens, depth: float) -> Tensor:
        """Scores, [batch, kv_heads, tokens], float32, finite; higher is kept. Empty slots may get anything.

        Args:
            tokens: the tokens to choose from.
            depth: of the layer, from 0 (the first) to below 1.
        """
        raise NotImplementedError


@dataclass(eq=False)
class Windowed(Importance):
    """Base of the measures by an observation window: the last queries of a prompt tell what the answer will look at.

    Attributes:
        window: queries in the observation window; the last real tokens, since prompts are left-padded.
        pool: width of the average pooling that keeps neighbours together, odd. The answer's later characters sit
            beside the one being looked at, so dense pages lose much without it.
        value_norm: whether the attention is multiplied by the norm of what it would fetch.
    """

    window: int = 8
    pool: int = 5
    value_norm: bool = True

    def __post_init__(self) -> None:
        count_of_tokens("window", self.window)
        if not 1 <= self.pool < 1000 or self.pool % 2 == 0:
            raise ValueError(f"pool must be odd and below 1000, got {self.pool}")

    def observers(self, length: int) -> int:
        return min(self.window, length)

    def smoothed(self, tokens: Tokens) -> Tensor:
        """Mass times value norm, pooled, [batch, kv_heads, tokens]."""
        return pool(tokens.mass * tokens.value.norm(dim=-1) if self.value_norm else tokens.mass, self.pool)


def count_of_tokens(name: str, value: int) -> None:
    if not 1 <= value <= MOST_TOKENS:
        raise ValueError(f"{name} must be from 1 to {MOST_TOKENS}, got {value}")


def group_mean(attention: Tensor) -> Tensor:
    """Mean over the query heads of a KV head: [batch, kv_heads, group, queries, tokens] -> without `group`."""
    return attention.mean(dim=2)


def pool(score: Tensor, width: int) -> Tensor:
    """Average over `width` (odd) neighbours along the sequence, zeros beyond its ends, [batch, kv_heads, tokens]."""
    return score if width == 1 else torch.nn.functional.avg_pool1d(score, width, stride=1, padding=width // 2)


def unit(rows: Tensor) -> Tensor:
    """Rows [..., head_dim] of length one; a zero row stays zero."""
    return rows / rows.norm(dim=-1, keepdim=True).clamp(min=1e-12)

"""Attention that queries still to come are expected to pay: Expected Attention (arXiv 2510.00636)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from export.attention import LOWEST, attention_logits
from export.stages.importance.importance import Importance, Observation, count_of_tokens, group_mean
from export.stages.tokens import Tokens


@dataclass(eq=False)
class ExpectedAttention(Importance):
    """Score of a cached token = the expected softmax weight of a future query, times the value's norm.

    The prompt's queries before RoPE are taken as normal, with mean m and covariance C; R is RoPE averaged over the
    `future` positions after the prompt. A key k then has the expected weight exp(k·Rm·scale + kᵀ(RCRᵀ)k·scale²/2),
    normalised over the tokens for each query head, and averaged over the query heads of a KV head.

    This is exact in prefill. The statistics of the queries do not travel with the state: while decoding, the attention
    observed at every step is added to the expected one, which counts as one query; a decoded token has only observed.

    It needs `rotary_emb` in the language model and RoPE that rotates the halves of a whole head (Llama, Qwen, Mistral).

    Attributes:
        future: positions after the prompt over which RoPE is averaged.
        sinks: first tokens, by original position, that are left out of the statistics and of the normalisation, being
            outliers in both; they get the largest mass of their head.
        covariance: whether the spread of the queries counts, or only their mean.
        value_norm: whether the expected attention is multiplied by the norm of what it would fetch.
    """

    future: int = 512
    sinks: int = 4
    covariance: bool = True
    value_norm: bool = True
    method: Literal["expected-attention"] = "expected-attention"

    def __post_init__(self) -> None:
        count_of_tokens("future", self.future)
        if self.sinks < 0:
            raise ValueError(f"sinks must be at least 0, got {self.sinks}")

    def observers(self, length: int) -> int:
        return length

    def observe(self, seen: Observation) -> Tensor:
        assert seen.positions is not None
        batch, kv_heads, _, head_dim = seen.key.shape
        key = seen.key if seen.center is None else seen.key + seen.center  # unlike softmax, the spread sees a shift
        query = self._moved(seen)  # [B, H, S, D]
        counted = (seen.positions >= self.sinks)[:, None]  # [B, 1, S], neither sink nor padding
        weight, number = counted[..., None].float(), counted.sum(dim=2)[..., None, None].clamp(min=1)
        mean = (query * weight).sum(dim=2, keepdim=True) / number
        logits = attention_logits(mean, key, seen.scale).squeeze(3)  # [B, Hkv, G, S]
        if self.covariance:
            apart = (query - mean) * weight
            spread = (apart.mT @ apart / number).reshape(batch, kv_heads, -1, head_dim, head_dim)
            rows = key[:, :, None]
            logits = logits + ((rows @ spread) * rows).sum(dim=-1) * (seen.scale**2 / 2)
        expected = torch.where(counted[:, :, None], logits, LOWEST).softmax(dim=-1)
        mass = group_mean(expected[..., None, :]).squeeze(2) * counted
        sink = (seen.positions >= 0)[:, None] & ~counted
        return torch.where(sink, mass.amax(dim=-1, keepdim=True), mass)

    def _moved(self, seen: Observation) -> Tensor:
        """The queries as RoPE turns them, on average, at the future positions, [batch, heads, tokens, head_dim]."""
        assert seen.positions is not None
        assert seen.rotary is not None
        turned = seen.positions if seen.position_ids is None else seen.position_ids
        cos, sin = (rows[:, None] for rows in seen.rotary(turned))
        query = _rotate(seen.query, cos, -sin) / (cos * cos + sin * sin)  # some models' RoPE scales too
        newest = turned.amax(dim=-1, keepdim=True)
        newest = newest if seen.position_ids is None else newest.amax(dim=0)
        ahead = newest + torch.arange(1, self.future + 1)
        cos, sin = (rows.mean(dim=1)[:, None, None] for rows in seen.rotary(ahead))
        return _rotate(query, cos, sin)

    def forward(self, tokens: Tokens, depth: float) -> Tensor:
        return tokens.mass * tokens.value.norm(dim=-1) if self.value_norm else tokens.mass


def _rotate(rows: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE as Hugging Face's Llama has it: the two halves of a head are the coordinates that turn."""
    first, second = rows.chunk(2, dim=-1)
    return rows * cos + torch.cat([-second, first], dim=-1) * sin

"""Observation-window importance: SnapKV (arXiv 2404.14469) with value norms (VL-Cache, arXiv 2410.23317)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from export.stages.importance.importance import Observation, Windowed, group_mean
from export.stages.tokens import Tokens


@dataclass(eq=False)
class SnapKV(Windowed):
    """Score of a cached token = attention it receives, times its value's norm, smoothed along the sequence.

    The attention is summed over queries and averaged over the query heads of a KV group. In prefill the queries are the
    last `window` tokens of the prompt; while decoding, every step's query adds to it. Over the whole prompt, without
    pooling and value norm, it is the attention a token receives on average (kvpress's ObservedAttention).
    """

    method: Literal["snapkv"] = "snapkv"

    def observe(self, seen: Observation) -> Tensor:
        return seen.averaged(group_mean(seen.attention))

    def forward(self, tokens: Tokens, depth: float) -> Tensor:
        return self.smoothed(tokens)

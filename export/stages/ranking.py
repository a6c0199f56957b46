"""Ranks without a sort: TensorRT's ends at 3,840 tokens, and PyTorch's stable one has no ONNX translation."""

from __future__ import annotations

import torch
from torch import Tensor


def rank(score: Tensor, *groups: Tensor) -> tuple[Tensor, ...]:
    """For each group, how many of its tokens come before a token: of higher score, or equal and of lower index.

    Every token is compared with every other, [batch, kv_heads, tokens, tokens]: no larger than the prefill's own
    attention.

    Args:
        score: [batch, kv_heads, tokens].
        groups: which tokens belong to it, bool [batch, kv_heads, tokens].

    Returns:
        One a group, [batch, kv_heads, tokens], float32.
    """
    index = torch.arange(score.shape[-1])
    mine, other = score[..., None], score[..., None, :]
    before = ((other > mine) | ((other == mine) & (index < index[:, None]))).float()
    return tuple((before @ group.float()[..., None])[..., 0] for group in groups)

"""How alike attention is from step to step and from layer to layer, and KV heads are to each other: cosines."""

from __future__ import annotations

import torch
from torch import Tensor

from export.stages.importance.importance import unit


def adjacent_steps(weights: Tensor) -> Tensor:
    """Cosine of a query's attention with the next query's. What the earlier one cannot see yet counts as 0 in its row.

    Args:
        weights: [heads, steps, tokens].

    Returns:
        [heads, steps - 1].
    """
    rows = unit(weights)
    return (rows[:, :-1] * rows[:, 1:]).sum(dim=-1)


def adjacent_layers(before: Tensor, after: Tensor) -> Tensor:
    """Cosine of the attention of every head of a layer with that of every head of the next, by the same query.

    Args:
        before, after: [heads, steps, tokens].

    Returns:
        [heads of the first, heads of the second, steps].
    """
    return torch.einsum("hst,gst->hgs", unit(before), unit(after))


def heads(rows: Tensor) -> Tensor:
    """Cosine of what every two KV heads hold of the same token.

    Args:
        rows: keys after RoPE, or values, [kv_heads, tokens, head_dim].

    Returns:
        [kv_heads, kv_heads, tokens].
    """
    return torch.einsum("itd,jtd->ijt", unit(rows), unit(rows))

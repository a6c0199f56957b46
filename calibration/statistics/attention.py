"""What one query's attention says: a row of softmax weights in, a number out.

Rows are [..., queries, tokens]; the queries are the last of the tokens, and a query's weights sum to one over the
tokens up to itself.
"""

from __future__ import annotations

import torch
from torch import Tensor


def mass(weights: Tensor, chosen: Tensor) -> Tensor:
    """Attention on some of the tokens: Σ_{t chosen} a_t. Sink strength is that on the first tokens.

    Args:
        weights: [..., queries, tokens].
        chosen: bool [tokens].

    Returns:
        [..., queries].
    """
    return weights @ chosen.to(weights.dtype)


def top_mass(weights: Tensor, chosen: Tensor, most: int) -> Tensor:
    """Attention on the `most` tokens among the chosen that get the most of it, [..., queries]; as `mass`."""
    among = weights[..., chosen]
    return among.topk(min(most, among.shape[-1]), dim=-1).values.sum(dim=-1)


def entropy(weights: Tensor) -> Tensor:
    """H = -Σ_t a_t log a_t, nats, [..., queries]."""
    return torch.special.entr(weights).sum(dim=-1)


def locality_radius(weights: Tensor, share: float) -> Tensor:
    """The least r for which the last r tokens, the query's own included, hold at least `share` of its attention.

    Returns:
        [..., queries], int64, from 1.
    """
    queries, tokens = weights.shape[-2:]
    later = torch.arange(queries - 1, -1, -1)  # than each query: nothing of its attention is there
    return (weights.flip(-1).cumsum(dim=-1) < share).sum(dim=-1).clamp(max=tokens - 1) - later + 1


def coverage(weights: Tensor, share: float) -> Tensor:
    """The fewest tokens, wherever they are, that hold at least `share` of a query's attention.

    Returns:
        [..., queries], int64, from 1.
    """
    highest = weights.sort(dim=-1, descending=True).values
    return (highest.cumsum(dim=-1) < share).sum(dim=-1).clamp(max=weights.shape[-1] - 1) + 1

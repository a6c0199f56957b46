"""Attention frequency: which tokens are looked at again and again (anchors), and which now and then (transients)."""

from __future__ import annotations

import torch
from torch import Tensor

ANCHOR = 0.5  # frequency above which a token is an anchor


def anchors(frequency: Tensor) -> Tensor:
    """Persistently active tokens: in the top k of more than every second observation, bool [..., tokens].

    Args:
        frequency: share of the observations (layers, heads, steps) in whose top k a token is, [..., tokens].
    """
    return frequency > ANCHOR


def transients(frequency: Tensor) -> Tensor:
    """Tokens that are active, but less often than anchors, bool [..., tokens]; the others never are."""
    return (frequency > 0) & (frequency <= ANCHOR)


def correlation(x: Tensor, y: Tensor) -> Tensor:
    """Pearson's r of two numbers of the same tokens; NaN where one of them is the same for all.

    Args:
        x, y: [..., tokens].

    Returns:
        [...].
    """
    x, y = (part.double() - part.double().mean(dim=-1, keepdim=True) for part in (x, y))
    norms = x.norm(dim=-1) * y.norm(dim=-1)
    return torch.where(norms > 0, (x * y).sum(dim=-1) / norms, torch.nan)

"""What makes keys and values easy or hard to compress: what repeats, and which channels stand out."""

from __future__ import annotations

import torch
from torch import Tensor

from export.stages.modality.density import density


def redundancy(rows: Tensor) -> Tensor:
    """Mean cosine of two different tokens: 1 - information density. 0 if there are no two.

    Args:
        rows: of one modality, [kv_heads, tokens, head_dim].

    Returns:
        [kv_heads].
    """
    rows = torch.nn.functional.normalize(rows, dim=-1)
    return 1 - density(rows[None], rows.new_ones(rows.shape[:2], dtype=torch.bool)[None])[0, :, 0]


def outlier(largest: Tensor) -> Tensor:
    """How far the widest channel of a head stands out: its largest magnitude over the channels' median one.

    Args:
        largest: magnitude of every channel, [..., head_dim].

    Returns:
        [...]; of an even number of channels the median is the mean of the middle two. NaN where that is 0.
    """
    return _over(largest.amax(dim=-1), largest.quantile(0.5, dim=-1))


def bias_spike(bias: Tensor, deviation: Tensor) -> Tensor:
    """The largest number of a head's k_proj bias, in standard deviations of the head's keys (median over channels).

    A bias moves a channel of every key by the same amount: nothing in attention changes by it, but a range has to hold
    it. In multiples of what the keys themselves vary by, it is the bits that such a range wastes.

    Args:
        bias: [..., head_dim].
        deviation: standard deviation of every channel, [..., head_dim].

    Returns:
        [...]; NaN where the median is 0.
    """
    return _over(bias.abs().amax(dim=-1), deviation.quantile(0.5, dim=-1))


def _over(largest: Tensor, usual: Tensor) -> Tensor:
    return torch.where(usual > 0, largest / usual, torch.nan)

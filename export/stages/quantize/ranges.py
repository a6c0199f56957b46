"""Ranges of static scales by calibrated numbers: what lies beyond is clamped, and the others have a finer step."""

from __future__ import annotations

import torch
from torch import Tensor

TRIED = 100  # ranges, as parts of the largest magnitude


def percentile(numbers: Tensor, percent: float) -> Tensor:
    """That percentile of the magnitudes, interpolated linearly (arXiv 2004.09602): [..., numbers] -> [...]."""
    ordered = numbers.abs().sort(dim=-1).values
    last = numbers.shape[-1] - 1
    below = int(place := percent / 100 * last)
    return torch.lerp(ordered[..., below], ordered[..., min(below + 1, last)], place - below)


def least_error(numbers: Tensor, qmax: int) -> Tensor:
    """The range of codes -qmax ... qmax that errs least in the square (arXiv 1902.06822): [..., numbers] -> [...].

    Tried are i / `TRIED` of the largest magnitude, i = 1 ... `TRIED`; of equal ones the narrowest is taken.
    """
    largest = numbers.abs().amax(dim=-1)
    found, least = largest, torch.full_like(largest, torch.inf)
    for part in range(1, TRIED + 1):
        tried = largest * (part / TRIED)
        step = torch.where(tried > 0, tried / qmax, 1.0)[..., None]
        error = ((numbers / step).round().clamp(-qmax, qmax) * step - numbers).square().mean(dim=-1)
        found, least = torch.where(error < least, tried, found), torch.minimum(error, least)
    return found

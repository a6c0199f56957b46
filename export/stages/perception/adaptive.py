"""What the runtime must know of an image to decide how many of its tokens enter: coverage and entropy."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import normalize


def coverage(features: Tensor, chosen: Tensor) -> Tensor:
    """How well the first k chosen tokens stand for the whole image, for every k:

        coverage(k) = mean over all tokens v of max over s in chosen[:k] of cosine(v, s)

    It never falls with k, and is 1 when all are chosen.

    Args:
        features: visual tokens, [batch, tokens, hidden_size].
        chosen: indices, first choice first, [batch, kept], int64.

    Returns:
        [batch, kept], float32.
    """
    unit = normalize(features.float(), dim=2)
    itself = torch.eye(unit.shape[1], dtype=torch.bool)
    similarity = torch.where(itself, 1.0, unit @ unit.mT)  # a zero vector, too, covers itself
    best = similarity.gather(1, chosen[..., None].expand(-1, -1, unit.shape[1]))  # [batch, kept, tokens]
    step = 1
    while step < best.shape[1]:  # the running maximum in log2(kept) steps: ONNX has no other
        best = torch.cat([best[:, :step], torch.maximum(best[:, step:], best[:, :-step])], dim=1)
        step *= 2
    return best.mean(dim=2)


def entropy(features: Tensor) -> Tensor:
    """How evenly the tokens stand out from their mean, from 0 (one does, or none) to 1 (all alike):

        p(v) = |v - mean|^2 / sum over all tokens of it,  entropy = -(sum of p log p) / log(tokens)

    A few strokes on an empty ground have little of it, a page full of text much.

    Args:
        features: visual tokens before any is dropped, [batch, tokens, hidden_size].

    Returns:
        [batch], float32.
    """
    energy = (features.float() - features.float().mean(dim=1, keepdim=True)).square().sum(dim=2)
    tiny = torch.finfo(torch.float32).tiny
    p = energy / energy.sum(dim=1, keepdim=True).clamp(min=tiny)
    return -(p * p.clamp(min=tiny).log()).sum(dim=1) / math.log(max(features.shape[1], 2))

"""How alike the KV heads of each layer are."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from calibration.observe import observe
from calibration.samples import Sample
from export.checkpoint import Checkpoint
from export.stages.heads import HeadMoments
from export.stages.importance.importance import unit


def head_moments(
    checkpoint: Checkpoint, samples: Sequence[Sample], progress: Callable[[], None] = lambda: None
) -> list[HeadMoments]:
    """Run the samples through the decoder and compare the keys and values of the same tokens, one result a layer.

    Args:
        progress: called once a sample.
    """
    total: dict[int, tuple[Tensor, Tensor]] = {}

    def see(layer: int, key: Tensor, value: Tensor) -> None:
        key, value = unit(key), unit(value)
        pairs = torch.complex(*key.chunk(2, dim=-1))  # [kv_heads, tokens, head_dim / 2]
        moments = torch.einsum("itd,jtd->ijd", pairs.conj(), pairs), torch.einsum("itd,jte->ijde", value, value)
        known = total.get(layer)
        total[layer] = moments if known is None else (known[0] + moments[0], known[1] + moments[1])

    tokens = observe(checkpoint, samples, see, progress)
    layers = range(checkpoint.decoder.num_layers)
    return [HeadMoments(total[layer][0] / tokens, total[layer][1] / tokens) for layer in layers]

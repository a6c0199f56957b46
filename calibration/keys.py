"""Where each layer's keys lie: the mean key of every head and the range of every channel around it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from calibration.samples import Sample, model_inputs
from export.attention import LOWEST, attention_by, full_attention
from export.checkpoint import Checkpoint
from export.compress import KeyStatistics


def key_statistics(
    checkpoint: Checkpoint, samples: Sequence[Sample], progress: Callable[[], None] = lambda: None
) -> list[KeyStatistics]:
    """Run the samples through the model and measure its keys after RoPE.

    Args:
        progress: called once a sample.

    Returns:
        One a layer: the mean over all tokens of all samples, and the largest distance from it a channel takes.
    """
    layers = checkpoint.decoder.num_layers
    total: list[Tensor | float] = [0.0] * layers
    lowest: list[Tensor | None] = [None] * layers
    highest: list[Tensor | None] = [None] * layers
    tokens = 0

    def attention(layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        rows = key[0]  # [kv_heads, tokens, head_dim]
        total[layer] = total[layer] + rows.sum(dim=1)
        low, high = rows.amin(dim=1), rows.amax(dim=1)
        known_low, known_high = lowest[layer], highest[layer]
        lowest[layer] = low if known_low is None else torch.minimum(known_low, low)
        highest[layer] = high if known_high is None else torch.maximum(known_high, high)
        order = torch.arange(rows.shape[1])
        bias = torch.where(order[:, None] >= order, 0.0, LOWEST)[None]
        return full_attention(query, key, value, bias, scale)

    with torch.no_grad(), attention_by(attention):
        for sample in samples:
            inputs = model_inputs(checkpoint.processor, sample)
            tokens += inputs["input_ids"].shape[1]
            checkpoint.model(**inputs, use_cache=False)
            progress()

    statistics = []
    for layer in range(layers):
        low, high = lowest[layer], highest[layer]
        assert low is not None and high is not None
        center = torch.as_tensor(total[layer]) / tokens
        statistics.append(KeyStatistics(center, torch.maximum(high - center, center - low)))
    return statistics

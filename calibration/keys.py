"""Where each layer's keys and values lie: the mean key of every head, and the range of every channel."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from calibration.observe import observe
from calibration.samples import Sample
from export.checkpoint import Checkpoint
from export.compress import KeyStatistics
from export.stages.quantize.rotation import rotate


class Range:
    """Smallest and largest number of each channel of the rows seen so far, [kv_heads, head_dim]."""

    def __init__(self) -> None:
        self.low = torch.tensor(torch.inf)
        self.high = -self.low

    def see(self, rows: Tensor) -> None:
        """Rows [kv_heads, tokens, head_dim]."""
        self.low = torch.minimum(self.low, rows.amin(dim=1))
        self.high = torch.maximum(self.high, rows.amax(dim=1))

    def around(self, center: Tensor) -> Tensor:
        """Largest distance from a centre [kv_heads, head_dim]."""
        return torch.maximum(self.high - center, center - self.low)


def key_statistics(
    checkpoint: Checkpoint, samples: Sequence[Sample], progress: Callable[[], None] = lambda: None
) -> list[KeyStatistics]:
    """Run the samples through the decoder and measure its values and its keys after RoPE.

    Args:
        progress: called once a sample.

    Returns:
        One a layer: the mean over all tokens of all samples, and the largest distance from it, or from 0, of a channel.
    """
    layers = checkpoint.decoder.num_layers
    total: list[Tensor | float] = [0.0] * layers
    ranges = [[Range() for _ in range(4)] for _ in range(layers)]

    def see(layer: int, keys: Tensor, values: Tensor) -> None:
        total[layer] = total[layer] + keys.sum(dim=1)
        for known, rows in zip(ranges[layer], (keys, values, rotate(keys), rotate(values)), strict=True):
            known.see(rows)

    tokens = observe(checkpoint, samples, see, progress)
    statistics = []
    for layer, (keys, values, rotated_keys, rotated_values) in enumerate(ranges):
        center = torch.as_tensor(total[layer]) / tokens
        zero = torch.zeros_like(center)
        statistics.append(
            KeyStatistics(
                center,
                absmax=keys.around(center),
                value_absmax=values.around(zero),
                rotated_absmax=rotated_keys.around(rotate(center)),
                rotated_value_absmax=rotated_values.around(zero),
            )
        )
    return statistics

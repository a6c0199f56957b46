"""Where each layer's keys and values lie: the mean key of every head, the range of every channel, and some rows."""

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


class Drawn:
    """At most so many of the rows seen so far, any as likely as any other, [kv_heads, rows, head_dim]."""

    def __init__(self, most: int) -> None:
        self.most, self.rows = most, torch.empty(0)
        self.lots, self.generator = torch.empty(0), torch.Generator().manual_seed(0)

    def see(self, rows: Tensor) -> None:
        """Rows [kv_heads, tokens, head_dim]: each draws a lot, and the lowest lots stay."""
        lots = torch.cat([self.lots, torch.rand(rows.shape[1], generator=self.generator)])
        stay = lots.argsort(stable=True)[: self.most]
        both = torch.cat([self.rows, rows], dim=1) if len(self.lots) else rows
        self.lots, self.rows = lots[stay], both[:, stay]


def key_statistics(
    checkpoint: Checkpoint,
    samples: Sequence[Sample],
    progress: Callable[[], None] = lambda: None,
    rows: int = 0,
    reach: int = 0,
) -> list[KeyStatistics]:
    """Run the samples through the decoder and measure its values and its keys after RoPE.

    Args:
        progress: called once a sample.
        reach: positions that the samples are spread over. RoPE turns the slow channels of a key so little in a short
            prompt that their range there says nothing of what it is further on.
        rows: keys and values to draw by the same lots from those of all samples; 0: none, and they are left out.

    Returns:
        One a layer: the mean over all tokens of all samples, and the largest distance from it, or from 0, of a channel.
    """
    layers = checkpoint.decoder.num_layers
    total: list[Tensor | float] = [0.0] * layers
    ranges = [[Range() for _ in range(4)] for _ in range(layers)]
    drawn = [[Drawn(rows) for _ in range(2 if rows else 0)] for _ in range(layers)]

    def see(layer: int, keys: Tensor, values: Tensor) -> None:
        total[layer] = total[layer] + keys.sum(dim=1)
        for known, seen in zip(ranges[layer], (keys, values, rotate(keys), rotate(values)), strict=True):
            known.see(seen)
        for some, seen in zip(drawn[layer], (keys, values), strict=False):
            some.see(seen)

    tokens = observe(checkpoint, samples, see, progress, reach)
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
                **{f"{what}_rows": some.rows for what, some in zip(("key", "value"), drawn[layer], strict=False)},
            )
        )
    return statistics

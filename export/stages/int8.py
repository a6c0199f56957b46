"""8-bit store: K per channel with calibrated scales, V per token (KIVI's axes, arXiv 2402.02750)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from export.stages.stage import Stage

QMAX = 127


@dataclass(eq=False)
class Int8(Stage):
    """Symmetric int8 rows for the store.

    Keys arrive centred: one constant vector per head was subtracted from all of them, which leaves the softmax
    unchanged and takes the k_proj-bias spikes out of the range. Their scales are static, so quantizing a dequantized
    row again gives the same integers: compaction adds no noise however often it runs.

    Attributes:
        margin: static key range = margin x the largest magnitude seen in calibration.
    """

    margin: float = 1.1

    def __post_init__(self) -> None:
        if not 1 <= self.margin <= 100:
            raise ValueError(f"margin must be from 1 to 100, got {self.margin}")

    def key_scale(self, absmax: Tensor) -> Tensor:
        """Static scale of each channel from its calibrated range; both [kv_heads, head_dim], float32."""
        return absmax.clamp(min=1e-6) * (self.margin / QMAX)

    def keys(self, key: Tensor, scale: Tensor) -> Tensor:
        """Quantize centred keys [batch, kv_heads, tokens, head_dim] by `scale` [kv_heads, head_dim] -> int8."""
        return _round(key / scale[:, None])

    def values(self, value: Tensor) -> tuple[Tensor, Tensor]:
        """Quantize values [batch, kv_heads, tokens, head_dim] -> int8 and float16 scales [batch, kv_heads, tokens, 1].

        The scale is rounded to float16 first: the rows are divided by what will multiply them.
        """
        scale = (value.abs().amax(dim=-1, keepdim=True) / QMAX).clamp(min=1e-6).half()
        return _round(value / scale.float()), scale


def _round(x: Tensor) -> Tensor:
    return x.round().clamp(-QMAX, QMAX).to(torch.int8)

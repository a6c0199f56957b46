"""Ranges of keys and values by channel, and whether other samples leave them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from calibration.attention_map import AttentionMap
from calibration.keys import Range
from calibration.observe import observe
from calibration.samples import Sample
from export.checkpoint import Checkpoint

WIDER = 1.25  # times its calibrated range: a channel that other samples widen so much is exceeded
MANY = 0.1  # share of exceeded channels that is no chance any more; on samples of one sort it is a few hundredths
FAR = 3.0  # times the range: no chance even in a single channel

Array = NDArray[np.float64]
Ranges = dict[str, tuple[Array, Array]]  # keys, values -> the lowest and highest number, [layers, kv_heads, head_dim]


def measure_ranges(checkpoint: Checkpoint, samples: Sequence[Sample]) -> Ranges:
    """Of keys after RoPE, not centred, and values, over all tokens of the samples' prompts."""
    layers = range(checkpoint.decoder.num_layers)
    ranges = {what: [Range() for _ in layers] for what in ("keys", "values")}

    def see(layer: int, key: Tensor, value: Tensor) -> None:
        ranges["keys"][layer].see(key)
        ranges["values"][layer].see(value)

    observe(checkpoint, samples, see)
    return {
        what: (np.stack([r.low.double().numpy() for r in known]), np.stack([r.high.double().numpy() for r in known]))
        for what, known in ranges.items()
    }


def of_map(found: AttentionMap) -> Ranges:
    """Over all kinds of tokens that the map's samples had."""
    arrays = {"keys": (found.key_min, found.key_max), "values": (found.value_min, found.value_max)}
    return {
        what: (np.nanmin(low.astype(float), axis=2), np.nanmax(high.astype(float), axis=2))
        for what, (low, high) in arrays.items()
    }


def exceeding(calibrated: Ranges, seen: Ranges) -> list[str]:
    """Warnings, where samples leave the calibrated ranges."""
    found = []
    for what in calibrated:
        ratio = widened(calibrated[what], seen[what])
        share, place = float((ratio > WIDER).mean()), np.unravel_index(int(ratio.argmax()), ratio.shape)
        if share > MANY or ratio.max() > FAR:
            layer, head, channel = map(int, place)
            found.append(
                f"{what} of held-out samples leave the calibrated range by more than {WIDER - 1:.0%} in {share:.0%} of "
                f"the channels, most in layer {layer}, KV head {head}, channel {channel} ({ratio.max():.1f} times): "
                "calibrate on samples like them"
            )
    return found


def widened(calibrated: tuple[Array, Array], seen: tuple[Array, Array]) -> Array:
    """How many times its calibrated half-width away from the calibrated middle a channel goes."""
    low, high = calibrated
    half, middle = (high - low) / 2, (high + low) / 2
    return np.maximum(seen[1] - middle, middle - seen[0]) / np.maximum(half, 1e-6 * half.max())

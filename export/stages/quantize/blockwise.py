"""What the quantizers of few bits share: their options, static scales, rotation, and attention by the operator."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

import export.operators  # noqa: F401  registers torch.ops.unicache
from export.attention import softcap_of, store_window_attention
from export.stages.quantize.blocks import Blocks
from export.stages.quantize.quantize import KeyStatistics, Quantize, Specs
from export.stages.quantize.ranges import least_error, percentile
from export.stages.quantize.rotation import rotate
from export.stages.tokens import Tokens


@dataclass(eq=False)
class Blockwise(Quantize):
    """Base of the quantizers. A subclass says by `keys` and `values` what a block is.

    Attributes:
        center: whether keys are centred.
        rotate: whether keys and values are rotated before they are quantized, and back when they are read. It spreads
            outlier channels over all of a head, which helps where channels share a scale.
        scales: dtype of the scales in the store. Static ones are constants of the graph and cost the state nothing.
        scale: what sets the range of a static scale: `margin` x the largest magnitude seen in calibration, a
            `percentile` of the magnitudes, or the least mean squared error. The latter two are of rows drawn from the
            samples, and clamp what lies beyond.
        margin: of the range by the largest magnitude: room for what calibration has not seen.
        percentile: of the magnitudes, in (0, 100].
    """

    center: bool = True
    rotate: bool = False
    scales: Literal["float16", "float32"] = "float16"
    scale: Literal["absmax", "percentile", "mse"] = "absmax"
    margin: float = 1.1
    percentile: float = 99.9

    def __post_init__(self) -> None:
        if not 0 < self.percentile <= 100:
            raise ValueError(f"percentile must be above 0 and at most 100, got {self.percentile}")
        if not 1 <= self.margin <= 100:
            raise ValueError(f"margin must be from 1 to 100, got {self.margin}")

    @property
    def keys(self) -> Blocks:
        raise NotImplementedError

    @property
    def values(self) -> Blocks:
        raise NotImplementedError

    @property
    def by_row(self) -> bool:
        return self.keys.bits == self.values.bits and all(b.static or b.tokens == 1 for b in (self.keys, self.values))

    @property
    def calibrated(self) -> bool:
        return self.center or self.keys.static or self.values.static

    def of_layer(self, statistics: KeyStatistics | None) -> Quantize:
        layer = super().of_layer(statistics)
        for name, blocks in (("key", self.keys), ("value", self.values)):
            if blocks.static:
                layer.register_buffer(f"{name}_scale", blocks.static_scale(self._ranges(name, blocks, statistics)))
        return layer

    @property
    def needs_rows(self) -> bool:
        return self.scale != "absmax" and (self.keys.static or self.values.static)

    def _ranges(self, name: str, blocks: Blocks, statistics: KeyStatistics | None) -> Tensor:
        """What the static scales are to hold, [kv_heads, blocks]."""
        if self.scale == "absmax":
            return self.margin * blocks.numbers(self._absmax(name, statistics)[:, None]).amax(dim=-1)
        rows = getattr(statistics, f"{name}_rows", None)
        if statistics is None or rows is None:
            raise ValueError(f"a static scale of the {name}s by {self.scale} needs calibrated rows of its layer")
        if name == "key" and self.center:
            rows = rows - statistics.center[:, None]
        numbers = blocks.numbers(rotate(rows) if self.rotate else rows)
        if self.scale == "percentile":
            return percentile(numbers, self.percentile)
        return least_error(numbers, blocks.qmax)

    def _absmax(self, name: str, statistics: KeyStatistics | None) -> Tensor:
        """Largest magnitude of each channel of what is quantized, [kv_heads, head_dim]."""
        known = f"{'rotated_' if self.rotate else ''}{'value_' if name == 'value' else ''}absmax"
        absmax = getattr(statistics, known, None)
        if statistics is None or absmax is None:
            raise ValueError(f"a static scale of the {name}s needs the calibrated {known} of its layer")
        if name == "key" and not self.center:  # the range is known around the centre: this one is around 0
            absmax = absmax + (rotate(statistics.center) if self.rotate else statistics.center).abs()
        return absmax

    def specs(self, heads: list[int], slots: int, head_dim: int) -> Specs:
        return self.keys.specs("key", heads, slots, head_dim) | self.values.specs("value", heads, slots, head_dim)

    def quantize(self, kept: Tokens) -> dict[str, Tensor]:
        key, value = self.rotated(kept)
        key_store = self.keys.quantize("key", key, kept.real, self._static("key"))
        return key_store | self.values.quantize("value", value, kept.real, self._static("value"))

    def rotated(self, kept: Tokens) -> tuple[Tensor, Tensor]:
        """Keys and values as they are quantized."""
        return (rotate(kept.key), rotate(kept.value)) if self.rotate else (kept.key, kept.value)

    def restore(self, store: dict[str, Tensor], head_dim: int) -> tuple[Tensor, Tensor]:
        key, value = self.read(store, head_dim)
        return (rotate(key), rotate(value)) if self.rotate else (key, value)

    def read(self, store: dict[str, Tensor], head_dim: int) -> tuple[Tensor, Tensor]:
        """Keys and values as they were quantized: rotated, if they were."""
        key = self.keys.restore("key", store, head_dim, self._static("key"))
        return key, self.values.restore("value", store, head_dim, self._static("value"))

    def attend(
        self,
        query: Tensor,
        store: dict[str, Tensor],
        key_window: Tensor,
        value_window: Tensor,
        window_bias: Tensor,
        scale: float,
        by_query: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor]:
        if self.rotate:  # (qH)·(kH) = q·k: a few rows are rotated in place of the whole store
            query, key_window, value_window = rotate(query), rotate(key_window), rotate(value_window)
        rest = (store["store_bias"], key_window, value_window, window_bias, scale)
        # The operator sums over the queries, has one bias of a slot for all of them, and does not cap logits.
        plain = by_query or store["store_bias"].dim() > 3 or softcap_of(scale) is not None
        if (bits := self.operator_bits) and not plain:
            key_scale, value_scale = (
                store[name] if (static := self._static(name.split("_")[0])) is None else static
                for name in ("key_scale", "value_scale")
            )
            output, on_store, on_window = torch.ops.unicache.quant_kv_attention(
                query, store["key_store"], key_scale, store["value_store"], value_scale,
                *rest[:-1], float(scale), *bits,
            )  # fmt: skip
        else:
            key, value = self.read(store, query.shape[-1])
            output, on_store, on_window = store_window_attention(query, key, value, *rest, by_query)
        return rotate(output) if self.rotate else output, on_store, on_window

    @property
    def operator_bits(self) -> tuple[int, int] | None:
        """Those of symmetric codes of 8 or 4 bits; None if another store reads on, or `by_operator` is off."""
        both = (self.keys, self.values)
        if self.by_operator and all(b.bits in (8, 4) and not b.offset and not b.normal for b in both):
            return self.keys.bits, self.values.bits
        return None

    def _static(self, name: str) -> Tensor | None:
        return getattr(self, f"{name}_scale", None)


def at_least_two(name: str, value: int) -> None:
    if value < 2:
        raise ValueError(f"{name} must be at least 2, got {value}")

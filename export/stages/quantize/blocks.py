"""Rows in few bits: every block of tokens x channels has a scale of its own."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from export.packing import pack, packed_size, spread, unpack
from export.stages.quantize.quantize import Specs

SMALLEST = 1e-6  # scale of a block of zeros
STEP = {
    2: 0.9957,
    3: 0.5860,
    4: 0.3352,
}  # of the uniform quantizer with the least error of normal numbers of variance 1
BEYOND = 1e30  # larger than any number of a row, and finite


@dataclass(frozen=True)
class Blocks:
    """How rows [batch, kv_heads, slots, head_dim] are stored, and back.

    A number x becomes round(x / scale), clamped to the codes from -qmax to qmax, qmax = 2^(bits-1) - 1, with the scale
    absmax / qmax of its block. With `offset`, a block's smallest number `low` is stored too, and x becomes
    round((x - low) / scale), one of 2^bits levels, with the scale (largest - low) / (2^bits - 1). Scales are rounded to
    their dtype first: rows are divided by what will multiply them. Empty slots have no part in a scale.

    With `normal`, numbers are taken as drawn from a normal distribution: x becomes floor(x / step), clamped to the
    2^bits codes, and level = code + 1/2. The step is the best one for the block's root mean square; the scale then is
    that which fits the levels best, sum(x level) / sum(level^2): restored rows have it again.

    Attributes:
        bits: of a code: 8, 4, 3 or 2.
        tokens, channels: at most so many share a scale: n tokens make ceil(n / tokens) blocks, as equal as they go.
            None: all of them do. A scale of all tokens is static: calibrated, and a constant of the graph; it has one
            channel or all.
        offset: whether blocks store their smallest number.
        normal: whether the step is that of normal numbers.
        scales: dtype of scales and smallest numbers.
    """

    bits: int
    tokens: int | None
    channels: int | None
    offset: bool = False
    normal: bool = False
    scales: str = "float16"

    @property
    def qmax(self) -> int:
        return 2 ** (self.bits - 1) - 1

    @property
    def static(self) -> bool:
        return self.tokens is None

    def specs(self, name: str, heads: list[int], slots: int, head_dim: int) -> Specs:
        """Tensors of the rows called `name`."""
        specs: Specs = {f"{name}_store": ("int8", [*heads, slots, packed_size(head_dim, self.bits)])}
        grid = [*heads, *self._grid(slots, head_dim)]
        if not self.static:
            specs[f"{name}_scale"] = (self.scales, grid)
        if self.offset:
            specs[f"{name}_low"] = (self.scales, grid)
        return specs

    def numbers(self, rows: Tensor) -> Tensor:
        """What shares a static scale: rows [kv_heads, tokens, head_dim] -> [kv_heads, blocks, numbers]."""
        return rows.transpose(1, 2).unflatten(1, (self._grid(1, rows.shape[-1])[1], -1)).flatten(2)

    def static_scale(self, ranges: Tensor) -> Tensor:
        """Scales of calibrated ranges: [kv_heads, blocks] -> [1, kv_heads, 1, blocks], float32."""
        return (ranges.clamp(min=SMALLEST * self.qmax) / self.qmax)[None, :, None]

    def quantize(self, name: str, rows: Tensor, real: Tensor, scale: Tensor | None = None) -> dict[str, Tensor]:
        """Rows, and which of their slots are not empty, [batch, kv_heads, slots] -> the tensors of `specs`.

        Args:
            scale: where it is static, [1, kv_heads, 1, blocks].
        """
        slots, head_dim = rows.shape[2:]
        grid, real = self._grid(slots, head_dim), real[..., None]
        if self.offset:
            low = -_blocks(torch.where(real, -rows, -BEYOND), grid, -BEYOND).amax(dim=(3, 5))
            high = _blocks(torch.where(real, rows, -BEYOND), grid, -BEYOND).amax(dim=(3, 5))
            some = high >= low
            low = torch.where(some, low, 0.0).to(getattr(torch, self.scales))
            scale = (torch.where(some, high, 0.0) - low.float()) / (2**self.bits - 1)
            scale = scale.clamp(min=SMALLEST).to(low.dtype)
            level = ((rows - spread(low.float(), slots, head_dim)) / spread(scale.float(), slots, head_dim)).round()
            codes = level.clamp(0, 2**self.bits - 1) - 2 ** (self.bits - 1)
            return {f"{name}_store": pack(codes, self.bits), f"{name}_scale": scale, f"{name}_low": low}
        rows = rows * real.to(rows.dtype)  # they are finite; a Where takes ONNX Runtime four times as long
        if self.normal:
            return self._normal(name, rows, real)
        store = {}
        if scale is None:
            scale = _blocks(rows.abs(), grid, 0.0).amax(dim=(3, 5)) / self.qmax
            scale = store[f"{name}_scale"] = scale.clamp(min=SMALLEST).to(getattr(torch, self.scales))
        codes = (rows / spread(scale.float(), slots, head_dim)).round().clamp(-self.qmax, self.qmax)
        return {f"{name}_store": pack(codes, self.bits), **store}

    def restore(self, name: str, store: dict[str, Tensor], head_dim: int, scale: Tensor | None = None) -> Tensor:
        """The rows of a store, [batch, kv_heads, slots, head_dim], float32."""
        scale = store[f"{name}_scale"] if scale is None else scale
        codes = unpack(store[f"{name}_store"], self.bits, head_dim)
        slots = codes.shape[2]
        if self.offset:
            codes = codes + 2 ** (self.bits - 1)
        if self.normal:
            codes = codes + 0.5
        rows = codes * spread(scale.float(), slots, head_dim)
        return rows + spread(store[f"{name}_low"].float(), slots, head_dim) if self.offset else rows

    def _normal(self, name: str, rows: Tensor, real: Tensor) -> dict[str, Tensor]:
        grid = self._grid(*rows.shape[2:])

        def total(numbers: Tensor) -> Tensor:
            return _blocks(numbers, grid, 0.0).sum(dim=(3, 5))

        real = real.to(rows.dtype).expand(rows.shape)
        step = STEP[self.bits] * (total(rows * rows) / total(real).clamp(min=1)).sqrt()
        ratio = rows / spread(step.clamp(min=SMALLEST), *rows.shape[2:])
        codes = ratio.floor().clamp(-(2 ** (self.bits - 1)), 2 ** (self.bits - 1) - 1)
        level = (codes + 0.5) * real
        scale = total(rows * level) / total(level * level).clamp(min=0.25)
        return {f"{name}_store": pack(codes, self.bits), f"{name}_scale": scale.to(getattr(torch, self.scales))}

    def _grid(self, slots: int, head_dim: int) -> list[int]:
        """Numbers of blocks along tokens and channels."""
        sizes = (slots, self.tokens or slots), (head_dim, self.channels or head_dim)
        return [-(-size // min(each, max(size, 1))) if size else 0 for size, each in sizes]


def _blocks(rows: Tensor, grid: list[int], fill: float) -> Tensor:
    """Rows cut into a grid of blocks, [batch, kv_heads, grid, tokens, grid, channels]; `fill` where one has less."""
    tokens, channels = (-(-size // blocks) for size, blocks in zip(rows.shape[2:], grid, strict=True))
    missing = [grid[1] * channels - rows.shape[3], grid[0] * tokens - rows.shape[2]]
    if any(missing):
        rows = pad(rows, (0, missing[0], 0, missing[1]), value=fill)
    return rows.unflatten(3, (grid[1], channels)).unflatten(2, (grid[0], tokens))

"""Weights on a grid: every block of a row is whole numbers of few bits times one scale.

Quantizing is choosing the scale. A block of 8 bits takes absmax / 127. One of 4 bits, -8 to 7, takes whichever of a few
scales leaves the least squared error: with more of them than its largest value needs, the rest is rounded less finely.
Scales are positive, since TensorRT takes no other, and have 16 significant bits, so that a value times its scale is
exact in float32. So a weight that lies on a grid is found to lie on it, and quantizes to itself.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# What the largest value of a block may be, in scales. The first, and 8, are those that lie on a grid of their own.
DIVISORS = {4: (7.0, 8.0, 7.4, 7.8, 8.4, 8.8), 8: (127.0,)}
LEAST_GROUP = 32  # of columns that share a scale
LEAST_SIZE = 2**12  # numbers of a weight that is worth it
CHUNK = 2**21  # weights that are looked at at once: what is held beside a weight is a few times this
PROBE = 8  # rows that tell most weights that lie on no grid


@dataclass(frozen=True)
class Grid:
    """Bits of a weight, and how many columns of a row share a scale at most."""

    bits: int
    group: int

    def group_of(self, width: int) -> int:
        """Columns that share a scale in rows of `width`: the most that divide it, so that no block is filled up."""
        group = self.group
        while group > LEAST_GROUP and width % group:
            group //= 2
        return group

    def nearest(self, weight: Tensor) -> Tensor:
        """The weight [rows, columns] as it is when it has been quantized, float32."""
        result = torch.empty(weight.shape, dtype=torch.float32)
        for rows in _parts(weight):
            values, scales = self._quantize(weight[rows].float())
            result[rows] = (values * scales).flatten(1)[:, : weight.shape[1]]
        return result

    def find(self, weight: Tensor) -> tuple[Tensor, Tensor] | None:
        """Values, int8 [rows, blocks, group], and scales, float32 [rows, blocks], of a weight that lies on the grid."""
        found = []
        for rows in (slice(PROBE), *_parts(weight)):
            values, scales = self._quantize(weight[rows])
            if not torch.equal((values * scales).flatten(1)[:, : weight.shape[1]], weight[rows]):
                return None
            found.append((values.to(torch.int8), scales[..., 0]))
        return torch.cat([values for values, _ in found[1:]]), torch.cat([scales for _, scales in found[1:]])

    def _quantize(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Whole numbers [rows, blocks, group] and scales [rows, blocks, 1], both float32."""
        group, most = self.group_of(weight.shape[1]), 2 ** (self.bits - 1) - 1
        least = -most - 1 if self.bits == 4 else -most
        blocks = torch.nn.functional.pad(weight, (0, -weight.shape[1] % group)).unflatten(1, (-1, group))
        largest = blocks.abs().amax(dim=-1, keepdim=True)
        best: tuple[Tensor, Tensor, Tensor] | None = None
        for divisor in DIVISORS[self.bits]:
            scale = _rounded(largest / divisor)
            values = (blocks / scale).round_().clamp_(least, most)
            error = (values * scale - blocks).square_().sum(dim=-1, keepdim=True)
            if best is None:
                best = values, scale, error
                continue
            better = error < best[2]
            best = torch.where(better, values, best[0]), torch.where(better, scale, best[1]), best[2].minimum(error)
        assert best is not None
        return best[0], best[1]


def _parts(weight: Tensor) -> list[slice]:
    step = max(CHUNK // weight.shape[1], 1)
    return [slice(first, first + step) for first in range(0, len(weight), step)]


def _rounded(scale: Tensor) -> Tensor:
    """To 16 significant bits; that of a block of nothing, or next to it, is 1."""
    bits = scale.contiguous().view(torch.int32)
    scale = ((bits + 0x80) & ~0xFF).view(torch.float32)
    return torch.where(scale > 1e-30, scale, 1.0)

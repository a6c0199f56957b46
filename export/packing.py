"""Codes of 8, 4, 3 or 2 bits in int8 bytes, and the scales that blocks of them share.

Only Add, Sub, Mul, Div and Floor of small whole numbers, which floats hold exactly: TensorRT has no bit operators.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad


def packed_size(channels: int, bits: int) -> int:
    """Bytes that a row's codes take; the last byte may be filled in part only."""
    return packed_size(channels, 2) + packed_size(channels, 1) if bits == 3 else -(-channels * bits // 8)


def pack(codes: Tensor, bits: int) -> Tensor:
    """Pack codes in -2^(bits-1) .. 2^(bits-1) - 1, [..., channels], float -> int8, [..., packed_size].

    A byte b stands for b + 128. Of the n bytes of a row, byte j holds, from its low bits up, the codes of channels
    j, n + j, 2n + j, ... plus 2^(bits-1). Codes of 3 bits are two such rows: the lower two bits, then the highest.
    """
    if bits == 8:
        return codes.to(torch.int8)
    levels = codes + 2 ** (bits - 1)
    if bits == 3:
        highest = (levels / 4).floor()
        return torch.cat([_pack(levels - 4 * highest, 2), _pack(highest, 1)], dim=-1)
    return _pack(levels, bits)


def unpack(packed: Tensor, bits: int, channels: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """The codes again, [..., channels], in a floating-point dtype."""
    if bits == 8:
        return packed.to(dtype)
    rows = packed.to(dtype) + 128
    if bits == 3:
        size = packed_size(channels, 2)
        return _unpack(rows[..., :size], 2, channels) + 4 * _unpack(rows[..., size:], 1, channels) - 4
    return _unpack(rows, bits, channels) - 2 ** (bits - 1)


def _pack(levels: Tensor, bits: int) -> Tensor:
    size = packed_size(levels.shape[-1], bits)
    parts = pad(levels, (0, size * (8 // bits) - levels.shape[-1])).split(size, dim=-1)
    return (sum(part * 2 ** (bits * i) for i, part in enumerate(parts)) - 128).to(torch.int8)


def _unpack(rows: Tensor, bits: int, channels: int) -> Tensor:
    parts = []
    for _ in range(8 // bits):
        above = (rows / 2**bits).floor()
        parts.append(rows - above * 2**bits)
        rows = above
    return torch.cat(parts, dim=-1)[..., :channels]


def spread(scale: Tensor, slots: int, channels: int) -> Tensor:
    """One number a block -> what broadcasts to rows [batch, kv_heads, slots, channels].

    Args:
        scale: [batch or 1, kv_heads, Cs, Ds]: slot c and channel d have scale [c // ceil(slots / Cs),
            d // ceil(channels / Ds)]. One number in all, one for each, and groups are all cases of it.
    """
    for dim, size in ((2, slots), (3, channels)):
        blocks = scale.shape[dim]
        if 1 < blocks < size:
            each = -(-size // blocks)
            shape = [*scale.shape[: dim + 1], each, *scale.shape[dim + 1 :]]
            scale = scale.unsqueeze(dim + 1).expand(shape).flatten(dim, dim + 1).narrow(dim, 0, size)
    return scale

"""Quantization said again in numpy loops, from the formulas: what the methods' stores must be."""

from __future__ import annotations

import math

import numpy as np


def hadamard(size: int) -> np.ndarray:
    """Entry (i, j) is (-1)^(number of common bits), within blocks of the largest power of two that divides `size`."""
    block = size & -size
    matrix = np.zeros((size, size))
    for i in range(size):
        for j in range(size):
            if i // block == j // block:
                matrix[i, j] = (-1) ** (i % block & j % block).bit_count() / math.sqrt(block)
    return matrix


def codes_of(packed: np.ndarray, bits: int, channels: int) -> np.ndarray:
    """Levels (from 0 up) in the bytes of one row."""
    levels = packed.astype(int) + 128
    if bits == 3:
        size = math.ceil(channels / 4)
        return codes_of(packed[:size], 2, channels) + 4 * codes_of(packed[size:], 1, channels)
    size = math.ceil(channels * bits / 8)
    assert len(levels) == size
    return np.array([levels[c % size] >> (bits * (c // size)) & (2**bits - 1) for c in range(channels)])


def blocks_of(size: int, each: int | None) -> list[slice]:
    """As many blocks as it takes with `each` in a block, as equal as they go, the last one shorter."""
    count = 1 if each is None else math.ceil(size / each)
    width = math.ceil(size / count)
    return [slice(start, min(start + width, size)) for start in range(0, size, width)]


def restored(
    packed: np.ndarray, scale: np.ndarray, low: np.ndarray | None, bits: int, tokens: int | None, channels: int | None,
    head_dim: int, normal: bool = False,
) -> np.ndarray:  # fmt: skip
    """Rows of one head: packed [slots, bytes], scale and low [blocks, blocks] -> [slots, head_dim]."""
    levels = np.array([codes_of(row, bits, head_dim) for row in packed]).astype(np.float64)
    rows = np.zeros_like(levels)
    for i, some_tokens in enumerate(blocks_of(len(levels), tokens)):
        for j, some_channels in enumerate(blocks_of(head_dim, channels)):
            block = levels[some_tokens, some_channels]
            if low is None:
                rows[some_tokens, some_channels] = (block - 2 ** (bits - 1) + normal / 2) * float(scale[i, j])
            else:
                rows[some_tokens, some_channels] = block * float(scale[i, j]) + float(low[i, j])
    return rows


def steps(
    rows: np.ndarray, real: np.ndarray, bits: int, tokens: int | None, channels: int | None, offset: bool
) -> np.ndarray:
    """The scale that each number of one head should have, from the real tokens of its block, [slots, head_dim]."""
    out = np.zeros_like(rows, dtype=np.float64)
    for some_tokens in blocks_of(len(rows), tokens):
        for some_channels in blocks_of(rows.shape[1], channels):
            block = rows[some_tokens, some_channels][real[some_tokens]].astype(np.float64)
            if not block.size:
                step = 0.0
            elif offset:
                step = (block.max() - block.min()) / (2**bits - 1)
            else:
                step = np.abs(block).max() / (2 ** (bits - 1) - 1)
            out[some_tokens, some_channels] = step
    return out

"""Hadamard rotation along head_dim (QuaRot, arXiv 2404.00456; QuIP#, arXiv 2402.04396)."""

from __future__ import annotations

import functools

import numpy as np
import torch
from torch import Tensor


@functools.cache
def hadamard(size: int) -> np.ndarray:
    """An orthonormal, symmetric matrix [size, size], its own inverse: it spreads a channel's outliers over many.

    Sylvester's matrix of the largest power of two that divides `size`, repeated along the diagonal: 80 is 5 blocks of
    16. Nothing rotates in an odd size.
    """
    block: np.ndarray = np.ones((1, 1))
    while size % (2 * len(block)) == 0:
        block = np.kron(block, [[1, 1], [1, -1]])
    return np.kron(np.eye(size // len(block)), block / len(block) ** 0.5).astype(np.float32)


def rotate(rows: Tensor) -> Tensor:
    """Rows [..., head_dim], rotated; rotated again they are as before."""
    return rows @ torch.tensor(hadamard(rows.shape[-1]))

"""Random inputs of QuantKVAttention and its exact results: what the tests of all its kernels start from."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import strategies as st

from export.onnx_functions import ATTENTION
from export.operators import quant_kv_attention

WIDTHS = st.sampled_from([8, 4])
BLOCKS = st.tuples(st.sampled_from([1, 3, 32, 10**6]), st.sampled_from([1, 7, 32, 10**6]))


def inputs(
    rng: np.random.Generator,
    batch: int,
    kv_heads: int,
    group: int,
    queries: int,
    slots: int,
    window: int,
    head_dim: int,
    filled: float,
    bits: tuple[int, int] = (8, 8),
    blocks: tuple[tuple[int, int], tuple[int, int]] = ((10**6, 1), (1, 10**6)),
    shared: bool = False,
) -> dict[str, np.ndarray]:
    """`blocks`: at most so many tokens and channels share a scale, of keys and of values; `shared` by the batch too."""

    def rows(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(np.float32)

    def codes(width: int) -> np.ndarray:
        size = head_dim if width == 8 else (head_dim + 1) // 2
        return rng.integers(-128, 128, (batch, kv_heads, slots, size)).astype(np.int8)

    def scales(each: tuple[int, int], width: int) -> np.ndarray:
        shape = (1 if shared else batch, kv_heads, -(-slots // each[0]), -(-head_dim // each[1]))
        return ((rng.random(shape) + 0.1) / 2 ** (width - 1)).astype(np.float32)

    bias = np.log(rng.integers(1, 5, (batch, kv_heads, slots)))
    window_bias = np.where(rng.random((batch, queries, window)) < 0.7, 0, -np.inf).astype(np.float32)
    window_bias[..., -1:] = 0  # a token always sees itself
    values = (
        rows(batch, kv_heads * group, queries, head_dim),
        codes(bits[0]),
        scales(blocks[0], bits[0]),
        codes(bits[1]),
        scales(blocks[1], bits[1]),
        np.where(rng.random(bias.shape) < filled, bias, -np.inf).astype(np.float32),
        rows(batch, kv_heads, window, head_dim),
        rows(batch, kv_heads, window, head_dim),
        window_bias,
    )
    names = [str(each.name) for each in ATTENTION[bits].function_ir.inputs]
    return dict(zip(names, values, strict=True))


def exact(x: dict[str, np.ndarray], scale: float, bits: tuple[int, int] = (8, 8)) -> list[np.ndarray]:
    """The operator in double precision: two ways to round float32 may differ by more than a kernel errs."""
    tensors = [torch.from_numpy(v) if v.dtype == np.int8 else torch.from_numpy(v).double() for v in x.values()]
    return [result.numpy() for result in quant_kv_attention(*tensors, scale, *bits)]

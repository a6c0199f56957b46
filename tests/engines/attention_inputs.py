"""Random inputs of QuantKVAttention and its exact results: what the tests of all its kernels start from."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from hypothesis import strategies as st

from engines.plugins import abi
from export.onnx_functions import ATTENTION
from export.operators import quant_kv_attention

WIDTHS = st.sampled_from([8, 4])
TYPES = st.sampled_from(["float32", "float16"])
BLOCKS = st.tuples(st.sampled_from([1, 3, 16, 48, 144, 10**6]), st.sampled_from([1, 7, 16, 32, 64, 10**6]))


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


def in_types(
    x: dict[str, np.ndarray], activations: str, scales: tuple[str, str], biases: tuple[str, str]
) -> dict[str, np.ndarray]:
    """Rounded to these types: scales of keys and of values, biases of the store and of the window."""
    kinds = dict(zip(("key_scale", "value_scale", "store_bias", "window_bias"), (*scales, *biases), strict=True))
    return {name: v if v.dtype == np.int8 else v.astype(kinds.get(name, activations)) for name, v in x.items()}


def type_of(array: np.ndarray) -> int:
    return {"float32": abi.FLOAT32, "float16": abi.FLOAT16}[array.dtype.name]


def address(array: np.ndarray) -> int:
    assert array.flags.c_contiguous
    return array.ctypes.data


def arguments(
    x: dict[str, np.ndarray],
    scale: float,
    bits: tuple[int, int],
    outputs: list[np.ndarray | None],
    place: Callable[[np.ndarray], int] = address,
) -> abi.Attention:
    """What a kernel takes; `outputs`: output, store_mass and window_mass, None what is not wanted."""
    batch, heads, queries, head_dim = x["query"].shape
    kv_heads, slots = x["key_store"].shape[1:3]

    def at(array: np.ndarray | None) -> int | None:
        return None if array is None else place(array)

    def store(codes: np.ndarray, scale: np.ndarray, width: int) -> abi.Store:
        return abi.Store(at(codes), at(scale), type_of(scale), width, scale.shape[0], *scale.shape[2:])

    return abi.Attention(
        *(batch, kv_heads, heads // kv_heads, queries, slots, x["key_window"].shape[2], head_dim),
        *(type_of(x[name]) for name in ("query", "store_bias", "window_bias")),
        *(scale, at(x["query"])),
        store(x["key_store"], x["key_scale"], bits[0]),
        store(x["value_store"], x["value_scale"], bits[1]),
        *(at(x[name]) for name in ("store_bias", "key_window", "value_window", "window_bias")),
        *map(at, outputs),
    )


def exact(x: dict[str, np.ndarray], scale: float, bits: tuple[int, int] = (8, 8)) -> list[np.ndarray]:
    """The operator in double precision: two ways to round float32 may differ by more than a kernel errs."""
    tensors = [torch.from_numpy(v) if v.dtype == np.int8 else torch.from_numpy(v).double() for v in x.values()]
    return [result.numpy() for result in quant_kv_attention(*tensors, scale, *bits)]


TILE = 128  # tokens whose weights the CPU kernel with VNNI rounds together


def rounding(x: dict[str, np.ndarray], scale: float, bits: tuple[int, int] = (8, 8)) -> list[np.ndarray]:
    """How far 16-bit queries and weights, the CPU kernel's with VNNI, may take each output from the exact one.

    A query times its keys' scales is rounded by half a step, 1 / 32767 of its largest number: a logit then errs by that
    times the sum of the token's codes, an attention by twice the largest such error, relative to itself. A weight
    times its value's scale is rounded by half of 1 / 32767 of the largest of its tile.
    """
    query, bias = x["query"].astype(np.float64) * scale, x["store_bias"].astype(np.float64)
    batch, heads, queries, dim = query.shape
    kv_heads, slots = bias.shape[1:]
    query = query.reshape(batch, kv_heads, -1, dim)
    both = [_codes_and_scales(x, name, width, dim) for name, width in zip(("key", "value"), bits, strict=True)]
    codes, scales = zip(*both, strict=True)
    largest = np.abs(query[..., None, :] * scales[0][:, :, None]).max(-1)  # [batch, kv_heads, rows, slots]
    error = (largest / 32767 / 2 * np.abs(codes[0]).sum(-1)[:, :, None]).max(-1, initial=0)
    logits = query @ (codes[0] * scales[0]).swapaxes(-1, -2) + np.maximum(bias, -1e4)[:, :, None]
    in_window = query @ x["key_window"].astype(np.float64).swapaxes(-1, -2)
    window_bias = np.maximum(x["window_bias"].astype(np.float64), -1e4)
    in_window += np.tile(window_bias[:, None], (1, 1, heads // kv_heads, 1))
    every = np.exp(np.concatenate([logits, in_window], -1) - np.concatenate([logits, in_window], -1).max(-1)[..., None])
    every /= every.sum(-1, keepdims=True)
    attention, values = every[..., :slots], np.abs(codes[1] * scales[1])
    relative = np.expm1(2 * error)
    output = relative[..., None] * (every @ np.concatenate([values, np.abs(x["value_window"].astype(np.float64))], 2))
    for start in range(0, slots, TILE):
        tile = slice(start, start + TILE)
        top = (attention[..., tile, None] * np.abs(scales[1])[:, :, None, tile]).max(-2)
        output += top / 32767 / 2 * np.abs(codes[1])[:, :, None, tile].sum(-2)
    mass = (every * relative[..., None]).reshape(batch, kv_heads, -1, queries, every.shape[-1]).mean(2).sum(2)
    return [output.reshape(x["query"].shape), mass[..., :slots], mass[..., slots:]]


def _codes_and_scales(x: dict[str, np.ndarray], name: str, bits: int, dim: int) -> tuple[np.ndarray, np.ndarray]:
    """Both [batch, kv_heads, slots, head_dim]."""
    codes = x[f"{name}_store"]
    if bits == 4:
        codes = np.concatenate([(codes & 15) - 8, codes >> 4], -1)[..., :dim]
    scales = x[f"{name}_scale"].astype(np.float64)
    for axis in (2, 3):
        if scales.shape[axis]:
            each = -(-codes.shape[axis] // scales.shape[axis])
            scales = np.repeat(scales, each, axis).take(np.arange(codes.shape[axis]), axis)
    return codes.astype(np.float64), np.broadcast_to(scales, codes.shape)

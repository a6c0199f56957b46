"""The CUDA kernel of TopKGather, compiled for the host (engines/plugins/simt.h), = numpy = the PyTorch operator."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import export.operators  # noqa: F401  registers torch.ops.unicache
from engines.plugins.abi import Rows
from tests.engines.simt import INVALID_VALUE, PLUGINS, compiled

SOURCE = PLUGINS / "topk_gather.cu"

TopK = Callable[..., list[np.ndarray]]


def kernel(folder: Path, *flags: str) -> TopK:
    library = compiled(SOURCE, folder, *flags)

    def run(score: np.ndarray, tensors: list[np.ndarray], k: int, shift: int = 0) -> list[np.ndarray]:
        """`shift`: bytes that the kept tensors start behind an aligned address."""
        batch, heads, tokens = score.shape

        def room(*shape: int, dtype: np.dtype) -> np.ndarray:
            size = math.prod(shape) * dtype.itemsize
            there = np.zeros(size + 16 + shift, np.uint8)
            first = -there.ctypes.data % 16 + shift
            array = there[first : first + size].view(dtype).reshape(shape)
            array[:] = 77
            return array

        # Kept tensors start as something that is no result; one row more than asked for stays as it was.
        kept = [room(batch * heads * k + 1, *x.shape[3:], dtype=x.dtype) for x in tensors]
        index = np.full(batch * heads * k + 1, 0, np.int64)
        sizes = [int(np.prod(x.shape[3:], dtype=int)) * x.itemsize for x in tensors]
        rows = (Rows * 4)(*map(Rows, [x.ctypes.data for x in tensors], [x.ctypes.data for x in kept], sizes))
        place = [ctypes.c_void_p(score.ctypes.data), rows, ctypes.c_void_p(index.ctypes.data)]
        assert library.unicache_topk_gather(*place, batch * heads, tokens, k, None) == 0
        assert index[-1] == 0
        assert all((x[-1] == 77).all() for x in kept)
        return [x[:-1].reshape(batch, heads, k, *x.shape[1:]) for x in (*kept, index)]

    return run


@pytest.fixture(scope="module", params=["forwards", "backwards"])
def topk(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TopK:
    """Threads in both orders: where a barrier is missing, the results differ in one of them."""
    return kernel(tmp_path_factory.mktemp("topk"), *["-DSIMT_BACKWARDS"] * (request.param == "backwards"))


def stated(score: np.ndarray, tensors: list[np.ndarray], k: int) -> list[np.ndarray]:
    """Head by head: order by score downwards, then by index upwards; the first k, in the order of their indices."""
    batch, heads, tokens = score.shape
    index = np.zeros((batch, heads, k), np.int64)
    kept = [np.zeros((batch, heads, k, *x.shape[3:]), x.dtype) for x in tensors]
    for b, h in np.ndindex(batch, heads):
        index[b, h] = np.sort(np.lexsort((np.arange(tokens), -score[b, h].astype(np.float64)))[:k])
        for x, y in zip(tensors, kept, strict=True):
            y[b, h] = x[b, h][index[b, h]]
    return [*kept, index]


def index_of_operator(score: np.ndarray, k: int) -> np.ndarray:
    scored = torch.from_numpy(score.copy())
    return torch.ops.unicache.topk_gather(scored, scored[..., None], scored[..., None], scored, scored, k)[-1].numpy()


def same(ours: list[np.ndarray], theirs: list[np.ndarray]) -> bool:
    pairs = zip(ours, theirs, strict=True)
    return all(a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes() for a, b in pairs)


def tensors_for(rng: np.random.Generator, shape: tuple[int, ...], dtype: str, width: int) -> list[np.ndarray]:
    """Key, value, positions and bias of any bytes whatever, NaN patterns too; values are one number wider than keys."""

    def any_bytes(dtype: str, *shape: int) -> np.ndarray:
        count = int(np.prod(shape)) * np.dtype(dtype).itemsize
        return np.frombuffer(rng.bytes(count), dtype).reshape(shape)

    key, value = any_bytes(dtype, *shape, width), any_bytes(dtype, *shape, width + 1)
    return [key, value, any_bytes("int32", *shape), any_bytes("float16", *shape)]


def scores(rng: np.random.Generator, shape: tuple[int, ...], kind: str) -> np.ndarray:
    if kind == "equal":
        return np.full(shape, rng.standard_normal(), np.float32)
    if kind == "ties":
        return rng.integers(-2, 3, shape).astype(np.float32) * np.float32(0.1)
    if kind == "neighbours":  # differ in the last bits only
        return (rng.integers(0, 300, shape) + np.float32(1).view(np.int32)).astype(np.int32).view(np.float32)
    score = rng.standard_normal(shape).astype(np.float32)
    if kind == "special":
        special = [-np.inf, np.inf, 0.0, -0.0, 1e-45, -1e-45, 3.4e38, -3.4e38, -1e4]
        score = rng.choice(np.array(special, np.float32), shape)
    elif kind == "padding":
        score[rng.random(shape) < 0.6] = -np.inf
    return score


@settings(max_examples=50)
@given(
    seed=st.integers(0, 2**32 - 1),
    batch=st.integers(1, 2),
    heads=st.sampled_from([1, 3]),
    tokens=st.one_of(st.integers(1, 70), st.integers(1, 2500)),
    kind=st.sampled_from(["any", "equal", "ties", "neighbours", "special", "padding"]),
    dtype=st.sampled_from(["float16", "float32", "int8"]),
    width=st.integers(0, 40),
    data=st.data(),
)
def test_kernel_is_the_statement_and_the_operator(
    topk: TopK, seed: int, batch: int, heads: int, tokens: int, kind: str, dtype: str, width: int, data: st.DataObject
) -> None:
    rng = np.random.default_rng(seed)
    k = data.draw(st.one_of(st.just(1), st.just(tokens), st.integers(1, tokens)))
    score = scores(rng, (batch, heads, tokens), kind)
    tensors = tensors_for(rng, score.shape, dtype, width)
    ours = topk(score, tensors, k)
    assert same(ours, stated(score, tensors, k))
    assert same(ours[-1:], [index_of_operator(score, k)])


@pytest.mark.parametrize("kind", ["any", "ties", "equal"])
@pytest.mark.parametrize(("tokens", "k"), [(4097, 4001), (9999, 9999), (131_072, 1), (131_071, 30_001)])
def test_kernel_of_many_tokens(topk: TopK, tokens: int, k: int, kind: str) -> None:
    rng = np.random.default_rng(tokens + k)
    score = scores(rng, (1, 1, tokens), kind)
    tensors = tensors_for(rng, score.shape, "int8", 6)
    assert same(topk(score, tensors, k), stated(score, tensors, k))


def test_rows_that_start_at_an_odd_address(topk: TopK) -> None:
    rng = np.random.default_rng(0)
    score = scores(rng, (1, 1, 9), "any")
    tensors = tensors_for(rng, score.shape, "int8", 16)
    tensors[0] = np.frombuffer(rng.bytes(9 * 16 + 1), np.int8)[1:].reshape(1, 1, 9, 16)
    assert tensors[0].ctypes.data % 2 == 1
    assert same(topk(score, tensors, 5), stated(score, tensors, 5))


@pytest.mark.parametrize("shift", [1, 2, 8])
def test_kept_rows_that_start_at_an_odd_address(topk: TopK, shift: int) -> None:
    rng = np.random.default_rng(0)
    score = scores(rng, (2, 2, 9), "any")
    tensors = tensors_for(rng, score.shape, "int8", 16)
    assert same(topk(score, tensors, 5, shift), stated(score, tensors, 5))


@pytest.mark.parametrize("k", [1, 2, 3])
def test_zeros_of_either_sign_are_a_tie(topk: TopK, k: int) -> None:
    score = np.array([[[-1, -0.0, 0.0, -0.0, 0.0]]], np.float32)
    tensors = tensors_for(np.random.default_rng(0), score.shape, "float16", 3)
    ours = topk(score, tensors, k)
    assert ours[-1].tolist() == [[[*range(1, k + 1)]]]
    assert same(ours, stated(score, tensors, k))


@pytest.mark.parametrize("k", [1, 3, 7])
def test_not_a_number_is_above_all_as_in_pytorch(topk: TopK, k: int) -> None:
    rng = np.random.default_rng(0)
    score = np.array([[[1, np.nan, np.inf, -np.nan, -np.inf, np.nan, 0]]], np.float32)
    tensors = tensors_for(rng, score.shape, "float16", 3)
    assert same(topk(score, tensors, k)[-1:], [index_of_operator(score, k)])


def test_a_tie_rule_that_is_off_by_one_is_caught(tmp_path: Path) -> None:
    wrong = kernel(tmp_path, "-DTIE_SHIFT=1")
    rng = np.random.default_rng(0)
    score = scores(rng, (1, 2, 50), "ties")
    tensors = tensors_for(rng, score.shape, "float16", 4)
    assert not same(wrong(score, tensors, 20), stated(score, tensors, 20))


@pytest.mark.parametrize(("heads", "tokens", "k"), [(1, 4, 5), (1, 4, -1), (-1, 4, 1), (65536, 4, 1)])
def test_sizes_out_of_range_are_refused(tmp_path: Path, heads: int, tokens: int, k: int) -> None:
    library = compiled(SOURCE, tmp_path)
    assert library.unicache_topk_gather(None, (Rows * 4)(), None, heads, tokens, k, None) == INVALID_VALUE

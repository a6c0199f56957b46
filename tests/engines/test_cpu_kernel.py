"""The C++ kernel of QuantKVAttention = the operator in PyTorch, on every instruction path that this machine runs."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from ctypes import POINTER, Structure, c_float, c_int8, c_int64
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.engines.attention_inputs import BLOCKS, WIDTHS, exact, inputs

SOURCE = Path(__file__).parents[2] / "engines" / "plugins" / "cpu" / "attention.cc"
FLOATS = POINTER(c_float)
many = settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


class Store(Structure):
    _fields_ = (
        ("codes", POINTER(c_int8)),
        ("scale", FLOATS),
        *((name, c_int64) for name in ("bits", "scale_batch", "token_blocks", "channel_blocks")),
    )


class Attention(Structure):
    _fields_ = (
        *((name, c_int64) for name in ("batch", "kv_heads", "group", "queries", "slots", "window", "head_dim")),
        ("softmax_scale", c_float),
        ("query", FLOATS),
        ("key", Store),
        ("value", Store),
        *((name, FLOATS) for name in ("store_bias", "key_window", "value_window", "window_bias")),
        *((name, FLOATS) for name in ("output", "store_mass", "window_mass")),
    )


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    if not (compiler := shutil.which("g++")):
        pytest.skip("g++ is not installed")
    path = tmp_path_factory.mktemp("kernel") / "libunicache_cpu.so"
    command = [compiler, "-O3", "-std=c++17", "-Wall", "-Wextra", "-shared", "-fPIC"]
    built = subprocess.run([*command, str(SOURCE), "-o", str(path)], capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    return ctypes.CDLL(str(path))


@pytest.fixture(params=["plain", "avx2", "avx512"])
def path(request: pytest.FixtureRequest, library: ctypes.CDLL) -> bytes:
    name = request.param.encode()
    if not library.unicache_attention_runs(name):
        pytest.skip(f"this processor does not run the path {request.param}")
    return name


def run(library: ctypes.CDLL, path: bytes | None, x: dict[str, np.ndarray], scale: float, bits: tuple[int, int]):
    """The kernel's three outputs; they start as NaN, so that a number left out shows."""
    batch, heads, queries, head_dim = x["query"].shape
    kv_heads, slots = x["key_store"].shape[1:3]
    window = x["key_window"].shape[2]
    outputs = [
        np.full(shape, np.nan, np.float32)
        for shape in (x["query"].shape, (batch, kv_heads, slots), (batch, kv_heads, window))
    ]

    def floats(array: np.ndarray):
        assert array.dtype == np.float32
        assert array.flags.c_contiguous
        return array.ctypes.data_as(FLOATS)

    def store(codes: np.ndarray, scales: np.ndarray, width: int) -> Store:
        scale_batch, _, token_blocks, channel_blocks = scales.shape
        pointer = codes.ctypes.data_as(POINTER(c_int8))
        return Store(pointer, floats(scales), width, scale_batch, token_blocks, channel_blocks)

    arguments = Attention(
        *(batch, kv_heads, heads // kv_heads, queries, slots, window, head_dim, scale, floats(x["query"])),
        store(x["key_store"], x["key_scale"], bits[0]),
        store(x["value_store"], x["value_scale"], bits[1]),
        *map(floats, (x["store_bias"], x["key_window"], x["value_window"], x["window_bias"], *outputs)),
    )
    # In two calls, as two threads would share the heads.
    half, last = c_int64(batch * kv_heads // 2), c_int64(batch * kv_heads)
    assert library.unicache_attention(ctypes.byref(arguments), c_int64(0), half, path) == 0
    assert library.unicache_attention(ctypes.byref(arguments), half, last, path) == 0
    return outputs


def check(library: ctypes.CDLL, path: bytes | None, x: dict[str, np.ndarray], bits: tuple[int, int] = (8, 8)) -> None:
    scale = x["query"].shape[-1] ** -0.5
    names = ("output", "store_mass", "window_mass")
    for name, got, w in zip(names, run(library, path, x, scale, bits), exact(x, scale, bits), strict=True):
        assert np.isfinite(got).all(), name
        np.testing.assert_allclose(got, w, atol=1e-5, rtol=1e-5, err_msg=name)


@many
@given(
    seed=st.integers(0, 2**32 - 1),
    batch=st.integers(1, 2),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 4),
    queries=st.integers(1, 8),
    slots=st.sampled_from([1, 2, 31, 32, 33, 77, 257]),
    window=st.sampled_from([1, 5, 32, 41]),
    head_dim=st.sampled_from([1, 5, 33, 64, 80, 96, 100, 127, 128, 256]),
    filled=st.sampled_from([0.0, 0.5, 1.0]),
    bits=st.tuples(WIDTHS, WIDTHS),
    blocks=st.tuples(BLOCKS, BLOCKS),
    shared=st.booleans(),
)
def test_every_path_is_the_operator(library: ctypes.CDLL, path: bytes, seed: int, bits: tuple[int, int], **shape):
    check(library, path, inputs(np.random.default_rng(seed), bits=bits, **shape), bits)


SHAPE: dict[str, Any] = {"batch": 2, "kv_heads": 2, "group": 3, "queries": 2, "slots": 45, "window": 3, "head_dim": 80}


@pytest.mark.parametrize("bits", [(8, 8), (4, 4)])
def test_no_slots(library: ctypes.CDLL, path: bytes, bits: tuple[int, int]) -> None:
    """The operator's scales have no meaning over no slots, so the reference is attention over one slot, masked."""
    x = inputs(np.random.default_rng(0), **{**SHAPE, "slots": 1}, filled=0.0, bits=bits)
    none = dict(x)
    for name in ("key_store", "value_store", "store_bias"):
        none[name] = np.ascontiguousarray(x[name][:, :, :0])
    none["value_scale"] = np.ascontiguousarray(x["value_scale"][:, :, :0])
    masked, nothing = (run(library, path, each, 0.125, bits) for each in (x, none))
    np.testing.assert_allclose(nothing[0], masked[0], atol=1e-6)
    np.testing.assert_allclose(nothing[2], masked[2], atol=1e-6)
    check(library, path, x, bits)


def test_all_masked_is_finite(library: ctypes.CDLL, path: bytes) -> None:
    x = inputs(np.random.default_rng(0), **SHAPE, filled=0.0)
    x["window_bias"][:] = -np.inf
    outputs = run(library, path, x, 0.125, (8, 8))
    assert all(np.isfinite(output).all() for output in outputs)
    np.testing.assert_allclose(outputs[1].sum(-1) + outputs[2].sum(-1), SHAPE["queries"], rtol=1e-5)


def test_a_masked_slot_receives_exactly_nothing(library: ctypes.CDLL, path: bytes) -> None:
    x = inputs(np.random.default_rng(0), **SHAPE, filled=0.5)
    store_mass = run(library, path, x, 0.125, (8, 8))[1]
    assert not store_mass[np.isinf(x["store_bias"])].any()
    assert store_mass[np.isfinite(x["store_bias"])].all()


def test_the_largest_logit_may_come_last(library: ctypes.CDLL, path: bytes) -> None:
    """What the online softmax summed before must be scaled down, by far and by little."""
    x = inputs(np.random.default_rng(0), **{**SHAPE, "slots": 200}, filled=1.0)
    x["store_bias"][:] = np.linspace(-60, 60, 200) ** 3 / 3600
    check(library, path, x)
    x["store_bias"][:] = x["store_bias"][..., ::-1]
    check(library, path, x)


def test_an_unknown_path_is_refused(library: ctypes.CDLL) -> None:
    assert not library.unicache_attention_runs(b"sse9")
    assert library.unicache_attention(ctypes.byref(Attention()), c_int64(0), c_int64(0), b"sse9") == 1


def test_without_a_path_the_fastest_runs(library: ctypes.CDLL) -> None:
    check(library, None, inputs(np.random.default_rng(0), **SHAPE, filled=0.5))

"""The C++ kernel of QuantKVAttention = the operator in PyTorch, on every instruction path that this machine runs."""

from __future__ import annotations

import ctypes
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engines.plugins import abi, cpu_library
from tests.engines.attention_inputs import BLOCKS, TYPES, WIDTHS, arguments, exact, in_types, inputs, rounding

TASK = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_size_t)
RUN = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, TASK, ctypes.c_size_t, ctypes.c_void_p)
many = settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


class Threads(ctypes.Structure):
    """UnicacheThreads of cpu.h."""

    _fields_ = (("run", RUN), ("context", ctypes.c_void_p))


@pytest.fixture(scope="module")
def library(operator_library: Path) -> ctypes.CDLL:
    return ctypes.CDLL(str(operator_library))


@pytest.fixture(params=cpu_library.PATHS)
def path(request: pytest.FixtureRequest, library: ctypes.CDLL) -> bytes:
    name = request.param.encode()
    if not library.unicache_cpu_runs(name):
        pytest.skip(f"this processor does not run the path {request.param}")
    return name


def run(
    library: ctypes.CDLL,
    path: bytes | None,
    x: dict[str, np.ndarray],
    scale: float,
    bits: tuple[int, int],
    wanted: int = 3,
    threads: Threads | None = None,
) -> list[np.ndarray]:
    """The kernel's outputs, the first `wanted`; they start as NaN, so that a number left out shows."""
    masses = x["store_bias"].shape, (*x["store_bias"].shape[:2], x["key_window"].shape[2])
    outputs = [np.full(shape, np.nan, x["query"].dtype) for shape in (x["query"].shape, *masses)][:wanted]
    asked = arguments(x, scale, bits, [*outputs, *[None] * (3 - wanted)])
    shared = None if threads is None else ctypes.byref(threads)
    assert library.unicache_cpu_quant_kv_attention(ctypes.byref(asked), path, shared) == 0
    return outputs


def check(
    library: ctypes.CDLL, path: bytes | None, x: dict[str, np.ndarray], bits: tuple[int, int] = (8, 8), **options: Any
) -> None:
    # A float16 result is the exact one, rounded: to one part in 2048, or to the nearest of the smallest numbers.
    near = 6e-4 if x["query"].dtype == np.float16 else 1e-5
    scale = x["query"].shape[-1] ** -0.5
    got, want, rounded = run(library, path, x, scale, bits, **options), exact(x, scale, bits), rounding(x, scale, bits)
    for name, ours, theirs, lost in zip(("output", "store_mass", "window_mass"), got, want, rounded, strict=False):
        assert np.isfinite(ours).all(), name
        allowed = 1e-5 + near * np.abs(theirs) + (lost if rounds(library, path) else 0)
        assert (np.abs(ours - theirs) <= allowed).all(), (name, (np.abs(ours - theirs) / allowed).max())


def rounds(library: ctypes.CDLL, path: bytes | None) -> bool:
    """Whether a path, or the fastest, rounds queries and weights to 16 bits."""
    fastest = next(name for name in cpu_library.PATHS if library.unicache_cpu_runs(name.encode()))
    return (fastest if path is None else path.decode()) in cpu_library.ROUNDING_PATHS


SHAPE: dict[str, Any] = {"batch": 2, "kv_heads": 2, "group": 3, "queries": 2, "slots": 45, "window": 3, "head_dim": 80}


@many
@given(
    seed=st.integers(0, 2**32 - 1),
    batch=st.integers(1, 2),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 4),
    queries=st.integers(1, 8),
    slots=st.sampled_from([1, 2, 31, 64, 65, 127, 129, 257, 432, 720]),  # the last: blocks of 48 and 144 tokens
    window=st.sampled_from([0, 1, 5, 32, 41, 70]),
    head_dim=st.sampled_from([1, 5, 16, 32, 33, 64, 80, 96, 100, 127, 128, 192, 256]),
    filled=st.sampled_from([0.0, 0.5, 1.0]),
    bits=st.tuples(WIDTHS, WIDTHS),
    blocks=st.tuples(BLOCKS, BLOCKS),
    shared=st.booleans(),
    types=st.tuples(TYPES, st.tuples(TYPES, TYPES), st.tuples(TYPES, TYPES)),
    wanted=st.integers(1, 3),
)
def test_every_path_is_the_operator(
    library: ctypes.CDLL, path: bytes, seed: int, bits: tuple[int, int], types: Any, wanted: int, **shape: Any
) -> None:
    x = inputs(np.random.default_rng(seed), bits=bits, **shape)
    if not shape["window"]:
        x["store_bias"][..., -1] = 0  # all masked is a test of its own
    check(library, path, in_types(x, *types), bits, wanted=wanted)


@settings(many, max_examples=40)
@given(
    seed=st.integers(0, 2**32 - 1),
    each=st.integers(0, 5).map(lambda n: 16 * (2 * n + 1)),
    times=st.integers(1, 4),
    group=st.integers(1, 8),
    queries=st.integers(1, 3),
    head_dim=st.sampled_from([64, 80, 128, 256]),
    bits=st.tuples(WIDTHS, WIDTHS),
    values=BLOCKS,
)
def test_blocks_of_odd_multiples_of_16_tokens(
    library: ctypes.CDLL,
    path: bytes,
    seed: int,
    each: int,
    times: int,
    bits: tuple[int, int],
    values: Any,
    **shape: Any,
) -> None:
    shape = {**SHAPE, **shape, "batch": 1, "slots": each * times}
    check(
        library,
        path,
        inputs(np.random.default_rng(seed), **shape, filled=0.8, bits=bits, blocks=((each, 1), values)),
        bits,
    )


@pytest.mark.parametrize("queries", [1, 3])
def test_threads_change_nothing(library: ctypes.CDLL, queries: int) -> None:
    """Parts of a long store, in any order and at once: the same bits as one after the other."""
    x = inputs(np.random.default_rng(0), **{**SHAPE, "slots": 4500, "queries": queries}, filled=0.9)
    with ThreadPoolExecutor(3) as pool:

        def run_tasks(_: object, task: Any, count: int, data: int) -> int:
            assert count == 2 * 2 * 4  # of a head, three parts of its store and its window
            return len(list(pool.map(lambda i: task(data, i), np.random.default_rng(1).permutation(count)))) - count

        threads = Threads(RUN(run_tasks), None)
        check(library, None, x, threads=threads)
        alone, shared = (run(library, None, x, 0.125, (8, 8), threads=each) for each in (None, threads))
    assert all((a == b).all() for a, b in zip(alone, shared, strict=True))


@pytest.mark.parametrize("bits", [(8, 8), (4, 4)])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("each", [16, 48, 144, 176])
def test_blocks_of_keys_that_end_within_a_tile(
    library: ctypes.CDLL, path: bytes, each: int, head_dim: int, bits: tuple[int, int]
) -> None:
    """Each row and each part writes its own logits only, in whatever order the parts are attended to."""
    shape = {**SHAPE, "batch": 1, "queries": 1, "group": 4, "slots": 2208 // each * each, "head_dim": head_dim}
    x = inputs(np.random.default_rng(0), **shape, filled=0.9, bits=bits, blocks=((each, 1), (1, 32)))
    check(library, path, x, bits)
    with ThreadPoolExecutor(2) as pool:

        def run_tasks(_: object, task: Any, count: int, data: int) -> int:
            return len(list(pool.map(lambda i: task(data, i), reversed(range(count))))) - count

        alone, shared = (run(library, path, x, 0.125, bits, threads=each) for each in (None, Threads(RUN(run_tasks))))
    assert all((a == b).all() for a, b in zip(alone, shared, strict=True))


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


@pytest.mark.parametrize("bits", [(8, 8), (4, 4)])
@pytest.mark.parametrize("channels", [32, 64, 10**6])
def test_negative_scales(library: ctypes.CDLL, path: bytes, bits: tuple[int, int], channels: int) -> None:
    x = inputs(
        np.random.default_rng(0), **{**SHAPE, "head_dim": 128}, filled=0.8, bits=bits, blocks=((1, 1), (1, channels))
    )
    x["key_scale"] *= -1
    x["value_scale"][:, :, ::3] *= -1
    check(library, path, x, bits)


def test_weights_far_from_one_another(library: ctypes.CDLL, path: bytes) -> None:
    """Scales and logits of many sizes: what is small beside the largest is small in the result, and nothing is lost."""
    x = inputs(np.random.default_rng(0), **{**SHAPE, "slots": 300, "head_dim": 64}, filled=1.0)
    x["value_scale"] *= 10.0 ** np.random.default_rng(1).integers(-6, 3, x["value_scale"].shape)
    x["query"] *= 10.0 ** np.random.default_rng(2).integers(-3, 3, x["query"].shape)
    scale = 0.1
    got, want, rounded = run(library, path, x, scale, (8, 8)), exact(x, scale), rounding(x, scale)
    for ours, theirs, lost in zip(got, want, rounded, strict=True):
        allowed = 2e-5 * np.abs(theirs).max() + 1e-4 * np.abs(theirs) + (lost if rounds(library, path) else 0)
        assert (np.abs(ours - theirs) <= allowed).all(), (np.abs(ours - theirs) / allowed).max()


@settings(many, max_examples=40)
@given(
    seed=st.integers(0, 2**32 - 1),
    bits=st.tuples(WIDTHS, WIDTHS),
    head_dim=st.sampled_from([64, 128, 256]),
    slots=st.integers(1, 400),
    times=st.sampled_from([1.0, 10.0, 100.0]),
    blocks=st.tuples(st.sampled_from([(10**6, 1), (32, 1), (1, 10**6)]), st.sampled_from([(1, 10**6), (1, 32)])),
)
def test_16_bits_lose_what_is_stated(
    library: ctypes.CDLL,
    path: bytes,
    seed: int,
    bits: tuple[int, int],
    head_dim: int,
    slots: int,
    times: float,
    blocks: Any,
) -> None:
    """Queries whose largest number is `times` their others: the coarser its step, the more it may lose."""
    if not rounds(library, path):
        pytest.skip("multiplies floats")
    shape = {**SHAPE, "slots": slots, "head_dim": head_dim}
    x = inputs(np.random.default_rng(seed), **shape, filled=1.0, bits=bits, blocks=blocks)
    x["query"][..., 0] *= times
    for ours, floats, theirs, lost in zip(
        run(library, path, x, 0.1, bits),
        run(library, b"plain", x, 0.1, bits),
        exact(x, 0.1, bits),
        rounding(x, 0.1, bits),
        strict=True,
    ):
        of_floats = np.abs(floats - theirs).max()
        assert (np.abs(ours - theirs) <= lost + 2 * of_floats + 1e-6).all()


@pytest.mark.parametrize("times", [1e6, 1e-6])
@pytest.mark.parametrize("bits", [(8, 8), (4, 4)])
@pytest.mark.parametrize("channels", [32, 10**6])
def test_the_scale_of_a_masked_slot(
    library: ctypes.CDLL, path: bytes, channels: int, bits: tuple[int, int], times: float
) -> None:
    shape = {**SHAPE, "slots": 300, "head_dim": 128}
    x = inputs(np.random.default_rng(0), **shape, filled=1.0, bits=bits, blocks=((1, 10**6), (1, channels)))
    x["store_bias"][..., 5] = -np.inf
    x["value_scale"][:, :, 5] *= times
    check(library, path, x, bits)


@pytest.mark.parametrize("number", [np.nan, np.inf])
@pytest.mark.parametrize("bits", [(8, 8), (4, 4)])
@pytest.mark.parametrize(
    "blocks", [((10**6, 1), (1, 10**6)), ((1, 10**6), (1, 32)), ((48, 1), (10**6, 1)), ((1, 7), (1, 7))], ids=str
)
def test_what_is_not_finite_shows(
    library: ctypes.CDLL, path: bytes, blocks: Any, bits: tuple[int, int], number: float
) -> None:
    """A model that overflows must not talk on: a row of the operator's result with such a number has one here."""
    shape = {**SHAPE, "slots": 240, "head_dim": 128}
    for name in inputs(np.random.default_rng(0), **shape, filled=0.9):
        x = inputs(np.random.default_rng(0), **shape, filled=0.9, bits=bits, blocks=blocks)
        if x[name].dtype == np.int8:
            continue
        x[name].reshape(-1)[x[name].size // 3] = number
        got, want = run(library, path, x, 0.125, bits), exact(x, 0.125, bits)
        for ours, theirs in zip(got, want, strict=True):
            rows = np.isfinite(theirs).all(-1)
            assert not rows.all() or "value" in name
            np.testing.assert_array_equal(np.isfinite(ours).all(-1), rows, err_msg=name)


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
    assert not library.unicache_cpu_runs(b"sse9")
    assert library.unicache_cpu_quant_kv_attention(ctypes.byref(abi.Attention()), b"sse9", None) == 1


def test_without_a_path_the_fastest_runs(library: ctypes.CDLL) -> None:
    check(library, None, inputs(np.random.default_rng(0), **SHAPE, filled=0.5))


def test_float16_is_rounded_to_the_nearest_even(library: ctypes.CDLL, path: bytes) -> None:
    """Two tokens of equal weight: the output is the mean of two values, exact before it is rounded."""
    every = np.arange(2**16, dtype=np.uint16).view(np.float16)
    every = every[np.isfinite(every)]
    x = inputs(np.random.default_rng(0), 1, 1, 1, 1, 1, 2, len(every), filled=0.0)
    x = in_types(x, "float16", ("float32", "float32"), ("float32", "float32"))
    x["key_window"][:], x["window_bias"][:] = 0, 0
    x["value_window"][0, 0] = every, np.random.default_rng(0).permutation(every)
    got = run(library, path, x, 1.0, (8, 8))[0][0, 0, 0]
    np.testing.assert_array_equal(got, x["value_window"][0, 0].astype(np.float32).mean(0).astype(np.float16))

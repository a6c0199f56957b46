"""The CUDA kernel of QuantKVAttention, compiled for the host (engines/plugins/simt.h), = the operator in PyTorch."""

from __future__ import annotations

import ctypes
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.engines.attention_inputs import BLOCKS, TYPES, WIDTHS, arguments, exact, in_types, inputs
from tests.engines.simt import INVALID_VALUE, PLUGINS, compiled
from tests.export.test_operators import run_attention

SOURCE = PLUGINS / "quant_kv_attention.cu"
SCALE = 0.3
many = settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])

Inputs = dict[str, np.ndarray]


class Kernel:
    """The compiled kernel, called with numpy arrays."""

    def __init__(self, folder: Path, *flags: str) -> None:
        library = compiled(SOURCE, folder, *flags)
        self.workspace, self.launch = library.unicache_quant_kv_attention_workspace, library.unicache_quant_kv_attention
        self.workspace.restype = ctypes.c_size_t

    def __call__(self, x: Inputs, bits: tuple[int, int] = (8, 8), masses: bool = True) -> list[np.ndarray]:
        """Outputs and workspace start as NaN, so that a number left out shows; what is behind them must stay."""
        stores, windows = x["store_bias"].shape, (*x["store_bias"].shape[:2], x["key_window"].shape[2])
        shapes = [x["query"].shape, *([stores, windows] if masses else [])]
        outputs = [np.full(math.prod(shape) + 1, np.nan, x["query"].dtype) for shape in shapes]
        asked = ctypes.byref(arguments(x, SCALE, bits, [*outputs, *[None] * (3 - len(outputs))]))
        workspace = np.full(self.workspace(asked) // 4 + 1, np.nan, np.float32)
        assert self.launch(asked, ctypes.c_void_p(workspace.ctypes.data), None) == 0
        assert all(np.isnan(array[-1]) for array in (workspace, *outputs))
        return [output[:-1].reshape(shape) for output, shape in zip(outputs, shapes, strict=True)]


@pytest.fixture(scope="module", params=["forwards", "backwards"])
def attend(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Kernel:
    """Threads in both orders: where a barrier is missing, the results differ in one of them."""
    return Kernel(tmp_path_factory.mktemp("attention"), *["-DSIMT_BACKWARDS"] * (request.param == "backwards"))


def check(attend: Kernel, x: Inputs, bits: tuple[int, int] = (8, 8), **options: bool) -> None:
    # A float16 result is the exact one, rounded: to one part in 2048, or to the nearest of the smallest numbers.
    near = 6e-4 if x["query"].dtype == np.float16 else 1e-5
    names, got = ("output", "store_mass", "window_mass"), attend(x, bits, **options)
    for name, ours, theirs in zip(names, got, exact(x, SCALE, bits), strict=False):
        assert np.isfinite(ours).all(), name
        np.testing.assert_allclose(ours, theirs, atol=1e-5, rtol=near, err_msg=name)


@many
@given(
    seed=st.integers(0, 2**32 - 1),
    batch=st.integers(1, 2),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 7),
    queries=st.one_of(st.just(1), st.integers(1, 8)),
    slots=st.sampled_from([1, 2, 31, 63, 64, 65, 77, 130, 257]),
    window=st.sampled_from([0, 1, 5, 32, 41, 70]),
    head_dim=st.sampled_from([1, 5, 16, 32, 33, 64, 80, 96, 100, 127, 128, 256]),
    filled=st.sampled_from([0.0, 0.5, 1.0]),
    bits=st.tuples(WIDTHS, WIDTHS),
    blocks=st.tuples(BLOCKS, BLOCKS),
    shared=st.booleans(),
    activations=TYPES,
    scales=st.tuples(TYPES, TYPES),
    biases=st.tuples(TYPES, TYPES),
)
def test_kernel_is_the_operator(
    attend: Kernel,
    seed: int,
    bits: tuple[int, int],
    activations: str,
    scales: tuple[str, str],
    biases: tuple[str, str],
    **shape: Any,
) -> None:
    x = inputs(np.random.default_rng(seed), bits=bits, **shape)
    if not shape["window"]:
        x["store_bias"][..., -1] = 0  # all masked is a test of its own
    check(attend, in_types(x, activations, scales, biases), bits)


SHAPE: dict[str, Any] = {
    **{"batch": 2, "kv_heads": 2, "group": 3, "queries": 2},
    **{"slots": 145, "window": 9, "head_dim": 80, "filled": 0.5},
}


def random(seed: int = 0, **shape: Any) -> Inputs:
    return inputs(np.random.default_rng(seed), **{**SHAPE, **shape})


@pytest.mark.parametrize("bits", [(8, 8), (4, 4)])
@pytest.mark.parametrize("shape", [{"queries": 8, "group": 4}, {"head_dim": 128, "group": 1, "queries": 1}])
def test_many_parts_of_a_long_store(tmp_path: Path, bits: tuple[int, int], shape: dict[str, int]) -> None:
    """On a GPU of many multiprocessors, and of one."""
    for count in (1, 132):
        (folder := tmp_path / str(count)).mkdir()
        attend = Kernel(folder, f"-DSIMT_MULTIPROCESSORS={count}")
        check(attend, random(batch=1, kv_heads=1, slots=4001, window=150, bits=bits, **shape), bits)


@pytest.mark.parametrize("bits", [(8, 8), (8, 4), (4, 8), (4, 4)])
def test_the_function_body_in_onnx_runtime_gives_the_same(attend: Kernel, bits: tuple[int, int]) -> None:
    for seed, head_dim in enumerate([32, 80, 128]):
        x = random(seed, head_dim=head_dim, bits=bits, blocks=((32, 1), (1, 32)))
        for ours, theirs in zip(attend(x, bits), run_attention(x, SCALE, bits), strict=True):
            np.testing.assert_allclose(ours, theirs, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("bits", [(8, 8), (4, 4)])
def test_no_slots(attend: Kernel, bits: tuple[int, int]) -> None:
    """The operator's scales have no meaning over no slots, so the reference is attention over one slot, masked."""
    masked = random(slots=1, filled=0.0, bits=bits)
    none = dict(masked)
    for name in ("key_store", "value_store", "store_bias", "value_scale"):
        none[name] = np.ascontiguousarray(masked[name][:, :, :0])
    for ours, theirs in zip(attend(none, bits), exact(masked, SCALE, bits), strict=True):
        if ours.size:
            np.testing.assert_allclose(ours, theirs, atol=1e-5, rtol=1e-5)


def test_no_token_at_all_gives_zeros(attend: Kernel) -> None:
    output, *masses = attend(random(slots=0, window=0))
    assert not output.any()
    assert [mass.size for mass in masses] == [0, 0]


@pytest.mark.parametrize("window", [0, 9])
def test_all_masked_is_finite(attend: Kernel, window: int) -> None:
    x = random(filled=0.0, window=window)
    x["window_bias"][:] = -np.inf
    output, *masses = attend(x)
    assert np.isfinite(output).all()
    np.testing.assert_allclose(sum(mass.sum(-1) for mass in masses), SHAPE["queries"], rtol=1e-5)


def test_a_masked_slot_receives_exactly_nothing(attend: Kernel) -> None:
    x = random()
    store_mass = attend(x)[1]
    assert not store_mass[np.isinf(x["store_bias"])].any()
    assert store_mass[np.isfinite(x["store_bias"])].all()


@pytest.mark.parametrize("order", [1, -1])
def test_the_largest_logit_may_come_last(attend: Kernel, order: int) -> None:
    """What the online softmax summed before must be scaled down, by far and by little."""
    x = random(filled=1.0)
    x["store_bias"][:] = np.linspace(-60, 60, SHAPE["slots"])[::order] ** 3 / 3600
    check(attend, x)


def test_equal_keys_share_the_attention(attend: Kernel) -> None:
    x = random(filled=1.0)
    x["store_bias"][:] = 0
    x["key_store"][:] = 3
    check(attend, x)


def test_masses_are_optional(attend: Kernel) -> None:
    x = random()
    assert attend(x, masses=False)[0].tobytes() == attend(x)[0].tobytes()


@pytest.mark.parametrize("bits", [(8, 8), (4, 4)])
@pytest.mark.parametrize("name", ["key_store", "value_store", "key_window", "value_window"])
def test_rows_that_start_at_an_odd_address(attend: Kernel, bits: tuple[int, int], name: str) -> None:
    x = random(bits=bits)
    there = np.zeros(x[name].size + 17, x[name].dtype)
    first = next(i for i in range(1, 17) if there[i:].ctypes.data % 16 == x[name].itemsize)
    moved = there[first : first + x[name].size].reshape(x[name].shape)
    moved[:] = x[name]
    check(attend, {**x, name: moved}, bits)


@pytest.mark.parametrize("bits", [(8, 8), (4, 4)])
def test_a_loop_that_ends_one_token_early_is_caught(tmp_path: Path, bits: tuple[int, int]) -> None:
    wrong = Kernel(tmp_path, "-DEND_SHIFT=1")
    with pytest.raises(AssertionError, match="Mismatched elements"):
        check(wrong, random(filled=1.0, bits=bits), bits)


REFUSED: list[tuple[str, int | None]] = [
    *((name, 0) for name in ("batch", "kv_heads", "group", "queries", "head_dim")),
    *((name, -1) for name in ("slots", "window", "type", "store_bias_type", "window_bias_type")),
    *(("head_dim", 257), ("slots", 1 << 21), ("batch", 40_000), ("group", 70_000), ("type", 2)),
    *((f"key.{name}", 0) for name in ("scale_batch", "token_blocks", "channel_blocks", "bits")),
    *(("value.token_blocks", 146), ("value.channel_blocks", 81), ("value.bits", 3), ("value.scale_type", 2)),
    *((name, None) for name in ("query", "output", "store_bias", "key_window", "value_window", "window_bias")),
    *((name, None) for name in ("key.codes", "key.scale", "value.codes", "value.scale")),
    *(("query", 1), ("store_bias", 1), ("key_window", 2), ("store_mass", 2)),
]


@pytest.mark.parametrize(("name", "wrong"), REFUSED)
def test_arguments_out_of_range_are_refused(attend: Kernel, name: str, wrong: int | None) -> None:
    x = random()
    outputs = [np.full(shape, np.nan, np.float32) for shape in (x["query"].shape, (2, 2, 145), (2, 2, 9))]
    asked = arguments(x, SCALE, (8, 8), [*outputs])
    *inner, last = name.split(".")
    setattr(getattr(asked, inner[0]) if inner else asked, last, wrong)
    workspace = np.zeros(1 << 20, np.float32)
    assert attend.launch(ctypes.byref(asked), ctypes.c_void_p(workspace.ctypes.data), None) == INVALID_VALUE
    assert all(np.isnan(output).all() for output in outputs)


def test_the_workspace_is_of_the_shapes_alone(attend: Kernel) -> None:
    x = random()
    asked, bare = arguments(x, SCALE, (8, 8), [None] * 3), arguments(x, SCALE, (8, 8), [None] * 3)
    for each, names in (
        (bare, ("query", "store_bias", "key_window", "value_window")),
        *((side, ("codes", "scale")) for side in (bare.key, bare.value)),
    ):
        for name in names:
            setattr(each, name, None)
    size = attend.workspace(ctypes.byref(asked))
    assert size == attend.workspace(ctypes.byref(bare)) > 0
    assert attend.launch(ctypes.byref(asked), None, None) == INVALID_VALUE

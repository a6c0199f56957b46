"""The TensorRT plugins, asked and run on the host as TensorRT does it: = the PyTorch operators, or a complaint."""

from __future__ import annotations

from ctypes import byref, c_size_t
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import export.operators  # noqa: F401  registers torch.ops.unicache
from engines.errors import UserError
from engines.plugins.abi import FLOAT32, Attention, Store
from tests.engines.attention_inputs import BLOCKS, WIDTHS, exact
from tests.engines.attention_inputs import inputs as attention_inputs
from tests.engines.plugin_host import Plugins, Refused


@pytest.fixture(scope="module")
def plugins(tmp_path_factory: pytest.TempPathFactory) -> Plugins:
    try:
        return Plugins(tmp_path_factory.mktemp("plugins"))
    except UserError as error:
        pytest.skip(str(error))


def topk_inputs(rng: np.random.Generator, tokens: int = 40, width: int = 6, **types: str) -> dict[str, np.ndarray]:
    heads = (2, 3, tokens)
    shapes = {"score": heads, "key": (*heads, width), "value": (*heads, width), "positions": heads, "bias": heads}
    dtypes = {"score": "float32", "key": "float16", "value": "float16", "positions": "int32", "bias": "float32"} | types
    return {name: (rng.standard_normal(shape) * 9).astype(dtypes[name]) for name, shape in shapes.items()}


@settings(max_examples=20)
@given(
    seed=st.integers(0, 2**32 - 1),
    tokens=st.integers(1, 300),
    width=st.integers(0, 20),
    key=st.sampled_from(["float16", "float32", "int8"]),
    value=st.sampled_from(["float16", "float32", "int8"]),
    bias=st.sampled_from(["float16", "float32"]),
    integer=st.sampled_from([np.int32, np.int64]),
    data=st.data(),
)
def test_topk_gather(plugins: Plugins, seed, tokens, width, key, value, bias, integer, data) -> None:
    inputs = topk_inputs(np.random.default_rng(seed), tokens, width, key=key, value=value, bias=bias)
    k = data.draw(st.integers(1, tokens), "k")
    stated = torch.ops.unicache.topk_gather(*map(torch.from_numpy, inputs.values()), k)
    results = plugins.run("TopKGather", {"k": integer(k)}, [*inputs.values()], 5)
    for ours, theirs in zip(results, stated, strict=True):
        np.testing.assert_array_equal(ours, theirs.numpy(), strict=True)


@pytest.mark.parametrize(
    ("k", "types", "complaint"),
    [
        (4, {"score": "float16"}, "score is float16, supported: float32"),
        (4, {"key": "int64"}, "key is int64, supported: float32 or float16 or int8"),
        (4, {"positions": "int64"}, "positions is int64, supported: int32"),
        (41, {}, "k 41 is more than the 40 tokens"),
        (0, {}, "k 0 is not supported (at least 1)"),
    ],
)
def test_topk_gather_complains(plugins: Plugins, k: int, types: dict[str, Any], complaint: str) -> None:
    inputs = topk_inputs(np.random.default_rng(0), **types)
    assert refusal(plugins, "TopKGather", {"k": np.int32(k)}, inputs, 5) == f"TopKGather: {complaint}"


@pytest.mark.parametrize(
    ("name", "shape", "complaint"),
    [
        ("bias", (2, 3, 40, 1), "bias has 4 dimensions, expected [batch, kv_heads, tokens]"),
        ("key", (2, 3, 40), "key has 3 dimensions, expected [batch, kv_heads, tokens, head_dim]"),
        ("value", (2, 3, 41, 6), "value has 41 tokens, score has 40"),
        ("positions", (1, 3, 40), "positions has 1 batch, score has 2"),
    ],
)
def test_shapes_that_do_not_fit_are_named(plugins: Plugins, name: str, shape: tuple[int, ...], complaint: str) -> None:
    inputs = topk_inputs(np.random.default_rng(0))
    inputs[name] = np.zeros(shape, inputs[name].dtype)
    assert refusal(plugins, "TopKGather", {"k": np.int32(4)}, inputs, 5) == f"TopKGather: {complaint}"


def test_more_heads_than_the_kernel_takes(plugins: Plugins) -> None:
    inputs = {
        name: np.zeros((65536, 1, *x.shape[2:3], 1)[: x.ndim], x.dtype)
        for name, x in topk_inputs(np.random.default_rng(0)).items()
    }
    complaint = "batch * kv_heads 65536 is not supported (at most 65535)"
    assert refusal(plugins, "TopKGather", {"k": np.int32(4)}, inputs, 5) == f"TopKGather: {complaint}"


@pytest.mark.parametrize(
    ("attributes", "complaint"),
    [({}, "attribute k is missing"), ({"k": np.float64(4)}, "attribute k is no number of a known type")],
)
def test_attributes_that_are_missing_or_of_another_type(plugins: Plugins, attributes: Any, complaint: str) -> None:
    inputs = topk_inputs(np.random.default_rng(0))
    assert refusal(plugins, "TopKGather", attributes, inputs, 5) == f"TopKGather: {complaint}"


def test_a_missing_input_is_an_error(plugins: Plugins) -> None:
    inputs = topk_inputs(np.random.default_rng(0))
    del inputs["bias"]
    assert refusal(plugins, "TopKGather", {"k": np.int32(4)}, inputs, 5) == "TopKGather: has 4 inputs, expected 5"


def attributes_of(bits: tuple[int, int] = (8, 8), scale: float = 0.125) -> dict[str, np.generic]:
    return {"scale": np.float32(scale), "key_bits": np.int32(bits[0]), "value_bits": np.int32(bits[1])}


@settings(max_examples=40)
@given(
    seed=st.integers(0, 2**32 - 1),
    batch=st.integers(1, 2),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 3),
    queries=st.integers(1, 3),
    slots=st.integers(0, 90),
    window=st.integers(1, 20),
    head_dim=st.sampled_from([8, 17, 64]),
    bits=st.tuples(WIDTHS, WIDTHS),
    blocks=st.tuples(BLOCKS, BLOCKS),
    shared=st.booleans(),
    dtype=st.sampled_from(["float32", "float16"]),
    others=st.lists(st.sampled_from(["float32", "float16"]), min_size=4, max_size=4),
)
def test_quant_kv_attention(plugins: Plugins, seed, bits, dtype, others, **shape) -> None:
    """Scales and biases have types of their own, whatever that of the query and the windows."""
    rng = np.random.default_rng(seed)
    inputs = attention_inputs(rng, filled=0.8, bits=bits, **shape)
    types = dict.fromkeys(("query", "key_window", "value_window"), dtype)
    types |= zip(("key_scale", "value_scale", "store_bias", "window_bias"), others, strict=True)
    inputs = {name: x.astype(types.get(name, x.dtype)) for name, x in inputs.items()}
    results = plugins.run("QuantKVAttention", attributes_of(bits), [*inputs.values()], 3)
    for ours, theirs in zip(results, exact(inputs, 0.125, bits), strict=True):
        assert (ours.dtype, ours.shape) == (dtype, theirs.shape)
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=4e-5 if dtype == "float32" else 4e-3)


@pytest.mark.parametrize(
    ("changed", "attributes", "complaint"),
    [
        ({"head_dim": 300}, {}, "head_dim 300 is not supported (at most 256)"),
        ({"slots": 2**20 + 1, "head_dim": 1, "batch": 1}, {}, "slots 1048577 is not supported (at most 1048576)"),
        ({"window": 2**20 + 1, "head_dim": 1, "batch": 1}, {}, "window 1048577 is not supported (at most 1048576)"),
        ({"batch": 2**15, "slots": 1, "window": 1}, {}, "batch * kv_heads 65536 is not supported (at most 65535)"),
        (
            {"group": 2**15, "queries": 2, "head_dim": 1},
            {},
            "heads / kv_heads * queries 65536 is not supported (at most 65535)",
        ),
        ({}, {"key_bits": np.int32(2)}, "key_bits 2 is not supported (8 or 4)"),
        ({}, {"value_bits": np.int32(3)}, "value_bits 3 is not supported (8 or 4)"),
        ({}, {"value_bits": np.int32(4)}, "value_store has 20 bytes a slot, 4 bits of head_dim 20 are 10"),
        ({}, {"key_bits": np.float64(8)}, "attribute key_bits is no number of a known type"),
        ({"key_scale": (3, 2, 1, 20)}, {}, "key_scale has 3 in the batch, expected 1 or 2"),
        ({"key_scale": (1, 3, 1, 20)}, {}, "key_scale has 3 kv_heads, key_store has 2"),
        ({"value_scale": (2, 2, 31, 1)}, {}, "value_scale has 31 blocks of the 30 slots"),
        ({"value_scale": (2, 2, 30, 21)}, {}, "value_scale has 21 blocks of the 20 channels"),
        ({"query": (2, 5, 1, 20)}, {}, "5 heads are not a multiple of the 2 kv_heads"),
        ({"window_bias": (2, 7)}, {}, "window_bias has 2 dimensions, expected [batch, queries, window]"),
        ({"value_window": (2, 2, 8, 20)}, {}, "value_window has 8 window, key_window has 7"),
        ({"key_store": "int32"}, {}, "key_store is int32, supported: int8"),
        ({"value_scale": "int8"}, {}, "value_scale is int8, supported: float32 or float16"),
        ({"key_window": "float16"}, {}, "key_window is float16 and query is float32, not the same"),
    ],
)
def test_quant_kv_attention_complains(plugins: Plugins, changed: dict[str, Any], attributes: Any, complaint) -> None:
    shape: dict[str, Any] = {
        "batch": 2,
        "kv_heads": 2,
        "group": 2,
        "queries": 1,
        "slots": 30,
        "window": 7,
        "head_dim": 20,
    }
    shape |= {name: changed.pop(name) for name in [*changed] if name in shape}
    inputs = attention_inputs(np.random.default_rng(0), filled=1, **shape)
    for name, change in changed.items():
        inputs[name] = inputs[name].astype(change) if isinstance(change, str) else np.zeros(change, inputs[name].dtype)
    got = refusal(plugins, "QuantKVAttention", attributes_of() | attributes, inputs, 3)
    assert got == f"QuantKVAttention: {complaint}"


def test_masses_that_nobody_reads_are_not_computed(plugins: Plugins) -> None:
    x = attention_inputs(np.random.default_rng(0), 1, 2, 2, 1, 30, 7, 20, filled=1)
    output, *masses = plugins.run("QuantKVAttention", attributes_of() | {"masses": np.int32(0)}, [*x.values()], 3)
    np.testing.assert_allclose(output, exact(x, 0.125)[0], rtol=0, atol=4e-5)
    assert all(np.isnan(mass).all() for mass in masses)


def test_the_plugin_takes_every_head_dim_that_the_kernel_takes(plugins: Plugins) -> None:
    def workspace(head_dim: int) -> int:
        store = Store(scale_type=FLOAT32, bits=8, scale_batch=1, token_blocks=1, channel_blocks=1)
        sizes = {"batch": 1, "kv_heads": 1, "group": 1, "queries": 1, "slots": 10, "window": 10, "head_dim": head_dim}
        return plugins.library.unicache_quant_kv_attention_workspace(byref(Attention(**sizes, key=store, value=store)))

    plugins.library.unicache_quant_kv_attention_workspace.restype = c_size_t
    assert workspace(256) > 0 == workspace(257)


def refusal(plugins: Plugins, name: str, attributes: Any, inputs: dict[str, np.ndarray], outputs: int) -> str:
    with pytest.raises(Refused) as error:
        plugins.run(name, attributes, [*inputs.values()], outputs)
    return str(error.value)

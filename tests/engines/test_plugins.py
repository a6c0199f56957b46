"""The TensorRT plugins, asked and run on the host as TensorRT does it: = the PyTorch operators, or a complaint."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import export.operators  # noqa: F401  registers torch.ops.unicache
from engines.errors import UserError
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


def refusal(plugins: Plugins, name: str, attributes: Any, inputs: dict[str, np.ndarray], outputs: int) -> str:
    with pytest.raises(Refused) as error:
        plugins.run(name, attributes, [*inputs.values()], outputs)
    return str(error.value)

"""The two operators: PyTorch = a plain numpy statement = the ONNX function body in ONNX Runtime."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import helper
from torch import nn

from engines import trt
from engines.bundle import TensorSpec
from export.graphs import Graph
from export.onnx_functions import ATTENTION, TENSORRT_TOPK
from export.operators import DOMAIN, DOMAIN_VERSION, TopKGather, functions
from export.to_onnx import OPSET, WeightFile, export

settings.register_profile("operators", max_examples=25, deadline=None)
settings.load_profile("operators")

seeds = st.integers(0, 2**32 - 1)
ATTENTION_INPUTS = [
    "query",
    "key_store",
    "key_scale",
    "value_store",
    "value_scale",
    "store_bias",
    "key_window",
    "value_window",
    "window_bias",
]


def run_body(function, inputs: list[np.ndarray], outputs: int, **attributes) -> list[np.ndarray]:
    """A model that calls the operator once, with its function bodies, in plain ONNX Runtime."""
    bits = attributes.get("key_bits", 8), attributes.get("value_bits", 8)
    names = [f"x{i}" for i in range(len(inputs))]
    results = [f"y{i}" for i in range(outputs)]
    node = helper.make_node(function.name, names, results, domain=DOMAIN, **attributes)
    values = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(x.dtype), x.shape)
        for name, x in zip(names, inputs, strict=True)
    ]
    graph = helper.make_graph([node], "once", values, [helper.make_empty_tensor_value_info(name) for name in results])
    bodies = [ir.serde.serialize_function(body) for body in functions(attributes.get("k", 1), bits)[function.name]]
    opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid(DOMAIN, DOMAIN_VERSION)]
    model = helper.make_model(graph, functions=bodies, opset_imports=opsets, ir_version=10)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return session.run(None, dict(zip(names, inputs, strict=True)))


def run_attention(x: dict[str, np.ndarray], scale: float, bits: tuple[int, int] = (8, 8)) -> list[np.ndarray]:
    return run_body(ATTENTION[bits], list(x.values()), 3, scale=scale, key_bits=bits[0], value_bits=bits[1])


def rows_in_loops(store: np.ndarray, scale: np.ndarray, bits: int, head_dim: int) -> np.ndarray:
    """One number at a time: its code, times the scale of its block."""
    batch, kv_heads, slots, size = store.shape
    scale = np.broadcast_to(scale, (batch, *scale.shape[1:])).astype(np.float64)
    tokens, channels = math.ceil(slots / scale.shape[2]), math.ceil(head_dim / scale.shape[3])
    rows = np.zeros((batch, kv_heads, slots, head_dim))
    for b, h, c, d in np.ndindex(rows.shape):
        if bits == 8:
            code = int(store[b, h, c, d])
        else:
            byte = int(store[b, h, c, d % size]) + 128
            code = (byte // 16 if d >= size else byte % 16) - 8
        rows[b, h, c, d] = code * scale[b, h, c // tokens, d // channels]
    return rows


def attention_in_loops(x: dict[str, np.ndarray], scale: float, bits: tuple[int, int] = (8, 8)) -> list[np.ndarray]:
    """One query head and one query at a time, in double precision; -inf is a weight of exactly zero."""
    query = x["query"].astype(np.float64)
    key_store = rows_in_loops(x["key_store"], x["key_scale"], bits[0], query.shape[-1])
    value_store = rows_in_loops(x["value_store"], x["value_scale"], bits[1], query.shape[-1])
    batch, heads, queries, _ = query.shape
    kv_heads, slots = key_store.shape[1:3]
    group = heads // kv_heads
    output = np.zeros_like(query)
    mass = np.zeros((batch, kv_heads, slots + x["key_window"].shape[2]))
    for b in range(batch):
        for h in range(heads):
            kv = h // group
            keys = np.concatenate([key_store[b, kv], x["key_window"][b, kv]])
            values = np.concatenate([value_store[b, kv], x["value_window"][b, kv]])
            for t in range(queries):
                bias = np.concatenate([x["store_bias"][b, kv], x["window_bias"][b, t]]).astype(np.float64)
                logits = keys @ query[b, h, t] * scale + bias
                weights = np.exp(logits - logits.max())
                weights /= weights.sum()
                output[b, h, t] = weights @ values
                mass[b, kv] += weights / group
    return [output, mass[..., :slots], mass[..., slots:]]


def attention_inputs(
    rng: np.random.Generator,
    batch: int,
    kv_heads: int,
    group: int,
    queries: int,
    slots: int,
    window: int,
    head_dim: int,
    filled: float,
    per_token: bool = False,
    bits: tuple[int, int] = (8, 8),
    key_blocks: tuple[int, int] | None = None,
    value_blocks: tuple[int, int] | None = None,
) -> dict[str, np.ndarray]:
    """`blocks`: at most so many tokens and channels share a scale; by default keys have one a channel or a token."""

    def rows(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(np.float32)

    def scales(blocks: tuple[int, int] | None, default: tuple[int, ...]) -> tuple[int, ...]:
        return default if blocks is None else (batch, kv_heads, -(-slots // blocks[0]), -(-head_dim // blocks[1]))

    def codes(width: int) -> np.ndarray:
        size = head_dim if width == 8 else (head_dim + 1) // 2
        return rng.integers(-128 + (width == 8), 128, (batch, kv_heads, slots, size)).astype(np.int8)

    token = (batch, kv_heads, slots, 1)
    scale = scales(key_blocks, token if per_token else (1, kv_heads, 1, head_dim))
    bias = np.log(rng.integers(1, 5, (batch, kv_heads, slots)))
    bias = np.where(rng.random(bias.shape) < filled, bias, -np.inf)
    window_bias = np.where(rng.random((batch, queries, window)) < 0.7, 0, -np.inf)
    window_bias[..., -1] = 0  # a token always sees itself
    return {
        "query": rows(batch, kv_heads * group, queries, head_dim),
        "key_store": codes(bits[0]),
        "key_scale": (rng.random(scale) * 0.02 + 0.001).astype(np.float32),
        "value_store": codes(bits[1]),
        "value_scale": (rng.random(scales(value_blocks, token)) * 0.02 + 0.001).astype(np.float16),
        "store_bias": bias.astype(np.float16),
        "key_window": rows(batch, kv_heads, window, head_dim),
        "value_window": rows(batch, kv_heads, window, head_dim),
        "window_bias": window_bias.astype(np.float32),
    }


def check_attention(x: dict[str, np.ndarray], bits: tuple[int, int] = (8, 8)) -> None:
    scale = x["query"].shape[-1] ** -0.5
    assert list(x) == ATTENTION_INPUTS
    want = attention_in_loops(x, scale, bits)
    eager = torch.ops.unicache.quant_kv_attention(*(torch.from_numpy(v) for v in x.values()), scale, *bits)
    body = run_attention(x, scale, bits)
    for name, w, e, o in zip(("output", "store_mass", "window_mass"), want, eager, body, strict=True):
        assert o.shape == tuple(e.shape) == w.shape
        np.testing.assert_allclose(e.numpy(), w, atol=2e-5, rtol=1e-4, err_msg=f"PyTorch, {name}")
        np.testing.assert_allclose(o, w, atol=2e-5, rtol=1e-4, err_msg=f"ONNX, {name}")


@given(
    seed=seeds,
    batch=st.integers(1, 2),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 4),
    queries=st.integers(1, 4),
    slots=st.integers(1, 19),
    window=st.integers(1, 9),
    head_dim=st.sampled_from([64, 80, 96, 128]),
    filled=st.sampled_from([0.0, 0.5, 1.0]),
    per_token=st.booleans(),
)
def test_attention_thrice(seed: int, **shape) -> None:
    check_attention(attention_inputs(np.random.default_rng(seed), **shape))


@given(
    seed=seeds,
    bits=st.tuples(st.sampled_from([8, 4]), st.sampled_from([8, 4])),
    key_blocks=st.tuples(st.integers(1, 19), st.integers(1, 40)),
    value_blocks=st.tuples(st.integers(1, 19), st.integers(1, 40)),
    batch=st.integers(1, 2),
    kv_heads=st.integers(1, 2),
    group=st.integers(1, 2),
    queries=st.integers(1, 2),
    slots=st.integers(1, 19),
    window=st.integers(1, 3),
    head_dim=st.sampled_from([5, 32, 80]),
    filled=st.sampled_from([0.5, 1.0]),
)
def test_attention_by_blocks_thrice(
    seed: int, bits: tuple[int, int], key_blocks: tuple[int, int], value_blocks: tuple[int, int], **shape
) -> None:
    x = attention_inputs(
        np.random.default_rng(seed), **shape, bits=bits, key_blocks=key_blocks, value_blocks=value_blocks
    )
    check_attention(x, bits)


SHAPE: dict[str, Any] = {"batch": 1, "kv_heads": 2, "group": 2, "queries": 1, "slots": 7, "window": 3, "head_dim": 64}


@pytest.mark.parametrize("per_token", [False, True])
def test_attention_over_an_empty_store_is_attention_over_the_window(per_token: bool) -> None:
    x = attention_inputs(np.random.default_rng(0), **SHAPE, filled=0.0, per_token=per_token)
    check_attention(x)
    _, store_mass, window_mass = run_attention(x, 0.125)
    assert not store_mass.any()
    np.testing.assert_allclose(window_mass.sum(-1), 1, atol=1e-6)


def test_attention_where_all_is_masked_is_finite() -> None:
    x = attention_inputs(np.random.default_rng(0), **SHAPE, filled=0.0, per_token=False)
    x["window_bias"][:] = -np.inf
    eager = torch.ops.unicache.quant_kv_attention(*(torch.from_numpy(v) for v in x.values()), 0.125, 8, 8)
    for e, o in zip(eager, run_attention(x, 0.125), strict=True):
        assert e.isfinite().all()
        np.testing.assert_allclose(o, e, atol=1e-4)


def test_a_slot_of_three_merged_tokens_counts_three_times() -> None:
    x = attention_inputs(np.random.default_rng(0), **SHAPE, filled=1.0, per_token=True)
    x["store_bias"][:] = 0
    merged = {name: v.copy() for name, v in x.items()}
    merged["store_bias"][..., 2] = math.log(3)
    thrice = dict(x)
    for name in ("key_store", "key_scale", "value_store", "value_scale", "store_bias"):
        thrice[name] = np.concatenate([x[name], np.repeat(x[name][:, :, 2:3], 2, axis=2)], axis=2)
    one, _, _ = run_attention(merged, 0.125)
    three, _, _ = run_attention(thrice, 0.125)
    np.testing.assert_allclose(one, three, atol=1e-3)  # log(3) in float16


def topk_in_loops(score: np.ndarray, rows: list[np.ndarray], k: int) -> list[np.ndarray]:
    index = np.zeros((*score.shape[:2], k), np.int64)
    for b, h in np.ndindex(*score.shape[:2]):
        best = sorted(range(score.shape[2]), key=lambda i: (-score[b, h, i], i))[:k]
        index[b, h] = sorted(best)
    gathered = []
    for x in rows:
        kept = [[x[b, h, index[b, h]] for h in range(x.shape[1])] for b in range(x.shape[0])]
        gathered.append(np.array(kept, dtype=x.dtype))
    return [*gathered, index]


def check_topk(score: np.ndarray, head_dim: int, k: int, rng: np.random.Generator) -> None:
    key = rng.standard_normal((*score.shape, head_dim)).astype(np.float32)
    value = rng.standard_normal(key.shape).astype(np.float32)
    positions = rng.integers(0, 1000, score.shape).astype(np.int32)
    bias = np.where(rng.random(score.shape) < 0.5, 0, -np.inf).astype(np.float32)
    inputs = [score, key, value, positions, bias]
    want = topk_in_loops(score, inputs[1:], k)
    eager = torch.ops.unicache.topk_gather(*(torch.from_numpy(v) for v in inputs), k)
    body = run_body(TopKGather, inputs, 5, k=k)
    for w, e, o in zip(want, eager, body, strict=True):
        assert o.dtype == e.numpy().dtype == w.dtype
        np.testing.assert_array_equal(e.numpy(), w)
        np.testing.assert_array_equal(o, w)


@given(
    seed=seeds,
    batch=st.integers(1, 2),
    heads=st.integers(1, 4),
    tokens=st.integers(1, 37),
    head_dim=st.sampled_from([64, 80, 96, 128]),
    different=st.sampled_from([1, 2, 5, 10**6]),
    data=st.data(),
)
def test_topk_thrice_with_ties(
    seed: int, batch: int, heads: int, tokens: int, head_dim: int, different: int, data: st.DataObject
) -> None:
    rng = np.random.default_rng(seed)
    score = rng.integers(0, different, (batch, heads, tokens)).astype(np.float32)
    score[rng.random(score.shape) < 0.2] = -1e30
    check_topk(score, head_dim, data.draw(st.integers(1, tokens)), rng)


@pytest.mark.parametrize("different", [1, 50, 10**6])
@pytest.mark.parametrize(
    ("tokens", "k"), [(4500, 4000), (4000, 4000), (8000, TENSORRT_TOPK + 1), (8000, 2 * TENSORRT_TOPK), (8000, 7999)]
)
def test_topk_of_more_than_tensorrt_takes(tokens: int, k: int, different: int) -> None:
    rng = np.random.default_rng(tokens + k)
    score = rng.integers(0, different, (1, 2, tokens)).astype(np.float32)
    score[0, 1, ::3] = -np.inf
    check_topk(score, 4, k, rng)


@pytest.mark.parametrize("k", [1, 6])
def test_topk_of_minus_infinities(k: int) -> None:
    check_topk(np.full((1, 2, 6), -np.inf, np.float32), 64, k, np.random.default_rng(0))


@pytest.mark.parametrize("per_token", [False, True])
def test_fake_implementations_give_the_eager_shapes(per_token: bool) -> None:
    x = attention_inputs(np.random.default_rng(0), **SHAPE, filled=1.0, per_token=per_token)
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(
        torch.ops.unicache.quant_kv_attention, (*map(torch.from_numpy, x.values()), 0.125, 8, 8), test_utils=tests
    )
    rows = torch.randn(2, 3, 9, 64)
    slots = torch.zeros(2, 3, 9)
    torch.library.opcheck(
        torch.ops.unicache.topk_gather, (slots, rows, rows, slots.int(), slots.half(), 4), test_utils=tests
    )


class Twice(Graph):
    """Calls an operator two times, the second on what the first gave."""

    kind = "compact"

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self._takes(TensorSpec("score", "float32", [1, 2, 9]), TensorSpec("key", "float32", [1, 2, 9, 8]))
        self.outputs = ["kept", "index"]

    def compute(self, score: torch.Tensor, key: torch.Tensor) -> dict[str, torch.Tensor]:  # type: ignore[override]
        rows, _, positions, bias, index = torch.ops.unicache.topk_gather(score, key, key, score.int(), score, 6)
        kept = torch.ops.unicache.topk_gather(bias, rows, rows, positions, bias, 3)[0]
        return {"kept": kept, "index": index}


def test_an_exported_graph_holds_one_node_a_call_and_the_body_once(tmp_path) -> None:
    with WeightFile(tmp_path) as weights:
        described = export(Twice(), "twice", weights)
    model = onnx.load(tmp_path / described.file)
    nodes = [(node.domain, node.op_type) for node in model.graph.node if node.domain == DOMAIN]
    assert nodes == [(DOMAIN, "TopKGather")] * 2
    assert [(f.domain, f.name) for f in model.functions] == [(DOMAIN, "TopKGather"), (DOMAIN, "GatherRows")]
    assert {o.domain: o.version for o in model.opset_import} == {"": OPSET, DOMAIN: DOMAIN_VERSION}
    for function in model.functions:
        outputs = [name for node in function.node for name in node.output]
        assert "_" not in outputs
        assert all(outputs)
        assert len(outputs) == len(set(outputs))
    score = np.random.default_rng(0).random((1, 2, 9)).astype(np.float32)
    key = np.arange(144, dtype=np.float32).reshape(1, 2, 9, 8)
    session = onnxruntime.InferenceSession(tmp_path / described.file, providers=["CPUExecutionProvider"])
    kept, index = session.run(None, {"score": score, "key": key})
    want, want_index = Twice()(torch.from_numpy(score), torch.from_numpy(key))
    np.testing.assert_array_equal(kept, want)
    np.testing.assert_array_equal(index, want_index)


class Most(Graph):
    """Keeps more than TensorRT's own TopK can."""

    kind = "compact"

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self._takes(TensorSpec("score", "float32", [1, 2, 6000]), TensorSpec("key", "float32", [1, 2, 6000, 8]))
        self.outputs = ["kept", "index"]

    def compute(self, score: torch.Tensor, key: torch.Tensor) -> dict[str, torch.Tensor]:  # type: ignore[override]
        kept, _, _, _, index = torch.ops.unicache.topk_gather(score, key, key, score.int(), score, 4500)
        return {"kept": kept, "index": index}


def test_an_exported_graph_keeps_more_than_tensorrts_topk(tmp_path) -> None:
    with WeightFile(tmp_path) as weights:
        described = export(Most(), "most", weights)
    score, key = (
        np.random.default_rng(0).random(shape).astype(np.float32) for shape in ((1, 2, 6000), (1, 2, 6000, 8))
    )
    session = onnxruntime.InferenceSession(tmp_path / described.file, providers=["CPUExecutionProvider"])
    kept, index = session.run(None, {"score": score, "key": key})
    want, want_index = Most()(torch.from_numpy(score), torch.from_numpy(key))
    np.testing.assert_array_equal(kept, want)
    np.testing.assert_array_equal(index, want_index)
    pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX is not installed: pip install tensorrt-rtx-cu13")
    (tmp_path / "plans").mkdir()
    plans = trt.build_plans("trt-rtx", {"most": tmp_path / described.file}, tmp_path / "plans", workers=1)
    assert [plan.graph for plan in plans] == ["most"]

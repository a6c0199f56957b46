"""The operators' bodies in standard ONNX operators, for machines where no kernel is registered.

onnxscript reads these functions as ONNX, not as Python: mypy leaves this file out. Every output is named, used or not:
an unused one called `_` in a function called twice ends TensorRT's builder.
"""

from __future__ import annotations

from onnxscript import FLOAT, INT32, script
from onnxscript import opset20 as op
from onnxscript.values import Opset

DOMAIN, DOMAIN_VERSION = "unicache", 1
UNICACHE = Opset(DOMAIN, DOMAIN_VERSION)


@script(UNICACHE, default_opset=op)
def QuantKVAttention(
    query: FLOAT,
    key_store,
    key_scale,
    value_store,
    value_scale,
    store_bias,
    key_window: FLOAT,
    value_window: FLOAT,
    window_bias: FLOAT,
    scale: float,
):
    key = op.CastLike(key_store, query) * op.CastLike(key_scale, query)
    value = op.CastLike(value_store, query) * op.CastLike(value_scale, query)
    heads = op.Shape(key_store, start=0, end=2)
    queries = op.Shape(query, start=2, end=3)
    slots = op.Shape(key_store, start=2, end=3)
    window = op.Shape(key_window, start=2, end=3)
    rest = op.Constant(value_ints=[-1])
    head_dim = op.Shape(query, start=3, end=4)
    # The query heads of a group share their keys: they become more rows of one product, [B, Hkv, G*T, D].
    grouped = op.Reshape(query, op.Concat(heads, rest, head_dim, axis=0))
    factor = op.CastLike(op.Constant(value_float=scale), query)
    store = op.MatMul(grouped, op.Transpose(key, perm=[0, 1, 3, 2])) * factor
    recent = op.MatMul(grouped, op.Transpose(key_window, perm=[0, 1, 3, 2])) * factor
    lowest = op.CastLike(op.Constant(value_float=-1e4), query)
    store_mask = op.Unsqueeze(op.Max(op.CastLike(store_bias, query), lowest), op.Constant(value_ints=[2, 3]))
    window_mask = op.Unsqueeze(op.Max(op.CastLike(window_bias, query), lowest), op.Constant(value_ints=[1, 2]))
    store5 = op.Reshape(store, op.Concat(heads, rest, queries, slots, axis=0)) + store_mask
    recent5 = op.Reshape(recent, op.Concat(heads, rest, queries, window, axis=0)) + window_mask
    attention = op.Softmax(op.Concat(store5, recent5, axis=-1), axis=-1)
    on_store, on_window = op.Split(attention, op.Concat(slots, window, axis=0), axis=-1)
    store_rows = op.Reshape(on_store, op.Concat(heads, rest, slots, axis=0))
    window_rows = op.Reshape(on_window, op.Concat(heads, rest, window, axis=0))
    mixed = op.MatMul(store_rows, value) + op.MatMul(window_rows, value_window)
    output = op.Reshape(mixed, op.Shape(query))
    count = op.CastLike(queries, query)
    average = op.Constant(value_ints=[2, 3])
    store_mass = op.ReduceMean(on_store, average, keepdims=0) * count
    window_mass = op.ReduceMean(on_window, average, keepdims=0) * count
    return output, store_mass, window_mass


@script(UNICACHE, default_opset=op)
def TopKGather(score: FLOAT, key: FLOAT, value: FLOAT, positions: INT32, bias: FLOAT, k: int):
    count = op.Reshape(op.Constant(value_int=k), op.Constant(value_ints=[1]))
    best, chosen = op.TopK(score, count, axis=-1, largest=1, sorted=1)
    index, order = op.TopK(chosen, count, axis=-1, largest=0, sorted=1)
    head_dim = op.Shape(key, start=3)
    rows = op.Expand(op.Unsqueeze(index, op.Constant(value_ints=[-1])), op.Concat(op.Shape(index), head_dim, axis=0))
    kept_key = op.GatherElements(key, rows, axis=2)
    kept_value = op.GatherElements(value, rows, axis=2)
    kept_positions = op.GatherElements(positions, index, axis=2)
    kept_bias = op.GatherElements(bias, index, axis=2)
    return kept_key, kept_value, kept_positions, kept_bias, index

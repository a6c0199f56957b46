"""The operators' bodies in standard ONNX operators, for machines where no kernel is registered.

onnxscript reads these functions as ONNX, not as Python: mypy leaves this file out. Every output is named, used or not:
an unused one called `_` in a function called twice ends TensorRT's builder.
"""

from __future__ import annotations

from onnxscript import FLOAT, INT32, INT64, script
from onnxscript import opset20 as op
from onnxscript.values import OnnxFunction, Opset

DOMAIN, DOMAIN_VERSION = "unicache", 1
UNICACHE = Opset(DOMAIN, DOMAIN_VERSION)
TENSORRT_TOPK = 3840  # the largest k that TensorRT's TopK takes
LEAST, TAKEN = -3e38, float("-inf")  # below every score; below it, one that a round has taken


@script(UNICACHE, default_opset=op)
def Codes8(store, like: FLOAT):
    """One code a byte."""
    codes = op.CastLike(store, like)
    return codes


@script(UNICACHE, default_opset=op)
def Codes4(store, like: FLOAT):
    """Two codes a byte: the low halves are the first channels, the high ones the others; `like` has as many."""
    sixteen = op.CastLike(op.Constant(value_float=16.0), like)
    levels = op.CastLike(store, like) + op.CastLike(op.Constant(value_float=128.0), like)
    high = op.Floor(levels / sixteen)
    low = levels - high * sixteen
    both = op.Concat(low, high, axis=-1) - op.CastLike(op.Constant(value_float=8.0), like)
    start, axis = op.Constant(value_ints=[0]), op.Constant(value_ints=[3])
    codes = op.Slice(both, start, op.Shape(like, start=3, end=4), axis)
    return codes


@script(UNICACHE, default_opset=op)
def Spread(scale: FLOAT, rows: FLOAT):
    """One number a block -> what broadcasts to the rows: repeated along an axis of more than one block."""
    zero, one = op.Constant(value_ints=[0]), op.Constant(value_ints=[1])
    two, three, rest = op.Constant(value_ints=[2]), op.Constant(value_ints=[3]), op.Constant(value_ints=[-1])
    heads = op.Shape(scale, start=0, end=2)
    slots = op.Shape(rows, start=2, end=3)
    slot_blocks = op.Shape(scale, start=2, end=3)
    slot_each = (slots + slot_blocks - one) / slot_blocks
    slot_times = one + (slot_each - one) * op.Min(slot_blocks - one, one)
    channels = op.Shape(rows, start=3, end=4)
    channel_blocks = op.Shape(scale, start=3, end=4)
    channel_each = (channels + channel_blocks - one) / channel_blocks
    channel_times = one + (channel_each - one) * op.Min(channel_blocks - one, one)
    wanted = op.Concat(heads, slot_blocks, slot_times, channel_blocks, channel_times, axis=0)
    repeated = op.Expand(op.Unsqueeze(scale, op.Constant(value_ints=[3, 5])), wanted)
    flat = op.Reshape(repeated, op.Concat(heads, slot_blocks * slot_times, rest, axis=0))
    ends = op.Concat(slots, channels, axis=0)
    spread = op.Slice(flat, op.Concat(zero, zero, axis=0), ends, op.Concat(two, three, axis=0))
    return spread


def quant_kv_attention(codes_of_keys: OnnxFunction, codes_of_values: OnnxFunction) -> OnnxFunction:
    """The body for stores that these functions unpack."""

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
        key_bits: int,
        value_bits: int,
    ):
        key_codes = codes_of_keys(key_store, query)
        value_codes = codes_of_values(value_store, query)
        key = key_codes * Spread(op.CastLike(key_scale, query), key_codes)
        value = value_codes * Spread(op.CastLike(value_scale, query), value_codes)
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

    return QuantKVAttention


@script(UNICACHE, default_opset=op)
def GatherRows(index: INT64, key: FLOAT, value: FLOAT, positions: INT32, bias: FLOAT):
    head_dim = op.Shape(key, start=3)
    rows = op.Expand(op.Unsqueeze(index, op.Constant(value_ints=[-1])), op.Concat(op.Shape(index), head_dim, axis=0))
    kept_key = op.GatherElements(key, rows, axis=2)
    kept_value = op.GatherElements(value, rows, axis=2)
    kept_positions = op.GatherElements(positions, index, axis=2)
    kept_bias = op.GatherElements(bias, index, axis=2)
    return kept_key, kept_value, kept_positions, kept_bias


@script(UNICACHE, default_opset=op)
def TopKGather(score: FLOAT, key: FLOAT, value: FLOAT, positions: INT32, bias: FLOAT, k: int):
    count = op.Reshape(op.Constant(value_int=k), op.Constant(value_ints=[1]))
    best, chosen = op.TopK(score, count, axis=-1, largest=1, sorted=1)
    index, order = op.TopK(chosen, count, axis=-1, largest=0, sorted=1)
    kept_key, kept_value, kept_positions, kept_bias = GatherRows(index, key, value, positions, bias)
    return kept_key, kept_value, kept_positions, kept_bias, index


# TopKGather in rounds, for a k beyond `TENSORRT_TOPK`: `export.operators.topk_gather_in_rounds` puts them together.


@script(UNICACHE, default_opset=op)
def AllLeft(score: FLOAT):
    return op.Max(score, op.Constant(value_float=LEAST))


@script(UNICACHE, default_opset=op)
def TakeBest(left: FLOAT):
    """Indices of the largest scores left, as many as TensorRT's TopK gives, and the scores without them."""
    count = op.Min(op.Shape(left, start=2), op.Constant(value_ints=[TENSORRT_TOPK]))
    best, taken = op.TopK(left, count, axis=-1, largest=1, sorted=1)
    rest = op.ScatterElements(left, taken, op.Expand(op.Constant(value_float=TAKEN), op.Shape(taken)), axis=-1)
    return rest, taken


@script(UNICACHE, default_opset=op)
def Ascending(taken: INT64, score: FLOAT, k: int):
    """The first k of the indices `taken`, ascending: every chosen token is scattered to its place among the chosen."""
    count = op.Reshape(op.Constant(value_int=k), op.Constant(value_ints=[1]))
    last = op.Constant(value_ints=[2])
    first = op.Slice(taken, op.Constant(value_ints=[0]), count, last)
    nothing = op.Expand(op.Constant(value_float=0.0), op.Shape(score))
    chosen = op.ScatterElements(nothing, first, op.Expand(op.Constant(value_float=1.0), op.Shape(first)), axis=-1)
    place = op.CumSum(chosen, op.Constant(value_int=2), exclusive=1)
    slot = op.CastLike(op.Where(op.Greater(chosen, nothing), place, op.CastLike(count, place)), taken)
    tokens = op.Squeeze(op.Shape(score, start=2))
    token = op.Expand(op.Range(op.Constant(value_int=0), tokens, op.Constant(value_int=1)), op.Shape(score))
    # As long as the indices, or TensorRT refuses it, and one slot longer: k is where those go that are not chosen.
    slots = op.Shape(score) + op.Constant(value_ints=[0, 0, 1])
    index = op.ScatterElements(op.Expand(op.Constant(value_int=0), slots), slot, token, axis=-1)
    return op.Slice(index, op.Constant(value_ints=[0]), count, last)


CODES = {8: Codes8, 4: Codes4}
ATTENTION = {(k, v): quant_kv_attention(CODES[k], CODES[v]) for k in CODES for v in CODES}  # by bits of K and V

"""The two custom ONNX operators, domain `unicache`: what they compute, stated once in PyTorch and once in ONNX.

Each is a `torch.library` operator, so that `torch.export` keeps it as one node, with the exact computation as its
eager implementation; a fake implementation gives its shapes; and an ONNX model-local function made of standard
operators lets the same file run in any ONNX Runtime or TensorRT with nothing installed. A kernel registered under the
same domain and name takes the function's place.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import onnx
import onnx_ir as ir
import torch
from onnx import helper
from onnx.defs import OpSchema
from onnxscript import opset20
from onnxscript.values import OnnxFunction, Op
from torch import Tensor

from export.attention import store_window_attention
from export.onnx_functions import (
    ATTENTION,
    CODES,
    DOMAIN,
    DOMAIN_VERSION,
    TENSORRT_TOPK,
    UNICACHE,
    AllLeft,
    Ascending,
    GatherRows,
    Spread,
    TakeBest,
    TopKGather,
)
from export.packing import spread, unpack


@torch.library.custom_op("unicache::quant_kv_attention", mutates_args=())
def quant_kv_attention(
    query: Tensor,
    key_store: Tensor,
    key_scale: Tensor,
    value_store: Tensor,
    value_scale: Tensor,
    store_bias: Tensor,
    key_window: Tensor,
    value_window: Tensor,
    window_bias: Tensor,
    scale: float,
    key_bits: int,
    value_bits: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Attention of a few queries over a quantized store and a full-precision window.

    Args:
        query: after RoPE, [batch, heads, queries, head_dim].
        key_store, value_store: codes in int8 bytes, [batch, kv_heads, slots, bytes]: of 8 bits, head_dim bytes; of 4,
            ceil(head_dim / 2), where byte + 128 = 16 h + l holds the codes l - 8 of channel j and h - 8 of channel
            j + bytes (`packing.pack`). A dequantized number is code * scale.
        key_scale, value_scale: one a block, [batch or 1, kv_heads, Cs, Ds]: slot c and channel d have
            [c // ceil(slots / Cs), d // ceil(head_dim / Ds)]. Per channel [1, kv_heads, 1, head_dim], per token
            [batch, kv_heads, slots, 1] and groups of either are cases of it.
        store_bias: added to every query's logits, [batch, kv_heads, slots]: 0 a token, -inf empty, log(n) n merged.
        key_window, value_window: [batch, kv_heads, window, head_dim], the new tokens' own rows included.
        window_bias: [batch, queries, window], -inf where a query must not look.
        scale: softmax scale.
        key_bits, value_bits: of a code, 8 or 4.

    Returns:
        output [batch, heads, queries, head_dim], and the attention every slot received, summed over the queries and
        averaged over the query heads of its KV head: store_mass [batch, kv_heads, slots], window_mass
        [batch, kv_heads, window]. Where everything is masked the output is finite.
    """
    key = _rows(key_store, key_scale, key_bits, query)
    value = _rows(value_store, value_scale, value_bits, query)
    return store_window_attention(query, key, value, store_bias, key_window, value_window, window_bias, scale)


def _rows(store: Tensor, scale: Tensor, bits: int, query: Tensor) -> Tensor:
    codes = unpack(store, bits, query.shape[-1], query.dtype)
    return codes * spread(scale.to(query.dtype), *codes.shape[2:])


@quant_kv_attention.register_fake
def _(query, key_store, key_scale, value_store, value_scale, store_bias, key_window, *_):
    batch, kv_heads, slots, _ = key_store.shape
    window = key_window.shape[2]
    return torch.empty_like(query), query.new_empty(batch, kv_heads, slots), query.new_empty(batch, kv_heads, window)


@torch.library.custom_op("unicache::topk_gather", mutates_args=())
def topk_gather(
    score: Tensor, key: Tensor, value: Tensor, positions: Tensor, bias: Tensor, k: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Keep the `k` best tokens of every head, in their original order.

    Args:
        score: [batch, kv_heads, tokens], float32; of equal scores the lowest index wins.
        key, value: [batch, kv_heads, tokens, head_dim].
        positions: [batch, kv_heads, tokens], int32.
        bias: [batch, kv_heads, tokens].
        k: tokens kept, at most `tokens`.

    Returns:
        key, value, positions and bias of the kept tokens, and their indices [batch, kv_heads, k], int64, ascending.
    """
    index = score.sort(dim=-1, descending=True, stable=True).indices[..., :k].sort(dim=-1).values
    rows = index[..., None].expand(*index.shape, key.shape[-1])
    return key.gather(2, rows), value.gather(2, rows), positions.gather(2, index), bias.gather(2, index), index


@topk_gather.register_fake
def _(score, key, value, positions, bias, k):
    batch, heads, _, head_dim = key.shape
    rows, slots = (batch, heads, k, head_dim), (batch, heads, k)
    return (
        key.new_empty(rows),
        value.new_empty(rows),
        positions.new_empty(slots),
        bias.new_empty(slots),
        score.new_empty(slots, dtype=torch.int64),
    )


OPERATORS: dict[str, OnnxFunction] = {"quant_kv_attention": ATTENTION[8, 8], "topk_gather": TopKGather}

ATTRIBUTE_TYPES = {"FLOAT": OpSchema.AttrType.FLOAT, "INT": OpSchema.AttrType.INT}


def functions(k: int = 1, bits: tuple[int, int] = (8, 8)) -> dict[str, list[ir.Function]]:
    """ONNX function bodies by operator name, each with the functions that it calls.

    Args:
        k: the largest that a TopKGather of the model keeps; where TensorRT's TopK does not reach, it works in rounds.
        bits: of keys and values in the model's QuantKVAttention: a body has no branches.
    """
    helpers: tuple[OnnxFunction, ...] = (GatherRows,)
    topk = TopKGather.to_function_proto()
    if k > TENSORRT_TOPK:
        topk, helpers = _topk_gather_in_rounds(math.ceil(k / TENSORRT_TOPK)), (GatherRows, AllLeft, TakeBest, Ascending)
    attention = (ATTENTION[bits], Spread, *(CODES[each] for each in dict.fromkeys(bits)))
    bodies = {
        TopKGather.name: [topk, *(helper.to_function_proto() for helper in helpers)],
        ATTENTION[bits].name: [function.to_function_proto() for function in attention],
    }
    return {name: [*map(ir.serde.deserialize_function, protos)] for name, protos in bodies.items()}


def _topk_gather_in_rounds(rounds: int) -> onnx.FunctionProto:
    """Body of TopKGather where one TopK of TensorRT does not reach: the best of every round, the first k of those."""

    def call(function: OnnxFunction, inputs: list[str], outputs: list[str]) -> onnx.NodeProto:
        return helper.make_node(function.name, inputs, outputs, domain=DOMAIN)

    left, taken = [f"left_{i}" for i in range(rounds + 1)], [f"taken_{i}" for i in range(rounds)]
    body = TopKGather.to_function_proto()
    ascending = call(Ascending, ["taken", "score"], ["index"])
    ascending.attribute.append(onnx.AttributeProto(name="k", ref_attr_name="k", type=onnx.AttributeProto.INT))
    nodes = [
        call(AllLeft, ["score"], left[:1]),
        *(call(TakeBest, [left[i]], [left[i + 1], taken[i]]) for i in range(rounds)),
        helper.make_node("Concat", taken, ["taken"], axis=-1),
        ascending,
        call(GatherRows, ["index", "key", "value", "positions", "bias"], [*body.output[:4]]),
    ]
    del body.node[:]
    body.node.extend(nodes)
    return body


def _schema(function: OnnxFunction) -> OpSchema:
    """An ONNX schema with the body's inputs, outputs and attributes: what the exporter wants to see of an operator."""

    def parameters(values) -> list[OpSchema.FormalParameter]:
        return [OpSchema.FormalParameter(value.name, f"T_{value.name}") for value in values]

    body = function.function_ir
    types = [f"tensor({t})" for t in ("float", "float16", "int8", "int32", "int64")]
    return OpSchema(
        body.name,
        DOMAIN,
        DOMAIN_VERSION,
        inputs=parameters(body.inputs),
        outputs=parameters(body.outputs),
        type_constraints=[(f"T_{value.name}", types, "") for value in (*body.inputs, *body.outputs)],
        attributes=[
            OpSchema.Attribute(attribute.name, ATTRIBUTE_TYPES[attribute.type.name], "", required=True)
            for attribute in body.attrs
        ],
    )


def translations() -> dict[Callable, Callable]:
    """For `torch.onnx.export`: each operator of ours becomes one node of our domain, not its inlined body.

    Whole numbers times a fraction, as positions in GOT-OCR's encoder are, need one of PyTorch's own beside them:
    onnxscript 0.6.0 has none for it.
    """

    def node_of(function: OnnxFunction) -> Callable:
        attributes = [attribute.name for attribute in function.function_ir.attrs]
        operator = Op(UNICACHE, function.name, _schema(function))

        def node(*args):
            inputs, values = args[: -len(attributes)], args[-len(attributes) :]
            return operator(*inputs, **dict(zip(attributes, values, strict=True)))

        return node

    def scaled(rows, factor):
        return opset20.Mul(rows, opset20.CastLike(opset20.Constant(value_float=float(factor)), rows))  # type: ignore[type-var]

    own = {getattr(torch.ops.unicache, name).default: node_of(f) for name, f in OPERATORS.items()}
    return {**own, torch.ops.aten.mul.Scalar: scaled}

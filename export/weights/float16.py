"""Products with weights in float16, between casts; all that lies between them stays float32.

So what float16 has silently spoilt elsewhere cannot happen: norms, softmax, masks, the residual stream, positions and
the angles of RoPE are never held in it. What is left are products whose inputs, outputs or weights pass its range: they
are islands, found by running samples (calibration/islands.py), and stay float32 too.
"""

from __future__ import annotations

import hashlib
from functools import partial

import onnx_ir as ir
import torch
from torch import Tensor

from export.weights.grid import LEAST_SIZE
from export.weights.kept import Kept

LARGEST = torch.finfo(torch.float16).max
PRODUCTS = ("MatMul", "Gemm", "Conv")


def digest(weight: Tensor) -> str:
    """Of a weight as a module has it: how an island is known among a graph's constants."""
    return hashlib.sha256(weight.contiguous().numpy().tobytes()).hexdigest()


def halve(model: ir.Model, islands: frozenset[str], kept: Kept | None = None) -> None:
    """Compute every product with a weight that float16 holds exactly in float16, but for the islands."""
    kept = kept or Kept()
    halves: dict[ir.Value, ir.Value | None] = {}
    casts: dict[ir.Value, ir.Value] = {}
    for node in list(model.graph):
        weight = node.inputs[1] if not node.domain and node.op_type in PRODUCTS else None
        if weight is None or weight.const_value is None or weight.const_value.dtype != ir.DataType.FLOAT:
            continue
        if weight not in halves:
            halves[weight] = _half(model.graph, weight, node, islands, kept)
        half, rows = halves[weight], node.inputs[0]
        if half is not None and rows is not None:
            _replace(model.graph, node, rows, half, casts)
    for weight, half in halves.items():
        if half is not None and not weight.uses():
            assert weight.name
            del model.graph.initializers[weight.name]


def _half(graph: ir.Graph, weight: ir.Value, node: ir.Node, islands: frozenset[str], kept: Kept) -> ir.Value | None:
    assert weight.const_value is not None
    turned = node.op_type == "MatMul" or (node.op_type == "Gemm" and not node.attributes.get_int("transB", 0))
    stored = kept.of(weight.const_value, ("half", turned), partial(_stored, weight.const_value, turned, islands))
    if stored is None:
        return None
    half = ir.Value(name=f"{weight.name}.half", const_value=stored[0])
    stored[0].name = half.name
    half.shape, half.type = ir.Shape(stored[0].shape.numpy()), ir.TensorType(ir.DataType.FLOAT16)
    graph.register_initializer(half)
    return half


def _stored(weight: ir.TensorProtocol, turned: bool, islands: frozenset[str]) -> list[ir.TensorProtocol] | None:
    """In float16, if that holds it exactly and it is no island."""
    numbers = torch.from_numpy(weight.numpy())
    stored = numbers.half()
    if numbers.numel() < LEAST_SIZE or not torch.equal(stored.float(), numbers):
        return None
    if islands and digest(numbers.mT if turned else numbers) in islands:
        return None
    return [ir.tensor(stored.numpy())]


def _replace(graph: ir.Graph, node: ir.Node, rows: ir.Value, half: ir.Value, casts: dict[ir.Value, ir.Value]) -> None:
    new = []
    if rows not in casts:
        new.append(_cast(rows, ir.DataType.FLOAT16))
        casts[rows] = new[0].outputs[0]
    product = ir.Node("", node.op_type, [casts[rows], half], node.attributes.values())
    new += [product, _cast(product.outputs[0], ir.DataType.FLOAT)]
    bias = node.inputs[2] if len(node.inputs) > 2 else None
    if bias is not None:  # in float32, as where a linear layer's bias is a node of its own
        if node.op_type == "Conv":
            assert bias.const_value is not None and half.shape is not None
            wide = bias.const_value.numpy().reshape(-1, *[1] * (len(half.shape) - 2))
            bias = ir.Value(name=f"{bias.name}.wide", const_value=ir.tensor(wide, name=f"{bias.name}.wide"))
            bias.shape, bias.type = ir.Shape(wide.shape), ir.TensorType(ir.DataType.FLOAT)
            graph.register_initializer(bias)
        new.append(ir.Node("", "Add", [new[-1].outputs[0], bias]))
    ir.convenience.replace_nodes_and_values(graph, node, [node], new, node.outputs, new[-1].outputs)


def _cast(value: ir.Value, dtype: ir.DataType) -> ir.Node:
    return ir.Node("", "Cast", [value], [ir.AttrInt64("to", dtype)])

"""Products with a weight that lies on a grid become ONNX Runtime's MatMulNBits, and lose nothing by it."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import onnx_ir as ir
import torch
from torch import Tensor

from engines import weights as layout
from export.weights.grid import LEAST_GROUP, LEAST_SIZE, Grid
from export.weights.kept import Kept

DOMAIN, OPERATOR = "com.microsoft", "MatMulNBits"
# Inputs are rounded to 8 bits in blocks, so that the product is one of integers. One row times 2048 x 2048 weights
# beside float32, on a CPU with VNNI and ONNX Runtime 1.32: 5 to 7 times as fast with 4 bits, 2 to 3 times with 8. With
# inputs as they are (0): 1.6 to 2 times as fast with 4, and 15 to 30 times slower with 8.
ACCURACY_LEVEL = 4


def pack(model: ir.Model, grids: Sequence[Grid], kept: Kept | None = None) -> None:
    """Replace every MatMul and Gemm whose weight lies on one of the grids."""
    kept = kept or Kept()
    packed: dict[ir.Value, tuple[Grid, list[ir.Value]] | None] = {}
    for node in list(model.graph) if grids else ():
        rows = _weight(node)
        if rows is None:
            continue
        source = node.inputs[1]
        assert source is not None
        if source not in packed:
            packed[source] = _packed(model.graph, source, rows, grids, kept)
        if (found := packed[source]) is not None:
            _replace(node, rows.shape, *found)
            model.opset_imports[DOMAIN] = 1
    for source, found in packed.items():
        if found and not source.uses():
            assert source.name
            del model.graph.initializers[source.name]


@contextlib.contextmanager
def exact(path: Path) -> Iterator[Path]:
    """The file, or one beside it that computes with inputs as they are, for as long as the context lasts."""
    model = ir.load(path)
    products = [node for node in model.graph if node.domain == DOMAIN and node.op_type == OPERATOR]
    if not products:
        yield path
        return
    for node in products:
        node.attributes["accuracy_level"] = ir.AttrInt64("accuracy_level", 0)
    with tempfile.NamedTemporaryFile(suffix=".onnx", dir=path.parent) as file:
        ir.save(model, file.name)
        yield Path(file.name)


def _weight(node: ir.Node) -> Tensor | None:
    """The constant that a node multiplies by, one row an output."""
    if node.domain or node.op_type not in ("MatMul", "Gemm"):
        return None
    tensor = node.inputs[1].const_value if node.inputs[1] is not None else None
    numbers = {name: attribute.value for name, attribute in node.attributes.items()}
    plain = numbers.get("transA", 0) == 0 and numbers.get("alpha", 1) == numbers.get("beta", 1) == 1
    if tensor is None or not plain or tensor.dtype != ir.DataType.FLOAT or len(tensor.shape) != 2:
        return None
    weight = torch.from_numpy(tensor.numpy())
    weight = weight if numbers.get("transB", 0) else weight.T
    return weight if weight.numel() >= LEAST_SIZE and weight.shape[1] >= LEAST_GROUP else None


def _packed(
    graph: ir.Graph, source: ir.Value, rows: Tensor, grids: Sequence[Grid], kept: Kept
) -> tuple[Grid, list[ir.Value]] | None:
    assert source.const_value is not None
    for grid in grids:
        if (stored := kept.of(source.const_value, grid, partial(_stored, grid, rows))) is not None:
            made = [ir.Value(name=f"{source.name}.{what}") for what in ("codes", "scales")]
            for value, tensor in zip(made, stored, strict=True):
                tensor.name, value.const_value = value.name, tensor
                value.shape, value.type = ir.Shape(tensor.shape.numpy()), ir.TensorType(tensor.dtype)
                graph.register_initializer(value)
            return grid, made
    return None


def _stored(grid: Grid, rows: Tensor) -> list[ir.TensorProtocol] | None:
    """Codes and scales."""
    if (found := grid.find(rows)) is None:
        return None
    values, scales = found
    return [ir.tensor(layout.pack(values.numpy(), grid.bits)), ir.tensor(scales.numpy())]


def _replace(node: ir.Node, shape: torch.Size, grid: Grid, stored: Sequence[ir.Value]) -> None:
    outputs, width = shape
    settings = {"K": width, "N": outputs, "bits": grid.bits, "block_size": grid.group_of(width)}
    attributes = ir.convenience.convert_attributes({**settings, "accuracy_level": ACCURACY_LEVEL})
    product = ir.Node(DOMAIN, OPERATOR, [node.inputs[0], *stored], attributes)
    new = [product]
    if len(node.inputs) > 2 and node.inputs[2] is not None:
        new.append(ir.Node("", "Add", [product.outputs[0], node.inputs[2]]))
    assert node.graph is not None
    ir.convenience.replace_nodes_and_values(node.graph, node, [node], new, node.outputs, new[-1].outputs)

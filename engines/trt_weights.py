"""Quantized weights for TensorRT: MatMulNBits, which is ONNX Runtime's own, as DequantizeLinear and MatMul.

Made when a plan is built, so that a bundle holds one graph and one set of weights for both. Only the codes are written
anew: TensorRT's are signed. Scales and all other weights stay where they are.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

OPERATOR, DOMAIN = "MatMulNBits", "com.microsoft"
OPSET = 21  # has DequantizeLinear in blocks, and int4
CODES = "codes.bin"


@contextlib.contextmanager
def dequantizing(path: str, folder: Path) -> Iterator[str]:
    """The file to parse: `path` itself, or one in `folder`, for as long as the context lasts, that says the same."""
    import onnx

    try:
        model = onnx.load(path, load_external_data=False)
    except Exception:  # the parser tells what is wrong with it
        yield path
        return
    if not any(node.op_type == OPERATOR and node.domain == DOMAIN for node in model.graph.node):
        yield path
        return
    with TemporaryDirectory(prefix=".onnx.", dir=folder) as made:
        source, target = Path(path).resolve().parent, Path(made, Path(path).name)
        tensors = {tensor.name: tensor for tensor in model.graph.initializer}
        used = {entry.value for t in tensors.values() for entry in t.external_data if entry.key == "location"}
        for name in used:  # TensorRT looks for weights beside the file that it parses
            Path(made, name).symlink_to(source / name)
        with Path(made, CODES).open("wb") as codes:
            _rewrite(model, tensors, source, codes)
        onnx.save(model, target)
        yield str(target)


def _rewrite(model: Any, tensors: dict[str, Any], source: Path, codes: Any) -> None:
    from onnx import helper, numpy_helper

    nodes, weights = [], {}
    for node in model.graph.node:
        if node.op_type != OPERATOR or node.domain != DOMAIN:
            nodes.append(node)
            continue
        settings = {attribute.name: attribute.i for attribute in node.attribute}
        rows, product, output = node.input[1], node.input[0], node.output[0]
        if rows not in weights:
            weights[rows] = weight = f"{rows}.weight"
            columns = _sign(tensors[rows], settings["bits"], settings["block_size"], source, codes)
            dequantized, width = f"{rows}.rows", settings["K"]
            scaled = [rows, node.input[2]]
            nodes.append(
                helper.make_node(
                    "DequantizeLinear",
                    scaled,
                    [dequantized],
                    f"{rows}.dequantize",
                    axis=1,
                    block_size=settings["block_size"],
                )
            )
            if width < columns:
                ends = {"starts": 0, "ends": width, "axes": 1}
                names = [f"{rows}.{name}" for name in ends]
                bounds = [np.array([value]) for value in ends.values()]
                model.graph.initializer.extend(map(numpy_helper.from_array, bounds, names))
                nodes.append(helper.make_node("Slice", [dequantized, *names], [f"{rows}.cut"]))
                dequantized = f"{rows}.cut"
            nodes.append(helper.make_node("Transpose", [dequantized], [weight], perm=[1, 0]))
        nodes.append(helper.make_node("MatMul", [product, weights[rows]], [output], node.name))
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    for opset in (o for owner in (model, *model.functions) for o in owner.opset_import):
        if not opset.domain:
            opset.version = max(opset.version, OPSET)


def _sign(tensor: Any, bits: int, group: int, source: Path, codes: Any) -> int:
    """Turn codes into signed integers, in two dimensions; returns the columns, filled up to whole blocks."""
    from onnx import TensorProto, numpy_helper

    # A code less half of their number, as two's complement, is the code with its first bit flipped.
    data = numpy_helper.to_array(tensor, str(source)) ^ np.uint8({4: 0x88, 8: 0x80}[bits])
    rows, columns = data.shape[0], data.shape[1] * group
    tensor.data_type = {4: TensorProto.INT4, 8: TensorProto.INT8}[bits]
    tensor.dims[:] = [rows, columns]
    tensor.ClearField("raw_data")
    del tensor.external_data[:]
    place = {"location": CODES, "offset": codes.tell(), "length": codes.write(data.tobytes())}
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in place.items():
        tensor.external_data.add(key=key, value=str(value))
    return columns

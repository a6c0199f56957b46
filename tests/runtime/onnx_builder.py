"""An ONNX graph written node by node."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import helper

from engines import bundle
from engines.bundle import TensorSpec


class Builder:
    """Nodes appended one after another; every method returns the name of its result."""

    def __init__(self) -> None:
        self.nodes: list[Any] = []
        self.constants: list[Any] = []
        self.inputs: list[TensorSpec] = []
        self.outputs: list[TensorSpec] = []

    def input(self, name: str, dtype: str, *shape: int) -> str:
        self.inputs.append(TensorSpec(name, dtype, list(shape)))
        return name

    def output(self, name: str, value: str, dtype: str, *shape: int) -> None:
        self.nodes.append(helper.make_node("Identity", [value], [name]))
        self.outputs.append(TensorSpec(name, dtype, list(shape)))

    def const(self, value: Any) -> str:
        name = f"constant_{len(self.constants)}"
        array = np.asarray(value)
        array = array.astype(np.int64) if array.dtype.kind == "i" else array.astype(np.float32)
        self.constants.append(onnx.numpy_helper.from_array(array, name))
        return name

    def __call__(self, op: str, *inputs: str, **attributes: Any) -> str:
        name = f"{op.lower()}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(op, list(inputs), [name], **attributes))
        return name

    def top(self, values: str, count: int, largest: int) -> tuple[str, str]:
        """The `count` largest or smallest in order, and their indices."""
        names = [f"top_{len(self.nodes)}", f"top_index_{len(self.nodes)}"]
        self.nodes.append(helper.make_node("TopK", [values, self.const([count])], names, axis=1, largest=largest))
        return names[0], names[1]

    def cast(self, value: str, dtype: str) -> str:
        return self("Cast", value, to=helper.np_dtype_to_tensor_dtype(np.dtype(dtype)))

    def cut(self, value: str, start: int, stop: int, axis: int) -> str:
        return self("Slice", value, *(self.const([n]) for n in (start, stop, axis)))

    def reshape(self, value: str, *shape: int) -> str:
        return self("Reshape", value, self.const(list(shape)))

    def append(self, value: str, shape: list[int], axis: int, fill: float, dtype: str = "float32") -> str:
        """`value` with `shape` of `fill` behind it."""
        return self("Concat", value, self.cast(self.const(np.full(shape, fill, np.float32)), dtype), axis=axis)

    def save(self, path: Path, kind: Any) -> bundle.Graph:
        def info(spec: TensorSpec) -> Any:
            return helper.make_tensor_value_info(
                spec.name, helper.np_dtype_to_tensor_dtype(np.dtype(spec.dtype)), spec.shape
            )

        graph = helper.make_graph(
            self.nodes, kind, [info(s) for s in self.inputs], [info(s) for s in self.outputs], self.constants
        )
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
        onnx.checker.check_model(model)
        onnx.save(model, path)
        return bundle.Graph(kind, path.name, self.inputs, self.outputs)

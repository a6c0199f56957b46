"""A graph module -> a static-shape `.onnx` file that shares its weights with every other graph of the bundle."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import warnings
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import onnx_ir as ir
import torch
from onnx_ir.passes import common
from onnx_ir.tensor_adapters import TorchTensor
from onnxscript.optimizer import fold_constants
from torch import Tensor, fx, nn

from engines import bundle
from engines.bundle import TensorSpec
from export.graphs import Graph
from export.operators import DOMAIN, OPERATORS, functions, translations
from export.simplify import simplify
from export.weights import Weights
from export.weights.joined import join
from export.weights.kept import Kept

OPSET = 20
PAGE = 4096  # weights are aligned to pages, so that they can be memory-mapped
INLINE = 256  # smaller constants stay in the .onnx file


class WeightFile:
    """Every weight once, by content: graphs of one model name and transpose their weights alike.

    Constants are stored as something smaller, if `weights` finds that it is equal. Several processes may add to one
    file: what is in it is written down in an index beside it, under a lock.
    """

    def __init__(self, folder: Path, weights: Weights | None = None):
        self.weights = weights or Weights()
        self.folder, self._file, self._index = folder, folder / bundle.WEIGHTS, folder / ".weights.index"
        self._known: dict[str, int] = {}
        self._kept = Kept(self._external)
        self._file.touch()
        self._index.touch()

    def __enter__(self) -> WeightFile:
        return self

    def __exit__(self, *_error: object) -> None:
        self._index.unlink(missing_ok=True)

    def add(self, data: bytes) -> int:
        """Offset of `data` in the file, written now if it is not there yet."""
        key = hashlib.sha256(data).hexdigest()
        if key not in self._known:
            with self._index.open("r+") as index, self._file.open("ab") as stream:
                fcntl.flock(index, fcntl.LOCK_EX)
                self._known = {known: int(offset) for known, offset in map(str.split, index)}
                if key not in self._known:
                    stream.write(b"\0" * (-stream.seek(0, os.SEEK_END) % PAGE))
                    self._known[key] = stream.tell()
                    stream.write(data)
                    stream.flush()
                    index.write(f"{key} {self._known[key]}\n")
                    index.flush()
        return self._known[key]

    def pack(self, model: ir.Model) -> None:
        """Store the graph's constants as something smaller, where `weights` finds that it is equal; join the others."""
        self.weights.pack(model, self._kept)
        join(model, self._kept)

    def externalize(self, model: ir.Model) -> None:
        """Move the graph's large constants into the file."""
        for value in model.graph.initializers.values():
            tensor = value.const_value
            if tensor is None or tensor.nbytes <= INLINE or isinstance(tensor, ir.ExternalTensor):
                continue
            if stored := self._kept.of(tensor, "whole", partial(list, [tensor])):
                value.const_value = stored[0]
                value.const_value.name = value.name

    def _external(self, tensor: ir.TensorProtocol) -> ir.ExternalTensor:
        offset, shape = self.add(tensor.tobytes()), ir.Shape(tensor.shape.numpy())
        where = bundle.WEIGHTS, offset, tensor.nbytes, ir.DataType(tensor.dtype)
        return ir.ExternalTensor(*where, shape=shape, name=tensor.name or "", base_dir=str(self.folder))


def example(spec: TensorSpec) -> Tensor:
    """A tensor of the spec's shape and dtype; what it holds does not matter to the export."""
    return torch.zeros(spec.shape, dtype=getattr(torch, spec.dtype))


def export(graph: Graph, name: str, weights: WeightFile) -> bundle.Graph:
    """Export `graph` as `name`.onnx into the folder of `weights` and describe it."""
    specs = list(graph.inputs.values())
    inputs = tuple(example(spec) for spec in specs)
    with torch.no_grad(), _quiet():
        onnx_program = torch.onnx.export(
            simplify(torch.export.export(graph.eval(), inputs, strict=False)),
            input_names=[spec.name for spec in specs],
            output_names=graph.outputs,
            opset_version=OPSET,
            custom_translation_table=translations(),
            dynamo=True,
            optimize=False,  # its pattern rewriting takes as long as all the rest and gains nothing here
            verbose=False,
        )
    assert onnx_program is not None
    model = onnx_program.model
    _tidy(model)
    used = [node for node in model.graph if node.domain == DOMAIN]
    kept = [node.attributes["k"].as_int() for node in used if "k" in node.attributes]
    bits = {(a["key_bits"].as_int(), a["value_bits"].as_int()) for a in (n.attributes for n in used) if "key_bits" in a}
    bodies = functions(max(kept, default=1), *bits)  # one pair of bits at most: a recipe's
    for operator in dict.fromkeys(node.op_type for node in used):
        for function in bodies[operator]:
            model.functions[function.identifier()] = function
    weights.pack(model)
    weights.externalize(model)
    file = f"{name}.onnx"
    ir.save(model, weights.folder / file)
    outputs = [_spec(output) for output in model.graph.outputs]
    return bundle.Graph(graph.kind, file, specs, outputs, dict(Counter(node.op_type for node in used)))


def _tidy(model: ir.Model) -> None:
    """Fold constants, merge equal nodes, drop unused ones and the exporter's notes of where each node came from.

    Where nobody reads the attention that slots receive, `masses = 0` tells a kernel to leave it out. The outputs stay:
    TensorRT takes no function with fewer, and ONNX Runtime none with fewer at the end.
    """
    _turn(model)
    _divide(model)
    fold_constants(model)
    _clip(model)
    passes = ir.passes.Sequential(common.CommonSubexpressionEliminationPass(), common.RemoveUnusedNodesPass())
    passes(model)
    for node in model.graph:
        node.metadata_props.clear()
        node.doc_string = None
        masses = node.outputs[1:] if node.op_type == OPERATORS["quant_kv_attention"].name else ()
        if masses and not any(mass.uses() or mass.is_graph_output() for mass in masses):
            node.attributes["masses"] = ir.AttrInt64("masses", 0)


def _divide(model: ir.Model) -> None:
    """What is multiplied by 1 / sqrt is divided by sqrt: the form of RMSNorm that ONNX Runtime runs as one node."""
    for node in list(model.graph):
        for number, factor in enumerate(node.inputs if node.op_type == "Mul" and not node.domain else ()):
            inverse = factor.producer() if factor is not None else None
            root = inverse.inputs[0] if inverse is not None and inverse.op_type == "Reciprocal" else None
            maker = root.producer() if root is not None else None
            if maker is not None and maker.op_type == "Sqrt":
                quotient = ir.Node("", "Div", [node.inputs[1 - number], root])
                old, new = [node.outputs[0]], [quotient.outputs[0]]
                ir.convenience.replace_nodes_and_values(model.graph, node, [node], [quotient], old, new)
                break


def _clip(model: ir.Model) -> None:
    """The smaller of a limit and the larger of another and x: one node that passes over x once."""
    for node in list(model.graph):
        low = node.inputs[0].producer() if node.op_type == "Min" and not node.domain and node.inputs[0] else None
        if low is None or low.op_type != "Max" or len(low.inputs) != 2 or len(node.inputs) != 2:
            continue
        limits = [low.inputs[1], node.inputs[1]]
        if len(low.outputs[0].uses()) == 1 and all(limit is not None and _is_number(limit) for limit in limits):
            clip = ir.Node("", "Clip", [low.inputs[0], *limits])
            ir.convenience.replace_nodes_and_values(model.graph, node, [low, node], [clip], node.outputs, clip.outputs)


def _is_number(value: ir.Value) -> bool:
    """Whether it is a constant without dimensions, and no whole number."""
    tensor = ir.convenience.get_const_tensor(value)
    return tensor is not None and len(tensor.shape) == 0 and tensor.dtype.is_floating_point()


def _turn(model: ir.Model) -> None:
    """Weights that are multiplied by transposed become views: folding would hold a copy of every one in memory."""
    turned: dict[tuple[ir.Value, tuple[int, ...]], ir.Value] = {}
    for node in list(model.graph):
        source = node.inputs[0] if node.op_type == "Transpose" and not node.domain else None
        raw = getattr(source.const_value, "raw", None) if source is not None else None
        if source is None or not isinstance(raw, nn.Parameter) or "perm" not in node.attributes:
            continue
        order = tuple(node.attributes["perm"].as_ints())
        if (source, order) not in turned:
            view = nn.Parameter(raw.detach().permute(order), requires_grad=False)
            name = ".".join([str(source.name), *map(str, order)])
            value = ir.Value(name=name, const_value=TorchTensor(view, name=name))
            value.shape, value.type = ir.Shape(view.shape), source.type
            model.graph.register_initializer(value)
            turned[source, order] = value
        ir.convenience.replace_all_uses_with(node.outputs[0], turned[source, order])


def _spec(value: ir.Value) -> TensorSpec:
    assert value.name and value.shape is not None and value.dtype is not None
    return TensorSpec(value.name, str(np.dtype(value.dtype.numpy())), list(value.shape.numpy()))


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """The exporter's notes about its own internals are nothing a user can act on.

    Nor is where each of a graph's nodes comes from, which took PyTorch 6 % of an export to find out.
    """
    level, traces = logging.root.manager.disable, getattr(fx.config, "do_not_emit_stack_traces", False)
    logging.disable(logging.WARNING)
    fx.config.do_not_emit_stack_traces = True
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)
        fx.config.do_not_emit_stack_traces = traces

"""Forms that ONNX Runtime runs as one node, or without a copy, and that mean the same."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import onnx
import onnxruntime as ort
import pytest
import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from engines.bundle import TensorSpec
from export.attention import attention_logits, mix_values
from export.graphs import Graph
from export.to_onnx import WeightFile, export
from export.verify import largest_error


class One(Graph):
    """A norm, and a product that one row takes of what it gives."""

    kind = "compact"
    outputs = ["out"]  # noqa: RUF012

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm
        shapes = {"rows": [1, 4, 64], "keys": [1, 2, 9, 64]}
        self._takes(*(TensorSpec(name, "float32", shape) for name, shape in shapes.items()))

    def compute(self, rows: Tensor, keys: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        query = self.norm(rows)[:, :, None]
        return {"out": mix_values(attention_logits(query, keys, 0.125).softmax(dim=-1), keys)}


def test_a_norm_is_one_node_and_one_row_is_no_part_of_a_scaled_product(tmp_path: Path) -> None:
    norm = LlamaRMSNorm(64).requires_grad_(False)
    with WeightFile(tmp_path) as weights:
        exported = export(graph := One(norm), "one", weights)
    assert largest_error(graph, exported, tmp_path) < 1e-5
    options = ort.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    ort.InferenceSession(str(tmp_path / exported.file), options, providers=["CPUExecutionProvider"])
    nodes = onnx.load(tmp_path / "optimized.onnx", load_external_data=False).graph.node
    kinds = Counter(node.op_type for node in nodes)
    assert kinds["SimplifiedLayerNormalization"] == 1
    assert not kinds.keys() & {"Pow", "ReduceMean", "Sqrt", "Reciprocal", "Div"}
    for node in nodes:
        if node.op_type == "FusedMatMul":
            assert next(a.f for a in node.attribute if a.name == "alpha") == 1.0


class Codes(Graph):
    """What quantizing does to rows, with limits on both sides, and on one."""

    kind = "compact"
    outputs = ["codes", "above", "whole"]  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        self._takes(TensorSpec("rows", "float32", [1, 4, 64]), TensorSpec("numbers", "int32", [5]))

    def compute(self, rows: Tensor, numbers: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        codes = (rows * 90).round().clamp(-127, 127).to(torch.int8)
        return {"codes": codes, "above": rows.clamp(min=-1), "whole": numbers.clamp(1, 3)}


def test_two_limits_are_one_node(tmp_path: Path) -> None:
    with WeightFile(tmp_path) as weights:
        exported = export(graph := Codes(), "codes", weights)
    assert largest_error(graph, exported, tmp_path) == 0
    feeds = {"rows": torch.linspace(-3, 3, 256).reshape(1, 4, 64), "numbers": torch.arange(5, dtype=torch.int32)}
    session = ort.InferenceSession(str(tmp_path / exported.file), providers=["CPUExecutionProvider"])
    got = session.run(None, {name: value.numpy() for name, value in feeds.items()})
    for ours, theirs in zip(got, graph(*feeds.values()), strict=True):
        torch.testing.assert_close(torch.from_numpy(ours), theirs, rtol=0, atol=0)
    kinds = Counter(node.op_type for node in onnx.load(tmp_path / exported.file).graph.node)
    assert kinds["Clip"] == 1
    assert kinds["Max"] + kinds["Min"] == 3  # one limit; and of whole numbers, as TensorRT's Clip takes none


@pytest.mark.parametrize("kv_heads", [1, 2, 6])
def test_one_row_is_as_several(kv_heads: int) -> None:
    torch.manual_seed(0)
    query, key = torch.randn(2, 6, 3, 8), torch.randn(2, kv_heads, 7, 8)
    several = attention_logits(query, key, 0.3)
    mixed = mix_values(several.softmax(dim=-1), key)
    for row in range(3):
        one = attention_logits(query[:, :, row : row + 1], key, 0.3)
        torch.testing.assert_close(one, several[:, :, :, row : row + 1])
        torch.testing.assert_close(mix_values(one.softmax(dim=-1), key), mixed[:, :, row : row + 1])

"""Products of the same rows that become one: the same numbers, and one copy of the weights for all graphs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from torch import Tensor, nn

from engines.bundle import WEIGHTS, TensorSpec
from engines.ort import OrtSession
from export.graphs import Graph
from export.to_onnx import WeightFile, export
from export.verify import largest_error
from export.weights import Weights

WIDTH = 64


class Layer(Graph):
    """Three products of one value, one with a bias, and one product of another."""

    kind = "decode"
    outputs = ["out"]  # noqa: RUF012

    def __init__(self, parts: nn.ModuleList, rows: int) -> None:
        super().__init__()
        self.parts = parts
        self._takes(TensorSpec("x", "float32", [1, rows, WIDTH]))

    def compute(self, x: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        first, second, third, last = self.parts
        return {"out": last(torch.cat([first(x).sin(), second(x), third(x).cos()], dim=-1))}


@pytest.fixture
def parts() -> nn.ModuleList:
    torch.manual_seed(0)
    made = [nn.Linear(WIDTH, width, bias=width == 32) for width in (64, 32, 16)]
    return nn.ModuleList([*made, nn.Linear(112, 8, bias=False)]).requires_grad_(False)


def weights_of(path: Path) -> dict[str, list[int]]:
    """Shapes of what the graph's products multiply by."""
    graph = onnx.load(path, load_external_data=False).graph
    shapes = {tensor.name: [*tensor.dims] for tensor in graph.initializer}
    return {node.input[1]: shapes[node.input[1]] for node in graph.node if node.op_type == "MatMul"}


def test_products_of_the_same_rows_are_one(parts: nn.ModuleList, tmp_path: Path) -> None:
    with WeightFile(tmp_path) as weights:
        for rows in (1, 5):
            layer = Layer(parts, rows)
            made = export(layer, f"rows_{rows}", weights)
            assert largest_error(layer, made, tmp_path) < 1e-6
            assert [*weights_of(tmp_path / made.file).values()] == [[WIDTH, 112], [112, 8]]
            if rows == 1:
                size = (tmp_path / WEIGHTS).stat().st_size
    assert (tmp_path / WEIGHTS).stat().st_size == size
    x = np.random.default_rng(0).standard_normal((1, 5, WIDTH)).astype(np.float32)
    out = OrtSession(tmp_path / "rows_5.onnx", 1).run({"x": x})["out"]
    np.testing.assert_allclose(out, layer(torch.from_numpy(x))[0].numpy(), atol=1e-6)


def test_what_is_stored_in_fewer_bits_stays_apart(parts: nn.ModuleList, tmp_path: Path) -> None:
    for weight in parts.parameters():
        weight.copy_(weight.half().float())
    with WeightFile(tmp_path, Weights("float16")) as weights:
        made = export(Layer(parts, 1), "graph", weights)
    found = weights_of(tmp_path / made.file)  # the others are too small to be worth it
    assert [*found.values()] == [[WIDTH, 64], [WIDTH, 48], [112, 8]]
    assert [name.endswith(".half") for name in found] == [True, False, False]

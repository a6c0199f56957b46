"""Products that become MatMulNBits: the same numbers in ONNX Runtime, and as TensorRT is given them."""

from __future__ import annotations

import importlib.util
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from onnx import helper, numpy_helper

from engines import trt
from engines.ort import OrtSession
from engines.trt_weights import dequantizing
from export.to_onnx import WeightFile
from export.weights import Grid, Weights, nbits

pytestmark = pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")

GRIDS = [Grid(4, 32), Grid(8, 128)]
# How a weight is multiplied by: operator, its attributes, whether the weight lies transposed, whether a bias is added.
WAYS: dict[str, tuple[str, dict[str, Any], bool, bool]] = {
    "product": ("MatMul", {}, True, False),
    "head": ("Gemm", {"transB": 1}, False, False),
    "with bias": ("Gemm", {"transB": 1}, False, True),
    "transposed": ("Gemm", {}, True, True),
}


def on_grid(rows: int, width: int, grid: Grid, seed: int = 0) -> np.ndarray:
    return grid.nearest(torch.from_numpy(np.random.default_rng(seed).standard_normal((rows, width)) * 0.1)).numpy()


def model(weight: np.ndarray, way: str, batch: list[int], times: int = 1) -> tuple[ir.Model, np.ndarray, np.ndarray]:
    """`times` products with one weight, added up; an input, and what comes of it."""
    operator, attributes, transposed, biased = WAYS[way]
    rng = np.random.default_rng(1)
    x, bias = (rng.standard_normal(shape).astype(np.float32) for shape in ([*batch, weight.shape[1]], weight.shape[:1]))
    constants = {"w": weight.T if transposed else weight, **({"b": bias} if biased else {})}
    nodes = [helper.make_node(operator, ["x", *constants], [f"y{i}"], f"n{i}", **attributes) for i in range(times)]
    nodes.append(helper.make_node("Sum", [f"y{i}" for i in range(times)], ["y"]))
    shapes = {"x": x.shape, "y": [*batch, len(weight)]}
    values = {name: helper.make_tensor_value_info(name, 1, shape) for name, shape in shapes.items()}
    tensors = [numpy_helper.from_array(np.ascontiguousarray(array), name) for name, array in constants.items()]
    graph = helper.make_graph(nodes, "graph", [values["x"]], [values["y"]], tensors)
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    expected = x.astype(np.float64) @ weight.T.astype(np.float64) + (bias if biased else 0)
    return ir.from_proto(made), x, times * expected


def saved(made: ir.Model, folder: Path) -> Path:
    with WeightFile(folder) as weights:
        nbits.pack(made, GRIDS)
        weights.externalize(made)
    ir.save(made, folder / "graph.onnx")
    return folder / "graph.onnx"


def operators(path: Path) -> Counter[str]:
    return Counter(node.op_type for node in onnx.load(path, load_external_data=False).graph.node)


def run(path: Path, x: np.ndarray) -> np.ndarray:
    return OrtSession(path, threads=1).run({"x": x})["y"]


def as_tensorrt_reads_it(path: Path, folder: Path) -> Path:
    """The file that TensorRT is given, its weights beside it: ONNX follows no links."""
    folder.mkdir()
    with dequantizing(str(path), folder.parent) as made:
        for file in Path(made).parent.iterdir():
            shutil.copy(file.resolve(), folder / file.name)
    return folder / path.name


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("grid", "rows", "width"), [(GRIDS[0], 48, 96), (GRIDS[0], 64, 100), (GRIDS[1], 40, 320)])
def test_the_product_is_the_same(tmp_path: Path, way: str, grid: Grid, rows: int, width: int) -> None:
    weight = on_grid(rows, width, grid)
    made, x, expected = model(weight, way, [3])
    path = saved(made, tmp_path)
    assert operators(path)["MatMulNBits"] == 1
    largest = np.abs(expected).max()
    with nbits.exact(path) as exact:
        np.testing.assert_allclose(run(exact, x), expected, atol=2e-6 * largest)
    assert list(tmp_path.glob("*.onnx")) == [path]
    np.testing.assert_allclose(run(path, x), expected, atol=0.02 * largest)  # inputs are rounded to 8 bits

    dequantized = as_tensorrt_reads_it(path, tmp_path / "trt")
    assert "MatMulNBits" not in operators(dequantized)
    assert operators(dequantized)["DequantizeLinear"] == 1
    np.testing.assert_allclose(run(dequantized, x), expected, atol=2e-6 * largest)


def test_a_weight_of_several_products_is_stored_once(tmp_path: Path) -> None:
    weight = on_grid(64, 96, GRIDS[0])
    made, x, expected = model(weight, "product", [2, 3], times=2)
    path = saved(made, tmp_path)
    assert operators(path) == {"MatMulNBits": 2, "Sum": 1}
    stored = 64 * 3 * (16 + 4)  # codes and scales
    assert stored <= (tmp_path / "weights.bin").stat().st_size < stored + 4096
    dequantized = as_tensorrt_reads_it(path, tmp_path / "trt")
    assert operators(dequantized)["DequantizeLinear"] == 1
    np.testing.assert_allclose(run(dequantized, x), expected, atol=1e-5)


def test_a_table_and_the_head_that_is_tied_to_it_are_stored_once(tmp_path: Path) -> None:
    weights = Weights("int4")
    table = on_grid(64, 96, weights.table)
    made, _, _ = model(table, "head", [1])
    with WeightFile(tmp_path, weights) as file:
        embedding = weights.store(torch.from_numpy(table), file.add)
        file.weights.pack(made)
        file.externalize(made)
    packed = next(node for node in made.graph if node.op_type == "MatMulNBits")
    offsets = [value.const_value.offset for value in packed.inputs[1:]]  # type: ignore[union-attr]
    assert offsets == [embedding.offset, embedding.scales]
    assert embedding.end == (tmp_path / "weights.bin").stat().st_size


def test_what_lies_on_no_grid_is_left(tmp_path: Path) -> None:
    weight = np.random.default_rng(0).standard_normal((64, 96)).astype(np.float32)
    made, x, expected = model(weight, "product", [3])
    path = saved(made, tmp_path)
    assert operators(path) == {"MatMul": 1, "Sum": 1}
    np.testing.assert_allclose(run(path, x), expected, atol=1e-4)
    with nbits.exact(path) as exact, dequantizing(str(path), tmp_path) as parsed:
        assert exact == path == Path(parsed)


@pytest.mark.parametrize("attributes", [{"transB": 1, "alpha": 2.0}, {"transB": 1, "beta": 0.5}])
def test_a_product_that_is_scaled_is_left(tmp_path: Path, monkeypatch: Any, attributes: dict[str, Any]) -> None:
    monkeypatch.setitem(WAYS, "scaled", ("Gemm", attributes, False, True))
    made, _, _ = model(on_grid(64, 96, GRIDS[0]), "scaled", [3])
    assert "MatMulNBits" not in operators(saved(made, tmp_path))


def test_small_weights_are_left(tmp_path: Path) -> None:
    made, _, _ = model(on_grid(32, 64, GRIDS[0]), "product", [3])
    assert "MatMulNBits" not in operators(saved(made, tmp_path))


@pytest.mark.skipif(importlib.util.find_spec("tensorrt_rtx") is None, reason="pip install tensorrt-rtx-cu13")
@pytest.mark.parametrize(("grid", "width"), [(GRIDS[0], 1024), (GRIDS[0], 1000), (GRIDS[1], 1024)])
def test_a_plan_holds_the_weights_as_they_are_stored(tmp_path: Path, grid: Grid, width: int) -> None:
    weight = on_grid(1024, width, grid)
    made, _, _ = model(weight, "with bias", [1])
    built: list[trt.Built] = []
    trt.build_plans("trt-rtx", {"graph": saved(made, tmp_path)}, tmp_path, built.append)
    assert "DEQUANTIZE" in built[0].layers
    assert built[0].bytes < weight.nbytes / 2
    assert not [file for file in tmp_path.iterdir() if file.is_dir()]

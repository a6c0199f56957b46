"""Products in float16: equal where they can be, and left in float32 where float16 ends."""

from __future__ import annotations

import dataclasses
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from onnx import helper, numpy_helper

from calibration.islands import HEADROOM, islands
from calibration.samples import read
from engines.ort import OrtSession
from export import checkpoint as checkpoints
from export.checkpoint import Checkpoint
from export.graphs import Prefill, State
from export.to_onnx import WeightFile, export
from export.verify import random_inputs
from export.weights import Weights
from export.weights.float16 import LARGEST, halve
from tests.export import tiny

pytestmark = pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")

FLOAT16 = Weights("float16")
FAR = 3000  # positions that float16 does not tell apart
BEYOND = 1e5


def overflowing() -> Any:
    """The tiny model, changed in nothing but that what its second layer's gate lets through is beyond float16."""
    model = tiny.llava()
    layer: Any = model.model.language_model.layers[1].mlp
    with torch.no_grad():
        layer.up_proj.weight *= BEYOND
        layer.down_proj.weight /= BEYOND
    config: Any = model.config
    config.text_config.max_position_embeddings = 2 * FAR
    return model


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tmp_path_factory.mktemp("overflow") / "checkpoint", overflowing())


def prefill(checkpoint: Checkpoint, folder: Path) -> tuple[Prefill, dict[str, np.ndarray], np.ndarray]:
    """The graph's module, what it is fed, at positions far behind, and the logits that ONNX Runtime computes."""
    graph = Prefill(State(checkpoint.decoder, tiny.recipe(), 16), None)
    with WeightFile(folder, checkpoint.weights) as weights:
        export(graph, "prefill", weights)
    feeds = random_inputs(graph)
    feeds["positions"] = feeds["positions"] + np.int32(FAR)
    return graph, feeds, OrtSession(folder / "prefill.onnx", threads=1).run(feeds)["logits"]


def logits(graph: Prefill, feeds: dict[str, np.ndarray]) -> np.ndarray:
    with torch.no_grad():
        outputs = graph(*(torch.from_numpy(feeds[spec.name]) for spec in graph.inputs.values()))
    return dict(zip(graph.outputs, outputs, strict=True))["logits"].numpy()


def apart(got: np.ndarray, wanted: np.ndarray) -> float:
    return float(np.abs(got - wanted).max() / np.abs(wanted).max())


def test_islands_are_the_products_that_pass_the_range(path: Path) -> None:
    checkpoint, samples = checkpoints.load(path), read(path / "samples")
    found = islands(checkpoint, samples)
    layer = "model.language_model.layers.1.mlp"
    assert set(found) == {f"{layer}.up_proj", f"{layer}.down_proj"}
    assert "output reaches" in found[f"{layer}.up_proj"]
    assert "input reaches" in found[f"{layer}.down_proj"]
    reached = float(found[f"{layer}.down_proj"].split()[3].strip(",").replace(",", ""))
    assert reached > LARGEST / HEADROOM


def test_a_model_within_the_range_has_none(tiny_path: Path) -> None:
    assert islands(checkpoints.load(tiny_path), read(tiny_path / "samples")) == {}


def test_islands_and_positions_are_exact_where_float16_is_not(path: Path, tmp_path: Path) -> None:
    checkpoint = checkpoints.load(path)
    found = islands(checkpoint, read(path / "samples"))
    weights = FLOAT16.sparing(checkpoint.model.get_submodule(name) for name in found)
    graph, feeds, got = prefill(checkpoint.quantized(weights), tmp_path)
    wanted = logits(graph, feeds)
    assert apart(got, wanted) < 5e-3

    made = onnx.load(tmp_path / "prefill.onnx", load_external_data=False)
    types = {tensor.name: tensor.data_type for tensor in made.graph.initializer}
    multiplied = [node.input[1] for node in made.graph.node if node.op_type in ("MatMul", "Gemm")]
    products = Counter(types[name] for name in multiplied if name in types)
    small = 3  # keys and values of three layers, one product each
    assert products == {onnx.TensorProto.FLOAT16: 3 * 5 + 1 - 2, onnx.TensorProto.FLOAT: 2 + small}

    # What the two guard against: positions in float16, and a product beyond its range.
    rounded = feeds | {"positions": feeds["positions"].astype(np.float16).astype(np.int32)}
    assert apart(logits(graph, rounded), wanted) > 0.02
    (tmp_path / "all").mkdir()
    everything = dataclasses.replace(checkpoint, weights=FLOAT16)
    _, feeds, got = prefill(everything.quantized(FLOAT16), tmp_path / "all")
    assert not apart(got, wanted) < 0.02


@pytest.mark.parametrize("operator", ["MatMul", "Gemm", "Conv"])
def test_every_product_and_its_bias(tmp_path: Path, operator: str) -> None:
    rng = np.random.default_rng(0)
    shapes = {"MatMul": ([5, 64], [64, 96]), "Gemm": ([5, 64], [96, 64]), "Conv": ([1, 3, 16, 16], [96, 3, 4, 4])}
    x, w = (rng.standard_normal(shape).astype(np.float16).astype(np.float32) for shape in shapes[operator])
    bias = rng.standard_normal(96).astype(np.float32)
    outputs = [1, 96, 4, 4] if operator == "Conv" else [5, 96]
    settings: dict[str, dict[str, Any]] = {"MatMul": {}, "Gemm": {"transB": 1}, "Conv": {"strides": [4, 4]}}
    constants = {"w": w, **({} if operator == "MatMul" else {"b": bias})}
    node = helper.make_node(operator, ["x", *constants], ["y"], **settings[operator])
    values = [helper.make_tensor_value_info("x", 1, x.shape), helper.make_tensor_value_info("y", 1, outputs)]
    tensors = [numpy_helper.from_array(array, name) for name, array in constants.items()]
    graph = helper.make_graph([node], "graph", values[:1], values[1:], tensors)
    made = ir.from_proto(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10))
    ir.save(made, tmp_path / "whole.onnx")
    halve(made, frozenset())
    ir.save(made, tmp_path / "half.onnx")
    assert [n.op_type for n in made.graph][:3] == ["Cast", operator, "Cast"]
    whole, half = (OrtSession(tmp_path / f"{name}.onnx", threads=1).run({"x": x})["y"] for name in ("whole", "half"))
    np.testing.assert_allclose(half, whole, atol=2e-3 * np.abs(whole).max())

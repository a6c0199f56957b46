"""Plans with plugins, by the real TensorRT-RTX builder: every node of an operator is a plugin layer, or an error."""

from __future__ import annotations

import _ctypes
import types
from collections.abc import Sequence
from pathlib import Path

import onnx
import pytest
import torch
from onnx import helper
from torch import Tensor, nn

from engines import trt, trt_plugins
from engines.bundle import TensorSpec
from engines.errors import UserError
from export.graphs import Graph
from export.to_onnx import WeightFile, export

slow = pytest.mark.slow


class Selecting(Graph):
    """TopKGather two times, the second on what the first gave, with ordinary operators around them."""

    kind = "compact"

    def __init__(self, dtype: str, bias: str = "float32", score: str = "float32") -> None:
        nn.Module.__init__(self)
        heads = [2, 3, 40]
        self._takes(
            TensorSpec("score", score, heads),
            TensorSpec("key", dtype, [*heads, 8]),
            TensorSpec("positions", "int32", heads),
            TensorSpec("bias", bias, heads),
        )
        self.outputs = ["kept", "index"]

    def compute(self, score: Tensor, key: Tensor, positions: Tensor, bias: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        kept = torch.ops.unicache.topk_gather(score + score, key, key, positions, bias, 20)
        again = torch.ops.unicache.topk_gather(kept[3].float(), kept[0], kept[1], kept[2], kept[3], 10)
        return {"kept": again[0] + again[1], "index": again[4] + 1}


class Attending(Graph):
    """QuantKVAttention of two layers, as a decode graph has them: of types, widths and blocks of scales."""

    kind = "decode"

    def __init__(self, dtype: str, scale: str, bits: tuple[int, int], key_blocks: list[int], value_blocks: list[int]):
        nn.Module.__init__(self)
        self.bits = bits
        key_bytes, value_bytes = (64 * each // 8 for each in bits)
        self._takes(
            TensorSpec("query", dtype, [1, 4, 1, 64]),
            TensorSpec("key_store", "int8", [1, 2, 96, key_bytes]),
            TensorSpec("key_scale", scale, [1, 2, *key_blocks]),
            TensorSpec("value_store", "int8", [1, 2, 96, value_bytes]),
            TensorSpec("value_scale", scale, [1, 2, *value_blocks]),
            TensorSpec("store_bias", "float16", [1, 2, 96]),
            TensorSpec("key_window", dtype, [1, 2, 16, 64]),
            TensorSpec("value_window", dtype, [1, 2, 16, 64]),
            TensorSpec("window_bias", "float32", [1, 1, 16]),
        )
        self.outputs = ["output", "store_mass", "window_mass"]

    def compute(self, query: Tensor, **rest: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        first = torch.ops.unicache.quant_kv_attention(query, *rest.values(), 0.125, *self.bits)
        second = torch.ops.unicache.quant_kv_attention(first[0] + query, *rest.values(), 0.125, *self.bits)
        return dict(zip(self.outputs, (a + b for a, b in zip(first, second, strict=True)), strict=True))


def exported(graph: Graph, folder: Path, name: str) -> Path:
    with WeightFile(folder) as weights:
        return folder / export(graph, name, weights).file


def build(graphs: dict[str, Path], folder: Path, plugins: Path | None, workers: int = 1) -> dict[str, trt.Built]:
    pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX is not installed: pip install tensorrt-rtx-cu13")
    folder.mkdir(exist_ok=True)
    built: dict[str, trt.Built] = {}
    progress = lambda one: built.update({one.plan.graph: one})  # noqa: E731
    plans = trt.build_plans("trt-rtx", graphs, folder, progress, plugins=plugins, workers=workers)
    assert all((folder / plan.file).stat().st_size for plan in plans)
    assert all(plan.compute_capabilities == ["sm_80", "sm_86", "sm_89"] for plan in plans)
    return built


def plugin_layers(built: trt.Built) -> int:
    """Of the engine: TensorRT-RTX calls them custom layers."""
    return len([layer for layer in built.fused if layer.kind == "custom_layer"])


@slow
def test_topk_gather_becomes_plugin_layers(plugin_library: Path, tmp_path: Path) -> None:
    types = {"half": ("float16", "float16"), "single": ("float32", "float32"), "mixed": ("float16", "float32")}
    graphs = {name: exported(Selecting(*each), tmp_path, name) for name, each in types.items()}
    before = {name: path.read_bytes() for name, path in graphs.items()}
    built = build(graphs, tmp_path / "plans", plugin_library)  # one process: the library is loaded once
    for name, one in built.items():
        assert one.plan.plugins == {"TopKGather": 2}
        assert one.layers.count("PLUGIN_V3") == plugin_layers(one) == 2
        assert "TOPK" not in one.layers
        assert graphs[name].read_bytes() == before[name]


PER_CHANNEL, PER_TOKEN, BLOCKED = [1, 64], [96, 1], [3, 2]
ATTENTION = {
    "int8": ("float16", "float16", (8, 8), PER_CHANNEL, PER_TOKEN),
    "int4": ("float16", "float32", (4, 4), BLOCKED, BLOCKED),
    "mixed": ("float32", "float16", (8, 4), PER_TOKEN, PER_CHANNEL),
    "single": ("float32", "float32", (4, 8), BLOCKED, PER_TOKEN),
}


@slow
def test_quant_kv_attention_becomes_plugin_layers(plugin_library: Path, tmp_path: Path) -> None:
    graphs = {name: exported(Attending(*each), tmp_path, name) for name, each in ATTENTION.items()}
    for one in build(graphs, tmp_path / "plans", plugin_library).values():
        assert one.plan.plugins == {"QuantKVAttention": 2}
        assert one.layers.count("PLUGIN_V3") == plugin_layers(one) == 2
        assert "SOFTMAX" not in one.layers


@slow
def test_without_a_library_the_bodies_are_built(tmp_path: Path) -> None:
    built = build({"one": exported(Selecting("float16"), tmp_path, "one")}, tmp_path / "plans", None)["one"]
    assert (built.plan.plugins, plugin_layers(built)) == ({}, 0)
    assert "TOPK" in built.layers


def other_operator(path: Path) -> Path:
    """A node of the operators' domain of which there is no plugin."""
    x, y = (helper.make_tensor_value_info(name, 1, [4]) for name in "xy")
    nodes = [helper.make_node("Sort", ["x"], ["y"], name="sort_it", domain="unicache")]
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("unicache", 1)]
    onnx.save(helper.make_model(helper.make_graph(nodes, "graph", [x], [y]), opset_imports=opsets, ir_version=10), path)
    return path


def refused(graph: Path, folder: Path, plugins: Path) -> str:
    with pytest.raises(UserError) as error:
        build({"decode": graph}, folder, plugins)
    assert not list(folder.glob("*.plan"))
    return str(error.value)


@slow
def test_what_a_plugin_does_not_support_is_said_in_its_words(plugin_library: Path, tmp_path: Path) -> None:
    graph = exported(Selecting("float16", score="float16"), tmp_path, "half_scores")
    message = refused(graph, tmp_path / "plans", plugin_library)
    assert message.startswith("trt-rtx: graph decode: unsupported node node_topk_gather")
    assert message.endswith("(TopKGather): score is float16, supported: float32")


@slow
def test_an_operator_without_a_plugin_is_named(plugin_library: Path, tmp_path: Path) -> None:
    message = refused(other_operator(tmp_path / "sort.onnx"), tmp_path / "plans", plugin_library)
    assert message.startswith("trt-rtx: graph decode: unsupported node sort_it (Sort): ")
    assert "Plugin not found" in message


@slow
def test_a_library_that_is_missing_or_is_another(tmp_path: Path) -> None:
    graph = exported(Selecting("float16"), tmp_path, "selecting")
    missing = refused(graph, tmp_path / "plans", tmp_path / "none.so")
    assert missing == f"there is no plugin library {tmp_path}/none.so: build one with  python -m engines.plugins build"
    text = tmp_path / "text.so"
    text.write_text("no library")
    for library, reason in ((text, "file too short"), (Path(_ctypes.__file__), "getCreators")):
        message = refused(graph, tmp_path / "plans", library)
        assert f"graph decode: {library} is no plugin library that loads here: " in message
        assert reason in message


def layer(name: str, kind: str) -> types.SimpleNamespace:
    return types.SimpleNamespace(name=name, type=types.SimpleNamespace(name=kind))


def network(layers: Sequence[types.SimpleNamespace]) -> types.SimpleNamespace:
    return types.SimpleNamespace(num_layers=len(layers), get_layer=lambda i: layers[i])


NODES = {"a": "TopKGather", "b": "TopKGather", "c": "QuantKVAttention"}


def test_a_node_that_is_no_plugin_layer_is_named() -> None:
    layers = [layer(name, "PLUGIN_V3") for name in NODES]
    trt_plugins.check_network(network(layers), NODES)
    layers[1] = layer("b", "TOPK")
    with pytest.raises(UserError, match=r"^no plugin layer of the parsed network for node b \(TopKGather\)$"):
        trt_plugins.check_network(network(layers), NODES)
    with pytest.raises(UserError, match=r"for node a \(TopKGather\), b \(TopKGather\), c \(QuantKVAttention\)$"):
        trt_plugins.check_network(network([]), NODES)


def test_a_node_that_the_engine_does_not_compute_is_named() -> None:
    fused = [{"name": "a", "nodes": []}, {"name": "x", "nodes": ["c", "b"]}]
    trt_plugins.check_engine(fused, NODES)
    fused[1]["nodes"] = ["b"]
    with pytest.raises(UserError, match=r"^no plugin layer of the engine for node c \(QuantKVAttention\)$"):
        trt_plugins.check_engine(fused, NODES)


def test_nodes_ask_for_their_plugin_and_the_functions_of_the_operators_are_gone(tmp_path: Path) -> None:
    path = exported(Selecting("float16"), tmp_path, "selecting")
    model = onnx.load(path)
    for node in model.graph.node:
        node.name = ""
    model.functions.append(helper.make_function("mine", "Other", [], [], [], []))
    onnx.save(model, path)
    parsed, nodes = trt_plugins.prepare(str(path))
    prepared = onnx.load_from_string(parsed)
    asking = {node.name: node for node in prepared.graph.node if node.domain == "unicache"}
    assert nodes == {name: "TopKGather" for name in asking}
    assert len(nodes) == 2
    for node in asking.values():
        attributes = {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}
        assert attributes.items() >= {"plugin_namespace": b"unicache", "plugin_version": b"1"}.items()
    assert [(function.domain, function.name) for function in prepared.functions] == [("mine", "Other")]

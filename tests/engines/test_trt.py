"""TensorRT plans: with the real TensorRT-RTX builder where it is installed, and a stand-in that aborts and hangs."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from engines import trt
from engines.bundle import Bundle, Embedding, Graph, Manifest, Model, Plan
from engines.errors import UserError

real = pytest.mark.skipif(
    importlib.util.find_spec("tensorrt_rtx") is None,
    reason="tensorrt_rtx is not installed: pip install tensorrt-rtx-cu13",
)

WIDTH = 512  # of the weights: 1 MiB of them is more than the rest of a plan


def save(path: Path, nodes: list, outputs: list, initializers: Sequence = (), functions: Sequence = ()) -> Path:
    """A model with inputs `x` [1, 2, 16, WIDTH] and `scores` [1, 2, 16]."""
    shapes = {"x": [1, 2, 16, WIDTH], "scores": [1, 2, 16]}
    inputs = [helper.make_tensor_value_info(name, 1, shape) for name, shape in shapes.items()]
    graph = helper.make_graph(nodes, "graph", inputs, outputs, initializer=list(initializers))
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("unicache", 1)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, functions=list(functions), ir_version=10), path)
    return path


def selecting(path: Path, operator: str = "Neg") -> Path:
    """TopKGather, as a function of domain unicache, with `operator` in its body."""
    body = [
        helper.make_node("Constant", [], ["k"], value_ints=[4]),
        helper.make_node("TopK", ["scores", "k"], ["values", "indices"], axis=-1),
        helper.make_node(operator, ["values"], ["unused"], name="inner"),
        helper.make_node("Constant", [], ["last"], value_ints=[-1]),
        helper.make_node("Unsqueeze", ["indices", "last"], ["columns"]),
        helper.make_node("GatherND", ["x", "columns"], ["y"], batch_dims=2),
    ]
    opsets = [helper.make_opsetid("", 20)]
    function = helper.make_function("unicache", "TopKGather", ["x", "scores"], ["y"], body, opsets)
    node = helper.make_node("TopKGather", ["x", "scores"], ["y"], name="select", domain="unicache")
    return save(path, [node], [helper.make_tensor_value_info("y", 1, [1, 2, 4, WIDTH])], functions=[function])


def projecting(path: Path) -> Path:
    """A matrix product whose weights lie in weights.bin beside the model."""
    weights = np.random.default_rng(0).standard_normal((WIDTH, WIDTH)).astype(np.float32)
    offset = 4096
    (path.parent / "weights.bin").write_bytes(bytes(offset) + weights.tobytes())
    tensor = numpy_helper.from_array(weights, "w")
    onnx.external_data_helper.set_external_data(tensor, "weights.bin", offset, weights.nbytes)
    tensor.ClearField("raw_data")
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"], name="project")]
    return save(path, nodes, [helper.make_tensor_value_info("y", 1, [1, 2, 16, WIDTH])], [tensor])


def refused(path: Path) -> Path:
    nodes = [
        helper.make_node("Neg", ["x"], ["z"], name="fine"),
        helper.make_node("NonZero", ["z"], ["y"], name="find"),
    ]
    return save(path, nodes, [helper.make_tensor_value_info("y", 7, [4, "n"])])


@pytest.fixture
def out(tmp_path: Path) -> Path:
    folder = tmp_path / "out"
    folder.mkdir()
    (folder / "prefill.onnx").write_text("was here before")
    return folder


def left(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


@real
def test_plans_of_a_graph_with_a_function_and_of_one_with_external_weights(tmp_path: Path, out: Path) -> None:
    graphs = {"prefill": selecting(tmp_path / "p.onnx"), "decode": projecting(tmp_path / "d.onnx")}
    built: dict[str, trt.Built] = {}
    plans = trt.build_plans("trt-rtx", graphs, out, lambda b: built.update({b.plan.graph: b}))

    here = importlib.import_module("tensorrt_rtx").__version__
    capabilities = ["sm_80", "sm_86", "sm_89"]
    assert plans == [
        Plan("prefill", "prefill.trt-rtx.plan", "trt-rtx", here, capabilities),
        Plan("decode", "decode.trt-rtx.plan", "trt-rtx", here, capabilities),
    ]
    assert left(out) == ["decode.trt-rtx.plan", "prefill.onnx", "prefill.trt-rtx.plan"]
    for plan in plans:
        assert built[plan.graph].plan == plan
        assert built[plan.graph].bytes == (out / plan.file).stat().st_size
        assert built[plan.graph].inputs == ["x", "scores"]
        assert built[plan.graph].outputs == ["y"]
    assert built["decode"].bytes > 4 * WIDTH * WIDTH > built["prefill"].bytes

    # The function was inlined: its body's operators are layers of the network.
    assert "TOPK" in built["prefill"].layers
    assert "GATHER" in built["prefill"].layers
    # And the finished engines compute the nodes that were asked for.
    assert "project" in {node for layer in built["decode"].fused for node in layer.nodes}
    assert all(layer.kind for b in built.values() for layer in b.fused)


@real
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (refused, "find (NonZero):"),
        (lambda path: selecting(path, "NonZero"), "inner (NonZero) in function select (TopKGather):"),
    ],
    ids=["in the graph", "in a function"],
)
def test_an_unsupported_operator_is_named_and_no_plan_is_left(make, message: str, tmp_path: Path, out: Path) -> None:
    graphs = {"good": selecting(tmp_path / "good.onnx"), "bad": make(tmp_path / "bad.onnx")}
    with pytest.raises(UserError) as error:
        trt.build_plans("trt-rtx", graphs, out, workers=1)
    assert f"trt-rtx: graph bad: unsupported node {message}" in str(error.value)
    assert left(out) == ["prefill.onnx"]


@real
def test_missing_weights_are_an_error_with_the_name_of_the_graph(tmp_path: Path, out: Path) -> None:
    graphs = {"decode": projecting(tmp_path / "d.onnx")}
    (tmp_path / "weights.bin").unlink()
    with pytest.raises(UserError, match=r"graph decode: .*weights\.bin"):
        trt.build_plans("trt-rtx", graphs, out)
    assert left(out) == ["prefill.onnx"]


@real
def test_a_file_that_is_no_model(tmp_path: Path, out: Path) -> None:
    (tmp_path / "d.onnx").write_bytes(bytes([255, 254, 0]))
    with pytest.raises(UserError, match=r"graph decode: .*Failed to parse the ONNX model"):
        trt.build_plans("trt-rtx", {"decode": tmp_path / "d.onnx"}, out)


def files(*names: str) -> dict[str, Path]:
    return {name: Path(f"{name}.onnx") for name in names}


def test_trt_builds_for_the_gpu_that_is_present_in_one_process(stand_in: Path, out: Path) -> None:
    built: list[trt.Built] = []
    plans = trt.build_plans("trt", files("vision", "prefill", "decode"), out, built.append)
    assert plans[0] == Plan("vision", "vision.trt.plan", "trt", "11.0.0", ["sm_87"])
    assert (out / "decode.trt.plan").read_text() == "plan of decode"
    assert built[0].fused == [trt.FusedLayer("all", "kgen", ["a", "b"])]
    processes, graphs = zip(*(line.split() for line in stand_in.read_text().splitlines()), strict=True)
    assert graphs == ("vision", "prefill", "decode")
    assert len(set(processes)) == 1


def test_two_workers_share_the_graphs(stand_in: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trt.os, "cpu_count", lambda: 2)
    names = [f"graph{i}" for i in range(40)]
    plans = trt.build_plans("trt", files(*names), out, workers=2)
    assert [plan.graph for plan in plans] == names
    assert len({line.split()[0] for line in stand_in.read_text().splitlines()}) == 2


@pytest.mark.parametrize(
    ("graph", "message"),
    [
        ("aborts", r"trt: the builder died on graph aborts \(SIGABRT\); its last words: .*optimizing aborts"),
        ("hangs", r"trt: graph hangs took longer than 2 s to build"),
        ("fails", r"trt: graph fails: MemoryError: no memory"),
        ("refused", r"trt: graph refused: the builder refused it: duplicate tensor name"),
    ],
)
def test_a_builder_that_fails_is_one_message_and_no_plan(graph: str, message: str, stand_in: Path, out: Path) -> None:
    with pytest.raises(UserError, match=message):
        trt.build_plans("trt", files("vision", graph, "decode"), out, timeout=2)
    assert left(out) == ["prefill.onnx"]


def test_no_worker_outlives_the_build(stand_in: Path, out: Path) -> None:
    with pytest.raises(UserError):
        trt.build_plans("trt", files("fails", "hangs"), out, workers=2)
    pids = [int(line.split()[0]) for line in stand_in.read_text().splitlines()]
    time.sleep(0.1)
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]


def test_trt_without_a_gpu_or_without_the_package(stand_in: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trt, "gpu", lambda: None)
    with pytest.raises(UserError, match="builds for the GPU at hand, and there is none here"):
        trt.build_plans("trt", files("vision"), out)
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    with pytest.raises(UserError, match=r"not installed: .*JetPack.*pip install tensorrt"):
        trt.build_plans("trt", files("vision"), out)
    with pytest.raises(UserError, match="'cuda' is no TensorRT backend; known: trt-rtx, trt"):
        trt.build_plans("cuda", files("vision"), out)


@pytest.fixture
def bundle(tmp_path: Path) -> Bundle:
    model = Model("llava", 1, [1], 1, 1, 1, 0, "", [], None, [], Embedding(0, "float32", [1, 1]))
    graphs = {name: Graph("decode", f"{name}.onnx", [], []) for name in ("vision", "decode")}
    plans = [Plan(name, f"{name}.trt.plan", "trt", "11.0.0", ["sm_86", "sm_87"]) for name in graphs]
    return Bundle(tmp_path, Manifest(model, {}, "off", graphs, plans))


def with_plans(bundle: Bundle, plans: list[Plan]) -> Bundle:
    return Bundle(bundle.path, dataclasses.replace(bundle.manifest, plans=plans))


def test_status_tells_what_is_in_the_way(stand_in: Path, bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    plans = bundle.manifest.plans
    command = f"rebuild with  python -m engines plans {bundle.path} --backend trt"
    status = trt.status("trt", bundle)
    assert status == trt.Status("trt", True, "TensorRT 11.0.0, 2 plans for sm_87")

    assert trt.status("trt", with_plans(bundle, [])).reason == f"the bundle has no plans for trt: {command}"
    reason = trt.status("trt", with_plans(bundle, plans[:1])).reason
    assert reason == f"the bundle has no plan of decode for trt: {command}"
    old = [plans[0], dataclasses.replace(plans[1], version="10.3.0")]
    assert trt.status("trt", with_plans(bundle, old)).reason == (
        f"plans were built for TensorRT 10.3.0 on sm_86/sm_87, this machine has 11.0.0 on sm_87: {command}"
    )
    monkeypatch.setattr(trt, "gpu", lambda: "sm_90")
    status = trt.status("trt", bundle)
    assert not status.available
    assert "this machine has 11.0.0 on sm_90" in status.reason

    monkeypatch.setattr(trt, "gpu", lambda: None)
    assert trt.status("trt", bundle).reason.startswith("no NVIDIA GPU here")
    monkeypatch.setattr(trt, "gpu", lambda: "sm_87")
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    assert "JetPack" in trt.status("trt", bundle).reason


def test_a_package_that_does_not_load_says_why(stand_in: Path, bundle: Bundle) -> None:
    (stand_in.parent / "package" / "tensorrt.py").write_text("raise ImportError('libnvinfer.so.11: cannot open')")
    assert "installed but does not load (libnvinfer.so.11: cannot open" in trt.status("trt", bundle).reason

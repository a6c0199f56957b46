from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper

from engines.errors import BackendError, UserError
from engines.ort import DTYPES, OrtSession, ort_status, providers


def save(
    path: Path,
    nodes: list[Any],
    inputs: dict[str, tuple[str, list[int]]],
    outputs: dict[str, tuple[str, list[int]]],
    **extra: Any,
) -> Path:
    def info(tensors: dict[str, tuple[str, list[int]]]) -> list[Any]:
        return [
            helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(np.dtype(dtype)), shape)
            for name, (dtype, shape) in tensors.items()
        ]

    graph = helper.make_graph(nodes, "graph", info(inputs), info(outputs), extra.pop("constants", []))
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), path, **extra)
    return path


@pytest.fixture
def adder(tmp_path: Path) -> OrtSession:
    """z = x + y, and x twice over as `pair`."""
    nodes = [helper.make_node("Add", ["x", "y"], ["z"]), helper.make_node("Concat", ["x", "x"], ["pair"], axis=0)]
    tensors = {"x": ("float32", [2, 3]), "y": ("float32", [2, 3])}
    path = save(tmp_path / "adder.onnx", nodes, tensors, {"z": ("float32", [2, 3]), "pair": ("float32", [4, 3])})
    return OrtSession(path, threads=1)


def feeds() -> dict[str, np.ndarray]:
    return {"x": np.arange(6, dtype=np.float32).reshape(2, 3), "y": np.full((2, 3), 10, np.float32)}


def test_runs_and_names_its_outputs(adder: OrtSession) -> None:
    x, y = feeds().values()
    result = adder.run({"y": y, "x": x})  # by name, in any order
    assert list(result) == ["z", "pair"]
    np.testing.assert_array_equal(result["z"], x + y)
    np.testing.assert_array_equal(result["pair"], np.concatenate([x, x]))


def test_describes_itself(adder: OrtSession) -> None:
    float32 = np.dtype("float32")
    assert adder.inputs == {"x": (float32, (2, 3)), "y": (float32, (2, 3))}
    assert adder.outputs == {"z": (float32, (2, 3)), "pair": (float32, (4, 3))}
    assert adder.provider == providers()[0]


def test_outputs_are_the_callers(adder: OrtSession) -> None:
    """They may be written to, and neither the next run nor the inputs notice."""
    inputs = feeds()
    first = adder.run(inputs)
    first["z"][:] = -1
    first["pair"][:] = -1
    second = adder.run(inputs)
    np.testing.assert_array_equal(second["z"], feeds()["x"] + 10)
    np.testing.assert_array_equal(inputs["x"], feeds()["x"])
    assert (first["z"] == -1).all()


def test_output_that_is_an_input_shares_no_memory(tmp_path: Path) -> None:
    """A compaction may hand a tensor through unchanged."""
    path = save(
        tmp_path / "same.onnx",
        [helper.make_node("Identity", ["x"], ["y"])],
        {"x": ("float32", [4])},
        {"y": ("float32", [4])},
    )
    x = np.zeros(4, np.float32)
    y = OrtSession(path).run({"x": x})["y"]
    y[:] = 1
    assert not x.any()


def test_inputs_that_are_not_contiguous(adder: OrtSession) -> None:
    x = np.arange(12, dtype=np.float32).reshape(3, 4)[:, ::2].T
    assert not x.flags.c_contiguous
    np.testing.assert_array_equal(adder.run(feeds() | {"x": x})["z"], x + 10)


def test_inputs_are_not_copied(tmp_path: Path) -> None:
    """256 MiB in, four bytes out: a copy would show in the process's peak memory."""
    size = 256 * 2**20
    constants = [helper.make_tensor(n, onnx.TensorProto.INT64, [1], [v]) for n, v in (("from", 0), ("to", 4))]
    nodes = [helper.make_node("Slice", ["x", "from", "to"], ["y"])]
    path = save(tmp_path / "slice.onnx", nodes, {"x": ("int8", [size])}, {"y": ("int8", [4])}, constants=constants)
    code = f"""
import resource, numpy as np
from engines.ort import OrtSession
session, x = OrtSession({str(path)!r}, threads=1), np.ones({size}, np.int8)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
session.run({{"x": x}})
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    grown = int(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)
    assert grown * 1024 < size / 4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": np.zeros((2, 4), np.float32)}, r"adder\.onnx: input 'x' must be float32 \[2, 3\], got float32 \[2, 4\]"),
        ({"x": np.zeros((2, 3), np.float64)}, r"input 'x' must be float32 \[2, 3\], got float64 \[2, 3\]"),
        ({"x": np.zeros(6, np.float32)}, r"got float32 \[6\]"),
        ({"w": np.zeros(1)}, r"missing: \[\], unknown: \['w'\]"),
    ],
)
def test_feed_that_does_not_fit(change: dict[str, np.ndarray], message: str, adder: OrtSession) -> None:
    with pytest.raises(ValueError, match=message):
        adder.run(feeds() | change)


def test_a_run_that_fails_is_one_line(tmp_path: Path) -> None:
    """What it was given is as declared; what is in it is not what an operator can do."""
    inputs, outputs = {"x": ("float32", [3]), "i": ("int64", [1])}, {"y": ("float32", [1])}
    session = OrtSession(
        save(tmp_path / "graph.onnx", [helper.make_node("Gather", ["x", "i"], ["y"])], inputs, outputs)
    )
    x = np.arange(3, dtype=np.float32)
    assert session.run({"x": x, "i": np.array([2])})["y"].tolist() == [2]
    with pytest.raises(
        BackendError, match=r"graph\.onnx: ONNX Runtime failed while it ran: .*out of data bounds"
    ) as error:
        session.run({"x": x, "i": np.array([99])})
    assert "\n" not in str(error.value)


def test_feed_that_is_missing(adder: OrtSession) -> None:
    with pytest.raises(ValueError, match=r"missing: \['y'\], unknown: \[\]"):
        adder.run({"x": feeds()["x"]})


@pytest.mark.parametrize("dtype", sorted(set(DTYPES.values())))
def test_every_dtype_passes(dtype: str, tmp_path: Path) -> None:
    path = save(
        tmp_path / "id.onnx", [helper.make_node("Identity", ["x"], ["y"])], {"x": (dtype, [2])}, {"y": (dtype, [2])}
    )
    x = np.array([0, 1], dtype)
    y = OrtSession(path).run({"x": x})["y"]
    assert y.dtype == x.dtype
    np.testing.assert_array_equal(y, x)


def test_external_weights_lie_beside_the_graph(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = np.arange(2048, dtype=np.float32)
    nodes, tensor = [helper.make_node("Add", ["x", "w"], ["y"])], ("float32", [2048])
    options = {"save_as_external_data": True, "location": "weights.bin", "size_threshold": 0}
    constants = [onnx.numpy_helper.from_array(weight, "w")]
    path = save(tmp_path / "graph.onnx", nodes, {"x": tensor}, {"y": tensor}, constants=constants, **options)
    monkeypatch.chdir(tmp_path.parent)
    np.testing.assert_array_equal(OrtSession(path).run({"x": np.ones(2048, np.float32)})["y"], weight + 1)

    (tmp_path / "weights.bin").unlink()
    with pytest.raises(UserError, match=r"graph\.onnx: ONNX Runtime .* cannot load it"):
        OrtSession(path)


OWN = """
import sys
from pathlib import Path
from engines.ort import OrtSession

def own():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("RssAnon"))

OrtSession(Path(sys.argv[1]), mapped=True)
before = own()
session = OrtSession(Path(sys.argv[1]), mapped=True)
print(own() - before)
"""


def test_mapped_float16_weights_are_not_held_in_float32(tmp_path: Path) -> None:
    """Of a model of 256 M parameters the check of each graph held 540 MiB for it."""
    weight = onnx.numpy_helper.from_array(np.ones((2048, 4096), np.float16), "w")
    nodes = [
        helper.make_node("Cast", ["x"], ["half"], to=onnx.TensorProto.FLOAT16),
        helper.make_node("MatMul", ["half", "w"], ["product"]),
        helper.make_node("Cast", ["product"], ["y"], to=onnx.TensorProto.FLOAT),
    ]
    options: dict[str, Any] = {"save_as_external_data": True, "location": "weights.bin", "size_threshold": 0}
    inputs, outputs = {"x": ("float32", [1, 2048])}, {"y": ("float32", [1, 4096])}
    path = save(tmp_path / "graph.onnx", nodes, inputs, outputs, constants=[weight], **options)
    done = subprocess.run([sys.executable, "-c", OWN, path], capture_output=True, text=True, check=True)
    assert int(done.stdout) * 1024 < weight.ByteSize() / 2


@pytest.mark.parametrize("content", [None, b"", b"not a graph", b"\x08\x0a"])
def test_file_that_is_no_graph(content: bytes | None, tmp_path: Path) -> None:
    path = tmp_path / "broken.onnx"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError, match=r"broken\.onnx: ONNX Runtime .* cannot load it") as error:
        OrtSession(path)
    assert "\n" not in str(error.value)


def test_unknown_operator_is_named(tmp_path: Path) -> None:
    node = helper.make_node("Sparkle", ["x"], ["y"])
    path = save(tmp_path / "odd.onnx", [node], {"x": ("float32", [2])}, {"y": ("float32", [2])})
    with pytest.raises(UserError, match="Sparkle"):
        OrtSession(path)


@pytest.mark.parametrize(
    ("available", "expected"),
    [
        (["CPUExecutionProvider"], ["CPUExecutionProvider"]),
        (
            ["TensorrtExecutionProvider", "CUDAExecutionProvider", "CPUExecutionProvider"],
            ["CUDAExecutionProvider", "CPUExecutionProvider"],
        ),
        (["AzureExecutionProvider", "CPUExecutionProvider"], ["CPUExecutionProvider"]),
    ],
)
def test_cuda_first_then_cpu(available: list[str], expected: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: available)
    assert providers() == expected


def test_status_names_version_and_provider() -> None:
    status = ort_status()
    assert (status.name, status.available) == ("ort", True)
    assert onnxruntime.__version__ in status.reason
    assert "ExecutionProvider" in status.reason


def test_missing_package_is_a_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    status = ort_status()
    assert not status.available
    assert "pip install onnxruntime" in status.reason
    with pytest.raises(UserError, match="pip install onnxruntime"):
        OrtSession(tmp_path / "x.onnx")

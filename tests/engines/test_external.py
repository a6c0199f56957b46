"""Weights in a file beside the graph: read as the onnx package reads them, mapped once, and given to ONNX Runtime."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import helper, numpy_helper

from engines import external
from engines.ort import OrtSession
from tests.engines.test_ort import save
from tests.fuzz import damaged, examples

SIDE = 256
MIB = 2**20


def products(folder: Path, name: str, count: int, side: int = SIDE) -> Path:
    """x times `count` weights, one after another, which lie in the file `weights.bin`."""
    random = np.random.default_rng(0)
    weights = [(random.standard_normal((side, side)) / np.sqrt(side)).astype(np.float32) for _ in range(count)]
    constants = [numpy_helper.from_array(weight, f"w{i}") for i, weight in enumerate(weights)]
    nodes = [helper.make_node("MatMul", [f"x{i}", f"w{i}"], [f"x{i + 1}"]) for i in range(count)]
    row = ("float32", [1, side])
    outside = {"save_as_external_data": True, "location": "weights.bin"}
    (folder / "weights.bin").unlink(missing_ok=True)  # onnx appends
    return save(folder / name, nodes, {"x0": row}, {f"x{count}": row}, constants=constants, **outside)


def test_weights_are_those_that_onnx_reads(tmp_path: Path) -> None:
    path = products(tmp_path, "graph.onnx", 3)
    wanted = {t.name: numpy_helper.to_array(t, str(tmp_path)) for t in onnx.load(path).graph.initializer}
    arrays = external.mapped(path)
    assert arrays.keys() == wanted.keys()
    for name, array in arrays.items():
        np.testing.assert_array_equal(array, wanted[name])


def test_a_file_is_mapped_once_and_no_longer_than_it_is_needed(tmp_path: Path) -> None:
    path = products(tmp_path, "graph.onnx", 2)
    one, two = external.mapped(path), external.mapped(path)
    assert np.shares_memory(one["w0"], two["w0"])
    other = products(tmp_path, "graph.onnx", 3)  # another bundle takes the first one's place
    assert not np.shares_memory(external.mapped(other)["w0"], one["w0"])
    del one, two
    assert not external._FILES


def test_what_onnx_runtime_turns_itself_is_left_to_it(tmp_path: Path) -> None:
    """A Transpose in front of an Add moves behind it, and what is added is turned: the encoder of GOT-OCR2."""
    added = np.random.default_rng(0).standard_normal((1, 8, 8, 64)).astype(np.float32)
    scale, bias = np.ones(64, np.float32), np.zeros(64, np.float32)
    constants = [numpy_helper.from_array(x, name) for x, name in ((added, "p"), (scale, "scale"), (bias, "bias"))]
    nodes = [
        helper.make_node("Transpose", ["x"], ["t"], perm=[0, 2, 3, 1]),
        helper.make_node("Add", ["t", "p"], ["sum"]),
        helper.make_node("LayerNormalization", ["sum", "scale", "bias"], ["normal"]),
        helper.make_node("Transpose", ["normal"], ["back"], perm=[0, 3, 1, 2]),
        helper.make_node("Add", ["back", "x"], ["y"]),
    ]
    outside = {"save_as_external_data": True, "location": "weights.bin", "size_threshold": 0}
    shape = ("float32", [1, 64, 8, 8])
    path = save(tmp_path / "graph.onnx", nodes, {"x": shape}, {"y": shape}, constants=constants, **outside)
    assert external.mapped(path) == {}
    x = np.random.default_rng(1).standard_normal(shape[1]).astype(np.float32)
    plain, mapped = (OrtSession(path, 1, mapped=mapped).run({"x": x})["y"] for mapped in (False, True))
    np.testing.assert_array_equal(mapped, plain)


def test_tensors_of_other_folders_and_types_are_left_out(tmp_path: Path) -> None:
    path = products(tmp_path, "graph.onnx", 3)
    model = onnx.load(path, load_external_data=False)
    first, second, _ = model.graph.initializer
    first.external_data[0].value = "../weights.bin"
    second.data_type = onnx.TensorProto.BFLOAT16
    onnx.save(model, path)
    assert list(external.mapped(path)) == ["w2"]
    (tmp_path / "weights.bin").write_bytes(b"short")
    assert external.mapped(path) == {}


@examples(200)
@given(data=st.data())
def test_fuzz_a_damaged_file_is_none_or_its_weights_are_in_bounds(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("damaged")
    path = products(folder, "graph.onnx", 2, side=64)
    path.write_bytes(data.draw(damaged(path.read_bytes())))
    try:
        arrays = external.mapped(path)
    except ValueError:
        return
    assert all(array.nbytes <= (folder / "weights.bin").stat().st_size for array in arrays.values())


MEASURE = """
import sys
from pathlib import Path
import numpy as np
from engines.ort import OrtSession

def resident():
    return int(next(l for l in open("/proc/self/status") if l.startswith("VmRSS")).split()[1]) * 1024

path, side, mapped = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "mapped"
OrtSession(path, threads=1, mapped=mapped).run({"x0": np.ones((1, side), np.float32)})
before = resident()
sessions = [OrtSession(path, threads=1, mapped=mapped) for _ in range(3)]
outputs = [next(iter(s.run({"x0": np.ones((1, side), np.float32)}).values())) for s in sessions]
assert all((output == outputs[0]).all() for output in outputs)
print(resident() - before)
"""


def test_weights_are_held_once_however_many_sessions(tmp_path: Path) -> None:
    side, count = 1024, 16  # 64 MiB
    path = products(tmp_path, "graph.onnx", count, side)
    size = (tmp_path / "weights.bin").stat().st_size
    taken = {}
    for how in ("mapped", "packed"):
        line = [sys.executable, "-c", MEASURE, str(path), str(side), how]
        taken[how] = int(subprocess.run(line, capture_output=True, text=True, check=True).stdout)
    assert taken["mapped"] < size + 16 * MIB
    assert taken["packed"] > 2 * size  # what it is about; if ONNX Runtime no longer does this, `mapped` can go


def test_a_session_computes_the_same_with_them(tmp_path: Path) -> None:
    path = products(tmp_path, "graph.onnx", 2)
    x = {"x0": np.random.default_rng(1).standard_normal((1, SIDE)).astype(np.float32)}
    packed, mapped = (OrtSession(path, threads=1, mapped=how).run(x)["x2"] for how in (False, True))
    np.testing.assert_allclose(mapped, packed, rtol=1e-4, atol=1e-5)

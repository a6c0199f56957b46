"""Products of few rows: nodes exchanged while a graph is loaded, and the kernel of RowMatMul beside float64."""

from __future__ import annotations

import ctypes
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import helper, numpy_helper

from engines import external, products
from engines.ort import OrtSession
from tests.engines.test_cpu_kernel import RUN, TASK, Threads, library, many, path  # noqa: F401  fixtures
from tests.engines.test_ort import save
from tests.fuzz import damaged, examples

OUTSIDE = {"save_as_external_data": True, "location": "weights.bin", "size_threshold": 0}


def multiply(
    library: ctypes.CDLL,  # noqa: F811
    path: bytes | None,  # noqa: F811
    x: np.ndarray,
    w: np.ndarray,
    transposed: bool,
    threads: Threads | None = None,
) -> np.ndarray:
    """The kernel's output, which starts as NaN."""
    outputs = w.shape[0] if transposed else w.shape[1]
    y = np.full((len(x), outputs), np.nan, np.float32)
    sizes = map(ctypes.c_int64, (*x.shape, outputs))
    places = (ctypes.c_void_p(array.ctypes.data) for array in (x, w, y))
    shared = None if threads is None else ctypes.byref(threads)
    assert library.unicache_cpu_row_matmul(*places, *sizes, int(transposed), path, shared) == 0
    return y


def numbers(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@many
@given(
    rows=st.integers(1, 9),
    inputs=st.one_of(st.integers(0, 80), st.sampled_from([257, 576])),
    outputs=st.one_of(st.integers(0, 80), st.sampled_from([576, 1000])),
    transposed=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_the_kernel_multiplies(
    library: ctypes.CDLL,  # noqa: F811
    path: bytes,  # noqa: F811
    rows: int,
    inputs: int,
    outputs: int,
    transposed: bool,
    seed: int,
) -> None:
    x, w = numbers(seed, rows, inputs), numbers(seed + 1, *((outputs, inputs) if transposed else (inputs, outputs)))
    matrix = (w.T if transposed else w).astype(np.float64)
    near = 1e-6 * (1 + np.abs(x) @ np.abs(matrix))
    assert (np.abs(multiply(library, path, x, w, transposed) - x @ matrix) <= near).all()


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("shape", [(96, 9001), (1536, 576), (576, 3072), (4, 70_000)])
def test_cut_into_parts_and_blocks_and_shared_out(
    library: ctypes.CDLL,  # noqa: F811
    path: bytes,  # noqa: F811
    shape: tuple[int, int],
    transposed: bool,
) -> None:
    """Wide, narrow, both; by two threads in any order the same to the last bit."""
    x, w = numbers(0, 2, shape[0]), numbers(1, *(shape[::-1] if transposed else shape))
    alone = multiply(library, path, x, w, transposed)
    wanted = x.astype(np.float64) @ (w.T if transposed else w)
    np.testing.assert_allclose(alone, wanted, atol=1e-6 * shape[0] + 1e-6, rtol=1e-5)
    ran = []

    def run(_context: Any, task: Any, count: int, data: Any) -> int:
        ran.append(count)
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda part: task(data, part), reversed(range(count))))
        return 0

    threads = Threads(RUN(run), None)
    np.testing.assert_array_equal(multiply(library, path, x, w, transposed, threads), alone)
    assert ran
    assert ran[0] > 1


@pytest.mark.parametrize("transposed", [False, True])
def test_what_is_no_number_stays_so(library: ctypes.CDLL, path: bytes, transposed: bool) -> None:  # noqa: F811
    x, w = np.ones((1, 70), np.float32), np.ones((40, 70) if transposed else (70, 40), np.float32)
    matrix = w.T if transposed else w
    matrix[3, 5], matrix[69, 0], matrix[1, 39] = np.nan, np.inf, -np.inf
    np.testing.assert_array_equal(multiply(library, path, x, w, transposed), x @ matrix)


def test_a_path_that_is_not_there_is_refused(library: ctypes.CDLL) -> None:  # noqa: F811
    assert library.unicache_cpu_row_matmul(None, None, None, *map(ctypes.c_int64, (1, 1, 1)), 0, b"sse9", None) == 1


def layers(folder: Path, rows: int = 1, **gemm: Any) -> Path:
    """x -> MatMul -> Gemm, transposed -> what is added -> a product of two inputs; all weights in weights.bin."""
    weights = {"w": numbers(0, 64, 96), "turned": numbers(1, 32, 96), "added": numbers(2, 1, 32)}
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["wide"]),
        helper.make_node("Gemm", ["wide", "turned"], ["narrow"], **{"transB": 1, **gemm}),
        helper.make_node("Add", ["narrow", "added"], ["sum"]),
        helper.make_node("MatMul", ["sum", "other"], ["y"]),
    ]
    inputs = {"x": ("float32", [rows, 64]), "other": ("float32", [32, 8])}
    constants = [numpy_helper.from_array(array, name) for name, array in weights.items()]
    outputs = {"y": ("float32", [rows, 8])}
    return save(folder / "graph.onnx", nodes, inputs, outputs, constants=constants, **OUTSIDE)


def operators(model: bytes) -> Counter[tuple[str, str]]:
    return Counter((node.domain, node.op_type) for node in onnx.load_from_string(model).graph.node)


def test_products_by_weights_are_exchanged_and_nothing_else(tmp_path: Path) -> None:
    path = layers(tmp_path)  # noqa: F811
    before = onnx.load(path, load_external_data=False)
    model = products.exchange(path.read_bytes(), external.mapped(path))
    assert operators(model) == {("unicache", "RowMatMul"): 2, ("", "Add"): 1, ("", "MatMul"): 1}
    after = onnx.load_from_string(model)
    assert [(x.domain, x.version) for x in after.opset_import] == [("", 20), ("unicache", 1)]
    assert products.exchange(model, external.mapped(path)) == model
    for node, old in zip(after.graph.node, before.graph.node, strict=True):
        node.op_type = old.op_type
        node.ClearField("domain")
    del after.opset_import[1]
    assert after == before


@pytest.mark.parametrize("gemm", [{"alpha": 2.0}, {"transA": 1}])
def test_what_is_more_than_a_product_stays(tmp_path: Path, gemm: dict[str, Any]) -> None:
    path = layers(tmp_path, 96 if "transA" in gemm else 1, **gemm)  # noqa: F811
    assert operators(products.exchange(path.read_bytes(), ["turned"]))["", "Gemm"] == 1
    model = onnx.load(path)
    model.graph.node[1].CopyFrom(helper.make_node("Gemm", ["wide", "turned", "added"], ["narrow"], transB=1))
    assert operators(products.exchange(model.SerializeToString(), ["turned"]))["", "Gemm"] == 1


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("rows", [1, 3, 8])
def test_a_session_computes_the_same(operator_library: Path, tmp_path: Path, rows: int, threads: int) -> None:
    path = layers(tmp_path, rows)  # noqa: F811
    x = {"x": numbers(5, rows, 64), "other": numbers(6, 32, 8)}
    ways: list[dict[str, Any]] = [{}, {"library": operator_library, "mapped": True, "few_rows": True}]
    theirs, ours = (OrtSession(path, threads, **way).run(x)["y"] for way in ways)
    np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-3)
    assert not np.array_equal(ours, theirs)  # else nothing was exchanged: the sums are in another order


def test_a_row_that_does_not_fit_is_refused_by_the_kernel(operator_library: Path, tmp_path: Path) -> None:
    path = layers(tmp_path)  # noqa: F811
    model = onnx.load(path, load_external_data=False)
    model.graph.input[0].type.tensor_type.shape.dim[1].dim_param = "any"
    onnx.save(model, path)
    session = OrtSession(path, 1, operator_library, mapped=True, few_rows=True)
    with pytest.raises(Exception, match=r"RowMatMul: x is \[1, 63\], which does not fit w of \[64, 96\]"):
        session._session.run(["y"], {"x": numbers(0, 1, 63), "other": numbers(1, 32, 8)})


@examples(200)
@given(data=st.data())
def test_fuzz_a_damaged_file_is_refused_or_stays_one(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = layers(tmp_path_factory.mktemp("damaged"))  # noqa: F811
    content = data.draw(damaged(path.read_bytes()))
    try:
        model = products.exchange(content, ["w", "turned"])
    except ValueError:
        return
    assert len(model) >= len(content)

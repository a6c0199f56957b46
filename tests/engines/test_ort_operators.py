"""The operators' CPU kernels inside ONNX Runtime: with their library a node runs the kernel, without it its body."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx import helper

from engines.errors import UserError
from engines.ort import OrtSession
from engines.plugins import cpu_library
from export.checkpoint import Checkpoint
from export.graphs import Compact, Decode, Extend, Graph
from export.onnx_functions import ATTENTION, DOMAIN, DOMAIN_VERSION, TopKGather
from export.operators import functions
from export.to_onnx import OPSET, WeightFile, export
from export.verify import TOLERANCE, random_inputs
from tests.engines.attention_inputs import BLOCKS, TYPES, WIDTHS, exact, in_types, inputs, rounding
from tests.export.conftest import checkpoint, tiny_path  # noqa: F401  fixtures
from tests.export.test_every_method import graphs

many = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
SCALE = 0.3
ATTENTION_OUTPUTS = ["output", "store_mass", "window_mass"]
TOPK_OUTPUTS = ["kept_key", "kept_value", "kept_positions", "kept_bias", "index"]

Arrays = dict[str, np.ndarray]


def model_of(function: Any, x: Arrays, outputs: list[str], **attributes: Any) -> onnx.ModelProto:
    """A model of one operator, with its bodies; an output called "" is left out."""
    node = helper.make_node(function.name, [*x], outputs, domain=DOMAIN, **attributes)
    values = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(each.dtype), each.shape)
        for name, each in x.items()
    ]
    results = [helper.make_empty_tensor_value_info(name) for name in outputs if name]
    bits = attributes.get("key_bits", 8), attributes.get("value_bits", 8)
    bodies = [ir.serde.serialize_function(body) for body in functions(attributes.get("k", 1), bits)[function.name]]
    opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid(DOMAIN, DOMAIN_VERSION)]
    graph = helper.make_graph([node], "once", values, results)
    return helper.make_model(graph, functions=bodies, opset_imports=opsets, ir_version=10)


def session(model: bytes | str, library: Path | None, threads: int = 1, optimized: Path | None = None):
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    if library is not None:
        options.register_custom_ops_library(str(library))
    if optimized is not None:
        options.optimized_model_filepath = str(optimized)
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def operators_run(model: bytes | str, library: Path | None, folder: Path) -> int:
    """How many nodes of our operators are left when ONNX Runtime has made its graph: those that run as kernels."""
    session(model, library, optimized=folder / "optimized.onnx")
    nodes = onnx.load(folder / "optimized.onnx", load_external_data=False).graph.node
    return sum(node.domain == DOMAIN for node in nodes)


def attention(
    x: Arrays,
    library: Path | None,
    bits: tuple[int, int] = (8, 8),
    outputs: list[str] | None = None,
    threads: int = 1,
    **attributes: int,
) -> list[np.ndarray]:
    attributes |= {"scale": SCALE, "key_bits": bits[0], "value_bits": bits[1]}  # type: ignore[dict-item]
    model = model_of(ATTENTION[bits], x, outputs or ATTENTION_OUTPUTS, **attributes)
    return session(model.SerializeToString(), library, threads).run(None, x)


SHAPE: dict[str, Any] = {"batch": 2, "kv_heads": 2, "group": 3, "queries": 2, "slots": 45, "window": 3, "head_dim": 80}


def example(**changes: Any) -> Arrays:
    return inputs(np.random.default_rng(0), **{**SHAPE, "filled": 0.8, **changes})


@many
@given(
    seed=st.integers(0, 2**32 - 1),
    batch=st.integers(1, 2),
    kv_heads=st.integers(1, 2),
    group=st.integers(1, 4),
    queries=st.integers(1, 3),
    slots=st.sampled_from([1, 45, 64, 130]),
    window=st.sampled_from([0, 1, 9]),
    head_dim=st.sampled_from([5, 32, 64, 80]),
    filled=st.sampled_from([0.5, 1.0]),
    bits=st.tuples(WIDTHS, WIDTHS),
    blocks=st.tuples(BLOCKS, BLOCKS),
    shared=st.booleans(),
    types=st.tuples(TYPES, st.tuples(TYPES, TYPES), st.tuples(TYPES, TYPES)),
    threads=st.sampled_from([1, 2]),
)
def test_attention_in_a_session(
    operator_library: Path, seed: int, bits: tuple[int, int], types: Any, threads: int, **shape: Any
) -> None:
    x = inputs(np.random.default_rng(seed), bits=bits, **shape)
    x["store_bias"][..., -1] = 0
    x = in_types(x, *types)
    near = 6e-4 if types[0] == "float16" else 1e-5
    got, want = attention(x, operator_library, bits, threads=threads), exact(x, SCALE, bits)
    for ours, theirs, lost in zip(got, want, rounding(x, SCALE, bits), strict=True):
        assert ours.dtype == types[0]
        assert (np.abs(ours - theirs) <= 1e-5 + near * np.abs(theirs) + lost).all()


@pytest.mark.parametrize("bits", [(8, 8), (8, 4), (4, 8), (4, 4)])
def test_the_kernel_gives_what_the_body_gives(operator_library: Path, bits: tuple[int, int]) -> None:
    x = example(bits=bits)
    kernels, bodies = attention(x, operator_library, bits), attention(x, None, bits)
    for kernel, body, lost in zip(kernels, bodies, rounding(x, SCALE, bits), strict=True):
        assert (np.abs(kernel - body) <= 1e-5 + 1e-4 * np.abs(body) + lost).all()


def test_more_threads_change_nothing(operator_library: Path) -> None:
    x = example(slots=3000)
    one, two = (attention(x, operator_library, threads=threads) for threads in (1, 2))
    assert all((a == b).all() for a, b in zip(one, two, strict=True))


@pytest.mark.parametrize("outputs", [["output"], ["output", "", ""], ["output", "", "mass"], ["output", "mass"]])
def test_a_mass_that_the_graph_leaves_out(operator_library: Path, outputs: list[str]) -> None:
    x = example()
    got = attention(x, operator_library, outputs=outputs)
    all_three = zip(exact(x, SCALE), rounding(x, SCALE), outputs, strict=False)
    want = [(stated, lost) for stated, lost, name in all_three if name]
    for ours, (theirs, lost) in zip(got, want, strict=True):
        assert (np.abs(ours - theirs) <= 1e-5 + 1e-5 * np.abs(theirs) + lost).all()


@pytest.mark.parametrize("kernel", [True, False])
def test_masses_that_nobody_reads(operator_library: Path, kernel: bool) -> None:
    """With `masses = 0` the outputs are there, as a function body wants them, and a kernel leaves them as they were."""
    x = example()
    library = operator_library if kernel else None
    output, *_ = attention(x, library, masses=0)
    want, lost = exact(x, SCALE)[0], rounding(x, SCALE)[0]
    assert (np.abs(output - want) <= 1e-5 + 1e-4 * np.abs(want) + lost).all()


def test_the_exporter_tells_where_nobody_reads_masses(checkpoint: Checkpoint, tmp_path: Path) -> None:  # noqa: F811
    told = {}
    for importance in ("keydiff", "h2o"):
        (graph,) = graphs(checkpoint, "importance", {"method": importance}, [Decode])
        with WeightFile(tmp_path) as weights:
            file = tmp_path / export(graph.eval(), importance, weights).file
        nodes = [node for node in onnx.load(file, load_external_data=False).graph.node if node.domain == DOMAIN]
        told[importance] = {tuple(a.i for a in node.attribute if a.name == "masses") for node in nodes}
    assert told == {"keydiff": {(0,)}, "h2o": {()}}


def test_the_node_stays_where_the_library_is(operator_library: Path, tmp_path: Path) -> None:
    x = example()
    model = model_of(ATTENTION[8, 8], x, ATTENTION_OUTPUTS, scale=SCALE, key_bits=8, value_bits=8).SerializeToString()
    assert operators_run(model, operator_library, tmp_path) == 1
    assert operators_run(model, None, tmp_path) == 0


def tokens(rng: np.random.Generator, count: int, key: str, value: str, bias: str, scores: np.ndarray) -> Arrays:
    """What TopKGather takes: any bytes for rows, not-a-numbers among them."""

    def any_bytes(dtype: str, *shape: int) -> np.ndarray:
        return np.frombuffer(rng.bytes(int(np.prod(shape)) * np.dtype(dtype).itemsize), dtype).reshape(shape)

    return {
        "score": rng.choice(scores, (2, 3, count)).astype(np.float32),
        "key": any_bytes(key, 2, 3, count, 8),
        "value": any_bytes(value, 2, 3, count, 9),
        "positions": any_bytes("int32", 2, 3, count),
        "bias": any_bytes(bias, 2, 3, count),
    }


def gathered(x: Arrays, library: Path | None, k: int, outputs: list[str] | None = None) -> list[np.ndarray]:
    model = model_of(TopKGather, x, outputs or TOPK_OUTPUTS, k=k)
    return session(model.SerializeToString(), library, threads=2).run(None, x)


def stated(x: Arrays, k: int) -> list[np.ndarray]:
    """By index upwards, stably by score downwards; not-a-numbers above all, as PyTorch sorts them."""
    order = torch.from_numpy(x["score"]).sort(dim=-1, descending=True, stable=True).indices[..., :k]
    index = np.sort(order.numpy(), axis=-1)
    rows = [np.take_along_axis(x[name], index[..., None], 2) for name in ("key", "value")]
    return [*rows, *(np.take_along_axis(x[name], index, 2) for name in ("positions", "bias")), index]


def same(ours: list[np.ndarray], theirs: list[np.ndarray]) -> bool:
    pairs = zip(ours, theirs, strict=True)
    return all(a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes() for a, b in pairs)


ROWS = st.sampled_from(["float32", "float16", "int8"])
SCORES = {
    "ties": np.linspace(-1, 1, 5),
    "equal": np.ones(1),
    "special": np.array([np.nan, -np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-42, -1e-42, 3e38, -3e38]),
    "many": np.random.default_rng(0).standard_normal(10000),
}


@many
@given(
    seed=st.integers(0, 2**32 - 1),
    count=st.integers(1, 300),
    part=st.floats(0, 1),
    kinds=st.tuples(ROWS, ROWS, TYPES),
    scores=st.sampled_from([*SCORES]),
)
def test_topk_gather_in_a_session(
    operator_library: Path, seed: int, count: int, part: float, kinds: tuple[str, str, str], scores: str
) -> None:
    x = tokens(np.random.default_rng(seed), count, *kinds, SCORES[scores])
    k = round(part * count)
    assert same(gathered(x, operator_library, k), stated(x, k))


@pytest.mark.parametrize(("count", "k"), [(5000, 4000), (30000, 10000), (30000, 30000)])
def test_any_k_of_many(operator_library: Path, count: int, k: int) -> None:
    x = tokens(np.random.default_rng(0), count, "float16", "float32", "float16", SCORES["many"])
    assert same(gathered(x, operator_library, k), stated(x, k))


def test_topk_gather_is_its_body(operator_library: Path, tmp_path: Path) -> None:
    x = tokens(np.random.default_rng(0), 100, "float32", "float32", "float16", SCORES["ties"])
    x["value"] = np.ascontiguousarray(x["value"][..., 1:])  # the body wants rows as wide as the keys'
    for kernel, body in zip(gathered(x, operator_library, 37), gathered(x, None, 37), strict=True):
        np.testing.assert_array_equal(kernel, body)
    model = model_of(TopKGather, x, TOPK_OUTPUTS, k=37).SerializeToString()
    assert operators_run(model, operator_library, tmp_path) == 1


def test_kept_rows_alone(operator_library: Path) -> None:
    x = tokens(np.random.default_rng(0), 100, "float32", "float32", "float16", SCORES["many"])
    key, *_, index = stated(x, 37)
    assert same(gathered(x, operator_library, 37, ["kept_key", "", "", "", "index"]), [key, index])


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("store_bias", lambda v: v[:, :, 1:], r"store_bias must be \[2, 2, 45\], got \[2, 2, 44\]"),
        ("key_store", lambda v: v[..., 1:], r"key_store must be \[2, 2, 45, 80\], got \[2, 2, 45, 79\]"),
        ("value_window", lambda v: v[:1], r"value_window must be \[2, 2, 3, 80\], got \[1, 2, 3, 80\]"),
        ("window_bias", lambda v: v[0], r"window_bias must have 3 dimensions, got \[2, 3\]"),
        ("query", lambda v: v[:, :5], r"query is \[2, 5, 2, 80\], which does not fit 2 KV heads"),
        ("key_scale", lambda v: v.repeat(2, -1), r"key_scale is \[2, 2, 1, 160\], which does not fit rows of"),
        ("value_scale", lambda v: v.astype(np.int32), "value_scale must be float or float16"),
    ],
)
def test_a_wrong_input_is_named(operator_library: Path, name: str, change: Any, message: str) -> None:
    x = example()
    with pytest.raises(Exception, match=f"QuantKVAttention: {message}"):
        attention({**x, name: np.ascontiguousarray(change(x[name]))}, operator_library)


def test_wrong_bits_and_a_wrong_k_are_named(operator_library: Path) -> None:
    x = example()
    model = model_of(ATTENTION[8, 8], x, ATTENTION_OUTPUTS, scale=SCALE, key_bits=8, value_bits=8)
    next(each for each in model.graph.node[0].attribute if each.name == "key_bits").i = 3
    with pytest.raises(Exception, match="QuantKVAttention: bits must be 8 or 4, got 3"):
        session(model.SerializeToString(), operator_library)
    few = tokens(np.random.default_rng(0), 5, "float32", "float32", "float16", SCORES["many"])
    with pytest.raises(Exception, match="TopKGather: k is 6, of 5 tokens"):
        gathered(few, operator_library, 6)


slow = pytest.mark.slow


@pytest.mark.parametrize(
    ("kind", "table"),
    [
        (Decode, {"method": "int8"}),
        (Extend, {"method": "int8"}),
        (Compact, {"method": "int8"}),
        pytest.param(Decode, {"method": "int4"}, marks=slow),
        pytest.param(Decode, {"method": "int4", "group": 7, "rotate": True}, marks=slow),
        pytest.param(Extend, {"method": "int4", "group": 7, "rotate": True}, marks=slow),
        pytest.param(Decode, {"method": "per-token", "bits": 4, "group": 8}, marks=slow),
        pytest.param(Decode, {"method": "per-head", "rotate": True}, marks=slow),
        pytest.param(Compact, {"method": "kivi", "bits": 4, "group": 8}, marks=slow),
    ],
)
def test_a_whole_graph(
    operator_library: Path,
    checkpoint: Checkpoint,  # noqa: F811
    tmp_path: Path,
    kind: type[Graph],
    table: dict[str, Any],
) -> None:
    """An exported graph with the library = without it, and every operator of it is a kernel."""
    (graph,) = (graph.eval() for graph in graphs(checkpoint, "quantize", table, [kind]))
    with WeightFile(tmp_path) as weights:
        file = tmp_path / export(graph, graph.kind, weights).file
    nodes = onnx.load(file, load_external_data=False).graph.node
    ours = sum(node.domain == DOMAIN for node in nodes)
    assert ours >= len(checkpoint.decoder.kv_heads)
    assert operators_run(str(file), operator_library, tmp_path) == ours
    feeds = random_inputs(graph)
    body = OrtSession(file, threads=1).run(feeds)
    for threads in (1, 2):
        kernels = OrtSession(file, threads, operator_library).run(feeds)
        for name, want in body.items():
            largest = np.abs(want[np.isfinite(want)]).max(initial=1e-3)
            np.testing.assert_allclose(kernels[name], want, atol=TOLERANCE * largest, err_msg=name)


def test_a_library_that_is_missing_or_damaged_is_one_line(operator_library: Path, tmp_path: Path) -> None:
    x = example()
    model = model_of(ATTENTION[8, 8], x, ATTENTION_OUTPUTS, scale=SCALE, key_bits=8, value_bits=8)
    onnx.save(model, tmp_path / "model.onnx")
    damaged = tmp_path / "damaged.so"
    damaged.write_bytes(operator_library.read_bytes()[1000:])
    for library in (tmp_path / "missing.so", damaged):
        with pytest.raises(UserError, match=f"{library.name}: ONNX Runtime .* cannot load the operators' kernels"):
            OrtSession(tmp_path / "model.onnx", library=library)


def test_the_library_shows_its_entries_alone(operator_library: Path) -> None:
    if shutil.which("nm") is None:
        pytest.skip("nm is not installed: apt install binutils")
    command = ["nm", "-D", "--defined-only", str(operator_library)]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    shown = {line.split()[-1] for line in listed}
    assert "RegisterCustomOps" in shown
    assert {name for name in shown - {"RegisterCustomOps"} if not name.startswith("unicache_")} == set()


def test_without_a_compiler_the_build_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match=r"there is no C\+\+ compiler: install one"):
        cpu_library.build(tmp_path / cpu_library.NAME)
    monkeypatch.setenv("CXX", "nothing++ -m64")
    with pytest.raises(UserError, match=r"\$CXX is 'nothing\+\+ -m64', which is no command"):
        cpu_library.build(tmp_path / cpu_library.NAME)
    assert not [*tmp_path.iterdir()]


def test_a_build_that_fails_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "false")
    with pytest.raises(UserError, match=f"{cpu_library.NAME} cannot be built by false"):
        cpu_library.build(tmp_path / cpu_library.NAME)
    assert not [*tmp_path.iterdir()]

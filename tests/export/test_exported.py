"""The exported files: weights once and aligned, everything static, and a check that notices a planted fault."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from calibration import keys, samples
from engines import bundle
from engines.bundle import Bundle
from engines.errors import UserError
from export import graphs
from export import recipe as recipes
from export.checkpoint import Checkpoint
from export.operators import DOMAIN
from export.to_onnx import INLINE, PAGE, WeightFile
from export.verify import TOLERANCE, largest_error
from runtime.generate import TextStream
from tests.export.conftest import RECIPE

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def built(tiny_bundle: Path) -> Bundle:
    return bundle.read(tiny_bundle)


@pytest.fixture(scope="module")
def modules(checkpoint: Checkpoint, built: Bundle) -> dict[str, graphs.Graph]:
    """The PyTorch module of every graph kind of the bundle's only bucket that has one image."""
    recipe = recipes.load(str(RECIPE))
    bucket, *_, last = built.manifest.levels["small"].buckets
    longest = last.length
    state = graphs.State(checkpoint.decoder, recipe, bucket.length)
    statistics = keys.key_statistics(checkpoint, samples.read(checkpoint.path / "samples"), reach=longest)
    kinds = (graphs.Prefill, graphs.Decode, graphs.Extend, graphs.Compact)
    return {
        "vision": graphs.Vision(checkpoint.encoder, recipe, checkpoint.layouts[0]).eval(),
        **{kind.kind: kind(state, statistics).eval() for kind in kinds},
        "batched": graphs.Decode(replace(state, batch=bucket.batch), statistics).eval(),
    }


def graph_of(built: Bundle, kind: str) -> bundle.Graph:
    """The first bucket's graph of a kind."""
    level = built.manifest.levels["small"]
    (view,) = level.views.values()
    return built.manifest.graphs[view.vision if kind == "vision" else getattr(level.buckets[0], kind)]


def models(built: Bundle) -> dict[str, onnx.ModelProto]:
    files = {name: built.path / graph.file for name, graph in built.manifest.graphs.items()}
    return {name: onnx.load(file, load_external_data=False) for name, file in files.items()}


def test_every_large_weight_lies_in_the_one_file_once(built: Bundle) -> None:
    assert {bucket.batch for bucket in built.manifest.levels["small"].buckets} == {3}
    size = (built.path / bundle.WEIGHTS).stat().st_size
    data = (built.path / bundle.WEIGHTS).read_bytes()
    places: dict[int, int] = {}
    for name, model in models(built).items():
        external = 0
        for tensor in model.graph.initializer:
            if tensor.data_location != onnx.TensorProto.EXTERNAL:
                assert len(tensor.raw_data) <= INLINE, (name, tensor.name)
                continue
            external += 1
            info = {entry.key: entry.value for entry in tensor.external_data}
            offset, length = int(info["offset"]), int(info["length"])
            assert info["location"] == bundle.WEIGHTS
            assert offset % PAGE == 0
            assert offset + length <= size
            assert (
                length
                == np.prod(tensor.dims) * np.dtype(onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type)).itemsize
            )
            assert places.setdefault(offset, length) == length
        assert external or "compact" in name, name
        constants = [a.t for node in model.graph.node for a in node.attribute if a.HasField("t")]
        assert all(len(constant.raw_data) <= INLINE for constant in constants), name
    table = built.manifest.model.embedding
    places[table.offset] = table.end - table.offset
    contents = [data[offset : offset + length] for offset, length in places.items()]
    assert len(set(contents)) == len(contents)
    assert size < sum(len(content) + PAGE for content in contents)  # nothing else lies in the file


def test_everything_is_static_and_named(built: Bundle) -> None:
    for name, model in models(built).items():
        described = built.manifest.graphs[name]
        for declared, specs in ((model.graph.input, described.inputs), (model.graph.output, described.outputs)):
            assert [value.name for value in declared] == [spec.name for spec in specs]
            for value, spec in zip(declared, specs, strict=True):
                dims = value.type.tensor_type.shape.dim
                assert all(dim.HasField("dim_value") and not dim.dim_param for dim in dims), (name, value.name)
                assert [dim.dim_value for dim in dims] == spec.shape
                assert onnx.helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type) == spec.dtype
        for value in model.graph.value_info:
            assert not any(dim.dim_param for dim in value.type.tensor_type.shape.dim), (name, value.name)
        outputs = [output for node in model.graph.node for output in node.output]
        assert all(outputs), name
        assert len(outputs) == len(set(outputs)), name
        assert not {spec.name for spec in described.inputs} & {spec.name for spec in described.outputs}


def test_every_layer_has_its_operators(built: Bundle) -> None:
    layers = built.manifest.model.num_layers
    attention, select = ["QuantKVAttention"], ["TopKGather"]
    operators = {"vision": [], "prefill": select, "decode": attention, "batched": attention}
    operators |= {"extend": attention, "compact": select}
    for kind, names in operators.items():
        model = onnx.load(built.path / graph_of(built, kind).file, load_external_data=False)
        assert [node.op_type for node in model.graph.node if node.domain == DOMAIN] == names * layers
        assert {node.op_type for node in model.graph.node if node.domain == DOMAIN} <= {f.name for f in model.functions}


def test_weight_file_knows_what_it_has(tmp_path: Path) -> None:
    with WeightFile(tmp_path) as weights:
        first, second = weights.add(b"a" * 5000), weights.add(b"b")
        assert (first, second) == (0, 2 * PAGE)
        assert weights.add(b"a" * 5000) == first
    assert (tmp_path / bundle.WEIGHTS).read_bytes() == b"a" * 5000 + bytes(2 * PAGE - 5000) + b"b"


@pytest.mark.parametrize("kind", ["vision", "prefill", "decode", "batched", "extend", "compact"])
def test_the_exported_graph_passes(built: Bundle, modules: dict[str, graphs.Graph], kind: str) -> None:
    assert largest_error(modules[kind], graph_of(built, kind), built.path) < TOLERANCE


def faulty(built: Bundle, kind: str, edit: Callable[[onnx.ModelProto], None], folder: Path) -> bundle.Graph:
    """The graph with a fault, in a folder of its own."""
    graph = graph_of(built, kind)
    model = onnx.load(built.path / graph.file)
    edit(model)
    onnx.save(model, folder / graph.file)
    return graph


def weights_of(model: onnx.ModelProto) -> list[onnx.TensorProto]:
    return [t for t in model.graph.initializer if len(t.dims) == 2 and t.data_type == onnx.TensorProto.FLOAT]


@pytest.mark.parametrize("place", [0.0, 0.3, 0.7, 0.999])
@pytest.mark.parametrize("kind", ["vision", "prefill", "decode", "extend"])
def test_one_changed_weight_is_noticed(
    built: Bundle, modules: dict[str, graphs.Graph], tmp_path: Path, kind: str, place: float
) -> None:
    def change(model: onnx.ModelProto) -> None:
        tensors = [t for t in weights_of(model) if min(t.dims) > 1]
        tensor = tensors[int(place * len(tensors))]
        values = numpy_helper.to_array(tensor).copy()
        values[values.shape[0] // 2, values.shape[1] // 2] += 10.0
        tensor.CopyFrom(numpy_helper.from_array(values, tensor.name))

    graph = faulty(built, kind, change, tmp_path)
    with pytest.raises(UserError, match=f"{graph.file}.* differs from PyTorch|agrees with PyTorch"):
        largest_error(modules[kind], graph, tmp_path)


def softmax_axis(model: onnx.ModelProto) -> None:
    node = next(n for n in model.graph.node if n.op_type == "Softmax")
    next(a for a in node.attribute if a.name == "axis").i = -2


def attention_scale(model: onnx.ModelProto) -> None:
    node = next(n for n in model.graph.node if n.op_type == "QuantKVAttention")
    next(a for a in node.attribute if a.name == "scale").f *= 1.1


def add_to_sub(model: onnx.ModelProto) -> None:
    """The last residual: constants that are added may be zero, or as good as."""
    constants = {tensor.name for tensor in model.graph.initializer}
    constants |= {output for node in model.graph.node if node.op_type == "Constant" for output in node.output}
    adds = [n for n in model.graph.node if n.op_type == "Add" and not constants & set(n.input)]
    adds[-1].op_type = "Sub"


def keep_the_worst(model: onnx.ModelProto) -> None:
    topk = next(n for n in model.functions[0].node if n.op_type == "TopK")
    next(a for a in topk.attribute if a.name == "largest").i = 0


def another_rows(tensor: str) -> Callable[[onnx.ModelProto], None]:
    """Each of the three rows reads the next one's."""

    def turn(model: onnx.ModelProto) -> None:
        for node in model.graph.node:
            node.input[:] = ["turned" if name == tensor else name for name in node.input]
        model.graph.initializer.append(numpy_helper.from_array(np.array([1, 2, 0]), "turns"))
        model.graph.node.insert(0, onnx.helper.make_node("Gather", [tensor, "turns"], ["turned"]))

    return turn


@pytest.mark.parametrize(
    ("kind", "edit"),
    [
        ("vision", softmax_axis),
        ("vision", add_to_sub),
        ("prefill", softmax_axis),
        ("prefill", add_to_sub),
        ("prefill", keep_the_worst),
        ("decode", attention_scale),
        ("decode", add_to_sub),
        ("batched", attention_scale),
        ("batched", another_rows("position")),
        ("batched", another_rows("store_bias.1")),
        ("batched", another_rows("key_window")),
        ("extend", attention_scale),
        ("extend", add_to_sub),
        ("compact", keep_the_worst),
    ],
)
def test_one_changed_node_is_noticed(
    built: Bundle,
    modules: dict[str, graphs.Graph],
    tmp_path: Path,
    kind: str,
    edit: Callable[[onnx.ModelProto], None],
) -> None:
    graph = faulty(built, kind, edit, tmp_path)
    with pytest.raises(UserError, match=graph.file):
        largest_error(modules[kind], graph, tmp_path)


def test_the_built_bundle_answers(built: Bundle, tmp_path: Path) -> None:
    import runtime
    from tests.export import tiny

    vlm = runtime.open(shutil.copytree(built.path, tmp_path / "copy"), threads=1)
    result = vlm.generate("what color ?", images=[tiny.picture(0)], max_new_tokens=20, ignore_eos=True)
    assert len(result.tokens) == 20
    assert result.stats.compactions >= 2
    assert result.stats.visual_tokens == tiny.IMAGE_TOKENS // 2


def test_a_batch_of_the_built_bundle_answers_as_single_requests_do(built: Bundle, tmp_path: Path) -> None:
    import runtime
    from runtime.scheduler import Scheduler
    from tests.export import tiny

    vlm = runtime.open(shutil.copytree(built.path, tmp_path / "copy"), threads=1)
    lengths, questions = [20, 9, 25, 14, 20], ["what color ?", "is there a red circle in the image ?", "what ?"]

    def streams() -> list[TextStream]:
        asked = [(questions[i % 3], [tiny.picture(k) for k in range(i % 2)], n) for i, n in enumerate(lengths)]
        return [vlm.stream(*each, ignore_eos=True) for each in asked]

    for each in (alone := streams()):
        assert len(list(each)) > 1
    scheduler = Scheduler(built.manifest.batch)
    answers = scheduler.run(map(scheduler.submit, streams()))
    assert [each.result.tokens for each in answers] == [each.result.tokens for each in alone]
    assert min(each.result.stats.compactions for each in answers) >= 1
    assert scheduler.steps < sum(lengths) / 2

"""TensorRT-RTX takes every graph of the demo bundle, with plugins and without: what CI can show without a GPU."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import onnx
import pytest

from engines import trt
from engines.bundle import Bundle, Graph

pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX is not installed: pip install tensorrt-rtx-cu13")


def of_bucket(bundle: Bundle, which: int) -> dict[str, Graph]:
    """The graphs of each level's shortest bucket, or of the longest; the others' differ in their sizes."""
    names: set[str] = set()
    for level in bundle.manifest.levels.values():
        bucket = level.buckets[which]
        names |= {
            *(view.vision for view in level.views.values()),
            bucket.prefill,
            bucket.decode,
            bucket.extend,
            bucket.compact,
        }
    return {name: graph for name, graph in bundle.manifest.graphs.items() if name in names}


@pytest.mark.slow
def test_every_graph_of_the_demo_bundle_becomes_a_plan(demo_bundle: Bundle, tmp_path: Path) -> None:
    graphs = of_bucket(demo_bundle, 0)
    built: dict[str, trt.Built] = {}
    files = {name: demo_bundle.file(graph.file) for name, graph in graphs.items()}
    plans = trt.build_plans("trt-rtx", files, tmp_path, lambda one: built.update({one.plan.graph: one}))
    assert [plan.graph for plan in plans] == list(graphs)  # a refused node would have raised
    for plan in plans:
        assert (tmp_path / plan.file).stat().st_size > 0
        assert set(built[plan.graph].inputs) == {spec.name for spec in graphs[plan.graph].inputs}
        assert set(built[plan.graph].outputs) == {spec.name for spec in graphs[plan.graph].outputs}


@pytest.mark.slow
def test_every_operator_of_the_demo_bundle_is_a_plugin_layer(
    demo_bundle: Bundle, plugin_library: Path, tmp_path: Path
) -> None:
    files = {name: demo_bundle.file(graph.file) for name, graph in of_bucket(demo_bundle, -1).items()}
    built: dict[str, trt.Built] = {}
    progress = lambda one: built.update({one.plan.graph: one})  # noqa: E731
    plans = trt.build_plans("trt-rtx", files, tmp_path, progress, plugins=plugin_library)
    assert [plan.compute_capabilities for plan in plans] == [["sm_80", "sm_86", "sm_89"]] * len(files)
    total: Counter[str] = Counter()
    for name, one in built.items():
        nodes = onnx.load(files[name], load_external_data=False).graph.node
        asked = Counter(node.op_type for node in nodes if node.domain == "unicache")
        assert one.plan.plugins == asked
        assert one.layers.count("PLUGIN_V3") == asked.total()
        assert [layer.kind for layer in one.fused].count("custom_layer") == asked.total()
        total += asked
    assert set(total) == {"QuantKVAttention", "TopKGather"}

"""TensorRT-RTX takes every graph of the demo bundle: what CI can show of TensorRT without a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from engines import trt
from engines.bundle import Bundle

pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX is not installed: pip install tensorrt-rtx-cu13")


@pytest.mark.slow
def test_every_graph_of_the_demo_bundle_becomes_a_plan(demo_bundle: Bundle, tmp_path: Path) -> None:
    graphs = demo_bundle.manifest.graphs
    built: dict[str, trt.Built] = {}
    files = {name: demo_bundle.file(graph.file) for name, graph in graphs.items()}
    plans = trt.build_plans("trt-rtx", files, tmp_path, lambda one: built.update({one.plan.graph: one}))
    assert [plan.graph for plan in plans] == list(graphs)  # a refused node would have raised
    for plan in plans:
        assert (tmp_path / plan.file).stat().st_size > 0
        assert set(built[plan.graph].inputs) == {spec.name for spec in graphs[plan.graph].inputs}
        assert set(built[plan.graph].outputs) == {spec.name for spec in graphs[plan.graph].outputs}

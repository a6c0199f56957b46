"""Every method of every stage inside the exported graphs: ONNX Runtime agrees with PyTorch, TensorRT-RTX builds them.

A method is tried here as soon as it is registered. One with a setting that has no default, or none that fits so
short a prompt, names it in `NEEDED`; one whose settings change its graph is tried with each of `MORE` too.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import onnx
import pytest

from engines import trt
from engines.config import parse
from engines.errors import UserError
from export.checkpoint import Checkpoint
from export.graphs import Compact, Decode, Extend, Graph, Prefill, State, Vision
from export.recipe import Recipe
from export.stages.stage import Stage
from export.to_onnx import WeightFile, export
from export.verify import TOLERANCE, largest_error
from tests.export import tiny

LENGTH = 48
TABLES: dict[str, dict[str, Any]] = {
    "perception": {"keep": 0.4},
    "budget": {"keep": 0.4},
    "protect": {"sinks": 1, "recent": 2},
    "window": {"least": 8, "most": 8, "recent": 0.25},
}
COMPRESSING = {"importance", "modality", "budget", "protect", "merge"}  # of them decode and extend see a store's size
REFUSED = {"NonZero", "BitShift", "BitwiseAnd", "If", "Loop", "Scan"}  # by TensorRT, or not static
NEEDED: dict[str, dict[str, Any]] = {
    "measured": {"shares": [1.0, 3.0, 2.0]},
    "pyramid": {"entropy": [1.0, 2.0, 3.0]},
    "fastv": {"keep": 0.7},
    "tome": {"rates": [0.1, 0.2]},
    "by-layer": {"layers": ["int4", "int8", "int4"]},
}
MORE: dict[str, list[dict[str, Any]]] = {
    "perception": [
        {"buckets": [0.25]},
        {"method": "coverage", "quota": 0.25},
        {"method": "attention", "layers": [0, 1]},
    ],
    "merge": [
        {"method": "three-way", "keys": "mean", "merge_above": 0.3, "evict_above": 0.1},
        {"method": "d2o", "keys": "mean"},
    ],
    "modality": [{"method": "density", "visual_density": [0.2, 0.6, 0.9], "text_density": [0.8, 0.6, 0.7]}],
    "protect": [{"separators": 2, "sentence_first": True, "discount": 0.5}],
    "quantize": [
        {"method": "per-head", "rotate": True},
        {"method": "per-token", "bits": 4, "group": 8},
        {"method": "int8", "rotate": True, "center": False},
        {"method": "int4", "group": 7, "rotate": True},
        {"method": "kivi", "bits": 3, "group": 8},
        {"method": "turboquant", "bits": 2, "group": 6},
        {"method": "kivi", "bits": 4, "rotate": True, "scales": "float32"},
        {"method": "int8", "scale": "percentile", "rotate": True},
        {"method": "per-head", "scale": "mse"},
        {"method": "by-layer", "layers": ["float16", "kivi", "mixed"]},
        {"method": "by-layer", "layers": ["k8v4", {"method": "int8", "center": False}, {"method": "per-head"}]},
    ],
    "shorten": [
        *({"method": "fastv", "keep": 0.7, "by": by} for by in ("diversity", "coverage", "random", "uniform")),
        {"method": "tome", "layer": 0, "rates": [0.1, 0.2], "weigh": "count"},
        {"method": "tome", "rates": [0.1, 0.2], "video": True},
    ],
}


def stages() -> dict[str, list[type[Stage]]]:
    """A recipe's tables that are stages, and the methods of each."""
    hints = typing.get_type_hints(Recipe)
    kinds = {f.name: typing.get_args(hints[f.name]) or (hints[f.name],) for f in dataclasses.fields(Recipe)}
    return {
        name: [*of]
        for name, of in kinds.items()
        if all(isinstance(kind, type) and issubclass(kind, Stage) for kind in of)
    }


def cases() -> Iterator[Any]:
    for slot, methods in stages().items():
        tables = []
        for method in methods:
            named = typing.get_type_hints(method).get("method")
            name = typing.get_args(named)[0] if named else ""
            tables.append({"method": name, **NEEDED.get(name, {})} if named else {})
        more = MORE.get(slot, [])
        for table in [*tables, *more]:
            text = "-".join(f"{value}" for value in table.values())
            marks = [pytest.mark.long] if table in more else []
            yield pytest.param(slot, table, id=f"{slot}-{text}" if text else slot, marks=marks)


def graphs(
    checkpoint: Checkpoint, slot: str, table: dict[str, Any], kinds: Sequence[type[Graph]] | None = None
) -> list[Graph]:
    """Those, or the graphs that the slot's stage makes others, for batches of two where a graph has any."""
    recipe = parse(Recipe, {"name": "test", **TABLES, slot: {**TABLES.get(slot, {}), **table}}, "test")
    if slot == "perception":
        return [Vision(checkpoint.encoder, recipe, checkpoint.layouts[0], checkpoint.decoder)]
    known = tiny.statistics(checkpoint.decoder)
    state = State(checkpoint.decoder, recipe, LENGTH, batch=2)
    if kinds is None:
        kinds = (Prefill,) if slot == "shorten" else (Prefill, Compact)  # the others see the size of what is left
        if slot not in {*COMPRESSING, "shorten"}:  # extend reads a store as decode does: settings are tried in one
            kinds += (Decode,) if table in MORE.get(slot, []) else (Decode, Extend)
    return [kind(state, known) for kind in kinds]


@pytest.mark.slow
@pytest.mark.parametrize(("slot", "table"), list(cases()))
def test_the_exported_graphs_agree_and_become_plans(
    checkpoint: Checkpoint, tmp_path: Path, slot: str, table: dict[str, Any]
) -> None:
    files: dict[str, Path] = {}
    with WeightFile(tmp_path) as weights:
        for graph in graphs(checkpoint, slot, table):
            exported = export(graph.eval(), graph.kind, weights)
            assert largest_error(graph, exported, tmp_path) < TOLERANCE
            files[graph.kind] = tmp_path / exported.file
            model = onnx.load(files[graph.kind], load_external_data=False)
            nodes = [*model.graph.node, *(node for function in model.functions for node in function.node)]
            assert not REFUSED & {node.op_type for node in nodes}
    pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX is not installed: pip install tensorrt-rtx-cu13")
    plans = tmp_path / "plans"
    plans.mkdir()
    assert len(trt.build_plans("trt-rtx", files, plans, workers=1)) == len(files)


def test_every_stage_of_a_recipe_is_tried() -> None:
    tried = {case.values[0] for case in cases()}
    assert {"perception", "importance", "modality", "budget", "protect", "merge"} <= tried
    for slot, methods in stages().items():
        assert len([case for case in cases() if case.values[0] == slot]) >= len(methods)


@pytest.mark.parametrize("slot", [slot for slot, methods in stages().items() if len(methods) > 1])
def test_an_unknown_method_is_refused_with_the_known_ones(slot: str) -> None:
    with pytest.raises(UserError, match=f"{slot}: no method 'nothing': choose from "):
        parse(Recipe, {"name": "test", slot: {"method": "nothing"}}, "test")

"""The toy bundle as a model with M-RoPE and DeepStack would be: its graphs changed, and what its judge then must know.

A row's position adds the position table's rows at its three ids, each times a factor; a visual token has one tap, half
of its embedding.
"""

from __future__ import annotations

import dataclasses
import shutil
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper

from engines import bundle
from engines.bundle import TensorSpec
from engines.mrope import MRope
from tests.runtime import reference, toy

FACTORS = np.array([1.0, -0.7, 0.4], np.float32)
GRID, MERGE, TAP = [1, 4, 4], 2, 0.5  # four tokens, and the next one's id is two more than theirs


def build(out: Path, plain: Path) -> Path:
    """Change the bundle `plain` to `out`; the level whose graphs cannot extend is left out."""
    manifest = bundle.read(plain).manifest
    with bundle.writing(out) as folder:
        shutil.copytree(plain, folder, dirs_exist_ok=True)
        graphs = {name: changed(folder, graph) for name, graph in manifest.graphs.items() if "loose" not in name}
        levels = {name: level for name, level in manifest.levels.items() if name != "loose"}
        layouts = [dataclasses.replace(layout, grid=GRID) for layout in manifest.model.layouts]
        model = dataclasses.replace(manifest.model, mrope=MRope(MERGE), layouts=layouts, deepstack=1)
        known = dataclasses.replace(manifest, model=model, levels=levels, default_level="tight", graphs=graphs)
        bundle.seal(folder, known)
    return out


def changed(folder: Path, graph: bundle.Graph) -> bundle.Graph:
    model, inputs, outputs = onnx.load(folder / graph.file), [*graph.inputs], [*graph.outputs]
    nodes, constants = list(model.graph.node), model.graph.initializer

    def const(name: str, value: Any) -> str:
        constants.append(onnx.numpy_helper.from_array(np.asarray(value), name))
        return name

    def put(before: Any, *more: Any) -> None:
        nodes[(place := nodes.index(before)) : place] = more

    if graph.kind == "vision":
        kept = next(spec.shape[1] for spec in outputs if spec.name == "kept")
        nodes.append(helper.make_node("Mul", ["visual_tokens", const("tap", np.float32(TAP))], ["deepstack"]))
        outputs.append(TensorSpec("deepstack", "float32", [1, kept, toy.HIDDEN]))
    for gather in [n for n in nodes if n.op_type == "Gather" and n.input[1] in ("positions", "position")]:
        name, gather.output[0] = gather.output[0], "turned"
        adds = next(n for n in nodes if n.op_type == "Add" and name in n.input)
        if graph.kind == "decode":
            put(adds, helper.make_node("Mul", ["turned", const("factor", FACTORS.sum())], [name]))
            continue
        rows = next(spec.shape[1] for spec in inputs if spec.name == "kinds")
        inputs += [
            TensorSpec("position_ids", "int32", [3, 1, rows]),
            TensorSpec("deepstack", "float32", [1, 1, rows, toy.HIDDEN]),
        ]
        gather.input[1], adds.input[0] = "position_ids", "with_taps"
        zero = const("first_axis", np.array([0]))
        put(
            adds,
            helper.make_node("Mul", ["turned", const("factors", FACTORS[:, None, None, None])], ["three"]),
            helper.make_node("ReduceSum", ["three", zero], [name], keepdims=0),
            helper.make_node("ReduceSum", ["deepstack", zero], ["taps"], keepdims=0),
            helper.make_node("Add", ["embeddings", "taps"], ["with_taps"]),
        )
        if graph.kind == "extend":
            inputs = [spec for spec in inputs if spec.name != "positions"]

    def info(spec: TensorSpec) -> Any:
        return helper.make_tensor_value_info(
            spec.name, helper.np_dtype_to_tensor_dtype(np.dtype(spec.dtype)), spec.shape
        )

    made = helper.make_graph(nodes, graph.kind, [*map(info, inputs)], [*map(info, outputs)], constants)
    onnx.save(helper.make_model(made, opset_imports=model.opset_import, ir_version=10), folder / graph.file)
    return dataclasses.replace(graph, inputs=inputs, outputs=outputs)


def table(ids: list[int]) -> np.ndarray:
    """What each position of a prompt adds, and of what follows it, token by token as Hugging Face counts."""
    turned, after = [], 0
    for is_image, run in groupby(ids, lambda token: token == toy.IMAGE):
        for _ in run:
            if is_image:
                _, height, width = GRID[0], GRID[1] // MERGE, GRID[2] // MERGE
                turned += [[after, after + y, after + x] for y in range(height) for x in range(width)]
                after += max(height, width)
            else:
                turned.append([after] * 3)
                after += 1
    turned += [[after + k] * 3 for k in range(toy.POSITIONS - len(turned))]
    position = toy.WEIGHTS["position"]
    return np.stack([sum(f * position[i] for f, i in zip(FACTORS, row, strict=True)) for row in turned])


class Judge:
    """The toy's judge, told of position ids and taps."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._patch, self._look = patch, reference.look

    def answer(self, ids: list[int], *rest: Any, **options: Any) -> reference.Answer:
        def look(image: np.ndarray, kept: int) -> tuple[np.ndarray, list[int]]:
            rows, places = self._look(image, kept)
            return rows * (1 + TAP), places

        with self._patch.context() as patch:
            patch.setattr(reference, "WEIGHTS", {**toy.WEIGHTS, "position": table(ids)})
            patch.setattr(reference, "look", look)
            return reference.answer(ids, *rest, **options)

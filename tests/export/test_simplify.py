"""export/simplify.py: a program that is not traced twice becomes the graph that it would become then."""

from __future__ import annotations

import operator
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnx
import pytest
import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from engines.bundle import TensorSpec
from engines.ort import OrtSession
from export import simplify, to_onnx
from export.checkpoint import Checkpoint
from export.graphs import Compact, Decode, Graph, Prefill, State
from export.to_onnx import WeightFile, export
from tests.export import tiny

aten = torch.ops.aten


class Plain(Graph):
    """What simplify puts other operators in place of, some as outputs; `more` is something else."""

    kind = "compact"

    def __init__(self, more: nn.Module) -> None:
        super().__init__()
        self.more = more
        self.outputs = ["flat", "same", "long", "halves", "marks", "scaled", "middle", "fixed", "more"]
        self._takes(TensorSpec("rows", "float32", [2, 3, 8]))

    def compute(self, rows: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        turned = rows.transpose(1, 2)
        low, high = rows > 0.5, rows < -0.5
        return {
            "flat": (turned.contiguous() * 2).reshape(2, 8, -1).flatten(1),
            "same": turned.to(torch.float32),
            "long": rows.long() + turned.reshape(2, 3, 8).int(),
            "halves": rows.to("cpu").unflatten(2, (2, 4)).float().sum(dim=2),
            "marks": ((low | high) & (rows > -2)).to(torch.int8),
            "scaled": rows.long() * 1.5,
            "middle": rows.narrow(-1, -5, 3) * 2,
            "fixed": rows + torch.tensor([0.5] * 8).detach(),
            "more": self.more(rows),
        }


class Written(nn.Module):
    def forward(self, rows: Tensor) -> Tensor:
        copy = rows.clone()
        copy[:, 0] = 1
        return copy


class View(nn.Module):
    """An operator that PyTorch decomposes whatever the exporter translates."""

    def forward(self, rows: Tensor) -> Tensor:
        return rows[:1].expand_as(rows) + rows


class Copied(nn.Module):
    """A view of a copy that is left out, in a program that is decomposed."""

    def forward(self, rows: Tensor) -> Tensor:
        turned = rows.transpose(0, 1).contiguous().view(3, -1)
        return turned[:1].expand_as(turned) + turned


class Branch(nn.Module):
    def forward(self, rows: Tensor) -> Tensor:
        return torch.cond(rows.sum() > 0, lambda x: x + 1, lambda x: x - 1, (rows,))


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> list[ExportedProgram]:
    """The programs that PyTorch decomposes."""
    programs, original = [], ExportedProgram.run_decompositions

    def decompose(self: ExportedProgram, *args: Any) -> ExportedProgram:
        programs.append(self)
        return original(self, *args)

    monkeypatch.setattr(ExportedProgram, "run_decompositions", decompose)
    return programs


def outputs_of(folder: Path, rows: Tensor) -> tuple[Counter[str], list[bytes]]:
    """A graph's nodes, and what it computes."""
    nodes = Counter(node.op_type for node in onnx.load(folder / "plain.onnx").graph.node)
    outputs = OrtSession(folder / "plain.onnx", threads=1).run({"rows": rows.numpy()})
    return nodes, [array.tobytes() for array in outputs.values()]


@pytest.mark.parametrize(
    ("more", "times"), [(nn.Softmax(-1), 0), (Written(), 1), (View(), 1), (Copied(), 1), (Branch(), 1)]
)
def test_the_graph_is_that_of_a_second_trace(
    more: nn.Module, times: int, traced: list[ExportedProgram], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph, found = Plain(more), []
    for name in ("simplified", "traced"):
        (folder := tmp_path / name).mkdir()
        with WeightFile(folder) as weights:
            export(graph, "plain", weights)
        found.append(outputs_of(folder, torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(0))))
        assert len(traced) == (times if name == "simplified" else times + 1)
        monkeypatch.setattr(to_onnx, "simplify", lambda program: program)
    (nodes, outputs), (others, expected) = found
    assert outputs == expected
    assert nodes.pop("Reshape") <= others.pop("Reshape")  # PyTorch keeps some that change no shape
    assert nodes == others


def test_an_operator_that_a_newer_pytorch_tells_nothing_of_is_left_to_it() -> None:
    known = [operator.getitem, torch.sym_max, aten.add.Tensor, aten.add_.Tensor, aten.reshape.default]
    assert [*map(simplify._always, known)] == [False, False, False, True, True]
    assert simplify._always(SimpleNamespace(name="aten::add"))
    assert simplify._always(SimpleNamespace(_schema=SimpleNamespace(returns=[SimpleNamespace()])))


@pytest.mark.parametrize("kind", [Prefill, Decode, Compact])
def test_a_decoder_is_traced_once(
    kind: type[Graph], checkpoint: Checkpoint, traced: list[ExportedProgram], tmp_path: Path
) -> None:
    """Each trace of 30 layers took 20 seconds."""
    state = State(checkpoint.decoder, tiny.recipe(quantize={"method": "per-token"}), 32)
    with WeightFile(tmp_path, checkpoint.weights) as weights:
        export(kind(state, None), "graph", weights)
    assert not traced

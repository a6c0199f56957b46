"""Each importance measure inside the exported graphs of the tiny model: ONNX Runtime must agree with PyTorch."""

from __future__ import annotations

import typing
from pathlib import Path

import onnx
import pytest
import torch

from export.checkpoint import Checkpoint
from export.compress import KeyStatistics
from export.graphs import Compact, Decode, Prefill, State
from export.stages import importance
from export.stages.importance.importance import Importance
from export.to_onnx import WeightFile, export
from export.verify import TOLERANCE, largest_error
from tests.export import tiny
from tests.export.tiny import Driver, Prompt, greedy

METHODS = typing.get_args(importance.Methods)
REFUSED = {"NonZero", "BitShift", "BitwiseAnd", "If", "Loop", "Scan"}  # by TensorRT, or not static
TABLES = {"budget": {"keep": 0.4}, "protect": {"sinks": 2, "recent": 2}}


def name_of(method: type[Importance]) -> str:
    return typing.get_args(typing.get_type_hints(method)["method"])[0]


def statistics(checkpoint: Checkpoint) -> list[KeyStatistics]:
    """Centres that are far from zero: keys are centred in the graphs."""
    torch.manual_seed(0)
    shape = (checkpoint.decoder.kv_heads[0], checkpoint.decoder.head_dim)
    return [KeyStatistics(torch.randn(shape), torch.full(shape, 4.0)) for _ in range(checkpoint.decoder.num_layers)]


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS, ids=name_of)
def test_the_exported_graphs_agree(checkpoint: Checkpoint, tmp_path: Path, method: type[Importance]) -> None:
    recipe = tiny.recipe(**TABLES, quantize={"method": "int8"}, importance={"method": name_of(method)})
    state = State(checkpoint.decoder, recipe, 40, batch=2)
    for kind in (Prefill, Decode, Compact):
        graph = kind(state, statistics(checkpoint)).eval()
        with WeightFile(tmp_path) as weights:
            exported = export(graph, kind.kind, weights)
        assert largest_error(graph, exported, tmp_path) < TOLERANCE
        model = onnx.load(tmp_path / exported.file, load_external_data=False)
        nodes = [*model.graph.node, *(node for function in model.functions for node in function.node)]
        assert not REFUSED & {node.op_type for node in nodes}


@pytest.mark.parametrize("method", METHODS, ids=name_of)
def test_a_batch_of_two_generates_as_two_single_runs(checkpoint: Checkpoint, method: type[Importance]) -> None:
    recipe = tiny.recipe(**TABLES, importance={"method": name_of(method)})
    prompts = [
        Prompt(checkpoint, "what color is the shape ?", [tiny.picture(1), tiny.picture(2)]),
        Prompt(checkpoint, "how many digits ?"),
    ]
    both = Driver(checkpoint.decoder, recipe, 64, batch=2)
    tokens, logits = greedy(both, checkpoint, prompts, 24)
    assert both.compactions >= 2
    for item, prompt in enumerate(prompts):
        alone = Driver(checkpoint.decoder, recipe, 64)
        want_tokens, want = greedy(alone, checkpoint, [prompt], 24)
        assert tokens[item].tolist() == want_tokens[0].tolist()
        torch.testing.assert_close(logits[item], want[0], atol=1e-4, rtol=0)

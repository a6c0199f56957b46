"""Each importance measure in the graphs of the tiny model: a batch of two generates as two single runs."""

from __future__ import annotations

import typing

import pytest
import torch

from export.checkpoint import Checkpoint
from export.stages import importance
from export.stages.importance.importance import Importance
from tests.export import tiny
from tests.export.tiny import Driver, Prompt, greedy

METHODS = typing.get_args(importance.Methods)
TABLES = {"budget": {"keep": 0.4}, "protect": {"sinks": 2, "recent": 2}}


def name_of(method: type[Importance]) -> str:
    return typing.get_args(typing.get_type_hints(method)["method"])[0]


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

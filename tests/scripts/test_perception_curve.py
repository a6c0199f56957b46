"""scripts/perception_curve.py: what it leaves of a prompt, and a few questions of the demo VLM up to the table."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import perception_curve
from accuracy_curve import DEMO, Evaluator
from demo_vlm import suites
from engines.config import parse
from export import checkpoint as checkpoints
from export.recipe import Recipe
from export.stages.tokens import VISUAL
from perception_curve import Pruner


@pytest.fixture(scope="module")
def evaluator() -> Evaluator:
    return Evaluator(checkpoints.load(DEMO), suites.suites(["mixed4"], 3))


@pytest.mark.parametrize(
    ("perception", "mean"),
    [
        ({}, 64),
        ({"keep": 0.25}, 16),
        ({"quota": 0.25}, 16),
        ({"buckets": [0.25, 0.5], "coverage": 0.9}, None),
        ({"method": "attention", "layers": [4], "keep": 0.5}, 32),
    ],
)
def test_a_pruned_prompt_has_all_its_text_and_tokens_in_their_places(
    evaluator: Evaluator, perception: dict[str, Any], mean: int | None
) -> None:
    recipe = parse(Recipe, {"name": "x", "perception": perception}, "x")
    for prompt in evaluator.prompts["mixed4"]:
        with torch.no_grad():
            pruned, counts = Pruner(evaluator.checkpoint, recipe)(prompt)
        visual = pruned.kinds == VISUAL
        assert int(visual.sum()) == sum(counts)
        assert sum(counts) == 4 * mean if mean else len(set(counts)) > 1
        assert torch.equal(pruned.embeddings, prompt.embeddings[pruned.positions])
        assert (pruned.positions.diff() > 0).all()
        assert int((~visual).sum()) == int((prompt.kinds != VISUAL).sum())
        first = prompt.positions[prompt.kinds == VISUAL].unflatten(0, (4, -1))[:, :1]
        inside = (pruned.positions >= first) & (pruned.positions < first + 64) & visual
        assert inside.sum(dim=1).tolist() == counts


def test_from_command_to_table(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["--suites", "easy1", "--limit", "3", "--thresholds", "0.9", "--quotas", "0.5"]
    assert perception_curve.main(command) == 0
    table = [[cell.strip() for cell in line.split("|")[1:-1]] for line in capsys.readouterr().out.splitlines()[2:5]]
    assert [row[:3] for row in table] == [
        ["easy1", "all tokens", "64.0"], ["easy1", "coverage 0.9", "16.0"], ["easy1", "quota 0.5", "32.0"],
    ]  # fmt: skip
    assert all(row[3] == "100.0 ± 0.0" for row in table)
    assert table[2][4:] == ["100.0 ± 0.0", "+0.0 ± 0.0"]  # one image: a quota is a fixed share


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--stage", "method = "], "give settings of the perception stage"),
        (["--thresholds", "2"], "give numbers between 0 and 1"),
        (["--suites", "none"], "no suite 'none'"),
    ],
)
def test_a_mistake_is_one_line_and_exit_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        raise SystemExit(perception_curve.main(arguments))
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err

"""scripts/accuracy_curve.py: a few questions of the demo model from command to JSON, and what its recipes keep."""

from __future__ import annotations

import json
import typing
from pathlib import Path
from typing import Any

import pytest

import accuracy_curve
from accuracy_curve import METHODS, NOTHING, Cell
from export.stages import importance

RUN = ["snapkv", "random"]


def test_every_importance_method_is_measured() -> None:
    assert len(METHODS) == len(set(METHODS)) == len(typing.get_args(importance.Methods))
    assert {"snapkv", "random"} <= set(METHODS)


@pytest.mark.parametrize("method", [*METHODS, NOTHING])
def test_a_recipe_is_importance_alone(method: str) -> None:
    recipe = accuracy_curve.recipe_of(method, 20, 80)
    assert recipe.importance.method == ("snapkv" if method == NOTHING else method)
    assert recipe.budget.capacities(recipe.budget.keep * 80, 3, [80] * 3) == [20] * 3
    assert recipe.window.sizes(80) == (accuracy_curve.MAX_NEW_TOKENS - 1, 0)
    assert (recipe.merge.method, recipe.modality.method, recipe.perception.keep) == ("evict", "joint", 1.0)
    assert (recipe.protect.sinks, recipe.protect.recent) == (4 if method == "streaming-llm" else 0, 0)


def test_from_command_to_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "curve.json"
    command = ["--suites", "page1", "--methods", ",".join(RUN), "--ratios", "0.9,0.5", "--limit", "4"]
    assert accuracy_curve.main([*command, "--json", str(out)]) == 0
    table = capsys.readouterr().out.splitlines()
    assert [line.split("|")[2].strip() for line in table[:5] if "--" not in line] == ["method", NOTHING, *RUN]
    written = json.loads(out.read_text())
    cells = {(cell["method"], cell["dropped"]): cell for cell in written["cells"]}
    assert list(cells) == [(NOTHING, 0.0), *((method, ratio) for method in RUN for ratio in (0.5, 0.9))]
    assert {cell["questions"] for cell in cells.values()} == {4}
    assert cells[NOTHING, 0.0]["correct"] == 4
    assert cells["random", 0.9]["correct"] < 4
    for (method, ratio), cell in cells.items():
        assert method == NOTHING or cell["slots"] == round((1 - ratio) * cell["tokens"])
        assert cell["accuracy"] == cell["correct"] / 4
    assert set(written["suites_sha256"]) == {"page1"}
    assert set(written["checkpoint_sha256"]) == {"model.safetensors"}
    assert [path.name for path in tmp_path.iterdir()] == ["curve.json"]


def test_a_plot_has_a_panel_a_suite_and_a_line_a_method() -> None:
    pytest.importorskip("matplotlib")
    cells = [
        Cell(suite, method, ratio, 10, 80.0, 4, correct)
        for suite in ("page1", "page4")
        for method, ratio, correct in [(NOTHING, 0.0, 4), ("snapkv", 0.5, 3), ("random", 0.5, 1)]
    ]
    drawn = accuracy_curve.plot(cells)
    assert drawn.startswith("<?xml")
    for text in ("page1", "page4", "snapkv", "random"):
        assert drawn.count(f"<!-- {text} -->") == 1
    assert f"<!-- {NOTHING} -->" not in drawn
    assert accuracy_curve.plot(cells) == drawn


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--suites", "page3"], "no suite 'page3'"),
        (["--methods", "luck"], "no method 'luck': choose from snapkv,"),
        (["--ratios", "0.5,1"], "give numbers between 0 and 1, got '0.5,1'"),
        (["--ratios", "half"], "give numbers between 0 and 1, got 'half'"),
        (["--limit", "0"], "must be at least 1"),
        (["--json", "nowhere/a.json"], "nowhere is not a folder"),
        (["--plot", "nowhere/a.svg"], "nowhere is not a folder"),
        (["nowhere", "--limit", "1", "--suites", "page1"], "not a Hugging Face checkpoint"),
    ],
)
def test_mistakes_are_one_line_and_exit_2(
    arguments: list[Any], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert accuracy_curve.main(arguments) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1

"""scripts/accuracy_curve.py: a few questions of the demo model from command to JSON, and what its recipes keep."""

from __future__ import annotations

import json
import typing
from pathlib import Path
from typing import Any

import pytest

import accuracy_curve
import curve
import kvpress_curve
from accuracy_curve import METHODS, NOTHING, Cell
from engines.errors import UserError
from export import recipe as recipes
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
    assert recipe.window.sizes(80) == (curve.MAX_NEW_TOKENS - 1, 0)
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
        assert method == NOTHING or cell["slots"] == int((1 - ratio) * cell["tokens"])
        assert cell["accuracy"] == cell["correct"] / 4
    assert set(written["suites_sha256"]) == {"page1"}
    assert set(written["checkpoint_sha256"]) == {"model.safetensors"}
    assert [path.name for path in tmp_path.iterdir()] == ["curve.json"]

    # The same file as if kvpress had measured it stands beside ours, its uncompressed answers being equal.
    assert accuracy_curve.main([*command, "--methods", "random", "--peers", str(out), "--json", str(out)]) == 0
    assert "kvpress snapkv" in capsys.readouterr().out
    both = json.loads(out.read_text())["cells"]
    assert [cell["method"] for cell in both] == [
        NOTHING,
        *["random"] * 2,
        *["kvpress snapkv"] * 2,
        *["kvpress random"] * 2,
    ]
    assert both[1] | {"method": "kvpress random"} == both[5]


def test_a_recipes_measured_layers_keep_as_many_on_average(tmp_path: Path) -> None:
    (tmp_path / "tuned.toml").write_text('[budget]\nmethod = "measured"\nkv_bytes = 0.1\nshares = [1, 1, 1, 2, 2, 5]\n')
    tuned = recipes.load(str(tmp_path / "tuned.toml"))
    recipe = accuracy_curve.recipe_of("keydiff", 12, 80, tuned)
    assert (recipe.importance.method, recipe.quantize.method, recipe.budget.kv_bytes) == ("keydiff", "float32", None)
    assert recipe.budget.capacities(recipe.budget.keep * 80, 6, [80] * 6) == [6, 6, 6, 12, 12, 30]

    out = tmp_path / "curve.json"
    command = ["--suites", "page1", "--methods", "random", "--ratios", "0.9", "--limit", "2", "--json", str(out)]
    assert accuracy_curve.main([*command, "--recipe", str(tmp_path / "tuned.toml")]) == 0
    cells = json.loads(out.read_text())["cells"]
    assert [cell["method"] for cell in cells] == [NOTHING, "random", "tuned"]
    assert cells[2]["slots"] == pytest.approx(8.2, abs=0.5)
    assert cells[2]["answers"] != cells[1]["answers"]


def test_peers_of_the_same_weights_and_questions_stand_beside_ours(tmp_path: Path) -> None:
    assert [cell.method for cell in curve.peers(_peers(tmp_path), OURS, curve.DEMO)] == ["kvpress tova"]


OURS = [Cell("page1", NOTHING, 0.0, 82, 82.0, 4, 4, "abc"), Cell("page1", "snapkv", 0.5, 41, 82.0, 4, 4, "abc")]


def _peers(folder: Path, **changes: Any) -> Path:
    theirs = [OURS[0], *(Cell("page1", "tova", ratio, 41.5, 82.0, 4, 1, "x") for ratio in (0.5, 0.9))]
    theirs.append(Cell("page4", "tova", 0.5, 143.0, 287.0, 4, 1, "x"))
    data = {
        "checkpoint_sha256": curve.weights(curve.DEMO),
        "suites_sha256": {"page1": curve.held_out.fingerprint("page1")},
        "cells": [cell.as_json() for cell in theirs],
    }
    (folder / "peers.json").write_text(json.dumps(data | changes))
    return folder / "peers.json"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"checkpoint_sha256": {"model.safetensors": "0"}}, "other weights"),
        ({"suites_sha256": {"page1": "0"}}, "no page1, or one with other questions"),
        ({"suites_sha256": {}}, "no page1, or one with other questions"),
        ({"cells": []}, "another number of questions of page1 than 4"),
        ({"cells": [OURS[0].as_json() | {"questions": 5}]}, "another number of questions of page1 than 4"),
        ({"cells": [OURS[0].as_json() | {"answers": "abd"}]}, "with nothing dropped page1 got other answers"),
        ({"cells": [{"suite": "page1"}]}, "missing key 'method'"),
        ({"cells": 3}, "not a file that scripts/kvpress_curve.py wrote"),
        ({"suites_sha256": []}, "not a file that scripts/kvpress_curve.py wrote"),
    ],
)
def test_peers_measured_on_something_else_are_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        curve.peers(_peers(tmp_path, **changes), OURS, curve.DEMO)


def test_the_summary_names_the_best_of_kvpress_at_every_ratio() -> None:
    rights = {
        "snapkv": (4, 3),
        "random": (1, 0),
        "kvpress tova": (3, 2),
        "kvpress cur": (4, 2),
        "kvpress knorm": (0, 0),
    }
    cells = [Cell("page1", NOTHING, 0.0, 82, 82.0, 4, 4)]
    for method, right in rights.items():
        cells += [Cell("page1", method, ratio, 9, 82.0, 4, n) for ratio, n in zip((0.5, 0.9), right, strict=True)]
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in curve.summary(cells, ["snapkv"]).splitlines()]
    assert lines[0] == ["suite", "dropped", "snapkv", "best of kvpress"]
    assert lines[2:] == [
        ["page1", "50%", "100.0 ± 0.0", "100.0 ± 0.0 (cur)"],
        ["page1", "90%", "75.0 ± 21.7", "50.0 ± 25.0 (tova)"],
    ]
    pytest.importorskip("matplotlib")
    drawn = curve.plot(cells)
    assert drawn.count("<!-- best of kvpress -->") == 1
    assert "<!-- kvpress cur -->" not in drawn


def test_answers_are_judged_word_for_word() -> None:
    right, digest = curve.judged([" Yes", "0 9 7", "0 9"], ["yes", "0 9 7", "0 9 7"])
    assert right == 2
    assert digest == curve.judged(["yes", "0 9 7", "0 9 "], ["", "", ""])[1]
    assert digest != curve.judged(["yes", "0 9 7", "0 9 7"], ["", "", ""])[1]


def test_without_kvpress_its_curve_says_where_it_runs(capsys: pytest.CaptureFixture[str]) -> None:
    assert kvpress_curve.main([]) == 2
    assert "needs an environment of its own" in capsys.readouterr().err


def test_a_plot_has_a_panel_a_suite_and_a_line_a_method() -> None:
    pytest.importorskip("matplotlib")
    cells = [
        Cell(suite, method, ratio, 10, 80.0, 4, correct)
        for suite in ("page1", "page4")
        for method, ratio, correct in [(NOTHING, 0.0, 4), ("snapkv", 0.5, 3), ("random", 0.5, 1)]
    ]
    drawn = curve.plot(cells)
    assert drawn.startswith("<?xml")
    for text in ("page1", "page4", "snapkv", "random"):
        assert drawn.count(f"<!-- {text} -->") == 1
    assert f"<!-- {NOTHING} -->" not in drawn
    assert curve.plot(cells) == drawn


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--suites", "page3"], "no suite 'page3'"),
        (["--methods", "luck"], "no method 'luck': choose from snapkv,"),
        (["--ratios", "0.5,1"], "give numbers between 0 and 1, got '0.5,1'"),
        (["--ratios", "half"], "give numbers between 0 and 1, got 'half'"),
        (["--recipe", "light"], "recipe light has no measured layer budget"),
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

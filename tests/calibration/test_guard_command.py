"""The guard's command: its table, its verdicts, and what it says is lighter; one line for each mistake."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from calibration import __main__ as command_line
from calibration import guard as guards
from engines.config import parse
from engines.guard import Verdict
from export.recipe import Recipe
from tests.calibration.guarded import HARD, guarded_folder, short_answers  # noqa: F401  # fixtures
from tests.calibration.test_verdict import verdict


def test_command_prints_a_table_and_exits_with_1(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hard, off = ["--recipe", str(tmp_path / "hard.toml")], ["--recipe", "off"]
    (tmp_path / "hard.toml").write_text(HARD)
    common = ["guard", str(folder), "--share", "0.5"]
    assert command_line.main([*common, *off]) == 0
    out, error = capsys.readouterr()
    assert out.splitlines()[0].startswith("| figure")
    assert "off holds" in out
    assert "samples are few" in error
    assert command_line.main([*common, *hard, "--limits", "logit_kl=0,layers=1"]) == 1
    out = capsys.readouterr().out
    assert "hard is refused: attention KL" in out
    assert "| NO" in out
    assert "attention KL, layer 2" in out
    assert "attention KL, layer 1" not in out
    assert command_line.main([*common, *hard, "--lighten", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    verdicts = [parse(Verdict, verdict, "verdict") for verdict in told["verdicts"]]
    assert [verdict.holds for verdict in verdicts] == [False] * (len(verdicts) - 1) + [True]
    assert [verdict.recipe for verdict in verdicts[:2]] == ["hard", "hard-lighter-1"]
    assert parse(Recipe, told["recipe"], "recipe").name == verdicts[-1].recipe
    assert command_line.main([*common, *hard, "--lighten", "--limit", "2"]) == 0
    assert "it says: budget.keep = " in capsys.readouterr().out
    assert command_line.main([*common, *hard, "--lighter", hard[1], "--lighter", "off", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [verdict["recipe"] for verdict in told["verdicts"]] == ["hard", "hard", "off"]
    assert command_line.main([*common, *hard, "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["recipe"] is None


def test_what_is_lighter_is_told_from_the_recipe_that_became_so(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Judge:
        def __init__(self, *_: Any) -> None:
            pass

        def first(self, candidates: Iterable[Recipe], later: bool) -> list[tuple[Recipe, Verdict]]:
            chosen = itertools.islice(candidates, 3)
            return [(recipe, verdict(recipe=recipe.name, logit_kl=math.nan)) for recipe in chosen]

    monkeypatch.setattr(guards, "Guard", Judge)
    (first := tmp_path / "first.toml").write_text('merge = "three-way"\n[budget]\nkeep = 0.6\n')
    (second := tmp_path / "second.toml").write_text("[budget]\nkeep = 0.2\n")
    words = ["guard", str(folder), "--recipe", str(first), "--lighter", str(second), "--lighten"]
    assert command_line.main(words) == 0
    says = [line for line in capsys.readouterr().out.splitlines() if line.startswith("it says: ")]
    assert says == [f"it says: budget.keep = {0.2 * 1.5}"]
    assert command_line.main([*words, "--json"]) == 0
    assert [told["logit_kl"] for told in json.loads(capsys.readouterr().out)["verdicts"]] == [None] * 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--recipe"),
        (["--recipe", "nothing"], "no recipe 'nothing'"),
        (["--recipe", "off", "--samples", "nowhere"], "samples.jsonl does not exist"),
        (["--recipe", "off", "--held-out", "nowhere"], "samples.jsonl does not exist"),
        (["--recipe", "off", "--limits", "speed=1"], "unknown key 'speed'; known keys: attention_kl"),
        (["--recipe", "off", "--limits", "logit_kl"], "must be NAME=NUMBER"),
        (["--recipe", "off", "--limits", "logit_kl=-1"], "logit_kl must be at least 0"),
        (["--recipe", "off", "--limits", "layers=0"], "layers must be at least 1"),
        (["--recipe", "off", "--limits", "layers=1.5"], "expected int"),
        (["--recipe", "off", "--map", "nowhere"], "nowhere is no attention map"),
        (["--recipe", "off", "--limit", "0"], "must be at least 1"),
        (["--recipe", "off", "--share", "0"], "--share: must be a number above 0 and below 1, got '0'"),
        (["--recipe", "off", "--share", "1"], "--share: must be a number above 0 and below 1, got '1'"),
        (["--recipe", "off", "--held-out", "SAMPLES"], "share an image with --samples: give others"),
        (["--recipe", "TIGHT"], "recipe tight: kv_bytes = 0.001 leaves"),
    ],
)
def test_mistakes_are_one_line_and_exit_2(
    folder: Path,
    arguments: list[str],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tight := tmp_path / "tight.toml").write_text("[budget]\nkv_bytes = 0.001\n")
    monkeypatch.setattr(guards.Guard, "__init__", None)  # nothing is read before a mistake is found
    places = {"SAMPLES": str(folder / "samples"), "TIGHT": str(tight)}
    arguments = [places.get(word, word) for word in arguments]
    assert command_line.main(["guard", str(folder), *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1

"""From the command line to files: a recipe that a build takes, the table of all trials, and mistakes in one line."""

from __future__ import annotations

import dataclasses
import itertools
import json
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from calibration import __main__ as command_line
from calibration import candidates, recipe_file, tune, tune_table
from calibration import guard as guards
from calibration.candidates import Draft
from calibration.lighten import changes
from calibration.tune import Trial, compared, rank
from engines.config import parse
from engines.errors import UserError
from engines.gate import Gate
from engines.guard import Failure, Limits, Task, Verdict
from export import recipe as recipes
from export.recipe import Recipe
from tests.calibration import planted
from tests.export import tiny

DEMO = Path(__file__).resolve().parents[2] / "models" / "demo-vlm"
LENIENT = "attention_kl=99,logit_kl=99,perplexity=1000000,blindness=1,drift=99,loops=99"


@pytest.fixture(scope="module", autouse=True)
def short() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(guards, "MOST", 4)
        patch.setattr(tune, "ORDER", (("modalities", lambda bench, best: [candidates.method("modality", "density")]),))
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return planted.save(tmp_path_factory.mktemp("planted") / "checkpoint", count=12)


def test_from_command_to_a_recipe_and_a_table(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "found.toml"
    words = ["tune", str(folder), "--target-bytes-per-token", "450", "--limits", f"{LENIENT},task=100"]
    assert command_line.main([*words, "--out", str(out), "--name", "mine"]) == 0
    recipe, told = recipes.load(str(out)), json.loads(out.with_suffix(".json").read_text())
    first, confirmed = told["trials"][0], told["trials"][-1]
    assert recipe.name == "mine"
    said = {"description": recipe.description}
    assert json.loads(json.dumps(recipe.settings())) == confirmed["recipe"] | said
    assert f"{confirmed['bytes_per_token']:.0f} bytes of KV a prompt token" in recipe.description
    assert [trial["step"] for trial in told["trials"]] == ["base", "modalities", "confirm", "confirm"]
    assert first["bytes_per_token"] <= 450
    command = out.read_text().splitlines()[0].removeprefix("# ")
    assert shlex.split(command)[3:-6] == [*words[:4], "--recipe", "balanced", *words[4:]]
    assert shlex.split(command)[-6:] == ["--seed", "0", "--name", "mine", "--out", str(out)]
    table = out.with_suffix(".md").read_text()
    rows = [line for line in table.splitlines() if line.startswith("| ")]
    assert len(rows) == 1 + len(told["trials"])
    output = capsys.readouterr()
    shown = [line for line in output.out.splitlines() if line.startswith("| ")]
    assert rows[-1].replace(" ", "") == shown[-1].replace(" ", "")
    assert "6 samples to choose recipes by are few" in output.err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["found.json", "found.md", "found.toml", "found.trials"]


def test_a_refused_recipe_is_not_written(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "found.toml"
    words = ["tune", str(folder), "--target-bytes-per-token", "300", "--limits", "logit_kl=0", "--out", str(out)]
    assert command_line.main(words) == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("refused: ")
    assert "nats a token is above 0" in last
    assert "no recipe was written" in last
    assert not out.exists()
    assert out.with_suffix(".md").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "one of the arguments --target-bytes-per-token --target-accuracy is required"),
        (["--target-bytes-per-token", "9", "--target-accuracy", "-1"], "not allowed with argument"),
        (["--target-accuracy", "1"], "must be a number of points from -100 to 0, got '1'"),
        (["--target-accuracy", "much"], "must be a number of points from -100 to 0, got 'much'"),
        (["--target-bytes-per-token", "-3"], "must be a number of bytes above 0, got '-3'"),
        (["--target-bytes-per-token", "9"], "9 bytes a token: recipe tuned: kv_bytes ="),
        (["--target-accuracy", "-1", "--limits", "kl=2"], "unknown key 'kl'"),
        (["--target-accuracy", "-1", "--limits", "logit_kl=0"], "768 bytes a token tuned does not hold: "),
        (["--target-accuracy", "-1", "--name", "a b"], "a recipe's name is letters"),
        (["--target-accuracy", "-1", "--limits", "task=50"], "--target-accuracy is the limit of every task"),
        (["--target-accuracy", "-1", "--out", "/dev/null/recipe.toml"], "/dev/null/recipe.toml cannot be written"),
        (["--target-accuracy", "-1", "--out", "CHECKPOINT/new.toml"], "which is read: choose a place outside of it"),
        (["--target-accuracy", "-1", "--recipe", "tight.toml"], "tuned: kv_bytes = 0.001 leaves"),
        (["--target-accuracy", "-1", "--out", "recipe"], "give a file that ends in .toml"),
        (["--target-accuracy", "-1", "--recipe", "nothing"], "no recipe 'nothing'"),
        (["--target-accuracy", "-1", "--samples", "nowhere"], "samples.jsonl does not exist"),
    ],
)
def test_mistakes_are_one_line_and_leave_no_recipe(
    words: list[str],
    message: str,
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    tight = tmp_path / "tight.toml"
    tight.write_text("[budget]\nkv_bytes = 0.001\n")
    assert command_line.main(["tune", str(folder), *(word.replace("CHECKPOINT", str(folder)) for word in words)]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert [*tmp_path.rglob("*.toml")] == [tight]


def test_too_few_samples_for_three_parts_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    few = tiny.save(tmp_path / "checkpoint", count=2)
    assert command_line.main(["tune", str(few), "--target-accuracy", "-1"]) == 2
    assert "2 samples are too few for three parts" in capsys.readouterr().err


OWN: dict[str, Any] = {
    "unknown": "chat",
    "perception": {"method": "attention", "buckets": [0.25, 0.5], "layers": [1], "quota": 0.5},
    "gate": {},
    "positions": {"scale": 2.0},
    "heads": {"merge": True, "align": True},
    "shorten": {"method": "tome", "rates": [0.25], "video": True},
    "importance": {"method": "signals", "redundancy": 0.0},
    "budget": {"method": "measured", "kv_bytes": 0.1, "shares": [0.1, 0.25]},
    "modality": {"method": "density", "visual_cap": 0.9},
    "merge": "three-way",
    "quantize": {"method": "by-layer", "layers": ["int4", {"method": "int8", "center": False}]},
    "window": {"compact": False},
    "guard": {"task": 1.0},
}


@pytest.mark.parametrize("name", [*recipes.presets(), "pages", "own", "default"])
def test_a_written_recipe_is_the_recipe(name: str, tmp_path: Path) -> None:
    made = {"own": OWN, "default": {}}
    recipe = parse(Recipe, {"name": name} | made[name], name) if name in made else recipes.load(name, DEMO)
    file = tmp_path / "any.other.toml"
    file.write_text(recipe_file.text(recipe, ["a command", ""]))
    assert recipes.load(str(file)).settings() == recipe.settings()
    assert file.read_text().startswith("# a command\n#\nname = ")
    told = recipe_file.settings(recipe)
    assert (told.keys() == {"name"}) == (name == "default")
    assert (recipe.gate == Gate()) == ("gate" in told)


def test_a_recipe_that_cannot_be_is_said_in_one_line() -> None:
    with pytest.raises(UserError, match="1 <= least <= most is needed, got 256 and 128"):
        candidates.knobs("window", least=256)[1](Draft(recipes.load("off")))
    counting = tiny.recipe(quantize={"method": "mixed"}, importance={"method": "snapkv"})
    with pytest.raises(UserError, match="the first needs attention to be counted"):
        candidates.method("importance", "keydiff")[1](Draft(counting))


@given(st.sampled_from([name for name in recipes.presets() if name != "off"]), st.data())
def test_a_move_changes_what_it_says(name: str, data: st.DataObject) -> None:
    base = recipes.load(name)
    moves = [
        *candidates.importance(data.draw(st.booleans())),
        *candidates.weights(Draft(base)),
        *candidates.bits(),
        candidates.heads(0.9, False),
    ]
    told, move = data.draw(st.sampled_from(moves))
    changed = changes(move(Draft(base)).recipe, base)
    table = told.split(".")[0]
    assert {key.split(".")[0] for key in changed} <= {table}
    for part in told.split(", "):
        knob, _, value = part.removeprefix(f"{table}.").partition(" = ")
        assert str(getattr(getattr(move(Draft(base)).recipe, table), knob)) == value


def test_layers_as_measured_and_by_a_rule_exclude_each_other() -> None:
    moves = dict(candidates.layers())
    base = Draft(recipes.load("balanced"), least=0.5)
    assert moves["budget.method = uniform"](base).least is None
    assert moves["layers as measured"](base).least == 0.0


def verdict(holds: bool, right: tuple[float, float], logit_kl: float) -> Verdict:
    return Verdict(
        recipe="a", later=False, holds=holds, reasons=[] if holds else ["logit KL is above"], warnings=[],
        limits=Limits(), calibrated=1, held_out=40, tokens=9, read=7, layers=[1, 2], attention_kl=[[0.1, 0.2], [0.3]],
        logit_kl=logit_kl, perplexity=2.0, perplexity_compressed=3.0, perplexity_change=50.0,
        tasks={"a": Task(10, 60, right[0], right[0] - 60, 3.0), "b": Task(30, 60, right[1], right[1] - 60, 4.0)},
        failures=[
            Failure("blindness", False, 0.25, 0.5, 9, ""), Failure("drift", None, None, 2, 0, ""),
            Failure("loops", False, 0.0, 0, 9, ""),
        ],
    )  # fmt: skip


def test_what_holds_comes_first_then_accuracy_then_logit_kl() -> None:
    ordered = [
        verdict(True, (60, 80), 0.2), verdict(True, (80, 60), 0.1), verdict(True, (80, 60), 0.3),
        verdict(False, (90, 90), 0.01), None,
    ]  # fmt: skip
    for better, worse in itertools.pairwise(ordered):
        assert rank(better) > rank(worse)
        assert better is not None
        assert compared(worse, better)[0]
        assert worse is None or not compared(better, worse)[0]
    assert compared(ordered[1], ordered[0]) == (True, "accuracy 75.0 %, the best so far 65.0 %")  # type: ignore[arg-type]


def test_a_row_has_every_figure_of_the_guard() -> None:
    made = Trial("bits", "int4", {}, 123.46, 0.25, 70.0, verdict(True, (60, 80), 0.0312), True, "better")
    impossible = Trial("heads", "all", {}, why="not possible: no heads")
    head, _, row, other = (
        [cell.strip() for cell in line.split("|")[1:-1]] for line in tune_table.lines([made, impossible])
    )
    told = dict(zip(head, row, strict=False))
    assert told["change, points"] == "+15.0 ± 3.1"  # sqrt((10 * 3)² + (30 * 4)²) / 40
    assert told["attention KL"] == "0.3"
    assert (told["blind"], told["drift"], told["loops"]) == ("0.25", "", "0")
    assert (told["bytes a token"], told["KV"], told["exact %"], told["logit KL"]) == ("123.5", "0.250", "70.0", "0.031")
    assert (told["kept"], told["why"]) == ("yes", "better")
    assert (other[0], other[-1], {*other[2:-1]}) == ("heads", "not possible: no heads", {""})
    assert "123 bytes of KV a prompt token, 25.0% of fp16" in tune_table.description(made)
    assert dataclasses.asdict(made)["verdict"]["logit_kl"] == 0.0312

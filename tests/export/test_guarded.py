"""A build under guard: what it refuses leaves nothing behind, what it lightens it tells, and the bundle says it all."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from calibration import __main__ as calibration
from calibration import samples
from engines import bundle
from export import build
from runtime.__main__ import main as runtime
from tests.calibration.guarded import HARD, short_answers  # noqa: F401  # fixtures
from tests.export import tiny
from tests.export.conftest import DEMO

BLIND = """
[importance]
method = "streaming-llm"
[budget]
keep = 0.05
[protect]
sinks = 0
recent = 1
[window]
least = 8
most = 8
recent = 0.0
"""
SMALL = ["--images", "1", "--text-tokens", "8", "--jobs", "1", "--kernels", "never"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tiny.save(tmp_path_factory.mktemp("tiny") / "checkpoint", count=8)
    lines = [{"images": [f"{i}.png"], "prompt": "what color ?", "answer": "red circle blue"} for i in range(8)]
    (folder / "samples" / samples.FILE).write_text("\n".join(map(json.dumps, lines)))
    return folder


@pytest.fixture
def hard(tmp_path: Path) -> Path:
    (tmp_path / "hard.toml").write_text(HARD)
    return tmp_path / "hard.toml"


def test_a_recipe_file_that_breaks_its_limits_ends_the_build(
    folder: Path, hard: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "built" / "bundle"
    out.parent.mkdir()
    assert build.main([str(folder), "--out", str(out), "--recipe", "off", "--recipe", str(hard), *SMALL]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: recipe hard is refused: attention KL ")
    assert error.count("\n") == 1
    assert list(out.parent.iterdir()) == []


def test_what_a_build_lightens_is_in_the_bundle_with_the_figures_of_the_guards_command(
    folder: Path, hard: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "bundle"
    arguments = [str(folder), "--out", str(out), "--recipe", "off", "--recipe", str(hard), "--guard", "lighten", *SMALL]
    assert build.main(arguments) == 0
    told = capsys.readouterr().out
    assert "level hard is refused as it was given: attention KL " in told
    assert "warning: 6 samples are few" in told
    level = bundle.read(out).manifest.levels["hard"]
    assert f"level hard: {level.guard.line}\n" in told
    assert level.recipe["name"] == "hard"
    assert level.recipe["budget"]["keep"] == level.guard.lightened["budget.keep"] > 0.2

    assert calibration.main(["guard", str(folder), "--recipe", str(hard), "--lighten", "--json"]) == 0
    by_command = json.loads(capsys.readouterr().out)["verdicts"]
    assert [near(verdict) for verdict in by_command] == [dataclasses.asdict(each) for each in level.guard.verdicts]
    assert level.guard.verdicts[-1].holds

    runtime(["info", str(out)])
    lines = capsys.readouterr().out.splitlines()
    assert f"  guard: {level.guard.line}" in lines
    assert "  guard: uncompressed: the other levels are compared with it" in lines
    assert level.guard.line.startswith("holds on 2 held-out samples: attention KL ")
    runtime(["info", str(out), "--json"])
    plain = json.loads(capsys.readouterr().out)["levels"]["hard"]["guard"]
    assert plain == json.loads(json.dumps(dataclasses.asdict(level.guard)))


def near(value: Any) -> Any:
    """Equal to what differs in the last digits: a build's weights are mapped, and lie elsewhere."""
    if isinstance(value, dict):
        return {name: near(each) for name, each in value.items()}
    if isinstance(value, list):
        return [near(each) for each in value]
    return pytest.approx(value, rel=1e-3, abs=1e-6) if isinstance(value, float) else value


def test_a_blind_recipe_is_refused_with_its_remedy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "blind.toml").write_text(BLIND)
    known = tmp_path / "pages"
    shutil.copytree(DEMO / "samples", known)
    lines = [json.loads(line) for line in (known / samples.FILE).read_text().splitlines()]
    pages = [line for line in lines if line["task"] == "page" and len(line["images"]) == 1]
    (known / samples.FILE).write_text("\n".join(map(json.dumps, pages)))
    out = str(tmp_path / "bundle")
    assert build.main(["--out", out, "--samples", str(known), "--recipe", str(tmp_path / "blind.toml"), *SMALL]) == 2
    error = capsys.readouterr().err
    assert "visual blindness: " in error
    assert "keep more visual tokens: raise  [budget] keep" not in error  # spaces are folded
    assert "keep more visual tokens: raise [budget] keep" in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("arguments", [["--guard", "perhaps"], ["--held-out", "nowhere"]])
def test_mistakes_are_one_line(
    folder: Path, tmp_path: Path, arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert build.main([str(folder), "--out", str(tmp_path / "out"), "--recipe", "light", *arguments]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_help_tells_what_becomes_of_a_level(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        build.main(["--help"])
    told = " ".join(capsys.readouterr().out.split())
    assert "auto lightens recipes called by name and refuses .toml files" in told

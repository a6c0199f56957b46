"""scripts/figures.py: what is printed is what is kept, and tells where it was measured."""

from __future__ import annotations

from pathlib import Path

import pytest

import figures
from engines.errors import UserError
from plots import Panel


def some() -> figures.Figures:
    tables = {"": [["who", "ms"], ["ours", "1.0"]], "two threads": [["who", "ms"], ["theirs", "2.0"]]}
    panels = [
        Panel("lines", "x", "y", {"ours": [[1.0, 2.0], [4.0, 1.0]]}, True),
        Panel("bars", "", "y", {"a": [[3.0]]}),
    ]
    return figures.Figures("python scripts/x.py", tables, ["ms: a call."], {"seconds": [0.001]}, panels)


def test_what_is_kept_is_read_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    some().report(tmp_path / "x.json")
    assert figures.read(tmp_path / "x.json") == some()
    printed = capsys.readouterr().out
    assert printed == some().text()
    assert "| ours | 1.0 |" in printed
    assert "two threads:\n\n| who    | ms  |" in printed
    assert figures.processor() in printed
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x.json", "x.svg"]
    drawn = (tmp_path / "x.svg").read_text()
    assert drawn.count("<!-- ours -->") == 1
    assert "<!-- bars -->" in drawn
    some().report(tmp_path / "x.json")
    assert (tmp_path / "x.svg").read_text() == drawn


def test_without_panels_there_is_no_plot(tmp_path: Path) -> None:
    figures.Figures("x", {"": [["a"]]}, [], {}).report(tmp_path / "x.json")
    assert [path.name for path in tmp_path.iterdir()] == ["x.json"]


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"command": "x", "surprise": 1}'])
def test_a_file_of_something_else_is_one_line(tmp_path: Path, text: str) -> None:
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(UserError, match="no figures of a benchmark"):
        figures.read(tmp_path / "x.json")


def test_where_a_run_writes_is_no_part_of_what_to_type() -> None:
    argv = ["build/demo vlm", "--json", "x.json", "--times", "3"]
    assert figures.typed("x.py", argv) == "python scripts/x.py 'build/demo vlm' --times 3"
    assert figures.typed("x.py", ["--json=x.json"]) == "python scripts/x.py"


def test_packages_that_are_not_installed_have_no_version() -> None:
    assert set(figures.versions(["numpy", "no-such-package"])) == {"numpy"}

"""scripts/benchmarks.py: what BENCHMARKS.md says was measured, and a target is met only where a figure says so."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

import benchmarks
import figures
from benchmarks import BENCHMARKS, TARGETS, Benchmark, Target

MEASURES = """\
import json, sys
sys.path[:0] = [{scripts!r}, {root!r}]
from figures import Figures
from pathlib import Path
assert Path(sys.argv[1]).is_dir()
table = {{"": [["who", "x"], ["ours", "2.0"]]}}
Figures("python scripts/x.py", table, ["x: ratio."], {{"x": 2.0}}).report(Path(sys.argv[3]))
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project with one benchmark, that measures one folder, and two targets."""
    scripts = Path(benchmarks.__file__).parent
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "x.py").write_text(MEASURES.format(scripts=str(scripts), root=str(scripts.parent)))
    (tmp_path / "scripts" / "make.py").write_text("import sys, pathlib; pathlib.Path(sys.argv[1]).mkdir()\n")
    one = Benchmark("The one", "x.py", [benchmarks.WORK / "made"], ["made"])
    monkeypatch.setattr(benchmarks, "ROOT", tmp_path)
    monkeypatch.setattr(benchmarks, "BENCHMARKS", {"one": one, "other": Benchmark("The other", "none.py")})
    monkeypatch.setattr(benchmarks, "MADE", {"made": ["scripts/make.py"]})
    found = lambda values: values["x"]  # noqa: E731
    targets = [Target("fast", "one", 1.5, True, found), Target("slow", "one", 1.5, False, found)]
    monkeypatch.setattr(benchmarks, "TARGETS", [*targets, Target("there", "other", 1, True, found)])
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_what_is_measured_is_written_down(project: Path) -> None:
    assert benchmarks.main(["one"]) == 0
    text = (project / "BENCHMARKS.md").read_text()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("| ")]
    assert rows[1:4] == [
        ["fast", "≥ 1.5", "2", "yes"],
        ["slow", "≤ 1.5", "2", "no"],
        ["there", "≥ 1", "not measured", ""],
    ]
    assert figures.read(project / "benchmarks" / "one.json").text() in text
    assert "python scripts/x.py" in text
    assert "Not measured:  python scripts/benchmarks.py other" in text


def test_rendering_measures_nothing(project: Path) -> None:
    assert benchmarks.main(["--render"]) == 0
    assert "Not measured:  python scripts/benchmarks.py one" in (project / "BENCHMARKS.md").read_text()
    assert not (project / "build").exists()


def test_what_fails_leaves_the_file_as_it_was(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (project / "BENCHMARKS.md").write_text("before")
    assert benchmarks.main([]) == 2
    assert "scripts/none.py ended with 2" in capsys.readouterr().err
    assert (project / "BENCHMARKS.md").read_text() == "before"
    assert (project / "benchmarks" / "one.json").exists()  # the next time begins behind it


def test_damaged_figures_are_one_line(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (project / "benchmarks").mkdir()
    (project / "benchmarks" / "one.json").write_text(json.dumps({"command": "x"}))
    assert benchmarks.main(["--render"]) == 2
    assert "measure them again" in capsys.readouterr().err


def test_every_benchmark_is_a_script_with_a_smoke_test_and_every_target_of_one() -> None:
    root = Path(benchmarks.__file__).parents[1]
    for each in BENCHMARKS.values():
        assert (root / "scripts" / each.script).is_file()
        assert (root / "tests" / "scripts" / f"test_{each.script}").is_file()
        assert {*each.needs} <= {*benchmarks.MADE}
    assert {target.benchmark for target in TARGETS} <= {*BENCHMARKS}


def test_the_committed_file_is_of_the_committed_figures() -> None:
    """Whoever measures anew renders it too."""
    root = Path(benchmarks.__file__).parents[1]
    known = {name: figures.read(file) for name in BENCHMARKS if (file := root / "benchmarks" / f"{name}.json").exists()}
    written = (root / "BENCHMARKS.md").read_text() if known else benchmarks.render({})
    assert written == benchmarks.render(known)


def test_python_is_the_one_that_runs_it(project: Path) -> None:
    (project / "scripts" / "x.py").write_text("import sys; open('python', 'w').write(sys.executable); sys.exit(1)\n")
    assert benchmarks.main(["one"]) == 2
    assert (project / "python").read_text() == sys.executable

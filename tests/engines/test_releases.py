from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import onnxruntime
import pytest
from packaging.requirements import Requirement

from engines import releases
from engines.errors import UserError
from engines.ort import OrtSession, ort_status
from engines.releases import ALSO, OLDEST, check, check_installed, installed

ROOT = Path(__file__).resolve().parents[2]
STATED = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_they_are_those_that_pip_reads() -> None:
    stated = [Requirement(line) for line in (*STATED["dependencies"], *STATED["optional-dependencies"]["export"])]
    assert {each.name: str(each.specifier) for each in stated if each.name in OLDEST} == {
        name: f">={least}" for name, least in OLDEST.items()
    }


def test_the_docs_state_them() -> None:
    told = " ".join((ROOT / "docs/releases.md").read_text().split())
    assert not [f"{name} {least}" for name, least in OLDEST.items() if f"{name} {least}" not in told]


@pytest.mark.parametrize("name", OLDEST)
def test_what_is_too_old_is_named_with_what_to_type(name: str) -> None:
    for fine in (OLDEST[name], f"{OLDEST[name]}.0+cpu", f"{OLDEST[name]}.0a0", "99", installed(name), None):
        check(name, fine)
    for old in ("0.1", "0.0.9.dev2", re.sub(r"\d+$", lambda n: str(int(n[0]) - 1), OLDEST[name]) + ".99"):
        with pytest.raises(UserError, match=rf"^{name} {re.escape(old)} is too old: pip install '{name}>=\d") as error:
            check(name, old)
        assert all(f"{other}>={OLDEST[name]}" in str(error.value) for other in ALSO.get(name, ()))


def test_a_package_of_another_name_is_the_module_too(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {"onnxruntime-gpu": "1.24.1"}

    def version(name: str) -> str:
        if name not in known:
            raise releases.PackageNotFoundError(name)
        return known[name]

    monkeypatch.setattr(releases, "version", version)
    assert [installed("onnxruntime"), installed("torch")] == ["1.24.1", None]
    check_installed()
    known["onnxruntime-gpu"] = "1.22"
    with pytest.raises(UserError, match=r"onnxruntime 1\.22 is too old"):
        check_installed()


def test_an_older_onnx_runtime_runs_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(onnxruntime, "__version__", "1.22.1")
    assert (ort_status().available, "1.22.1 is too old: pip install" in ort_status().reason) == (False, True)
    with pytest.raises(UserError, match=r"1\.22\.1 is too old"):
        OrtSession(tmp_path / "x.onnx")


@pytest.mark.parametrize(
    "line",
    [
        ["export/build.py", "models/demo-vlm", "--out", "{out}"],
        ["-m", "calibration", "plan", "--device", "h200", "--model", "models/demo-vlm"],
        ["scripts/bench_quality.py"],
    ],
    ids=["build", "calibration", "script"],
)
def test_older_packages_end_a_command_in_one_line(line: list[str], tmp_path: Path) -> None:
    """One that fails while it is imported, as older releases do."""
    (tmp_path / "transformers").mkdir()
    (tmp_path / "transformers/__init__.py").write_text("from os import nothing_of_this_name\n")
    (tmp_path / "transformers-4.57.6.dist-info").mkdir()
    (tmp_path / "transformers-4.57.6.dist-info/METADATA").write_text("Name: transformers\nVersion: 4.57.6\n")
    arguments = [part.format(out=tmp_path / "out") for part in line]
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={"PATH": "", "PYTHONPATH": f"{tmp_path}:{ROOT}"},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert done.stderr.startswith("error: ")
    assert done.stderr.endswith("transformers 4.57.6 is too old: pip install 'transformers>=5.24'\n")
    assert not (tmp_path / "out").exists()

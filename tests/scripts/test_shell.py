"""The shell scripts, with a stand-in for Python that writes down what it was asked: nothing is downloaded."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from engines.plugins import cuda_library

ROOT = Path(__file__).resolve().parents[2]
SHELL = [*sorted(ROOT.glob("scripts/*.sh")), ROOT / ".ci/run"]
EXTRAS = "export,scripts"

# A python whose `-m` and scripts only go into a log; `-m venv DIR` makes a folder with itself in it.
PYTHON = f"""#!/usr/bin/env bash
printf '%s\\n' "$*" >>"$LOG"
case "$*" in
    "-m pip --version" | -V | -VV) echo "Python 3.test" ;;
    "-m venv "*) mkdir -p "${{@: -1}}/bin" && cp "$0" "${{@: -1}}/bin/python" ;;
    "-m pip install "*) exit "${{PIP_FAILS:-0}}" ;;
    "-c import sys"*) exec {sys.executable} "$@" ;;
    *"import easy_vqa"*) printf '/i/1.png\\twhat color?\\tred\\n' ;;
    *"${{FAILING:-no such command}}"*) exit 3 ;;
esac
"""


class Checkout:
    """A copy of the scripts in a folder with a space in its name, and the stand-in for Python."""

    def __init__(self, folder: Path) -> None:
        self.root, self.log = folder / "a clone", folder / "log"
        for name in ("pyproject.toml", "constraints.txt", ".ci/run", *(f"scripts/{s.name}" for s in SHELL[:-1])):
            (self.root / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, self.root / name)
        (self.root / "engines").mkdir()
        (self.root / "engines/__init__.py").touch()
        self.python = folder / "python"
        self.python.write_text(PYTHON)
        self.python.chmod(0o755)
        self.log.touch()

    def run(self, *command: object, cwd: Path | None = None, **env: str) -> subprocess.CompletedProcess[str]:
        values = os.environ | {"PYTHON": str(self.python), "LOG": str(self.log)} | env
        return subprocess.run(
            ["bash", *map(str, command)],
            cwd=cwd or self.root,
            env=values,
            capture_output=True,
            text=True,
            input="not for the script\n",
            timeout=60,
        )

    def environment(self, extras: str = EXTRAS, **env: str) -> subprocess.CompletedProcess[str]:
        return self.run("scripts/environment.sh", extras, cwd=None, **env)

    def asked(self, beginning: str) -> list[str]:
        """The calls of Python that begin so."""
        return [line for line in self.log.read_text().splitlines() if line.startswith(beginning)]

    @property
    def installs(self) -> int:
        return len(self.asked("-m pip install"))

    @property
    def venvs(self) -> int:
        return len(self.asked("-m venv"))


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


@pytest.mark.parametrize("script", SHELL, ids=lambda path: path.name)
def test_script_is_executable_and_parses(script: Path) -> None:
    assert os.access(script, os.X_OK)
    assert subprocess.run(["bash", "-n", script], capture_output=True).returncode == 0


def test_environment_installs_once_with_the_constraints(checkout: Checkout) -> None:
    assert checkout.environment().returncode == 0
    (install,) = checkout.asked("-m pip install")
    assert f"--constraint {checkout.root}/constraints.txt --editable {checkout.root}[{EXTRAS}]" in install
    second = checkout.environment()
    assert (second.returncode, checkout.venvs, checkout.installs) == (0, 1, 1)
    assert "up to date" in second.stdout


def test_environment_installs_headers_for_tests_without_their_dependencies(checkout: Checkout) -> None:
    checkout.environment()
    assert not [line for line in checkout.asked("-m pip install") if "--no-deps" in line]
    checkout.environment("export,dev")
    (install,) = (line for line in checkout.asked("-m pip install") if "--no-deps" in line)
    pin = re.search(r"kernel-lens==\S+", install)
    assert pin
    assert pin[0] == f"kernel-lens=={cuda_library.HEADER_RELEASE}"  # which is told where there are none

    script = checkout.root / "scripts/environment.sh"
    script.write_text(script.read_text().replace(pin[0], "kernel-lens==9.9"))  # another release is a change
    checkout.environment("export,dev")
    assert "--no-deps kernel-lens==9.9" in checkout.asked("-m pip install")[-1]


@pytest.mark.parametrize("changed", ["pyproject.toml", "constraints.txt"])
def test_environment_follows_a_change(changed: str, checkout: Checkout) -> None:
    checkout.environment()
    (checkout.root / changed).write_text((checkout.root / changed).read_text() + "# changed\n")
    checkout.environment()
    assert (checkout.venvs, checkout.installs) == (1, 2)


def test_environment_follows_a_new_package_and_a_moved_folder(checkout: Checkout) -> None:
    checkout.environment()
    (checkout.root / "runtime").mkdir()
    (checkout.root / "runtime/__init__.py").touch()
    checkout.environment()
    assert checkout.installs == 2
    checkout.root = checkout.root.rename(checkout.root.with_name("moved"))
    checkout.environment()
    assert checkout.installs == 3


def test_environment_takes_a_copy_away(checkout: Checkout) -> None:
    checkout.environment()
    copy = checkout.root / ".venv/lib/python3.11/site-packages/engines/__init__.py"  # as `pip install .` leaves it
    copy.parent.mkdir(parents=True)
    copy.touch()
    assert "up to date" not in checkout.environment().stdout
    assert checkout.installs == 2


def test_environment_adds_extras_without_taking_others_away(checkout: Checkout) -> None:
    checkout.environment("export,scripts")
    checkout.environment("export,scripts,dev")
    checkout.environment("export,scripts")
    assert (checkout.venvs, checkout.installs) == (1, 3)  # dev: and the headers


def test_environment_makes_anew_what_a_failed_install_left(checkout: Checkout) -> None:
    failed = checkout.environment(PIP_FAILS="1")
    assert failed.returncode == 2
    assert "pip could not install" in failed.stderr
    assert checkout.environment().returncode == 0
    assert (checkout.venvs, checkout.installs) == (2, 2)
    assert "up to date" in checkout.environment().stdout


@pytest.mark.parametrize("damage", ["bin/python", "bin"])
def test_environment_repairs_a_broken_one(damage: str, checkout: Checkout) -> None:
    checkout.environment()
    target = checkout.root / ".venv" / damage
    shutil.rmtree(target) if target.is_dir() else target.unlink()
    repaired = checkout.environment()
    assert "making it anew" in repaired.stdout
    assert (repaired.returncode, checkout.venvs, checkout.installs) == (0, 2, 2)


def test_environment_refuses_an_old_python(checkout: Checkout) -> None:
    old = checkout.python.with_name("old")
    old.write_text("#!/bin/sh\nexit 1\n")
    old.chmod(0o755)
    result = checkout.environment(PYTHON=str(old))
    assert (result.returncode, result.stderr) == (2, f"error: PYTHON={old} is not a Python 3.11 or newer\n")
    assert not (checkout.root / ".venv").exists()


@pytest.mark.parametrize("extras", ["", "export; rm -rf x", "a b"])
def test_environment_refuses_strange_extras(extras: str, checkout: Checkout) -> None:
    assert checkout.environment(extras).returncode == 2
    assert checkout.log.read_text() == ""


TESTS = ["-m ruff check .", "-m ruff format --check .", "-m mypy", "-m pytest -n 2 --dist worksteal"]


def test_test_runs_every_check_and_passes_arguments_to_pytest(checkout: Checkout, tmp_path: Path) -> None:
    link = tmp_path / "link.sh"
    link.symlink_to(checkout.root / "scripts/test.sh")
    result = checkout.run("link.sh", "-m", "not slow", cwd=tmp_path)
    assert result.returncode == 0
    assert [c for c in checkout.asked("-m") if " pip " not in c][1:] == [*TESTS[:-1], f"{TESTS[-1]} -m not slow"]
    assert (checkout.root / ".venv/bin/python").exists()


@pytest.mark.parametrize("failing", range(len(TESTS)))
def test_test_fails_with_the_first_check_that_fails(failing: int, checkout: Checkout) -> None:
    result = checkout.run("scripts/test.sh", FAILING=TESTS[failing].removeprefix("-m "))
    assert result.returncode == 3
    assert [c for c in checkout.asked("-m") if " pip " not in c][1:] == TESTS[: failing + 1]


def test_ci_runs_exactly_test_sh(checkout: Checkout, tmp_path: Path) -> None:
    (checkout.root / "scripts/test.sh").write_text('echo "arguments: $#"; read -r line || echo "no input"; exit 5\n')
    result = checkout.run("a clone/.ci/run", cwd=tmp_path)
    assert (result.returncode, result.stdout, result.stderr) == (5, "arguments: 0\nno input\n", "")


def test_quickstart_builds_asks_and_measures(checkout: Checkout, tmp_path: Path) -> None:
    result = checkout.run("a clone/scripts/quickstart.sh", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    calls = checkout.log.read_text()
    wanted = [
        "export/build.py",
        "-m runtime ask build/demo-vlm --image /i/1.png what color?",
        "scripts/ask_easy_vqa.py build/demo-vlm",
        "scripts/accuracy.py build/demo-vlm --levels off,",
    ]
    places = [calls.index(call) for call in wanted]
    assert places == sorted(places)
    assert "(truth: red)" in result.stdout


@pytest.mark.parametrize("failing", ["export/build.py", "-m runtime ask", "ask_easy_vqa", "scripts/accuracy.py"])
def test_quickstart_stops_where_a_step_fails(failing: str, checkout: Checkout) -> None:
    assert checkout.run("scripts/quickstart.sh", FAILING=failing).returncode == 3
    assert failing in checkout.log.read_text().splitlines()[-1]


def test_every_direct_dependency_is_pinned_exactly() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    groups = [project["dependencies"], *project["optional-dependencies"].values()]
    direct = {requirement.name: requirement for group in groups for requirement in map(Requirement, group)}
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]
    pins = dict(line.split("==") for line in lines)
    assert set(pins) == set(direct)
    for name, version in pins.items():
        assert direct[name].specifier.contains(version), f"{name}=={version} is not allowed by pyproject.toml"
    assert pins["torch"] == "2.13.0"


@pytest.mark.parametrize(
    "path", [ROOT / "pyproject.toml", ROOT / "constraints.txt", *SHELL], ids=lambda path: path.name
)
def test_no_package_index_is_named(path: Path) -> None:
    assert not re.search(r"https?://|--(extra-)?index-url|--find-links", path.read_text())
